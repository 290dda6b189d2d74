"""What runs next: sampling of first tokens from known logits, or a step over uncomputed tokens."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.attention.queries import decode_tree
from prefixkit.attention.uncomputed import choose_queries, tokens_of
from prefixkit.engine.request_state import RequestState
from prefixkit.engine.runs.grammar_masks import GrammarMasks
from prefixkit.engine.runs.run_protocol import RowSampling, Run
from prefixkit.runners.batch import Batch, Outputs, Sampling
from prefixkit.sampling.specification import SamplingBatch
from prefixkit.tree.arrays import Ints
from prefixkit.tree.node import Node
from prefixkit.tree.radix import PrefixTree
from prefixkit.tree.radix import Sequence as TreeSequence
from prefixkit.tree.snapshot import TreeSnapshot

# A sequence whose next token is sampled, and its run.
Row = tuple[TreeSequence, Run]


@dataclass(frozen=True, eq=False)
class Scheduled:
    """What runs next.

    Attributes:
        rows: The sequences whose next tokens are sampled, in the order of the results.
        sampling: How these tokens are sampled.
        batch: The step that runs; None where the logits are known.
        logits: ``[rows, vocab]`` the known logits; None where a step runs.
        nodes: The nodes whose tokens run.
        prompts: The requests whose logits the step returns, in the order of ``batch.outputs.logits``.
        pipelined: Whether further steps may be launched before the tokens of the earlier ones are read.
        most_steps: The number of such steps that there are pages for.
    """

    rows: list[Row]
    sampling: Sampling
    batch: Batch | None = None
    logits: Tensor | None = None
    nodes: Sequence[Node] = ()
    prompts: Sequence[RequestState] = ()
    pipelined: bool = False
    most_steps: int = sys.maxsize


def first_tokens(rows: list[Row]) -> Scheduled | None:
    """Sample the first tokens of samples and beam searches whose prompts are computed; None if ``rows`` is empty."""
    if not rows:
        return None
    # Runs of one request are adjacent: a tensor for each of a thousand runs would take milliseconds to concatenate.
    of_each = [(state.first_logits, len([*own])) for state, own in groupby(run.state for _, run in rows)]
    logits = torch.cat([each.expand(count, -1) for each, count in of_each if each is not None])
    return Scheduled(rows, _sampling(rows), logits=logits)


def next_step(
    tree: PrefixTree,
    rows: list[Row],
    prompts: list[RequestState],
    prefill_chunk: int,
    computing: bool = False,
    most_steps: int = sys.maxsize,
) -> Scheduled | None:
    """The step over the uncomputed tokens; None if there are none.

    Args:
        tree: Holds the sequences.
        rows: All growing sequences.
        prompts: Requests whose prompts' logits are wanted.
        prefill_chunk: Most prompt tokens of the step.
        computing: Whether prompts, or sequences that were preempted, have uncomputed tokens too.
        most_steps: Most steps before the tokens must be appended to the tree.
    """
    own = [sequence.node for sequence, _ in rows]
    left = np.array([run.tokens_left for _, run in rows], np.int64)
    pipelined = not computing and not prompts and all(node.grows_in_place for node in own)
    pipelined = pipelined and all(run.unpipelined is None for _, run in rows)
    if pipelined:
        horizon = min(_horizon(tree, own, left), most_steps)
        tree.reserve([sequence for sequence, _ in rows], np.minimum(left, horizon).tolist())
        most_steps = horizon if len(left) and horizon < left.max() else sys.maxsize
    snapshot, nodes = tree.snapshot(), tree.nodes()
    leaves = np.array([node.index for node in own], dtype=np.int32)
    order = np.argsort(leaves, kind="stable")
    rows, leaves, own = [rows[i] for i in order.tolist()], leaves[order], [own[i] for i in order.tolist()]
    sampling = _sampling(rows)
    to_start = max((state.request.params.max_new_tokens for state in prompts), default=0)
    steps = min(most_steps, max(to_start, 1 + int(left.max(initial=-1))))
    if not (prompts or computing) and _decodes(snapshot, leaves) and (tree.states is None or all(map(_has_state, own))):
        tokens = np.array([node.last_token for node in own], np.int32)
        batch = Batch(decode_tree(snapshot, leaves), tokens, Outputs(np.arange(len(rows)), sampling), steps)
        return Scheduled(rows, sampling, batch, nodes=own, pipelined=pipelined, most_steps=most_steps)
    asking = np.array([state.sequence.node.index for state in prompts], dtype=np.int64)
    states, texts = None if tree.states is None else nodes, None if tree.spelling is None else (tree.spelling, nodes)
    step = choose_queries(snapshot, leaves, asking, prefill_chunk, states=states, texts=texts)
    if step is None:
        return None
    queries, row_of = step.queries, step.last_rows()
    running = [nodes[node] for node in queries.node.tolist()]
    computed = np.flatnonzero(row_of[asking] >= 0)
    outputs = Outputs(row_of[leaves], sampling, logits=row_of[asking[computed]])
    batch = Batch(step, tokens_of(queries, nodes, tree.spelling), outputs, steps)
    asked = [prompts[i] for i in computed.tolist()]
    return Scheduled(rows, sampling, batch, nodes=running, prompts=asked, pipelined=pipelined, most_steps=most_steps)


def _horizon(tree: PrefixTree, leaves: list[Node], left: NDArray[np.int64]) -> int:
    """How many tokens each leaf, up to its number in ``left``, can append before free and reserved pages run out."""
    most = int(left.max(initial=0))
    if int((left // tree.page_size + 1).sum()) <= tree.allocator.free:  # an upper bound of the pages needed
        return most
    free_slots = np.array([leaf.free_slots for leaf in leaves], np.int64)
    pages = tree.allocator.free + sum(leaf.reserved for leaf in leaves)

    def fits(tokens: int) -> bool:
        more = np.maximum(np.minimum(left, tokens) - free_slots, 0)
        return int((-(-more // tree.page_size)).sum()) <= pages

    if fits(most):
        return most
    least = 0
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if fits(middle) else (least, middle)
    return least


def _decodes(snapshot: TreeSnapshot, leaves: Ints) -> bool:
    """Whether the uncomputed tokens are exactly the last token of each of these nodes (ascending)."""
    uncomputed = snapshot.length - snapshot.computed
    return bool(len(leaves)) and len(leaves) == uncomputed.sum() == (uncomputed[leaves] == 1).sum()


def _has_state(leaf: Node) -> bool:
    """Whether there is a state before the last token of a leaf."""
    return leaf.state_at(leaf.length - 1) >= 0


def _sampling(rows: list[Row]) -> Sampling:
    if not rows:
        return Sampling(SamplingBatch((), np.empty(0, np.uint64), np.empty(0, np.int64), ()))
    known: dict[Run, RowSampling] = {}  # all rows of a beam search have one
    each = [known.get(run) or known.setdefault(run, run.row_sampling()) for _, run in rows]
    params, keys, steps, histories, tops, processes, places = zip(*each, strict=True)
    batch = SamplingBatch(params, np.array(keys, np.uint64), np.array(steps, np.int64), histories)
    processed = [(i, process) for i, process in enumerate(processes) if process is not None]

    def process(logits: Tensor) -> Tensor:
        for i, processor in processed:
            logits[i] = processor(logits[i])
        return logits

    masks = GrammarMasks(places) if any(place is not None for place in places) else None
    return Sampling(batch, max(tops), process if processed else None, any(each.drawn for each in params), masks)
