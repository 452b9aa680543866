"""Permissions: every method for every role, the first message, the audit, and the files that never hold the secret."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest

from jaxroll import wire
from jaxroll.config import digest
from jaxroll.errors import Closed, Conflict, StaleClient, StoreRefusal, Unauthorized
from jaxroll.records import Version
from jaxroll.rpc import intake
from jaxroll.rpc import protocol as rpc_protocol
from jaxroll.rpc.client import RawClient
from jaxroll.store import messages as msg
from jaxroll.store.client import StoreClient
from jaxroll.store.log import schema
from jaxroll.store.server.service import StoreService

ROOT = Path(__file__).parents[3]
V0 = Version(0, 0)
WORK = {"sampler", "admin"}
TRAIN = {"learner", "admin"}
ALL = {"sampler", "learner", "admin", "observer"}
RIGHTS = {
    "Hello": ALL, "Published": ALL, "Report": ALL, "Status": ALL,
    "Join": WORK, "Leave": WORK, "Lease": WORK, "Renew": WORK,
    "Put": WORK, "Flush": WORK, "Partial": WORK, "Release": WORK, "Repack": WORK, "Ended": WORK,
    "Claim": TRAIN, "Begin": TRAIN, "Publish": TRAIN, "Ack": TRAIN, "Durable": TRAIN, "Close": TRAIN,
    "Control": {"admin"},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _refusals_are_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "HOLD_S", 0.0)


def raw(address: str | Path, role: str, token: str | None, **options: Any) -> RawClient:
    """A caller that has not sent Hello."""
    return RawClient(
        msg.SERVICE, address, role=role, name=role, token=token, patience_s=10.0, max_message_bytes=2**20, **options
    )


def test_every_method_admits_its_roles_and_no_other(tmp_path: Path, small: SimpleNamespace, run) -> None:
    """With a token of each role, and under every name that a role can be claimed by."""
    config, secret = small.configured(), rpc_protocol.create(tmp_path)
    parts = {"handshake": SimpleNamespace(answering=lambda *_: None), "_workers": SimpleNamespace(leave=None)}
    parts["_put"] = SimpleNamespace(flush=None, partial=None)
    methods = StoreService.methods(SimpleNamespace(**_handlers() | parts))
    assert {name: set(method.rights) for name, method in methods.items()} == RIGHTS

    async def tries() -> None:
        async with small.serving(tmp_path, config) as address:
            for role in sorted(ALL):
                client = raw(address, role, rpc_protocol.bearer(secret, role), config_digest=digest(config))
                client.run_id = "of another run"
                for method, allowed in RIGHTS.items():
                    try:
                        await client.call(method, b"", 10.0)
                        outcome = "in"
                    except Unauthorized as refusal:
                        assert f"the role {role} may not call {method}" in str(refusal)
                        outcome = "turned away"
                    except StoreRefusal:  # permitted, then refused for its empty message
                        outcome = "in"
                    assert outcome == ("in" if role in allowed else "turned away"), (role, method)
                await client.close()
                for other in sorted(ALL - {role}):
                    liar = raw(address, other, rpc_protocol.bearer(secret, role))
                    with pytest.raises(Unauthorized, match="no valid token"):
                        await liar.call("Status", b"", 10.0)
                    await liar.close()

    run(tries())


def _handlers() -> dict[str, None]:
    return {f"_{name.lower()}": None for name in RIGHTS}


def test_the_table_in_the_documents_is_the_one_in_force() -> None:
    text = (ROOT / "docs" / "security.md").read_text()
    rows = re.findall(
        r"^\| `?([\w, `]+?)`? \| (yes|no|)[^|]*\| (yes|no|)[^|]*\| (yes|no|)[^|]*\| (yes|no|)", text, re.MULTILINE
    )
    told: dict[str, set[str]] = {}
    for names, *marks in rows:
        for name in re.findall(r"\w+", names):
            roles = ("sampler", "learner", "observer", "admin")
            told[name] = {role for role, mark in zip(roles, marks, strict=True) if mark == "yes"}
    assert {name: told.get(name) for name in RIGHTS} == RIGHTS


# --- the first message


def test_what_does_not_agree_is_refused_with_both_sides_values(tmp_path: Path, small: SimpleNamespace, run) -> None:
    config = small.configured()

    async def refused(address: str, **said: str) -> str:
        metadata = {
            "right": "sampler",
            "name": "s",
            "session": "x",
            "run": "",
            "protocol": str(wire.PROTOCOL_VERSION),
            "config": digest(config),
        } | said
        async with grpc.aio.insecure_channel(address, options=rpc_protocol.client_options(2**20)) as channel:
            body = wire.encode(msg.Hello(wire.PROTOCOL_VERSION, digest(config)))
            with pytest.raises(grpc.aio.AioRpcError) as error:
                send = channel.unary_unary(f"/{msg.SERVICE}/Hello")
                await send(body, metadata=[(f"jaxroll-{k}", v) for k, v in metadata.items()], timeout=10)
        assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
        return error.value.details() or ""

    async def tries() -> None:
        async with small.serving(tmp_path, config) as address:
            for protocol, shown in (("99", "99"), ("", "none"), ("x" * 100, "x" * 16)):
                said = await refused(address, protocol=protocol)
                assert f"the server has protocol {wire.PROTOCOL_VERSION}, the caller {shown}:" in said
                assert "install the same JaxRoll" in said
            theirs = "f" * 32
            with pytest.raises(Unauthorized, match="have different configs: start both"):
                async with small.connected(tmp_path, config, "sampler", config_digest=theirs):
                    pass
            async with small.connected(tmp_path, config, "observer", config_digest="") as observer:
                with pytest.raises(Unauthorized, match=rf"uses protocol {wire.PROTOCOL_VERSION}, the caller 99"):
                    await observer._call("Hello", msg.Hello(99, ""), msg.Welcome)

    run(tries())


def test_calls_before_the_hello_and_with_another_config_are_refused(
    tmp_path: Path, small: SimpleNamespace, run
) -> None:
    """Also for a caller that knows the run's id, and after a restart of the store that received the Hello."""
    config = small.configured()

    async def tries() -> None:
        run_id = ""
        for life in range(2):
            async with small.serving(tmp_path, config) as address:
                silent = raw(address, "sampler", None, config_digest=digest(config))
                for known in ("", run_id):
                    silent.run_id = known
                    with pytest.raises(StaleClient, match="has not sent Hello"):
                        await silent.call("Lease", wire.encode(msg.LeaseCall(V0, 1, 0.0, "r")), 10.0)
                await silent.close()
                async with small.connected(tmp_path, config, "learner") as learner:
                    if life:
                        learner._raw._config_digest = "f" * 32
                        with pytest.raises(Unauthorized, match="have different configs"):
                            await learner.begin(None)
                    run_id = learner.welcome.run_id

    run(tries())


def test_a_stream_of_newcomers_is_slowed_down(
    tmp_path: Path, small: SimpleNamespace, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small.configured()
    monkeypatch.setattr("jaxroll.store.server.keeper._ARRIVALS", 3.0)
    monkeypatch.setattr("jaxroll.store.server.keeper._ARRIVALS_PER_S", 0.0)

    async def tries() -> None:
        async with small.serving(tmp_path, config) as address:
            for i in range(3):
                async with small.connected(tmp_path, config, "sampler", f"s-{i}") as sampler:
                    again = wire.encode(msg.Hello(wire.PROTOCOL_VERSION, digest(config)))
                    assert await sampler._raw.call("Hello", again, 10.0), "the same session says it again"
            late = raw(address, "sampler", None, config_digest=digest(config))
            with pytest.raises(Exception, match="too many processes join"):
                await late.call("Hello", again, 10.0, patience_s=0.2)
            await late.close()

    run(tries())


# --- certificates


@pytest.mark.parametrize("mutual", [False, True])
def test_a_store_that_others_can_reach_speaks_tls(
    tmp_path: Path, small: SimpleNamespace, run, certified: SimpleNamespace, mutual: bool
) -> None:
    """With RUN/tls and RUN/token it listens everywhere without a word about plain text, and its folder is enough."""
    shutil.copytree(certified.root / "run", tmp_path / "run")
    run_dir, config = tmp_path / "run", small.configured(mutual_tls=mutual)
    token = (run_dir / "token").read_text().strip()

    async def talks() -> None:
        async with (
            small.serving(run_dir, config, host="0.0.0.0") as address,
            small.connected(run_dir, config, "learner") as learner,
            small.connected(run_dir, config, "sampler") as sampler,
        ):
            assert address.startswith("127.0.0.1:")
            await learner.publish(small.version_ref(await learner.begin(None)))
            await small.produce(sampler, V0, 4)
            assert (await learner.claim(0, 0, 10.0)).groups
            with pytest.raises(Unauthorized, match="uses TLS and this process has no certificates"):
                await StoreClient.connect(address, role="sampler", name="s", config_digest=digest(config), token=token)
            elsewhere = tmp_path / "elsewhere"
            (elsewhere / "tls").mkdir(parents=True)
            shutil.copy(run_dir / "tls" / "ca.pem", elsewhere / "tls")
            joining = StoreClient.connect(
                address, role="sampler", name="t", config_digest=digest(config), token=token, run_dir=elsewhere
            )
            if mutual:
                with pytest.raises(Unauthorized, match="asks for a certificate"):
                    await joining
            else:
                await (await joining).aclose()

    run(talks())


# --- the audit


def audited(run_dir: Path) -> list[tuple]:
    with sqlite3.connect(run_dir / "store.db") as db:
        return db.execute("SELECT who, role, peer, what, detail, outcome, times FROM audit ORDER BY id").fetchall()


def test_a_run_that_ends_by_itself_is_on_record(tmp_path: Path, small: SimpleNamespace, run) -> None:
    """The filter's limit ends the run without a call of Close."""
    config = small.configured(alpha=0.0, filter="min_std", filter_limit=1)

    async def alike() -> None:
        async with (
            small.serving(tmp_path, config),
            small.connected(tmp_path, config, "learner") as learner,
            small.connected(tmp_path, config, "sampler", "sampler-0") as sampler,
        ):
            await learner.publish(small.version_ref(await learner.begin(None)))
            with pytest.raises(Closed, match="rewards too alike"):
                while True:
                    await small.produce(sampler, V0, 4)

    run(alike())
    ((who, _, _, what, detail, *_),) = [row for row in audited(tmp_path) if row[3] == "Close"]
    assert (who, what) == ("store", "Close") and "rewards too alike" in detail


def test_what_changes_the_run_is_on_record(tmp_path: Path, small: SimpleNamespace, run) -> None:
    config, secret = small.configured(data_retries=0), rpc_protocol.create(tmp_path)

    async def acts() -> None:
        async with (
            small.serving(tmp_path, config),
            small.connected(tmp_path, config, "learner") as learner,
            small.connected(tmp_path, config, "sampler", "sampler-0") as sampler,
        ):
            version = await learner.begin(None)
            await learner.publish(small.version_ref(version))
            first = small.keys(await sampler.lease(V0, 1, 5.0))[0]
            assert await sampler.put(small.failed(*first, "DATA", "it never works")) == "OK"
            await small.produce(sampler, V0, 4)
            await small.produce(sampler, V0, 4)
            await learner.claim(0, 0, 10.0)
            await learner.publish(small.version_ref(Version(0, 1)))
            await learner.ack(V0)
            await learner.durable(Version(0, 1))
            with pytest.raises(StoreRefusal):
                await learner.ack(Version(7, 0))
            with pytest.raises(Unauthorized):
                await sampler.begin(None)
            with pytest.raises(Unauthorized):
                async with small.connected(tmp_path, config, "learner", token="guessed-" + "0" * 40):
                    pass
            await learner.close_run("enough")

    run(acts())
    rows = audited(tmp_path)
    done = [(who, role, what, detail, outcome) for who, role, _, what, detail, outcome, _ in rows]
    assert done[0] == ("learner", "learner", "Begin", "from nothing at 0.0", "ok")
    assert ("learner", "learner", "Publish", "0.0 digest", "ok") in done
    assert ("sampler-0", "sampler", "dead-letter", "group 0: DATA: it never works", "ok") in done
    assert ("learner", "learner", "Ack", "0.0", "ok") in done
    assert ("learner", "learner", "Durable", "0.1", "ok") in done
    assert ("learner", "learner", "Close", "enough", "ok") in done
    assert any(what == "Ack" and detail == "7.0" and outcome != "ok" for *_, what, detail, outcome in done)
    refused = [(who, role, outcome) for who, role, what, _, outcome in done if what == "refused"]
    assert refused[0] == ("sampler-0", "sampler", "the role sampler may not call Begin")
    assert refused[1][:2] == ("learner", "learner") and "no valid token" in refused[1][2]
    assert all(peer.startswith("ipv4:127.0.0.1:") for _, _, peer, *_ in rows)
    assert not any(secret in str(row) or "guessed" in str(row) for row in rows)


def test_knocking_does_not_fill_the_disk() -> None:
    now_s, rows, trims = [0.0], [], []

    def append(statements) -> None:
        for sql, values in statements:
            (rows if sql.startswith("INSERT") else trims).append(values)

    book = schema.Audit(append, lambda: now_s[0])
    for minute in range(3):
        now_s[0] = minute * schema.WINDOW_S
        for _ in range(10_000):
            book.add_refusal("ipv4:1.2.3.4:5", "sampler:" + "x" * 10_000 + "\n\x00é", "no valid token")
    book.flush()
    assert len(rows) == 3 * (schema.AT_ONCE + 1) and len(trims) == 3
    assert sum(row[-1] for row in rows) == 30_000
    assert all(len(text) <= 300 and text.isprintable() and text.isascii() for row in rows for text in row[1:-1])


def test_only_the_newest_refusals_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    db = sqlite3.connect(tmp_path / "a.db")
    db.executescript(schema.TABLE)
    monkeypatch.setattr(schema, "KEPT", 5)

    def append(statements) -> None:
        for sql, values in statements:
            db.execute(sql, values)

    book = schema.Audit(append, lambda: 0.0)
    book.record(SimpleNamespace(name="l", right="learner", peer=""), "Close", "kept", "ok")  # type: ignore[arg-type]
    for i in range(50):
        book.add_refusal("", f"sampler:{i}", "no")
    book.flush()
    whats = [what for (what,) in db.execute("SELECT what FROM audit ORDER BY id")]
    assert whats == ["Close"] + ["refused"] * 5
    db.close()


# --- the secret


@pytest.mark.process
@pytest.mark.timeout(180)
def test_the_secret_is_in_the_token_file_only(tmp_path: Path, small: SimpleNamespace, run) -> None:
    """A real store and scripted clients, honest and not; then every file, line and process is searched."""
    secret = "0123456789abcdef" * 4
    (tmp_path / "token").write_text(secret)
    (tmp_path / "token").chmod(0o600)
    config = small.configured()
    settings = '{"steps": 4, "groups_per_step": 2, "group_size": 2, "alpha": 1.0, "lease_s": 30.0}'
    log = (tmp_path / "store.log").open("w+")
    store = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.store.server", "ours", str(tmp_path), str(os.getpid()), settings],
        cwd=ROOT,
        stdout=log,
        stderr=log,
    )
    lines: list[str] = []

    async def acts() -> None:
        async with (
            small.connected(tmp_path, config, "learner") as learner,
            small.connected(tmp_path, config, "sampler") as sampler,
        ):
            await learner.publish(small.version_ref(await learner.begin(None)))
            await small.produce(sampler, V0, 4)
            await learner.report([{"kind": "step", "role": "learner"}])
            lines.append(str(await learner.status()))
            lines.extend(str(psutil.Process(store.pid).cmdline()).splitlines())
            for token in (rpc_protocol.bearer(secret, "sampler"), secret[:-1], secret.upper()):
                with pytest.raises(Unauthorized) as error:
                    async with small.connected(tmp_path, config, "admin", token=token):
                        pass
                lines.append(str(error.value) + repr(error.value.__cause__))
            with pytest.raises((Conflict, StoreRefusal, Closed)) as refusal:
                await learner.ack(Version(9, 9))
            lines.append(repr(refusal.value))
            await learner.close_run("done")

    try:
        run(acts())
    finally:
        store.terminate()
        store.wait(20)
        log.close()
    tokens = [secret, *(rpc_protocol.bearer(secret, role) for role in ALL)]
    found = {
        str(path.relative_to(tmp_path))
        for path in tmp_path.rglob("*")
        if path.is_file() and any(token.encode() in path.read_bytes() for token in tokens)
    }
    assert found == {"token"}
    assert not any(token in line for token in tokens for line in lines)
    assert {"store.db", "metrics.jsonl", "store.log"} <= {path.name for path in tmp_path.iterdir()}


def test_a_flood_is_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks that tests here switch off are on by default."""
    monkeypatch.undo()
    assert intake.HOLD_S >= 1.0
    asyncio.run(_held_back(monkeypatch))


async def _held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(intake.asyncio, "sleep", sleep)
    for _ in range(100):
        await intake.RefusalThrottle().hold(10.0)
    assert min(slept) >= intake.HOLD_S and max(slept) <= 2 * intake.HOLD_S
    assert len({round(seconds, 2) for seconds in slept}) > 50, "they come back together"
    await intake.RefusalThrottle().hold(1.0)
    assert slept[-1] == 0.8, "a caller that waits for one second gets its answer within it"
