"""Variants: what they are made of, how they compose, and what their keys tell apart."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

from prefixkit.attention.variants import (
    CAUSAL,
    BadVariant,
    ForeignTensor,
    UnknownVariant,
    Variant,
    alibi,
    attention_sinks,
    chunked,
    compose,
    lookup,
    register,
    sigmoid,
    sliding_window,
    soft_cap,
    variant,
)
from prefixkit.attention.variants.gallery import as_mask_mod, streaming, streaming_llm

HEADS, ROWS, LENGTH = 4, 5, 9


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def prefix(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return kv_idx < 3


@pytest.fixture
def where() -> tuple[Tensor, ...]:
    """Sequences, heads, and positions of queries and keys, shaped as every caller shapes them."""
    b, h = torch.zeros(1, 1, dtype=torch.int64), torch.arange(HEADS)[:, None, None]
    return b, h, torch.arange(4, 4 + ROWS)[:, None], torch.arange(LENGTH)[None, :]


@pytest.fixture
def score() -> Tensor:
    return 10 * torch.randn(HEADS, ROWS, LENGTH)


def shown(of: Variant, where: tuple[Tensor, ...], row: int) -> list[int]:
    """Positions up to the query that it sees, in head 0."""
    q = int(where[2][row])
    return [kv for kv in range(min(q + 1, LENGTH)) if of.shows(*where).expand(HEADS, ROWS, LENGTH)[0, row, kv]]


def test_sliding_window_shows_the_last_tokens(where: tuple[Tensor, ...]) -> None:
    for row, q in enumerate(range(4, 4 + ROWS)):
        assert shown(sliding_window(3), where, row) == [kv for kv in (q - 2, q - 1, q) if kv < LENGTH]
    assert sliding_window(3).window == 3 and not sliding_window(3).looks_ahead


def test_chunked_shows_the_tokens_of_a_chunk(where: tuple[Tensor, ...]) -> None:
    for row, q in enumerate(range(4, 4 + ROWS)):
        assert shown(chunked(3), where, row) == [kv for kv in range(q // 3 * 3, q + 1) if kv < LENGTH]
    assert chunked(3).chunk == 3 and not chunked(3).looks_ahead


def test_soft_cap_bounds_scores(where: tuple[Tensor, ...], score: Tensor) -> None:
    torch.testing.assert_close(soft_cap(2.5).change(score, *where), 2.5 * torch.tanh(score / 2.5))


def test_alibi_subtracts_slope_times_distance(where: tuple[Tensor, ...], score: Tensor) -> None:
    slopes = torch.rand(HEADS)
    changed = alibi(slopes).change(score, *where)
    for head in range(HEADS):
        for row in range(ROWS):
            for kv in range(LENGTH):
                expected = score[head, row, kv] - slopes[head] * (4 + row - kv)
                torch.testing.assert_close(changed[head, row, kv], expected)


def test_compose_applies_score_mods_in_order_and_joins_the_rest(where: tuple[Tensor, ...], score: Tensor) -> None:
    a, b = alibi(torch.rand(HEADS)), soft_cap(3.0)
    both = compose(a, sliding_window(4), b, sliding_window(2), attention_sinks())
    assert torch.equal(both.change(score, *where), b.change(a.change(score, *where), *where))
    assert not torch.equal(both.change(score, *where), a.change(b.change(score, *where), *where))
    assert torch.equal(both.shows(*where), sliding_window(2).shows(*where))
    assert both.window == 2 and both.has_sinks and not compose(a, b).has_sinks


def test_sigmoid_weights_come_after_all_other_changes(where: tuple[Tensor, ...], score: Tensor) -> None:
    both = compose(sigmoid(), soft_cap(3.0))
    assert both.sums and torch.equal(
        both.change(score, *where), compose(soft_cap(3.0), sigmoid()).change(score, *where)
    )
    expected = torch.nn.functional.logsigmoid(soft_cap(3.0).change(score, *where))
    torch.testing.assert_close(both.change(score, *where), expected)
    with pytest.raises(BadVariant, match="sinks join the sum"):
        compose(sigmoid(), attention_sinks())
    with pytest.raises(TypeError, match=r"compose: variants must be Variants, one argument each, got list \[Variant"):
        compose([sigmoid(), soft_cap(3.0)])  # type: ignore[arg-type]


@pytest.mark.parametrize("bounded", [sliding_window, chunked])
def test_what_is_composed_shows_later_keys_where_every_mask_does(
    where: tuple[Tensor, ...], bounded: Callable[..., Variant]
) -> None:
    """Torch's ``and_masks`` of the parts, with the causality that attention adds to those that do not look ahead."""
    ahead = variant(mask_mod=or_masks(causal, prefix))
    for part, others in ((bounded(3), True), (bounded(3, causal=False), False)):
        both = compose(part, alibi(torch.rand(HEADS)), ahead)
        assert both.looks_ahead != others
        shown = and_masks(*(as_mask_mod(each) for each in (part, ahead)))(*where)
        assert torch.equal(as_mask_mod(both)(*where).expand_as(shown), shown)
    assert compose(ahead, alibi(torch.rand(HEADS))).looks_ahead and compose(ahead, CAUSAL) is ahead


def test_positions_in_the_cache_show_what_sinks_and_window_in_the_sequence_do(where: tuple[Tensor, ...]) -> None:
    llm, plain = (as_mask_mod(of(2, 3))(*where) for of in (streaming_llm, streaming))
    assert torch.equal(llm, plain)
    with pytest.raises(BadVariant, match="moves positions together"):
        compose(streaming_llm(2, 3), streaming_llm(2, 3))


def test_compose_of_nothing_is_causal() -> None:
    assert compose() is CAUSAL
    assert compose(CAUSAL, CAUSAL) is CAUSAL
    assert compose(CAUSAL, sliding_window(3)) is sliding_window(3)


def test_a_causal_mask_is_causal_attention() -> None:
    """As torch's ``and_masks`` joins it with others too: no key is then compared twice."""
    assert variant(mask_mod=causal).mask_mods == ()
    joined = variant(mask_mod=and_masks(causal, lambda b, h, q, kv: q - kv < 5))
    assert joined.window == 5 and not joined.looks_ahead


def test_a_mask_that_does_not_hide_what_follows_looks_ahead() -> None:
    """A mask is taken as it is; composed with others it still looks ahead."""
    for mask in (noop_mask, prefix, or_masks(causal, prefix), lambda b, h, q, kv: (q - kv).abs() < 4):
        assert variant(mask_mod=mask).looks_ahead
    assert not variant(score_mod=lambda s, b, h, q, kv: s * 2).looks_ahead, "without a mask attention is causal"
    assert variant(mask_mod=causal, traced=False).looks_ahead, "what is not traced may do anything"


def test_what_is_not_traced_is_called_as_it_is(where: tuple[Tensor, ...], score: Tensor) -> None:
    """Elementwise on 0-d tensors: any function of torch, and indices step by step."""
    table = torch.rand(HEADS, 3)

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return s + torch.special.erf(s) * table[h][kv % 3]

    of = variant(score_mod, traced=False)
    assert not of.traced
    expected = score + torch.special.erf(score) * table[:, where[3][0] % 3][:, None]
    torch.testing.assert_close(of.change(score, *where), expected)


@pytest.mark.parametrize(
    ("score_mod", "reads"),
    [
        (lambda s, b, h, q, kv: torch.special.erf(s), False),
        (lambda s, b, h, q, kv: s + torch.zeros((), device=b.device, dtype=b.dtype), False),
        (lambda s, b, h, q, kv: s / (q // h), False),  # which zeros cannot be given
        (lambda s, b, h, q, kv: s + torch.special.erf(b), True),
        (lambda s, b, h, q, kv: s + torch.ones(5)[b], True),
        (lambda s, b, h, q, kv: torch.where(b == q, s, 0.0), True),
        (lambda s, b, h, q, kv: s + 1 - b, True),
        (lambda s, b, h, q, kv: undefined(s), True),  # type: ignore[name-defined]  # noqa: F821  # may do anything
    ],
)
def test_whether_a_function_that_is_not_traced_reads_b_is_known(score_mod: Callable[..., Tensor], reads: bool) -> None:
    assert variant(score_mod, traced=False).reads("b") == reads


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: sliding_window(0), ValueError, "sliding_window: size"),
        (lambda: sliding_window(2.0), ValueError, "sliding_window: size"),  # type: ignore[arg-type]
        (lambda: sliding_window(True), ValueError, "sliding_window: size"),
        (lambda: chunked(0), ValueError, "chunked: size"),
        (lambda: chunked(2.0), ValueError, "chunked: size"),  # type: ignore[arg-type]
        (lambda: soft_cap(0.0), ValueError, "soft_cap: cap"),
        (lambda: soft_cap(float("nan")), ValueError, "soft_cap: cap"),
        (lambda: soft_cap(float("inf")), ValueError, "soft_cap: cap"),
        (lambda: alibi(torch.zeros(2, 2)), ValueError, "alibi: slopes"),
        (lambda: alibi([]), ValueError, "alibi: slopes"),
        (lambda: alibi([1.0, float("nan")]), ValueError, "alibi: slopes"),
        (lambda: variant(), BadVariant, "got no function"),
        (lambda: variant(3), BadVariant, "score_mod must be a function, got int 3"),  # type: ignore[arg-type]
        (lambda: variant(lambda s, h: s), BadVariant, r"must take 5 arguments, \(score, b, h, q_idx, kv_idx\)"),
        (lambda: variant(mask_mod=lambda q, kv: q > kv), BadVariant, r"must take 4 arguments, \(b, h, q_idx, kv_idx\)"),
        (lambda: variant(mask_mod=lambda b, h, q, kv: q - kv), BadVariant, "must return a bool, .* returns int"),
        (lambda: variant(lambda s, b, h, q, kv: s > 0), BadVariant, "must return a float, .* returns bool"),
    ],
)
def test_impossible_variants_are_refused(
    make: functools.partial[Variant], error: type[ValueError], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()


def test_a_tensor_on_another_device_is_refused_where_scores_are() -> None:
    away = torch.zeros(4, device="meta")
    with pytest.raises(ForeignTensor, match=r"shape \[4\] on meta, but its scores are on cpu"):
        variant(lambda s, b, h, q, kv: s + away[h]).change(torch.zeros(()), *torch.zeros(4, dtype=torch.int64))


def test_registering_twice_gives_one_key() -> None:
    slopes = torch.rand(4)
    for make in (
        lambda: CAUSAL,
        lambda: sliding_window(7),
        lambda: chunked(7),
        lambda: soft_cap(50),
        lambda: alibi(slopes),
        attention_sinks,
        lambda: compose(sliding_window(7), alibi(slopes.tolist()), attention_sinks()),
    ):
        kept = make()
        assert register(make()) == register(kept)
        assert lookup(register(kept)).name == kept.name


def test_equal_functions_have_one_key_whoever_wrote_them() -> None:
    def mine(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q - kv < 7) & (kv <= q)

    assert register(variant(mask_mod=mine, name="sliding_window(7)")) == register(sliding_window(7))


def test_different_parameters_give_different_keys() -> None:
    slopes = torch.rand(4)
    nearly = slopes.clone()
    nearly[2] = torch.nextafter(nearly[2], torch.tensor(2.0))
    variants = [
        CAUSAL,
        sliding_window(7),
        sliding_window(8),
        chunked(7),
        chunked(8),
        soft_cap(7.0),
        soft_cap(8.0),
        soft_cap(7.0000001),  # the same name, for people
        alibi(slopes),
        alibi(nearly),
        attention_sinks(),
        compose(soft_cap(7.0), attention_sinks()),
        compose(soft_cap(7.0), alibi(slopes)),
        compose(alibi(slopes), soft_cap(7.0)),
        compose(soft_cap(7.0), alibi(slopes), sliding_window(7)),
        variant(mask_mod=lambda b, h, q, kv: q - kv < 7, name="causal"),
        variant(mask_mod=lambda b, h, q, kv: q - kv < 8, name="causal"),
        variant(lambda s, b, h, q, kv: s + slopes[h]),
        variant(lambda s, b, h, q, kv: s + slopes[h]),  # its own captured tensor, for what is known of it
    ]
    keys = [register(each) for each in variants]
    assert len(set(keys)) == len(variants), keys
    for key, each in zip(keys, variants, strict=True):
        found = lookup(key)  # of variants without captured tensors, the first that does the same
        assert found is each if each.serials else register(found) == key


def test_a_variant_that_captures_tensors_is_freed_with_them() -> None:
    table = torch.rand(4)
    of = variant(lambda s, b, h, q, kv: s + table[h])
    key = register(compose(of, soft_cap(3.0)))
    gc.collect()
    with pytest.raises(UnknownVariant, match="keep a variant that captures tensors"):
        lookup(key)


def test_alibi_keeps_its_own_copy_of_slopes() -> None:
    slopes = torch.rand(4)
    key = register(alibi(slopes))
    before = slopes.clone()
    slopes.zero_()
    assert register(alibi(before)) == key
    assert register(alibi(slopes)) != key


def test_content_counts_captured_numbers_and_is_equal_for_equal_ones() -> None:
    def make(table: Tensor) -> Variant:
        return variant(lambda s, b, h, q, kv: s + table[h])

    table = torch.rand(4)
    of = make(table)
    assert of.content() == make(table.clone()).content() != make(table + 1).content()
    before, versions = of.content(), of.versions
    table += 1
    assert of.content() != before and of.versions != versions
