"""Runs the tokens of a step through one module that keeps a state."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from prefixkit.attention.state_batches import StateBatch
from prefixkit.attention.step import Step
from prefixkit.kv.state_pool import StatePool
from prefixkit.models.states.fused_functions import PoolState
from prefixkit.models.states.fused_step import FusedStep, fused_step
from prefixkit.models.states.mixer_class import run_texts


def run_step(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], step: Step, pool: StatePool, number: int
) -> Any:
    """The module's output for the rows of a step; states are read from source slots and written to target slots.

    Args:
        module, args, kwargs: The module, and the arguments that it was called with for ``[1, T]``.
        step: The step, which says which rows run in which batches.
        pool: The pool that holds the states.
        number: The module's index in the pool.
    """
    states, tensors = pool.states[number], pool.tensors[number]
    made: list[Any] = []
    for batch in step.states:
        fused = None if batch.source is None else fused_step(module, batch.length, pool.devices[number])
        before = None if batch.source is None else _before(pool, number, batch, batch.source, fused)
        forward = None if fused is None else fused.forward
        run = partial(run_texts, module, args, kwargs, step.num_rows, partial(_select, batch))
        out, cache = run(states, before, forward=forward)
        for tensor, after in zip(tensors, cache.values(states), strict=True):
            if isinstance(after, PoolState):
                continue  # the op has written it to its slot
            tensor.index_copy_(0, batch.target, after if batch.writes is None else after.index_select(0, batch.writes))
        parts = out if isinstance(out, tuple) else (out,)
        made = made or [_empty(part, batch, step.num_rows) for part in parts]
        for index, part in enumerate(parts):
            made[index] = _put(made[index], part, batch)
    return tuple(made) if isinstance(out, tuple) else made[0]


def _before(
    pool: StatePool, number: int, batch: StateBatch, source: Tensor, fused: FusedStep | None
) -> list[Tensor | PoolState]:
    """The states before a batch: copies, or their places in the pool if an op updates them there."""
    target = batch.target
    if fused is not None and batch.writes is not None:
        target = torch.full_like(source, -1).index_copy_(0, batch.writes, target)
    return [
        PoolState(tensor, source, target)
        if fused is not None and fused.takes(state, batch.length, pool.devices[number])
        else tensor.index_select(0, source)
        for state, tensor in zip(pool.states[number], pool.tensors[number], strict=True)
    ]


def _select(batch: StateBatch, packed: Tensor) -> Tensor:
    """The rows of a batch: ``[1, T, ...]`` to ``[B, L, ...]``."""
    rows = packed[0] if batch.rows is None else packed[0].index_select(0, batch.rows)
    return rows.view(-1, batch.length, *rows.shape[1:])


def _of_tokens(part: Any, batch: StateBatch) -> bool:
    """Whether a part of a module's output is ``[B, L, ...]``, with an entry per token."""
    return isinstance(part, Tensor) and part.ndim > 2 and part.shape[1] == batch.length


def _empty(part: Any, batch: StateBatch, rows: int) -> Any:
    """The tensor ``[1, T, ...]`` for the outputs of all batches; None if one batch has all rows."""
    whole = batch.rows is None or not _of_tokens(part, batch)
    return None if whole else part.new_empty(1, rows, *part.shape[2:])


def _put(made: Any, part: Any, batch: StateBatch) -> Any:
    """Write a batch's rows to the rows of all batches; a part without an entry per token is returned as it is."""
    if not _of_tokens(part, batch):
        return part
    rows = part.flatten(0, 1)
    if batch.rows is None:
        return rows[None]
    made[0].index_copy_(0, batch.rows, rows)
    return made
