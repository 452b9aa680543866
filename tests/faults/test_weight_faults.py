"""Faults 3 and 18 with a real learner and a real sampler: damaged weights, or a receiver that dies."""

from __future__ import annotations

import threading
from pathlib import Path

import psutil
import pytest

from jaxroll import wire
from jaxroll.records import Version
from jaxroll.rpc.protocol import Envelope
from jaxroll.store.messages import PublishedReply
from tests.harness.cluster import weights_proxy
from tests.harness.cluster.real_roles import World
from tests.harness.cluster.rpc_tap import Call, Forward
from tests.harness.cluster.weights_proxy import Courier

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
# Transfers over tcp pass through the courier; those through shared memory do not.
SMALL = {
    "learner__micro_batch_rows": 2,
    "task__env": "tests.harness.envs.faulty:coin",
    "transfer__channel": "tcp",
}


def assert_sampled_from_what_was_published(run: World) -> None:
    """Assert that behavior log-probs equal the learner's at the version that their tokens are stamped with.

    The check covers the tokens that were trained at their own version; `grad_norm` shows that versions differ.
    """
    rows = run.step_rows()
    fresh = [row for row in rows if row["logprob_mismatch_tokens"]]
    assert fresh, "no token was trained at the version that sampled it"
    for row in fresh:
        assert row["logprob_mismatch_max"] < 1e-4 * max(1.0, row["logits_std"]), row
    assert sum(row["grad_norm"] > 0.01 for row in rows) >= len(rows) // 2, (
        "the weights hardly change, so the test shows nothing"
    )


def swapped(run: World) -> list[str]:
    """The versions that the sampler has swapped in."""
    run.step_rows()
    return [row["version"] for row in run.rows if row.get("kind") == "span" and row.get("what") == "weight_swap"]


@pytest.mark.soak
def test_18_a_flipped_byte_and_a_snapshot_overwritten_in_transfer_are_fetched_again(tmp_path: Path, note) -> None:
    """With α = 0 every token is sampled at the version that trains on it, so wrong weights would show in each."""
    with World(tmp_path / "run", **SMALL, schedule__alpha=0, schedule__steps=6) as run, Courier(run.tap) as carrier:
        run.learner()
        run.sampler()
        run.until(lambda: Version(0, 0) in carrier.carried, "the first weights")
        whole = carrier.carried[Version(0, 0)]
        middle = len(whole) // 2  # within the bytes of a leaf: frame headers are few
        carrier.spoil(Version(0, 2), weights_proxy.flip(middle))
        carrier.spoil(Version(0, 4), weights_proxy.overwrite(whole, middle, middle + 1024))
        assert run.ended("learner") == 0, run.logs()
        assert run.ended("sampler-0") == 0, run.logs()
        assert carrier.spoilt == [Version(0, 2), Version(0, 4)]
        said = run.events("sampler-0")
        for version in ("0.2", "0.4"):
            assert any(text.startswith(f"weights {version}: DigestMismatch: leaf ") for text in said), said
            assert f"weights {version}: fetched at attempt 2" in said
        assert [v for v in swapped(run) if v in ("0.2", "0.4")] == ["0.2", "0.4"], (
            "each was swapped in once, when complete"
        )
        assert_sampled_from_what_was_published(run)
        computed = [row["logprob_mismatch_tokens"] == row["tokens_computed"] for row in run.step_rows()]
        assert all(computed), "a token was not checked against the weights that sampled it"
        note(run.judge("18 byte changed, overwritten (tcp)", 2))


@pytest.mark.soak
def test_18_damaged_files_are_never_sampled_from_and_the_next_version_is(tmp_path: Path, note) -> None:
    """The files remain damaged, so the sampler keeps the version before until the learner publishes another one."""
    words = SMALL | {"transfer__channel": "tensorstore", "schedule__alpha": 1, "schedule__steps": 8}
    with World(tmp_path / "run", **words) as run:
        damages = {Version(0, 2): flip_in_file, Version(0, 5): take_a_chunk_of_the_version_before}
        run.tap.on("sampler-0", "Published", damaging(run, damages))
        run.learner()
        run.sampler()
        assert run.ended("learner") == 0, run.logs()
        assert run.ended("sampler-0") == 0, run.logs()
        assert damages == {}, "both were damaged"
        said = run.events("sampler-0")
        for version in ("0.2", "0.5"):
            assert any(text.startswith(f"weights {version}: DigestMismatch: ") for text in said), said
            assert version not in swapped(run)
        assert {"0.1", "0.3", "0.4", "0.6"} <= {*swapped(run)}, "it did not continue with the next versions"
        assert_sampled_from_what_was_published(run)
        note(run.judge("18 byte changed, overwritten (files)", 2))


def damaging(run: World, damages: dict):
    """A hook that damages the files of a version once, before the sampler is notified of it."""

    async def published(call: Call, forward: Forward) -> bytes:
        answer = await forward(call.body)
        ref = wire.decode(wire.decode(answer, Envelope).body, PublishedReply).ref
        if ref is not None and (damage := damages.pop(ref.version, None)):
            damage(run.run_dir / "transfer", ref.version)
        return answer

    return published


def chunk_of(folder: Path, version: Version) -> Path:
    """The largest file of the version's arrays, which is a chunk."""
    files = (path for path in (folder / str(version)).rglob("*") if path.is_file())
    return max(files, key=lambda path: (path.stat().st_size, str(path)))


def flip_in_file(folder: Path, version: Version) -> None:
    """Change one bit in the middle of a chunk, which its crc32c detects."""
    chunk = chunk_of(folder, version)
    data = bytearray(chunk.read_bytes())
    data[len(data) // 2] ^= 0x10
    chunk.write_bytes(data)


def take_a_chunk_of_the_version_before(folder: Path, version: Version) -> None:
    """Replace a chunk by one of another version, which only the digest over the leaf detects."""
    chunk = chunk_of(folder, version)
    before = folder / str(Version(version.lineage, version.step - 1)) / chunk.relative_to(folder / str(version))
    assert before.read_bytes() != chunk.read_bytes()
    chunk.write_bytes(before.read_bytes())


def test_3_a_sampler_killed_while_it_receives_weights_disturbs_no_other_process(tmp_path: Path, note) -> None:
    stalled, go_on = threading.Event(), threading.Event()
    with World(tmp_path / "run", **SMALL, schedule__alpha=1, schedule__steps=6) as run, Courier(run.tap) as carrier:
        run.learner()
        run.sampler()
        run.until(lambda: Version(0, 0) in carrier.carried, "the first weights")
        size = len(carrier.carried[Version(0, 0)])
        carrier.spoil(Version(0, 2), weights_proxy.stall(size // 2, stalled, go_on))
        run.until(stalled.is_set, "half of the weights of version 0.2")
        run.kill("sampler-0")
        go_on.set()
        port = int(carrier.upstream.rpartition(":")[2])
        learner = psutil.Process(run.processes["learner"].pid)

        def served() -> list:
            return [c for c in learner.net_connections("tcp") if c.laddr.port == port and c.status != "LISTEN"]

        run.until(lambda: not served(), "the learner to drop the dead reader", 30)
        assert run.processes["learner"].poll() is None
        held = run.query("SELECT COUNT(*) FROM members WHERE state = 'leased'")[0][0]
        run.sampler()
        assert run.ended("learner") == 0, run.logs()
        assert run.ended("sampler-0") == 0, run.logs()
        assert run.query("SELECT COUNT(*) FROM lineages") == [(1,)], "the learner was not disturbed"
        again = run.query("SELECT COUNT(*) FROM members WHERE attempt > 1")[0][0]
        assert again > 0 or not held, (
            "the dead sampler's members were not leased again"
        )  # but for puts that were on their way
        assert_sampled_from_what_was_published(run)
        note(run.judge("3 sampler while receiving", 1))
