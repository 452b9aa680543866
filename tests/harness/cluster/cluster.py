"""A run of real processes without JAX for tests: a store, scripted samplers and learners; tests can kill each."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from jaxroll import config as configs
from jaxroll import metrics, wire
from jaxroll.lifeline import PARENT_ENV
from jaxroll.records import Member, Version
from jaxroll.rpc import protocol
from jaxroll.store.client import StoreClient
from jaxroll.store.core import events as ev
from jaxroll.store.messages import Key
from tests.harness.blocking_store import BlockingStore
from tests.harness.cluster.scripted_learner import LearnerOrders, Weights
from tests.harness.cluster.scripted_role import Journal
from tests.harness.cluster.scripted_sampler import SamplerOrders, put
from tests.harness.cluster.scripted_store import StoreOrders

ROOT = Path(__file__).resolve().parents[3]
CONFIG = ROOT / "configs" / "smoke.py"
LIMIT_S = 60.0  # ten times the slowest wait on an idle machine
POLL_S = 0.02
Row = dict[str, Any]


class Role:
    """A process of the run: its journal, its log, and how to end it."""

    def __init__(self, name: str, folder: Path, module: str, *words: str) -> None:
        self.name = name
        self.journal_file, self.log_file = folder / f"{name}.journal", folder / f"{name}.log"
        self._argv = [sys.executable, "-m", module, *words]
        self._follower = metrics.RowReader(self.journal_file)
        self._rows: list[Row] = []
        self.kills = 0
        self.may_fail = False
        self.start()

    def start(self) -> None:
        """A (further) life."""
        env = {**os.environ, PARENT_ENV: str(os.getpid()), "PYTHONFAULTHANDLER": "1"}
        with self.log_file.open("ab") as out:
            self.process = subprocess.Popen(
                self._argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=ROOT, env=env
            )

    @property
    def rows(self) -> list[Row]:
        """The journal of all its processes so far."""
        self._rows += self._follower.rows()
        return self._rows

    def said(self, kind: str) -> list[Row]:
        """Journaled rows of one kind."""
        return [row for row in self.rows if row["kind"] == kind]

    def kill(self) -> None:
        """Send SIGKILL and wait for the end."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)
        self.kills += 1

    def stop(self, limit_s: float = LIMIT_S) -> int:
        """Send SIGTERM; return the exit code."""
        self.process.terminate()
        return self.process.wait(limit_s)

    def pause(self) -> None:
        """Stop the process with SIGSTOP until `resume`."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    @property
    def alive(self) -> bool:
        """True if the process runs."""
        return self.process.poll() is None

    @property
    def broken(self) -> bool:
        """True if the process ended by itself with a failure that no test caused."""
        return not self.may_fail and (self.process.poll() or 0) > 0

    @property
    def rss_bytes(self) -> int:
        """Resident memory of the process."""
        return psutil.Process(self.process.pid).memory_info().rss

    def tail(self) -> str:
        """The end of its log."""
        text = self.log_file.read_text(errors="replace") if self.log_file.exists() else ""
        state = "runs" if self.alive else f"ended with {self.process.returncode}"
        return f"--- {self.name} ({state})\n{text[-3000:]}"


class ByHand:
    """A sampler in the test's own process; its puts are journaled like those of other samplers."""

    def __init__(self, name: str, folder: Path, store: StoreClient) -> None:
        self.name, self.store = name, store
        journal_file = folder / f"{name}.journal"
        self._journal, self._follower = Journal(str(journal_file)), metrics.RowReader(journal_file)
        self.rows: list[Row] = []

    async def put(self, member: Member) -> str:
        """Put a member as scripted_sampler.put does."""
        answer = await put(self.store, self._journal, member)
        self.rows += self._follower.rows()
        return answer

    async def keys(self, version: Version, members: int) -> list[Key]:
        """Lease so many members, waiting as needed; return their (group, member, attempt)."""
        grants = await self.store.lease(version, members, LIMIT_S)
        return [(grant.group, member, attempt) for grant in grants for member, attempt in grant.members]


class Cluster:
    """One run, as a context manager. `overrides` are config overrides such as `schedule.steps=20`.

    The store is the real role through the real command line; its prompts come from a counter, or with `real_feeder`
    from the dataset by the real feeder child (which imports JAX on the CPU: a second per start of the store).
    """

    def __init__(
        self, folder: Path, *overrides: str, orders: StoreOrders | None = None, real_feeder: bool = False
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        overrides = ("learner.row_tokens=100000", *overrides)  # scripted members are of any length
        self.folder, self.run_dir = folder, folder / "run"
        self.config = configs.load(str(CONFIG), list(overrides))
        self.digest = configs.digest(self.config)
        self.roles: dict[str, Role] = {}
        self.hands: list[ByHand] = []
        self.run_dir.mkdir(exist_ok=True)  # a test may have put it on a separate disk
        protocol.create(self.run_dir)
        words = ["store", f"--config={CONFIG}", f"--run={self.run_dir}", *(f"--config.{o}" for o in overrides)]
        if real_feeder:
            self.store = Role("store", folder, "jaxroll", *words)
        else:
            text = msgspec.json.encode(orders or StoreOrders()).decode()
            self.store = Role("store", folder, "tests.harness.cluster.scripted_store", text, *words)
        self.roles["store"] = self.store

    def sampler(self, name: str = "sampler-0", *, address_file: Path | None = None, **behaviour: Any) -> Role:
        """Start a scripted sampler; `behaviour` as in SamplerOrders."""
        orders = SamplerOrders(**self._orders(name, name, address_file), **behaviour)
        return self._start(name, "tests.harness.cluster.scripted_sampler", orders)

    def learner(self, process: str = "learner", *, address_file: Path | None = None, **behaviour: Any) -> Role:
        """Start a scripted learner; to the store its name is `learner`, regardless of `process`."""
        common = self._orders("learner", process, address_file) | {
            "checkpoints": str(self.checkpoints),
            "steps": self.config.schedule.steps,
            "gate": str(self._gate),
        }
        return self._start(process, "tests.harness.cluster.scripted_learner", LearnerOrders(**common | behaviour))

    def allow(self, steps: int) -> None:
        """Let learners train so many steps and then wait; without any call they train all steps."""
        draft = self._gate.with_suffix(".draft")
        draft.write_text(str(steps))
        os.replace(draft, self._gate)

    @property
    def checkpoints(self) -> Path:
        """The folder of the learner's checkpoints."""
        return self.folder / "checkpoints"

    def weights(self) -> list[tuple[int, list[int]]]:
        """(step, groups) of everything in the newest durable weights."""
        weights = Weights(self.checkpoints)
        return weights.trained(weights.latest())

    def learners(self) -> list[Role]:
        """All learner processes of this test."""
        return [role for name, role in self.roles.items() if name.startswith("learner")]

    def samplers(self) -> list[Role]:
        """All sampler processes of this test."""
        return [role for name, role in self.roles.items() if name.startswith("sampler")]

    @contextlib.asynccontextmanager
    async def by_hand(self, name: str = "sampler-by-hand") -> AsyncIterator[ByHand]:
        """A sampler in the test's own process."""
        store = await StoreClient.connect(
            self.run_dir / "store.addr", role="sampler", name=name, config_digest=self.digest, patience_s=LIMIT_S
        )
        try:
            hand = ByHand(name, self.folder, store)
            self.hands.append(hand)
            yield hand
        finally:
            await store.aclose()

    def sampled(self) -> list[Row]:
        """The journal rows of all samplers."""
        return [row for sampler in (*self.samplers(), *self.hands) for row in sampler.rows]

    def learned(self) -> list[Row]:
        """The journal rows of all learners."""
        return [row for learner in self.learners() for row in learner.rows]

    def acked(self) -> int:
        """The number of steps whose acknowledgement the learners have received."""
        return max((row["version"][1] + 1 for role in self.learners() for row in role.said("ack")), default=0)

    def until(self, seen: Callable[[], Any], what: str, limit_s: float = LIMIT_S, poll_s: float = POLL_S) -> Any:
        """Poll `seen()` until it is true and return its value; fail the test with all logs if that takes too long."""
        deadline, pause = time.monotonic() + limit_s, threading.Event()
        while not (found := seen()):
            broken = [role.name for role in self.roles.values() if role.broken]
            if broken or time.monotonic() > deadline:
                why = f"{', '.join(broken)} failed" if broken else f"waited {limit_s:g} s"
                pytest.fail(f"{why}: {what}", pytrace=False)
            pause.wait(poll_s)
        return found

    def until_acked(self, steps: int) -> None:
        """Return when so many steps are acknowledged."""
        self.until(lambda: self.acked() >= steps, f"{steps} acknowledged steps (there are {self.acked()})")

    def finish(self, limit_s: float = LIMIT_S) -> None:
        """Wait for the end of the learner, then of all roles but the store, each with exit code 0."""
        for role in [*self.learners(), *self.samplers()]:
            self.until(lambda role=role: not role.alive, f"the end of {role.name}", limit_s)
            assert role.process.returncode in (0, -signal.SIGKILL), f"{role.name} failed"

    @contextlib.contextmanager
    def observer(self) -> Iterator[BlockingStore]:
        """A client with the observer's privileges."""
        client = BlockingStore(self.run_dir / "store.addr", role="observer", name="observer", patience_s=LIMIT_S)
        try:
            yield client
        finally:
            client.close()

    def status(self) -> Row:
        """The store's status of the run."""
        with self.observer() as client:
            return client.status()

    def query(self, sql: str, parameters: tuple = ()) -> list[tuple]:
        """Rows of RUN/store.db, read during or after the store's run; none if the table does not exist yet."""
        path = self.run_dir / "store.db"
        if not path.exists():
            return []
        mode = "ro" if self.store.alive else "rw"  # the reader must recover a WAL that no process holds open
        with contextlib.closing(
            sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", uri=True, timeout=LIMIT_S)
        ) as db:
            return db.execute(sql, parameters).fetchall()

    def granted(self, holder: str) -> set[tuple[int, int, int]]:
        """Keys that the log records as leased to `holder`, also if it died before it read the reply."""
        leased = [wire.decode(body, ev.Event) for (body,) in self.query("SELECT body FROM log WHERE kind = 'leased'")]
        return {(e.group, member, attempt) for e in leased if e.holder == holder for member, attempt in e.members}

    def disk_bytes(self) -> int:
        """The size of RUN/store.db with its WAL."""
        total = 0
        for name in ("store.db", "store.db-wal"):
            with contextlib.suppress(FileNotFoundError):
                total += (self.run_dir / name).stat().st_size
        return total

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for role in self.roles.values():
            if role.alive:
                role.process.kill()
                role.process.wait(10)
        if kind is not None:
            print("\n".join(role.tail() for role in self.roles.values()))

    @property
    def _gate(self) -> Path:
        return self.folder / "steps-allowed"

    def _orders(self, name: str, process: str, address_file: Path | None) -> dict[str, Any]:
        return {
            "name": name,
            "address_file": str(address_file or self.run_dir / "store.addr"),
            "journal": str(self.folder / f"{process}.journal"),
            "config_digest": self.digest,
            "lease_s": self.config.store.lease_s,
            "call_s": self.config.store.rpc_deadline_s,
        }

    def _start(self, name: str, module: str, orders: SamplerOrders | LearnerOrders) -> Role:
        role = Role(name, self.folder, module, msgspec.json.encode(orders).decode())
        self.roles[name] = role
        return role
