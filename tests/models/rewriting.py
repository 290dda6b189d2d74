"""A layer as dynamo traces it, its rewriting, and what both must say."""

from __future__ import annotations

import torch

from prefixkit.attention.queries import StepTree
from prefixkit.attention.sharing import CPU_COST
from prefixkit.backends.torch.host_planner import bind
from prefixkit.models.compile.rotary import with_rotary_append
from prefixkit.testing.forests import plan_of, random_case

ops = torch.ops.prefixkit
APPEND, BOTH = "prefixkit.kv_append", "prefixkit.rotary_append"


def calls(graph):
    """How often a graph calls each op of ours."""
    targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    return {name: count for name in (APPEND, BOTH) if (count := targets.count(name))}


class Rewriter:
    """Runs graphs with the op in place, as they are, and keeps them; each must be the same as before afterwards."""

    def __init__(self):
        self.calls = []

    def __call__(self, graph, inputs):
        before = graph.print_readable(print_output=False)
        made = with_rotary_append(graph)
        assert graph.print_readable(print_output=False) == before
        graph.graph.lint(), made.graph.lint()
        # What is left as it is is left alone, and what is not has a graph of its own.
        assert (made is graph) == (made.graph is graph.graph) == (BOTH not in calls(made))
        assert len(made.graph.find_nodes(op="placeholder")) == len(inputs)
        self.calls.append(calls(made))
        return made.forward

    def of(self, function):
        torch._dynamo.reset()
        return torch.compile(function, backend=self, fullgraph=True, dynamic=False)


class Layer:
    """What a decoder layer gives its attention, ``[1, heads, T, head_dim]``; pages full of NaN, and a tree for them."""

    def __init__(self, rng, dtype=torch.float32, heads=(4, 2, 32), rows=1):
        """At least so many rows."""
        self.case = random_case(rng, dtype, heads=heads)
        while len(self.case.q) < rows:
            self.case = random_case(rng, dtype, heads=heads)
        case, (_, kv_heads, dim), rows = self.case, heads, len(self.case.q)
        normal = lambda *shape: torch.from_numpy(rng.standard_normal(shape)).to(dtype)  # noqa: E731
        self.q = case.q.transpose(0, 1)[None]
        self.k, self.v = normal(1, rows, kv_heads, dim).transpose(1, 2), normal(1, rows, kv_heads, dim).transpose(1, 2)
        self.cos, self.sin = normal(1, rows, dim), normal(1, rows, dim)
        self.slots = torch.from_numpy(case.snapshot.slots(case.row_node, case.queries.row_offset()))
        self.step = bind(plan_of(case, CPU_COST), StepTree(case.snapshot, case.queries))  # a handle lives as long
        self.attention = case.positions, self.step.tensors, case.scale, "causal"

    def arguments(self):
        """The same again, with memory of their own for what may be written."""
        pages = [pages.clone() for pages in (self.case.k_pages, self.case.v_pages)]
        return [x.clone() for x in (self.q, self.k, self.v, self.cos, self.sin)], pages, self.slots, self.attention


def swapped(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def turned(x, cos, sin):
    """As transformers' ``apply_rotary_pos_emb`` does it."""
    return x * cos.unsqueeze(1) + swapped(x) * sin.unsqueeze(1)


def rows(x):
    return x[0].transpose(0, 1)


def append(k, v, pages, slots):
    ops.kv_append(rows(k), rows(v), *pages, slots)


def attend(q, pages, attention):
    return ops.tree_attention(rows(q), *pages, *attention)[0]


def plain(given, pages, slots, attention):
    q, k, v, cos, sin = given
    q, k = turned(q, cos, sin), turned(k, cos, sin)
    append(k, v, pages, slots)
    return attend(q, pages, attention)


def run(function, layer):
    """What a function returns, and what it leaves in its arguments."""
    args = layer.arguments()
    return [function(*args), *args[0], *args[1]]


def same(ours, theirs):
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
