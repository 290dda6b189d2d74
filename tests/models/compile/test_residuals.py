"""Residual adds within sums of processes: the same bits, where an add does nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from prefixkit.models.compile.residuals import with_residuals

SUM = torch.ops.prefixkit.sum_parts
ADDRESSES = torch.zeros(5, dtype=torch.int64)


class Run(fx.Interpreter):
    """Runs a graph on a CPU; the other process has the same parts, in another order."""

    def call_function(self, target, args, kwargs):
        if target is not SUM:
            return super().call_function(target, args, kwargs)
        part, _, dtype, *residuals = args
        total = (part + part.flip(0)).to(dtype)
        if len(residuals) == 2:  # within one kernel
            return (residuals[0].float() + residuals[1].float() + total.float()).to(dtype)
        return total + residuals[0] if residuals else total


class Rewriter:
    """Runs graphs as they are, and rewritten; notes how many sums have a residual, and how many nodes are gone."""

    def __init__(self):
        self.fused, self.gone = [], []

    def __call__(self, graph, inputs):
        before = graph.print_readable(print_output=False)
        made = with_residuals(graph)
        made.graph.lint()
        assert graph.print_readable(print_output=False) == before
        assert all("example_value" in node.meta for node in made.graph.nodes if node.target is SUM)
        self.fused.append([len(node.args) - 3 for node in made.graph.find_nodes(op="call_function", target=SUM)])
        self.gone.append(len(graph.graph.nodes) - len(made.graph.nodes))
        assert (made is graph) == (self.gone[-1] == 0)

        def run(*given):
            (ours, theirs), results = [[copied(x) for x in given] for _ in range(2)], []
            for one, args in ((made, ours), (graph, theirs)):
                results.append([*Run(one).run(*args), *args])
            for one, other in zip(*results, strict=True):
                if isinstance(one, torch.Tensor):
                    torch.testing.assert_close(one, other, rtol=0, atol=0)
            return results[0][: len(results[0]) - len(ours)]

        return run

    def rewrite(self, function, *given, dynamic=False):
        torch._dynamo.reset()
        torch.compile(function, backend=self, fullgraph=True, dynamic=dynamic)(*given)
        return self.fused[-1]


def copied(x):
    return x.clone() if isinstance(x, torch.Tensor) else x


def sum_of(x):
    return SUM(x.float(), ADDRESSES, x.dtype)


@pytest.fixture
def rewriter():
    return Rewriter()


@pytest.fixture
def given(rng):
    """A part, and what is added to the sum."""
    return [torch.from_numpy(rng.standard_normal((1, 6, 8))).bfloat16() for _ in range(2)]


def in_place(x, residual):
    total = sum_of(x)
    total += residual
    return total


ADDS = {
    "after the residual": lambda x, residual: residual + sum_of(x),
    "before the residual": lambda x, residual: sum_of(x) + residual,
    "torch.add": lambda x, residual: torch.add(residual, sum_of(x)),
    "a method": lambda x, residual: residual.add(sum_of(x)),
    "in place": in_place,
    "a method in place": lambda x, residual: sum_of(x).add_(residual),
    "what is computed before": lambda x, residual: residual * 2 + sum_of(x),
    "what is written before": lambda x, residual: residual.mul_(2) + sum_of(x),
    "the part": lambda x, residual: x + sum_of(x),
    "a view of the same memory": lambda x, residual: x.view(6, 8).view(1, 6, 8) + sum_of(x),
}


@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("add", ADDS)
def test_a_sum_takes_what_is_added_to_it(add, inference, rewriter, given):
    with torch.inference_mode(inference), torch.no_grad():
        assert rewriter.rewrite(ADDS[add], *given) == [1]
    assert rewriter.gone == [1]


def test_the_residual_of_a_sum_may_be_another_one(rewriter, given):
    with torch.no_grad():
        assert rewriter.rewrite(lambda x, _: sum_of(x * 2) + sum_of(x), *given) == [0, 1]
    assert rewriter.gone == [1]


@pytest.fixture
def exact(given):
    """In float32, where it does not matter whether a sum of two is rounded before a third is added."""
    return [tensor.float() for tensor in given]


def layer(x, residual):
    """As layers add: a norm reads what is between."""
    between = residual + sum_of(x)
    return between + sum_of(between * 2)


def three(x, residual):
    for scale in (1, 2, 3):
        residual = residual + sum_of(residual * scale + x)
    return residual


def side_by_side(x, residual):
    return residual + sum_of(x) + sum_of(x * 2)


def written_between(x, residual):
    between = residual + sum_of(x)
    residual.mul_(2)
    return between + sum_of(between * 2)


def between_in_place(x, residual):
    between = sum_of(x)
    between += residual
    return between + sum_of(between * 2)


def between_twice(x, residual):
    between = residual + sum_of(x)
    return between + sum_of(between * 2), between + sum_of(between * 3)


@pytest.mark.parametrize(
    ("function", "residuals", "gone"),
    [
        (layer, [0, 2], 1),
        (three, [0, 2, 1], 2),
        (side_by_side, [0, 2], 2),
        (written_between, [1, 1], 2),
        (between_in_place, [1, 1], 2),
        (between_twice, [1, 1, 1], 3),
    ],
    ids=lambda of: of.__name__ if callable(of) else None,
)
def test_the_second_sum_of_a_layer_takes_the_terms_of_what_it_is_added_to(function, residuals, gone, rewriter, exact):
    """For any number of rows."""
    with torch.no_grad():
        assert rewriter.rewrite(function, *exact, dynamic=True) == residuals
    assert rewriter.gone == [gone]


def read_twice(x, residual):
    total = sum_of(x)
    return residual + total, total * 2


def returned_too(x, residual):
    total = sum_of(x)
    return residual + total, total


def written_in_between(x, residual):
    total = sum_of(x)
    residual.mul_(2)
    return residual + total


def a_part_written_in_between(x, residual):
    total = sum_of(x)
    residual[:, 1] = 0
    return residual + total


def computed_after(x, residual):
    total = sum_of(x)
    return residual * 2 + total


def added_in_place(x, residual):
    residual += sum_of(x)
    return residual


def by_out(x, residual):
    out = torch.empty_like(x)
    torch.add(sum_of(x), residual, out=out)
    return out


def with_gradients(x, residual):
    with torch.enable_grad():
        return residual + sum_of(x)


def under_autocast(x, residual):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return residual + sum_of(x)


ALONE = {
    "sum read twice": read_twice,
    "sum returned too": returned_too,
    "written in between": written_in_between,
    "a part written in between": a_part_written_in_between,
    "computed after": computed_after,
    "added in place": added_in_place,
    "added in place by a method": lambda x, residual: residual.add_(sum_of(x)),
    "by out": by_out,
    "with gradients": with_gradients,
    "under autocast": under_autocast,
    "one row for all": lambda x, residual: residual[:, :1] + sum_of(x),
    "one column for all": lambda x, residual: residual[..., :1].contiguous() + sum_of(x),
    "a bias": lambda x, residual: sum_of(x) + residual[0, 0],
    "a number": lambda x, residual: sum_of(x) + 1.0,
    "more than the sum": lambda x, residual: torch.cat([residual, x]) + sum_of(x),
    "one dimension less": lambda x, residual: residual[0] + sum_of(x),
    "float32": lambda x, residual: residual.float() + sum_of(x),
    "float16": lambda x, residual: residual.half() + sum_of(x),
    "alpha": lambda x, residual: torch.add(residual, sum_of(x), alpha=2),
    "alpha of a method": lambda x, residual: sum_of(x).add(residual, alpha=0.5),
    "itself": lambda x, residual: (lambda total: total + total)(sum_of(x)),
    "a view of the sum": lambda x, residual: residual[0] + sum_of(x).view(6, 8),
    "other strides": lambda x, residual: torch.cat([residual] * 3, -1)[..., :8] + sum_of(x),
    "a product": lambda x, residual: residual * sum_of(x),
    "a difference": lambda x, residual: residual - sum_of(x),
    "one residual already": lambda x, residual: residual + SUM(x.float(), ADDRESSES, x.dtype, x),
}


@pytest.mark.parametrize("add", ALONE)
def test_adds_that_are_something_else_stay_as_they_are(add, rewriter, given):
    with torch.no_grad():
        assert sum(rewriter.rewrite(ALONE[add], *given)) == (add == "one residual already")
    assert rewriter.gone == [0]


def test_where_gradients_are_recorded_all_stays_as_it_is(rewriter, given):
    """The op would refuse."""
    with torch.enable_grad():
        assert rewriter.rewrite(ADDS["after the residual"], *given) == [0]
    assert rewriter.gone == [0]
