"""Durable versions of the train state on disk, by orbax: asynchronous, sharded, complete or absent.

A checkpoint is the folder `LINEAGE.STEP` (zero-padded) with two items: `state`, the arrays under flat names, and
`about`, a JSON object with version, log position and the shape of every array. Orbax writes into a folder with another
name and renames it when all is on disk, so a folder with the right name is a whole checkpoint. A checkpoint does not
depend on the mesh that wrote it: `restore` accepts any shardings.

`save` returns when the arrays have been copied to the host. A thread of orbax writes them; a thread of this module then
writes the checksums of the files (see `checkpoint_files`) and syncs them to disk. Nothing else waits for it.

When the state is sharded over several processes, each process calls `write` and `read` for its own shards. Process 0
does everything else: it lists checkpoints, verifies them and decides which are durable. All processes must reach the
same folder.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import msgspec
import orbax.checkpoint as ocp

from jaxroll import disk
from jaxroll.errors import CheckpointDamaged, ConfigError, InfraError
from jaxroll.learner import checkpoint_files
from jaxroll.learner.checkpoint_files import ABOUT, NAME, STATE
from jaxroll.learner.state import TrainState
from jaxroll.policy import selection
from jaxroll.records import LogStart, Version

FORMAT = 1
# Orbax measures its limit by the wall clock: one that is set forward by more ends the write. In ms it has 31 bits.
WRITE_LIMIT_S = 20 * 86400
_WRITE_ERRORS = (OSError, ValueError, RuntimeError)  # orbax and tensorstore raise all of them


class Checkpoints:
    """The checkpoints of one run; only the learner writes, any process may read."""

    def __init__(self, folder: Path, kept: int) -> None:
        if kept < 1:
            reason = "at least one checkpoint must stay to resume from"
            raise ConfigError("learner.checkpoints_kept", kept, reason, "Use 1 or more.")
        self.folder, self.kept = Path(folder).absolute(), kept
        self.damaged: set[Version] = set()  # `restore` found them damaged; `latest` skips them
        self._writing: list[Version] = []
        self._writer: ocp.AsyncCheckpointer | None = None
        self._settler = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-settle")
        self._settling: dict[Version, Future[None]] = {}

    def save(
        self, version: Version, position: int, state: TrainState, base: str = "", log: LogStart | None = None
    ) -> None:
        """Start writing `state` as `version`; the caller may donate `state` as soon as this returns.

        `base` is the digest of the frozen parameters under adapters (`Trainer.base_digest`), `log` what a new log needs
        to begin at this checkpoint.

        Waits for the previous write if it is still running. A version that is already on disk is not written again.
        """
        self._writing.append(version)
        if self.path(version).exists():
            return
        if self._writer is None:
            self._discard_unfinished(version.lineage)
        self.write(version, position, state, base, log)

    def write(self, version: Version, position: int, state: TrainState, base: str, log: LogStart | None = None) -> None:
        """Start writing this process's shards of `state`; the checkpoint is whole once all processes have written."""
        self._writer = self._writer or ocp.AsyncCheckpointer(_handler(), timeout_secs=WRITE_LIMIT_S)
        arrays = _flat(state)
        about = {
            "format": FORMAT,
            "lineage": version.lineage,
            "step": version.step,
            "position": position,
            "base": base,
            "log": msgspec.to_builtins(log),
            "arrays": {name: _described(leaf) for name, leaf in arrays.items()},
        }
        items = ocp.args.Composite(state=ocp.args.PyTreeSave(arrays), about=ocp.args.JsonSave(about))
        try:
            self._writer.save(self.path(version), args=items)
        except _WRITE_ERRORS as error:
            raise self._failed(error) from error

    def finished(self, *, wait: bool) -> list[Version]:
        """Versions that have become durable since the last call, oldest first; with `wait`, all that were started.

        Raises InfraError when a write failed or a written checkpoint cannot be opened. Removes nothing: see
        `remove_old`.
        """
        self._raise_failure(wait)
        for version in self._writing:
            if version not in self._settling and self.path(version).exists():
                self._settling[version] = self._settler.submit(_settle, self.path(version))
        durable = [version for version, settled in self._settling.items() if wait or settled.done()]
        for version in durable:
            with self._naming_disk(version):
                self._settling.pop(version).result()
        self._writing = [version for version in self._writing if version not in durable]
        return durable

    def remove_old(self, durable: Version, spared: Collection[Version] = ()) -> None:
        """Remove checkpoints older than `durable`, so that `kept` are left, `durable` included, and those in `spared`.

        Call this only after the store has recorded that `durable` is durable. The store refuses a learner that has
        been replaced (for example while it was suspended), and such a learner must not remove the checkpoint that its
        successor started from.
        """
        for version in selection.removable(self.versions(), durable, self.kept, spared):
            removed = self.path(version).with_name(f"{self.path(version).name}.removed")
            shutil.rmtree(removed, ignore_errors=True)
            self.path(version).rename(removed)  # first: a reader finds the checkpoint whole or not at all
            shutil.rmtree(removed, ignore_errors=True)

    def wait(self) -> list[Version]:
        """Versions that have become durable since the last call, after waiting for all writes."""
        return self.finished(wait=True)

    def versions(self) -> tuple[Version, ...]:
        """Every whole checkpoint, oldest first."""
        return checkpoint_files.versions(self.folder)

    def latest(self, usable: Callable[[Version], bool] = lambda version: True) -> Version | None:
        """The newest usable checkpoint (highest lineage, then highest step); None when there is none.

        Checkpoints that `restore` found damaged are not usable.
        """
        return max((v for v in self.versions() if v not in self.damaged and usable(v)), default=None)

    def at(self, name: str) -> Version | None:
        """The checkpoint named STEP (of the highest lineage that has it), LINEAGE.STEP, or "" (the newest).

        None means the start of the run: step 0, which has no checkpoint. ConfigError when there is no such checkpoint.
        """
        lineage, dot, step = name.rpartition(".")
        found = [v for v in self.versions() if name in ("", str(v)) or (not dot and name == str(v.step))]
        if found:
            return max(found)
        if step == "0" and lineage in ("", "0"):
            return None
        have = ", ".join(map(str, self.versions())) or "none"
        raise ConfigError("--fork", name, "no such checkpoint in this run", f"There are: {have}.")

    def about(self, version: Version) -> dict[str, Any]:
        """The checkpoint's metadata: format, lineage, step, position, arrays."""
        self._check_whole(version)
        try:
            return checkpoint_files.about(self.path(version))
        except CheckpointDamaged as error:
            raise self._is_damaged(version, str(error)) from error

    def log_start(self, version: Version) -> LogStart | None:
        """The part of the log with which a new one begins at this checkpoint; None if an earlier JaxRoll wrote it."""
        try:
            return msgspec.convert(self.about(version).get("log"), LogStart | None)
        except msgspec.ValidationError as error:
            raise self._is_damaged(version, str(error)) from error

    def restore(
        self, version: Version, abstract: TrainState, base: str = "", *, durable: bool = False
    ) -> tuple[TrainState, int]:
        """The state of `version`, sharded like `abstract`, and its log position.

        Pass `durable` when the store has recorded the version as durable: its checksums must then exist. Otherwise
        they are checked only if they exist.
        Raises InfraError when the checkpoint is missing, CheckpointDamaged when it cannot be read or differs from what
        was written, ConfigError when its model, its optimizer or the `base` of its adapters is another one.
        """
        self._check_whole(version)
        if wrong := checkpoint_files.damage(self.path(version), durable=durable):
            raise self._is_damaged(version, wrong)
        about = self.about(version)
        wanted = _flat(abstract)
        _check_same(wanted, about, version)
        _check_base(about.get("base", ""), base, version)
        return self.read(version, abstract), int(about["position"])

    def read(self, version: Version, abstract: TrainState) -> TrainState:
        """This process's shards of a checkpoint that `restore` has checked. Raises CheckpointDamaged like `restore`."""
        wanted = _flat(abstract)
        arguments = jax.tree.map(
            lambda leaf: ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype), wanted
        )
        items = ocp.args.Composite(state=ocp.args.PyTreeRestore(item=wanted, restore_args=arguments))
        arrays = self._read(version, items)[STATE]
        leaves = [arrays[name] for name in wanted]
        return jax.tree.unflatten(jax.tree.structure(abstract), leaves)

    def sync(self, version: Version) -> None:
        """Sync a whole checkpoint, so that `restore` reads what is on the disk; InfraError if it cannot be.

        Without it, checksums may agree with files that only the memory of the system still holds.
        """
        self._check_whole(version)
        with self._naming_disk(version):
            disk.sync_folder(self.path(version), reread=True)

    def settle(self, version: Version) -> None:
        """Make a whole checkpoint durable whose writer may have been killed at any instant; InfraError if it cannot be.

        Checksums that can be read do not show that anything is on disk: it may be in the memory of the system alone.
        """
        with self._naming_disk(version):
            _settle(self.path(version))

    def path(self, version: Version) -> Path:
        """The path of `version`, which need not exist."""
        return checkpoint_files.path_of(self.folder, version)

    def close(self) -> None:
        """Wait for running writes and stop the writer's threads."""
        writer, self._writer = self._writer, None
        try:
            if writer is not None:
                writer.close()
        except _WRITE_ERRORS as error:
            raise self._failed(error) from error
        finally:
            self._settler.shutdown(wait=True)

    @contextlib.contextmanager
    def _naming_disk(self, version: Version) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            advice = disk.remedy(error, self.folder)
            raise InfraError(f"{self.path(version)} does not reach the disk: {error}. {advice}".strip()) from error

    def _check_whole(self, version: Version) -> None:
        if version not in self.versions():
            have = ", ".join(map(str, self.versions())) or "none"
            raise InfraError(f"{self.folder} has no whole checkpoint {version} (there are: {have})")

    def _is_damaged(self, version: Version, why: str) -> CheckpointDamaged:
        self.damaged.add(version)
        return CheckpointDamaged(
            f"checkpoint {self.path(version)} cannot be read ({why}); remove that folder to resume from an older one"
        )

    def _read(self, version: Version, args: ocp.args.Composite) -> Any:
        self._check_whole(version)
        try:
            with ocp.Checkpointer(_handler()) as reader:
                return reader.restore(self.path(version), args=args)
        except (OSError, ValueError, KeyError) as error:
            raise self._is_damaged(version, str(error)) from error

    def _raise_failure(self, wait: bool) -> None:
        if self._writer is None:
            return
        try:
            if wait:
                self._writer.wait_until_finished()
            self._writer.check_for_errors()
        except _WRITE_ERRORS as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> InfraError:
        advice = disk.remedy(error, self.folder)
        return InfraError(f"writing a checkpoint to {self.folder} failed: {error}. {advice}".strip())

    def _discard_unfinished(self, lineage: int) -> None:
        """Remove folders that a killed learner left half-written or half-removed, known by their temporary names.

        Folders of a higher lineage stay: they belong to the learner that has replaced this one.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            found = [(path, NAME.match(path.name)) for path in self.folder.iterdir() if path.is_dir()]
        except OSError as error:
            raise InfraError(f"{self.folder} cannot be used ({error.strerror})") from error
        for path, name in found:
            if name and not NAME.fullmatch(path.name) and int(name[1]) <= lineage:
                shutil.rmtree(path, ignore_errors=True)


def _settle(folder: Path) -> None:
    """Write the checksums of a whole checkpoint and sync it to disk; InfraError when it cannot be opened."""
    if wrong := checkpoint_files.unreadable(folder):
        raise InfraError(f"checkpoint {folder} was written and cannot be read ({wrong})")
    checkpoint_files.write(folder)
    disk.sync_folder(folder)  # orbax renames without fsync


def _handler() -> ocp.CompositeCheckpointHandler:
    """The handlers of the two items."""
    # By default orbax lets every replica write a slice, and compiles a program per shape to cut the slices.
    # Here the first replica writes the whole array.
    arrays = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
    return ocp.CompositeCheckpointHandler(
        **{STATE: ocp.PyTreeCheckpointHandler(type_handler_registry=registry), ABOUT: ocp.JsonCheckpointHandler()}
    )


def _flat(state: TrainState) -> dict[str, Any]:
    """The leaves of `state` by name, such as "params['embed']"; the names do not depend on optax's classes."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path).lstrip("."): leaf for path, leaf in leaves}


def _described(leaf: Any) -> list[Any]:
    return [str(leaf.dtype), *leaf.shape]


def _check_same(wanted: Mapping[str, Any], about: Mapping[str, Any], version: Version) -> None:
    if about.get("format") != FORMAT:
        reason, remedy = f"this JaxRoll reads format {FORMAT}", "Use the JaxRoll that wrote it."
        raise ConfigError("checkpoint format", about.get("format"), reason, remedy)
    have, want = about["arrays"], {name: _described(leaf) for name, leaf in wanted.items()}
    different = sorted(name for name in have.keys() | want.keys() if have.get(name) != want.get(name))
    if different:
        name = different[0]
        raise ConfigError(
            f"checkpoint {version}",
            name,
            f"is {have.get(name, 'absent')} there and {want.get(name, 'absent')} in this config"
            + (f" ({len(different) - 1} more arrays differ)" if len(different) > 1 else ""),
            "Resume with the model and optimizer it was written with.",
        )


def _check_base(have: str, want: str, version: Version) -> None:
    if have != want:
        reason = "its adapters were trained on other parameters than those that this run starts from"
        remedy = "Put back model.path, or the run's warm/, as it was; a fresh init needs the run's jax and devices."
        raise ConfigError(f"checkpoint {version}", have, reason, remedy)
