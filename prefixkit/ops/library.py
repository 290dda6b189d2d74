"""Every op of prefixkit: its contract, and its dispatch to a backend (see ``backend``).

A contract is a function with the op's name: its signature gives the schema, and it checks the arguments and returns
empty results, so it is the op's fake too.  Each raises BadShape, BadDtype or BadDevice if the arguments do not fit.

``Library.define`` and ``Library.impl`` have half the overhead per call of the ``custom_op`` decorator.  An op takes a
variant's key, because a schema cannot hold Python functions.  The ops are for inference: ``tree_attention`` runs under
autograd, but its backward raises :class:`NoBackward`; ops with ``_refuse_gradients`` below raise it at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from prefixkit.attention.gpu.capacity import scratch_ints
from prefixkit.attention.gpu.gpu_cost import COST_NUMBERS, GpuCost
from prefixkit.ops import arguments, digest_op, latent_ops, shared_parts, state_ops
from prefixkit.ops.attention_ops import classify_blocks, tree_attention
from prefixkit.ops.backend import backend_for
from prefixkit.ops.sampling_records import MOST_VOCAB, RECORD_INTS, words


class NoBackward(NotImplementedError):
    """The backward of an op without one was called."""


def kv_append(key: Tensor, value: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    """Write keys and values to pages.

    Every op that appends has this contract, on every backend.  A row with slot -1 writes nothing: it pads a captured
    graph's batch, or its token has KV.  Any other slot outside ``0 .. pages * page_size - 1`` is an error.  The CPU
    raises before it writes anything.  On a GPU the host does not wait to read slots, and a row with such a slot writes
    nothing; with ``PREFIXKIT_CHECK=1`` the host waits, and raises as the CPU does.

    Args:
        key, value: ``[T, kv_heads, head_dim]`` in the pages' dtype, each with the ``head_dim`` of its pages.  For pages
            in e4m3 they have another float dtype, and are rounded to the nearest number of e4m3, at most 448.
        k_pages, v_pages: ``[pages, page_size, kv_heads, head_dim]``, written in place; heads may differ in size.
        slots: ``[T]`` int64, distinct except for -1.

    Raises:
        IndexError: a slot does not exist; see above for GPUs.
    """
    arguments.check_append(key, value, k_pages, v_pages, slots)


def rotary_append(
    q: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor
) -> Tensor:
    """Rotate queries and keys (rotary embedding), and append keys and values as ``kv_append``: for decode steps.

    Args:
        q: ``[T, heads, head_dim]``.
        key, value: ``[T, kv_heads, head_dim]``; heads of ``value`` have the size of v_pages'.
        cos, sin: ``[T, head_dim]`` for each row's position, in the dtype of q, key and value.
        k_pages, v_pages, slots: As ``kv_append`` takes them.

    Returns:
        ``q`` rotated, contiguous, rows without a slot included.  Sums are float32 and rounded once.

    Raises:
        IndexError, NoBackward: as ``kv_append``; a gradient is recorded.
    """
    arguments.check_rotary(q, key, value, cos, sin, k_pages, v_pages, slots)
    return q.new_empty(q.shape)


def index_append(keys: Tensor, pages: Tensor, slots: Tensor) -> None:
    """Write what a layer caches in addition to K and V: the index keys by which it selects tokens.

    Args:
        keys: ``[T, heads, dim]`` in the pages' dtype.
        pages: ``[pages, page_size, heads, dim]``, written in place.
        slots: As ``kv_append`` takes them.

    Raises:
        IndexError: as ``kv_append``.
    """
    arguments.check_index_append(keys, pages, slots)


def linear_pair(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply by two weights of one shape that are adjacent in memory: in one product if rows are few.

    With few rows the time is that of reading weights, which one longer product does at a higher rate; with many rows
    two products are faster.

    Args:
        x: ``[..., width]``.
        weight: ``[columns, width]``, contiguous; each half of the columns is one of the weights.

    Returns:
        ``[..., columns]`` contiguous, ``x @ weight.T``.

    Raises:
        BadShape, BadDtype, BadDevice: the arguments do not fit each other.
        NoBackward: a gradient is recorded.
    """
    arguments.check_pair(x, weight)
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def advance(
    leaf: Tensor,
    start: Tensor,
    length: Tensor,
    page_indptr: Tensor,
    pages: Tensor,
    first_slot: Tensor,
    sampled: Tensor,
    tokens: Tensor,
    positions: Tensor,
    slots: Tensor,
    rows: int,
    page_size: int,
) -> None:
    """Start a decode step: every row moves one position on, and its leaf becomes one token longer.

    Args:
        leaf: ``[R]`` int32 the node that each row appends to, -1 for rows that pad a batch.
        start, length, page_indptr, pages, first_slot: The tree, int32; ``length`` grows by 1 at leaves with a slot.
        sampled: ``[R]`` int64 the token that each row runs next.
        tokens, positions, slots: ``[R]`` int64, written: the step.  Padding gets token 0, position 0 and slot -1; a
            leaf whose pages are full gets slot -1 and its last position.
        rows: The number of rows that take part, from the first on.
        page_size: Tokens per page.
    """
    op, step = "advance", {"sampled": sampled, "tokens": tokens, "positions": positions, "slots": slots}
    arguments.check_nodes(op, (start, length, page_indptr, pages, first_slot), leaf.device)
    for name, tensor in step.items():
        arguments.check_slots(op, name, tensor, leaf.device)
    arguments.expect(op, "leaf", leaf, dtypes=(torch.int32,))
    for name, tensor in (("leaf", leaf), *step.items()):
        arguments.expect(op, name, tensor, f"[at least {rows}]", tensor.ndim == 1 and tensor.shape[0] >= rows)


def sample(
    logits: Tensor,
    records: Tensor,
    seen: Tensor,
    tokens: Tensor,
    logprobs: Tensor,
    drawn: Tensor | None = None,
    allowed: Tensor | None = None,
) -> None:
    """Sample a token for every active row, by the specification of ``sampling.specification``, bit by bit.

    A row that is not active is unchanged.  For an active row the token and its log-probability are written, the token's
    bit in ``seen`` is set, and the record's step grows by 1.  A row with a logit of NaN or +inf, with no finite logit,
    or with scores beyond float32 gets token -1, log-probability NaN and no bit, and its step grows too.  A row whose
    logits are valid, but whose allowed tokens have no finite score, gets the same, but log-probability -inf.

    Args:
        logits: ``[n, vocab]`` float32, bfloat16 or float16; stride 1 over the vocabulary of at most 2**20 tokens.
        records: ``[rows, 12]`` int32, contiguous: a record of each row's parameters, see ``ops.sampling_records``.
            This tensor and the following ones have at least ``n`` rows.
        seen: ``[rows, ceil(vocab / 32)]`` int32, contiguous: bit ``t % 32`` of word ``t // 32`` says that the sequence
            holds token ``t``.  Read for rows with a repetition penalty.
        tokens: ``[rows]`` int64, written.
        logprobs: ``[rows]`` float32, written: the log-softmax of the untouched logits at the token.
        drawn: ``[rows, 2]`` float32, contiguous, written: the logarithm of the probability with which the token was
            sampled, and the probability mass that the filters left; NaN without a token.  None: not written.
        allowed: ``[rows, ceil(vocab / 32)]`` int32, contiguous: likewise the bits of the tokens that may be sampled;
            read for rows whose record is ``masked``.  None: all may be sampled.
    """
    op, device = "sample", logits.device
    fits = logits.ndim == 2 and 1 <= logits.shape[1] <= MOST_VOCAB
    arguments.expect(op, "logits", logits, f"[n, vocab] with 1 to {MOST_VOCAB} tokens", fits, arguments.FLOATS)
    rows, vocab = logits.shape
    if vocab > 1 and logits.stride(1) != 1:
        strides = list(logits.stride())
        raise arguments.BadShape(
            f"{op}: logits must have stride 1 over the vocabulary, got strides {strides}; use .contiguous()"
        )
    for name, tensor, dtype, width in (
        ("records", records, torch.int32, (RECORD_INTS,)),
        ("seen", seen, torch.int32, (words(vocab),)),
        ("tokens", tokens, torch.int64, ()),
        ("logprobs", logprobs, torch.float32, ()),
        *(() if drawn is None else (("drawn", drawn, torch.float32, (2,)),)),
        *(() if allowed is None else (("allowed", allowed, torch.int32, (words(vocab),)),)),
    ):
        shape = tensor.shape
        fits = len(shape) == 1 + len(width) and shape[0] >= rows and shape[1:] == width and tensor.is_contiguous()
        if not fits or tensor.dtype != dtype or tensor.device != device:  # names are for errors only
            expected = f"[at least {rows}{''.join(f', {n}' for n in width)}], contiguous"
            arguments.expect(op, name, tensor, expected, fits, (dtype,), device)


def plan_tree(
    sizes: Tensor,
    parent: Tensor,
    subtree_end: Tensor,
    length: Tensor,
    own: Tensor,
    start: Tensor,
    run: Tensor,
    counts: Tensor,
    tile_items: Tensor,
    decode_items: Tensor,
    segments: Tensor,
    merge_indptr: Tensor,
    merge_indices: Tensor,
    limits: Tensor,
    scratch: Tensor,
    heads: Sequence[int],
    num_sms: int,
    cost: Sequence[float],
    seen: Sequence[int],
) -> None:
    """The plan that ``attention.gpu.gpu_plan`` specifies, array by array, for a tree whose arrays are on the device.

    All tensors are int32 and contiguous.

    Args:
        sizes: ``[2]`` the number of nodes, and 1 if the plan is by heavy paths.
        parent, subtree_end: ``[nodes]`` as in the snapshot; this tensor and the next ones may be longer than the tree.
        length: ``[nodes]`` tokens of each node that are visible in the step.
        own: ``[nodes]`` query rows in each node.
        start, run: ``[nodes]`` position of each node's first token, and the run (``attention.paths.runs``) that it is a
            part of, or -1.  If they have no elements, no plan is by heavy paths, whatever ``sizes`` say.
        counts, tile_items, decode_items, segments, merge_indptr, merge_indices, limits: The arrays of a ``Plan``,
            written; their sizes are the plan's capacity.  A plan that does not fit is empty, and ``counts[OVERFLOW]``
            is 1.
        scratch: ``[scratch_ints(...)]`` (``attention.gpu.capacity``), segments included if ``start`` has elements; its
            content is undefined after the call.
        heads: Query heads, KV heads, head size of Q and K, bytes of an element, head size of V.
        num_sms: Blocks to plan for.
        cost: ``GpuCost.numbers``; its tiles hold at least a whole GQA group.
        seen: ``Visible.numbers``: tiles of kind LIMIT begin at the first key that a query sees; others are read whole.

    Raises:
        ValueError: ``heads``, ``cost`` or ``seen`` is not valid, or no tile holds a GQA group.
    """
    op, device, nodes = "plan_tree", parent.device, parent.shape[0]
    names = "sizes", "parent", "subtree_end", "length", "own", "start", "run"
    tree = sizes, parent, subtree_end, length, own, start, run
    work = counts, tile_items, decode_items, segments, merge_indptr, merge_indices, limits
    arguments.check_ints(op, "tree", names, tree, device)
    arguments.check_ints(op, "scratch", ("scratch",), (scratch,), device)
    arguments.expect(op, "sizes", sizes, "[2], contiguous", sizes.shape == (2,) and sizes.is_contiguous())
    for name, tensor in zip(names[1:], tree[1:], strict=True):
        none = name in names[-2:] and start.shape == run.shape == (0,)
        if (not none and tensor.shape != (nodes,)) or not tensor.is_contiguous():
            arguments.expect(op, name, tensor, f"[{nodes}], contiguous", False)
    arguments.check_work(op, work, device)
    if not all(tensor.is_contiguous() for tensor in (*work, scratch)):
        raise arguments.BadShape(f"{op}: the plan's tensors and scratch must be contiguous")
    of_paths = segments.shape[0] if start.shape[0] else 0
    need = scratch_ints(nodes, tile_items.shape[0], decode_items.shape[0], merge_indptr.shape[0] - 1, of_paths)
    if scratch.ndim != 1 or scratch.shape[0] < need:
        arguments.expect(op, "scratch", scratch, f"[at least {need}]", False)
    if len(heads) != 5 or min(heads) < 1 or heads[0] % heads[1]:
        raise ValueError(
            f"{op}: heads must be query heads, KV heads, head size of Q and K, bytes of an element, head size of V, "
            f"got {list(heads)}"
        )
    if len(cost) != COST_NUMBERS:
        raise ValueError(f"{op}: cost must be the {COST_NUMBERS} numbers of a GpuCost, got {len(cost)}")
    if len(seen) != 3 or min(seen) < 0:
        raise ValueError(f"{op}: seen must be a window, a chunk and a first position, or 0 for none, got {list(seen)}")
    gqa_group, tile_heads = heads[0] // heads[1], GpuCost.of(cost).sharing.tile_heads
    if gqa_group > tile_heads:
        raise ValueError(
            f"{op}: a tile must hold a GQA group of {gqa_group} heads, but holds {tile_heads}; plan in numpy"
        )


def expert_product(x: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor, per: int) -> Tensor:
    """Multiply rows by the matrices of their experts: row ``p // per`` for pair ``p``.

    With our kernels the host does not wait: only the GPU reads how many pairs each expert has.

    Args:
        x: ``[pairs / per, k]``; for our kernels bfloat16 or float16, with sizes that are multiples of 8.
        weight: ``[experts, k, n]`` in x's dtype, with stride 1 over k or n.
        bias: ``[experts, n]`` contiguous in x's dtype, or None.
        index: ``[tokens, per token]`` int64, contiguous: the expert of each pair.
        per: Consecutive pairs that share a row.

    Returns:
        ``[pairs, n]``: pair p has ``x[p // per] @ weight[index[p]] + bias[index[p]]``, or 0 if that expert does not
        exist.

    Raises:
        BadShape, BadDtype, BadDevice: an argument does not fit the others.
    """
    arguments.check_experts(x, weight, bias, index, per)
    return x.new_empty((index.shape[0] * index.shape[1], weight.shape[2]))


def _no_backward(ctx: Any, *grads: Tensor) -> NoReturn:
    raise NoBackward(
        "prefixkit's attention is for inference and has no backward; run the model under torch.inference_mode(), or "
        "unpatch(model) to train it"
    )


def _refuse_gradients(*given: Any) -> None:
    # torch.library cannot register a backward for an op that writes to its arguments.
    if torch.is_grad_enabled() and any(getattr(each, "requires_grad", False) for each in given):
        _no_backward(None)


def _runs(name: str, checks: tuple[Callable[..., object], ...]) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        for check in checks:
            check(*arguments)
        return getattr(backend_for(arguments[0].device), name)(*arguments)

    return run


_library = torch.library.Library("prefixkit", "DEF")  # type: ignore[no-untyped-call]
# An op's contract, the arguments that it writes to, and the checks that run before the backend is called; none if the
# backend checks by itself: ours for GPUs remembers the signatures that it has checked.
_OPS: tuple[tuple[Callable[..., object], tuple[str, ...], tuple[Callable[..., object], ...]], ...] = (
    (kv_append, ("k_pages", "v_pages"), ()),
    (rotary_append, ("k_pages", "v_pages"), (_refuse_gradients,)),
    (index_append, ("pages",), ()),
    (linear_pair, (), (_refuse_gradients,)),
    (tree_attention, (), ()),
    (classify_blocks, (), ()),
    (latent_ops.latent_attention, (), ()),
    (latent_ops.merge_states, (), (latent_ops.merge_states,)),
    (advance, ("length", "tokens", "positions", "slots"), (advance,)),
    (sample, ("records", "seen", "tokens", "logprobs", "drawn"), (sample,)),
    (plan_tree, (*arguments.PACKED, "scratch"), (plan_tree,)),
    (expert_product, (), (arguments.check_experts,)),
    (state_ops.conv_step, ("states",), (_refuse_gradients, state_ops.check_conv_step)),
    (state_ops.mamba2_step, ("states",), (_refuse_gradients, state_ops.check_mamba2_step)),
    (state_ops.delta_rule, ("states",), (_refuse_gradients, state_ops.check_delta_rule)),
    (state_ops.rms_norm, (), (_refuse_gradients, state_ops.rms_norm)),
    (digest_op.digest, ("total",), (digest_op.digest,)),
    *((op, (), (_refuse_gradients, op)) for op in (shared_parts.part_of_product, shared_parts.sum_parts)),
    (shared_parts.gather_parts, (), (_refuse_gradients, shared_parts.gather_parts)),
)
SCHEMAS = tuple(op.__name__ + torch.library.infer_schema(op, mutates_args=writes) for op, writes, _ in _OPS)

for _schema, (_op, _, _checks) in zip(SCHEMAS, _OPS, strict=True):
    _library.define(_schema, tags=torch.Tag.pt2_compliant_tag)  # type: ignore[no-untyped-call]
    for _key in ("CPU", "CUDA"):
        _library.impl(_op.__name__, _runs(_op.__name__, _checks), _key)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"prefixkit::{_op.__name__}", _op, lib=_library)
for _name in ("tree_attention", "latent_attention"):
    torch.library.register_autograd(f"prefixkit::{_name}", _no_backward, lib=_library)
