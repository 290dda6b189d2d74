"""Rotary embedding and appending stay two ops wherever a graph does anything else."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import relu
from transformers.models.cohere.modeling_cohere import rotate_half as rotate_pairs

from tests.models.rewriting import (
    APPEND,
    Layer,
    Rewriter,
    append,
    attend,
    ops,
    plain,
    rows,
    run,
    same,
    swapped,
    turned,
)


@pytest.fixture
def rewriter():
    return Rewriter()


def turning(by):
    """A layer that turns heads by another function."""

    def function(given, pages, slots, attention):
        q, k, v, cos, sin = given
        q, k = (by(x, cos, sin) for x in (q, k))
        append(k, v, pages, slots)
        return attend(q, pages, attention)

    return function


def half_turned(x, cos, sin):
    first, rest = x.chunk(2, dim=-1)
    return torch.cat((turned(first, cos[..., : first.shape[-1]], sin[..., : first.shape[-1]]), rest), dim=-1)


def by_quarters(x, cos, sin):
    quarter = x.shape[-1] // 4
    return x * cos.unsqueeze(1) + torch.cat((-x[..., quarter:], x[..., :quarter]), dim=-1) * sin.unsqueeze(1)


def halves_in_place(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos.unsqueeze(1) + torch.cat((x[..., :half], -x[..., half:]), dim=-1) * sin.unsqueeze(1)


def other_half_negative(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos.unsqueeze(1) + torch.cat((x[..., half:], -x[..., :half]), dim=-1) * sin.unsqueeze(1)


def other_heads(x, cos, sin):
    return x * cos.unsqueeze(1) + swapped(x.flip(1)) * sin.unsqueeze(1)


@torch.library.custom_op("elsewhere::mul", mutates_args=())
def sum_by_that_name(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


@sum_by_that_name.register_fake
def _(x, y):
    return torch.empty_like(x)


# By what the op does not do, or in forms that no model uses.
TURNS = {
    "turned back": lambda x, cos, sin: x * cos.unsqueeze(1) - swapped(x) * sin.unsqueeze(1),
    "the other half negative": other_half_negative,
    "halves that stay in place": halves_in_place,
    "pieces that are no halves": by_quarters,
    "pairs": lambda x, cos, sin: x * cos.unsqueeze(1) + rotate_pairs(x) * sin.unsqueeze(1),
    "half of a head": half_turned,
    "with another head": other_heads,
    "twice as much sin": lambda x, cos, sin: torch.add(x * cos.unsqueeze(1), swapped(x) * sin.unsqueeze(1), alpha=2),
    "by another library's mul": lambda x, cos, sin: (
        torch.ops.elsewhere.mul(x, cos.unsqueeze(1)) + swapped(x) * sin.unsqueeze(1)
    ),
    "only cos": lambda x, cos, sin: x * cos.unsqueeze(1) + x * sin.unsqueeze(1),
    "and then the other way": lambda x, cos, sin: -turned(x, cos, sin),
    "a number for cos": lambda x, cos, sin: x * 0.5 + swapped(x) * sin.unsqueeze(1),
    "angles first": lambda x, cos, sin: cos.unsqueeze(1) * x + sin.unsqueeze(1) * swapped(x),
}


@pytest.mark.drawn(3)
@pytest.mark.parametrize("what", TURNS)
def test_heads_turned_in_another_way_stay_so(what, rewriter, rng):
    function, layer = turning(TURNS[what]), Layer(rng)
    with torch.no_grad():
        same(run(rewriter.of(function), layer), run(function, layer))
    assert rewriter.calls == [{APPEND: 1}]


def angles_apart(given, pages, slots, attention):
    q, k, v, cos, sin = given
    q, k = turned(q, cos, sin), turned(k, sin, cos)
    append(k, v, pages, slots)
    return attend(q, pages, attention)


def copies_of_angles(given, pages, slots, attention):
    q, k, v, cos, sin = given
    q, k = turned(q, cos, sin), turned(k, cos.clone(), sin)
    append(k, v, pages, slots)
    return attend(q, pages, attention)


def keys_alone(given, pages, slots, attention):
    q, k, v, cos, sin = given
    append(turned(k, cos, sin), v, pages, slots)
    return attend(q, pages, attention)


def queries_alone(given, pages, slots, attention):
    q, k, v, cos, sin = given
    append(k, v, pages, slots)
    return attend(turned(q, cos, sin), pages, attention)


def queries_later(given, pages, slots, attention):
    q, k, v, cos, sin = given
    append(turned(k, cos, sin), v, pages, slots)
    return attend(turned(q, cos, sin), pages, attention)


def attention_first(given, pages, slots, attention):
    """Over what the pages held before."""
    q, k, v, cos, sin = given
    q, k = turned(q, cos, sin), turned(k, cos, sin)
    out = attend(q, pages, attention)
    append(k, v, pages, slots)
    return out


def taken_by_others(what):
    def function(given, pages, slots, attention):
        q, k, v, cos, sin = given
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        key, query = rows(k), rows(q)
        ops.kv_append(key, rows(v), *pages, slots)
        out = ops.tree_attention(query, *pages, *attention)[0]
        taken = {"k": k, "q": q, "key": key, "query": query}[what]
        return out + taken.sum()

    return function


def a_part_taken_by_others(given, pages, slots, attention):
    """Of the sums."""
    q, k, v, cos, sin = given
    across = swapped(k)
    q, k = turned(q, cos, sin), k * cos.unsqueeze(1) + across * sin.unsqueeze(1)
    append(k, v, pages, slots)
    return attend(q, pages, attention) + across.sum()


def two_appends(given, pages, slots, attention):
    q, k, v, cos, sin = given
    append(k, v, pages, slots)
    return plain(given, pages, slots, attention)


def two_attentions(given, pages, slots, attention):
    return plain(given, pages, slots, attention) + attend(given[0], pages, attention)


def arguments_by_name(append_too):
    def function(given, pages, slots, attention):
        q, k, v, cos, sin = given
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        if append_too:
            ops.kv_append(key=rows(k), value=rows(v), k_pages=pages[0], v_pages=pages[1], slots=slots)
        else:
            append(k, v, pages, slots)
        names = ("q_positions", "plan", "scale", "variant")
        named = dict(zip(names, attention, strict=True))
        return ops.tree_attention(q=rows(q), k_pages=pages[0], v_pages=pages[1], **named)[0]

    return function


def two_sequences(given, pages, slots, attention):
    """Of which attention takes the first."""
    return plain([torch.cat((x, x + 1)) for x in given], pages, slots, attention)


def last_sequence(given, pages, slots, attention):
    q, k, v, cos, sin = given
    q, k = turned(q, cos, sin), turned(k, cos, sin)
    ops.kv_append(k[-1].transpose(0, 1), rows(v), *pages, slots)
    return attend(q, pages, attention)


def of(change):
    """A layer that makes other tensors of its own first."""
    return lambda given, *rest: plain(change(*given), *rest)


def with_gradients(given, pages, slots, attention):
    """Where nothing needs one yet; another call may bring what does."""
    with torch.enable_grad():
        return plain(given, pages, slots, attention)


UNLIKE = {
    "with gradients": with_gradients,
    "angles apart": angles_apart,
    "copies of angles": copies_of_angles,
    "keys alone": keys_alone,
    "queries alone": queries_alone,
    "queries later": queries_later,
    "attention first": attention_first,
    "part taken by others": a_part_taken_by_others,
    "last sequence": last_sequence,
    "two sequences": two_sequences,
    **{f"{what} taken by others": taken_by_others(what) for what in ("k", "q", "key", "query")},
    "names": arguments_by_name(True),
    "names for attention": arguments_by_name(False),
    # What the op would not take, though it fits together.
    "angles in bfloat16": of(lambda q, k, v, cos, sin: (q, k, v, cos.bfloat16(), sin.bfloat16())),
    "sin in bfloat16": of(lambda q, k, v, cos, sin: (q, k, v, cos, sin.bfloat16())),
    "heads in bfloat16": of(lambda q, k, v, cos, sin: (q.bfloat16(), k.bfloat16(), v, cos, sin)),
    "one angle for all rows": of(lambda q, k, v, cos, sin: (q, k, v, cos[:, :1], sin[:, :1])),
    "one sin for all rows": of(lambda q, k, v, cos, sin: (q, k, v, cos, sin[:, :1])),
    "one angle for a head": of(lambda q, k, v, cos, sin: (q, k, v, cos[..., :1], sin[..., :1])),
    "one query for all rows": of(lambda q, k, v, cos, sin: (q[:, :, :1], k, v, cos, sin)),
    "one key for all rows": of(lambda q, k, v, cos, sin: (q, k[:, :, :1], v, cos, sin)),
}


@pytest.mark.drawn(4)
@pytest.mark.parametrize("what", UNLIKE)
def test_layers_that_do_something_else_stay_as_they_are(what, rewriter, rng):
    layer = Layer(rng, rows=2)
    with torch.no_grad():
        same(run(rewriter.of(UNLIKE[what]), layer), run(UNLIKE[what], layer))
    assert rewriter.calls == [{APPEND: 1}]


@pytest.mark.parametrize(("function", "appends"), [(two_appends, 2), (two_attentions, 1)])
def test_only_one_append_and_one_attention_are_a_layer(function, appends, rewriter, rng):
    layer = Layer(rng)
    with torch.no_grad():
        same(run(rewriter.of(function), layer), run(function, layer))
    assert rewriter.calls == [{APPEND: appends}]


WRITES = {
    "keys": lambda q, k, v, cos, sin: k.mul_(2),
    "queries": lambda q, k, v, cos, sin: q.mul_(2),
    "a part of keys": lambda q, k, v, cos, sin: k[..., :1].zero_(),
    "keys by an item": lambda q, k, v, cos, sin: k.__setitem__(0, 0.0),
    "cos": lambda q, k, v, cos, sin: cos.copy_(sin),
    "sin by an argument": lambda q, k, v, cos, sin: torch.add(cos, 1, out=sin),
    "cos in place": lambda q, k, v, cos, sin: relu(cos, inplace=True),
    "values": lambda q, k, v, cos, sin: v.add_(1),
    "by an op": lambda q, k, v, cos, sin: ops.kv_append(k[0, :1] + 1, k[0, :1] + 2, k, v, torch.ones(1).long()),
}


@pytest.mark.drawn(3)
@pytest.mark.parametrize("between", ["the products", "sums and append"])
@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_in_between_may_be_what_was_turned(write, between, rewriter, rng):
    def function(given, pages, slots, attention):
        q, k, v, cos, sin = given
        q, plainly = turned(q, cos, sin), k * cos.unsqueeze(1)
        if between == "the products":
            WRITES[write](*given)
        k = plainly + swapped(k) * sin.unsqueeze(1)
        if between == "sums and append":
            WRITES[write](*given)
        append(k, v, pages, slots)
        return attend(q, pages, attention)

    layer = Layer(rng)
    with torch.no_grad():
        same(run(rewriter.of(function), layer), run(function, layer))
    assert rewriter.calls == [{APPEND: 1 + (write == "by an op")}]


@pytest.mark.parametrize("which", ["q", "k"])
def test_one_head_without_a_dimension_stays_so(which, rewriter, rng):
    change = {"q": lambda q, k, *rest: (q[0], k, *rest), "k": lambda q, k, *rest: (q, k[0], *rest)}[which]
    layer = Layer(rng, heads={"q": (1, 1, 32), "k": (3, 1, 32)}[which], rows=2)
    with torch.no_grad():
        same(run(rewriter.of(of(change)), layer), run(of(change), layer))
    assert rewriter.calls == [{APPEND: 1}]
