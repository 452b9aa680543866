"""A real store process, killed with kill -9 while members are put: what was acknowledged is there afterwards."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxroll.config import digest
from jaxroll.errors import Closed, Conflict, NoCredit, Unauthorized
from jaxroll.records import Version
from jaxroll.store.client import StoreClient

pytestmark = pytest.mark.process
KILLS = 4

STORE = """
import asyncio, os, sys
from pathlib import Path
from jaxroll import lifeline
from jaxroll.config import Config, LearnerConfig, ScheduleConfig, StoreConfig
from jaxroll.records import Message, Task
from jaxroll.store.server.server import serve

class Feed:
    at = 0
    def restore(self, state):
        self.at = int(state) if state else 0
    async def next(self, count):
        first, self.at = self.at, self.at + count
        return [(Task(i, (Message("user", "?"),), "e", "{}", i, f"{i:016x}"), str(i + 1).encode())
                for i in range(first, self.at)]

lifeline.bind(int(sys.argv[2]))
config = Config(
    schedule=ScheduleConfig(steps=int(sys.argv[3]), groups_per_step=4, group_size=4, alpha=1.0),
    store=StoreConfig(lease_s=5.0), learner=LearnerConfig(row_tokens=10**6),
)
asyncio.run(serve(config, Path(sys.argv[1]), Feed(), host="127.0.0.1", port=0, ready=lambda address: None))
"""


class StoreProcess:
    """A store that can be killed and started again."""

    def __init__(self, run_dir: Path, steps: int) -> None:
        self.run_dir, self.steps, self.kills = run_dir, steps, 0
        self.start()

    def start(self) -> None:
        arguments = [sys.executable, "-c", STORE, str(self.run_dir), str(os.getpid()), str(self.steps)]
        self.process = subprocess.Popen(arguments, stdin=subprocess.DEVNULL)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)
        self.kills += 1

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(10)


async def connect(run_dir: Path, config, role: str, name: str) -> StoreClient:
    return await StoreClient.connect(
        run_dir / "store.addr", role=role, name=name, config_digest=digest(config), patience_s=30.0
    )


async def learn(learner: StoreClient, small: SimpleNamespace, steps: int) -> dict[int, list]:
    seen = {}
    version = await learner.begin(None)
    await learner.publish(small.version_ref(version))
    for step in range(steps):
        claim = await learner.claim(0, step, 40.0)
        seen[step] = [group.group for group in claim.groups]
        await learner.publish(small.version_ref(Version(0, step + 1)))
        await learner.ack(Version(0, step))
        if step % 4 == 3:
            await learner.durable(Version(0, step + 1))
    await learner.durable(Version(0, steps))
    return seen


async def sample(sampler: StoreClient, small: SimpleNamespace, acknowledged: dict) -> None:
    version = (await sampler.published(None, 30.0)).version

    async def put(key: tuple[int, int, int]) -> None:
        member = small.finished(*key, (version, 3))
        if await sampler.put(member) == "OK":
            acknowledged[key] = member

    while True:
        try:
            await asyncio.gather(*(put(key) for key in small.keys(await sampler.lease(version, 12, 1.0))))
        except NoCredit:
            pass
        except Closed:
            return
        newer = await sampler.published(version, 0.0)
        version = newer.version if newer else version


async def kill_at_random(store: StoreProcess, seed: int, kills: int, working: asyncio.Future) -> None:
    """Kills spread over the run by what has been put, not by the clock."""
    moments = random.Random(seed)
    for _ in range(kills):
        before = position(store.run_dir)
        wanted = before + moments.randint(5, 60)
        while position(store.run_dir) < wanted and not working.done():
            await asyncio.sleep(0.002)
        store.kill()
        store.start()


def position(run_dir: Path) -> int:
    """Records in the log, read while the store runs."""
    try:
        db = sqlite3.connect(f"{(run_dir / 'store.db').absolute().as_uri()}?mode=ro", uri=True)
    except sqlite3.OperationalError:
        return 0
    try:
        return db.execute("SELECT COALESCE(MAX(position), 0) FROM log").fetchone()[0]
    except sqlite3.OperationalError:
        return 0
    finally:
        db.close()


@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.soak) for n in range(2, 12))])
def test_acknowledged_puts_survive_kills(tmp_path: Path, small: SimpleNamespace, run, seed: int) -> None:
    steps = 12
    config = small.configured(steps=steps, groups_per_step=4, group_size=4, lease_s=5.0)
    store = StoreProcess(tmp_path, steps)
    acknowledged: dict = {}

    async def play() -> tuple[dict, dict]:
        learner = await connect(tmp_path, config, "learner", "learner")
        samplers = [await connect(tmp_path, config, "sampler", f"sampler-{i}") for i in range(2)]
        work = asyncio.gather(learn(learner, small, steps), *(sample(s, small, acknowledged) for s in samplers))
        await kill_at_random(store, seed, KILLS, work)
        seen = (await work)[0]
        for member in list(acknowledged.values())[::7]:
            assert await samplers[0].put(member) == "OK", "an acknowledged put is forgotten"
            changed = small.finished(member.group, member.member, member.attempt, (Version(0, 0), 2))
            with pytest.raises(Conflict):
                await samplers[0].put(changed)
        status = await learner.status()
        for client in (learner, *samplers):
            await client.aclose()
        return seen, status

    try:
        seen, status = run(play())
    finally:
        store.stop()
    assert store.kills == KILLS
    assert status["conservation_residual"] == 0
    assert status["expired"] == {}
    assert status["counts"]["TRIMMED"] == steps * 4
    assert [sorted(seen[step]) for step in range(steps)] == [list(range(4 * s, 4 * s + 4)) for s in range(steps)]
    db = sqlite3.connect(tmp_path / "store.db")
    digests = {(g, m): a for g, m, a in db.execute("SELECT group_id, member, attempt FROM members WHERE digest != ''")}
    for group, member, attempt in acknowledged:
        assert digests[group, member] == attempt, "an acknowledged put is not in the log"
    assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert db.execute("SELECT COUNT(*) FROM groups WHERE durable_step IS NOT NULL").fetchone() == (steps * 4,)


def test_a_second_store_process_says_who_has_the_run(tmp_path: Path, small: SimpleNamespace, run) -> None:
    store = StoreProcess(tmp_path, 1)

    async def up() -> None:
        await (await connect(tmp_path, small.configured(), "observer", "o")).aclose()

    try:
        with pytest.raises(Unauthorized, match="same config"):  # up, and not this config's
            run(up())
        arguments = [sys.executable, "-c", STORE, str(tmp_path), str(os.getpid()), "1"]
        streams = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
        second = subprocess.run(arguments, timeout=60, check=False, **streams)
        assert second.returncode != 0
        assert f"another store (pid {store.process.pid}) has this run open" in second.stderr
    finally:
        store.stop()
