"""The order in which items are visited: a grain pipeline over a range of indices, decided by a seed."""

from __future__ import annotations

import hashlib

import grain


def shuffled(indices: range, run_seed: int, purpose: str) -> grain.MapDataset[int]:
    """`indices` in an endless order that `run_seed` and `purpose` decide; every epoch is a new permutation.

    The permutation is computed index by index, so a range of ten million costs nothing to set up.
    """
    digest = hashlib.blake2b(f"{run_seed}/{purpose}".encode(), digest_size=4).digest()
    seed = int.from_bytes(digest, "little") >> 1
    return grain.MapDataset.range(len(indices)).shuffle(seed=seed).repeat(None).map(indices.__getitem__)


def in_this_thread(dataset: grain.MapDataset) -> grain.IterDataset:
    """`dataset` as an iterator that reads only what is asked for, in the caller's thread.

    Making an item takes microseconds: read-ahead threads would cost more than they hide, and a state taken between two
    items must not run ahead of them.
    """
    return dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=1))
