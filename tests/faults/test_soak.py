"""Soak test: four samplers, one learner, and a kill every few seconds, for ten minutes or JAXROLL_SOAK_S."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.harness.cluster.cluster import LIMIT_S, Cluster, Role
from tests.harness.cluster.criteria import Row, judge, replays
from tests.harness.cluster.scripted_store import StoreOrders

SOAK_S = float(os.environ.get("JAXROLL_SOAK_S", "600"))
SHAPE = (
    "schedule.groups_per_step=4",
    "schedule.group_size=4",
    "schedule.alpha=1",
    "schedule.steps=100000",
    "store.lease_s=6",
    "store.rpc_deadline_s=4",
)
BUDGET_BYTES = 16 * 2**20  # for old records, and for ended trajectories: reached within the test
QUESTIONS = 1000  # in the dataset; the store remembers each one's difficulty, so all must occur by minute two
REFERENCE = (0.05, 0.25)  # shares of the test: one store process runs from here to there, through minute two of ten
MINUTE_TWO = (0.1, 0.2)
LAST = 0.75  # from here on the store is not killed

pytestmark = pytest.mark.process


@dataclass
class Watch:
    """Samples of the store: (seconds of the test, age of the process in s, its number, resident bytes, disk bytes)."""

    began: float = field(default_factory=time.monotonic)
    born: float = 0.0
    life: int = 0
    samples: list[tuple[float, float, int, int, int]] = field(default_factory=list)
    step: int = 0
    moved: float = field(default_factory=time.monotonic)

    def new_life(self) -> None:
        """Note that the store was started just now."""
        self.born, self.life = time.monotonic(), self.life + 1

    def look(self, run: Cluster) -> float:
        """Take a sample if the last is a second old; return the seconds since the start of the test."""
        now = time.monotonic()
        if run.acked() > self.step:
            self.step, self.moved = run.acked(), now
        if not self.samples or now - self.began - self.samples[-1][0] >= 1.0:
            self.samples.append((now - self.began, now - self.born, self.life, run.store.rss_bytes, run.disk_bytes()))
        return now - self.began

    @property
    def still_s(self) -> float:
        """Seconds since the last step."""
        return time.monotonic() - self.moved

    def memory_growth(self, soak_s: float) -> float:
        """The largest memory of the last process over the largest of minute two, from the same age of a process on.

        A young store holds less than an old one, so processes are compared from the age that the reference had when
        minute two began; every later sample of the last process counts.
        """
        first, last = (part * soak_s for part in MINUTE_TWO)
        minute_two = [(age, rss) for t, age, _, rss, _ in self.samples if first <= t < last]
        from_age = min(age for age, _ in minute_two)
        ending = [rss for _, age, life, rss, _ in self.samples if life == self.life and age >= from_age]
        return max(ending) / max(rss for _, rss in minute_two)


def kills(soak_s: float, every_s: float, seed: int) -> Iterator[tuple[float, str]]:
    """(time, role) of each kill: samplers and the learner at any time, the store outside of the two compared runs."""
    chance, at = random.Random(seed), 2.0
    while at < soak_s:
        part = at / soak_s
        spared = REFERENCE[0] <= part < REFERENCE[1] or part >= LAST
        victims = ["learner", *(f"sampler-{i}" for i in range(4)), *([] if spared else ["store"] * 2)]
        yield at, chance.choice(victims)
        at += chance.uniform(0.5, 1.5) * every_s


def soak(run: Cluster, soak_s: float, every_s: float) -> tuple[Watch, Counter[str]]:
    """Kill the roles and restart each at once. Fail if no step is made for a minute."""
    run.learner(step_s=0.05)
    for i in range(4):
        run.sampler(f"sampler-{i}", seed=i, work_s=0.05, tokens_high=1500, fails=0.01)
    run.until_acked(1)
    watch, killed = Watch(), Counter()
    watch.new_life()
    for at, name in kills(soak_s, every_s, seed=600):
        run.until(lambda at=at: watch.look(run) >= at, "the next kill")
        assert watch.still_s < LIMIT_S, f"no step for {watch.still_s:.0f} s after step {watch.step}"
        revive(run.roles[name], watch)
        killed[name.partition("-")[0]] += 1
    return watch, killed


def revive(role: Role, watch: Watch) -> None:
    """Kill the role and start it again."""
    role.kill()
    role.start()
    if role.name == "store":
        watch.new_life()


@pytest.mark.parametrize(
    ("soak_s", "every_s"),
    [
        pytest.param(15.0, 1.0, marks=[pytest.mark.soak, pytest.mark.timeout(240)]),
        pytest.param(SOAK_S, 3.0, marks=[pytest.mark.soak, pytest.mark.timeout(SOAK_S + 600.0)]),
    ],
)
def test_a_run_outlives_random_kills(
    tmp_path: Path, note: Callable[[Row], None], capsys: pytest.CaptureFixture[str], soak_s: float, every_s: float
) -> None:
    """Nothing acknowledged is lost, no group is trained twice; over ten minutes neither memory nor disk grows."""
    orders = StoreOrders(questions=QUESTIONS, history_bytes=BUDGET_BYTES, keep_bytes=BUDGET_BYTES)
    with Cluster(tmp_path / "run", *SHAPE, orders=orders) as run:
        watch, killed = soak(run, soak_s, every_s)
        at = run.acked()
        run.until_acked(at + 3)
        status = run.status()
        row = judge(run, f"soak of {soak_s:g} s", killed.total(), went_on_from=0)
        different = [step for step, claims in replays(run.learned()).items() if any(c != claims[0] for c in claims)]
        assert different == [], f"claims that changed: {different}"
        disk = max(sample[4] for sample in watch.samples)
        if soak_s >= 120:
            growth = watch.memory_growth(soak_s)
            with capsys.disabled():
                print(figures(run, watch, killed, status, growth))
            assert growth <= 1.1, f"the store's memory grew to {growth:.2f} times that of minute two"
            assert disk <= disk_bound(status), f"the log takes {disk} bytes"
        note(row)


def disk_bound(status: dict) -> int:
    """Bytes for both budgets (free pages are reused, so the file is at most half empty), WAL, rows of all groups."""
    return 2 * (2 * BUDGET_BYTES + status["retained_bytes"]) + 64 * 2**20 + 2000 * status["issued"]


def figures(run: Cluster, watch: Watch, killed: Counter[str], status: dict, growth: float) -> str:
    """Text with the figures of the test."""
    puts = [row for row in run.sampled() if row["kind"] == "put"]
    quarter = len(watch.samples) // 4
    disks = [max(sample[4] for sample in watch.samples[i * quarter : (i + 1) * quarter]) >> 20 for i in range(4)]
    rss = [max(sample[3] for sample in watch.samples[i * quarter : (i + 1) * quarter]) >> 20 for i in range(4)]
    return (
        f"\nsoak: {dict(killed)} killed; {run.acked()} steps, {status['lineage']} rewinds, {status['issued']} groups, "
        f"{len(puts)} puts answered; expired {status['expired']}; store's memory by quarters {rss} MB, last process "
        f"over minute two {growth:.3f}; disk by quarters {disks} MB"
    )
