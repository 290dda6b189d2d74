"""Planning a step of a model of one's own: which tokens run, and how they attend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.attention.queries import Queries, StepTree, UnnumberedSequences
from prefixkit.attention.step import Step, build_step
from prefixkit.attention.uncomputed import path_queries, tokens_of
from prefixkit.attention.variants import Variant
from prefixkit.attention.visible import lowest_positions
from prefixkit.functional.attend import TreeAttention, TreeStep
from prefixkit.functional.given_pages import GivenPages
from prefixkit.functional.owners import claim
from prefixkit.kv.kv_pool import KVPool
from prefixkit.ops.attention_ops import plan_under_mask
from prefixkit.tree.radix import PrefixTree
from prefixkit.tree.sequence import Sequence as TreeSequence
from prefixkit.tree.sequence import check_live
from prefixkit.tree.snapshot import TreeSnapshot


def plan(
    attention: TreeAttention,
    tree: PrefixTree | TreeSnapshot,
    sequences: Sequence[TreeSequence] | None = None,
    num_queries: int | Sequence[int] = 1,
) -> TreeStep:
    """Plan the next forward pass: all tokens of the sequences that have no KV, ancestors and descendants in one step.

    A decode step, in which each sequence has one new token, has one query at each leaf; a step over new prompts runs
    all their tokens.  No new plan is made while only leaves have grown since the last plan.

    Args:
        attention: The heads, the variant and the pool.
        tree: A tree of tokens, or one of page tables (:func:`tree_from_cascade`).
        sequences: For a tree of tokens, the sequences that run; several may share tokens.  A variant's functions see
            the index in this list as ``b``.  For page tables, which define their queries, None; ``b`` is the request.
        num_queries: At least this many of the last tokens of each sequence run, one number for all sequences or one for
            each; tokens that have KV run again, and their KV is not written again.

    Raises:
        ValueError: the tree does not fit the pool, which may hold another tree's KV; a sequence has ended, belongs to
            another tree, or is shorter than its queries; KV of queries, or KV that they see, was freed; or there is no
            token to run.
        TypeError: an argument is of another type.
        UnnumberedSequences: the variant reads b, and several of the sequences share tokens that run.
    """
    if not isinstance(attention, TreeAttention):
        raise TypeError(f"plan: attention must be a TreeAttention, got {type(attention).__name__}")
    _check_pages(attention.pool, tree)
    if isinstance(tree, PrefixTree):
        if isinstance(sequences, TreeSequence):
            raise TypeError("plan: sequences must be a list, got one sequence; pass [sequence]")
        sequences = [] if sequences is None else list(sequences)
        if not sequences:
            raise ValueError("plan: a tree of tokens needs the sequences that run, got none; pass what insert returned")
        claim("plan", attention.pool, tree)
        return _plan_sequences(attention, tree, sequences, num_queries)
    if sequences is not None:
        raise ValueError("plan: page tables say which tokens are queries; pass sequences with a tree of tokens alone")
    node = np.flatnonzero(tree.computed < tree.length).astype(np.int32)
    numbers = tree.sequence_id.astype(np.int32) if np.array_equal(tree.sequence_node, node) else None
    batch = StepTree(tree, Queries(node, tree.computed[node], tree.length[node], numbers))
    batch.check()
    ends = np.cumsum(batch.queries.end - batch.queries.begin) - 1
    step = _build(attention, batch, np.zeros(batch.queries.num_rows, np.int64), ends)
    return TreeStep(attention, step, masked=_masked(attention, step))


def _check_pages(pool: KVPool | GivenPages, tree: PrefixTree | TreeSnapshot) -> None:
    """Raise ValueError unless the tree's pages are the pool's."""
    if isinstance(tree, PrefixTree):
        pages = tree.allocator.num_pages
    elif isinstance(tree, TreeSnapshot):
        pages = int(tree.pages.max(initial=-1)) + 1
    else:
        raise TypeError(f"plan: tree must be a PrefixTree or come from tree_from_cascade, got {type(tree).__name__}")
    if tree.page_size != pool.page_size or pages > pool.num_pages:
        raise ValueError(
            f"plan: the tree has {pages} pages of {tree.page_size} tokens, but the pool has {pool.num_pages} of "
            f"{pool.page_size}; make the tree for this pool, or a larger pool"
        )


def _plan_sequences(
    attention: TreeAttention, tree: PrefixTree, sequences: Sequence[TreeSequence], num_queries: int | Sequence[int]
) -> TreeStep:
    for sequence in sequences:
        if not isinstance(sequence, TreeSequence):
            raise TypeError(
                f"plan: sequences must be what insert and fork returned, got {type(sequence).__name__} {sequence!r}"
            )
        if sequence.tree is not tree:
            check_live(tree, sequence)
    length = np.array([sequence.length for sequence in sequences], np.int64)
    count = np.asarray(num_queries)
    if count.dtype.kind not in "iu" or count.shape not in ((), length.shape) or np.any((count < 1) | (count > length)):
        raise ValueError(
            "plan: num_queries must be one number or one for each sequence, of at least 1 and at most the sequence's "
            f"tokens; got {num_queries!r} for sequences of {length.tolist()} tokens"
        )
    _check_held(sequences, length - count)
    snapshot, nodes = tree.snapshot(), tree.nodes()
    ends = np.array([sequence.node.index for sequence in sequences], np.int64)
    if ends.min() < 0:
        raise ValueError("plan: a sequence is excluded from the tree's snapshots; fork it to run it")
    batch = StepTree(snapshot, path_queries(snapshot, ends, length - count))
    batch.check()
    _check_seen(batch, attention.variant)
    if attention.variant.reads("b"):
        batch = replace(batch, queries=_numbered(batch, ends, attention.variant))
    step = _build(attention, batch, tokens_of(batch.queries, nodes), batch.last_rows()[ends])
    running = [nodes[node] for node in batch.queries.node.tolist()]
    return TreeStep(attention, step, tree, running, _masked(attention, step))


def _check_held(sequences: Sequence[TreeSequence], begin: NDArray[np.int64]) -> None:
    """Raise ValueError unless sequences hold their tokens from positions ``begin`` on."""
    for sequence, first in zip(sequences, begin.tolist(), strict=True):
        node = sequence.node
        while first < node.start:
            if node.behind_gap:
                raise ValueError(
                    f"plan: num_queries asks for tokens of sequence {sequence.id} from position {first} on, but those "
                    f"before {node.start} were given back (release_unseen); ask for at most "
                    f"{sequence.length - node.start}"
                )
            assert node.parent is not None, "the root starts at 0"
            node = node.parent


def _check_seen(batch: StepTree, variant: Variant) -> None:
    """Raise ValueError unless queries below a gap of dropped tokens see none of these tokens."""
    snapshot, queries = batch.snapshot, batch.queries
    ends = np.append(snapshot.start + snapshot.length, 0)[snapshot.parent]  # where each node's parent ends
    gaps = np.flatnonzero(snapshot.start != ends)  # before these nodes
    begin, end = (np.searchsorted(queries.node, bounds) for bounds in (gaps, snapshot.subtree_end[gaps]))
    gaps, begin, end = (of[begin < end] for of in (gaps, begin, end))
    if not len(gaps):
        return
    first = lowest_positions(snapshot.start[queries.node] + queries.begin, begin, end)
    for visible in (part.visible for part in variant.parts):
        seen = visible.begin(first if visible.last is None else np.minimum(first, visible.last))
        until = snapshot.start[gaps] if visible.until is None else np.minimum(snapshot.start[gaps], visible.until)
        for one in np.flatnonzero(np.maximum(seen, ends[gaps]) < until)[:1].tolist():
            raise ValueError(
                f"plan: a query at position {first[one]} sees tokens from position {seen[one]} on, but those from "
                f"{ends[gaps[one]]} to {snapshot.start[gaps[one]] - 1} were given back (release_unseen); run later "
                "tokens, or insert the sequence anew"
            )


def _masked(attention: TreeAttention, step: Step) -> list[Tensor] | None:
    """The step's plan with the classes of its blocks, which all layers share.

    None for decode steps in which ranges of positions show what is hidden (see ``models/variants/masked_plans.py``).
    """
    decodes, variant = step.num_rows == len(step.logit_rows), attention.variant
    if not variant.mask_mods or (variant.hides_by_position and decodes):
        return None
    k_pages, v_pages = attention.pool.pages(0)
    _, page_size, kv_heads, head_dim = k_pages.shape
    shape = [attention.num_qo_heads, kv_heads, head_dim, v_pages.shape[3]]
    return plan_under_mask(step.plan, step.positions, shape, page_size, attention.keys[0])


def _numbered(batch: StepTree, ends: NDArray[np.int64], variant: Variant) -> Queries:
    """The queries, with the number of each run's sequence: its index among the sequences that were passed."""
    order, node = np.argsort(ends, kind="stable"), batch.queries.node
    first, last = np.searchsorted(ends[order], (node, batch.snapshot.subtree_end[node]))
    if not np.any(last - first > 1):
        return replace(batch.queries, sequence=order[first].astype(np.int32))
    run = int(np.argmax(last - first > 1))
    raise UnnumberedSequences(
        f"plan: variant {variant.name!r} reads b, the number of a query's sequence, but sequences "
        f"{order[first[run]]} and {order[first[run] + 1]} share tokens that run in this step; run such tokens "
        "under a variant that does not read b, or let sequences part before they run"
    )


def _build(
    attention: TreeAttention, batch: StepTree, tokens: NDArray[np.integer], last_rows: NDArray[np.int64]
) -> Step:
    counts = (1,) * len(attention.planners)
    return build_step(batch, tokens, last_rows, attention.planners, attention.pool.spec.device, counts)
