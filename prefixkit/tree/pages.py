"""Which pages are held: reference counts and a lowest-first free list.  The KV itself lives elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefixkit.tree.arrays import Ints

MAX_PAGE_SIZE = 128


def check_page_size(page_size: Any) -> None:
    """Raise ValueError unless ``page_size`` is an integer from 1 to :data:`MAX_PAGE_SIZE`."""
    whole = isinstance(page_size, int | np.integer) and not isinstance(page_size, bool)
    if not whole or not 1 <= page_size <= MAX_PAGE_SIZE:
        raise ValueError(f"page_size must be an integer from 1 to {MAX_PAGE_SIZE}, got {page_size!r}")


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that ``tokens`` tokens fill, from the first slot of a page on."""
    return -(-tokens // page_size)


class OutOfPages(ValueError):
    """More pages were asked for than are free.  Nothing has changed: release sequences or make the pool larger.

    Attributes:
        asked, free, total: Pages that were asked for, that are free, and that the pool has.
    """

    def __init__(self, asked: int, free: int, total: int) -> None:
        super().__init__(
            f"asked for {asked} pages, but only {free} of {total} are free; "
            "release or trim sequences, or build the tree with more pages"
        )
        self.asked, self.free, self.total = asked, free, total


class PageAllocator:
    """Hands out page numbers ``[0, num_pages)`` and counts how many nodes hold each.

    The lowest free page is allocated first, so a new pool fills from the front and long nodes get consecutive pages.

    Raises:
        ValueError: ``num_pages`` is not a positive integer.
    """

    def __init__(self, num_pages: int) -> None:
        if isinstance(num_pages, bool) or not isinstance(num_pages, int | np.integer) or num_pages < 1:
            raise ValueError(f"num_pages must be a positive integer, got {num_pages!r}")
        self.num_pages = int(num_pages)
        self._free = self.num_pages
        self._refcounts: Ints = np.zeros(self.num_pages, np.int32)
        self._lowest = 0  # every page below is taken

    def grow(self, count: int) -> None:
        """Add ``count`` free pages."""
        self._refcounts = np.concatenate((self._refcounts, np.zeros(count, np.int32)))
        self.num_pages += count
        self._free += count

    @property
    def free(self) -> int:
        """Pages that are not held."""
        return self._free

    @property
    def refcounts(self) -> Ints:
        """``[num_pages]`` number of holders of each page; a read-only view."""
        view = self._refcounts.view()
        view.flags.writeable = False
        return view

    def check(self, count: int) -> None:
        """Raise OutOfPages if fewer than ``count`` pages are free."""
        if count > self._free:
            raise OutOfPages(count, self._free, self.num_pages)

    def allocate(self, count: int) -> Ints:
        """The ``count`` lowest free pages, ascending, held once each; OutOfPages if fewer are free."""
        self.check(count)
        if count <= 0:
            return np.empty(0, np.int32)
        pages = self._find(count)
        self._refcounts[pages] = 1
        self._free -= count
        self._lowest = int(pages[-1]) + 1
        return pages

    def share(self, page: int) -> None:
        """Add a holder to a page; ValueError if the page is not held."""
        if self._refcounts[page] < 1:
            raise ValueError(f"cannot share page {page}: it is not held")
        self._refcounts[page] += 1

    def release(self, pages: Ints) -> None:
        """Remove a holder from each of ``pages`` (distinct); a page without holders is free again.

        Raises:
            ValueError: one of them is not held; nothing has changed.
        """
        if len(pages) == 1:  # a thousand leaves release one page each: arrays of one element cost ten times as much
            page = int(pages[0])
            count = self._refcounts[page] - 1
            if count < 0:
                raise ValueError(f"cannot release page {page}: it is not held")
            self._refcounts[page] = count
            if not count:
                self._free += 1
                self._lowest = min(self._lowest, page)
        elif len(pages):
            counts = self._refcounts[pages] - 1
            if np.minimum.reduce(counts) < 0:  # takes half the time of `min` on short arrays
                raise ValueError(f"cannot release page {int(pages[counts.argmin()])}: it is not held")
            self._refcounts[pages] = counts
            freed = pages[counts == 0] if counts.any() else pages
            if len(freed):
                self._free += len(freed)
                self._lowest = min(self._lowest, int(np.minimum.reduce(freed)))

    def _find(self, count: int) -> Ints:
        """The ``count`` lowest free pages.  Windows double, so a long stretch of held pages costs a few array scans."""
        begin, width = self._lowest, max(64, count)
        if not self._refcounts[begin : begin + count].any():  # a new pool: the next ``count`` pages are all free
            return np.arange(begin, begin + count, dtype=np.int32)
        found: list[NDArray[np.intp]] = []
        while count > 0:
            assert begin < self.num_pages, "fewer free pages than counted"
            hits = (self._refcounts[begin : begin + width] == 0).nonzero()[0][:count]
            if len(hits):
                found.append(hits + begin)
                count -= len(hits)
            begin, width = begin + width, 2 * width
        return np.concatenate(found).astype(np.int32)
