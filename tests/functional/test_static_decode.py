"""Decode steps in static buffers: tokens are those of each sequence alone, whatever forks, ends and is uploaded again.

On the CPU the planner of our kernels runs in plain torch, and a model reads K and V as its plans say.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import prefixkit
from prefixkit.attention.gpu.gpu_cost import H200
from prefixkit.attention.sharing import HeadShape
from prefixkit.backends.cuda.device_planner import CudaPlanner
from prefixkit.backends.cuda.plan_launch import plan_on_gpu
from prefixkit.functional.static_decode import StaticDecode
from prefixkit.ops.backend import BackendError
from prefixkit.runners.decode_tree import BatchTooLarge
from prefixkit.testing.fake_model import FakeModel, logits_after
from prefixkit.tree import OutOfPages, PrefixTree, Sequence

SHAPE = HeadShape(1, 1, 1, 4)


def planning() -> CudaPlanner:
    return CudaPlanner(SHAPE, H200, 4, lambda *given: plan_on_gpu(SHAPE, H200, 4, *given))


def set_up(rng: np.random.Generator, page_size: int) -> tuple[prefixkit.TreeAttention, PrefixTree, list[Sequence], Any]:
    """Some samples of prompts that share a prefix, each with its first token, which has no KV yet; and the model."""
    pool = prefixkit.kv_pool(1, 1, 1, num_pages=600, page_size=page_size, dtype=torch.float32, device="cpu")
    attention, model = prefixkit.TreeAttention(pool, 1), FakeModel(pool)
    head = rng.integers(0, 50, 20)
    tree, prompts = prefixkit.tree_from_tokens(pool, [np.append(head, rng.integers(0, 50, 5)) for _ in range(3)])
    samples = [sample for prompt in prompts for sample in tree.fork(prompt, int(rng.integers(1, 4)))]
    decode_eagerly(attention, tree, samples, model)
    return attention, tree, [samples[at] for at in rng.permutation(len(samples))], model


def decode_eagerly(attention: Any, tree: PrefixTree, samples: list[Sequence], model: FakeModel) -> None:
    step = prefixkit.plan(attention, tree, samples)
    tokens = model(step.step).argmax(-1)
    prefixkit.commit(step)
    tree.extend_each(samples, (tokens + torch.arange(len(samples))).numpy() % 50)  # samples of a prompt differ


def decode(static: StaticDecode, tree: PrefixTree, samples: list[Sequence], steps: int, model: FakeModel) -> None:
    """What the host does with a graph of ``advance``, model and sampler."""
    sampled = []
    for _ in range(steps):
        static.advance()
        tokens = model(static.step.step).argmax(-1)
        static.next_tokens[static.step.last_rows] = tokens
        sampled.append(tokens[: len(samples)])
    tree.extend_leaves(samples, torch.stack(sampled, 1).numpy())


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("seed", range(4))
def test_each_sequence_gets_the_tokens_that_it_gets_alone(seed: int, page_size: int) -> None:
    print("seed", seed)
    rng = np.random.default_rng(seed)
    attention, tree, samples, model = set_up(rng, page_size)
    rows = len(samples) + 4
    static = StaticDecode(attention, [planning()], tree, samples, 6, rows)
    tensors = [static.step.tokens, static.step.positions, static.step.slots, *static.step.step.plan]
    for turn in range(5):
        before = [sample.tokens() for sample in samples]
        if turn:
            static.upload(tree, samples, 6)
        decode(static, tree, samples, 6, model)
        for sample, tokens in zip(samples, before, strict=True):
            for _ in range(6):
                tokens = np.append(tokens, np.argmax(logits_after(tokens)))
            assert sample.tokens().tolist() == tokens.tolist() and sample.computed == sample.length - 1
        tree.release(samples.pop(int(rng.integers(len(samples)))))
        samples += tree.fork(samples[0], 2)
        decode_eagerly(attention, tree, samples, model)
    again = [static.step.tokens, static.step.positions, static.step.slots, *static.step.step.plan]
    assert [tensor.data_ptr() for tensor in again] == [tensor.data_ptr() for tensor in tensors], "graphs stay good"


def test_rows_behind_the_batch_write_nothing() -> None:
    attention, tree, samples, model = set_up(np.random.default_rng(0), 4)
    static = StaticDecode(attention, [planning()], tree, samples, 3, len(samples) + 3)
    static.advance()
    step, count = static.step, len(samples)
    assert step.num_rows == count + 3
    assert (step.slots[count:] == -1).all() and (step.slots[:count] >= 0).all()
    assert sorted(step.last_rows.tolist()) == list(range(count + 3))
    assert step.positions[step.last_rows[:count]].tolist() == [sample.length - 1 for sample in samples]
    assert step.tokens[step.last_rows[:count]].tolist() == [sample.node.last_token for sample in samples]


def test_steps_beyond_the_reserved_pages_write_nothing() -> None:
    attention, tree, samples, model = set_up(np.random.default_rng(1), 4)
    static = StaticDecode(attention, [planning()], tree, samples, 2, len(samples))
    held = tree.allocator.num_pages - tree.allocator.free
    for _ in range(12):
        static.advance()
    assert (static.step.slots == -1).all() and tree.allocator.num_pages - tree.allocator.free == held


def test_sequences_that_cannot_grow_in_place_are_refused_by_name() -> None:
    rng = np.random.default_rng(2)
    attention, tree, samples, model = set_up(rng, 4)
    static, version = StaticDecode(attention, [planning()], tree, samples, 3, len(samples)), tree.version
    twin = tree.fork(samples[0])
    for batch, steps, error, message in (
        ([*samples, *twin], 3, BatchTooLarge, r"the buffers are for \d rows, got \d sequences; make another one"),
        ([samples[1], *twin], 3, ValueError, "must end at a leaf of its own of which all but the last token have KV"),
        ([], 3, ValueError, "at least one sequence and one step, got 0 and 3"),
        (samples[1:], 0, ValueError, "at least one sequence and one step"),
        (samples[1:], 10_000, OutOfPages, "release or trim sequences"),
    ):
        with pytest.raises(error, match=message):
            static.upload(tree, batch, steps)
    assert tree.version == version
    tree.release(twin[0])
    tree.mark_computed([samples[0].node], [samples[0].node.length])
    with pytest.raises(ValueError, match="run its prompt and extend it by its first token, by plan"):
        static.upload(tree, samples, 3)


def test_a_tree_that_outgrows_the_buffers_is_refused_by_name() -> None:
    attention, tree, samples, model = set_up(np.random.default_rng(3), 4)
    static = StaticDecode(attention, [planning()], tree, samples, 3, len(samples))
    for first in range(100, 300):
        tree.insert([first, 1, 2])
    with pytest.raises(BatchTooLarge, match=r"a tree of \d+ nodes and \d+ pages does not fit the buffers"):
        static.upload(tree, samples, 3)


def test_static_buffers_need_kernels_whose_plans_a_graph_can_hold() -> None:
    attention, tree, samples, model = set_up(np.random.default_rng(4), 4)
    with pytest.raises(BackendError, match=r"no kernel whose plans a CUDA graph can hold .* torch.float32 on cpu"):
        prefixkit.static_decode(attention, tree, samples, 3)
    numbered = prefixkit.variant(lambda score, b, h, q_idx, kv_idx: score * b)
    with pytest.raises(
        ValueError, match=r"reads b, the number of a query's sequence, which static buffers do not hold"
    ):
        prefixkit.static_decode(prefixkit.TreeAttention(attention.pool, 1, numbered), tree, samples, 3)
    untraced = prefixkit.variant(lambda score, b, h, q_idx, kv_idx: score * h, name="by head", traced=False)
    with pytest.raises(BackendError, match="variant 'by head' is not traced"):
        prefixkit.static_decode(prefixkit.TreeAttention(attention.pool, 1, untraced), tree, samples, 3)
    with pytest.raises(ValueError, match="rows must be at least the"):
        prefixkit.static_decode(attention, tree, samples, 3, rows=1)
