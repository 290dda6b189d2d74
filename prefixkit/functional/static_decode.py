"""Decode steps in static buffers, which a CUDA graph can capture and replay."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from prefixkit.attention.gpu.staging import upload
from prefixkit.attention.queries import StepTree, UnnumberedSequences, decode_tree
from prefixkit.functional.attend import TreeAttention, TreeStep
from prefixkit.functional.owners import claim
from prefixkit.ops.backend import BackendError, GraphPlanning, graph_plannings
from prefixkit.runners.decode_tree import BatchTooLarge
from prefixkit.runners.graph_arrays import GraphArrays
from prefixkit.tree.radix import PrefixTree
from prefixkit.tree.sequence import Sequence as TreeSequence
from prefixkit.tree.sequence import check_live


class StaticDecode:
    """Decode steps of one batch in static buffers: a CUDA graph that has captured one step replays all later ones.

    The tree grows on the device: each :meth:`advance` starts a step in which every sequence is a token longer.
    Afterwards the host appends the tokens to its tree, by ``extend_leaves``.  :func:`static_decode` makes this object
    from the ``attention``, a way to plan for each part of it (``plannings``), the ``tree``, the ``sequences`` of the
    first batch, the number of ``steps`` for which pages are reserved, and the most ``rows`` that the buffers hold.

    Attributes:
        step: The step, for ``append`` and ``attend``; its tensors stay the same.  Rows after those of the batch write
            nothing, and their outputs are 0.  ``step.last_rows`` has all rows: first those of the sequences in order,
            then the others.
        next_tokens: ``[rows]`` int64, which the caller's sampler writes: the token that each row of the next step runs.
    """

    def __init__(
        self,
        attention: TreeAttention,
        plannings: Sequence[GraphPlanning],
        tree: PrefixTree,
        sequences: Sequence[TreeSequence],
        steps: int,
        rows: int,
    ) -> None:
        batch, ends = _batch(attention, tree, sequences, steps)
        device = attention.pool.spec.device
        self._attention, self._rows = attention, rows
        # Enough for any tree in the pool: each node shares pages at most with the node before it and the node after it.
        pages = attention.pool.num_pages + 2 * batch.snapshot.num_nodes
        pages *= 1 + batch.is_deep  # a deep tree lists each page a second time, for its runs
        self._arrays = GraphArrays(batch, rows, plannings, tree.page_size, device, pages=pages)
        self._counts = (1,) * len(plannings)
        self.next_tokens: Tensor = self._arrays.tree.sampled
        self._last_rows = torch.arange(rows, device=device)
        self.step = self._upload(batch, ends, sequences)

    def __repr__(self) -> str:
        return f"StaticDecode({self._rows} rows, {self._attention})"

    def upload(self, tree: PrefixTree, sequences: Sequence[TreeSequence], steps: int) -> None:
        """Upload a batch: the present tree, and the last token of each sequence as the token that the next step runs.

        This is one upload and one launch on the current stream, without a wait.  Captured graphs stay valid.  Upload
        again when sequences were added or dropped, and after some hundred steps, because KV splits become uneven as
        leaves grow.

        Args:
            tree: The tree.
            sequences: Each ends at a leaf of its own, in which all tokens but the last have KV.
            steps: The number of steps for which pages are reserved; later steps write no KV.

        Raises:
            ValueError: a sequence does not end at such a leaf, or another tree's KV is in the pool.
            OutOfPages: there are too few pages.
            BatchTooLarge: the batch does not fit the buffers; make another StaticDecode, and capture again.  Pages are
                reserved by then.
        """
        if len(sequences) > self._rows:
            raise BatchTooLarge(
                f"StaticDecode: the buffers are for {self._rows} rows, got {len(sequences)} sequences; make another "
                "one, and capture again"
            )
        batch, ends = _batch(self._attention, tree, sequences, steps)
        if not self._arrays.holds(batch):
            raise BatchTooLarge(
                f"StaticDecode: a tree of {batch.snapshot.num_nodes} nodes and {len(batch.snapshot.pages)} pages does "
                "not fit the buffers; make another one, and capture again"
            )
        self.step = self._upload(batch, ends, sequences)

    def advance(self) -> None:
        """Start the next step, on the current stream; a CUDA graph of a step captures this call first."""
        self._arrays.advance(self._rows)

    def _upload(self, batch: StepTree, ends: list[int], sequences: Sequence[TreeSequence]) -> TreeStep:
        row_of, count = batch.last_rows()[ends], len(sequences)
        last = np.concatenate((row_of, np.arange(count, self._rows)))
        tokens = np.zeros(self._rows, np.int64)
        tokens[row_of] = [sequence.node.last_token for sequence in sequences]
        self._arrays.upload_tree(batch)
        uploaded = upload([tokens, last], self._last_rows.device)
        self.next_tokens.copy_(uploaded[0])
        self._last_rows.copy_(uploaded[1])
        step = self._arrays.tree.step(batch, self._last_rows, self._arrays.plans(batch), self._counts)
        return TreeStep(self._attention, step)


def static_decode(
    attention: TreeAttention,
    tree: PrefixTree,
    sequences: Sequence[TreeSequence],
    steps: int,
    rows: int | None = None,
) -> StaticDecode:
    """Make static buffers for the decode steps of a batch, and of later batches, and upload the batch.

    Args:
        attention: Heads, variant and pool.
        tree, sequences, steps: As :meth:`StaticDecode.upload` takes them.
        rows: The most sequences of a batch; None: the number of these sequences.

    Raises:
        ValueError, OutOfPages: as :meth:`StaticDecode.upload`; fewer rows than sequences.
        UnnumberedSequences: the variant reads b.
        BackendError: our kernels do not run this attention: on a CPU, in float32, for head sizes without a kernel, or
            with functions that are not traced.
    """
    rows = len(sequences) if rows is None else rows
    if rows < len(sequences):
        raise ValueError(f"static_decode: rows must be at least the {len(sequences)} sequences, got {rows}")
    if attention.variant.reads("b"):
        raise UnnumberedSequences(
            f"static_decode: variant {attention.variant.name!r} reads b, the number of a query's sequence, which "
            "static buffers do not hold; plan each step"
        )
    device = attention.pool.spec.device
    traced = attention.variant.traced
    plannings = graph_plannings(device, attention.planners) if traced else None
    if plannings is None:
        what = str(attention.pool.spec) if traced else f"variant {attention.variant.name!r} is not traced"
        raise BackendError(
            f"static_decode: no kernel whose plans a CUDA graph can hold runs this attention ({what}); "
            "plan each step, or take bfloat16 or float16 on a GPU, and a variant that is traced"
        )
    return StaticDecode(attention, plannings, tree, sequences, steps, rows)


def _batch(
    attention: TreeAttention, tree: PrefixTree, sequences: Sequence[TreeSequence], steps: int
) -> tuple[StepTree, list[int]]:
    """The decode step of the sequences, with pages reserved, and the node where each sequence ends."""
    if not sequences or steps < 1:
        raise ValueError(f"StaticDecode: at least one sequence and one step, got {len(sequences)} and {steps}")
    for sequence in sequences:
        check_live(tree, sequence)
        node = sequence.node
        if not node.grows_in_place or node.computed != node.length - 1:
            raise ValueError(
                f"StaticDecode: {sequence} must end at a leaf of its own of which all but the last token have KV; run "
                "its prompt and extend it by its first token, by plan(), commit() and extend_each(), while another "
                "sequence is held at the prompt"
            )

    def batch() -> StepTree:
        snapshot = tree.snapshot()
        return decode_tree(snapshot, np.array(sorted(sequence.node.index for sequence in sequences), np.int32))

    batch().check()
    claim("StaticDecode", attention.pool, tree)
    tree.reserve(sequences, [steps] * len(sequences))
    return batch(), [sequence.node.index for sequence in sequences]
