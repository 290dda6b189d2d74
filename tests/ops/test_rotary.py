"""Rotary embedding and appending as one op: what it computes and refuses, and that torch knows its schema."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from prefixkit.ops.arguments import BadDevice, BadDtype, BadShape
from prefixkit.ops.library import NoBackward
from tests.attention.rotations import (
    DTYPES,
    bits,
    check_error,
    fresh_rng,
    nan_pages,
    random_rows,
    random_slots,
)
from tests.covering import pairwise_cover
from tests.ops.test_library import changed

ops = torch.ops.prefixkit


def arguments(dtype: torch.dtype = torch.float32, tokens: int = 3, head_major: bool = False) -> list[Any]:
    """Of 4 and 2 heads of 16, with 32 slots full of NaN."""
    rng = fresh_rng()
    k_pages, v_pages, _ = nan_pages((4, 8, 2, 16), dtype, head_major)
    return [*random_rows(rng, dtype, tokens, 4, 2, 16), k_pages, v_pages, random_slots(rng, tokens, 32)]


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("dtype", "tokens", "head_major", "heads_first"),
    pairwise_cover(product(DTYPES, (1, 3), (False, True), (False, True))),
    ids=str,
)
def test_opcheck(dtype: torch.dtype, tokens: int, head_major: bool, heads_first: bool) -> None:
    args = arguments(dtype, tokens, head_major)
    if heads_first:
        args[:3] = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in args[:3]]
    torch.library.opcheck(ops.rotary_append.default, args)


def test_opcheck_without_rows() -> None:
    args = arguments(torch.bfloat16, 0)
    rows = [x.new_empty(x.shape) for x in args[:5]]
    pages = arguments(torch.bfloat16, 3)[5:7]
    torch.library.opcheck(ops.rotary_append.default, [*rows, *pages, torch.arange(0)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [2, 16, 64, 80, 256])
@pytest.mark.parametrize("head_major", [False, True], ids=["token-major", "head-major"])
def test_it_turns_queries_and_keys_and_writes_where_kv_append_does(
    dtype: torch.dtype, head_dim: int, head_major: bool
) -> None:
    """Parts of one projection, with NaN around them; a key is turned as a query is."""
    rng = fresh_rng()
    for tokens, heads, kv_heads, page_size in ((200, 8, 2, 16), (30, 3, 3, 1), (120, 4, 1, 3)):
        q, key, value, cos, sin = random_rows(rng, dtype, tokens, heads, kv_heads, head_dim)
        shape = (-(-tokens // page_size) + 2, page_size, kv_heads, head_dim)
        slots = random_slots(rng, tokens, shape[0] * page_size)
        (k, v, pool), (k_alone, v_alone, pool_alone) = (nan_pages(shape, dtype, head_major) for _ in range(2))
        rotated = ops.rotary_append(q, key, value, cos, sin, k, v, slots)
        check_error(rotated, q, cos, sin)
        elsewhere = nan_pages(shape, dtype)[:2]
        turned = ops.rotary_append(key, key, value, cos, sin, *elsewhere, slots)
        check_error(turned, key, cos, sin)
        ops.kv_append(turned, value, k_alone, v_alone, slots)
        assert torch.equal(bits(pool), bits(pool_alone))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_change_nothing(dtype: torch.dtype) -> None:
    args = arguments(dtype, 9)

    def run(change: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        rows = [change(x) for x in args[:5]]
        assert all(torch.equal(one, other) for one, other in zip(rows, args, strict=False))
        pages, slots = [x.clone() for x in args[5:7]], change(args[7][:, None])[:, 0]
        rotated = ops.rotary_append(*rows, *pages, slots)
        assert rotated.is_contiguous(), "as the fake says"
        assert rotated.data_ptr() != rows[0].data_ptr()
        return [bits(x) for x in (rotated, *pages)]

    expected = run(torch.clone)
    for change in (
        lambda x: x,
        lambda x: x.contiguous(),
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: x.repeat_interleave(2, dim=-1)[..., ::2],
        lambda x: x.mT.contiguous().mT,
        lambda x: torch.stack((x, x))[1],
    ):
        assert all(torch.equal(one, other) for one, other in zip(run(change), expected, strict=True))


@pytest.mark.parametrize("permuted", [False, True], ids=["rows first", "heads first"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_it_compiles_and_what_comes_after_may_view_it(backend: str, permuted: bool) -> None:
    def function(*args: Any) -> torch.Tensor:
        rotated: torch.Tensor = ops.rotary_append(*args)
        return rotated.view(rotated.shape[0], -1)

    args = arguments(tokens=9)
    if permuted:
        args[0] = args[0].transpose(0, 1).contiguous().transpose(0, 1)
    torch.compiler.reset()
    results = []
    for run in (function, torch.compile(function, fullgraph=True, backend=backend)):
        pages = [x.clone() for x in args[5:7]]
        results.append([bits(x) for x in (run(*args[:5], *pages, args[7]), *pages)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_no_tokens_write_nothing() -> None:
    args = arguments(tokens=0)
    assert ops.rotary_append(*args).shape == (0, 4, 16)
    assert args[5].isnan().all() and args[6].isnan().all()


WRONG = {
    "q dims": (changed(0, lambda q: q[0]), BadShape, r"q must have shape \[3, heads, 16\] \(slots, then head_dim"),
    "q rows": (changed(0, lambda q: q[1:]), BadShape, r"q must have shape .*, got \[2, 4, 16\]"),
    "q head_dim": (changed(0, lambda q: q[..., :8]), BadShape, "q must have shape"),
    "q dtype": (changed(0, lambda q: q.half()), BadDtype, "q must be torch.float32 like the pages, got torch.float16"),
    "q device": (changed(0, lambda q: q.to("meta")), BadDevice, "q is on meta, but the first tensor is on cpu"),
    "key rows": (changed(1, lambda key: key[1:]), BadShape, r"key must have shape \[3, 2, 16\]"),
    "key heads": (changed(1, lambda key: key[:, :1]), BadShape, r"key must have shape \[3, 2, 16\]"),
    "key dtype": (changed(1, lambda key: key.double()), BadDtype, "key must be torch.float32 like the pages"),
    "value shape": (changed(2, lambda value: value[..., :8]), BadShape, r"value must have shape \[3, 2, 16\]"),
    "value device": (changed(2, lambda value: value.to("meta")), BadDevice, "value is on meta"),
    "cos for a half": (changed(3, lambda cos: cos[:, :8]), BadShape, r"cos must have shape \[3, 16\], got \[3, 8\]"),
    "cos for all": (changed(3, lambda cos: cos[:1]), BadShape, r"cos must have shape \[3, 16\], got \[1, 16\]"),
    "cos dims": (changed(3, lambda cos: cos[None]), BadShape, r"cos must have shape \[3, 16\], got \[1, 3, 16\]"),
    "sin rows": (changed(4, lambda sin: sin[1:]), BadShape, r"sin must have shape \[3, 16\]"),
    "sin dtype": (changed(4, lambda sin: sin.bfloat16()), BadDtype, "sin must be torch.float32 like the pages"),
    "sin device": (changed(4, lambda sin: sin.to("meta")), BadDevice, "sin is on meta"),
    "k dtype": (changed(5, lambda k: k.double()), BadDtype, "k_pages must be torch.float32 or"),
    "k strides": (changed(5, lambda k: k.repeat(1, 1, 1, 2)[..., ::2]), BadShape, "k_pages must have stride 1"),
    "v shape": (changed(6, lambda v: v[1:]), BadShape, "v_pages must have shape .* like k_pages"),
    "slots dtype": (changed(7, lambda slots: slots.int()), BadDtype, "slots must be torch.int64"),
    "slots dims": (changed(7, lambda slots: slots[None]), BadShape, r"slots must have shape \[N\]"),
    "slots count": (changed(7, lambda slots: slots[1:]), BadShape, r"key must have shape \[2, 2, 16\]"),
    "slot 32": (changed(7, lambda _: torch.tensor([3, 32, 0])), IndexError, r"slots 0..32, but the pages .* 0..31"),
    "slot -2": (changed(7, lambda _: torch.tensor([3, 4, -2])), IndexError, r"slots -2..4, but the pages"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_said_before_anything_is_written(what: str) -> None:
    change, error, message = WRONG[what]
    args = arguments()
    with pytest.raises(error, match=f"^rotary_append: {message}"):
        ops.rotary_append(*change(*args))
    assert args[5].isnan().all() and args[6].isnan().all()


def test_a_head_has_two_halves() -> None:
    rng = fresh_rng()
    k_pages, v_pages, pool = nan_pages((4, 8, 2, 15), torch.float32)
    rows = [x[..., :15] for x in random_rows(rng, torch.float32, 3, 4, 2, 16)]
    with pytest.raises(BadShape, match="rotary_append: halves of a head turn against each other, but head_dim is 15"):
        ops.rotary_append(*rows, k_pages, v_pages, torch.arange(3))
    assert pool.isnan().all()


@pytest.mark.parametrize("which", [0, 1, 2], ids=["q", "key", "value"])
def test_gradients_are_refused_at_once(which: int) -> None:
    args = arguments()
    expected = ops.rotary_append(*args[:5], *(x.clone() for x in args[5:7]), args[7])
    args[which] = args[which].clone().requires_grad_()
    with pytest.raises(NoBackward, match="inference_mode"):
        ops.rotary_append(*args)
    assert args[5].isnan().all() and args[6].isnan().all()
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            rotated = ops.rotary_append(*args)
        assert torch.equal(rotated, expected) and not rotated.requires_grad
