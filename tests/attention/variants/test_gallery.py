"""The gallery: what each variant shows and computes, against FlexAttention, against loops, and over trees."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

import prefixkit
from prefixkit import variants
from prefixkit.attention.queries import Queries
from prefixkit.attention.variants import Variant, compose, register, variant
from prefixkit.testing.forests import SHARE_NONE, Case, attend, fill, make_snapshot, plan_of, random_case, random_plan
from prefixkit.testing.random_variants import fitting
from tests.attention.torch_errors import Errors, Truth, check_forests

SEQUENCES, HEADS, LENGTH, TREES = 3, 4, 96, 8
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
IDS = torch.randint(0, 4, (LENGTH,))  # documents whose tokens do not lie together
ROWS_OF_IDS, LENGTHS = torch.randint(0, 3, (SEQUENCES, LENGTH)), torch.tensor([0, 7, 40])
SLOPES = torch.rand(HEADS)
PARENTS = [-1, 0, 0, 2, 1, -1, 3, 5, 2]
SEES = torch.eye(len(PARENTS)).bool()
for draft, parent in enumerate(PARENTS):
    SEES[draft] |= SEES[parent] if parent >= 0 else False
BSR = torch.tensor([0, 2, 3, 3, 6]), torch.tensor([0, 3, 2, 1, 2, 5])  # row 2 sees nothing
BLOCKS = torch.zeros(4, 6).bool()
BLOCKS[[0, 0, 1, 3, 3, 3], [0, 3, 2, 1, 2, 5]] = True


def later(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (kv - q) % 3 == h % 3


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return kv <= q


@dataclass(frozen=True)
class Entry:
    """A variant, and the same as one writes it for FlexAttention."""

    make: Callable[[], Variant]
    mask: Callable[..., Any] = causal
    score: Callable[..., Any] | None = None
    sees_all: bool = True  # no query sees nothing


ENTRIES: dict[str, Entry] = {
    "causal": Entry(variants.causal),
    "full": Entry(variants.full, lambda b, h, q, kv: kv >= 0),
    "alibi": Entry(lambda: variants.alibi(SLOPES), score=lambda s, b, h, q, kv: s - SLOPES[h] * (q - kv)),
    "sliding window": Entry(lambda: variants.sliding_window(9), lambda b, h, q, kv: (q >= kv) & (q - kv < 9)),
    "chunked": Entry(lambda: variants.chunked(9), lambda b, h, q, kv: (q >= kv) & (q // 9 == kv // 9)),
    "soft cap": Entry(lambda: variants.soft_cap(2.0), score=lambda s, b, h, q, kv: 2 * torch.tanh(s / 2)),
    "prefix LM": Entry(lambda: variants.prefix_lm(21), lambda b, h, q, kv: (q >= kv) | (kv < 21)),
    "prefix LM by sequence": Entry(
        lambda: variants.prefix_lm(LENGTHS), lambda b, h, q, kv: (q >= kv) | (kv < LENGTHS[b])
    ),
    "documents": Entry(lambda: variants.document(IDS), lambda b, h, q, kv: (q >= kv) & (IDS[q] == IDS[kv])),
    "documents both ways": Entry(
        lambda: variants.document(ROWS_OF_IDS, causal=False),
        lambda b, h, q, kv: ROWS_OF_IDS[b, q] == ROWS_OF_IDS[b, kv],
    ),
    "dilated": Entry(
        lambda: variants.dilated_window(5, 3), lambda b, h, q, kv: (q >= kv) & (q - kv <= 12) & ((q - kv) % 3 == 0)
    ),
    "streaming": Entry(lambda: variants.streaming(4, 10), lambda b, h, q, kv: (q >= kv) & ((kv < 4) | (q < kv + 10))),
    "draft tree": Entry(
        lambda: variants.draft_tree(PARENTS, LENGTH - len(PARENTS)),
        lambda b, h, q, kv: torch.where(
            (q >= 87) & (kv >= 87), SEES[(q - 87).clamp(min=0), (kv - 87).clamp(min=0)], q >= kv
        ),
    ),
    "NATTEN": Entry(
        lambda: variants.natten_1d(LENGTH, 7),
        lambda b, h, q, kv: (kv - q.clamp(3, LENGTH - 4)).abs() <= 3,
    ),
    "NATTEN 2D": Entry(
        lambda: variants.natten_2d(8, 12, (3, 5), tile=(4, 3)),
        lambda b, h, q, kv: natten_of(q, kv, variants.tile_order(8, 12, (4, 3))[0]),
    ),
    "blocks": Entry(
        lambda: variants.block_mask(*BSR, 24, 16), lambda b, h, q, kv: BLOCKS[q // 24, kv // 16], sees_all=False
    ),
    "causal blocks": Entry(
        lambda: variants.block_mask(BSR[0].tolist(), BSR[1].tolist(), 24, 16, causal=True),
        lambda b, h, q, kv: (q >= kv) & BLOCKS[q // 24, kv // 16],
        sees_all=False,
    ),
    "BlockMask": Entry(lambda: variants.from_block_mask(block_mask_of(later, None, HEADS)), later),
    "torch's and, or, and not": Entry(
        lambda: variant(
            mask_mod=variants.and_masks(
                variants.or_masks(causal, later), variants.not_mask(variants.as_mask_mod(variants.sliding_window(3)))
            )
        ),
        lambda b, h, q, kv: ((q >= kv) | later(b, h, q, kv)) & ~((q >= kv) & (q - kv < 3)),
    ),
}
EACH = pytest.mark.parametrize("name", ENTRIES)


def natten_of(q: Tensor, kv: Tensor, order: Tensor) -> Tensor:
    """A neighborhood of 3 x 5 on a canvas of 8 x 12, of tokens in an order."""
    near = torch.ones((), dtype=torch.bool)
    for half, size, place in ((1, 8, order // 12), (2, 12, order % 12)):
        near = near & ((place[kv] - place[q].clamp(half, size - 1 - half)).abs() <= half)
    return near


def block_mask_of(mask: Callable[..., Any], sequences: int | None, heads: int | None) -> Any:
    return create_block_mask(mask, sequences, heads, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=(32, 16))


def shown(of: Variant) -> Tensor:
    return create_mask(variants.as_mask_mod(of), SEQUENCES, HEADS, LENGTH, LENGTH, device="cpu")


@EACH
def test_it_shows_what_flex_attention_shows(name: str) -> None:
    """By the function itself, and by the expression that was traced."""
    entry, (b, h, idx) = ENTRIES[name], map(torch.arange, (SEQUENCES, HEADS, LENGTH))
    of = entry.make()
    theirs = create_mask(entry.mask, SEQUENCES, HEADS, LENGTH, LENGTH, device="cpu")
    assert torch.equal(shown(of), theirs)
    places = b[:, None, None, None], h[:, None, None], idx[:, None], idx
    traced = of.shows(*places) if of.looks_ahead else of.shows(*places) & (idx <= idx[:, None])
    assert torch.equal(traced.expand(theirs.shape), theirs)
    assert of.looks_ahead == bool(theirs.triu(1).any())
    assert bool(theirs.any(dim=-1).all()) == entry.sees_all


def prompts(dtype: torch.dtype) -> Case:
    """Whole sequences that share nothing."""
    rng = np.random.default_rng(int(torch.randint(1 << 30, ())))
    snapshot, pages = make_snapshot(rng, [-1] * SEQUENCES, [LENGTH] * SEQUENCES, 16)
    node = np.arange(SEQUENCES, dtype=np.int32)
    queries = Queries(node, 0 * node, 0 * node + LENGTH, node)
    return fill(rng, snapshot, pages, queries, (HEADS, 2, 32), dtype)


@pytest.mark.drawn(5)
@EACH
@DTYPES
def test_a_batch_of_prompts_is_as_exact_as_flex_attention(name: str, dtype: torch.dtype) -> None:
    entry, case = ENTRIES[name], prompts(dtype)
    node = np.repeat(np.arange(SEQUENCES), LENGTH)
    slots = torch.from_numpy(case.snapshot.slots(node, np.tile(np.arange(LENGTH), SEQUENCES)))
    rows = case.q, *(pages.flatten(0, 1)[slots] for pages in (case.k_pages, case.v_pages))
    q, k, v = (each.view(SEQUENCES, LENGTH, -1, 32).transpose(1, 2) for each in rows)
    blocks = create_block_mask(entry.mask, SEQUENCES, HEADS, LENGTH, LENGTH, device="cpu")

    def flex(*states: Tensor) -> Tensor:
        # It would rather be compiled, and is traced for that even where nothing compiles it.
        with warnings.catch_warnings(action="ignore"), torch.compiler.set_stance("force_eager"):
            return flex_attention(*states, score_mod=entry.score, block_mask=blocks, enable_gqa=True)

    exact, theirs = (flex(q.to(of), k.to(of), v.to(of)).double() for of in (torch.float64, dtype))
    ours = attend(case, plan_of(case, SHARE_NONE), register(of := entry.make()))[0].double()
    ours = ours.view(SEQUENCES, LENGTH, HEADS, 32).transpose(1, 2)
    assert of.name  # alive during the call
    errors = [(each - exact).square().mean().sqrt() for each in (ours, theirs)]
    assert errors[0] <= 1.5 * errors[1], errors


@DTYPES
def test_trees_within_torchs_error(dtype: torch.dtype) -> None:
    """Some trees for each entry, in turn."""
    entries = [entry.make() for entry in ENTRIES.values()]

    def judge(errors: Errors, seed: int) -> None:
        rng, of = np.random.default_rng(seed), entries[seed % len(entries)]
        case = random_case(rng, dtype, (HEADS, 2, 32))
        while int((case.snapshot.start + case.snapshot.length).max()) > LENGTH:
            case = random_case(rng, dtype, (HEADS, 2, 32))
        case = fitting(rng, case, of, SEQUENCES)
        errors.add(seed, Truth.of(case, of), *attend(case, random_plan(rng, case), register(of)))

    check_forests(judge, TREES * len(entries), first=int(torch.randint(1 << 30, ())))


@pytest.mark.parametrize(("height", "width", "kernel", "tile"), [(6, 8, (3, 5), (3, 2)), (5, 7, 5, 1), (8, 8, 7, 4)])
def test_natten_in_two_dimensions_is_what_its_loop_says(height: int, width: int, kernel: Any, tile: Any) -> None:
    """The beginning of a neighborhood as the NATTEN library computes it, in its CPU kernels."""
    of, (order, inverse) = (
        variants.natten_2d(height, width, kernel, tile=tile),
        variants.tile_order(height, width, tile),
    )
    tall, wide = kernel if isinstance(kernel, tuple) else (kernel, kernel)

    def begin(index: int, size: int, length: int) -> int:
        half = size // 2
        return max(index - half, 0) + (index + half >= length) * (length - index - half - 1)

    expected = torch.zeros(height * width, height * width, dtype=torch.bool)
    for y in range(height):
        for x in range(width):
            for row in range(begin(y, tall, height), begin(y, tall, height) + tall):
                for column in range(begin(x, wide, width), begin(x, wide, width) + wide):
                    expected[y * width + x, row * width + column] = True
    got = create_mask(variants.as_mask_mod(of), 1, 1, height * width, height * width, device="cpu")[0, 0]
    assert torch.equal(got[inverse][:, inverse], expected)
    assert torch.equal(expected[order][:, order], got) and torch.equal(order[inverse], torch.arange(height * width))
    assert bool((expected.sum(1) == tall * wide).all()), "every token sees equally many"


def test_tokens_of_a_tile_lie_together() -> None:
    order, _ = variants.tile_order(4, 6, (2, 3))
    assert order.view(4, 6).tolist()[:2] == [[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]]


@pytest.mark.parametrize("sequences", [None, SEQUENCES])
@pytest.mark.parametrize("heads", [None, HEADS])
def test_a_block_mask_of_any_dimensions(sequences: int | None, heads: int | None) -> None:
    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        found = (q - kv < 20) & (kv <= q)
        found = found if sequences is None else found & (kv % (b + 2) == 0)
        return found if heads is None else found & (q % (h + 2) == 0)

    of = variants.from_block_mask(block_mask_of(mask, sequences, heads))
    assert torch.equal(shown(of), create_mask(mask, SEQUENCES, HEADS, LENGTH, LENGTH, device="cpu"))
    assert not of.looks_ahead, "a causal BlockMask is seen to be causal"


def test_full_blocks_are_shown_whatever_the_mask_mod_says() -> None:
    """As in FlexAttention's kernels, and with arrays of two dimensions."""
    from torch.nn.attention.flex_attention import BlockMask

    one, none = torch.ones(3, 1, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    blocks = BlockMask.from_kv_blocks(
        none + 1, 0 * one, none + 1, one, BLOCK_SIZE=32, mask_mod=causal, seq_lengths=(LENGTH, LENGTH)
    )
    found = shown(variants.from_block_mask(blocks))[0, 0]
    assert bool(found[:, 32:64].all()) and not bool(found[:, 64:].any())
    assert torch.equal(found[:, :32], torch.ones(LENGTH, 32).tril().bool())


def test_a_change_in_place_of_what_is_captured_shows() -> None:
    ids, first = torch.zeros(LENGTH, dtype=torch.int32), torch.full((SEQUENCES,), 80)
    by_ids, drafts = variants.document(ids, causal=False), variants.draft_tree(PARENTS, first)
    assert bool(shown(by_ids).all()) and not bool(shown(drafts)[0, 0, 88, 86]), "drafts 8 and 6 are of two branches"
    versions = by_ids.versions
    ids[LENGTH // 2 :] = 1
    first += 7
    assert not bool(shown(by_ids)[0, 0, 0, -1]) and by_ids.versions != versions
    assert bool(shown(drafts)[0, 0, 88, 86]), "the context is longer now"


def test_variants_are_found_by_their_names() -> None:
    assert prefixkit.variants is variants and "variants" in dir(prefixkit)
    assert variants.causal() is prefixkit.CAUSAL
    assert variants.streaming(4, 9) is variants.streaming(4, 9)
    assert compose(variants.document(IDS), variants.soft_cap(3.0)).score_mods


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: variants.prefix_lm(0), "prefix_lm: length must be an integer of at least 1, got 0"),
        (lambda: variants.prefix_lm(torch.ones(2, 2).long()), r"prefix_lm: length must have 1 dimensions"),
        (lambda: variants.prefix_lm(torch.ones(2)), r"prefix_lm: length must hold integers, got torch.float32"),
        (lambda: variants.document([0, 1]), "document: ids must be a tensor of integers, got list"),  # type: ignore[arg-type]
        (lambda: variants.document(torch.ones(3, dtype=torch.bool)), "document: ids must hold integers"),
        (lambda: variants.document(torch.ones(1, 2, 3).long()), r"document: ids must have 1 or 2 dimensions"),
        (lambda: variants.document(torch.ones(0).long()), "document: ids .* an element"),
        (lambda: variants.dilated_window(0, 1), "dilated_window: size"),
        (lambda: variants.dilated_window(1, 0), "dilated_window: dilation"),
        (lambda: variants.streaming(-1, 1), "streaming: sinks must be an integer of at least 0"),
        (lambda: variants.streaming(1, 0), "streaming: window"),
        (lambda: variants.draft_tree([], 3), "draft_tree: parents must name at least one draft"),
        (lambda: variants.draft_tree([-1, 1], 3), "draft_tree: draft 1's parent must be an earlier draft or -1, got 1"),
        (lambda: variants.draft_tree([-2], 3), "draft_tree: draft 0's parent"),
        (lambda: variants.draft_tree([-1], -1), "draft_tree: context"),
        (lambda: variants.draft_tree([-1], torch.zeros(1)), "draft_tree: context must hold integers"),
        (lambda: variants.natten_1d(8, 4), "natten_1d: kernel must be odd and at most the length, 8, got 4"),
        (lambda: variants.natten_1d(8, 9), "natten_1d: kernel must be odd and at most the length"),
        (lambda: variants.natten_2d(8, 9, 3), "natten_2d: tiles must divide the width, 9, got 8; pad the canvas"),
        (lambda: variants.natten_2d(8, 8, (3, 2)), "natten_2d: kernel must be odd and at most the width"),
        (lambda: variants.tile_order(9, 8), "tile_order: tiles must divide the height, 9"),
        (lambda: variants.block_mask([0, 1], [0], 0, 1), "block_mask: q_block"),
        (lambda: variants.block_mask([0, 1], [0], 1, 0), "block_mask: kv_block"),
        (lambda: variants.block_mask([[0, 1]], [0], 1, 1), "block_mask: indptr and indices must have one"),  # type: ignore[list-item]
        (lambda: variants.block_mask([1, 1], [0], 1, 1), "block_mask: .* indptr begin with 0"),
        (lambda: variants.block_mask([0, 2, 1], [0], 1, 1), "block_mask: indptr must ascend to the 1 entries"),
        (lambda: variants.block_mask([0, 1.5], [0], 1, 1), "block_mask: indptr and indices must be integers"),
        (lambda: variants.block_mask([0, 1], [-1], 1, 1), "block_mask: indices must be blocks of keys from 0 on"),
    ],
)
def test_impossible_parameters_are_refused_by_name(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_what_is_no_mask_is_refused_by_its_type() -> None:
    with pytest.raises(TypeError, match="not_mask: mask_mod must be a function, got Variant"):
        variants.not_mask(variants.causal())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="from_block_mask: need a BlockMask, got Tensor"):
        variants.from_block_mask(torch.zeros(3))  # type: ignore[arg-type]


def test_what_lies_beyond_bsr_arrays_is_hidden() -> None:
    of = variants.block_mask([0, 1], [0], 8, 8)
    found = shown(of)[0, 0]
    assert int(found.sum()) == 64 and bool(found[:8, :8].all())
    assert replace(of, name="none").looks_ahead
