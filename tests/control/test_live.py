"""The live view of a run: on a terminal a table, elsewhere lines, and never ten seconds of silence."""

from __future__ import annotations

import io
import itertools
from pathlib import Path

import pytest
from rich.console import Console

from jaxroll import config as configs
from jaxroll.config import Config
from jaxroll.control import live, run_dir
from jaxroll.control.live import Status
from jaxroll.control.supervisor import ProcessView

GOLDEN = Path(__file__).parent / "golden"
STEP = {
    "kind": "step",
    "role": "learner",
    "step": 3,
    "t": 110.0,
    "t1": 109.5,
    "reward_mean": 0.625,
    "age_mean": 0.4,
    "age_max": 1,
    "wait_s": 0.31,
    "train_s": 0.7,
}
ROWS = [
    {"kind": "stats", "role": "sampler-0", "tokens_per_s": 10000.0},
    {"kind": "stats", "role": "sampler-0", "tokens_per_s": 14000.0},
    {"kind": "stats", "role": "sampler-1", "tokens_per_s": 8000.0},
    {"kind": "eval", "role": "evaluator", "step": 0, "accuracy": 0.4707, "n": 512},
    {"kind": "store", "role": "store", "waits": {"sampler-1": "has group 7"}},
    {**STEP, "step": 2, "t1": 108.25},
    STEP,
]


class ManualTime:
    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def folded(rows: list[dict]) -> Status:
    status = Status(of_steps=50)
    for row in rows:
        status.take(row)
    return status


def test_a_step_shows_reward_accuracy_rate_age_and_waits() -> None:
    cells = folded(ROWS).steps[-1].cells(50)
    assert cells == (
        "3/50",
        "0.625",
        "47.1 % @0",
        "20,000",
        "0.40 / 1",
        "1.25",
        "groups, 0.3 s; sampler-1 (has group 7)",
    )


def test_unknown_values_are_dashes() -> None:
    assert folded([{"kind": "step", "step": 1}]).steps[-1].cells(9) == ("1/9", "-", "-", "-", "-", "-", "-")
    assert folded(
        [{"kind": "stats", "role": "s", "tokens_per_s": None}, {"kind": "eval", "accuracy": None}]
    ).steps.maxlen


def test_compiling_is_named_with_its_age_until_it_ends_or_its_process_dies() -> None:
    begin = {"kind": "compile", "role": "learner", "what": "compiling learner step", "state": "start", "t": 100.0}
    up = [ProcessView("learner", "running", 20.0)]
    status = folded([begin])
    assert "compiling learner step, 14 s" in status.doing(114.0, up)
    said = status.take({**begin, "state": "end", "t": 115.0, "seconds": 15.0})
    assert said == "learner: compiling learner step took 15.0 s"
    assert "compiling" not in status.doing(116.0, up)
    assert "compiling" not in folded([begin, {"kind": "restart", "process": "learner"}]).doing(114.0, up)


@pytest.mark.parametrize(
    ("processes", "words"),
    [
        ([("store", "starting", 3.2)], "waiting for store, 3 s"),
        ([("store", "running", 5.0), ("learner", "running", 4.0)], "first report of store (5 s), learner (4 s)"),
        ([("store", "running", 5.0), ("sampler-0", "backoff", 0.3)], "sampler-0 died"),
        ([("learner", "stopping", 3.0), ("store", "running", 9.0)], "stopping learner (3 s)"),
        ([], "starting"),
    ],
)
def test_every_state_has_a_text(processes: list[tuple[str, str, float]], words: str) -> None:
    assert words in Status(5).doing(100.0, [ProcessView(*one) for one in processes])


def test_after_the_last_step_no_next_one_is_promised() -> None:
    status = Status(of_steps=3)
    status.take(STEP)
    assert status.doing(115.0, []) == "all steps are trained"


def test_the_newest_message_of_a_role_is_shown_until_it_makes_progress() -> None:
    said = {"kind": "event", "role": "learner", "text": "compiling apply", "t": 100.0}
    up = [ProcessView("learner", "running", 20.0)]
    assert "learner: compiling apply, 7 s" in folded([{**said, "text": "old"}, said]).doing(107.0, up)
    assert "compiling apply" not in folded([said, STEP]).doing(107.0, up)
    assert "compiling apply" not in folded([said]).doing(107.0, [ProcessView("learner", "done", 1.0)])


def test_a_reported_stall_is_shown_until_the_next_step() -> None:
    status, processes = Status(of_steps=9), [ProcessView("store", "running", 70.0)]
    status.take({"kind": "event", "role": "store", "t": 60.0, "text": "no progress for 60 s", "what": "stall"})
    assert "no progress for 60 s" in status.doing(70.0, processes)
    status.take({"kind": "step", "role": "learner", "step": 1, "t": 71.0})
    assert "no progress" not in status.doing(72.0, processes)
    status.take({"kind": "event", "role": "store", "t": 73.0, "text": "the certificate expires in 2 days"})
    status.take({"kind": "step", "role": "learner", "step": 2, "t": 74.0})
    assert "certificate" in status.doing(75.0, processes), "other messages of the store stay"


def test_the_samplers_of_the_learner_join_silently_and_die_with_it() -> None:
    status, up = (
        Status(of_steps=50),
        [ProcessView("learner", "running", 20.0), ProcessView("sampler-0", "running", 9.0)],
    )
    status.config = {"sampler": {"count": 2}, "placement": {"learner_samplers": 1}}
    status.doing(100.0, up)
    joins = [status.take({"kind": "event", "role": f"sampler-{n}", "what": "join", "text": "joined"}) for n in range(3)]
    assert joins == [None, None, "sampler-2: joined"]
    for role in ("sampler-0", "sampler-1"):
        status.take({"kind": "stats", "role": role, "tokens_per_s": 8000.0})
    status.take({"kind": "restart", "process": "learner"})
    status.take(STEP)
    assert status.steps[-1].cells(50)[3] == "8,000", "the rate of the sampler that lives"


def test_messages_of_a_process_are_shown_until_it_dies() -> None:
    words = [
        {"kind": "event", "role": "learner", "text": "waiting until the evaluator has version 0.3", "t": 100.0},
        {"kind": "compile", "role": "sampler-0", "what": "compiling the engine", "state": "start", "t": 100.0},
        {"kind": "event", "role": "store", "text": "compacting", "t": 100.0},
        {"kind": "stats", "role": "sampler-0", "tokens_per_s": 8000.0},
    ]
    up = [ProcessView("store", "running", 20.0), ProcessView("colocated", "running", 20.0)]
    for shown in ("learner: waiting until the evaluator has", "sampler-0: compiling the engine", "store: compacting"):
        assert shown in folded(words).doing(107.0, up)
    status = folded([*words, {"kind": "restart", "process": "colocated"}, STEP])
    assert "compil" not in (said := status.doing(107.0, up)) and "waiting until" not in said
    assert "store: compacting" in said, "the store is another process, which still runs"
    assert status.steps[-1].cells(50)[3] == "-", "the rate of the dead process"


def test_between_steps_the_next_one_and_the_waits_are_named() -> None:
    said = folded(ROWS).doing(113.5, [])
    assert said.startswith("step 4, 4 s") and "waiting for sampler-1 (has group 7)" in said


def test_plain_view_prints_every_step_and_breaks_every_silence_before_ten_seconds(tmp_path: Path) -> None:
    out, clock = io.StringIO(), ManualTime()
    view = live.PlainView(tmp_path, 50, out=out, now=clock)
    printed_at = [clock.now]
    for tick in range(600):
        clock.now = 100.0 + tick / 10
        before = out.tell()
        if tick == 250:
            view.rows([STEP])
        view.tick([ProcessView("learner", "running", tick / 10)])
        if out.tell() > before:
            printed_at.append(clock.now)
    gaps = [b - a for a, b in itertools.pairwise(printed_at)]
    assert max(gaps) < 10 and min(gaps) >= 1
    assert "step 3/50  reward 0.625" in out.getvalue()
    assert "waiting for the first report of learner" in out.getvalue()
    view.close()


def test_table_view_draws_on_a_terminal(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=140)
    view = live.TableView(tmp_path, 50, console=console, now=ManualTime(110.0))
    view.rows(ROWS)
    view.say("a word to keep")
    view.tick([ProcessView("learner", "running", 3.0)])
    view.close()
    drawn = console.file.getvalue()  # type: ignore[attr-defined]
    for words in ("held-out", "3/50", "0.625", "47.1 % @0", "20,000", "a word to keep", "waiting for"):
        assert words in drawn


WIDEST = [
    {"kind": "eval", "role": "evaluator", "step": 1000, "accuracy": 1.0, "n": 512},
    {"kind": "store", "role": "store", "waits": {"sampler-1": "group 1234 misses members 1, 2, 3"}},
    {"kind": "stats", "role": "sampler-0", "tokens_per_s": 1234567.0},
    {"kind": "step", "role": "learner", "step": 1000, "t": 110.0, "t1": 109.5, "reward_mean": -0.625, "age_mean": 12.34,
     "age_max": 16, "wait_s": 12.31, "train_s": 1234.56},
]  # fmt: skip


@pytest.mark.parametrize("width", [80, 100, 120])
def test_the_table_keeps_every_number_whole(width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an intended change of the table copy what the failing test prints into the golden file."""
    monkeypatch.chdir(tmp_path)
    console = Console(file=io.StringIO(), width=width)
    view = live.TableView(Path("runs/demo"), 1000, console=console)
    view.rows(WIDEST)
    console.print(view._render())
    view._live.stop()
    drawn = [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    view.close()
    table = "\n".join(drawn[: next(i for i, line in enumerate(drawn) if line.startswith("1000/1000")) + 1]) + "\n"
    *numbers, waits = view.status.steps[-1].cells(1000)
    assert all(number in table for number in numbers) and max(map(len, drawn)) <= width
    shown = table.splitlines()[-1].partition(numbers[-1])[2].strip().removesuffix("…").split()
    assert shown and shown == waits.split()[: len(shown)], "the last column is cut between words"
    assert table == (GOLDEN / f"live_{width}.txt").read_text(encoding="utf-8"), table


def with_bottleneck(step: int) -> list[dict]:
    """Twenty steps of a learner that never waits."""
    return [
        {
            **STEP,
            "step": n,
            "t": float(n),
            "t0": n - 1.0,
            "t1": float(n),
            "wait_s": 0.0,
            "train_s": 1.0,
            "publish_s": 0.0,
        }
        for n in range(1, step + 1)
    ]


def test_both_views_name_the_bottleneck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configs.to_dict(Config())
    monkeypatch.setattr("sys.stdout", io.StringIO())
    plain = live.open_view(tmp_path, config)
    plain.rows(with_bottleneck(20))
    assert isinstance(plain, live.PlainView)
    assert plain._out.getvalue().count("bottleneck: learner: ") == 1, "once, until it is another one"  # type: ignore[attr-defined]
    console = Console(file=io.StringIO(), width=120)
    table = live.TableView(tmp_path, 50, console=console)
    table.status.config = config
    table.rows(with_bottleneck(20))
    console.print(table._render())
    table._live.stop()
    assert "(learner.micro_batch_rows)" in console.file.getvalue()  # type: ignore[attr-defined]
    plain.close()
    table.close()


def test_view_writes_tensorboard_events_and_the_devices(tmp_path: Path) -> None:
    path = run_dir.create(tmp_path / "run", Config(), ["train"])
    view = live.PlainView(path, 50, out=io.StringIO())
    found = {"platform": "cpu", "devices": ["cpu:0", "cpu:1"], "attention": {"packed": "xla (as configured)"}}
    view.rows([*ROWS, {"kind": "devices", "role": "learner", "t": 1.0, **found}])
    view.close()
    assert run_dir.load(path)["devices"] == {"learner": found}
    assert len(list((path / "tb").iterdir())) == 1
