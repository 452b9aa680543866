"""Shared memory: one copy for all readers of a host, never overwritten while it is used, and nothing left behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from jaxroll import wire
from jaxroll.errors import DigestMismatch, TransferError
from jaxroll.records import Version, VersionRef
from jaxroll.transfer import channel_shm, channels
from jaxroll.transfer.channel_shm import SharedSegments
from jaxroll.transfer.ends import Publisher, Staged
from jaxroll.transfer.manifest import HostSnapshot

ONE = (1, 1, 1)
_READER = Path(__file__).parents[1] / "harness/programs/weight_reader.py"


def fetch(kit, announced: VersionRef, dims: tuple[int, int, int] = ONE, rules: str = "replicated") -> Staged:
    return kit.receiver().fetch(announced, kit.shardings(dims, rules), kit.abstract(kit.shapes))


def publish(kit, publisher: Publisher, step: int, dims: tuple[int, int, int] = ONE) -> VersionRef:
    return publisher.publish(Version(0, step), kit.params(kit.values(step), kit.shardings(dims, "learner")))


def segments_of(publisher: Publisher) -> SharedSegments:
    return publisher._sender._shelf._shared


def assert_holds(params: dict, values: dict[str, np.ndarray]) -> None:
    for name, value in values.items():
        assert np.asarray(params[name]).tobytes() == value.tobytes(), name


def is_mapped(buffer: np.ndarray) -> bool:
    """True if the buffer's memory belongs to a publisher's segment."""
    address = buffer.__array_interface__["data"][0]
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split(maxsplit=1)[0].split("-"))
        if start <= address < end:
            return "/memfd:jaxroll-weights" in line
    return False


@pytest.mark.parametrize(("channel", "mapped"), [("shm", True), ("auto", True), ("tcp", False)])
def test_a_box_within_a_source_box_is_used_in_place_without_a_copy(kit, channel: str, mapped: bool) -> None:
    staged = fetch(kit, publish(kit, kit.publisher(channel), 1), (1, 1, 2), "sampler")
    for leaf in staged._leaves:
        for buffer in leaf.buffers.values():
            assert not buffer.flags.writeable
            assert is_mapped(buffer) == mapped or not buffer.size, leaf.manifest.name
    assert_holds(staged.place(), kit.values(1))


def test_a_box_that_crosses_source_boxes_is_gathered(kit) -> None:
    staged = fetch(kit, publish(kit, kit.publisher("shm"), 1, (1, 4, 1)))
    (embed,) = next(leaf for leaf in staged._leaves if leaf.manifest.name == "embed").buffers.values()
    assert not is_mapped(embed)
    assert_holds(staged.place(), kit.values(1))


def test_memory_is_reused_when_no_reader_uses_it(kit) -> None:
    publisher = kit.publisher("shm")
    seen = set()
    for step in range(6):
        assert_holds(fetch(kit, publish(kit, publisher, step)).place(), kit.values(step))
        seen |= {segment.address for segment in segments_of(publisher)._segments}
    # Two versions are kept and one is written; a connection that is being closed may hold another one.
    assert len(seen) <= 4
    assert len(channel_shm._MAPPINGS._kept) <= 4


def test_what_a_reader_still_uses_is_not_overwritten(kit) -> None:
    """On CPU the placed arrays are the shared memory itself."""
    publisher = kit.publisher("shm")
    used = {step: fetch(kit, publish(kit, publisher, step), (1, 1, 2), "sampler").place() for step in range(3)}
    staged = fetch(kit, publish(kit, publisher, 3), (1, 1, 2), "sampler")
    for step in range(4, 9):
        publish(kit, publisher, step)
    for step, params in used.items():
        assert_holds(params, kit.values(step))
    assert_holds(staged.place(), kit.values(3))
    assert len(segments_of(publisher)._segments) == 4 + 3
    used.clear()
    del staged, params
    gc.collect()
    publish_until_three_segments(kit, publisher, 9)


def test_too_little_memory_is_an_error_before_anything_is_written(kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_shm, "available_bytes", lambda: 300 << 20)
    monkeypatch.setattr(channel_shm, "_RESERVE_BYTES", 300 << 20)
    with pytest.raises(TransferError, match=r"300 MiB are free.*Set transfer\.channel to tcp, or give"):
        publish(kit, kit.publisher("shm"), 1)
    staged = fetch(kit, publish(kit, kit.publisher("auto"), 1))
    assert not any(is_mapped(buffer) for leaf in staged._leaves for buffer in leaf.buffers.values())
    assert_holds(staged.place(), kit.values(1))


def test_auto_sends_over_tcp_to_another_host_and_stops_writing_shared_memory(kit, monkeypatch) -> None:
    publisher, required = kit.publisher("auto"), kit.publisher("shm")
    announced, wanted = publish(kit, publisher, 1), publish(kit, required, 1)
    monkeypatch.setattr(channel_shm, "host_key", lambda: "another boot pid:[1]")
    staged = fetch(kit, announced)
    assert not any(is_mapped(buffer) for leaf in staged._leaves for buffer in leaf.buffers.values())
    assert_holds(staged.place(), kit.values(1))
    with pytest.raises(TransferError, match=r"another host, or shares no memory.*transfer\.channel=auto"):
        fetch(kit, wanted)
    for step in (2, 3, 4):
        assert_holds(fetch(kit, publish(kit, publisher, step)).place(), kit.values(step))
    assert segments_of(publisher)._segment(publisher._sender._shelf.get(Version(0, 4)).pieces[1][0]) is None


def test_a_snapshot_that_changed_before_it_was_shared_is_refused(kit) -> None:
    values = kit.values(1)
    taken = kit.host_snapshot(Version(0, 1), values)
    values["embed"][3, 4] += 1
    with pytest.raises(DigestMismatch, match=r"leaf 'embed' of version 0\.1 changed after its manifest"):
        kit.publisher("shm").offer(taken)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file, places: (msgspec.structs.replace(file, stamp=b"0" * 16), places), "holds another version"),
        (lambda file, places: (msgspec.structs.replace(file, fd=0), places), "no shared memory of a publisher"),
        (lambda file, places: (msgspec.structs.replace(file, fd=1 << 20), places), "No such file"),
        (lambda file, places: (msgspec.structs.replace(file, size_bytes=1 << 30), places), "not the announced"),
        (lambda file, places: (file, places[1:]), "names 5 pieces of 6"),
        (lambda file, places: (file, [(0, 1 << 40)] * len(places)), "outside of its shared memory"),
        (lambda file, places: (file, [(1, 4096)] * len(places)), "outside of its shared memory"),
        (lambda file, places: (file, [(0, 0)] * len(places)), "outside of its shared memory"),
    ],
)
def test_a_wrong_description_of_the_memory_is_refused(kit, monkeypatch, change, message: str) -> None:
    publisher = kit.publisher("shm")
    announced, real = publish(kit, publisher, 1), segments_of(publisher).located

    def located(snapshot: HostSnapshot, host: str) -> channels.SharedReply:
        reply = real(snapshot, host)
        file, places = change(reply.files[0], list(reply.places))
        return msgspec.structs.replace(reply, files=(file,), places=tuple(places))

    monkeypatch.setattr(segments_of(publisher), "located", located)
    with pytest.raises(TransferError, match=message):
        fetch(kit, announced)


def test_a_reader_that_comes_while_the_memory_is_written_is_refused(kit) -> None:
    publisher = kit.publisher("shm")
    announced = publish(kit, publisher, 1)
    (segment,) = segments_of(publisher)._segments
    segment._content = None
    assert segment.start() is not None
    with pytest.raises(TransferError, match="being written"):
        fetch(kit, announced)


def publish_until_three_segments(kit, publisher: Publisher, step: int) -> None:
    """Publish until only two versions and a spare hold memory: the listener drops closed connections meanwhile."""
    give_up_s = time.monotonic() + 20
    while True:
        publish(kit, publisher, step)
        if len(segments_of(publisher)._segments) == 3:
            return
        assert time.monotonic() < give_up_s, "memory that is not used any more was not given back"
        step += 1


def shared_names() -> set[str]:
    return set(os.listdir("/dev/shm"))


@pytest.mark.process
def test_the_memory_of_a_killed_reader_is_given_back(kit) -> None:
    before = shared_names()
    publisher = kit.publisher("shm")
    announced = publish(kit, publisher, 1)
    with subprocess.Popen(
        [sys.executable, str(_READER), wire.encode(announced).hex()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(_READER.parents[3])},
    ) as reader:
        assert reader.stdout.readline() == "mapped\n"
        (first,) = segments_of(publisher)._segments
        for step in range(2, 7):
            publish(kit, publisher, step)
        assert first in segments_of(publisher)._segments, "memory that a live reader maps was reused or given back"
        assert not first.free()
        reader.send_signal(signal.SIGKILL)
        reader.wait(10)
    publish_until_three_segments(kit, publisher, 7)
    publisher.close()
    assert shared_names() - before == set()
