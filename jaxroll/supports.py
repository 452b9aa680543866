"""Supports of truncated sampling: the token ids to which top-k, top-p or min-p restricted each sampled token.

The behaviour distribution is renormalised over the support, so the learner must renormalise over the same ids. The
serialised form of T sampled tokens is a series of varints (LEB128, 7 bits a byte, low bits first): T sizes, then for
each token the ids of its support except the token itself, ascending, as differences to the previous id minus 1. A
token that was certain takes one byte. Size 0 means that the token was sampled from the whole vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxroll.errors import DataError

NONE = -1  # fills the rows of an array [T, K] behind the ids
MAX_ID = 2**31 - 1
_BITS, _MOST = 7, 5  # of a varint: bits per byte, bytes


@dataclass(frozen=True, eq=False)
class Supports:
    """The supports of T tokens: their `sizes` (int64 [T], 0 for the whole vocabulary) and all `ids`, in token order."""

    sizes: np.ndarray
    ids: np.ndarray  # int32 [Σ sizes]

    def rows(self, width: int) -> np.ndarray:
        """int32 [T, width]: the ids of each token, then `NONE`. ValueError if a support has more than `width` ids."""
        if self.sizes.max(initial=0) > width:
            raise ValueError(f"a support of {self.sizes.max()} tokens does not fit into {width}")
        rows = np.full((len(self.sizes), width), NONE, np.int32)
        rows[np.arange(width) < self.sizes[:, None]] = self.ids
        return rows

    def part(self, start: int, stop: int) -> Supports:
        """The supports of the tokens [start, stop)."""
        ends = np.concatenate([[0], np.cumsum(self.sizes)])
        return Supports(self.sizes[start:stop], self.ids[ends[start] : ends[stop]])

    def first(self, tokens: int) -> Supports:
        """The supports of the first `tokens` tokens."""
        return Supports(self.sizes[:tokens], self.ids[: self.sizes[:tokens].sum()])


def of_rows(rows: np.ndarray) -> Supports:
    """The supports in `rows` (int32 [T, K]; entries below 0 are no ids)."""
    held = rows >= 0
    return Supports(held.sum(axis=1, dtype=np.int64), rows[held])


def whole(tokens: int) -> Supports:
    """The supports of `tokens` tokens that were sampled from the whole vocabulary."""
    return Supports(np.zeros(tokens, np.int64), np.zeros(0, np.int32))


def joined(parts: list[Supports]) -> Supports:
    """The supports of the tokens of all `parts`, in order."""
    start = whole(0)
    return Supports(
        np.concatenate([start.sizes, *(part.sizes for part in parts)]),
        np.concatenate([start.ids, *(part.ids for part in parts)]),
    )


def encoded(supports: Supports, tokens: np.ndarray) -> np.ndarray:
    """uint8 [N]: the serialised `supports` of the sampled `tokens` (int32 [T]); empty if no token has one.

    ValueError if a support lacks its token.
    """
    sizes = supports.sizes
    if not sizes.any():
        return np.zeros(0, np.uint8)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    others = supports.ids != tokens[owner]
    if len(others) - others.sum() != np.count_nonzero(sizes):
        raise ValueError("a sampled token is not in its support")
    owner, ids = owner[others], supports.ids[others].astype(np.int64)
    order = np.argsort((owner << 32) + ids)
    ids, owner = ids[order], owner[order]
    before = np.concatenate([[NONE], ids[:-1]])
    before[np.flatnonzero(np.diff(owner, prepend=-1))] = NONE
    return _varints(np.concatenate([sizes, ids - before - 1]))


def decoded(data: np.ndarray, tokens: np.ndarray) -> Supports:
    """The supports serialised in `data` (uint8 [N]) of the sampled `tokens` (int32 [T]); each begins with its token.

    DataError if `data` is not a valid serialisation for so many tokens.
    """
    if not data.size:
        return whole(len(tokens))
    values = _integers(data)
    sizes, gaps = values[: len(tokens)], values[len(tokens) :]
    counts = np.maximum(sizes - 1, 0)
    if len(sizes) < len(tokens) or counts.sum() != len(gaps):
        raise DataError(f"supports of {len(tokens)} tokens: {len(values)} numbers do not match the sizes")
    sums = np.concatenate([[0], np.cumsum(gaps + 1)])
    ends = np.cumsum(counts)
    others = sums[1:] - 1 - np.repeat(sums[ends - counts], counts)
    if others.max(initial=0) > MAX_ID:
        raise DataError(f"a support has the token id {others.max()}")
    if (others == np.repeat(tokens, counts)).any():
        raise DataError("a support lists its own token twice")
    ids = np.empty(sizes.sum(), np.int32)
    starts = np.cumsum(sizes) - sizes
    own = np.zeros(len(ids), bool)
    own[starts[sizes > 0]] = True
    ids[own], ids[~own] = tokens[sizes > 0], others
    return Supports(sizes, ids)


def worst_bytes(width: int, vocab_size: int) -> int:
    """The largest serialised size of one token's support of `width` ids; 0 for `width` 0."""
    if not width:
        return 0
    # The differences of a support sum to less than the vocabulary, so few of them need more than one byte.
    longer = [min(width - 1, vocab_size >> (_BITS * n)) for n in range(1, _MOST)]
    return len(_varints(np.array([width]))) + width - 1 + sum(longer)


def _varints(values: np.ndarray) -> np.ndarray:
    """uint8 [N]: `values` (0 ≤ value < 2³⁵) as varints."""
    lengths = 1 + sum(((values >= 1 << (_BITS * n)).astype(np.int64) for n in range(1, _MOST)), np.zeros_like(values))
    ends = np.cumsum(lengths)
    out = np.empty(ends[-1] if len(ends) else 0, np.uint8)
    for n in range(int(lengths.max(initial=0))):
        has = lengths > n
        bits = (values[has] >> (_BITS * n)) & 127
        out[(ends - lengths)[has] + n] = bits | ((lengths[has] > n + 1) << _BITS)
    return out


def _integers(data: np.ndarray) -> np.ndarray:
    """int64 [M]: the varints in `data`."""
    ends = np.flatnonzero(data < 128)
    if not len(ends) or ends[-1] != len(data) - 1:
        raise DataError("a support is cut off")
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts + 1
    if lengths.max() > _MOST:
        raise DataError("a support has a number that is too large")
    values = np.zeros(len(ends), np.int64)
    for n in range(int(lengths.max())):
        has = lengths > n
        values[has] |= (data[starts[has] + n] & 127).astype(np.int64) << (_BITS * n)
    return values
