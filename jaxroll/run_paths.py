"""Paths of the files and folders in a run's folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunPaths:
    """Paths in the run's folder, by meaning; the only place that knows their names.

    A property returns the path whether or not there is a file. docs/run_folder.md describes the folder for users.
    """

    folder: Path

    @property
    def run_file(self) -> Path:
        """Config, digest, versions and devices of the run. A folder without it is no run."""
        return self.folder / "run.json"

    @property
    def lock(self) -> Path:
        """Lock of the supervisor, or of a store that was started alone."""
        return self.folder / ".lock"

    @property
    def metrics(self) -> Path:
        """Metric rows and events, one JSON object a line, written by store and supervisor."""
        return self.folder / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """Folder of TensorBoard's event files."""
        return self.folder / "tb"

    @property
    def logs(self) -> Path:
        """Folder of the processes' output."""
        return self.folder / "logs"

    def log_of(self, process: str) -> Path:
        """Output of a process that the supervisor started."""
        return self.logs / f"{process}.log"

    @property
    def page(self) -> Path:
        """The page that `jaxroll report` writes."""
        return self.folder / "report.html"

    @property
    def verdicts(self) -> Path:
        """Verdicts of judges and reward models, and the budget that they used (SQLite)."""
        return self.folder / "verdicts.db"

    # --- the store

    @property
    def database(self) -> Path:
        """The store's log and its tables (SQLite)."""
        return self.folder / "store.db"

    @property
    def store_lock(self) -> Path:
        """Lock of the store process; it contains its pid."""
        return self.folder / "store.lock"

    @property
    def store_address(self) -> Path:
        """HOST:PORT of the store, written once it answers."""
        return self.folder / "store.addr"

    @property
    def token(self) -> Path:
        """The run's secret, from which the tokens of its roles are derived."""
        return self.folder / "token"

    @property
    def tls(self) -> Path:
        """Folder of the certificates."""
        return self.folder / "tls"

    # --- the roles

    @property
    def alphabet(self) -> Path:
        """Alphabet of a `char` tokenizer, which the config does not contain."""
        return self.folder / "alphabet.json"

    @property
    def warm_start(self) -> Path:
        """Folder of the warm start's parameters."""
        return self.folder / "warm"

    @property
    def warm_start_done(self) -> Path:
        """Mark that the warm start need not be repeated on `--resume`."""
        return self.folder / ".warm-done"

    @property
    def checkpoints(self) -> Path:
        """Folder of the learner's checkpoints."""
        return self.folder / "checkpoints"

    @property
    def forked(self) -> Path:
        """Mark that the learner has made its fork, so that the supervisor starts the other roles."""
        return self.folder / ".forked"

    @property
    def coordinator_address(self) -> Path:
        """HOST:PORT of JAX's coordinator, where the learner has several hosts and chooses the port itself."""
        return self.folder / "learner.addr"

    def sampler_address(self, name: str) -> Path:
        """HOST:PORT at which the sampler `name` serves generation requests of actors."""
        return self.folder / f"{name}.addr"

    def http_address(self, name: str) -> Path:
        """Base URL at which the sampler `name` answers HTTP requests."""
        return self.folder / f"{name}.http"

    @property
    def http_token(self) -> Path:
        """Token of HTTP clients."""
        return self.folder / "http.token"

    @property
    def transfer(self) -> Path:
        """Folder of published weights, where `transfer.channel` is "tensorstore" and `transfer.path` is not set."""
        return self.folder / "transfer"

    @property
    def heldout(self) -> Path:
        """Hashes of the held-out questions, written by the evaluator."""
        return self.folder / "heldout.json"
