"""What the compressor of an attention layer caches per token, and whether entries can be recomputed from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from prefixkit.kv.layer_kinds import Compressed
from prefixkit.models.indexing.compressors import compress
from prefixkit.models.indexing.indexers import Block, IndexerCall
from prefixkit.models.probe.measured import close

_WINDOWS = 3  # of a text with which it is compared, and a part of another


class ProbedCompressor:
    """A compressor as an attention module calls it for the rows of a probe's pass.

    Args:
        call: The call.
        check: Whether to compare the entries with those that the compressor's own code makes without a cache.

    Attributes:
        kinds: What the compressor caches of each token.
        dtype: The dtype of the cached vectors.
        rows: ``[rows, size]`` float32 what the compressor caches of the rows.
        stand_in: What the attention module gets in place of entries and a bias.

    Raises:
        ValueError: the compressor does not do what :class:`StepCompressor` assumes; the message says why.
    """

    def __init__(self, call: IndexerCall, check: bool) -> None:
        self._made: dict[str, tuple[Tensor, Tensor]] = {}
        rows = call.total
        at = torch.arange(rows, device=next(call.indexer.parameters()).device)
        block = Block(0, rows, at[None], at, at[None], at.new_zeros(1), (at <= at[:, None])[None])
        entries = compress(call, block, self._note)
        if not self._made:
            raise ValueError("a compressor caches nothing of tokens")
        vectors = [vector for pair in self._made.values() for vector in pair]
        if any(vector.ndim != 3 or vector.shape[:2] != (1, rows) for vector in vectors):
            raise ValueError(f"a compressor caches {[tuple(of.shape) for of in vectors]}, which is not of each token")
        if len(kinds := {vector.dtype for vector in vectors}) > 1:
            raise ValueError(f"a compressor caches vectors of {kinds}, and a pool holds one dtype")
        self.kinds = tuple(Compressed(name, kv.shape[2], gate.shape[2]) for name, (kv, gate) in self._made.items())
        self.dtype = vectors[0].dtype
        self.rows = torch.cat([vector[0].float() for vector in vectors], 1)
        self.stand_in = (
            entries.kv.new_empty((1, 1, 0, entries.kv.shape[2])),
            torch.empty((1, 1, 0, 0), dtype=torch.bool, device=at.device),
        )
        if check:
            self._check(call)

    def _note(self, name: str, kv: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        self._made[name] = kv, gate
        return kv, gate

    def _check(self, call: IndexerCall) -> None:
        """Check that the last rows of a text get the entries that the compressor's own code makes without a cache."""
        rows, rate = call.total, int(getattr(call.indexer, "compress_rate", 1))
        tokens = _WINDOWS * rate + rate // 2 + 1
        repeated = torch.arange(tokens, device=self.rows.device) % rows

        def whole(value: Any) -> Any:
            if isinstance(value, tuple | list):
                return tuple(map(whole, value))
            if not isinstance(value, Tensor):
                return value
            if not value.is_floating_point():
                return torch.arange(tokens, device=value.device, dtype=value.dtype)[None]
            return value[:, repeated]

        given = replace(call, args=whole(call.args), kwargs={name: whole(of) for name, of in call.kwargs.items()})
        alone = [None if value is call.cache else value for value in given.args]
        named = {name: None if value is call.cache else value for name, value in given.kwargs.items()}
        kv, bias = call.indexer(*alone, **named)
        last = torch.arange(tokens - rows, tokens, device=repeated.device)
        seen = torch.ones((1, rows, tokens), dtype=torch.bool, device=repeated.device)
        block = Block(0, tokens, last[None], last[:0], repeated[None], last.new_zeros(1), seen)

        def cached(name: str, own_kv: Tensor, own_gate: Tensor) -> tuple[Tensor, Tensor]:
            if not all(
                close(own, of[:, last % rows], of.dtype)
                for own, of in zip((own_kv, own_gate), self._made[name], strict=True)
            ):
                raise ValueError("a compressor caches other vectors of the same token elsewhere")
            return tuple(of[:, repeated] for of in self._made[name])  # type: ignore[return-value]

        found = compress(replace(given, total=tokens), block, cached)
        hidden = torch.zeros_like(found.hidden) if bias is None else bias[0, :, -rows:] < 0
        if not close(found.kv, kv[:, 0], kv.dtype) or not torch.equal(found.hidden.expand_as(hidden), hidden):
            raise ValueError("a compressor makes other entries of a text at once than of its tokens in a cache")
