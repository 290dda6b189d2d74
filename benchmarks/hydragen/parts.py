"""Attention in parts, as Hydragen computes it: all queries below a node against the node, each query against its own KV."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]


def plain(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """``[nodes, kv_heads, rows, head_dim]`` and its log-sum-exp, by matrix products: what a CPU gets."""
    scores = (q.float() @ k.float().transpose(-1, -2)) * scale
    lse = scores.logsumexp(-1)
    return ((scores - lse[..., None]).exp() @ v.float()).to(q.dtype), lse


def level_attends(device: torch.device) -> dict[str, Attend]:
    """Ways to attend to a level's nodes, by name."""
    if device.type == "cpu":
        return {"plain": plain}
    from benchmarks.tree_attention.rivals import cudnn, flash

    return {"flash": flash, "cudnn": cudnn}


class Private:
    """Attention of each query to KV that only its sequence holds: flash with lengths on the device.

    Args:
        batch, room: Sequences, and tokens that each has room for.
        device: Where.

    Attributes:
        used: ``[batch]`` int32 tokens that each holds.
    """

    def __init__(self, batch: int, room: int, device: torch.device) -> None:
        self.batch, self.room = batch, room
        self.used = torch.ones(batch, dtype=torch.int32, device=device)
        self._count = torch.arange(batch + 1, dtype=torch.int32, device=device)
        self._begin_k = self._count * room
        self._begin_q: dict[int, Tensor] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Attend.

        Args:
            q: ``[kv_heads, batch * group, head_dim]``.
            k, v: ``[batch, room, kv_heads, head_dim]``.

        Returns:
            ``[batch, kv_heads, group, head_dim]`` and log-sum-exp ``[batch, kv_heads, group]``, of any strides.
        """
        kv_heads, rows, head_dim = q.shape
        group = rows // self.batch
        if q.device.type == "cpu":
            return self._on_cpu(q.view(kv_heads, self.batch, group, head_dim).transpose(0, 1), k, v, scale)
        if group not in self._begin_q:
            self._begin_q[group] = self._count * group
        out, lse = self._flash(q.transpose(0, 1), k, v, self._begin_q[group], group, scale)
        out = out.view(self.batch, group, kv_heads, head_dim).transpose(1, 2)
        return out, lse.view(kv_heads, self.batch, group).transpose(0, 1)

    def alone(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """The same where there is nothing to merge: ``q [batch, heads, head_dim]`` to as much.

        Flash packs the query heads of a KV head itself then, and splits long KV.
        """
        if q.device.type == "cpu":
            grouped = q.view(self.batch, k.shape[2], -1, q.shape[2])
            return self._on_cpu(grouped, k, v, scale)[0].reshape(q.shape)
        return self._flash(q, k, v, self._count, 1, scale)[0]

    def _flash(self, q: Tensor, k: Tensor, v: Tensor, begin: Tensor, most: int, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = torch.ops.aten._flash_attention_forward(
            q,
            k.flatten(0, 1),
            v.flatten(0, 1),
            begin,
            self._begin_k,
            most,
            self.room,
            0.0,
            False,
            False,
            scale=scale,
            seqused_k=self.used,
        )[:2]
        return out, lse

    def _on_cpu(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        k, v = (t.transpose(1, 2).float() for t in (k, v))
        beyond = torch.arange(self.room) >= self.used[:, None]
        scores = (q.float() @ k.transpose(-1, -2) * scale).masked_fill(beyond[:, None, None], float("-inf"))
        lse = scores.logsumexp(-1)
        return ((scores - lse[..., None]).exp() @ v).to(q.dtype), lse


def merge_parts(parts: list[Tensor], lses: list[Tensor], rows_per_node: list[int], heads: int) -> Tensor:
    """``[rows, heads, head_dim]`` of all parts: one fused kernel, or plain torch on a CPU; see ``merge.merge``."""
    if parts[0].device.type != "cpu":
        from benchmarks.tree_attention.merge import merge

        return merge(parts, lses, rows_per_node, heads)
    outs, weights = [], []
    for part, lse, rows in zip(parts, lses, rows_per_node, strict=True):
        nodes, kv_heads, _, head_dim = part.shape
        outs.append(part.reshape(nodes, kv_heads, rows, -1, head_dim).transpose(1, 2).reshape(-1, heads, head_dim))
        weights.append(lse.reshape(nodes, kv_heads, rows, -1).transpose(1, 2).reshape(-1, heads))
    share = torch.stack(weights).softmax(0)[..., None]
    return (torch.stack(outs).float() * share).sum(0).to(parts[0].dtype)
