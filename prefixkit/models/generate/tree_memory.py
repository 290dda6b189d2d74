"""What the rows of a tree cache run on: a KV store that they borrow, and a runner of steps over it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from prefixkit.attention.uncomputed import prefill_chunk_for
from prefixkit.kv.store import KVStore
from prefixkit.models.attention_class import forward_below, takes_trees
from prefixkit.models.facts import ModelFacts, facts_of
from prefixkit.models.model_stores import kind_of, stores_of
from prefixkit.models.probe.passes import ignores_zeros
from prefixkit.models.runner import planner_of, runner_of
from prefixkit.models.weights.content import kv_version
from prefixkit.ops.backend import backend_for
from prefixkit.runners.batch import Runner

_RUNNER, _ZEROS = "runner of rows", "ignores zeros"


class TreeMemory:
    """A KV store, borrowed for the rows of a batch, and a runner of steps over it.

    Args:
        facts: Of a patched model.
        borrower: The cache that has the rows; its ``vacate`` moves them, for a session that asks for this store.
        num_pages, page_size: Pages that the store has to have.
        prompts: What the rows begin with.

    Attributes:
        store: The store.
        longest: Tokens that a row may have, see :attr:`ModelFacts.longest_text`.
        counts_from_zero: See :attr:`ModelFacts.counts_from_zero`.
        dtype: Of the model's weights, to which logits are converted.
        chunk: Prompt tokens of a step.

    Raises:
        DoesNotFit: so many pages take more than their share of the memory that is free.
    """

    def __init__(
        self, facts: ModelFacts, borrower: object, num_pages: int, page_size: int, prompts: Sequence[NDArray[np.int32]]
    ) -> None:
        self.model, self.stores = facts.inner, stores_of(facts.inner)
        self.longest, self.counts_from_zero = facts.longest_text, facts.counts_from_zero
        self.dtype = facts.inner.dtype
        self.chunk = prefill_chunk_for(facts.spec.device)
        self.store: KVStore = self.stores.borrow(kind_of(facts, page_size), borrower, num_pages, prompts)
        try:
            if _RUNNER not in self.store.runners:
                self._attach_runner(facts)
            self.runner.start_call()
            self._epoch = self.stores.epoch
            found = partial(self.store.tree.longest_match, prompts)
            self._version: int | None = kv_version(self.model, found, facts.state)
            self.store.use_version((self._epoch, self._version))
        except BaseException:
            self.stores.return_(self.store)
            raise

    @property
    def runner(self) -> Runner:
        """Runs steps over the store."""
        runner: Runner = self.store.runners[_RUNNER]
        return runner

    def _attach_runner(self, facts: ModelFacts) -> None:
        self.store.runners[_RUNNER] = runner_of(facts, self.store.pool, call=forward_below(self.model))

    def ignores_zeros(self, name: str, whole: bool) -> bool:
        """Whether the model, with its present weights, ignores an argument that is zero for each token."""
        known = self.store.notes.get((_ZEROS, name, whole))
        if known is None or known[0] != self.store.version:
            known = self.store.version, ignores_zeros(self.model, name, whole)
            self.store.notes[_ZEROS, name, whole] = known
        return bool(known[1])

    @property
    def is_current(self) -> bool:
        """Whether the model computes what it computed when these rows came."""
        return kv_version(self.model) == self._version

    def mark_stale(self) -> None:
        """Some KV is of other weights from now on: none of it is retained for other rows."""
        self._version = self.store.version = None

    def grow(self, pages: int) -> None:
        """Add so many pages: the pool is copied to a larger one.

        Raises:
            DoesNotFit: there is no memory for it beside the present one; nothing has changed.
        """
        self.stores.grow(self.store, pages)
        self._attach_runner(facts_of(self.model))

    def return_(self) -> None:
        """Give the store back, for later calls while the model is patched and not trained, which needs memory."""
        if not self.is_current:
            self.store.version = None
        rests = takes_trees(self.model) and not self.model.training and self.store.version is not None
        self.stores.return_(self.store, rests)


def replays(facts: ModelFacts) -> bool:
    """Whether decode steps of a patched model can replay CUDA graphs."""
    device = facts.spec.device
    if device.type != "cuda" or (planning := backend_for(device).graph_planning) is None:
        return False
    return planning(planner_of(facts)) is not None
