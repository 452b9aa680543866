"""The prefix cache: prompts computed once for all requests that start with them. Pure: no arrays, no clock.

A *prefix* is a run of tokens whose keys and values stand in pages that it holds. It is *ready* when they are all there;
then those who wait for it may start. It stays afterwards, for members of its group that come later, until its pages or
its row of logits are wanted for something else: least recently used first. A weight swap forgets all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

TOKEN_BYTES = 4  # tokens are compared as the bytes of int32


@dataclass(eq=False, slots=True)
class Prefix:
    """`computed` of its tokens are in `table`'s pages; `row` is where its last logits are kept (None: nowhere).

    `waiting` counts those who were promised it and have not started.
    """

    tokens: bytes
    shard: int
    table: list[int]
    row: int | None
    computed: int = 0
    waiting: int = 0
    used: int = 0
    copies: tuple[tuple[int, int], ...] = ()  # pages to copy (from, to) before the first chunk is computed

    @property
    def length(self) -> int:
        """Tokens."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def ready(self) -> bool:
        """True if all of it is computed."""
        return self.computed == self.length


@dataclass
class PrefixCache:
    """Those that are known, by shard and tokens, and the free rows of logits."""

    rows: list[int]
    _known: dict[tuple[int, bytes], Prefix] = field(default_factory=dict)
    _uses: int = 0

    def find(self, shard: int, tokens: bytes) -> Prefix | None:
        """The prefix that is exactly `tokens` and has (or will have) its logits."""
        found = self._known.get((shard, tokens))
        return found if found is not None and found.row is not None else None

    def longest(self, shard: int, tokens: bytes, allowed: Callable[[Prefix], bool]) -> Prefix | None:
        """The longest ready prefix with which `tokens` properly begin, among those `allowed`."""
        found = [
            prefix
            for (where, known), prefix in self._known.items()
            if where == shard and len(known) < len(tokens) and tokens.startswith(known)
            and prefix.ready and allowed(prefix)
        ]  # fmt: skip
        return max(found, key=lambda prefix: prefix.length, default=None)

    def add(self, prefix: Prefix) -> Prefix | None:
        """Add `prefix`; the former prefix of its tokens is returned, and its pages must be freed."""
        former = self._known.pop((prefix.shard, prefix.tokens), None)
        self._known[prefix.shard, prefix.tokens] = prefix
        if former is not None and former.row is not None:
            self.rows.append(former.row)
        self.touch(prefix)
        return former

    def touch(self, prefix: Prefix) -> None:
        """`prefix` was used."""
        self._uses += 1
        prefix.used = self._uses

    def idle(self, shard: int | None = None) -> Iterator[Prefix]:
        """Prefixes that no request waits for, least recently used first; of one shard or of all."""
        known = (p for p in self._known.values() if not p.waiting and shard in (None, p.shard))
        return iter(sorted(known, key=lambda prefix: prefix.used))

    def forget(self, prefix: Prefix) -> None:
        """Know it no longer; its pages are the caller's to drop."""
        if self._known.get((prefix.shard, prefix.tokens)) is prefix:
            del self._known[prefix.shard, prefix.tokens]
            if prefix.row is not None:
                self.rows.append(prefix.row)

    def all(self) -> tuple[Prefix, ...]:
        """Every known prefix."""
        return tuple(self._known.values())
