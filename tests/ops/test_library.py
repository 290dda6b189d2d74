"""The ops as torch sees them: schemas, fakes, autograd, compilation; and what they say to wrong arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from prefixkit.attention.planner import StepPlan
from prefixkit.attention.queries import StepTree
from prefixkit.attention.sharing import CPU_COST
from prefixkit.attention.variants import UnknownVariant, attention_sinks, lookup, register, sliding_window, soft_cap
from prefixkit.backends.torch.host_planner import NoSuchPlan, bind
from prefixkit.ops.arguments import BadDevice, BadDtype, BadShape
from prefixkit.ops.library import NoBackward
from prefixkit.testing.forests import Case, plan_of, random_case
from tests.covering import pairwise_cover

ops = torch.ops.prefixkit


# A handle names a plan for as long as the plan is held.
held: list[StepPlan] = []


@pytest.fixture(autouse=True)
def plans() -> Iterator[None]:
    yield
    held.clear()


def pages(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randn(4, 8, 2, 16).to(dtype), torch.randn(4, 8, 2, 16).to(dtype)


def arguments(case: Case, variant: str = "causal") -> tuple[Any, ...]:
    """Of ``tree_attention``."""
    held.append(bind(plan_of(case, CPU_COST), StepTree(case.snapshot, case.queries)))
    plan, sinks = held[-1].tensors, case.sinks_for(lookup(variant))
    return case.q, case.k_pages, case.v_pages, case.positions, plan, case.scale, variant, sinks


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("dtype", "slots", "gradient"), pairwise_cover(product(DTYPES, ((3, 31, 0), ()), (False, True))), ids=str
)
def test_opcheck_kv_append(dtype: torch.dtype, slots: tuple[int, ...], gradient: bool) -> None:
    key, value = torch.randn(2, len(slots), 2, 16).to(dtype)
    where = torch.tensor(slots, dtype=torch.int64)
    torch.library.opcheck(ops.kv_append.default, (key.requires_grad_(gradient), value, *pages(dtype), where))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slots", [(3, 31, 0), ()])
def test_opcheck_index_append(dtype: torch.dtype, slots: tuple[int, ...]) -> None:
    where = torch.tensor(slots, dtype=torch.int64)
    torch.library.opcheck(ops.index_append.default, (torch.randn(len(slots), 2, 16).to(dtype), pages(dtype)[0], where))


@pytest.mark.parametrize(
    ("keys", "of", "error", "message"),
    [
        (torch.zeros(3, 2, 8), torch.zeros(4, 8, 2, 16), BadShape, r"keys must have shape \[3, 2, 16\]"),
        (torch.zeros(3, 16), torch.zeros(4, 8, 2, 16), BadShape, r"keys must have shape \[3, 2, 16\]"),
        (
            torch.zeros(3, 2, 16).half(),
            torch.zeros(4, 8, 2, 16),
            BadDtype,
            r"keys must be torch.float32 like the pages",
        ),
        (torch.zeros(3, 2, 16), torch.zeros(4, 8, 32), BadShape, r"pages must have shape \[pages, page_size, heads"),
        (torch.zeros(3, 2, 16), torch.zeros(4, 8, 16, 2).mT, BadShape, r"pages must have stride 1 over dim"),
    ],
)
def test_index_append_says_what_is_wrong(keys: Tensor, of: Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"index_append: {message}"):
        ops.index_append(keys, of, torch.arange(3))


# With gradients the AOT check runs the backward and compares it with eager's; ours refuses in both, which
# test_gradients_are_refused_by_name checks instead.
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("dtype", "variant", "seed"),
    pairwise_cover(product(DTYPES, ("causal", "window", "cap", "sinks"), range(3))),
    ids=str,
)
def test_opcheck_tree_attention(dtype: torch.dtype, variant: str, seed: int) -> None:
    made = {"window": sliding_window(5), "cap": soft_cap(4.0), "sinks": attention_sinks()}
    key = register(made[variant]) if variant in made else variant
    case = random_case(np.random.default_rng(seed), dtype)
    torch.library.opcheck(ops.tree_attention.default, arguments(case, key), test_utils=CHECKS)
    case.q.requires_grad_()
    torch.library.opcheck(ops.tree_attention.default, arguments(case, key), test_utils=CHECKS[:3])


@pytest.mark.parametrize(("backend", "dynamic"), [("eager", True), ("aot_eager", None)])
def test_a_layer_compiles_into_one_graph(backend: str, dynamic: bool | None) -> None:
    """Append, attend: no graph break, and the numbers of eager."""

    def layer(key: Tensor, value: Tensor, slots: Tensor, q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        ops.kv_append(key, value, rest[0], rest[1], slots)
        out, lse = ops.tree_attention(2 * q, *rest)
        return out + 1, lse

    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=backend, dynamic=dynamic)
    for seed in range(3):
        case = random_case(np.random.default_rng(seed))
        rows = len(case.q)
        slots = torch.from_numpy(case.snapshot.slots(case.row_node, case.queries.row_offset()))
        key, value = torch.randn(2, rows, *case.k_pages.shape[2:])
        results = []
        for function in (layer, compiled):
            q, k_pages, v_pages, *rest = arguments(case)
            args = (q, k_pages.clone(), v_pages.clone(), *rest)
            results.append((*function(key, value, slots, *args), *args[1:3]))
        for eager, from_graph in zip(*results, strict=True):
            torch.testing.assert_close(eager, from_graph, rtol=0, atol=0, equal_nan=True)


def test_gradients_are_refused_by_name() -> None:
    case = random_case(np.random.default_rng(0))
    case.q.requires_grad_()
    out, lse = ops.tree_attention(*arguments(case))
    for result in (out, lse):
        assert result.requires_grad
        with pytest.raises(NoBackward, match="inference_mode"):
            result.sum().backward(retain_graph=True)


def changed(position: int, change: Callable[[Any], Any], inner: int | None = None) -> Callable[..., tuple[Any, ...]]:
    def apply(*args: Any) -> tuple[Any, ...]:
        args_list = list(args)
        if inner is None:
            args_list[position] = change(args_list[position])
        else:
            args_list[position] = list(args_list[position])
            args_list[position][inner] = change(args_list[position][inner])
        return tuple(args_list)

    return apply


WRONG = {
    "q dtype": (
        changed(0, lambda q: q.double()),
        BadDtype,
        "q must be torch.float32 like the pages, got torch.float64",
    ),
    "q dims": (changed(0, lambda q: q[0]), BadShape, r"q must have shape \[T, heads, 32\]"),
    "head_dim": (changed(0, lambda q: q[..., :16]), BadShape, r"q must have shape \[T, heads, 32\]"),
    "heads": (changed(0, lambda q: q[:, :3]), BadShape, "3 heads, which must be a multiple of the pages' 2 KV heads"),
    "rows": (changed(3, lambda p: p[1:]), BadShape, "q_positions must have shape"),
    "positions dtype": (changed(3, lambda p: p.int()), BadDtype, "q_positions must be torch.int64"),
    "k dtype": (changed(1, lambda k: k.double()), BadDtype, "k_pages must be"),
    "v dtype": (changed(2, lambda v: v.bfloat16()), BadDtype, "v_pages must be torch.float32 like k_pages"),
    "v shape": (changed(2, lambda v: v[:, :, :1]), BadShape, "v_pages must have shape .* like k_pages"),
    "strides": (changed(1, lambda k: k.repeat(1, 1, 1, 2)[..., ::2]), BadShape, "stride 1 over head_dim"),
    "head-major": (
        changed(1, lambda k: k.transpose(1, 2).contiguous().transpose(1, 2)),
        BadShape,
        "k_pages must be token-major.*make it with KVPool",
    ),
    "no plan": (changed(4, lambda _: []), BadShape, "plan must be the tensors of Step.plan, got none"),
    "handle dtype": (changed(4, lambda t: t.int(), -1), NoSuchPlan, "plan must end with a handle, .* got torch.int32"),
    "handle shape": (changed(4, lambda t: t[0], -1), NoSuchPlan, r"of one number, got torch.int64 of shape \[\]"),
    "another handle": (changed(4, lambda t: t + 10**9, -1), NoSuchPlan, "plan 1.* is gone; keep the Step"),
    "fewer rows": (
        lambda q, k, v, positions, *rest: (q[1:], k, v, positions[1:], *rest),
        BadShape,
        "the plan is for 123 queries, but q has 122 rows",
    ),
    "pool": (
        lambda q, k, v, *rest: (q, k[:1], v[:1], *rest),
        IndexError,
        r"nodes name slots \d+\.\.\d+, but the pages hold slots 0",
    ),
    "variant": (changed(6, lambda _: "nonsense"), UnknownVariant, "no variant is registered as 'nonsense'"),
}


@pytest.mark.parametrize("what", WRONG)
def test_tree_attention_says_what_is_wrong(what: str) -> None:
    change, error, message = WRONG[what]
    args = arguments(random_case(np.random.default_rng(5), heads=(4, 2, 32)))
    with pytest.raises(error, match=message):
        ops.tree_attention(*change(*args))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda sinks: None, BadShape, "variant 'attention_sinks' has sinks, but none are given"),
        (lambda sinks: sinks[1:], BadShape, r"sinks must have shape \[4\] \(heads of q\), contiguous, got \[3\]"),
        (lambda sinks: sinks[None], BadShape, r"sinks must have shape \[4\]"),
        (lambda sinks: sinks[:1].expand(4), BadShape, r"sinks must have shape \[4\] \(heads of q\), contiguous"),
        (lambda sinks: sinks.double(), BadDtype, "sinks must be torch.bfloat16 like q, got torch.float64"),
        (lambda sinks: sinks.to("meta"), BadDevice, "sinks is on meta, but the first tensor is on cpu"),
    ],
)
def test_sinks_are_a_logit_for_each_head_like_q(
    change: Callable[[Tensor], Tensor | None], error: type[Exception], message: str
) -> None:
    case = random_case(np.random.default_rng(5), torch.bfloat16, heads=(4, 2, 32))
    *others, sinks = arguments(case, register(attention_sinks()))
    with pytest.raises(error, match=message):
        ops.tree_attention(*others, change(sinks))


def test_sinks_are_refused_by_a_variant_without() -> None:
    case = random_case(np.random.default_rng(5))
    with pytest.raises(BadShape, match="variant 'causal' has no sinks, but some are given"):
        ops.tree_attention(*arguments(case)[:-1], case.sinks)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (changed(0, lambda key: key[1:]), BadShape, r"key must have shape \[3, 2, 16\]"),
        (changed(1, lambda value: value.double()), BadDtype, "value must be torch.float32 like the pages"),
        (changed(3, lambda v: v[0]), BadShape, "v_pages must have shape"),
        (changed(4, lambda slots: slots.int()), BadDtype, "slots must be torch.int64"),
        (changed(4, lambda slots: slots[None]), BadShape, r"slots must have shape \[N\]"),
        (changed(4, lambda slots: slots + 30), IndexError, "slots 33..61"),
    ],
)
def test_kv_append_says_what_is_wrong(
    change: Callable[..., tuple[Any, ...]], error: type[Exception], message: str
) -> None:
    args = (torch.randn(3, 2, 16), torch.randn(3, 2, 16), *pages(), torch.tensor([3, 31, 4]))
    with pytest.raises(error, match=message):
        ops.kv_append(*change(*args))


def test_fakes_check_devices() -> None:
    pages = torch.empty(4, 8, 2, 16, device="meta")
    with pytest.raises(BadDevice, match="key is on cpu, but the first tensor is on meta"):
        ops.kv_append(torch.empty(1, 2, 16), pages[0, :1], pages, pages, torch.empty(1, device="meta").long())
