"""Pages of a cache: which are free, and how many holders each other one has. Pure: no arrays, no clock."""

from __future__ import annotations

from collections.abc import Iterable


class BlockAllocator:
    """`count` pages, numbered from 0. A page is free again when its last holder drops it."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, -1, -1))
        self._holders = [0] * count

    @property
    def free(self) -> int:
        """Pages that can be allocated now."""
        return len(self._free)

    @property
    def count(self) -> int:
        """All pages."""
        return len(self._holders)

    def allocate(self, count: int) -> list[int]:
        """`count` free pages, now with one holder each; ValueError when there are fewer (ask `free` first)."""
        if count > len(self._free):
            raise ValueError(f"{count} pages are asked for and {len(self._free)} of {self.count} are free")
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> list[int]:
        """`pages`, with one holder more each; ValueError for a free one."""
        shared = list(pages)
        for page in shared:
            if not self._holders[page]:
                raise ValueError(f"page {page} is free: it holds nothing to share")
            self._holders[page] += 1
        return shared

    def free_pages(self, pages: Iterable[int]) -> None:
        """One holder less of each of `pages`; ValueError for a free one."""
        for page in pages:
            if not self._holders[page]:
                raise ValueError(f"page {page} is dropped by a holder that it does not have")
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def reference_count(self, page: int) -> int:
        """The number of references to `page`; 0 for a free one."""
        return self._holders[page]
