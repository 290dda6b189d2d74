"""A language model without weights: its logits are a hash of all the tokens that a query can see through the plan.

It stores tokens in the slots where a real model stores KV, and reads them only through the step's plan: the plan on the
host, or the tensors that kernels take, if a captured step grows the tree in them.  So it detects a query that sees too
few tokens, too many or the wrong branch, and counts how often each token was computed.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import prefixkit.ops.library  # noqa: F401 - registers torch.ops.prefixkit
from prefixkit.attention.bsr import OPEN, MaskKind
from prefixkit.attention.paths.runs import with_runs
from prefixkit.attention.plan import KINDS
from prefixkit.attention.sharing import CostModel, HeadShape
from prefixkit.attention.step import Step
from prefixkit.backends.torch.host_planner import TorchPlanner
from prefixkit.kv.kv_pool import KVPool
from prefixkit.kv.store import KVStore
from prefixkit.runners.batch import STEP_BY_STEP, Pace
from prefixkit.runners.eager import EagerRunner
from prefixkit.testing.engines import ReportingEngine
from prefixkit.testing.kv_specs import spec_of_alike

VOCAB = 50


def logits_after(tokens: Iterable[int]) -> NDArray[np.float32]:
    """``[VOCAB]`` the fake model's logits after a sequence of tokens: a function of all of them and their order."""
    # The length distinguishes sequences that differ only in tokens 0 at the end, because seeds are padded with zeros.
    tokens = list(tokens)
    return _logits_of(np.array([len(tokens), *tokens], dtype=np.int64).tobytes()).copy()


@lru_cache(100_000)  # most are needed twice: for the expected and for the tested run
def _logits_of(seed: bytes) -> NDArray[np.float32]:
    drawn = np.random.default_rng(np.frombuffer(seed, dtype=np.uint32)).normal(size=VOCAB)
    return drawn.astype(np.float32) * np.float32(2)


def values_of(tokens: Iterable[int], weights: int = 0) -> list[int]:
    """The fake V of each token: a hash of all tokens up to it, and of the weights."""
    # float32 holds integers of 24 bits.
    return [
        value & 0xFFFFFF
        for value in accumulate(
            map(int, tokens),
            lambda value, token: zlib.crc32(token.to_bytes(8, "little", signed=True), value),
            initial=weights,
        )
    ][1:]


def last_value(tokens: Sequence[int], weights: int = 0) -> int:
    """The last of ``values_of(tokens, weights)``, without computing the others."""
    return zlib.crc32(np.array(tokens, dtype="<i8").tobytes(), weights) & 0xFFFFFF


class FakeModel:
    """Runs steps; ``computed`` counts the full prefix of every token that ran.

    Attributes:
        weights: A number that identifies the weights; only V depends on it.
    """

    def __init__(self, pool: KVPool) -> None:
        # Keys are tokens, in float32, and values are hashes of prefixes: one head of one element.
        self.pages = [pool.pages(0)[0].fill_(-1.0), pool.pages(0)[1].fill_(-1.0)]
        self.page_size = pool.page_size
        self.computed: Counter[tuple[int, ...]] = Counter()
        self.rows_per_step: list[int] = []
        self.logits_per_step: list[int] = []
        self.weights = 0

    def __call__(self, step: Step) -> torch.Tensor:
        rows = step.tokens.to(torch.float32)[:, None, None]
        torch.ops.prefixkit.kv_append(rows, rows, *self.pages, step.slots)
        seen = self.seen_by_rows(step)
        for tokens in seen:
            self.computed[tuple(tokens)] += 1
        values, stored = self.pages[1].view(-1), step.slots >= 0
        last = [last_value(tokens, self.weights) if tokens else 0 for tokens in seen]
        values[step.slots[stored].long()] = torch.tensor(last, dtype=torch.float32)[stored]
        self.rows_per_step.append(step.num_rows)
        self.logits_per_step.append(len(step.logit_rows))
        wanted = [logits_after(seen[row]) for row in step.logit_rows.tolist()]
        return torch.from_numpy(np.stack(wanted)) if wanted else torch.empty(0, VOCAB)

    def seen_by_rows(self, step: Step) -> list[list[int]]:
        """The tokens that each row sees, by position; asserts that none is missing, stale or seen twice."""
        items, segments, limits, (start, length, page_indptr, pages, first_slot) = work_of(step)
        held = self.pages[0].numpy()[:, :, 0, 0]
        positions = step.positions.tolist()
        visible: list[dict[int, int]] = [{} for _ in range(step.num_rows)]
        for q_begin, q_end, partial, seg_begin, coded, *_ in items.tolist():
            count, kind = divmod(coded, KINDS)
            until = list(positions[q_begin:q_end])  # last position that each row of the item sees
            if kind != MaskKind.OWN:
                until = limits[partial:][: q_end - q_begin].tolist() if kind == MaskKind.LIMIT else [OPEN] * len(until)
            for node, begin, end in segments[seg_begin : seg_begin + count].tolist():
                at = int(first_slot[node]) + np.arange(begin, min(end, int(length[node])))
                page = pages[int(page_indptr[node]) + at // self.page_size]
                tokens = held[page, at % self.page_size].astype(int).tolist()
                first = int(start[node]) + begin
                for row, last in enumerate(until, q_begin):
                    fresh = dict(enumerate(tokens[: max(0, last + 1 - first)], first))
                    assert visible[row].keys().isdisjoint(fresh), "a token seen twice"
                    visible[row].update(fresh)
        for row, tokens in enumerate(visible):
            if tokens or step.slots[row] >= 0:  # else the row is padding of a graph
                assert sorted(tokens) == list(range(positions[row] + 1)), "a token missing"
        return [[token for _, token in sorted(tokens.items())] for tokens in visible]


def work_of(step: Step) -> tuple[np.ndarray, np.ndarray, np.ndarray, Sequence[np.ndarray]]:
    """A step's items, their segments and limits, and the tree's arrays: the plan's tensors if it has them, else the
    arrays on the host.
    """
    if len(step.plan) > 1:
        counts, tile_items, decode_items, segments, _, _, limits, *nodes = (each.numpy() for each in step.plan[:12])
        return np.concatenate((tile_items[: counts[0]], decode_items[: counts[1]])), segments, limits, nodes
    plan, tree = step.plans[0].plan, step.plans[0].tree
    return plan.items, plan.segments, plan.limits, with_runs(tree.arrays(), plan.runs)


def make_engine(
    num_pages: int = 4096, page_size: int = 4, pace: Pace = STEP_BY_STEP, **options: Any
) -> tuple[ReportingEngine, FakeModel]:
    """An engine over a fake model, and the model; the cost model shares all that can be shared."""
    pool = KVPool(spec_of_alike(num_layers=1, kv_heads=1, head_dim=1), num_pages, page_size)
    model = FakeModel(pool)
    planner = TorchPlanner(HeadShape(1, 1, 1, 4), CostModel(item=0, kv_byte=1, partial_byte=0))
    runner = EagerRunner(model, planner, "cpu", pace)
    listeners = ("return_samples", "on_sample", "on_token", "on_step", "detokenizer")
    of_calls = {name: options.pop(name) for name in listeners if name in options}
    return ReportingEngine(runner, KVStore(pool), options=of_calls, **options), model
