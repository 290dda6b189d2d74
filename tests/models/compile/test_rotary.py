"""Rotary embedding and appending as one op: the same bits, in functions like a layer and in models."""

from __future__ import annotations

import pytest
import torch

from prefixkit.models.compile.layers import inductor
from prefixkit.models.compile.rotary import with_rotary_append
from prefixkit.ops.library import NoBackward
from tests.models.compile.decode import Decode, functional, traced
from tests.models.driver import TreeDriver
from tests.models.rewriting import (
    APPEND,
    BOTH,
    Layer,
    Rewriter,
    append,
    attend,
    calls,
    ops,
    plain,
    rows,
    run,
    same,
    swapped,
    turned,
)
from tests.models.tiny_families import make_model


@pytest.fixture
def rewriter():
    return Rewriter()


def written_before(given, pages, slots, attention):
    given[1].mul_(2)
    given[3].add_(1)
    return plain(given, pages, slots, attention)


def written_after(given, pages, slots, attention):
    q, k, v, cos, sin = given
    q, k = turned(q, cos, sin), turned(k, cos, sin)
    append(k, v, pages, slots)
    for x in given:
        x.zero_()
    return attend(q, pages, attention)


def one_for_both(given, pages, slots, attention):
    _, k, v, cos, sin = given
    return plain([k.repeat(1, 2, 1, 1), k, v, cos, sin], pages, slots, attention)


def keys_are_values(given, pages, slots, attention):
    q, k, _, cos, sin = given
    q, k = turned(q, cos, sin), rows(turned(k, cos, sin))
    ops.kv_append(k, k, *pages, slots)
    return attend(q, pages, attention)


def keys_first(given, pages, slots, attention):
    q, k, v, cos, sin = given
    k = turned(k, cos, sin)
    q = turned(q, cos, sin)
    append(k, v, pages, slots)
    return attend(q, pages, attention)


def angles_for_others_too(given, pages, slots, attention):
    q, k, v, cos, sin = given
    wide = cos.unsqueeze(1), sin.unsqueeze(1)
    q, k = (x * wide[0] + swapped(x) * wide[1] for x in (q, k))
    append(k, v, pages, slots)
    return attend(q, pages, attention) * wide[0].transpose(1, 2)


def heads_first(given, pages, slots, attention):
    """In memory."""
    q, k, v, cos, sin = given
    return plain([q.contiguous(), k.contiguous(), v.contiguous(), cos, sin], pages, slots, attention)


ALIKE = (
    plain,
    written_before,
    written_after,
    one_for_both,
    keys_are_values,
    keys_first,
    angles_for_others_too,
    heads_first,
)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("function", ALIKE, ids=lambda function: function.__name__)
def test_what_turns_heads_like_a_model_becomes_one_op(function, inference, rewriter, rng):
    layer = Layer(rng)
    with torch.inference_mode(inference), torch.no_grad():
        same(run(rewriter.of(function), layer), run(function, layer))
    assert rewriter.calls == [{BOTH: 1}]


@pytest.mark.parametrize("function", [plain, heads_first], ids=lambda function: function.__name__)
def test_inductor_takes_such_a_graph(function, rng):
    """Nothing but the ops computes in it, so its bits are eager's."""
    torch._dynamo.reset()
    backend = lambda graph, inputs: inductor(with_rotary_append(graph), inputs)  # noqa: E731
    layer = Layer(rng)
    with torch.no_grad():
        same(run(torch.compile(function, backend=backend, fullgraph=True), layer), run(function, layer))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_keys_err_no_more_than_those_of_layers_without_it(dtype, rewriter, rng):
    """Against float64; without it products are rounded too."""
    layer = Layer(rng, dtype, rows=2)
    truth = rows(turned(*(x.double() for x in (layer.k, layer.cos, layer.sin))))
    error = {}
    with torch.no_grad():
        for name, function in (("ours", rewriter.of(plain)), ("theirs", plain)):
            k_pages = run(function, layer)[6]
            error[name] = (k_pages.flatten(0, 1)[layer.slots].double() - truth).abs()
    assert rewriter.calls == [{BOTH: 1}]
    assert error["ours"].max() <= 1.5 * error["theirs"].max()
    assert error["ours"].norm() <= 1.5 * error["theirs"].norm()


@pytest.mark.parametrize("asked", [False, True], ids=["enabled", "asked for"])
def test_where_gradients_are_recorded_all_stays_as_it_is(asked, rewriter, rng):
    """The op would refuse; attention does so only where a gradient is asked of it."""
    layer = Layer(rng)
    with torch.no_grad():
        expected = run(plain, layer)
    function, (given, *rest) = rewriter.of(plain), layer.arguments()
    for x in given:
        x.requires_grad_(asked)
    out = function(given, *rest)
    assert rewriter.calls == [{APPEND: 1}]
    same([out.detach(), *(x.detach() for x in given), *rest[0]], expected)
    assert out.requires_grad == asked
    if asked:
        with pytest.raises(NoBackward, match="inference_mode"):
            out.sum().backward()
    with torch.no_grad():
        same(run(function, layer), expected)
    assert rewriter.calls == [{APPEND: 1}, {BOTH: 1}], "the same function where none is recorded"


# -- models ----------------------------------------------------------------------------------------------------

# Of each family: how many of its graphs become which.  Some turn a part of a head, pairs, or in float32.
FAMILIES = {
    "llama": [{BOTH: 1}],
    "qwen3": [{BOTH: 1}],  # heads that are normed before
    "gemma2": [{BOTH: 1}, {BOTH: 1}],  # two kinds of layers
    "smollm3": [{BOTH: 1}, {APPEND: 1}],  # a layer without positions
    "phi": [{APPEND: 1}],
    "cohere": [{APPEND: 1}],
    "olmo": [{APPEND: 1}],
}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_families_say_the_same_with_one_op(family, dynamo, rng):
    """As layers that are not compiled; in float32 bit by bit."""
    graphs = []

    def noted(graph, inputs):
        graphs.append(with_rotary_append(graph))
        return (functional if BOTH in calls(graphs[-1]) else traced)(graph, inputs)

    one_kind = {"layer_types": ["full_attention"] * 2} if family == "qwen3" else {}
    decode = Decode(TreeDriver, make_model(family, **one_kind), rng)
    with_op = decode.runner(compiler=noted)
    for _ in range(3):
        step = decode.step()
        assert torch.equal(with_op(step), decode.driver.runner(step))
        decode.done()
    assert [calls(graph) for graph in graphs] == FAMILIES[family]
    assert with_op.compiled.reason is None and with_op.compiled.graphs == len(graphs)
