"""Rows of a padded batch over a KV store that they borrow: which tokens run, and the resulting logits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from prefixkit.attention.queries import decode_tree
from prefixkit.attention.uncomputed import prefill_chunk_for
from prefixkit.kv.budget import KVBudgetTooSmall
from prefixkit.kv.limits import DoesNotFit
from prefixkit.kv.store import KVStore
from prefixkit.models.attention_class import accepts_trees, forward_below, is_tree_class
from prefixkit.models.facts import ModelFacts, facts_of
from prefixkit.models.families import known_positions
from prefixkit.models.generate.loops import Loops
from prefixkit.models.generate.row_texts import check_cut, check_followed
from prefixkit.models.generate.unplaced import example_of, ignores_padding, keeps_padding_out
from prefixkit.models.indexing.index_copies import index_dtypes
from prefixkit.models.model_stores import kind_of, stores_of
from prefixkit.models.probe.passes import ignores_zeros
from prefixkit.models.steps.step_runner import runner_of, state_for_runner
from prefixkit.models.variants.layer_variants import LAYER_VARIANT, refuse_changed, variants_text
from prefixkit.models.weights.content import kv_version
from prefixkit.runners.batch import Batch, Outputs, Runner, launch_step
from prefixkit.runners.wanted_tokens import compute_wanted
from prefixkit.tree.arrays import Ints, Longs
from prefixkit.tree.pages import OutOfPages, pages_for
from prefixkit.tree.rows import Rows, pages_of_rows

log = logging.getLogger("prefixkit")
_SPARE = 8  # slots for states at the ends of shared prefixes
_RUNNER, _ZEROS, _PADDING = "runner of rows", "ignores zeros", "ignores padding"


class RowSteps:
    """Rows whose KV is in the tree of a KV store that they borrow, and the steps that compute it.

    While rows only grow, a decode step repeats the last step: the tokens of such steps are inserted into the tree
    later, when the tree is next read (:meth:`flushed`).

    Args:
        facts, page_size: The facts of a patched model; tokens per KV page.
        borrower: The cache that owns the rows; its ``vacate`` moves them if a session asks for the store.
        tokens, pad, fork, text: See :class:`Rows`.
        new: Tokens that each row is expected to grow by.

    Attributes:
        rows: The rows, over the tree of ``store``, without the tokens of repeated steps.
        scales_from, counts_from_zero: See :attr:`ModelFacts.scales_from` and :attr:`ModelFacts.counts_from_zero`.
        index_dtypes: See :func:`index_dtypes`.
        compresses: Whether layers attend to compressed tokens, which may include padding.
        keeps_more: Whether caches of transformers hold more than KV and index keys (states, positions or entries),
            or layers that only the model makes, as a looped model does.
        dtype, loops: The dtype of the model's weights, to which logits are converted; how often its modules run.

    Raises:
        DoesNotFit: the rows need more than their share of the free memory; nothing has changed.
    """

    def __init__(
        self,
        facts: ModelFacts,
        borrower: object,
        tokens: Ints,
        pad: Longs,
        new: int,
        page_size: int,
        *,
        fork: bool,
        text: int | None = None,
    ) -> None:
        self.model, self._stores = facts.inner, stores_of(facts.inner)
        self.scales_from, self.counts_from_zero = facts.scales_from, facts.counts_from_zero
        self.dtype, self.loops = facts.inner.dtype, Loops(facts)
        self._variants = facts.variants
        patched = [module for module in facts.state.modules if is_tree_class(type(module))]
        self._patched = [(module, module.__dict__.get(LAYER_VARIANT)) for module in patched]
        self.index_dtypes = index_dtypes(facts.layers)
        self.compresses = any(kind.compressed for kind in facts.layers)
        probed = facts.probed
        self.keeps_more = (
            self.compresses or probed.asks_positions or bool(facts.spec.states) or bool(probed.computed_by)
        )
        self._example = example_of(tokens, pad)
        self._chunk = prefill_chunk_for(facts.spec.device)  # prompt tokens of a step
        self._order: tuple[Tensor, Tensor] | None = None  # while steps repeat: the runner's order, its inverse
        self._ahead: list[Tensor] = []  # tokens of steps that are not in the tree yet
        self._stores.agreement.check("rows of generate()", lambda: (tokens, pad, new, fork))
        pages = pages_of_rows(tokens, pad, new, page_size, fork=fork, shared=not facts.looks_ahead)
        prompts = [row[of:] for row, of in zip(tokens, pad, strict=True)]
        self.store: KVStore = self._stores.borrow(kind_of(facts, page_size), borrower, pages, prompts)
        try:
            if _RUNNER not in self.store.runners:
                self._attach_runner(facts)
            self.runner.start_call(state_for_runner(facts))
            found = partial(self.store.tree.longest_match, prompts)
            epoch = self._stores.epoch
            self._version: int | None = kv_version(self.model, found, facts.state)
            self.store.use_version((epoch, self._version))
            states = len(prompts) * (3 if fork else 2) + _SPARE
            try:
                self.store.have_slots(states, states)
            except KVBudgetTooSmall as error:  # the error names a budget that callers cannot set
                raise DoesNotFit(str(error)) from error
            # Tokens that see one another are computed in one step of any length: the user has set no limit here.
            if (spelling := self.store.tree.spelling) is not None:
                self._chunk = max(self._chunk, *(spelling.longest(len(prompt)) for prompt in prompts))
            self.rows = self._insert(tokens, pad, prompts[:1], pages, fork, text)
        except BaseException:
            self._stores.return_(self.store, self._retains_store)
            raise

    def _insert(
        self, tokens: Ints, pad: Longs, first: Sequence[Ints], pages: int, fork: bool, text: int | None
    ) -> Rows:
        store, first = self.store, [tokens for tokens in first if len(tokens)]
        store.fits(first, pages - sum(pages_for(len(tokens), store.tree.page_size) for tokens in first))
        try:
            return Rows(store.tree, tokens, pad, fork=fork, text=text)
        except OutOfPages:  # cached KV that was found occupies more pages than it needs
            store.cache.clear()
            return Rows(store.tree, tokens, pad, fork=fork, text=text)

    # -- the store -----------------------------------------------------------------------------------------------------

    @property
    def runner(self) -> Runner:
        """The runner of steps over the store."""
        runner: Runner = self.store.runners[_RUNNER]
        return runner

    def _attach_runner(self, facts: ModelFacts) -> None:
        self.store.runners[_RUNNER] = runner_of(facts, self.store.pool, call=forward_below(self.model))

    def ignores_zeros(self, name: str, whole: bool) -> bool:
        """Whether the model, with its present weights, ignores an argument that is zero for each token."""
        return self._measured((_ZEROS, name, whole), partial(ignores_zeros, self.model, name, whole))

    def ignores_padding(self, until: int) -> bool:
        """Whether rows of ``until`` tokens, padding included, may run without position_ids; see
        :func:`~prefixkit.models.generate.unplaced.ignores_padding`.
        """
        known = known_positions(self.model)
        reach = min(1 << (until - 1).bit_length(), known)

        def measure() -> bool:
            return ignores_padding(self.model, self._example.to(self.store.pool.spec.device), reach)

        return until <= known and self._measured((_PADDING, reach), measure)

    def keeps_padding_out(self) -> bool:
        """Whether masked padding changes no state of the model."""
        if not self.store.pool.spec.states:
            return True
        example = self._example.to(self.store.pool.spec.device)
        return self._measured((_PADDING, "states"), partial(keeps_padding_out, self.model, example))

    def _measured(self, what: tuple[Hashable, ...], measure: Callable[[], bool]) -> bool:
        """The cached result of a measurement of the model with its present weights, or else of a new one."""
        known = self.store.notes.get(what)
        if known is None or known[0] != self.store.version:
            known = self.store.notes[what] = self.store.version, measure()
        return bool(known[1])

    @property
    def is_current(self) -> bool:
        """Whether the model still computes what it computed when these rows started."""
        return kv_version(self.model) == self._version

    def check_variants(self) -> None:
        """Raise UnsupportedVariant if layers apply other variants now than when these rows started."""
        if any(module.__dict__.get(LAYER_VARIANT) is not variant for module, variant in self._patched):
            refuse_changed(variants_text(self._variants), variants_text(facts_of(self.model).variants))

    def mark_stale(self) -> None:
        """Mark the KV stale, some of which was computed with other weights: none is retained for other rows."""
        self._version = self.store.version = None

    @property
    def _retains_store(self) -> bool:
        """Whether to retain the store for later calls: not for an unpatched model, nor in training, for its memory."""
        return accepts_trees(self.model) and not self.model.training and self.store.version is not None

    def end(self) -> None:
        """Return the store, which retains the rows' KV unless it cannot be used again."""
        drop = self.store.retain
        try:
            rows = self.flushed()
        except (RuntimeError, OutOfPages):  # the device failed, or the tree does not match what was computed
            rows, drop = self.rows, self.store.tree.release
        for sequence in rows.detach():
            drop(sequence)
        self._return()

    def abandon(self) -> None:
        """Return the store with a new tree: an interrupt may have left the present tree half changed."""
        self.store.restart()
        self._return()

    def _return(self) -> None:
        current = False
        try:
            current = self.is_current
        except RuntimeError as error:  # a cache may be collected while its model is being freed
            log.info("a KV store is given back, and its KV dropped: the model's weights cannot be read (%s)", error)
        finally:  # also after Ctrl-C, while weights are compared
            if not current:
                self.store.version = None
            self._stores.return_(self.store, self._retains_store)

    # -- the rows ------------------------------------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """Tokens of each row, padding included."""
        return self.rows.length + len(self._ahead)

    @property
    def repeats(self) -> bool:
        """Whether the next decode step repeats the last one."""
        return self._order is not None

    def flushed(self) -> Rows:
        """The rows, after all computed tokens are inserted into the tree; the next decode step repeats none."""
        rows, self._order = self.rows, None
        if self._ahead:
            tokens = torch.stack(self._ahead, 1).cpu().numpy().astype(np.int32)
            self._ahead = []
            nodes = [sequence.node for sequence in rows.sequences]
            states = [node.state for node in nodes]  # already the states after the last of these tokens
            for node in nodes:
                node.state = -1
            rows.extend(tokens)
            rows.tree.mark_computed(nodes, [node.length for node in nodes])
            for node, state in zip(nodes, states, strict=True):
                node.state = state
        return rows

    def extend(self, tokens: Tensor) -> None:
        """Append ``[rows, count]`` tokens; nothing is computed yet.

        Raises:
            DoesNotFit: the pool would have to grow, and there is no memory for that; nothing has changed.
            UnsupportedVariant: several tokens are appended that see later ones, or that earlier tokens see.
        """
        rows, own = self.flushed(), tokens.cpu().numpy().astype(np.int32)
        if own.shape[1] > 1:
            check_followed(rows, own)
        while True:
            try:
                return rows.extend(own)
            except OutOfPages as error:
                if self.store.cache.free_pages(error.asked):
                    continue
                self._stores.grow(self.store, error.asked - error.free + self.store.pool.num_pages // 4)
                self._attach_runner(facts_of(self.model))  # for the larger pool

    def trim(self, length: int) -> None:
        """See :meth:`Rows.trim`; raises as :func:`check_cut`."""
        check_cut(rows := self.flushed(), length)
        rows.trim(length)

    def decode(self, tokens: Tensor, final_length: int, fork: bool) -> Tensor:
        """Append ``[rows]`` tokens on the model's device, compute them, and return ``[rows, vocab]`` logits after them.

        ``final_length``: the length that rows are expected to reach; ``fork``: whether rows fork as beams do.
        """
        if self._order is None:
            self.extend(tokens[:, None])
            logits = self._launch(final_length - self.length, fork)
            return self.compute(1)[:, 0] if logits is None else logits
        order, place = self._order
        self.runner.repeat(tokens.to(order.device).index_select(0, order))
        self._ahead.append(tokens)
        if self.length >= final_length:
            self._order = None  # leaves have no pages for more tokens
        return self.runner.logits.index_select(0, place)

    def _launch(self, left: int, fork: bool) -> Tensor | None:
        """Compute the last token of each row; None if more tokens are uncomputed or rows share leaves.

        If rows only grow, their leaves reserve pages for all ``left`` tokens to come, and later steps repeat this one.
        """
        tree, runner = self.store.tree, self.runner
        nodes = [sequence.node for sequence in self.rows.sequences]
        goes_on = left > 0 and not fork and all(node.grows_in_place for node in nodes)
        if goes_on:
            try:
                tree.reserve(self.rows.sequences, [left] * len(nodes))
            except OutOfPages:
                goes_on = False
        snapshot = tree.snapshot()
        leaves = np.array([node.index for node in nodes], np.int32)
        uncomputed = snapshot.length - snapshot.computed
        if uncomputed.sum() != len(leaves) or (uncomputed[leaves] != 1).any():
            return None
        if tree.states is not None and any(node.state_at(node.length - 1) < 0 for node in nodes):
            return None
        order = np.argsort(leaves, kind="stable")
        last = np.array([node.last_token for node in nodes], np.int32)[order]
        step, every = decode_tree(snapshot, leaves[order]), np.arange(len(leaves))
        launch_step(runner, tree, Batch(step, last, Outputs(every), steps=1 + left), [nodes[i] for i in order.tolist()])
        there, place = (torch.from_numpy(of).to(runner.logits.device) for of in (order, np.argsort(order)))
        if goes_on:
            self._order = there, place
        return runner.logits.index_select(0, place)

    def compute(self, count: int) -> Tensor:
        """Compute all uncomputed tokens, in steps of at most a prefill chunk.

        Returns ``[rows, count, vocab]``, the logits after the last ``count`` tokens of each row; zeros after padding.
        """
        rows = self.flushed()
        row, from_end, nodes, offsets = zip(*rows.last_tokens(count), strict=True)
        self.store.tree.snapshot()  # sets the nodes' indices
        node, offset = np.array([node.index for node in nodes]), np.array(offsets)
        parts, computed = list[Tensor](), 0
        source = np.empty(len(row), np.int64)  # the row of all computed logits for each output

        def outputs(query_rows: Longs, which: Longs) -> Outputs:
            nonlocal computed
            different, place = np.unique(query_rows, return_inverse=True)
            source[which], computed = computed + place, computed + len(different)
            return Outputs(different)

        for _ in compute_wanted(self.runner, self.store.tree, node, offset, outputs, self._chunk, self._chunk):
            parts.append(self.runner.logits.clone())
        logits = torch.cat(parts)
        out = logits.new_zeros(len(rows), count, logits.shape[1])
        at = count - 1 - np.array(from_end)
        there = [torch.from_numpy(of).to(logits.device) for of in (np.array(row), at, source)]
        out[there[0], there[1]] = logits[there[2]]
        return out

    def copy_kv(self, other: RowSteps) -> None:
        """Copy the KV to another cache's rows of the same tokens."""
        rows, theirs, store = self.flushed(), other.rows, other.store
        own = np.arange(rows.length) >= rows.pad[:, None]
        target, first = np.unique(theirs.slots()[own], return_index=True)
        store.pool.copy(rows.slots()[own][first], target, self.store.pool)
        nodes = store.tree.nodes()
        store.tree.mark_computed(nodes, [node.length for node in nodes])
