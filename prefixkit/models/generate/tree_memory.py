"""What a tree cache holds: pool, tree, and what runs steps over them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefixkit.attention.uncomputed import prefill_chunk_for
from prefixkit.models.attention_class import takes_trees
from prefixkit.models.facts import ModelFacts, facts_of
from prefixkit.models.probe.passes import ignores_zeros
from prefixkit.models.runner import planner_of, runner_of
from prefixkit.models.weights.content import kv_version
from prefixkit.ops.backend import backend_for
from prefixkit.ops.kv_pool import KVPool, free_memory
from prefixkit.runners.batch import Runner
from prefixkit.tree.eviction import PrefixCache
from prefixkit.tree.radix import PrefixTree

log = logging.getLogger("prefixkit")

# Of the memory that is free: the rest is for logits, activations and other processes.
GPU_MEMORY_SHARE, CPU_MEMORY_SHARE = 0.8, 0.5
# Of the free memory of a CPU: what a model may keep between two calls of generate().
CPU_IDLE_SHARE = 0.1
_IDLE = "_prefixkit_idle"


class DoesNotFit(ValueError):
    """The KV of a batch does not fit the share of free memory that a tree cache may take."""


class TreeMemory:
    """A pool, the tree of what it holds, and a runner of steps over both.

    Args:
        facts: Of a patched model.
        call: Its ``forward`` without the part of it that takes a tree cache.
        num_pages, page_size: Of the pool.
        idle: Where it goes when it is no longer needed.

    Attributes:
        tree, pool, runner: These.
        cache: KV of earlier rows, until its pages are needed.
        chunk: Prompt tokens of a step.
        longest: Tokens that a row may have, see :attr:`ModelFacts.longest_text`.
        counts_from_zero: See :attr:`ModelFacts.counts_from_zero`.
        dtype: Of the model's weights, to which logits are converted.
        ignores_zeros: Whether the model, with its present weights, ignores an argument that is zero for each token.

    Raises:
        DoesNotFit: so many pages take more than their share of the memory that is free.
    """

    def __init__(self, facts: ModelFacts, call: Callable[..., Any], num_pages: int, page_size: int, idle: Idle) -> None:
        self.model, self.call, self.spec, self.idle = facts.inner, call, facts.spec, idle
        self.longest, self.counts_from_zero = facts.longest_text, facts.counts_from_zero
        self.dtype = facts.inner.dtype
        self._shape = facts.attention_shape
        self._check(num_pages * page_size)
        self._invalidate(num_pages, page_size)
        self._version: int | None = kv_version(self.model, state=facts.state)
        self.ignores_zeros = cache(partial(ignores_zeros, self.model))
        self._use(KVPool(self.spec, num_pages, page_size), facts)
        self.chunk = prefill_chunk_for(self.spec.device)

    def fits(self, facts: ModelFacts, num_pages: int, page_size: int) -> bool:
        """Whether it has ``num_pages`` for the model as it is now, if need be in a larger pool with the same KV."""
        if self.pool.page_size != page_size or self._shape != facts.attention_shape:
            return False
        try:
            if (more := num_pages - self.pool.num_pages) > 0:
                self.grow(more)
        except DoesNotFit:
            return False
        return True

    def start_call(self, facts: ModelFacts, prompts: Sequence[NDArray[np.int32]]) -> None:
        """Other rows come: KV of other weights is invalidated."""
        self.runner.start_call()
        self.dtype = facts.inner.dtype
        found = partial(self.tree.longest_match, prompts)
        if (version := kv_version(self.model, found, facts.state)) != self._version:
            self._version = version
            self.ignores_zeros.cache_clear()
            self._invalidate(self.pool.num_pages, self.pool.page_size)

    @property
    def is_current(self) -> bool:
        """Whether the model computes what it computed when these rows came."""
        return kv_version(self.model) == self._version

    def mark_stale(self) -> None:
        """Some KV is of other weights from now on: none of it is retained for other rows."""
        self._version = None

    def _invalidate(self, num_pages: int, page_size: int) -> None:
        self.tree = PrefixTree(num_pages, page_size)
        self.cache = PrefixCache(self.tree)

    def grow(self, pages: int) -> None:
        """Add so many pages: the pool is copied to a larger one.

        Raises:
            DoesNotFit: there is no memory for it beside the present one; nothing has changed.
        """
        total = self.pool.num_pages + pages
        self._check(total * self.pool.page_size)
        log.info("tree cache: KV for %d tokens becomes KV for %d", self.tokens, total * self.pool.page_size)
        self._use(self.pool.grown(total), facts_of(self.model))
        self.tree.allocator.grow(pages)

    @property
    def tokens(self) -> int:
        """What the pool can hold."""
        return self.pool.num_pages * self.pool.page_size

    def _use(self, pool: KVPool, facts: ModelFacts) -> None:
        self.pool = pool
        self.runner: Runner = runner_of(facts, pool, call=self.call)

    def _check(self, tokens: int) -> None:
        """Raise DoesNotFit unless KV of so many tokens fits."""
        spec = self.spec
        share = CPU_MEMORY_SHARE if spec.device.type == "cpu" else GPU_MEMORY_SHARE
        need, free = tokens * spec.bytes_per_token, free_memory(spec.device)
        if need > share * free:
            raise DoesNotFit(
                f"KV for {tokens} tokens takes {need / 2**30:.2f} GiB, and a tree cache takes at most {share:.0%} of "
                f"the {free / 2**30:.2f} GiB that are free on {spec.device}"
            )


def replays(facts: ModelFacts) -> bool:
    """Whether decode steps of a patched model can replay CUDA graphs."""
    device = facts.spec.device
    if device.type != "cuda" or (planning := backend_for(device).graph_planning) is None:
        return False
    return planning(planner_of(facts)) is not None


class Idle:
    """The memory of a model's last tree cache, for the next: it knows tokens of before, and its graphs are captured.

    A copy of the model, or a pickled one, has none.
    """

    def __init__(self) -> None:
        self._memory: list[TreeMemory] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return Idle, ()

    def __len__(self) -> int:
        return len(self._memory)

    def borrow(
        self,
        facts: ModelFacts,
        call: Callable[..., Any],
        num_pages: int,
        page_size: int,
        prompts: Sequence[NDArray[np.int32]],
    ) -> TreeMemory:
        """Memory of at least ``num_pages`` pages, for rows that begin with these prompts; this no longer holds it.

        Raises:
            DoesNotFit: see :class:`TreeMemory`.
        """
        memory = self._memory.pop() if self._memory else None
        if memory is not None and memory.fits(facts, num_pages, page_size):
            memory.start_call(facts, prompts)
            return memory
        del memory  # before the new one is made
        return TreeMemory(facts, call, num_pages, page_size, self)

    def known(self, tokens: NDArray[np.int32]) -> int:
        """How many of a prompt's tokens, from the first, are there already."""
        return self._memory[0].tree.match(tokens).length if self._memory else 0

    def return_(self, memory: TreeMemory) -> None:
        """Hold what a cache no longer needs, while the model is patched and not trained, which needs memory; on a CPU
        only what is small beside the memory that is free.  KV of other weights, and memory that was borrowed before
        :func:`drop_idle`, is dropped.
        """
        model, spec = memory.model, memory.spec
        if model.__dict__.get(_IDLE) is not self or not memory.is_current:
            return
        small = spec.device.type == "cuda" or memory.pool.bytes <= CPU_IDLE_SHARE * free_memory(spec.device)
        if small and takes_trees(model) and not model.training and not self._memory:
            self._memory.append(memory)


def idle_of(model: Any) -> Idle:
    """Where a patched model keeps it; :func:`drop_idle` gives it back."""
    idle: Idle = model.__dict__.setdefault(_IDLE, Idle())
    return idle


def drop_idle(model: Any) -> None:
    """Give back what the model keeps for its next tree cache."""
    model.__dict__.pop(_IDLE, None)
