"""Settings of the state machine, derived from the config."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from jaxroll.config import Config
from jaxroll.config.derived import age_limiter
from jaxroll.errors import ConfigError
from jaxroll.policy.filters import Filter
from jaxroll.policy.limiter import AgeLimiter

BACKOFF_FIRST_S = 0.5
BACKOFF_MAX_S = 30.0
CHECKPOINT_WANTED_AT = 0.8  # of what may be retained
FILTERED = "filtered"  # first part of the reason of a rejected group; the filter's reason follows a colon
_DEAD_WINDOWS = 4  # fewer would end a run by chance if its environment fails for half of the prompts
END_OF_DATA = "end of data"  # reason of a run that ends because all prompts are used


@dataclass(frozen=True)
class Settings:
    """The rules of one run. Units are in the names; `steps` is the number of claims the run trains."""

    limiter: AgeLimiter
    group_size: int
    steps: int
    seed: int = 0
    order: str = "lease_order"
    on_stale: str = "expire"
    straggler: str = "shrink"
    straggler_deadline_s: float = 300.0
    lease_s: float = 30.0
    infra_retries: int = 5
    data_retries: int = 2
    reissues: int = 3
    retention_bytes: int = 512 * 2**20
    window: str = "full"
    last_batch: str = "deliver"
    filter: Filter = field(default_factory=Filter)
    redundant_members: int = 0
    replicate: str = "auto"
    dead_groups: int = 0  # groups that may die between two claims; 0: no limit
    row_tokens: int = 0  # length of the learner's row, into which a member must fit; 0: no limit
    prompt_tokens: int = 0  # length of a first prompt that the learner keeps apart from its row

    def __post_init__(self) -> None:
        for key, value in (("schedule.group_size", self.group_size), ("schedule.steps", self.steps)):
            if value < 1:
                raise ConfigError(key, value, "must be at least 1")
        for key, value in (("store.lease_s", self.lease_s), ("store.retention_mb", self.retention_bytes)):
            if value <= 0:
                raise ConfigError(key, value, "must be greater than 0")

    @classmethod
    def of(cls, config: Config) -> Settings:
        """The settings given by `config`; ConfigError if they must deadlock."""
        s, store = config.schedule, config.store
        limiter = age_limiter(config)
        return cls(
            limiter, s.group_size, s.steps, config.run.seed, s.order, s.on_stale, s.straggler, s.straggler_deadline_s,
            store.lease_s, store.infra_retries, store.data_retries, store.reissues, store.retention_mb * 2**20,
            s.in_flight_window, s.last_batch,
            Filter(s.filter, s.filter_low, s.filter_high, s.filter_limit, s.on_filter_limit), s.redundant_members,
            s.group_placement,
            store.dead_limit and max(store.dead_limit, _DEAD_WINDOWS * limiter.window(0)),
            config.learner.row_tokens, config.learner.shared_prompt_tokens,
        )  # fmt: skip

    @property
    def members_leased(self) -> int:
        """The number of members of a new group, redundant ones included."""
        return self.group_size + self.redundant_members

    @property
    def members_wanted(self) -> int:
        """The number of members of a group that count, as in `events.Issued`: 0 means all."""
        return self.group_size if self.redundant_members else 0

    @property
    def filter_limit(self) -> int:
        """The number of groups that the filter may reject between two claims."""
        return self.filter.windows * self.limiter.window(0)

    def backoff_s(self, failures: int) -> float:
        """The rest of a member after its `failures`-th INFRA failure, in seconds."""
        return min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** (failures - 1))

    def shuffle_seed(self, step: int) -> int:
        """The seed of the order inside the claim of `step`, in [0, 2³¹)."""
        data = hashlib.blake2b(f"{self.seed}/{step}".encode(), digest_size=4).digest()
        return int.from_bytes(data, "little") >> 1
