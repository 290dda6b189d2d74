"""Every op of prefixkit: its schema, its fake, its CPU implementation, and its way to a GPU's (see ``backend``).

``Library.define`` and ``Library.impl`` instead of the ``custom_op`` decorator: half the overhead per call.  Keys of variants
stand for Python functions, which schemas cannot carry.  The ops are for inference: ``tree_attention`` runs under
autograd, but its backward raises :class:`NoBackward`; ``rotary_append`` raises it at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from prefixkit.attention.variants import lookup
from prefixkit.backends.torch.run import attend
from prefixkit.ops.backend import ops_for
from prefixkit.ops.checks import WORK, check_append, check_attention, check_packed, check_rotary, check_work
from prefixkit.ops.rotary import rotate

_library = torch.library.Library("prefixkit", "DEF")  # type: ignore[no-untyped-call]

SCHEMAS = (
    "kv_append(Tensor key, Tensor value, Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor slots) -> ()",
    "rotary_append(Tensor q, Tensor key, Tensor value, Tensor cos, Tensor sin, Tensor(a!) k_pages, Tensor(b!) v_pages, "
    "Tensor slots) -> Tensor",
    "tree_attention(Tensor q, Tensor k_pages, Tensor v_pages, Tensor q_positions, Tensor[] work, Tensor[] nodes, "
    "float scale, str variant) -> (Tensor out, Tensor lse)",
)
for _schema in SCHEMAS:
    _library.define(_schema, tags=torch.Tag.pt2_compliant_tag)  # type: ignore[no-untyped-call]


class NoBackward(NotImplementedError):
    """A gradient was asked of an op that has none."""


def _kv_append(key: Tensor, value: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    """Write keys and values to pages.

    One contract for every op that appends, on every backend: a row whose slot is -1 writes nothing, as rows do that
    pad a captured graph's batch; any other slot outside ``0 .. pages * page_size - 1`` is an error.  The CPU raises
    before it writes anything.  On a GPU the host does not wait to read slots: such a row writes nothing either, and
    with ``PREFIXKIT_CHECK=1`` the host does wait, and raises as the CPU does.

    Args:
        key, value: ``[T, kv_heads, head_dim]`` in the pages' dtype.
        k_pages, v_pages: ``[pages, page_size, kv_heads, head_dim]``, written in place.
        slots: ``[T]`` int64, distinct but for -1.

    Raises:
        BadShape, BadDtype, BadDevice: an argument does not fit the others.
        IndexError: a slot does not exist; see above for GPUs.
    """
    check_append(key, value, k_pages, v_pages, slots)
    rows = _writing_rows("kv_append", slots, k_pages)
    with torch.no_grad():
        _append(key, value, k_pages, v_pages, slots, rows)


def _rotary_append(
    q: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor
) -> Tensor:
    """Rotary embedding of queries and keys, and ``kv_append`` of these keys: a decode step's way to attention.

    Args:
        q: ``[T, heads, head_dim]``.
        key, value: ``[T, kv_heads, head_dim]``.
        cos, sin: ``[T, head_dim]`` of each row's position, in the dtype of all else.
        k_pages, v_pages, slots: As ``kv_append`` takes them.

    Returns:
        ``q`` rotated, contiguous, rows without a slot included.  Sums are float32 and rounded once.

    Raises:
        BadShape, BadDtype, BadDevice, IndexError: as ``kv_append``.
        NoBackward: a gradient is recorded.
    """
    _refuse_gradients(q, key, value)
    check_rotary(q, key, value, cos, sin, k_pages, v_pages, slots)
    rows = _writing_rows("rotary_append", slots, k_pages)
    with torch.no_grad():
        _append(rotate(key, cos, sin), value, k_pages, v_pages, slots, rows)
        return rotate(q, cos, sin)


def _refuse_gradients(*tensors: Tensor) -> None:
    # torch.library takes no backward of an op that writes to its arguments.
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        _no_backward(None)


def _writing_rows(op: str, slots: Tensor, pages: Tensor) -> Tensor | None:
    """Rows whose slot is not -1; None for all.  IndexError: a slot does not exist; nothing has been written yet."""
    num_slots = pages.shape[0] * pages.shape[1]
    # Plus one, and seen as unsigned, only what is neither -1 nor a slot lies above num_slots; and -1 is 0.
    shifted = slots.numpy().view(np.uint64) + np.uint64(1)
    if len(shifted) and int(shifted.max()) > num_slots:
        raise IndexError(
            f"{op}: slots {int(slots.min())}..{int(slots.max())}, but the pages hold slots 0..{num_slots - 1}, and "
            "only -1 says that a row writes nothing"
        )
    return None if shifted.all() else torch.from_numpy(np.flatnonzero(shifted))


def _append(key: Tensor, value: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor, rows: Tensor | None) -> None:
    if rows is not None:
        key, value, slots = key[rows], value[rows], slots[rows]
    _write(k_pages, slots, key)
    _write(v_pages, slots, value)


def _check_slots(op: str, slots: Tensor, pages: Tensor) -> None:
    # Before anything is written.  Seen as unsigned, a negative slot is a huge one, so one reduction tells.
    num_slots = pages.shape[0] * pages.shape[1]
    if slots.shape[0] and int(slots.numpy().view(np.uint64).max()) >= num_slots:
        raise IndexError(
            f"{op}: slots {int(slots.min())}..{int(slots.max())}, but the pages hold slots 0..{num_slots - 1}"
        )


def _write(pages: Tensor, slots: Tensor, values: Tensor) -> None:
    page_size = pages.shape[1]
    if pages.stride(0) == page_size * pages.stride(1):  # token-major: slots are rows of one matrix
        pages.flatten(0, 1).index_copy_(0, slots, values)
    else:
        pages[slots // page_size, slots % page_size] = values


def _tree_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    q_positions: Tensor,
    work: Sequence[Tensor],
    nodes: Sequence[Tensor],
    scale: float,
    variant: str,
) -> tuple[Tensor, Tensor]:
    """Attention of ``T`` queries over a tree, as planned.

    Args:
        q: ``[T, heads, head_dim]`` in the pages' dtype.
        k_pages, v_pages: ``[pages, page_size, kv_heads, head_dim]`` with token-major strides.
        q_positions: ``[T]`` int64.
        work: The plan: items, segment_indptr, segments, merge_indptr, merge_indices; int32.
        nodes: The tree: start, length, page_indptr, pages, first_slot; int32.
        scale: Factor on ``q . k``.
        variant: Key from ``register``.

    Returns:
        ``out [T, heads, head_dim]`` in q's dtype and ``lse [T, heads]`` float32, natural logarithm.
    """
    check_attention(q, k_pages, v_pages, q_positions)
    with torch.no_grad():
        return attend(q, k_pages, v_pages, q_positions, work, nodes, scale, variant)


def _gpu_kv_append(key: Tensor, value: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    ops_for(k_pages.device).kv_append(key, value, k_pages, v_pages, slots)


def _gpu_rotary_append(
    q: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor
) -> Tensor:
    _refuse_gradients(q, key, value)
    rotated: Tensor = ops_for(k_pages.device).rotary_append(q, key, value, cos, sin, k_pages, v_pages, slots)
    return rotated


def _gpu_tree_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    q_positions: Tensor,
    work: Sequence[Tensor],
    nodes: Sequence[Tensor],
    scale: float,
    variant: str,
) -> tuple[Tensor, Tensor]:
    attended: tuple[Tensor, Tensor] = ops_for(k_pages.device).tree_attention(
        q, k_pages, v_pages, q_positions, work, nodes, scale, variant
    )
    return attended


def _fake_kv_append(key: Tensor, value: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    check_append(key, value, k_pages, v_pages, slots)


def _fake_rotary_append(
    q: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor
) -> Tensor:
    check_rotary(q, key, value, cos, sin, k_pages, v_pages, slots)
    return q.new_empty(q.shape)


def _fake_tree_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    q_positions: Tensor,
    work: Sequence[Tensor],
    nodes: Sequence[Tensor],
    scale: float,
    variant: str,
) -> tuple[Tensor, Tensor]:
    check_attention(q, k_pages, v_pages, q_positions)
    (check_work if len(work) == len(WORK) else check_packed)(q.shape[0], work, nodes)
    lookup(variant)
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


def _no_backward(ctx: Any, *grads: Tensor) -> NoReturn:
    raise NoBackward(
        "prefixkit's attention is for inference and has no backward; run the model under torch.inference_mode(), or "
        "unpatch(model) to train it"
    )


for _name, _cpu, _gpu, _fake in (
    ("kv_append", _kv_append, _gpu_kv_append, _fake_kv_append),
    ("rotary_append", _rotary_append, _gpu_rotary_append, _fake_rotary_append),
    ("tree_attention", _tree_attention, _gpu_tree_attention, _fake_tree_attention),
):
    _library.impl(_name, _cpu, "CPU")  # type: ignore[no-untyped-call]
    _library.impl(_name, _gpu, "CUDA")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"prefixkit::{_name}", _fake, lib=_library)
torch.library.register_autograd("prefixkit::tree_attention", _no_backward, lib=_library)
