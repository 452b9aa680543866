"""Block allocator of the KV cache: free pages, and the reference counts of the others. Pure: no arrays, no clock."""

from __future__ import annotations

from collections.abc import Iterable


class BlockAllocator:
    """`count` pages, numbered from 0. A page becomes free when its last reference is dropped."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, -1, -1))
        self._holders = [0] * count

    @property
    def free(self) -> int:
        """The number of free pages."""
        return len(self._free)

    @property
    def count(self) -> int:
        """The number of all pages."""
        return len(self._holders)

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` pages with one reference each; ValueError when fewer are free (check `free` first)."""
        if count > len(self._free):
            raise ValueError(f"{count} pages are requested and {len(self._free)} of {self.count} are free")
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> list[int]:
        """Add a reference to each of `pages` and return them; ValueError for a free page."""
        shared = list(pages)
        for page in shared:
            if not self._holders[page]:
                raise ValueError(f"page {page} is free and cannot be shared")
            self._holders[page] += 1
        return shared

    def free_pages(self, pages: Iterable[int]) -> None:
        """Drop one reference to each of `pages`; ValueError for a free page."""
        for page in pages:
            if not self._holders[page]:
                raise ValueError(f"page {page} is free already")
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def reference_count(self, page: int) -> int:
        """The number of references to `page`; 0 for a free one."""
        return self._holders[page]
