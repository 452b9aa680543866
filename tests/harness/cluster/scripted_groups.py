"""A sampler without a model for a learner with one: plausible members of the nano model's vocabulary.

The tokens of a member are a function of its question and its number alone, so two runs that claim the same questions
train on the same bytes, also if a process died in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

import numpy as np

from jaxroll import config as configs
from jaxroll.config import Config
from jaxroll.data import sources
from jaxroll.errors import Closed, NoCredit, StaleClient, StoreRefusal
from jaxroll.records import Finished, Grant, Member, Segment, Task, Version, VersionRun
from jaxroll.store.client import StoreClient
from jaxroll.text import tokenizers

FIRST_CHAR, EOS = 4, 2
AT_START = Version(0, 0)
Stamp = Callable[[Version], Version]


def vocabulary(config: Config) -> int:
    """The vocabulary size of the model of `config`."""
    return tokenizers.build(config.tokenizer, sources.alphabet(config.task)).vocab_size


def finished(task: Task, member: int, version: Version, vocab: int) -> Finished:
    """Rollout `member` of `task`: a prompt, an answer of 2 to 10 tokens, log-probs about uniform, reward 0 or 1."""
    chance = np.random.default_rng([task.index, member])
    question = np.random.default_rng(task.index).integers(FIRST_CHAR, vocab, 8).astype(np.int32)
    answer = np.append(chance.integers(FIRST_CHAR, vocab, chance.integers(1, 10)), EOS).astype(np.int32)
    count = len(answer)
    logprobs = (-np.log(vocab) + 0.1 * chance.standard_normal(count)).astype(np.float32)
    shown = Segment(question, np.zeros(8, np.uint8), np.zeros(8, np.float32))
    said = Segment(answer, np.ones(count, np.uint8), logprobs)
    reward = float((member + task.index) % 3 == 0)
    parts = {"raw_score": reward, "truncated": 0.0}
    return Finished((shown, said), "stop", reward, parts, (VersionRun(version, count),))


class ScriptedSampler:
    """A sampler `sampler-0` on a thread of this process that leases and puts one group at a time, in order.

    `stamp` maps the newest version to the one that tokens are stamped with. `up_to` groups are leased; raise it with
    `allow`. `refusals` are the refused leases, `leased` holds (version of the request, group) of the others.
    """

    def __init__(
        self, address: str, config: Config, *, stamp: Stamp = lambda newest: AT_START, up_to: int = 10**9
    ) -> None:
        self._address, self._config, self._stamp = address, config, stamp
        self._vocab = vocabulary(config)
        self._loop, self._more = asyncio.new_event_loop(), asyncio.Event()
        self.up_to, self.refusals, self.leased = up_to, [], []
        self._thread = threading.Thread(target=self._run, name="scripted-sampler", daemon=True)
        self.failure: BaseException | None = None

    def allow(self, up_to: int) -> None:
        """Allow leases of groups below `up_to`."""
        self.up_to = up_to
        self._loop.call_soon_threadsafe(self._more.set)

    def __enter__(self) -> ScriptedSampler:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(RuntimeError):  # the run is over, and so is the loop
            self._loop.call_soon_threadsafe(self._job.cancel)
        self._thread.join(20)
        if self.failure is not None and exc[0] is None:
            raise self.failure

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._job = self._loop.create_task(self._sample())
        try:
            with contextlib.suppress(asyncio.CancelledError, Closed):
                self._loop.run_until_complete(self._job)
        except BaseException as error:  # noqa: BLE001 - the test's thread raises it
            self.failure = error
        self._loop.close()

    async def _sample(self) -> None:
        digest = configs.digest(self._config)
        client = await StoreClient.connect(self._address, role="sampler", name="sampler-0", config_digest=digest)
        try:
            version: Version | None = None
            while True:
                if max((group for _, group in self.leased), default=-1) + 1 >= self.up_to:
                    await self._more.wait()
                    self._more.clear()
                    version = None
                    continue
                version = await self._version(client) if version is None else version
                try:
                    grants = await client.lease(version, self._config.schedule.group_size, 0.2)
                except (NoCredit, StaleClient) as refusal:
                    self.refusals.append((version, str(refusal)))
                    version = None
                    continue
                for grant in grants:
                    self.leased.append((version, grant.group))
                    await self._put(client, grant, self._stamp(version))
        finally:
            await client.aclose()

    async def _version(self, client: StoreClient) -> Version:
        while (ref := await client.published(None, 5.0)) is None:
            continue
        return ref.version

    async def _put(self, client: StoreClient, grant: Grant, version: Version) -> None:
        for member, attempt in grant.members:
            outcome = finished(grant.task, member, version, self._vocab)
            with contextlib.suppress(StoreRefusal):
                await client.put(Member(grant.group, member, attempt, outcome))
