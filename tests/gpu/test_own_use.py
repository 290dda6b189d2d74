"""A model of one's own on a GPU: steps in 16 bits, and decode steps in a CUDA graph that the caller captures."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention

import prefixkit
from prefixkit.attention.variants import CAUSAL, sliding_window
from prefixkit.functional.attend import TreeAttention, TreeStep
from prefixkit.tree import PrefixTree, Sequence
from tests.functional.own_model import DIM, HEADS, KV_HEADS, VOCAB, Errors, OwnModel, pool_of
from tests.functional.test_attend import set_up
from tests.site.test_tutorials import run_page

GPU = "cuda"
LAYERS, WIDE, STEPS = 2, 64, 8
BEHIND = 0.1  # of a logit, by rounding in bfloat16; wrong tokens are over a unit behind


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn], ids=str)
def test_samples_that_grow_fork_and_end_attend_as_dense_attention_does(
    dtype: torch.dtype, page_size: int, implementation: str
) -> None:
    """As on the CPU; in float32, over e4m3, and without our kernels, plain torch runs on the GPU."""
    errors = Errors()
    for seed in range(4):
        print("seed", seed)
        rng = np.random.default_rng(seed)
        tree, samples, model = set_up(rng, dtype, page_size, GPU)
        for turn in range(8):
            step = prefixkit.plan(model.attention, tree, samples)
            found = model.run(step, samples)
            prefixkit.commit(step)
            for sample, *rows in zip(samples, *found, strict=True):
                errors.add(model, sample.tokens(), *rows)
            if turn % 3 == 2:
                samples += tree.fork(samples[0], 2)
                tree.release(samples.pop(int(rng.integers(len(samples)))))
            tree.extend_each(samples, rng.integers(0, VOCAB, len(samples)))
    errors.check(lse=1e-4)


def test_a_cascade_attends_as_the_tree_of_its_tokens() -> None:
    """The same pages, by arrays on the GPU; several queries for each request."""
    rng = np.random.default_rng(0)
    shared, own, queries = list(range(100, 148)), [list(range(200 * n, 200 * n + 5 + 9 * n)) for n in range(1, 6)], 3
    pool = pool_of(torch.bfloat16, 16, device=GPU)
    tree, requests = prefixkit.tree_from_tokens(pool, [shared + each for each in own])
    model = OwnModel(prefixkit.TreeAttention(pool, HEADS), rng)
    step = prefixkit.plan(model.attention, tree, requests)
    model.run(step, requests)
    prefixkit.commit(step)
    tables = [np.unique(request.slots()[48:] // 16, return_index=True) for request in requests]
    pages = [(request.slots()[48:] // 16)[np.sort(first)] for request, (_, first) in zip(requests, tables, strict=True)]
    arrays = (
        [[0, queries * len(own)], np.arange(len(own) + 1) * queries],
        [[0, 3], np.cumsum([0, *map(len, pages)])],
        [requests[0].slots()[:48:16] // 16, np.concatenate(pages)],
        [[16], [(len(each) - 1) % 16 + 1 for each in own]],
    )
    given = [[torch.tensor(np.asarray(of), dtype=torch.int32, device=GPU) for of in level] for level in arrays]
    cascade = prefixkit.tree_from_cascade(*given, 16)
    of_tables = prefixkit.plan(prefixkit.TreeAttention(pool, HEADS), cascade)
    step = prefixkit.plan(model.attention, tree, requests, queries)
    q = model.random(of_tables.num_rows, HEADS)
    out, lse = prefixkit.attend(of_tables, 0, q)
    rows = (step.last_rows[:, None] + torch.arange(1 - queries, 1, device=GPU)).flatten()
    scattered = torch.zeros(step.num_rows, HEADS, DIM, dtype=torch.bfloat16, device=GPU).index_copy_(0, rows, q)
    expected, expected_lse = prefixkit.attend(step, 0, scattered)
    torch.testing.assert_close(out, expected[rows], rtol=2**-7, atol=2**-9)
    torch.testing.assert_close(lse, expected_lse[rows], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_caches_in_flashinfers_layouts_are_read_and_written_where_they_are(layout: str, page_size: int) -> None:
    inner = (page_size, KV_HEADS) if layout == "NHD" else (KV_HEADS, page_size)
    cache = torch.full((512, 2, *inner, DIM), torch.nan, dtype=torch.bfloat16, device=GPU)
    found = []
    for pool in (prefixkit.kv_pool_from_tensors([cache], layout), pool_of(torch.bfloat16, page_size, device=GPU)):
        tree, requests = prefixkit.tree_from_tokens(pool, [range(90), [*range(40), 7]])
        model = OwnModel(prefixkit.TreeAttention(pool, HEADS), np.random.default_rng(1))
        found.append(model.run(prefixkit.plan(model.attention, tree, requests), requests))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("page", ["tutorials/op.md", "tutorials/variants.md"])
def test_the_tutorial_runs(page: str) -> None:
    run_page(page)


class Model(torch.nn.Module):
    """Two layers whose attention decides the tokens; greedy."""

    def __init__(self, window: int | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        width, self.window = HEADS * WIDE, window
        self.embed, self.head = torch.nn.Embedding(256, width), torch.nn.Linear(width, 256, bias=False)
        self.qkv = torch.nn.ModuleList(
            torch.nn.Linear(width, (HEADS + 2 * KV_HEADS) * WIDE, bias=False) for _ in range(LAYERS)
        )
        for qkv in self.qkv:
            qkv.weight.data *= 4
        self.to(GPU, torch.bfloat16).requires_grad_(False)

    def logits(self, tokens: Tensor, attention: Callable[..., Tensor]) -> Tensor:
        x = self.embed(tokens)
        for layer, qkv in enumerate(self.qkv):
            heads = qkv(rms_norm(x, x.shape[-1:])).unflatten(-1, (-1, WIDE)).split((HEADS, KV_HEADS, KV_HEADS), 1)
            x = x + attention(layer, *heads).flatten(1)
        return self.head(rms_norm(x, x.shape[-1:])).float()

    def forward(self, step: TreeStep) -> Tensor:
        """The next token of each sequence."""

        def over_tree(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            prefixkit.append(step, layer, k, v)
            return prefixkit.attend(step, layer, q)[0]

        return self.logits(step.tokens, over_tree)[step.last_rows].argmax(-1)

    def behind(self, tokens: np.ndarray) -> Tensor:
        """``[tokens - 1]`` how far the logit of each token but the first is behind the best one, by dense attention."""
        ids = torch.from_numpy(tokens).long().to(GPU)
        at = torch.arange(len(ids), device=GPU)
        distance = at[:, None] - at
        seen = (distance >= 0) & (distance < (self.window or len(ids)))

        def dense(layer: int, *heads: Tensor) -> Tensor:
            q, k, v = (of.transpose(0, 1)[None] for of in heads)
            return scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)[0].transpose(0, 1)

        logits = self.logits(ids, dense)[:-1]
        return logits.amax(-1) - logits.gather(1, ids[1:, None])[:, 0]


def step_by_step(model: Model, attention: TreeAttention, tree: PrefixTree, samples: list[Sequence]) -> None:
    step = prefixkit.plan(attention, tree, samples)
    tokens = model(step)
    prefixkit.commit(step)
    tree.extend_each(samples, tokens.cpu().numpy())


@pytest.mark.parametrize("window", [None, 40], ids=["all tokens", "a window"])
def test_a_graph_of_one_step_replays_all_and_serves_other_batches(window: int | None) -> None:
    """Each token is the best by dense attention, or within rounding of it."""
    model, rng = Model(window), np.random.default_rng(3)
    pool = prefixkit.kv_pool(LAYERS, KV_HEADS, WIDE, num_pages=512, device=GPU)
    head = rng.integers(0, 256, 70)
    tree, samples = prefixkit.tree_from_tokens(pool, [np.append(head, rng.integers(0, 256, 9)) for _ in range(6)])
    attention = TreeAttention(pool, HEADS, CAUSAL if window is None else sliding_window(window))
    step_by_step(model, attention, tree, samples)
    static = prefixkit.static_decode(attention, tree, samples, STEPS, rows=8)

    def decode() -> None:
        static.advance()
        static.next_tokens[static.step.last_rows] = model(static.step)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        decode()  # once before the capture, for what is set up at a first call
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode()

    plans = attention.planner.plans_made
    for turn in range(4):
        if turn == 2:  # another batch: one ends, one forks
            tree.release(samples.pop(1))
            samples += tree.fork(samples[0])
            step_by_step(model, attention, tree, samples)
        static.upload(tree, samples, STEPS)
        sampled = []
        for _ in range(STEPS):
            graph.replay()
            sampled.append(static.next_tokens[static.step.last_rows])
        tree.extend_leaves(samples, torch.stack(sampled, 1)[: len(samples)].cpu().numpy())
    step_by_step(model, attention, tree, samples)  # which reads what the graph has written
    assert attention.planner.plans_made == plans + 2, "no plan of a replay is made on the host"
    for sample in samples:
        new = sample.tokens()[len(head) + 9 :]
        assert len(new) >= 4 * STEPS + 2 and len(set(new.tolist())) > 4, "a model that says one thing shows little"
        behind = model.behind(sample.tokens())[-len(new) :]
        assert float(behind.max()) < BEHIND, behind
