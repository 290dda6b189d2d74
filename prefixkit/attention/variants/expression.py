"""Expressions: the operations that a variant's Python function computes, separate from the values it captures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import torch
from torch import Tensor

from prefixkit.attention.variants.function_digest import fingerprint

ARGUMENTS = ("score", "b", "h", "q_idx", "kv_idx")


class Type(Enum):
    """The type of a value: torch's kinds of dtypes; kernels compute floats in float32."""

    BOOL = "bool"
    INT = "int"
    FLOAT = "float"

    @staticmethod
    def of(value: object) -> Type:
        """The type of a number, or of a tensor's elements."""
        if isinstance(value, Tensor):
            if value.dtype == torch.bool:
                return Type.BOOL
            return Type.FLOAT if value.dtype.is_floating_point else Type.INT
        return Type.BOOL if isinstance(value, bool) else Type.INT if isinstance(value, int) else Type.FLOAT


@dataclass(frozen=True)
class Node:
    """One value.

    Attributes:
        op: ``argument``, ``scalar``, ``load``, or a name of ``operations.OPERATIONS``.
        args: Numbers of earlier nodes: operands, or the indices of a load.
        type: The type of the value.
        slot: The number of the argument, scalar or captured tensor; -1 for other operations.
    """

    op: str
    args: tuple[int, ...]
    type: Type
    slot: int = -1


@dataclass(frozen=True, eq=False)
class Captured:
    """A tensor that a function captures.

    Attributes:
        tensor: The tensor.
        follows: Whether the function itself moves it to the scores' device, so that it may be on any device.
    """

    tensor: Tensor
    follows: bool = False


@dataclass(frozen=True, eq=False)
class Expression:
    """A traced function.  Literals and captured numbers are ``scalars``, and not part of the :attr:`code`.

    Attributes:
        nodes: The values, each after its operands; the last one is the result.
        scalars, tensors: The values that the slots of scalars and loads refer to.
    """

    nodes: tuple[Node, ...]
    scalars: tuple[bool | int | float, ...]
    tensors: tuple[Captured, ...]

    @cached_property
    def code(self) -> str:
        """A digest of everything except scalars and tensors: expressions of equal code share a kernel."""
        nodes = tuple((node.op, node.args, node.type.value, node.slot) for node in self.nodes)
        kinds = tuple((captured.tensor.dtype, captured.tensor.ndim) for captured in self.tensors)
        return fingerprint(nodes, tuple(Type.of(scalar).value for scalar in self.scalars), kinds)

    def fewest_heads(self) -> int | None:
        """The smallest dimension of captured tensors that ``h`` alone indexes; None if there is no such dimension."""
        head = ARGUMENTS.index("h")
        sizes = [
            self.tensors[node.slot].tensor.shape[dim]
            for node in self.nodes
            if node.op == "load"
            for dim, index in enumerate(node.args)
            if self.nodes[index].op == "argument" and self.nodes[index].slot == head
        ]
        return min(sizes, default=None)

    @cached_property
    def bias(self) -> Expression | None:
        """The bias, if the result is the score plus a bias that does not depend on the score; else None."""
        score, depends = ARGUMENTS.index("score"), list[bool]()
        for node in self.nodes:
            depends.append((node.op == "argument" and node.slot == score) or any(depends[arg] for arg in node.args))
        terms, node = list[tuple[str, int]](), self.nodes[-1]
        while node.op in ("add", "sub"):
            left, right = node.args
            if depends[right] and (depends[left] or node.op == "sub"):
                return None
            terms.append((node.op, left if depends[right] else right))
            node = self.nodes[right if depends[right] else left]
        if node.op != "argument" or node.slot != score:
            return None
        nodes = [*self.nodes, Node("scalar", (), Type.FLOAT, len(self.scalars))]
        result = len(nodes) - 1  # the scalar 0, which the first term replaces unless it is subtracted
        for place, (op, number) in enumerate(terms):
            if place == 0 and op == "add":
                result = number
                continue
            nodes.append(Node(op, (result, number), Type.FLOAT))
            result = len(nodes) - 1
        return closed(nodes, result, (*self.scalars, 0.0), self.tensors)

    def reads(self, argument: str) -> bool:
        """Whether the result depends on one of :data:`ARGUMENTS`."""
        slot = ARGUMENTS.index(argument)
        return any(node.op == "argument" and node.slot == slot for node in self.nodes)


def closed(
    nodes: Sequence[Node], result: int, scalars: Sequence[bool | int | float], tensors: Sequence[Captured]
) -> Expression:
    """The expression whose result is node ``result``, with only the nodes, scalars and tensors that it needs."""
    needed = {result}
    for number in range(result, -1, -1):
        if number in needed:
            needed.update(nodes[number].args)
    kept = sorted(needed)
    order = {number: place for place, number in enumerate(kept)}
    used = {op: sorted({nodes[number].slot for number in kept if nodes[number].op == op}) for op in ("scalar", "load")}
    slots = {op: {slot: place for place, slot in enumerate(of)} for op, of in used.items()}

    def renumbered(node: Node) -> Node:
        slot = slots[node.op][node.slot] if node.op in slots else node.slot
        return Node(node.op, tuple(order[arg] for arg in node.args), node.type, slot)

    return Expression(
        tuple(renumbered(nodes[number]) for number in kept),
        tuple(scalars[slot] for slot in used["scalar"]),
        tuple(tensors[slot] for slot in used["load"]),
    )
