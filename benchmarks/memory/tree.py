"""The fill of pages and hits of the prefix cache, on the tree alone: *fill* and *policies* of ``benchmarks.memory``."""

import time
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from benchmarks.runner import Row, Run
from prefixkit.tree.eviction import POLICIES, PrefixCache
from prefixkit.tree.pages import pages_for
from prefixkit.tree.radix import PrefixTree, Sequence

VOCABULARY = 50_000
Tokens = NDArray[np.int32]

# -- fill --------------------------------------------------------------------------------------------------------------


class Trace:
    """A constant number of prompts whose samples grow by a token a step and leave when they end.

    Attributes:
        held: Tokens that the tree holds, shared tokens counted once.
        pages: Pages that hold them.
        prompt_slack: Empty slots behind prompts whose samples are on other pages.
    """

    def __init__(self, rng: np.random.Generator, page_size: int, prompts: int, samples: int, length: int) -> None:
        self.tree = PrefixTree(
            prompts * (pages_for(length, page_size) + samples * pages_for(1001, page_size)), page_size
        )
        self.waiting = [rng.integers(0, VOCABULARY, length, dtype=np.int32) for _ in range(prompts)]
        self.ends = rng.integers(100, 1001, (prompts, samples)).tolist()
        self.rng, self.length = rng, length
        self.prompts: dict[int, tuple[Sequence, int]] = {}  # and the number of its running samples
        self.samples: list[tuple[Sequence, int, int]] = []  # the prompt of each, and the step at which it ends
        self.steps = 0

    def step(self, at_once: int) -> None:
        """Add a token to each sample; then ended samples leave, and waiting prompts are inserted."""
        while self.waiting and len(self.prompts) < at_once:
            index = len(self.waiting) - 1
            prompt, ends = self.tree.insert(self.waiting.pop()), self.ends[index]
            self.prompts[index] = prompt, len(ends)
            own = self.tree.fork(prompt, len(ends))
            self.samples += [(one, index, self.steps + end) for one, end in zip(own, ends, strict=True)]
        tokens = self.rng.integers(0, VOCABULARY, len(self.samples), dtype=np.int32)
        self.tree.extend_each([one for one, _, _ in self.samples], tokens)
        self.steps += 1
        for sequence, index, end in self.samples:
            if end == self.steps:
                self.tree.release(sequence)
                prompt, left = self.prompts.pop(index)
                if left > 1:
                    self.prompts[index] = prompt, left - 1
                else:
                    self.tree.release(prompt)
        self.samples = [one for one in self.samples if one[2] > self.steps]

    def counts(self) -> tuple[int, int, int]:
        """Tokens held, slots of the pages that hold them, and empty slots behind the samples' last tokens."""
        held = len(self.prompts) * self.length + sum(one.length - self.length for one, _, _ in self.samples)
        size = self.tree.page_size
        behind = sum(-one.node.end_slot % size for one, _, _ in self.samples)
        return held, self.tree.pages_held() * size, behind


def fill(page_size: int, at_once: int, prompts: int, samples: int, length: int, every: int = 1) -> Row:
    """Mean fill over the steps, and where empty slots are; the tree's own count is checked each ``every`` steps."""
    trace, began = Trace(np.random.default_rng(0), page_size, prompts, samples, length), time.perf_counter()
    found: list[tuple[int, int, int]] = []
    while trace.waiting or trace.samples or not trace.steps:
        trace.step(at_once)
        if trace.samples:
            found.append(trace.counts())
            if trace.steps % every == 0:
                assert trace.tree.snapshot().num_tokens == found[-1][0], "tokens were counted wrongly"
    held, slots, behind = np.array(found, float).T
    return {
        "page_size": page_size,
        "prompts_at_once": at_once,
        "steps": trace.steps,
        "fill": round(float((held / slots).mean()), 4),
        "fill_of_all_steps": round(float(held.sum() / slots.sum()), 4),
        "worst": round(float((held / slots).min()), 4),
        "lost_behind_samples": round(float((behind / slots).mean()), 4),
        "lost_elsewhere": round(float(((slots - held - behind) / slots).mean()), 4),
        "tree_us_per_step": round(1e6 * (time.perf_counter() - began) / trace.steps, 1),
    }


def measure_fill(run: Run, page_sizes: list[int], prompts: int, samples: int, length: int) -> None:
    for at_once in (prompts, max(1, prompts // 4)):
        for page_size in page_sizes:
            run.add("fill", fill(page_size, at_once, prompts, samples, length, every=97))


# -- policies ----------------------------------------------------------------------------------------------------------


def few_shots(rng: np.random.Generator, count: int) -> list[Tokens]:
    """Few-shot prompts of 256 to 4,096 tokens: a system prompt of 128 tokens, one of eight tasks' 128, their own."""
    system = rng.integers(0, VOCABULARY, 128, dtype=np.int32)
    tasks = rng.integers(0, VOCABULARY, (8, 128), dtype=np.int32)
    lengths = np.exp(rng.uniform(np.log(256), np.log(4096), count)).astype(int)
    own = [rng.integers(0, VOCABULARY, max(0, length - 256), dtype=np.int32) for length in lengths]
    return [np.concatenate((system, tasks[rng.integers(8)], rest)) for rest in own]


def zipf(rng: np.random.Generator, count: int, requests: int, exponent: float, shifts: int) -> NDArray[np.int64]:
    """The prompt of each request; the popular prompts change after each of several parts of the trace."""
    weights = np.arange(1, count + 1) ** -exponent
    parts = np.linspace(0, requests, shifts + 2).astype(int)
    own = [rng.permutation(count)[rng.choice(count, b - a, p=weights / weights.sum())] for a, b in pairwise(parts)]
    return np.concatenate(own)


def hit_rate(policy: str, pages: int, prompts: list[Tokens], order: NDArray[np.int64], own: int) -> Row:
    """The hits of a cache of this many pages: each request is a prompt and ``own`` tokens, one after the other."""
    rng = np.random.default_rng(1)
    tree = PrefixTree(pages)
    cache, began = PrefixCache(tree, POLICIES[policy]), time.perf_counter()
    for index in order.tolist():
        tokens = np.concatenate((prompts[index], rng.integers(0, VOCABULARY, own, dtype=np.int32)))
        match = tree.match(tokens)
        with cache.pinned(match.node):
            fits = cache.free_pages(pages_for(len(tokens) - match.length, tree.page_size) + 1)
        if not fits:
            cache.clear()
        sequence = tree.insert(tokens)
        cache.record_hit(sequence)
        node = sequence.node
        while node.parent is not None:
            tree.mark_computed([node], [node.length])
            node = node.parent
        cache.retain(sequence)
    asked = cache.tokens_queried
    return {
        "hit_rate": round(cache.tokens_hit / asked, 4),
        "tokens_evicted": cache.tokens_evicted,
        "us_per_request": round(1e6 * (time.perf_counter() - began) / len(order), 1),
    }


def measure_policies(run: Run, prompts: int, requests: int, own: int = 64) -> None:
    """Hit rates by policy, for cache sizes as shares of all few-shot prompts' tokens; and the rate without eviction."""
    for exponent, shifts in ((0.8, 0), (1.1, 0), (1.1, 3)):
        rng = np.random.default_rng(0)
        known = few_shots(rng, prompts)
        order, total = zipf(rng, prompts, requests, exponent, shifts), sum(map(len, known))
        at_best = hit_rate("lru", pages_for(total, 16) + requests * (pages_for(own, 16) + 1), known, order, own)
        for share in (0.05, 0.1, 0.2, 0.4, 0.8):
            pages = max(pages_for(round(share * total), 16), pages_for(5000, 16))
            row: Row = {"exponent": exponent, "shifts": shifts, "share": share, "cache_tokens": 16 * pages}
            for policy in POLICIES:
                row |= {policy: hit_rate(policy, pages, known, order, own)}
            run.add("policies", row | {"without_eviction": at_best})
