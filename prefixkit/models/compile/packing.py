"""Query, key and value projections as one product over packed weights; gate and up as one product if rows are few.

With few rows each of the three projections is too small to fill a GPU.  In a graph that dynamo traced, one product
replaces them, whose weight and bias are graph inputs: the packed weights (see ``packed_weights.py``), packed once for
each layer, when the layer is first called.  Pairs of other products, such as gate and up, become the op
``linear_pair``.  Weights that cannot be moved stay as they are.
"""

from __future__ import annotations

import logging
import operator
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

import prefixkit.ops.library  # noqa: F401 - registers torch.ops.prefixkit
from prefixkit.models.compile.packed_weights import ALIGN, movable, pack, packed_view
from prefixkit.torch_private import fake_mode_of

log = logging.getLogger("prefixkit")

Function = Callable[..., Any]
Compiler = Callable[[fx.GraphModule, Sequence[Any]], Function]
_IN_PLACE = {value for name, value in vars(operator).items() if name.startswith("__i")} | {operator.setitem}
# Functions whose names start so change how later nodes are computed: torch.amp's, torch.set_grad_enabled, ...
_MODES = ("_enter", "_exit", "_set", "set_")


class _Product(NamedTuple):
    """A call of ``linear``."""

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None


def capturing() -> bool:
    """Whether a CUDA graph is being captured."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def is_own_op(node: fx.Node) -> bool:
    """Whether a node calls one of prefixkit's ops other than those that sum any product over processes."""
    target, ops = node.target, torch.ops.prefixkit
    sums = target in (ops.part_of_product, ops.sum_parts)
    return node.op == "call_function" and str(target).startswith("prefixkit.") and not sums


def compile_packed(
    graph: fx.GraphModule, inputs: Sequence[Any], compiler: Compiler, reads: Callable[[fx.Node], bool] = is_own_op
) -> Function:
    """``compiler(graph, inputs)``, but a layer's q, k and v projections are one product over packed weights.

    Args:
        graph: The graph that dynamo traced, with parameters among its inputs.  It is not changed.
        inputs: The inputs that it was traced with.
        compiler: Compiles a graph for its inputs to a function.
        reads: Whether a node depends on the products to pack, as prefixkit's ops do.

    Returns:
        A function of the inputs of ``graph``.  It raises ValueError if weights must be moved during the capture of a
        CUDA graph.
    """
    mode = fake_mode_of(inputs)
    copied = copy_of(graph)
    # In the order of the inputs, also after some are removed.
    given = dict(zip(copied.graph.find_nodes(op="placeholder"), inputs, strict=True))
    place = {node: at for at, node in enumerate(given)}
    groups, pairs = projection_groups(copied.graph, given, reads)
    if mode is None or not (groups or pairs):
        return compiler(graph, inputs)
    packs = []
    for group in groups + pairs:
        target = torch.ops.prefixkit.linear_pair if group in pairs else None
        _replace(copied.graph, group, [len(given[product.weight]) for product in group], target)
        for nodes in _parameters(group):
            packs.append([place[node] for node in nodes])
            rows, like = sum(len(given[node]) for node in nodes), given[nodes[0]]
            with torch.inference_mode(like.is_inference()), mode:
                given[nodes[0]] = torch.empty((rows, *like.shape[1:]), dtype=like.dtype, device=like.device)
            nodes[0].meta = {"example_value": given[nodes[0]]}
            for node in nodes[1:]:
                copied.graph.erase_node(node)
                del given[node]
    copied.recompile()
    try:
        compiled = compiler(copied, list(given.values()))
    except Exception as error:
        # Parts of the product have the whole product's stride, which views in the traced code may not allow.
        log.info("projections of one input are not packed: %s", error)
        return compiler(graph, inputs)
    return _PackedGraph(compiled, packs, [place[node] for node in given])


@dataclass(eq=False)
class _PackedGraph:
    """A compiled graph over packed weights, as a function of the separate ones.

    Layers share graphs, so each call passes other weights.  Each list in ``packs`` holds indices of inputs, and the
    compiled graph gets their packed weights as the first of these; ``kept`` holds the indices of its inputs.
    """

    compiled: Function
    packs: list[list[int]]
    kept: list[int]
    warned: bool = False

    def __call__(self, *inputs: Any) -> Any:
        given = list(inputs)
        for places in self.packs:
            weights = [inputs[place] for place in places]
            whole = packed_view(weights)
            given[places[0]] = self._pack(weights) if whole is None else whole
        return self.compiled(*[given[place] for place in self.kept])

    def _pack(self, weights: list[Tensor]) -> Tensor:
        if not movable(weights):
            if not self.warned:
                log.warning(
                    "weights of a layer share their memory with other tensors, so each of its steps copies %.0f MiB; "
                    "drop those tensors, such as a state dict, and make the engine anew",
                    sum(weight.nbytes for weight in weights) / 2**20,
                )
            self.warned = True
            with torch.no_grad():
                return torch.cat(weights)
        if capturing():
            raise ValueError(
                "a layer's weights have moved, and cannot be packed while a CUDA graph is captured; run such a step "
                "once before"
            )
        return pack(weights)


def copy_of(graph: fx.GraphModule) -> fx.GraphModule:
    """A copy of the graph with all that dynamo has recorded of its nodes: dynamo itself continues with the original."""
    nodes: dict[fx.Node, fx.Node] = {}
    made = fx.Graph()
    made.output(made.graph_copy(graph.graph, nodes))
    for old, new in nodes.items():
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    copied = fx.GraphModule(graph, made)
    for name, value in vars(graph).items():
        copied.__dict__.setdefault(name, value)
    copied.meta = dict(graph.meta)
    return copied


def projection_groups(
    graph: fx.Graph, given: dict[fx.Node, Any], reads: Callable[[fx.Node], bool] = is_own_op
) -> tuple[list[list[_Product]], list[list[_Product]]]:
    """Groups of products of one input that can become one product, because nodes of ``reads`` depend on them.

    prefixkit's ops depend on a layer's q, k and v, and on no other product of the same input.

    Returns:
        These groups, and pairs of other products of one input whose weights have one shape, no bias and no gradient.
    """
    found: dict[Hashable, list[_Product]] = defaultdict(list)
    others: dict[Hashable, list[_Product]] = defaultdict(list)
    needed: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if reads(node) or not needed.isdisjoint(node.users):
            needed.add(node)
    writes = 0
    for node in graph.nodes:
        writes += may_write(node)  # the input may have changed
        product = _product(node)
        if product is None or not _is_free(product, given):
            continue
        values = [given[one] for one in product[2:] if one is not None]
        forms = [(value.dtype, value.device, value.is_inference()) for value in values]
        if node in needed:
            found[writes, product.x, *forms].append(product)
        elif product.bias is None and not torch.is_grad_enabled() and _of_one_dtype(product):
            others[writes, product.x, given[product.weight].shape, *forms].append(product)
    groups = [group for group in found.values() if len(group) > 1 and _can_be_packed(group, given)]
    return groups, [pair for pair in others.values() if len(pair) == 2 and _can_be_packed(pair, given)]


def _can_be_packed(group: list[_Product], given: dict[fx.Node, Any]) -> bool:
    tensors = [[given[node] for node in nodes] for nodes in _parameters(group)]
    if all(packed_view(parts) is not None or movable(parts) for parts in tensors):
        return True
    log.info("%d projections of one input are not packed: other tensors hold their weights", len(group))
    return False


def _product(node: fx.Node) -> _Product | None:
    if node.op != "call_function" or node.target is not nn.functional.linear:
        return None
    given = dict(zip(("input", "weight", "bias"), node.args, strict=False), **node.kwargs)
    x, weight, bias = given["input"], given["weight"], given.get("bias")
    if not (isinstance(x, fx.Node) and isinstance(weight, fx.Node) and isinstance(bias, fx.Node | None)):
        return None
    return _Product(node, x, weight, bias)


def _is_free(product: _Product, given: dict[fx.Node, Any]) -> bool:
    """Whether a product is of ordinary contiguous parameters that no other node reads."""
    return all(
        type(value := given.get(node)) is nn.Parameter
        and value.ndim == dims
        and value.is_contiguous()
        and not value.is_meta
        and value.numel() > 0
        and value.nbytes % ALIGN == 0
        and len(node.users) == 1
        for node, dims in zip(product[2:], (2, 1), strict=True)
        if node is not None
    )


def _of_one_dtype(product: _Product) -> bool:
    """Whether a product converts no dtype, as it does under autocast."""
    values = [node.meta.get("example_value") for node in (product.node, product.x, product.weight)]
    return len({getattr(value, "dtype", None) for value in values}) == 1


def _parameters(group: list[_Product]) -> list[tuple[fx.Node, ...]]:
    """The weights, and the biases if there are any."""
    return [nodes for nodes in zip(*(product[2:] for product in group), strict=True) if None not in nodes]


def _replace(graph: fx.Graph, group: list[_Product], rows: list[int], pair: Function | None) -> None:
    """Replace the first product by one product of all, with the first's weight; users of each get a part of its result.

    ``pair``: the op that computes it instead of ``linear``.
    """
    first, begin = group[0], 0
    value = first.node.meta["example_value"]  # torch does not cache graphs with nodes that lack one
    value = value.new_empty((*value.shape[:-1], sum(rows)))
    with graph.inserting_before(first.node):
        given = (first.x, first.weight) if pair is not None else (first.x, first.weight, first.bias)
        whole = graph.call_function(pair or first.node.target, given)  # type: ignore[arg-type]
        whole.meta["example_value"] = value
        for product, count in zip(group, rows, strict=True):
            part = graph.call_function(torch.narrow, (whole, -1, begin, count))
            part.meta["example_value"] = value.narrow(-1, begin, count)
            product.node.replace_all_uses_with(part)
            begin += count
    for product in group:
        graph.erase_node(product.node)


def changes_mode(node: fx.Node) -> bool:
    """Whether a node changes how later nodes are computed: autocast, gradients."""
    return node.op in ("call_function", "call_method") and _name(node).startswith(_MODES)


def _name(node: fx.Node) -> str:
    name: str = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "_")
    return name


def may_write(node: fx.Node) -> bool:
    """Whether a node may change its arguments, or how other nodes are computed."""
    if node.op not in ("call_function", "call_method"):
        return node.op == "call_module"
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):  # a Triton kernel of the model, for example
        return True
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        packet = target.overloadpacket if isinstance(target, torch._ops.OpOverload) else target
        return any(getattr(packet, name)._schema.is_mutable for name in packet.overloads())
    asked = "out" in node.kwargs or node.kwargs.get("inplace") or any(argument is True for argument in node.args)
    return bool(asked) or target in _IN_PLACE or _name(node).endswith("_") or changes_mode(node)
