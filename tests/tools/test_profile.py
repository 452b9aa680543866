"""`jaxroll profile`: the table of a trace, and the refusals of the command."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from jax.profiler import ProfileData

from jaxroll.errors import DataError
from jaxroll.tools import profile

US = 1_000_000  # picoseconds


def plane(name: str, lines: dict[str, list[tuple[str, int, int]]], *, operations: bool = False) -> str:
    """A plane as text; its events have a name, a begin and a length in microseconds."""
    names = sorted({event for events in lines.values() for event, _, _ in events})
    text = f'name: "{name}"'
    for number, event in enumerate(names, 1):
        text += f' event_metadata {{ key: {number} value {{ id: {number} name: "{event}" }} }}'
    text += ' stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }'
    stat = ' stats { metadata_id: 1 str_value: "op" }' if operations else ""
    for line, events in lines.items():
        body = "".join(
            f" events {{ metadata_id: {names.index(event) + 1} "
            f"offset_ps: {begin * US} duration_ps: {length * US}{stat} }}"
            for event, begin, length in events
        )
        text += f' lines {{ name: "{line}" timestamp_ns: 1000{body} }}'
    return f"planes {{ {text} }}"


def trace(*planes: str) -> ProfileData:
    return ProfileData.from_serialized_xspace(ProfileData.text_proto_to_serialized_xspace(" ".join(planes)))


def test_a_device_is_busy_while_an_operation_runs_and_a_thread_while_it_does_not_wait() -> None:
    """Two chips with an operation inside a loop, and a program around it that says nothing about idle time."""
    chips = [
        plane(f"/device:TPU:{chip}", {
            "XLA Modules": [("jit_step", 0, 1000)],
            "Async XLA Ops": [("copy-start", 0, 900)],
            "XLA Ops": [("while", 100, 300), ("fusion.1", 200, 100), ("copy", 600, 100 * (1 + chip))],
        })
        for chip in range(2)
    ]  # fmt: skip
    host = plane("/host:CPU", {"python/7": [("PjitFunction(step)", 0, 500), ("Await", 100, 350), ("prepare", 700, 50)]})
    found = profile.shares_of(trace(*chips, host, plane("/host:metadata", {})), 1e-3, 2)
    assert found.devices == pytest.approx({"TPU:0": 400e-6, "TPU:1": 500e-6})
    assert found.device_share == pytest.approx(0.45)
    assert found.threads == pytest.approx({"python 0": 200e-6})
    own = {one.name: (round(one.seconds * 1e6), one.calls) for one in found.operations}
    assert own == {"while": (400, 2), "copy": (300, 2), "fusion.1": (200, 2)}
    calls = [(one.name, round(one.seconds * 1e6)) for one in found.calls]
    assert calls == [("PjitFunction(step)", 150), ("prepare", 50)]
    shown = profile.lines("learner", found)
    assert shown[0] == "learner: 2 steps in 0.001 s, 0.0005 s a step"
    (idle,) = [line for line in shown if "idle" in line]
    assert idle.endswith("55.0 %")


def test_the_streams_of_a_gpu_count_once_where_they_overlap() -> None:
    streams = {"Stream #1": [("gemm", 0, 100)], "Stream #2": [("copy", 50, 100)], "Steps": [("1", 0, 400)]}
    found = profile.shares_of(trace(plane("/device:GPU:0", streams)), 400e-6, 1)
    assert found.devices == pytest.approx({"GPU:0": 150e-6}) and len(found.operations) == 2


def test_operations_of_a_cpu_are_events_of_its_threads() -> None:
    """One that runs inside a call of the host counts for the device alone, and the time is that of the events."""
    pool = plane("/host:CPU", {"tf_pool/1": [("dot", 0, 30)], "tf_pool/2": [("dot", 20, 30)]}, operations=True)
    main = plane("/host:CPU", {"python/3": [("execute", 0, 100)]})
    found = profile.shares_of(trace(pool, main), None, 1)
    assert found.devices == pytest.approx({"cpu:0": 50e-6}) and found.seconds == pytest.approx(100e-6)
    assert found.threads == pytest.approx({"python 0": 100e-6}) and found.device_share == pytest.approx(0.5)


@pytest.mark.parametrize("as_json", [False, True])
def test_a_trace_on_another_machine_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    row = {"folder": str(tmp_path / "there"), "host": "far", "steps": 3}

    async def recorded(*_: Any) -> dict[str, Any]:
        return row

    monkeypatch.setattr(profile, "record", recorded)
    given = argparse.Namespace(role="sampler-0", steps=3, timeout=9.0, python=False, folder="runs/x", json=as_json)
    assert profile.main(tmp_path, given) == 0
    out = capsys.readouterr().out
    if as_json:
        assert json.loads(out) == {"role": "sampler-0", "folder": row["folder"], "host": "far"}
    else:
        assert "runs on far" in out and out.splitlines()[-1] == row["folder"]


def test_a_folder_without_a_trace_and_a_trace_without_events_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no trace"):
        profile.shares(tmp_path, 1.0, 1)
    with pytest.raises(DataError, match="has no events"):
        profile.shares_of(trace(plane("/host:CPU", {})), 1.0, 1)
