"""Products of one input as one over packed weights: the same values of the same parameters, in memory once."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import fx, nn
from torch._dynamo.backends.debugging import aot_eager
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation

from prefixkit.models.compile import packing
from prefixkit.models.compile.packed_weights import movable, pack, packed_view
from prefixkit.models.compile.packing import compile_packed, projection_groups
from tests.models.compile.decode import Decode
from tests.models.compile.products import WIDTH, Compiler, Heads, gamma, input_of, is_output, reach, unlike
from tests.models.compile.weights import groups_of, storage_bytes
from tests.models.driver import TreeDriver
from tests.models.tiny_families import make_model

HEADS = ["q_proj k_proj", "k_proj v_proj"]


@pytest.fixture
def compiler():
    return Compiler()


@pytest.mark.parametrize("bias", [False, True])
def test_products_of_one_input_are_one_product_of_the_same_parameters(bias, compiler, rng):
    module = Heads(bias)
    before = {name: (parameter, parameter.detach().clone()) for name, parameter in module.named_parameters()}
    size, x = storage_bytes(module), input_of(rng)
    function = compiler.of(module)
    for _ in range(2):
        assert not unlike(module, x, function(x)).any()
    assert compiler.products == [2]
    for name, parameter in module.named_parameters():
        same, value = before[name]
        assert parameter is same and parameter.requires_grad and parameter.is_leaf and not parameter.is_inference()
        assert torch.equal(parameter, value) and parameter.stride() == value.stride()
    assert packed_view(module.weights()).shape == (48, WIDTH)
    assert not bias or packed_view([part.bias for part in module.parts]).shape == (48,)
    assert packed_view([*module.weights(), module.last.weight]) is None
    assert storage_bytes(module) == size
    module(x).sum().backward()
    assert all(parameter.grad.shape == parameter.shape for parameter in module.parameters())


def test_only_products_that_certain_nodes_read_are_packed(compiler, rng):
    """Here those that a sine reads; of the others three are no pair.  In whole numbers, where float32 is exact."""
    parts, x = nn.ModuleList(nn.Linear(WIDTH, 8, bias=False) for _ in range(5)), input_of(rng).mul(9).round()
    for part in parts:
        part.weight.data = torch.from_numpy(rng.integers(-9, 9, (8, WIDTH))).float()

    def function(x):
        made = [part(x) for part in parts]
        return torch.sin(made[0] * 2 + made[3]), made[1] + made[2] + made[4]

    with torch.inference_mode():
        expected = function(x)
    compiler.reads = lambda node: "sin" in node.name
    found = compiler.of(function)(x)
    assert compiler.products == [4]
    assert packed_view([parts[0].weight, parts[3].weight]) is not None
    assert packed_view([parts[1].weight, parts[2].weight]) is None
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_layers_that_share_a_graph_have_their_own_weights(compiler, rng):
    modules, x = [Heads(), Heads(), Heads()], input_of(rng)
    function = compiler.of(lambda module, x: module(x))
    for _ in range(2):
        for module in modules:
            assert not unlike(module, x, function(module, x)).any()
    assert compiler.products == [2]
    assert len({packed_view(module.weights()).data_ptr() for module in modules}) == 3


def test_another_number_of_rows_moves_nothing_again(compiler, rng):
    module = Heads()
    function = compiler.of(module)
    function(input_of(rng))
    at = [weight.data_ptr() for weight in module.weights()]
    x = input_of(rng, 7)
    assert not unlike(module, x, function(x)).any()
    assert compiler.products == [2, 2]
    assert [weight.data_ptr() for weight in module.weights()] == at


def test_weights_that_were_exchanged_are_packed_again(compiler, rng):
    module, x = Heads(), input_of(rng)
    function = compiler.of(module)
    function(x)
    module.parts[1].weight.data = torch.randn(8, WIDTH)
    module.parts[2].weight = nn.Parameter(torch.randn(16, WIDTH))
    assert packed_view(module.weights()) is None
    assert not unlike(module, x, function(x)).any()
    assert packed_view(module.weights()) is not None
    with torch.no_grad():
        module.parts[0].weight.mul_(2)
    assert not unlike(module, x, function(x)).any()
    assert compiler.products == [2]


def test_weights_cannot_move_while_a_graph_is_captured(compiler, rng, monkeypatch):
    module, x = Heads(), input_of(rng)
    function = compiler.of(module)
    function(x)
    monkeypatch.setattr(packing, "capturing", lambda: True)
    assert not unlike(module, x, function(x)).any(), "they lie where they should"
    module.double().float()
    at = [weight.data_ptr() for weight in module.weights()]
    with pytest.raises(ValueError, match="while a CUDA graph is captured; run such a step once before"):
        function(x)
    assert [weight.data_ptr() for weight in module.weights()] == at


class Special(nn.Parameter):
    pass


def _held(module):
    return [weight.detach() for weight in module.weights()]


def _special(module):
    for part in module.parts:
        part.weight = Special(part.weight.data)


def _by_columns(module):
    for part in module.parts:
        part.weight = nn.Parameter(part.weight.data.T.contiguous().T)


def _one_for_all(module):
    module.parts[1].weight = module.parts[2].weight = module.parts[0].weight


def _of_one_block(module):
    block = torch.randn(3, 16, WIDTH)
    for part, at in zip(module.parts, (0, 2, 1), strict=True):
        part.weight = nn.Parameter(block[at])
    return block


@pytest.mark.parametrize("how", [_held, _special, _by_columns, _one_for_all, _of_one_block])
def test_weights_that_cannot_move_are_left_alone(how, compiler, rng):
    module, x = Heads(rows=(16, 16, 16)), input_of(rng)
    kept = how(module)
    at = [weight.data_ptr() for weight in module.weights()]
    found = compiler.of(module)(x)
    assert compiler.products == [4]
    assert [weight.data_ptr() for weight in module.weights()] == at
    assert torch.equal(found, module(x))
    del kept


def test_parts_that_no_vector_load_could_begin_with_stay_apart(compiler, rng):
    module = Heads(bias=True, rows=(24, 3, 16))  # 12 bytes of bias
    function, x = compiler.of(module), input_of(rng)
    assert not unlike(module, x, function(x)).any()
    assert compiler.products == [3]
    assert packed_view([module.parts[0].weight, module.parts[2].weight]) is not None


def test_weights_that_are_packed_already_stay_where_they_are(compiler, rng):
    module, x = Heads(), input_of(rng)
    pack(module.weights())
    whole, held = packed_view(module.weights()), _held(module)
    assert not movable(module.weights())
    assert not unlike(module, x, compiler.of(module)(x)).any()
    assert compiler.products == [2]
    assert packed_view(module.weights()).data_ptr() == whole.data_ptr() == held[0].data_ptr()


def test_a_later_layer_that_cannot_be_moved_is_right_all_the_same(compiler, rng, caplog):
    first, second, x = Heads(), Heads(), input_of(rng)
    function = compiler.of(lambda module, x: module(x))
    function(first, x)
    held = _held(second)
    for _ in range(2):
        assert not unlike(second, x, function(second, x)).any()
    assert [record.levelname for record in caplog.records if "share their memory" in record.getMessage()] == ["WARNING"]
    assert packed_view(second.weights()) is None
    del held
    function(second, x)
    assert packed_view(second.weights()) is not None, "now they can"


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.add_(1),
        lambda x: torch.relu_(x),
        lambda x: nn.functional.relu(x, inplace=True),
        lambda x: nn.functional.relu(x, True),
        lambda x: torch.add(x, 1, out=x),
        lambda x: x.__setitem__(0, 1.0),
        lambda x: x.__imul__(2),
        lambda x: torch.ops.prefixkit.kv_append(x, x, x[None].clone(), x[None].clone(), torch.arange(1)),
    ],
    ids=["method", "function", "inplace", "positional", "out", "setitem", "operator", "op"],
)
def test_an_input_that_is_written_is_another_one(write, compiler, rng):
    """In whole numbers, where float32 is exact.  The last one writes others, which is not looked into."""
    parts = nn.ModuleList(nn.Linear(WIDTH, 8, bias=False) for _ in range(4))
    for part in parts:
        part.weight.data = torch.from_numpy(rng.integers(-9, 9, (8, WIDTH))).float()

    def function(x):
        x = x * 2
        before = [part(x) for part in parts[:2]]
        write(x)
        return [*before, *(part(x) for part in parts[2:])]

    x = input_of(rng, 1).mul(9).round()
    with torch.inference_mode():
        expected = function(x)
    assert [torch.equal(*pair) for pair in zip(compiler.of(function)(x), expected, strict=True)] == [True] * 4
    assert compiler.products == [2]


def test_a_triton_kernel_of_the_model_may_write_its_input():
    graph = fx.Graph()
    x, weights = graph.placeholder("x"), [graph.placeholder(name) for name in "ab"]
    linear = nn.functional.linear
    first = graph.call_function(linear, (x, weights[0]))
    graph.call_function(triton_kernel_wrapper_mutation, (), {"kernel_idx": 0, "kwargs": {"x": x}})
    graph.output((first, graph.call_function(linear, (x, weights[1]))))
    given = {weight: nn.Parameter(torch.randn(8, WIDTH)) for weight in weights}
    assert projection_groups(graph, given, is_output) == ([], [])


def test_what_no_part_of_a_product_can_be_used_for_stays_as_it_was(rng):
    """Rows and heads as one dimension: the parts of a product have its stride."""
    module, x = Heads(rows=(16, 16, 16)), input_of(rng)

    def function(x):
        return [part(x).view(-1, 8) for part in module.parts]

    torch._dynamo.reset()
    backend = functools.partial(compile_packed, compiler=aot_eager, reads=is_output)
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    with torch.inference_mode():
        assert [torch.equal(*pair) for pair in zip(compiled(x), function(x), strict=True)] == [True] * 3
    assert packed_view(module.weights()) is None


def test_a_graph_may_have_no_inputs_but_weights(compiler):
    module = Heads()

    def function():
        x = torch.ones(1, 5, WIDTH)
        return [part(x) for part in module.parts]

    with torch.inference_mode():
        expected = function()
    bounds = [reach(part, torch.ones(1, 5, WIDTH)) * 2 * gamma(WIDTH) for part in module.parts]
    for one, other, bound in zip(compiler.of(function)(), expected, bounds, strict=True):
        assert ((one - other).abs() <= bound).all()
    assert compiler.products == [1]


def test_parameters_born_in_inference_mode_stay_what_they_are(compiler, rng):
    with torch.inference_mode():
        module = Heads()
    x = input_of(rng)
    function = compiler.of(module)
    for _ in range(2):
        function(x)
    assert compiler.products == [2]
    assert all(weight.is_inference() for weight in module.weights())


# -- models ----------------------------------------------------------------------------------------------------


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("family", "groups"),
    [
        ("llama", [*HEADS, "gate_proj up_proj"]),
        ("qwen2", [*HEADS, "gate_proj up_proj"]),
        ("cohere", [*HEADS, "gate_proj up_proj"]),  # all have the same input
        ("olmo", [*HEADS, "gate_proj up_proj"]),  # clamps heads in place
        ("phi3", []),
        ("mixtral", HEADS),
    ],
)
def test_heads_of_a_model_are_packed_and_gate_and_up_and_no_others(family, groups, dynamo, rng):
    decode = Decode(TreeDriver, make_model(family), rng)
    model = decode.driver.model
    before, size = copy.deepcopy(model.state_dict()), storage_bytes(model)
    runner = decode.runner()
    for _ in range(2):
        step = decode.step()
        assert torch.equal(runner(step), decode.driver.runner(step))
        decode.done()
    assert runner.compiled.reason is None
    assert groups_of(model) == [groups, groups]
    assert storage_bytes(model) == size
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
