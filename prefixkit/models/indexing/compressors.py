"""Compressors of attention layers on a tree: entries that each stand for a run of tokens of a text.

The attention module of such a model (DeepSeek-V4) has a compressor.  The compressor makes two vectors of each token,
combines them to one entry for each whole window of tokens, and determines which entries each row sees; the module
attends to these entries and to the tokens of its own window.  A tree caches the vectors of tokens, which texts share,
and no entries.  In a step the module's own compressor runs on blocks of rows, each a batch of texts of equal length,
over the vectors of all their tokens, and so makes all entries of a text at once, as it does without a cache.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from prefixkit.kv.layer_kinds import Compressed
from prefixkit.models.indexing.indexers import AnyIndex, Block, IndexerCall

# A function of a compressor's name and of two vectors ``[texts, S, size]`` of each row that returns those of all tokens
# of the texts.
Exchange = Callable[[str, Tensor, Tensor], tuple[Tensor, Tensor]]


@functools.cache
def is_compressor(cls: type[nn.Module]) -> bool:
    """Whether the code of a class's ``forward`` stores what it compresses in a layer of a cache."""
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    return code is not None and "store_compression_weights" in code.co_names


class WholeTexts:
    """The cache of a compressor that runs on a block: every layer stores the rows' vectors and returns those of all
    tokens of the texts, from which the compressor makes all entries.
    """

    def __init__(self, exchange: Exchange, rate: int) -> None:
        self._exchange, self._rate = exchange, rate
        self.layers = AnyIndex((self,))

    def store_compression_weights(self, name: str, kv: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, int]:
        """The vectors of whole windows, and the position of the first."""
        kv, gate = self._exchange(name, kv, gate)
        usable = kv.shape[1] // self._rate * self._rate
        return kv[:, :usable], gate[:, :usable], 0

    def update_overlap_state(self, name: str, kv: Tensor, gate: Tensor, head_dim: int) -> tuple[None, None]:
        """No window comes before the text."""
        return None, None

    def update_compressor_states(self, name: str, compressed: Tensor) -> Tensor:
        """No entries come before those of the text."""
        return compressed


@dataclass(frozen=True, eq=False)
class Entries:
    """The entries that a compressor makes for a block.

    Attributes:
        block: The block.
        kv: ``[texts, entries, head_dim]`` the entries, each both K and V.
        hidden: ``[texts, 1 or S, entries]`` bool the entries that a row does not see.
    """

    block: Block
    kv: Tensor
    hidden: Tensor


def compress(call: IndexerCall, block: Block, exchange: Exchange) -> Entries:
    """Run a compressor on a block.

    Raises:
        ValueError: the compressor returns something other than entries and a bias of 0 or -inf.
    """
    rate: Any = getattr(call.indexer, "compress_rate", None)
    if not isinstance(rate, int):
        raise ValueError("a compressor does not say how many tokens an entry stands for")
    kv, bias = call.returned(WholeTexts(exchange, rate), block, lambda tensor: False)
    texts, rows = block.rows.shape
    if kv.ndim != 4 or kv.shape[:2] != (texts, 1):
        raise ValueError(f"a compressor returns entries of shape {tuple(kv.shape)} for {texts} texts")
    if bias is None:
        return Entries(block, kv[:, 0], torch.zeros((texts, 1, kv.shape[2]), dtype=torch.bool, device=kv.device))
    if bias.shape != (texts, 1, rows, kv.shape[2]):
        raise ValueError(f"a compressor returns a bias of shape {tuple(bias.shape)} for {(texts, rows)} rows")
    return Entries(block, kv[:, 0], bias[:, 0] < 0)


def sizes_of(kinds: tuple[Compressed, ...], name: str) -> Compressed:
    """The sizes of what a layer caches for a compressor of this name; ValueError if it caches nothing for it."""
    found = next((kind for kind in kinds if kind.name == name), None)
    if found is None:
        raise ValueError(f"a compressor {name!r} runs that was not there when the model was measured")
    return found


def with_entries(
    query: Tensor, out: Tensor, lse: Tensor, entries: list[Entries], scale: float, sinks: Tensor | None
) -> Tensor:
    """``[T, heads, head_dim]``: attention to tokens (``out`` and ``lse [T, heads]``), merged with attention to entries.

    Args:
        query: ``[T, heads, head_dim]``.
        out, lse: The partial state of attention to tokens, without sinks.
        entries: The entries of blocks that contain each row once.
        scale: The factor on the query times an entry.
        sinks: ``[heads]`` logits that join the softmax's denominator; None for none.
    """
    theirs, own = torch.zeros_like(out, dtype=torch.float32), torch.full_like(lse, -torch.inf)
    for of in entries:
        block = of.block
        if not of.kv.shape[1]:
            continue
        scores = torch.einsum("bshd,bed->bshe", query[block.rows].float(), of.kv.float()) * scale
        scores = scores.masked_fill(of.hidden[:, :, None], -torch.inf)
        block_lse = scores.logsumexp(-1)
        weights = torch.exp(scores - block_lse.masked_fill(block_lse == -torch.inf, 0.0)[..., None])
        attended = torch.einsum("bshe,bed->bshd", weights, of.kv.float())
        theirs[block.first : block.last] = attended.flatten(0, 1)[block.real]
        own[block.first : block.last] = block_lse.flatten(0, 1)[block.real]
    both = torch.stack((lse, own, *(() if sinks is None else (sinks.float().expand_as(lse),))))
    first, second = both.softmax(0)[:2]
    merged: Tensor = first[..., None] * out.float() + second[..., None] * theirs
    return merged.to(out.dtype)
