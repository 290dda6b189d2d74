"""The KV of a padded batch as a prefix tree: what ``model.generate()`` takes as ``past_key_values``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import Cache

from prefixkit.attention.queries import decode_tree
from prefixkit.attention.uncomputed import choose_queries
from prefixkit.models.attention import forward_below, takes_trees
from prefixkit.models.errors import NotPatched
from prefixkit.models.families import pretrained_model
from prefixkit.models.tree_memory import TreeMemory, idle_of
from prefixkit.runners.batch import Batch, Runner
from prefixkit.tree.pages import OutOfPages, check_page_size
from prefixkit.tree.rows import Rows, pages_of_rows

Ints = NDArray[np.int32]
_NO_ROWS = np.empty(0, np.int64)


class TreeCache(Cache):
    """Keeps the KV of a batch as a prefix tree: what its rows share is computed, stored and read once.

    ``model.generate(..., past_key_values=prefixkit.TreeCache(model))`` runs on the tree, and so does a call of the
    model; :func:`prefixkit.patch` says when ``generate`` makes one by itself.  Rows are left-padded, as for any batch
    that ``generate`` takes; tokens that rows share are found one by one.  Beams move by pointers: no KV is copied when
    they are reordered, and none is when rows are repeated.  It can be cropped, continued and returned like another
    cache.  There is no backward.

    The pool is made by the first call: for ``generate``, of the length that it may reach; else it grows as tokens come,
    each time by a copy.  It goes with the cache.

    Args:
        model: A model that :func:`prefixkit.patch` has patched, whose KV this is.
        page_size: Tokens per KV page, 1 to 128.

    Raises:
        NotPatched: the model is not patched.
        UnsupportedModel: there is no transformers model in ``model``.
        ValueError: ``page_size`` is out of range.
    """

    def __init__(self, model: Any, *, page_size: int = 16) -> None:
        super().__init__(layers=[])
        check_page_size(page_size)
        self.model, self.page_size = pretrained_model(model), page_size
        if not takes_trees(self.model):
            raise NotPatched(
                f"TreeCache: {type(self.model).__name__} is not patched; call prefixkit.patch(model) first"
            )
        self.fork = False  # whether rows part as beams do
        self.final_length = 0  # that rows will reach, as far as is known
        self._memory: TreeMemory | None = None
        self._rows: Rows | None = None
        self._order: tuple[Tensor, Tensor] | None = None  # the runner's rows and ours, while it repeats decode steps
        self._ahead: list[Tensor] = []  # tokens of the steps that the tree has not taken yet

    # -- what generate() asks ------------------------------------------------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of each row, padding included."""
        return 0 if self._rows is None else self._rows.length + len(self._ahead)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1, as transformers writes "no maximum"."""
        return -1

    @property
    def padding(self) -> NDArray[np.int64]:
        """``[rows]`` padding before each row."""
        return _NO_ROWS if self._rows is None else self._rows.pad

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV is held: those that rows share once."""
        return 0 if self._memory is None else int(self._settled().tree.snapshot().length.sum())

    @property
    def runner(self) -> Runner | None:
        """What runs its steps, and counts them; None before the first."""
        return None if self._memory is None else self._memory.runner

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row ``i`` becomes what row ``beam_idx[i]`` was; nothing is copied."""
        order = [int(row) for row in beam_idx.tolist()]
        if self._rows is not None and order != list(range(len(self._rows))):
            self._settled().select(order)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order."""
        self.reorder_cache(torch.arange(len(self.padding))[indices.cpu()])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row; nothing is copied."""
        self.reorder_cache(torch.arange(len(self.padding)).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Remove so many tokens of each row, written as a negative number.

        Raises:
            ValueError: a positive number, or more than there are.
        """
        length = self.get_seq_length() + int(tokens_to_remove)  # transformers gives a tensor in places
        if tokens_to_remove > 0 or length < 0:
            raise ValueError(
                f"TreeCache.crop: got {tokens_to_remove} for {self.get_seq_length()} tokens; use a negative number, of "
                "the tokens that are to be removed"
            )
        if tokens_to_remove:
            self._settled().trim(length)

    def reset(self) -> None:
        """Forget all tokens and give the pool back."""
        memory, self._memory = self._memory, None
        self._rows = self._order = None
        self._ahead = []
        if memory is not None:
            idle_of(self.model).give(memory)

    def __deepcopy__(self, memo: dict[int, Any]) -> TreeCache:
        """A cache with KV of its own, of the same model: what a prompt's cache is used for again and again by."""
        other = TreeCache(self.model, page_size=self.page_size)
        other.fork, other.final_length = self.fork, self.final_length
        if self._rows is not None and self._memory is not None:
            rows = self._settled()
            other.start(rows.tokens(), rows.pad)
            assert other._rows is not None and other._memory is not None, "started"
            there = np.arange(rows.length) >= rows.pad[:, None]
            target, first = np.unique(other._rows.slots()[there], return_index=True)
            other._memory.pool.copy(rows.slots()[there][first], target, self._memory.pool)
            nodes = other._memory.tree.nodes()
            other._memory.tree.mark_computed(nodes, [node.length for node in nodes])
        return other

    def __del__(self) -> None:
        if "_memory" in self.__dict__:
            self.reset()

    def activate_past_recording(self) -> None:
        """Nothing: all that was computed can be cropped."""

    # -- steps ---------------------------------------------------------------------------------------------------------

    def start(self, tokens: Ints, pad: NDArray[np.int64]) -> None:
        """Take the rows of a batch; nothing is computed yet.

        Args:
            tokens: ``[rows, length]`` token ids.
            pad: ``[rows]`` how many of them, from the left, are padding.

        Raises:
            DoesNotFit: their KV does not fit the memory that is free; nothing has changed.
        """
        new = max(self.final_length - tokens.shape[1], 0)
        pages = pages_of_rows(tokens, pad, new, self.page_size, fork=self.fork)
        call = forward_below(self.model)
        memory = idle_of(self.model).take(self.model, call, pages, self.page_size)
        self._rows = Rows(memory.tree, tokens, pad, fork=self.fork)
        self._memory = memory

    def extend(self, tokens: Tensor) -> None:
        """Append ``[rows, count]`` tokens to the rows; nothing is computed yet."""
        rows, own = self._settled(), tokens.cpu().numpy().astype(np.int32)
        while True:
            try:
                return rows.extend(own)
            except OutOfPages as error:
                assert self._memory is not None, "started before"
                self._memory.grow(error.asked - error.free + self._memory.pool.num_pages // 4)

    def decode(self, tokens: Tensor) -> Tensor:
        """Append ``[rows]`` tokens to the rows, and compute them.

        Returns:
            ``[rows, vocab]`` the logits after them.
        """
        if self._order is None:
            self.extend(tokens[:, None])
            if (logits := self._launch_decode()) is None:
                return self.compute(1)[:, 0]
            return logits
        assert self._memory is not None, "started before"
        order, place = self._order
        self._memory.runner.repeat(tokens.index_select(0, order))
        self._ahead.append(tokens)
        if self.get_seq_length() >= self.final_length:
            self._order = None
        return self._memory.runner.logits.index_select(0, place)

    def _launch_decode(self) -> Tensor | None:
        """Compute the last token of each row, in a leaf of its own; None where it is not in one."""
        rows, memory = self._settled(), self._memory
        assert memory is not None, "started before"
        tree, nodes = memory.tree, [sequence.node for sequence in rows.sequences]
        left = self.final_length - rows.length
        goes_on = left > 0 and not self.fork and all(node.grows_in_place for node in nodes)
        if goes_on:
            try:
                tree.reserve(rows.sequences, [left] * len(nodes))
            except OutOfPages:
                goes_on = False
        snapshot = tree.snapshot()
        leaves = np.array([node.index for node in nodes], np.int32)
        uncomputed = snapshot.length - snapshot.computed
        if uncomputed.sum() != len(leaves) or (uncomputed[leaves] != 1).any():
            return None
        order = np.argsort(leaves, kind="stable")
        last = np.array([node.last_token for node in nodes], np.int32)[order]
        step, every = decode_tree(snapshot, leaves[order]), np.arange(len(leaves))
        memory.runner.launch(Batch(step, last, every, _NO_ROWS, None, steps=1 + left))
        tree.mark_computed(nodes, [node.length for node in nodes])
        logits = memory.runner.logits
        there, place = (torch.from_numpy(of).to(logits.device) for of in (order, np.argsort(order)))
        if goes_on:
            self._order = there, place
        return logits.index_select(0, place)

    def compute(self, count: int) -> Tensor:
        """Compute what is uncomputed.

        Returns:
            ``[rows, count, vocab]`` the logits after the last ``count`` tokens of each row; zeros after padding.
        """
        rows, memory = self._settled(), self._memory
        assert memory is not None, "started before"
        tree, parts, computed = memory.tree, list[Tensor](), 0
        row, from_end, nodes, offsets = zip(*rows.places(count), strict=True)
        offset, source = np.array(offsets), np.full(len(row), -1)
        while (step := choose_queries(tree.snapshot(), [], [], memory.chunk)) is not None:
            queries, first = step.queries, step.first_row
            begin = np.zeros(step.snapshot.num_nodes, np.int64)
            begin[queries.node] = queries.begin
            index = np.array([node.index for node in nodes])
            here = np.flatnonzero((begin[index] <= offset) & (offset < begin[index] + step.own[index]))
            wanted, place = np.unique(first[index[here]] + offset[here] - begin[index[here]], return_inverse=True)
            source[here], computed = computed + place, computed + len(wanted)
            running = [tree.nodes()[node] for node in queries.node.tolist()]
            slices = zip(running, queries.begin.tolist(), queries.end.tolist(), strict=True)
            tokens = np.concatenate([node.tokens[at:until] for node, at, until in slices])
            memory.runner.launch(Batch(step, tokens, wanted, _NO_ROWS, None))
            tree.mark_computed(running, queries.end)
            parts.append(memory.runner.logits.clone())
        logits = torch.cat(parts)
        out = logits.new_zeros(len(rows), count, logits.shape[1])
        at = count - 1 - np.array(from_end)
        there = [torch.from_numpy(of).to(logits.device) for of in (np.array(row), at, source)]
        out[there[0], there[1]] = logits[there[2]]
        return out

    def move_to(self, cache: Cache) -> None:
        """Put the KV of all rows into an empty cache of transformers, padding included, and forget it."""
        if self._rows is not None and self._memory is not None:
            slots = self._settled().slots()
            for layer in range(len(self)):
                cache.update(*self._gathered(layer, slots), layer)
        self.reset()

    def kv(self, layer: int) -> tuple[Tensor, Tensor]:
        """``[rows, kv_heads, length, head_dim]`` copies of a layer's keys and values, anything in place of padding."""
        return self._gathered(layer, self._settled().slots())

    def _gathered(self, layer: int, slots: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        assert self._memory is not None, "started before"
        pool = self._memory.pool
        pages, offsets = (torch.from_numpy(of).to(pool.spec.device) for of in np.divmod(slots, self.page_size))
        k, v = (of[pages, offsets].transpose(1, 2).contiguous() for of in (pool.k(layer), pool.v(layer)))
        return k, v

    def _settled(self) -> Rows:
        """The rows, once the tree holds all tokens that were computed."""
        rows, self._order = self._rows, None
        assert rows is not None, "started before"
        if self._ahead:
            tokens = torch.stack(self._ahead, 1).cpu().numpy().astype(np.int32)
            self._ahead = []
            rows.extend(tokens)
            nodes = [sequence.node for sequence in rows.sequences]
            rows.tree.mark_computed(nodes, [node.length for node in nodes])
        return rows

    # -- what a cache says of itself -----------------------------------------------------------------------------------

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> NoReturn:
        """Only a model that is not patched gets here, or another than the cache is for.

        Raises:
            NotPatched: always.
        """
        raise NotPatched(
            f"layer {layer_idx} was given a TreeCache of {type(self.model).__name__}, but the model that it belongs to "
            "does not take one: call prefixkit.patch(model), and pass the cache to the model itself"
        )

    def __len__(self) -> int:
        return 0 if self._memory is None else self._memory.spec.num_layers

    @property
    def layers(self) -> list[Any]:
        """Each layer's KV as other caches keep it, to look at."""
        return [LayerView(self, layer) for layer in range(len(self))]

    @layers.setter
    def layers(self, none: list[Any]) -> None:
        """What the base class would keep."""

    def __repr__(self) -> str:
        return f"TreeCache({len(self.padding)} rows of {self.get_seq_length()} tokens)"

    is_initialized = is_croppable = True
    is_compileable = False

    @property
    def batch_size(self) -> int:
        return len(self.padding) if self._rows is not None else -1

    @property
    def is_sliding(self) -> list[bool]:
        """Windows are the attention variants' business; every layer keeps all its KV."""
        return [False] * len(self)

    is_linear = is_dummy = is_sliding


@dataclass(frozen=True)
class LayerView:
    """A layer of a tree cache as other caches show theirs: copies, made when they are asked for.

    Attributes:
        cache: The tree cache.
        index: The layer.
    """

    cache: TreeCache
    index: int

    @property
    def keys(self) -> Tensor:
        """``[rows, kv_heads, length, head_dim]``; what is before a row's first token is not defined."""
        return self.cache.kv(self.index)[0]

    @property
    def values(self) -> Tensor:
        """The same of the values."""
        return self.cache.kv(self.index)[1]
