"""Variants: what each does, in five lines of plain torch; what their keys tell apart."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from prefixkit.attention.variants import (
    CAUSAL,
    Body,
    UnknownVariant,
    Variant,
    alibi,
    attention_sinks,
    chunked,
    compose,
    lookup,
    register,
    sliding_window,
    soft_cap,
)
from prefixkit.backends.cuda.variant_header import on_device

HEADS, ROWS, LENGTH = 4, 5, 9


@pytest.fixture
def where() -> tuple[Tensor, Tensor, Tensor]:
    """Positions of queries and keys, and heads, shaped as every caller shapes them."""
    return torch.arange(4, 4 + ROWS)[:, None], torch.arange(LENGTH)[None, :], torch.arange(HEADS)[:, None, None]


@pytest.fixture
def score() -> Tensor:
    return 10 * torch.randn(HEADS, ROWS, LENGTH)


def test_sliding_window_shows_the_last_tokens(where: tuple[Tensor, Tensor, Tensor]) -> None:
    variant = sliding_window(3)
    assert variant.mask_mod is not None
    for row, q in enumerate(range(4, 4 + ROWS)):
        shown = [kv for kv in range(LENGTH) if variant.mask_mod(*where)[row, kv] and kv <= q]
        assert shown == [kv for kv in (q - 2, q - 1, q) if kv < LENGTH]
    assert variant.window == 3


def test_chunked_shows_the_tokens_of_a_chunk(where: tuple[Tensor, Tensor, Tensor]) -> None:
    variant = chunked(3)
    assert variant.mask_mod is not None and variant.chunk == 3
    for row, q in enumerate(range(4, 4 + ROWS)):
        shown = [kv for kv in range(LENGTH) if variant.mask_mod(*where)[row, kv] and kv <= q]
        assert shown == [kv for kv in range(q // 3 * 3, q + 1) if kv < LENGTH]
    (body,) = variant.bodies or ()
    assert body.mask == "q_position / __float_as_int(p[0]) == kv_position / __float_as_int(p[0])"
    assert body.parameters.view(torch.int32).tolist() == [3]


def test_soft_cap_bounds_scores(where: tuple[Tensor, Tensor, Tensor], score: Tensor) -> None:
    variant = soft_cap(2.5)
    assert variant.score_mod is not None
    torch.testing.assert_close(variant.score_mod(score, *where), 2.5 * torch.tanh(score / 2.5))


def test_alibi_subtracts_slope_times_distance(where: tuple[Tensor, Tensor, Tensor], score: Tensor) -> None:
    slopes = torch.rand(HEADS)
    variant = alibi(slopes)
    assert variant.score_mod is not None
    changed = variant.score_mod(score, *where)
    for head in range(HEADS):
        for row in range(ROWS):
            for kv in range(LENGTH):
                expected = score[head, row, kv] - slopes[head] * (4 + row - kv)
                torch.testing.assert_close(changed[head, row, kv], expected)


def test_compose_applies_score_mods_in_order_and_joins_the_rest(
    where: tuple[Tensor, Tensor, Tensor], score: Tensor
) -> None:
    slopes = torch.rand(HEADS)
    a, b = alibi(slopes), soft_cap(3.0)
    both = compose(a, sliding_window(4), b, sliding_window(2), attention_sinks())
    assert both.score_mod is not None and both.mask_mod is not None and both.has_sinks
    assert a.score_mod is not None and b.score_mod is not None
    assert torch.equal(both.score_mod(score, *where), b.score_mod(a.score_mod(score, *where), *where))
    assert not torch.equal(both.score_mod(score, *where), a.score_mod(b.score_mod(score, *where), *where))
    narrow = sliding_window(2).mask_mod
    assert narrow is not None
    assert torch.equal(both.mask_mod(*where), narrow(*where))
    assert both.window == 2
    assert not compose(a, b).has_sinks
    assert compose(attention_sinks(), attention_sinks()).has_sinks, "the op's one row of sinks joins once"


def test_compose_of_nothing_is_causal() -> None:
    assert compose() is CAUSAL
    assert compose(CAUSAL, CAUSAL) is CAUSAL
    window = sliding_window(3)
    assert compose(CAUSAL, window) is window


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sliding_window(0), "sliding_window: size"),
        (lambda: sliding_window(2.0), "sliding_window: size"),
        (lambda: sliding_window(True), "sliding_window: size"),
        (lambda: chunked(0), "chunked: size"),
        (lambda: chunked(2.0), "chunked: size"),
        (lambda: Variant("mine", chunk=3), "mask_mod that hides"),
        (lambda: soft_cap(0.0), "soft_cap: cap"),
        (lambda: soft_cap(float("nan")), "soft_cap: cap"),
        (lambda: soft_cap(float("inf")), "soft_cap: cap"),
        (lambda: alibi(torch.zeros(2, 2)), "alibi: slopes"),
        (lambda: alibi([]), "alibi: slopes"),
        (lambda: alibi([1.0, float("nan")]), "alibi: slopes"),
        (lambda: Variant("mine", window=3), "mask_mod that hides"),
        (lambda: Variant("mine", mask_mod=lambda q, kv, h: q > kv, window=0), "window must be at least 1"),
        (lambda: Variant(""), "name must not be empty"),
    ],
)
def test_impossible_variants_are_refused(make: functools.partial[Variant], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


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
        assert register(make()) == register(make())
        assert lookup(register(make())).name == make().name
    assert register(Variant("causal")) == register(CAUSAL) == "causal"


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
        Variant("causal", has_sinks=True),
        Variant("causal", mask_mod=lambda q, kv, h: q - kv < 7),
        Variant("causal", mask_mod=lambda q, kv, h: q - kv < 8),
        Variant("causal", mask_mod=lambda q, kv, h: q - kv < 8, window=8),
    ]
    keys = [register(variant) for variant in variants]
    assert len(set(keys)) == len(variants), keys


def test_a_variant_keeps_its_own_copy_of_tensors() -> None:
    slopes = torch.rand(4)
    key = register(alibi(slopes))
    before = slopes.clone()
    slopes.zero_()
    assert register(alibi(before)) == key
    assert register(alibi(slopes)) != key


def test_equal_functions_with_other_bodies_are_another_variant() -> None:
    """A GPU's kernels see the bodies only, the CPU the functions only: one key must mean one text of each."""

    def score_mod(score: Tensor, q_position: Tensor, kv_position: Tensor, head: Tensor) -> Tensor:
        return 2.0 * score

    two, three = torch.tensor([2.0]), torch.tensor([3.0])
    bodies: list[tuple[Body, ...] | None] = [
        None,
        (),
        (Body("p[0] * score", None, two),),
        (Body("p[0] * score", None, three),),
        (Body("score * p[0]", None, two),),
        (Body("p[0] * score", "kv_position > 0", two),),
        (Body("p[0] * score", None, two), Body("score", None, torch.zeros(0))),
    ]
    keys = [register(Variant("doubled", score_mod, bodies=each)) for each in bodies]
    assert len(set(keys)) == len(bodies), keys
    assert [lookup(key).bodies for key in keys] == bodies
    again = Variant("doubled", score_mod, bodies=(Body("p[0] * score", None, torch.tensor([2.0])),))
    assert register(again) == keys[2]


def test_bodies_alone_make_a_variant_of_causal_attention() -> None:
    doubled = Variant("causal", bodies=(Body("2 * score", None, torch.zeros(0)),))
    assert register(doubled) != "causal"
    assert compose(CAUSAL, doubled) is doubled


def test_numbers_on_the_device_stay_where_they_are() -> None:
    """Captured graphs hold their address."""
    slopes = torch.rand(4)
    numbers = on_device(register(alibi(slopes)), 4, torch.device("cpu"))
    assert torch.equal(numbers, slopes)
    assert on_device(register(alibi(slopes)), 4, torch.device("cpu")) is numbers


def test_what_has_no_content_cannot_be_captured() -> None:
    thing = object()
    with pytest.raises(TypeError, match="capture the numbers"):
        register(Variant("mine", mask_mod=lambda q, kv, h: (q > kv) & (thing is not None)))


def test_an_unknown_key_is_an_error() -> None:
    with pytest.raises(UnknownVariant, match="register"):
        lookup("sliding_window(7)")
