"""Calls: which tiles share one run of an attention kernel, and the keys and masks of that run.

A call costs some 20 us before its first multiplication, so small tiles are batched: gathered into one padded block of
``[batch, length]`` keys for ``[batch, rows]`` queries.  A large tile has its own call, and reads the pool in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from prefixkit.attention.queries import StepTree
from prefixkit.attention.variants import Variant
from prefixkit.attention.variants.evaluate import evaluate
from prefixkit.backends.torch.program.merge import Index, index_of
from prefixkit.backends.torch.program.tiles import FULL, LIMITED, MASKED, TRIANGLE, Tiles
from prefixkit.backends.torch.tuning import Heads
from prefixkit.tree.arrays import Ints, Longs, padded, ranges


class Places(NamedTuple):
    """The places of a call's scores in their sequences, int64: arguments of a variant's functions."""

    b: Tensor  # ``[batch, 1, rows, 1]`` numbers of the queries' sequences
    q: Tensor  # ``[batch, 1, rows, 1]`` positions of the queries
    kv: Tensor  # ``[batch, 1, 1, length]`` positions of the keys

    def to(self, device: torch.device) -> Places:
        return Places(*(tensor.to(device) for tensor in self))


@dataclass(frozen=True, eq=False)
class Call:
    """One kernel call: ``batch`` blocks of ``rows`` queries against ``length`` keys each.

    Attributes:
        batch, rows, length: The block; ragged tiles are padded up to it.
        row: The ``batch * rows`` query rows.
        slot: The ``batch * length`` slots of the keys.
        causal: Row i of a block sees its keys 0..i.
        grouped: Query heads of one KV head are rows of one matrix, and rows of the result have heads in the order
            ``(gqa_group, kv_heads)`` instead of ``(kv_heads, gqa_group)``.
        mask: Which of these keys are visible, or None for all: float32 0 or -inf that broadcasts to the kernel's
            scores; if scores are computed in plain torch, bool that broadcasts to ``[batch, heads, rows, length]``.
        empty: Bool that broadcasts to the kernel's ``lse``, True where the mask hides all keys; or None.
        places: Set if scores are computed in plain torch, because torch's flash attention cannot compute the call, and
            if the call is ``biased``.
        biased: torch's flash attention computes the call, but the biases, which it adds to scores as its mask, are too
            large to hold and are made in each run; ``mask`` is bool and says which keys are visible.
        descending: Rows are in descending order, and so are the rows of the result, so that a mask by distance is a
            view: see :func:`distance_mask`.
    """

    batch: int
    rows: int
    length: int
    row: Index
    slot: Index
    causal: bool
    grouped: bool
    mask: Tensor | None
    empty: Tensor | None
    places: Places | None
    biased: bool = False
    descending: bool = False


def batches(tiles: Tiles, heads: Heads, scored: int | None) -> Iterator[Longs]:
    """Which tiles share a call: arrays of tile numbers, in ascending order of rows; each tile is in one array.

    ``scored``: the most elements of scores or masks in a call, if they take memory: see ``Tuning.scored_rows``.
    """
    tuning = heads.tuning
    tokens, rows = tiles.tokens, tiles.rows
    alone = (
        ((tiles.runs == 1) & (tokens > heads.longest_copy))
        | (rows * tokens * heads.score_us > 10 * tuning.call_us)
        | (tiles.mask == MASKED)
        | ((tiles.mask == TRIANGLE) & (tokens != rows))
    )
    for tile in alone.nonzero()[0]:
        yield np.array([tile])
    for mask in (FULL, TRIANGLE, LIMITED):
        candidates = (~alone & (tiles.mask == mask)).nonzero()[0]
        for members in _buckets(rows[candidates], tokens[candidates], heads):
            batch = candidates[members]
            batch = batch[tiles.row[batch].argsort(kind="stable")]
            longest, most = int(tokens[batch].max()), int(rows[batch].max())
            limit = tuning.batch_elements // (longest * heads.kv_elements)
            if scored is not None:
                limit = min(limit, scored // (most * longest * heads.heads))
            parts = -(-len(batch) // max(1, limit))
            yield from (batch,) if parts == 1 else np.array_split(batch, parts)


def _buckets(rows: Longs, tokens: Longs, heads: Heads) -> list[Longs]:
    """Group blocks of similar shape: a block joins a larger bucket if padding it costs less than one more call."""
    if not len(rows):
        return []
    tuning = heads.tuning
    # One number per block: rows in the upper 32 bits, tokens in the lower.
    rounded = _round_up(np.concatenate((rows, tokens)))
    shape = rounded[: len(rows)] << 32 | rounded[len(rows) :]
    if bool((shape == shape[0]).all()):
        return [np.arange(len(shape))]
    shapes, which, count = np.unique(shape, return_inverse=True, return_counts=True)
    token_us = heads.kv_elements * (tuning.copy_us + tuning.read_us)
    leaders: list[tuple[int, int]] = []
    bucket_of_shape = np.zeros(len(shapes), dtype=np.int64)
    for index in range(len(shapes) - 1, -1, -1):
        r, n = divmod(int(shapes[index]), 1 << 32)
        best, best_cost = -1, tuning.call_us
        for number, (big_r, big_n) in enumerate(leaders):
            padding_us = int(count[index]) * ((big_r * big_n - r * n) * heads.score_us + (big_n - n) * token_us)
            if big_r >= r and big_n >= n and padding_us < best_cost:
                best, best_cost = number, padding_us
        if best < 0:
            best = len(leaders)
            leaders.append((r, n))
        bucket_of_shape[index] = best
    bucket = bucket_of_shape[which]
    return [np.flatnonzero(bucket == number) for number in range(len(leaders))]


def _round_up(sizes: Longs) -> Longs:
    """Round up to the next of 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, ...: at most a quarter more."""
    step = 1 << np.maximum(np.frexp(np.maximum(sizes, 1) - 0.5)[1] - 3, 0).astype(np.int64)
    rounded: Longs = -(-sizes // step) * step
    return rounded


def make_call(
    tiles: Tiles,
    batch: Longs,
    tree: StepTree,
    limits: Ints,
    heads: Heads,
    variant: Variant,
    device: torch.device,
    *,
    flash: bool,
    views: bool,
    room: int = 0,
) -> Call | None:
    """The call for some tiles with masks of one kind, or None if the variant hides all their keys.

    Args:
        tiles, batch: The tiles, and the numbers of those that the call holds.
        tree: The queries' tree.
        limits: The plan's limits.
        heads, variant: The heads and the variant.
        device: The device of the call, and of the tensors that the variant's functions capture.
        flash: torch's flash attention computes the call; else scores are computed in plain torch.
        views: A run of consecutive slots can be read in place; else each key is gathered by its slot.
        room: The most elements of biases that may be held.
    """
    rows, tokens, mask = tiles.rows[batch], tiles.tokens[batch], int(tiles.mask[batch[0]])
    most, longest = int(rows.max()), int(tokens.max())
    row = tiles.row[batch][:, None] + np.minimum(np.arange(most), rows[:, None] - 1)
    runs = ranges(tiles.indptr[batch], tiles.runs[batch])
    places = None
    if not flash or variant.mods or mask in (MASKED, LIMITED):
        kv_position = padded(ranges(tiles.position[runs], tiles.count[runs]), tokens)
        b, q = (torch.from_numpy(each[row])[:, None, :, None] for each in (tree.sequences, tree.positions))
        places = Places(b, q, torch.from_numpy(kv_position)[:, None, None])
    if views and len(runs) == 1:
        slot: Index = int(tiles.slot[runs[0]])
    else:
        slot = torch.from_numpy(padded(ranges(tiles.slot[runs], tiles.count[runs]), tokens).reshape(-1))
    if flash and places is not None and _by_distance(mask, places, heads, variant):
        return _descending(tree.queries.num_rows - 1 - int(row[0, -1]), slot, places, heads, variant, room)
    last = torch.from_numpy(tree.reach[row])[:, None, :, None] if variant.looks_ahead else None
    if mask == LIMITED:
        each = tiles.limit_begin[batch][:, None] + row - tiles.row[batch][:, None]
        last = torch.from_numpy(limits[each])[:, None, :, None]
    by_tile = visible = _visible(mask, tokens, most, places, last)
    if places is not None and variant.mask_mods:
        b, q, kv = places.to(device)
        allowed = variant.shows(b, heads.numbers(device), q, kv).cpu()
        visible = _narrowed(by_tile, allowed, (len(batch), -1, most, longest))
    if visible is not None and not bool(visible.any()):
        return None
    call = Call(
        batch=len(batch),
        rows=most,
        length=longest,
        row=index_of(row.reshape(-1)),
        slot=slot,
        causal=False,
        grouped=False,
        mask=visible,
        empty=None,
        places=places,
    )
    return _by_flash(call, mask == TRIANGLE, visible is by_tile, heads, variant, room) if flash else call


def _by_flash(call: Call, triangle: bool, unmasked: bool, heads: Heads, variant: Variant, room: int) -> Call:
    """The call of torch's flash attention in place of one that computes scores.

    ``triangle``: its tiles' masks are triangles; ``unmasked``: the variant hides no further keys.
    """
    plain = unmasked and not variant.score_mods
    # With a mask, ``causal`` changes no result, but the kernel then skips blocks of keys.
    causal = triangle and (plain or call.rows >= heads.tuning.group_rows)
    grouped = not causal and heads.gqa_group > 1 and call.rows < heads.tuning.group_rows
    if causal and plain:
        return replace(call, causal=True, mask=None, places=None)
    if call.mask is None and call.places is None:
        return replace(call, causal=causal, grouped=grouped)
    bias = None
    if variant.score_mods and call.places is not None:
        if call.batch * call.rows * call.length * (heads.heads if variant.reads("h") else 1) > room:
            return replace(call, causal=causal, grouped=grouped, biased=True)
        bias = bias_of(variant, call.places, heads)
    mask = flash_mask(call.mask, bias, call.rows, heads, grouped=grouped)
    empty = None if mask is None else hidden_rows(mask)
    if empty is not None and not bool(empty.any()):
        empty = None
    return replace(call, causal=causal, grouped=grouped, mask=mask, empty=empty, places=None)


def _by_distance(mask: int, places: Places, heads: Heads, variant: Variant) -> bool:
    """Whether a call is one tile of consecutive queries and keys, with biases and masks by distance."""
    return (
        variant.by_distance
        and (mask in (FULL, TRIANGLE) or (mask == MASKED and not variant.looks_ahead))
        and places.q.shape[0] == 1
        and places.q.shape[2] >= heads.tuning.group_rows
        and bool((places.q.diff(dim=2) == 1).all())
        and bool((places.kv.diff(dim=3) == 1).all())
    )


def _descending(row: int, slot: Index, places: Places, heads: Heads, variant: Variant, room: int) -> Call:
    """The call for such a tile, in descending order; ``row``: the index of its last query row, counted from the end."""
    call = Call(
        batch=1,
        rows=places.q.shape[2],
        length=places.kv.shape[3],
        row=row,
        slot=slot,
        causal=False,
        grouped=False,
        mask=None,
        empty=None,
        places=Places(places.b, places.q.flip(2), places.kv),
        biased=True,
        descending=True,
    )
    mask = biased_mask(call, variant, heads)
    if elements_of(mask) > room:
        return call
    empty = hidden_rows(mask)
    return replace(call, mask=mask, empty=empty if bool(empty.any()) else None, places=None, biased=False)


def elements_of(mask: Tensor) -> int:
    """The number of elements that a mask takes in memory."""
    return mask.untyped_storage().nbytes() // mask.itemsize


def _visible(mask: int, tokens: Longs, rows: int, places: Places | None, last: Tensor | None) -> Tensor | None:
    """The keys that the tiles' masks show; None if they show all, or a triangle that the kernel masks by itself.

    ``last``: the last position that each query may see, or its limit, shaped like ``places.q``; None: its position.
    """
    longest = int(tokens.max())
    if mask == TRIANGLE:
        return None if places is None else torch.from_numpy(np.tri(rows, longest, dtype=bool))[None, None]
    shown = None
    if not bool((tokens == longest).all()):
        shown = torch.from_numpy((np.arange(longest) < tokens[:, None])[:, None, None])
    if mask in (MASKED, LIMITED):
        assert places is not None, "such a mask is made of them"
        by_position = places.kv <= (places.q if last is None else last)
        return by_position if shown is None else by_position & shown
    return shown


def _narrowed(by_tile: Tensor | None, allowed: Tensor, shape: tuple[int, int, int, int]) -> Tensor | None:
    """``by_tile`` and ``allowed``, in this shape; ``by_tile`` itself if the variant hides no further keys."""
    whole = torch.ones(1, 1, 1, 1, dtype=torch.bool, device="cpu") if by_tile is None else by_tile
    shown = (allowed & whole).expand(shape)
    return by_tile if torch.equal(shown, whole.expand_as(shown)) else shown


def bias_of(variant: Variant, places: Places, heads: Heads) -> Tensor:
    """The biases that a variant adds to scores: float32, broadcast to ``[batch, heads, rows, length]``."""
    assert variant.biases, "a variant that leaves scores alone has no bias"
    of = {"b": places.b, "h": heads.numbers(), "q_idx": places.q, "kv_idx": places.kv}
    first, *others = (evaluate(bias, **of) for bias in variant.biases)
    found = sum(others, start=first).to(torch.float32)
    found = found[(None,) * (4 - found.ndim)]
    return found.expand(*found.shape[:3], places.kv.shape[3])


def biased_mask(call: Call, variant: Variant, heads: Heads) -> Tensor:
    """The mask of a call that is ``biased``."""
    assert call.places is not None, "biases are made of them"
    if call.descending:
        return distance_mask(call.places, variant, heads)
    mask = flash_mask(call.mask, bias_of(variant, call.places, heads), call.rows, heads, grouped=call.grouped)
    assert mask is not None, "there are biases"
    return mask


def distance_mask(places: Places, variant: Variant, heads: Heads) -> Tensor:
    """Biases and masks by distance as a mask ``[1, heads or 1, rows, length]`` of torch's flash attention.

    If query positions descend by one and key positions ascend, query i and key j have the distance of query 0 and key
    i + j.  So the mask is a view of query 0's row, extended by one key for each further query: the whole mask is never
    written, and its values stay in the caches.
    """
    rows, length = places.q.shape[2], places.kv.shape[3]
    first = Places(places.b[:, :, :1], places.q[:, :, :1], places.kv[..., :1] + torch.arange(rows + length - 1))
    values = bias_of(variant, first, heads)
    if not variant.looks_ahead:
        values = values.masked_fill(first.kv > first.q, -torch.inf)
    if variant.mask_mods:
        values = values.masked_fill(~variant.shows(first.b, heads.numbers(), first.q, first.kv), -torch.inf)
    return values[:, :, 0].contiguous().unfold(2, length, 1)


def flash_mask(visible: Tensor | None, bias: Tensor | None, rows: int, heads: Heads, *, grouped: bool) -> Tensor | None:
    """The mask of a call of torch's flash attention, from the visible keys (None: all) and the biases (None: none).

    It is float32, broadcast to the kernel's scores.
    """
    if bias is None:
        if visible is None:
            return None
        bias = torch.zeros((), dtype=torch.float32, device="cpu").expand(visible.shape)
    mask = bias if visible is None else bias.masked_fill(~visible, -torch.inf)
    if grouped and mask.shape[1] > 1:
        by_group = torch.unflatten(mask.expand(-1, -1, rows, -1), 1, (heads.kv_heads, heads.gqa_group))
        return by_group.transpose(2, 3).flatten(2, 3)
    return mask.repeat_interleave(heads.gqa_group, dim=2) if grouped and mask.shape[2] > 1 else mask


def hidden_rows(mask: Tensor) -> Tensor:
    """Where a float mask hides all keys, broadcast to ``lse`` of the kernel."""
    return mask.amax(dim=-1) == -torch.inf
