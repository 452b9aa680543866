"""`run.trackers`: names, missing packages, and trackers that fail or hang. tests/peers has the real packages."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import re
import sys
import threading
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from jaxroll import config as configs
from jaxroll.config import Config
from jaxroll.control import run_dir
from jaxroll.control.live import PlainView
from jaxroll.errors import ConfigError
from jaxroll.metrics import Scalars
from jaxroll.report import trackers

ROOT = Path(__file__).parents[2]
STEP = {"role": "learner", "kind": "step", "step": 3, "t": 9.0, "loss": 0.5, "reward_mean": 0.25, "padding_waste": 0.1}


def with_run(**keys: Any) -> Config:
    return configs.parse({**configs.to_dict(Config()), "run": keys})


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["wandb", "mlfow"], "Did you mean 'mlflow'"),
        ([3], "no such tracker"),
        (["wandb", "wandb"], "twice"),
        ("wandb", "a list"),
    ],
)
def test_bad_names_are_refused(names: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        with_run(trackers=names)


@pytest.mark.parametrize("name", trackers.KINDS)
def test_a_missing_package_is_named_before_the_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None if package == name else found(package))
    with pytest.raises(ConfigError, match=rf"jaxroll\[{name}\]"):
        trackers.check(with_run(trackers=[name]))
    assert trackers.check(with_run(trackers=["tensorboard"])) is None
    assert trackers.opened(with_run(trackers=[]), Path(), print) == []


def test_names_of_another_stack_replace_ours_where_it_has_one() -> None:
    values = Scalars(trackers.aliases(with_run(metric_names="verl"))).of(STEP)[1]
    assert values == {"actor/pg_loss": 0.5, "critic/rewards/mean": 0.25, "learner/step/padding_waste": 0.1}
    assert trackers.aliases(with_run()) == {}


def test_the_page_has_the_table_of_names() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    rows = {
        cells[0].strip("` "): {
            stack: cell.strip("` ")
            for stack, cell in zip(("verl", "prime-rl", "nemo-rl"), cells[1:], strict=False)
            if cell.strip("` ")
        }
        for cells in (
            line.strip("|").split("|") for line in page.splitlines() if re.match(r"\| `\w+/\w+/\w+` \|", line)
        )
    }
    assert rows == trackers.ALIASES


class Recorder:
    """A tracker that keeps its rows, or raises."""

    def __init__(self, error: Exception | None = None) -> None:
        self.rows: list[Mapping[str, Any]] = []
        self.error, self.closed = error, False

    def log(self, row: Mapping[str, Any]) -> None:
        if self.error is not None:
            raise self.error
        self.rows.append(row)

    def close(self) -> None:
        self.closed = True


def test_a_view_passes_its_rows_on_and_closes(tmp_path: Path) -> None:
    inner, messages = Recorder(), list[str]()
    view = PlainView(tmp_path, 5)
    view.tensorboard, view.trackers = False, [trackers.Background("mine", lambda: inner, messages.append)]
    view.rows([STEP, STEP])
    view.close()
    assert (inner.rows, inner.closed, messages) == ([STEP, STEP], True, [])
    assert not (tmp_path / "tb").exists()


def test_a_tracker_that_fails_is_reported_once_and_loses_only_its_own_rows() -> None:
    messages = list[str]()
    failing = trackers.Background("mine", lambda: Recorder(ValueError("no room")), messages.append)
    for _ in range(3):
        failing.log(STEP)
    failing.close()
    assert failing.lost == 3 and len(messages) == 2 and "no room" in messages[0] and "3 rows" in messages[1]

    def refuses() -> Recorder:
        raise RuntimeError("no service")

    absent = trackers.Background("mine", refuses, messages.append)
    absent.log(STEP)
    absent.close()
    assert absent.lost == 2 and "no service" in messages[2]


def test_a_tracker_that_hangs_does_not_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "MAX_WAITING", 4)
    monkeypatch.setattr(trackers, "CLOSE_LIMIT_S", 0.05)
    free, messages = threading.Event(), list[str]()

    class Hanging(Recorder):
        def log(self, row: Mapping[str, Any]) -> None:
            free.wait(60)

    hanging = trackers.Background("mine", Hanging, messages.append)
    for _ in range(20):
        hanging.log(STEP)  # returns at once
    assert hanging.lost >= 15 and "slower than the run" in messages[0]
    hanging.close()
    assert "does not finish" in messages[-2] and "rows are missing" in messages[-1]
    free.set()


class Calls:
    """A stand-in for any object of a package: every call is recorded and returns another one, or what `known` says."""

    def __init__(self, name: str, record: list[tuple[str, tuple[Any, ...], dict[str, Any]]], known: Mapping[str, Any]):
        self.__dict__ |= {"_name": name, "_record": record, "_known": known}

    def __getattr__(self, name: str) -> Any:
        return Calls(f"{self._name}.{name}", self._record, self._known)

    def __call__(self, *args: Any, **keys: Any) -> Any:
        self._record.append((self._name, args, keys))
        return self._known.get(self._name, Calls(f"{self._name}()", self._record, self._known))


ORDER = {
    "wandb": ["Settings", "init", "init().define_metric", "init().define_metric", "init().log", "init().finish"],
    "trackio": ["init", "init().log", "init().finish"],
    "mlflow": [
        "MlflowClient", "MlflowClient().get_experiment_by_name", "MlflowClient().search_runs",
        "MlflowClient().create_run", "entities.Metric", "entities.Metric", "MlflowClient().log_batch",
        "MlflowClient().set_terminated",
    ],
}  # fmt: skip
CALLS_OF_THE_CONFIG = "MlflowClient().log_param"


def calls(name: str, run: Path, patch: pytest.MonkeyPatch, **known: Any) -> list[tuple[str, tuple[Any, ...], Any]]:
    """The calls of a stand-in for the package, from the start of a run with one row to its end."""
    record = list[tuple[str, tuple[Any, ...], dict[str, Any]]]()
    for module in (name, f"{name}.entities"):
        package = Calls(
            module.removeprefix(name).removeprefix("."), record, {"MlflowClient().search_runs": [], **known}
        )
        patch.setitem(sys.modules, module, types.ModuleType(module))
        sys.modules[module].__spec__ = importlib.machinery.ModuleSpec(module, None)
        sys.modules[module].__getattr__ = lambda word, package=package: Calls(  # type: ignore[method-assign]
            f"{package._name}.{word}".removeprefix("."), record, package._known
        )
    messages = list[str]()
    (tracker,) = trackers.opened(with_run(trackers=[name]), run, messages.append)
    tracker.log({key: STEP[key] for key in ("role", "kind", "step", "t", "loss", "reward_mean")})
    tracker.close()
    assert messages == []
    return record


@pytest.mark.parametrize("name", trackers.KINDS)
def test_calls_come_in_the_order_of_the_package_and_a_resumed_run_has_its_name_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "HF_TOKEN"):
        monkeypatch.setenv(variable, "hunter2")
    for variable in ("MLFLOW_ALLOW_FILE_STORE", "MLFLOW_DISABLE_TELEMETRY", "TRACKIO_DIR"):
        monkeypatch.setenv(variable, "x")  # trackers set them
    runs = [tmp_path / "one", tmp_path / "two"]
    for run in runs:
        with run_dir.new_run(run, with_run(trackers=[name]), ["train"]):
            pass
    record = calls(name, runs[0], monkeypatch)
    assert [each for each, _, _ in record if each != CALLS_OF_THE_CONFIG] == ORDER[name]
    assert "hunter2" not in repr(record) + (runs[0] / "run.json").read_text()

    moved = runs[0].rename(tmp_path / "moved")
    (moved / "metrics.jsonl").write_text(json.dumps(STEP) + "\n")
    names = {"wandb": ("init", "id"), "trackio": ("init", "name"), "mlflow": ("MlflowClient().create_run", "tags")}
    call, key = names[name]
    again, other = calls(name, moved, monkeypatch), calls(name, runs[1], monkeypatch)
    named, named_again, named_other = (
        next(keys[key] for each, _, keys in found if each == call) for found in (record, again, other)
    )
    assert named == named_again != named_other
    if name == "wandb":
        numbers = [keys["step"] for found in (record, again) for each, _, keys in found if each == "init().log"]
        assert numbers == [1, 2], "rows of the continuation come after those before"
    if name == "mlflow":
        known = {"MlflowClient().search_runs": [types.SimpleNamespace(info=types.SimpleNamespace(run_id="r1"))]}
        words = {each: args for each, args, _ in calls(name, moved, monkeypatch, **known)}
        assert not words.keys() & {"MlflowClient().create_run", CALLS_OF_THE_CONFIG}
        assert (
            words["MlflowClient().log_batch"] == ("r1",)
            and named["jaxroll_run"] in words["MlflowClient().search_runs"][1]
        )
