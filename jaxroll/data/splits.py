"""Training, warm-start and held-out ranges of a source, and the order in which their items are visited."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxroll.config import Config
from jaxroll.errors import ConfigError

if TYPE_CHECKING:  # grain loads JAX: only the feeder, which draws prompts, pays for that
    import grain


def shuffled(indices: range, run_seed: int, purpose: str) -> grain.MapDataset[int]:
    """`indices` in an endless order that `run_seed` and `purpose` decide; every epoch is a new permutation.

    The permutation is computed index by index, so a range of ten million costs nothing to set up.
    """
    import grain

    digest = hashlib.blake2b(f"{run_seed}/{purpose}".encode(), digest_size=4).digest()
    seed = int.from_bytes(digest, "little") >> 1
    return grain.MapDataset.range(len(indices)).shuffle(seed=seed).repeat(None).map(indices.__getitem__)


def in_this_thread(dataset: grain.MapDataset) -> grain.IterDataset:
    """`dataset` as an iterator that reads only what is asked for, in the caller's thread.

    Making an item takes microseconds: read-ahead threads would cost more than they hide, and a state taken between two
    items must not run ahead of them.
    """
    import grain

    return dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=1))


# --- ranges

# Length of the last range of an endless source; the others end where the next one starts.
_ENDLESS_SPAN = 10_000_000


@dataclass(frozen=True)
class Ranges:
    """Item indices in three ranges. Held-out questions are excluded from the other two by hash, wherever they stand."""

    train: range
    heldout: range
    sft: range


def of(config: Config, size: int | None) -> Ranges:
    """The ranges of a source of `size` items (None: endless).

    An endless source is cut at the three starts of the config. A file too short for `task.heldout_start` is held out
    from its end backwards, and the warm start shares the training rows where the file ends before `sft.start`.
    """
    if size is None:
        return _endless(config)
    task = config.task
    if task.train_start >= size:
        raise ConfigError("task.train_start", task.train_start, f"{task.path} has {size} rows", "Use a smaller one.")
    if task.heldout_start >= size:
        train = range(task.train_start, size)
        return Ranges(train, train[::-1], range(config.sft.start, size) or train)
    if task.heldout_start <= task.train_start:
        raise ConfigError(
            "task.heldout_start",
            task.heldout_start,
            "in a file, training rows come before it",
            f"Use more than task.train_start = {task.train_start}.",
        )
    train = range(task.train_start, task.heldout_start)
    return Ranges(train, range(task.heldout_start, size), range(config.sft.start, size) or train)


def _endless(config: Config) -> Ranges:
    starts = {
        "task.train_start": config.task.train_start,
        "task.heldout_start": config.task.heldout_start,
        "sft.start": config.sft.start,
    }
    if len(set(starts.values())) < len(starts):
        raise ConfigError(
            "task.heldout_start",
            config.task.heldout_start,
            f"two ranges start at one item: {starts}",
            "Give each a start of its own, far from the others.",
        )
    ordered = sorted(starts.values())
    stop_of = dict(zip(ordered, [*ordered[1:], ordered[-1] + _ENDLESS_SPAN], strict=True))
    train, heldout, sft = (range(start, stop_of[start]) for start in starts.values())
    return Ranges(train, heldout, sft)
