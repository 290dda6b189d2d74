"""Attention at positions in the cache on a GPU: in the op, in a captured graph, and in a model's samples."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import prefixkit
from prefixkit import variants
from prefixkit.functional.attend import TreeStep
from tests.functional.own_model import DIM, HEADS, KV_HEADS, Errors, pool_of
from tests.functional.test_streaming import Texts, grow, streaming
from tests.gpu.test_model import model_of
from tests.models.variants.rotating_cache import token_by_token
from tests.models.variants.test_streaming import rotary

GPU = "cuda"
STEPS, UPLOADS = 32, 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("sinks", "window", "page_size"), [(4, 16, 16), (1, 1, 1), (20, 37, 16)])
def test_each_row_is_that_of_a_cache_that_is_rotated_anew(
    sinks: int, window: int, page_size: int, dtype: torch.dtype, implementation: str
) -> None:
    errors = Errors()
    for seed in range(2):
        print("seed", seed)
        rng = np.random.default_rng(seed)
        grow(rng, Texts(rng, sinks, window, dtype), page_size, errors, GPU)
    errors.check(lse=1e-4 if dtype == torch.float32 else 0.05)


class Numbers:
    """q, K and V of each position, of an op's user."""

    def __init__(self) -> None:
        generator = torch.Generator(GPU).manual_seed(0)
        self.of = [
            torch.randn(4096, heads, DIM, generator=generator, device=GPU).bfloat16()
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        ]

    def run(self, step: TreeStep) -> Tensor:
        q, k, v = (of[step.positions] for of in self.of)
        prefixkit.append(step, 0, k, v)
        return prefixkit.attend(step, 0, q)[0]


@pytest.mark.parametrize("prompt", [2, 4, 90], ids=["shorter than the sinks", "as long", "longer than the window"])
def test_a_captured_step_computes_what_steps_one_by_one_do(prompt: int) -> None:
    """While pages are given back at each upload."""
    numbers, found = Numbers(), []
    for graphs in (True, False):
        pool = pool_of(torch.bfloat16, 16, num_pages=64, device=GPU)
        attention = prefixkit.TreeAttention(pool, HEADS, streaming(4, 48))
        tree, prompts = prefixkit.tree_from_tokens(pool, [[n] * prompt for n in (1, 2, 3)])
        samples = [tree.fork(one)[0] for one in prompts]
        step = prefixkit.plan(attention, tree, samples)
        numbers.run(step)
        prefixkit.commit(step)
        tree.extend_each(samples, [5, 6, 7])
        outs = list[Tensor]()
        if graphs:
            run_graphs(numbers, attention, tree, samples, outs)
        else:
            for turn in range(STEPS * UPLOADS):
                step = prefixkit.plan(attention, tree, samples)
                outs.append(numbers.run(step)[step.last_rows])
                prefixkit.commit(step)
                tree.extend_each(samples, [0, 0, 0])
                if turn % STEPS == STEPS - 1:
                    prefixkit.release_unseen(attention, tree, samples)
        assert samples[0].length == prompt + 1 + STEPS * UPLOADS
        assert pool.num_pages - tree.allocator.free <= 3 * (prompt // 16 + 1 + (48 + STEPS) // 16 + 3)
        found.append(torch.stack(outs))
    ours, stepwise = found
    torch.testing.assert_close(ours, stepwise, rtol=2**-6, atol=2**-7)


def run_graphs(numbers: Numbers, attention: Any, tree: Any, samples: list[Any], outs: list[Tensor]) -> None:
    static = prefixkit.static_decode(attention, tree, samples, STEPS)
    made: list[Tensor] = []

    def decode() -> None:
        static.advance()
        made[:] = [numbers.run(static.step)]
        static.next_tokens.zero_()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        decode()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode()
    for _ in range(UPLOADS):
        static.upload(tree, samples, STEPS)
        for _ in range(STEPS):
            graph.replay()
            outs.append(made[0][static.step.last_rows].clone())
        tree.extend_leaves(samples, np.zeros((len(samples), STEPS), np.int32))
        prefixkit.release_unseen(attention, tree, samples)


@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
def test_log_probabilities_err_no_more_than_those_of_rotating_anew(compiled: bool) -> None:
    """Samples of more than the 256 tokens after which pages are given back, in graphs."""
    model, sinks, window = model_of(128, torch.bfloat16), 4, 64
    # Frequencies of float32, as a loaded model has them; those that ``to`` rounds err more with each position.
    model.model.rotary_emb = LlamaRotaryEmbedding(model.config).to(GPU)
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, 256, n).tolist() for n in (3, 100)]
    patched = prefixkit.patch(copy.deepcopy(model), variant=variants.streaming_llm(sinks, window))
    options: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 300, "stop_token_ids": ()}
    samples = prefixkit.generate(patched, None, prompts, compiled=compiled, **options)
    assert samples.report.graph_steps
    exact, rotate = copy.deepcopy(model).double(), rotary(10000.0, 128)
    ours, stock = list[Tensor](), list[Tensor]()
    for sample in samples:
        prompt = prompts[sample.prompt_index]
        text, ids = [*prompt, *sample.tokens], torch.tensor(sample.tokens, device=GPU)[:, None]
        truth, rounded = (
            token_by_token(each, text, sinks, window, rotate)
            .double()
            .log_softmax(-1)[len(prompt) - 1 : -1]
            .gather(1, ids)[:, 0]
            for each in (exact, model)
        )
        ours.append(torch.tensor(sample.logprobs, device=GPU).double() - truth)
        stock.append(rounded - truth)
    assert torch.cat(ours).norm() <= 1.5 * torch.cat(stock).norm(), (torch.cat(ours).norm(), torch.cat(stock).norm())
