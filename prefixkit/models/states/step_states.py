"""The tokens of a step through one module that keeps a state."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from prefixkit.attention.state_batches import StateBatch
from prefixkit.attention.step import Step
from prefixkit.kv.state_pool import StatePool
from prefixkit.models.states.mixer_class import run_texts


def run_step(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], step: Step, pool: StatePool, number: int
) -> Any:
    """What the module returns for the rows of a step; its states go from the slots before them to those after.

    Args:
        module, args, kwargs: As it was called, for ``[1, T]``.
        step: Which rows run, in batches.
        pool: Where states lie.
        number: Which of its modules this is.
    """
    states, tensors, made = pool.states[number], pool.tensors[number], None
    for batch in step.states:
        source = None if batch.source is None else [tensor.index_select(0, batch.source) for tensor in tensors]
        select = partial(_select, batch)
        out, cache = run_texts(module, args, kwargs, step.num_rows, select, states, source)
        for tensor, values in zip(tensors, cache.values(states), strict=True):
            tensor.index_copy_(0, batch.target, values if batch.writes is None else values.index_select(0, batch.writes))
        if batch.rows is None:
            return _map(out, partial(_flat, step.num_rows))
        made = _map(out, partial(_empty, step.num_rows)) if made is None else made
        _write(made, out, batch.rows)
    return made


def _select(batch: StateBatch, packed: Tensor) -> Tensor:
    """``[1, T, ...]`` to ``[B, L, ...]``."""
    rows = packed[0] if batch.rows is None else packed[0].index_select(0, batch.rows)
    return rows.unflatten(0, (-1, batch.length))


def _map(made: Any, of: Callable[[Tensor], Tensor]) -> Any:
    """What a module returns, with its tensors changed: one, or several in a tuple."""
    if isinstance(made, tuple):
        return tuple(_map(part, of) for part in made)
    return of(made) if isinstance(made, Tensor) else made


def _flat(rows: int, out: Tensor) -> Tensor:
    return out.reshape(1, rows, *out.shape[2:])


def _empty(rows: int, out: Tensor) -> Tensor:
    return out.new_empty(1, rows, *out.shape[2:])


def _write(made: Any, out: Any, rows: Tensor) -> None:
    """Put ``[B, L, ...]`` rows of one batch where they belong in ``[1, T, ...]``."""
    if isinstance(out, tuple):
        for whole, part in zip(made, out, strict=True):
            _write(whole, part, rows)
    elif isinstance(out, Tensor):
        made[0].index_copy_(0, rows, out.flatten(0, 1))

