"""Trees of page tables, from the index arrays that FlashInfer's cascade attention takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from prefixkit.tree.arrays import Longs, indptr_of, ranges
from prefixkit.tree.pages import check_page_size
from prefixkit.tree.snapshot import TreeSnapshot

Given = ArrayLike | Tensor


def tree_from_cascade(
    qo_indptr_arr: Sequence[Given],
    paged_kv_indptr_arr: Sequence[Given],
    paged_kv_indices_arr: Sequence[Given],
    paged_kv_last_page_len: Sequence[Given],
    page_size: int,
) -> TreeSnapshot:
    """Make the tree of one step from the arguments of ``MultiLevelCascadeAttentionWrapper.plan`` (FlashInfer).

    Each level, from the root down, is a list of page tables and the query rows below each.  The last level has one
    table for each request, whose query rows are the table's last tokens: attention is that of ``causal=True``; with one
    query for each request ``causal`` makes no difference.  A table is read once for all rows below it.  When rows or
    pages of tables grow, make a new tree, as FlashInfer requires a new plan.  Arrays on a GPU are copied to the host,
    which waits for them.

    Args:
        qo_indptr_arr: For each level ``[tables + 1]`` integers: bounds of the query rows of its tables.
        paged_kv_indptr_arr: For each level ``[tables + 1]`` integers: bounds of the tables' pages in
            ``paged_kv_indices_arr``.
        paged_kv_indices_arr: For each level ``[pages]`` integers: page numbers.
        paged_kv_last_page_len: For each level ``[tables]`` integers: tokens in each table's last page, 1 to
            ``page_size``.
        page_size: Tokens per page.

    Raises:
        ValueError: arrays do not fit each other; a level's tables do not divide the rows of each table of the level
            above; or a request has fewer tokens than queries.
    """
    check_page_size(page_size)
    given = qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len
    if not qo_indptr_arr or len({len(arrays) for arrays in given}) > 1:
        raise ValueError(
            "tree_from_cascade: each argument must have one array for each level, of which there is at least one; got "
            f"{', '.join(str(len(arrays)) for arrays in given)}"
        )
    levels = [_level_of(number, *arrays, page_size) for number, arrays in enumerate(zip(*given, strict=True))]
    for above, level in pairwise(levels):
        _check_nested(above, level)
    _check_queries(levels[-1])
    depth = np.repeat(np.arange(len(levels)), [len(level.length) for level in levels])
    begin, end, length, pages_begin, pages_count = (
        np.concatenate([getattr(level, name) for level in levels])
        for name in ("q_begin", "q_end", "length", "pages_begin", "pages_count")
    )
    # Depth-first: by first row, then from the root down.  Tables without rows are left out.
    order = np.lexsort((depth, begin))
    order = order[begin[order] < end[order]]
    depth, begin, end, length = depth[order], begin[order], end[order], length[order]
    requests = np.flatnonzero(depth == len(levels) - 1)
    parent, subtree_end = _links(depth, begin, end)
    start = np.zeros(len(order), np.int64)
    for node, above in enumerate(parent.tolist()):
        start[node] = start[above] + length[above] if above >= 0 else 0
    offset = np.cumsum([0, *(len(level.pages) for level in levels)])[depth]
    pages = np.concatenate([level.pages for level in levels])
    queries = np.where(depth == len(levels) - 1, end - begin, 0)
    return TreeSnapshot(
        version=0,
        page_size=page_size,
        parent=parent.astype(np.int32),
        subtree_end=subtree_end.astype(np.int32),
        start=start.astype(np.int32),
        length=length.astype(np.int32),
        computed=(length - queries).astype(np.int32),
        first_slot=np.zeros(len(order), np.int32),
        page_indptr=indptr_of(pages_count[order]),
        pages=pages[ranges(offset + pages_begin[order], pages_count[order])].astype(np.int32),
        sequence_node=requests.astype(np.int32),
        sequence_id=np.flatnonzero(levels[-1].q_begin < levels[-1].q_end),
    )


@dataclass(frozen=True, eq=False)
class _Level:
    """The page tables of one level.

    Attributes:
        name: The level's name in errors.
        q_begin, q_end: ``[tables]`` the query rows below each table.
        length: ``[tables]`` tokens in each table.
        pages: Page numbers.
        pages_begin, pages_count: ``[tables]`` the range of ``pages`` of each table.
    """

    name: str
    q_begin: Longs
    q_end: Longs
    length: Longs
    pages: Longs
    pages_begin: Longs
    pages_count: Longs


def _level_of(
    number: int, qo_indptr: Given, kv_indptr: Given, kv_indices: Given, last_page_len: Given, page_size: int
) -> _Level:
    """A level from its arrays, which are checked against each other."""
    name = f"tree_from_cascade: level {number}"
    rows, bounds = _bounds(f"{name}: qo_indptr", qo_indptr), _bounds(f"{name}: paged_kv_indptr", kv_indptr)
    pages, last = _ints(f"{name}: paged_kv_indices", kv_indices), _ints(f"{name}: last_page_len", last_page_len)
    if not len(rows) - 1 == len(bounds) - 1 == len(last):
        raise ValueError(
            f"{name}: qo_indptr is of {len(rows) - 1} tables, but paged_kv_indptr of {len(bounds) - 1} and "
            f"last_page_len of {len(last)}"
        )
    if bounds[-1] > len(pages):
        raise ValueError(f"{name}: paged_kv_indptr ends at {bounds[-1]}, but there are {len(pages)} page numbers")
    pages = pages[: bounds[-1]]
    if np.any((pages < 0) | (pages >= 2**31)):
        raise ValueError(f"{name}: page numbers must be at least 0 and below 2**31, got {pages.min()} to {pages.max()}")
    count = np.diff(bounds)
    if np.any((count > 0) & ((last < 1) | (last > page_size))):
        raise ValueError(f"{name}: last_page_len must be 1 to page_size, {page_size}, got {last.tolist()}")
    length = np.where(count > 0, (count - 1) * page_size + last, 0)
    return _Level(name, rows[:-1], rows[1:], length, pages, bounds[:-1], count)


def _check_nested(above: _Level, level: _Level) -> None:
    """Raise ValueError unless each table's rows are rows of one table of the level above."""
    if level.q_end[-1] != above.q_end[-1]:
        raise ValueError(
            f"{level.name}: it has {level.q_end[-1]} query rows, but the level above has {above.q_end[-1]}"
        )
    crossed = np.setdiff1d(above.q_end, np.append(level.q_end, 0))
    if len(crossed):
        raise ValueError(
            f"{level.name}: a table of the level above ends at query row {crossed[0]}, inside a table of this level; "
            "the tables of a level must divide those of the level above"
        )


def _bounds(name: str, values: Given) -> Longs:
    bounds = _ints(name, values)
    if len(bounds) < 2 or bounds[0] != 0 or np.any(np.diff(bounds) < 0):
        raise ValueError(f"{name} must begin with 0 and never fall, for one table at least, got {bounds.tolist()}")
    return bounds


def _ints(name: str, values: Given) -> Longs:
    array = values.cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"{name} must be a row of integers, got {array.dtype} of shape {array.shape}")
    return array.astype(np.int64)


def _check_queries(level: _Level) -> None:
    """Raise ValueError unless there is a query row, and each request has at least as many tokens as query rows."""
    queries = level.q_end - level.q_begin
    if not queries.any():
        raise ValueError("tree_from_cascade: there must be at least one query row, got none")
    short = np.flatnonzero(queries > level.length)
    if len(short):
        request = int(short[0])
        raise ValueError(
            f"tree_from_cascade: request {request} has {queries[request]} query rows, but its last level has "
            f"{level.length[request]} tokens; queries are the last tokens there, so its pages must hold their slots"
        )


def _links(depth: Longs, begin: Longs, end: Longs) -> tuple[Longs, Longs]:
    """The parent and the end of the subtree of each node, in depth-first order."""
    parent, subtree_end = np.full(len(begin), -1), np.arange(1, len(begin) + 1)
    path: list[int] = []
    for node, (level, first) in enumerate(zip(depth.tolist(), begin.tolist(), strict=True)):
        while path and (depth[path[-1]] >= level or end[path[-1]] <= first):
            path.pop()
        if path:
            parent[node] = path[-1]
        path.append(node)
        subtree_end[path] = node + 1
    return parent, subtree_end
