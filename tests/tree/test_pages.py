"""PageAllocator: which pages are held."""

from __future__ import annotations

import numpy as np
import pytest

from prefixkit.tree import OutOfPages, PageAllocator


def test_a_fresh_pool_is_handed_out_from_the_front() -> None:
    pages = PageAllocator(10)
    assert pages.allocate(3).tolist() == [0, 1, 2]
    assert pages.allocate(1).tolist() == [3]
    assert pages.free == 6


def test_freed_pages_are_reused_lowest_first() -> None:
    pages = PageAllocator(10)
    held = pages.allocate(8)
    pages.release(held[[6, 1, 4]])
    assert pages.allocate(4).tolist() == [1, 4, 6, 8]


def test_a_page_is_free_when_its_last_holder_lets_go() -> None:
    pages = PageAllocator(4)
    held = pages.allocate(2)
    for page in held.tolist():
        pages.share(page)
    pages.release(held)
    assert (pages.free, pages.refcounts.tolist()) == (2, [1, 1, 0, 0])
    pages.release(held)
    assert (pages.free, pages.refcounts.tolist()) == (4, [0, 0, 0, 0])


def test_asking_for_too_many_says_so_and_changes_nothing() -> None:
    pages = PageAllocator(4)
    pages.allocate(3)
    with pytest.raises(OutOfPages, match="asked for 2 pages, but only 1 of 4"):
        pages.allocate(2)
    assert (pages.free, pages.refcounts.tolist()) == (1, [1, 1, 1, 0])


def test_a_page_that_is_not_held_cannot_be_shared_or_released() -> None:
    pages = PageAllocator(4)
    pages.allocate(1)
    with pytest.raises(ValueError, match="cannot share page 2"):
        pages.share(2)
    with pytest.raises(ValueError, match="cannot release page 2"):
        pages.release(np.array([0, 2], np.int32))
    assert pages.refcounts.tolist() == [1, 0, 0, 0]


def test_nothing_is_a_valid_amount() -> None:
    pages = PageAllocator(1)
    nothing = pages.allocate(0)
    pages.release(nothing)
    assert (len(nothing), pages.free) == (0, 1)


def test_refcounts_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="read-only"):
        PageAllocator(1).refcounts[0] = 7


@pytest.mark.parametrize("num_pages", [0, -1, 1.5, True, "8"])
def test_a_pool_has_a_positive_number_of_pages(num_pages: object) -> None:
    with pytest.raises(ValueError, match="num_pages must be a positive integer"):
        PageAllocator(num_pages)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(5))
def test_random_traffic_agrees_with_a_plain_dictionary(seed: int) -> None:
    rng = np.random.default_rng(seed)
    pages, held = PageAllocator(600), dict[int, int]()
    for _ in range(300):
        chosen = np.array([page for page in held if rng.random() < 0.2], np.int32)
        match rng.integers(3):
            case 0:
                count = int(rng.integers(0, pages.free + 1)) // 4
                expected = [page for page in range(600) if page not in held][:count]
                assert pages.allocate(count).tolist() == expected
                held |= dict.fromkeys(expected, 1)
            case 1:
                for page in chosen.tolist():
                    pages.share(page)
                held |= {page: held[page] + 1 for page in chosen.tolist()}
            case 2:
                pages.release(chosen)
                held |= {page: held[page] - 1 for page in chosen.tolist()}
                held = {page: count for page, count in held.items() if count}
        assert pages.free == 600 - len(held)
        assert [(page, int(pages.refcounts[page])) for page in np.flatnonzero(pages.refcounts)] == sorted(held.items())
