"""StreamingLLM in the op by itself: attention at positions in the cache, against a cache that is rotated anew."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import prefixkit
from prefixkit import variants
from prefixkit.attention.reference import reference_attention
from prefixkit.attention.variants import BadVariant, Variant, compose
from tests.functional.own_model import DIM, HEADS, KV_HEADS, VOCAB, Errors, pool_of, torch_attention
from tests.functional.test_transforms import rotate

ROTARY = prefixkit.variant(query=rotate, key=rotate)


def streaming(sinks: int, window: int) -> Variant:
    return compose(variants.streaming_llm(sinks, window), ROTARY)


class Texts:
    """Random numbers of each token of sequences, and what a cache that is rotated anew at each step makes of them."""

    def __init__(self, rng: np.random.Generator, sinks: int, window: int, dtype: torch.dtype) -> None:
        self.rng, self.sinks, self.window, self.dtype = rng, sinks, window, dtype

    def numbers(self, rows: int, heads: int) -> Tensor:
        return torch.from_numpy(self.rng.standard_normal((rows, heads, DIM), dtype=np.float32)).to(self.dtype)

    def rerotated(self, kv: dict[int, Tensor], position: int, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Attention as the paper has it, in float64: keys of the cache at positions 0, 1, 2, ..., the query last.

        Returns out, lse, and out of torch's attention in the numbers' own dtype, in which models rotate.
        """
        held = [at for at in range(position + 1) if at < self.sinks or position - at < self.window]
        k, v = torch.stack([kv[at] for at in held], 1).repeat_interleave(HEADS // KV_HEADS, 2)
        cached = torch.arange(len(held))
        wide = rotate(q[None].double(), cached[-1:])[0], rotate(k.double(), cached)
        score = torch.einsum("hd,nhd->hn", *wide) / DIM**0.5
        exact = torch.einsum("hn,nhd->hd", score.softmax(-1), v.double())
        own = rotate(q[None], cached[-1:])[0], rotate(k, cached).transpose(0, 1), v.transpose(0, 1)
        return exact, score.logsumexp(-1), torch_attention(*own)


def grow(rng: np.random.Generator, texts: Texts, page_size: int, errors: Errors, device: str = "cpu") -> None:
    """Prompts that share more than a window, others shorter than the sinks; samples that fork, grow and end, while what
    they no longer see is released.
    """
    pool = pool_of(texts.dtype, page_size, device=device)
    attention = prefixkit.TreeAttention(pool, HEADS, streaming(texts.sinks, texts.window))
    shared = rng.integers(0, VOCAB, 50)
    prompts = [np.append(shared, 1), np.append(shared, rng.integers(0, VOCAB, 9)), [7], shared[:2]]
    tree, samples = prefixkit.tree_from_tokens(pool, prompts)
    kv: dict[int, dict[int, Tensor]] = {}
    for turn in range(30):
        step = prefixkit.plan(attention, tree, samples)
        q, *new = (texts.numbers(step.num_rows, heads) for heads in (HEADS, KV_HEADS, KV_HEADS))
        prefixkit.append(step, 0, *(of.to(device) for of in new))
        out, lse = (of.cpu() for of in prefixkit.attend(step, 0, q.to(device)))
        remember(kv, samples, step, new)
        prefixkit.commit(step)
        for sample, row in zip(samples, step.last_rows.tolist(), strict=True):
            *exact, theirs = texts.rerotated(kv[sample.id], sample.length - 1, q[row])
            errors.add_numbers((out[row], lse[row]), (exact[0], exact[1]), theirs)
        if turn == 10:
            for fork in tree.fork(samples[1], 2):
                kv[fork.id] = dict(kv[samples[1].id])
                samples.append(fork)
        if turn == 18:
            tree.release(samples.pop(0))
        tree.extend_each(samples, rng.integers(0, VOCAB, len(samples)))
        if turn % 5 == 0:
            prefixkit.release_unseen(attention, tree, samples)


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("sinks", "window", "page_size", "dtype"),
    [
        *((4, 16, 4, dtype) for dtype in (torch.float32, torch.bfloat16)),
        *((1, 1, 1, torch.float32), (3, 9, 16, torch.bfloat16), (5, 40, 8, torch.float32), (20, 7, 4, torch.bfloat16)),
    ],
    ids=str,
)
def test_each_row_is_that_of_a_cache_that_is_rotated_anew(
    sinks: int, window: int, page_size: int, dtype: torch.dtype
) -> None:
    errors = Errors()
    rng = np.random.default_rng(sinks)
    grow(rng, Texts(rng, sinks, window, dtype), page_size, errors)
    errors.check(lse=1e-5 if dtype == torch.float32 else 0.05)


def remember(kv: dict[int, dict[int, Tensor]], samples: list[Any], step: Any, new: list[Tensor]) -> None:
    """K and V of a step's rows, for all sequences that hold them."""
    runs = step.step.plans[0].tree.queries
    rows = np.cumsum(runs.end - runs.begin) - runs.end  # of each node, the row of its token 0
    for sample in samples:
        own = kv.setdefault(sample.id, {})
        for node in (node for node in sample.path() if node in step.nodes):
            run = step.nodes.index(node)
            for at in range(runs.begin[run], runs.end[run]):
                own.setdefault(node.start + at, torch.stack([of[rows[run] + at] for of in new]))


def test_every_row_of_a_step_is_that_of_the_oracle() -> None:
    """Inner rows too, under a bias by distance, which is the distance in the cache."""
    nearer = prefixkit.variant(lambda score, b, h, q_idx, kv_idx: score - 0.05 * (q_idx - kv_idx))
    for seed in range(6):
        print("seed", seed)
        rng = np.random.default_rng(seed)
        sinks, window = int(rng.integers(1, 12)), int(rng.integers(1, 20))
        variant = compose(streaming(sinks, window), nearer)
        texts, pool, plain = (
            Texts(rng, sinks, window, torch.float32),
            pool_of(torch.float32, 4),
            pool_of(torch.float32, 4),
        )
        attention, raw = prefixkit.TreeAttention(pool, HEADS, variant), prefixkit.TreeAttention(plain, HEADS)
        prefix = rng.integers(0, VOCAB, int(rng.integers(1, 30)))
        prompts = [np.append(prefix, rng.integers(0, VOCAB, int(rng.integers(1, 30)))) for _ in range(4)]
        tree, samples = prefixkit.tree_from_tokens(pool, prompts)
        step = prefixkit.plan(attention, tree, samples)
        q, *kv = (texts.numbers(step.num_rows, heads) for heads in (HEADS, KV_HEADS, KV_HEADS))
        for each in (step, prefixkit.plan(raw, tree, samples)):
            prefixkit.append(each, 0, *kv)
        out, lse = prefixkit.attend(step, 0, q)
        batch = step.step.plans[0].tree
        where = batch.snapshot, batch.queries.row_node(), batch.positions
        exact = reference_attention(*where, q, *plain.pages(0), DIM**-0.5, variant)
        torch.testing.assert_close(out.double(), exact.out, rtol=0, atol=3e-6)
        torch.testing.assert_close(lse.double(), exact.lse, rtol=0, atol=1e-5)


def test_a_step_counts_what_both_parts_read() -> None:
    pool = pool_of(torch.float32, 4)
    attention = prefixkit.TreeAttention(pool, HEADS, streaming(4, 16))
    tree, (one, other) = prefixkit.tree_from_tokens(pool, [[*range(50), 1], [*range(50), 2]])
    prefixkit.commit(prefixkit.plan(attention, tree, [one, other]))
    tree.extend_each([one, other], [3, 4])
    step = prefixkit.plan(attention, tree, [one, other])
    assert step.kv_tokens[1] == 2 * (4 + 16) and step.kv_tokens[0] in (4 + 14 + 2 * 2, 2 * (4 + 16))


def test_pages_are_given_back_of_what_has_a_window_alone() -> None:
    pool = pool_of(torch.float32, 4)
    windowed, whole = (prefixkit.TreeAttention(pool, HEADS, *of) for of in ((variants.sliding_window(5),), ()))
    tree, samples = prefixkit.tree_from_tokens(pool, [range(40)])
    with pytest.raises(ValueError, match="under variant 'causal' later queries may see all tokens"):
        prefixkit.release_unseen(whole, tree, samples)
    assert prefixkit.release_unseen(windowed, tree, samples) == 0, "nothing has KV"
    step = prefixkit.plan(windowed, tree, samples)
    prefixkit.commit(step)
    assert prefixkit.release_unseen(windowed, tree, samples) == 8 and samples[0].length == 40
    assert prefixkit.plan(windowed, tree, samples, 4).num_rows == 4
    with pytest.raises(
        ValueError, match=r"a query at position 35 sees tokens from position 31 on, .* 0 to 31 were given"
    ):
        prefixkit.plan(windowed, tree, samples, 5)
    with pytest.raises(ValueError, match=r"from position 31 on, but those before 32 were given back .* at most 8"):
        prefixkit.plan(windowed, tree, samples, 9)
    tree.trim(samples[0], 35)
    tree.extend(samples[0], [7])
    with pytest.raises(ValueError, match="a query at position 35 sees tokens from position 31 on"):
        prefixkit.plan(windowed, tree, samples)
    tree.release(samples[0])
    with pytest.raises(ValueError, match="has been released"):
        prefixkit.release_unseen(windowed, tree, samples)


@pytest.mark.parametrize(
    "other", [variants.document(torch.zeros(4, dtype=torch.int64)), variants.sigmoid(), variants.streaming_llm(4, 8)]
)
def test_what_cannot_stand_beside_positions_in_the_cache_is_refused(other: Variant) -> None:
    with pytest.raises(BadVariant, match="moves positions together"):
        compose(variants.streaming_llm(4, 16), other)


@pytest.mark.parametrize("arguments", [(0, 4), (4, 0), (4.0, 4)])
def test_sizes_are_checked(arguments: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match=r"streaming_llm: (sinks|window) must be an integer of at least 1"):
        variants.streaming_llm(*arguments)
