"""Trackers of `run.trackers`: the metrics of a run in Weights & Biases, MLflow or trackio.

Each tracker gets the numbers that TensorBoard gets, under the same names. It runs in a thread of its own with a bounded
queue: a service that hangs or fails costs metrics there, never a step. `RUN/metrics.jsonl` stays the record of the run.
Packages are imported when a run starts.

A resumed run continues its run in the tracker (`_identity`). Credentials are read by the packages from their own
environment variables and files; no config, run.json or row has them.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import json
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxroll import config as configs
from jaxroll.config import Config
from jaxroll.errors import ConfigError, described
from jaxroll.metrics import Scalars, Tracker
from jaxroll.run_paths import RunPaths

MAX_WAITING = 20_000  # rows
CLOSE_LIMIT_S = 30.0
PROJECT = "jaxroll"
MLFLOW_TAG = "jaxroll_run"

# Names that users of other stacks know, for the metrics that mean the same there. docs/metrics.md has this table and
# the versions of the stacks in which the names were looked up.
ALIASES: Mapping[str, Mapping[str, str]] = {
    "learner/step/reward_mean": {"verl": "critic/rewards/mean", "nemo-rl": "train/reward"},
    "learner/step/loss": {"verl": "actor/pg_loss", "prime-rl": "loss/mean", "nemo-rl": "train/loss"},
    "learner/step/grad_norm": {"verl": "actor/grad_norm", "prime-rl": "optim/grad_norm", "nemo-rl": "train/grad_norm"},
    "learner/step/learning_rate": {"verl": "actor/lr", "prime-rl": "optim/lr", "nemo-rl": "train/lr"},
    "learner/step/entropy": {
        "verl": "actor/entropy", "prime-rl": "entropy/all/mean", "nemo-rl": "train/approx_entropy",
    },
    "learner/step/clip_share": {"verl": "actor/pg_clipfrac", "prime-rl": "is_masked/mean"},
    "learner/step/ess": {"verl": "rollout_corr/rollout_is_eff_sample_size"},
    "learner/step/kl_behaviour": {
        "verl": "rollout_corr/kl", "prime-rl": "mismatch_kl/all/mean", "nemo-rl": "train/gen_kl_error",
    },
    "learner/step/age_mean": {
        "verl": "training/off_policy/trajectory_staleness/mean", "prime-rl": "off_policy/mean",
        "nemo-rl": "train/avg_trajectory_age",
    },
    "learner/step/train_s": {
        "verl": "timing_s/update_actor", "prime-rl": "time/forward_backward",
        "nemo-rl": "timing/train/policy_training",
    },
    "learner/step/wait_s": {
        "verl": "timing_s/gen", "prime-rl": "time/wait_for_batch", "nemo-rl": "timing/train/exposed_generation",
    },
    "learner/step/publish_s": {
        "verl": "timing_s/update_weights", "prime-rl": "time/broadcast_weights",
        "nemo-rl": "timing/train/weight_sync",
    },
    "evaluator/eval/accuracy": {"nemo-rl": "validation/accuracy"},
}  # fmt: skip


class WandbTracker:
    """Rows in Weights & Biases; offline, in the run's folder, unless WANDB_MODE or WANDB_API_KEY is set."""

    package = "wandb"

    def __init__(self, config: Config, folder: Path) -> None:
        wandb = importlib.import_module("wandb")
        mode = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=folder.name,
            dir=str(folder),
            mode=mode,
            id=_identity(folder),
            resume="allow",
            config=configs.to_dict(config),
            allow_val_change=True,
            settings=wandb.Settings(console="off", silent=True),
        )
        self._scalars, self._known, self._number = Scalars(aliases(config)), set[str](), 0
        # wandb drops rows whose number is not above that of the newest row. The file has at least as many rows.
        with contextlib.suppress(FileNotFoundError), RunPaths(folder).metrics.open("rb") as lines:
            self._number = sum(1 for _ in lines)

    def log(self, row: Mapping[str, Any]) -> None:
        """Log the row's numbers over its step."""
        step, values = self._scalars.of(row)
        axis = _axis(row)
        for tag in values.keys() - self._known:
            self._known.add(tag)
            self._run.define_metric(tag, step_metric=axis)
        if values:
            self._number += 1
            self._run.log({**values, axis: step}, step=self._number)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class MlflowTracker:
    """Rows in MLflow, at MLFLOW_TRACKING_URI or else in the run's folder."""

    package = "mlflow"

    def __init__(self, config: Config, folder: Path) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # it refuses a folder otherwise
        mlflow = importlib.import_module("mlflow")
        uri = os.environ.get("MLFLOW_TRACKING_URI") or RunPaths(folder).mlflow.resolve().as_uri()
        for file in RunPaths(folder).mlflow.glob("*/*/metrics/**/*"):
            if file.is_file() and not file.stat().st_size:  # a full disk left it, and MLflow refuses the whole run
                file.unlink()
        self._entities = importlib.import_module("mlflow.entities")
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        run = _identity(folder)
        resumed = self._client.search_runs([experiment], f"tags.{MLFLOW_TAG} = '{run}'", max_results=1)
        if resumed:
            self._run = resumed[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
        else:
            self._run = self._client.create_run(experiment, run_name=folder.name, tags={MLFLOW_TAG: run}).info.run_id
            for key, value in _flat(configs.to_dict(config)).items():  # a parameter cannot change later
                self._client.log_param(self._run, key, str(value)[:500])
        self._scalars = Scalars(aliases(config))

    def log(self, row: Mapping[str, Any]) -> None:
        """Log the row's numbers over its step."""
        step, values = self._scalars.of(row)
        at_ms = int(float(row.get("t") or 0.0) * 1000)
        metrics = [self._entities.Metric(tag, float(value), at_ms, step) for tag, value in values.items()]
        if metrics:
            self._client.log_batch(self._run, metrics=metrics)

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run)


class TrackioTracker:
    """Rows in trackio, in TRACKIO_DIR or else in the run's folder."""

    package = "trackio"

    def __init__(self, config: Config, folder: Path) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(RunPaths(folder).trackio.resolve()))
        self._trackio = importlib.import_module("trackio")
        self._run = self._trackio.init(
            project=PROJECT,
            name=f"{config.run.name}-{_identity(folder)[:6]}",
            config=configs.to_dict(config),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
            resume="allow",
        )
        self._scalars = Scalars(aliases(config))

    def log(self, row: Mapping[str, Any]) -> None:
        """Log the row's numbers; trackio has one step for all, so they count the rows and the step is a metric."""
        step, values = self._scalars.of(row)
        if values:
            self._run.log({**values, _axis(row): step})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


KINDS: Mapping[str, type[WandbTracker] | type[MlflowTracker] | type[TrackioTracker]] = {
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "trackio": TrackioTracker,
}


class Background:
    """A tracker in a thread of its own. `log` returns at once; rows that do not fit into the queue are dropped.

    `say` receives the first failure; `lost` counts rows that were dropped or that the tracker refused.
    """

    def __init__(self, name: str, make: Callable[[], Tracker], say: Callable[[str], object]) -> None:
        self._name, self._make, self._say = name, make, say
        self.lost = 0
        self._rows: queue.Queue[Mapping[str, Any] | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, row: Mapping[str, Any]) -> None:
        """Hand over a row."""
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            self._failed("it is slower than the run")

    def close(self) -> None:
        """Let the tracker finish, for `CLOSE_LIMIT_S` at most."""
        with contextlib.suppress(queue.Full):
            self._rows.put(None, timeout=CLOSE_LIMIT_S)
        self._thread.join(CLOSE_LIMIT_S)
        if self._thread.is_alive():
            self._say(f"{self._name} does not finish within {CLOSE_LIMIT_S:g} s; its last metrics may be missing.")
        if self.lost > 1:
            self._say(f"{self._name}: {self.lost:,} rows are missing there in all.")

    def _failed(self, reason: str) -> None:
        self.lost += 1
        if self.lost == 1:
            self._say(f"{self._name}: {reason}. Metrics are lost there; RUN/metrics.jsonl has all of them.")

    def _run(self) -> None:
        tracker = None
        try:
            tracker = self._make()
        except Exception as error:  # noqa: BLE001 - foreign code; the run continues without this tracker
            self._failed(described(error))
        while (row := self._rows.get()) is not None:
            if tracker is None:
                self.lost += 1
                continue
            try:
                tracker.log(row)
            except Exception as error:  # noqa: BLE001 - as above
                self._failed(described(error))
        if tracker is not None:
            try:
                tracker.close()
            except Exception as error:  # noqa: BLE001 - as above
                self._failed(described(error))


def check(config: Config) -> None:
    """Raise ConfigError if the package of a tracker in `run.trackers` is not installed here."""
    for name in config.run.trackers:
        if name in KINDS and importlib.util.find_spec(KINDS[name].package) is None:
            raise ConfigError("run.trackers", name, "its package is not installed", f"pip install 'jaxroll[{name}]'.")


def opened(config: Config, run_dir: Path, say: Callable[[str], object]) -> Sequence[Background]:
    """The trackers of the run, TensorBoard's excepted. ConfigError as for `check`."""
    check(config)
    folder = RunPaths(run_dir).folder
    return [
        Background(name, lambda kind=KINDS[name]: kind(config, folder), say)
        for name in config.run.trackers
        if name in KINDS
    ]


def aliases(config: Config) -> dict[str, str]:
    """The names of `run.metric_names` by JaxRoll's."""
    stack = config.run.metric_names
    return {ours: names[stack] for ours, names in ALIASES.items() if stack in names}


def _axis(row: Mapping[str, Any]) -> str:
    """The name of the metric that holds the step of the row's metrics."""
    return f"{row.get('role', 'run')}/{row.get('kind')}/step"


def _identity(folder: Path) -> str:
    """The run's name in trackers: the same when the run is resumed or its folder moved, and of no other run."""
    created = json.loads(RunPaths(folder).run_file.read_text(encoding="utf-8"))["created"]
    return hashlib.sha256(repr(created).encode()).hexdigest()[:16]


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in config.items():
        found |= (
            _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) and value else {f"{prefix}{name}": value}
        )
    return found
