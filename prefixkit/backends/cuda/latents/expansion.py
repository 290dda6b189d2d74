"""K and V that are expanded from latents: for which tokens, and in which pages, for one step or for many."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.attention.bsr import BSR
from prefixkit.attention.latent_parts import LatentPart
from prefixkit.attention.queries import StepTree
from prefixkit.tree.arrays import Ints, indptr_of, ranges

log = logging.getLogger("prefixkit")

PAGE = 64  # tokens
# Pages for ``tree_attention``: K without its rotary part, V, and the rotary part.
Made = tuple[Tensor, Tensor, Tensor]
Key = tuple[bytes, ...]


class Maps(Protocol):
    """The linear maps of a layer (see ``models.latents``)."""

    key: Tensor
    value: Tensor
    key_bias: Tensor | None
    value_bias: Tensor | None
    made: slice


@dataclass(frozen=True, eq=False)
class ExpandedTokens:
    """The tokens of the nodes that are expanded: those that BSR rows read.

    Attributes:
        nodes: The tree's arrays, as ``tree_attention`` takes them, over pages that hold only these nodes.
        slots: ``[pages * PAGE]`` int64 for each slot of these pages its token's slot in the pool; 0 for no token.
        key: Identifies the tokens' content; None if that is not known.
    """

    nodes: list[Ints]
    slots: NDArray[np.int64]
    key: Key | None


def expanded_tokens(tree: StepTree, bsr: BSR) -> ExpandedTokens:
    """The nodes of some BSR rows; the first token of each node is at the start of a page."""
    snapshot, node = tree.snapshot, np.unique(bsr.node)
    length = np.zeros(max(2, snapshot.num_nodes), np.int32)
    length[node] = tree.length[node]
    pages = -(-length // PAGE)
    indptr = indptr_of(pages)
    count = length[node].astype(np.int64)
    slots = np.zeros(max(1, int(indptr[-1])) * PAGE, np.int64)
    each = np.repeat(node, count)
    offset = ranges(np.zeros(len(node), np.int64), count)
    slots[PAGE * indptr[each].astype(np.int64) + offset] = snapshot.slots(each, offset)
    start = np.zeros_like(length)
    start[: snapshot.num_nodes] = snapshot.start
    numbers = np.arange(max(2, int(indptr[-1])), dtype=np.int32)
    key = None
    if snapshot.content is not None:
        key = tuple(of[node].tobytes() for of in (snapshot.content, snapshot.start, length))
    return ExpandedTokens([start, length, indptr, numbers, np.zeros_like(length)], slots, key)


class Expansion:
    """Expanded K and V of some tokens: kept for each layer, or made at each call in one buffer for all layers.

    Args:
        part: Heads and sizes.
        slots: ``[pages * PAGE]`` int64 slots of the tokens in the pool.
        key: Identifies the tokens' content, if K and V are kept; None: they are not kept.

    Attributes:
        keeps: Whether K and V are kept; False once there is no memory for them.
    """

    def __init__(self, part: LatentPart, slots: Tensor, key: Key | None) -> None:
        self.part, self.slots, self.key = part, slots, key
        self.keeps = key is not None
        self._kept: dict[int, tuple[Sequence[Tensor], Maps, Made]] = {}  # by the address of a layer's pages
        self._shared: Made | None = None
        self._no_room = False

    def of(self, pages: Sequence[Tensor], maps: Maps) -> Made:
        """K and V of a layer, expanded from its pages of latents and of rotary keys."""
        if self.keeps and maps.key_bias is None:  # with a bias, maps are measured anew at each call
            made = self._kept_of(pages, maps)
            if made is not None:
                return made
        self._shared = expand(pages, maps, self.slots, self._shared)
        return self._shared

    def set_keeps(self, keeps: bool) -> None:
        """Set whether K and V are kept from now on, if there is memory."""
        self.keeps = keeps and not self._no_room

    def _kept_of(self, pages: Sequence[Tensor], maps: Maps) -> Made | None:
        """The K and V that are kept, made at the first call for a layer; None if there is no memory for them."""
        layer = pages[0].data_ptr()
        try:
            made = self._kept[layer][2] if layer in self._kept else expand(pages, maps, self.slots)
        except torch.OutOfMemoryError:
            log.warning("attention over latents: no memory to keep K and V, which are made again at each step")
            self._no_room, self.keeps = True, False
            self._kept.clear()
            return None
        self._kept[layer] = pages, maps, made
        return made


def expand(pages: Sequence[Tensor], maps: Maps, slots: Tensor, into: Made | None = None) -> Made:
    """K and V of the tokens in ``slots``, head by head, so that a head's tokens are adjacent in memory: K, then V."""
    (latents, rotary), key, value = pages, maps.key, maps.value
    page, slot = slots // latents.shape[1], slots % latents.shape[1]
    if into is None:
        heads, count, own = key.shape[0], len(slots) // PAGE, key.shape[1]
        both = latents.new_empty((heads, count, PAGE, own + value.shape[1])).permute(1, 2, 0, 3)
        into = both[..., :own], both[..., own:], rotary.new_empty((count, PAGE, 1, rotary.shape[3]))
    k, v, r = into
    c = latents[page, slot, 0].expand(key.shape[0], -1, -1)
    parts = [(key, k), (value, v)]
    if (weight := _one_weight(key, value)) is not None:  # one product is faster than two
        parts = [(weight, k.as_strided((*k.shape[:3], weight.shape[1]), k.stride()))]
    for of, made in parts:
        torch.bmm(c, of.transpose(1, 2), out=made.permute(2, 0, 1, 3).flatten(1, 2))  # the layout in memory
    if maps.key_bias is not None:
        k += maps.key_bias[:, maps.made]
    if maps.value_bias is not None:
        v += maps.value_bias
    r.view(len(slots), -1).copy_(rotary[page, slot, 0])
    return into


def _one_weight(key: Tensor, value: Tensor) -> Tensor | None:
    """``[heads, rows of key + rows of value, latent]``, if each head's rows of ``value`` follow those of ``key``."""
    after = key.data_ptr() + key.shape[1] * key.stride(1) * key.itemsize
    if value.data_ptr() != after or key.stride() != value.stride():
        return None
    heads, rows, latent = key.shape
    return key.as_strided((heads, rows + value.shape[1], latent), key.stride())
