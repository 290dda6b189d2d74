"""The contract of slots, on each backend that runs without a GPU; tests/gpu/test_ops.py runs the same table on one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import prefixkit.ops.library  # noqa: F401  (declares torch.ops.prefixkit)
from prefixkit.backends.torch.plain_kv import append_on_gpu, rotate
from prefixkit.checking import checked_mode
from tests.attention.slots import OPS, SLOTS, WRONG, Append, Appended, rotations

CPU = {name: getattr(torch.ops.prefixkit, name) for name in OPS}


def kv_append_on_gpu(key: Tensor, value: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    append_on_gpu("kv_append", (key, value), (k_pages, v_pages), slots)


def rotary_append_on_gpu(
    q: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor
) -> Tensor:
    append_on_gpu("rotary_append", (rotate(key, cos, sin), value), (k_pages, v_pages), slots)
    return rotate(q, cos, sin)


def index_append_on_gpu(keys: Tensor, pages: Tensor, slots: Tensor) -> None:
    append_on_gpu("index_append", (keys,), (pages,), slots)


# The way of plain torch on a GPU runs on any device; as on a GPU it reads no slots on the host.
TORCH = {"kv_append": kv_append_on_gpu, "rotary_append": rotary_append_on_gpu, "index_append": index_append_on_gpu}
BACKENDS = {"cpu": CPU, "torch": TORCH}


@pytest.mark.parametrize("head_major", [False, True], ids=["token-major", "head-major"])
@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_of_slot_minus_one_writes_nothing(backend: str, name: str, slots: str, head_major: bool) -> None:
    appended = Appended(SLOTS[slots], head_major=head_major)
    appended.by(name, BACKENDS[backend][name])
    appended.check(*rotations(appended))


@pytest.mark.parametrize("slots", WRONG)
@pytest.mark.parametrize("name", OPS)
def test_the_cpu_refuses_other_slots_before_it_writes(name: str, slots: str) -> None:
    appended = Appended(WRONG[slots])
    with pytest.raises(IndexError, match=rf"^{name}: slots .*the pages hold slots 0\.\.31.*only -1"):
        appended.by(name, CPU[name])
    assert appended.nothing_written()


@pytest.mark.parametrize("slots", WRONG)
@pytest.mark.parametrize("name", OPS)
def test_a_device_writes_other_slots_nowhere(name: str, slots: str) -> None:
    appended = Appended(WRONG[slots])
    appended.by(name, TORCH[name])
    appended.check(*rotations(appended))


@pytest.mark.parametrize("slots", WRONG)
@pytest.mark.parametrize("name", OPS)
def test_a_device_refuses_other_slots_in_checked_mode(name: str, slots: str) -> None:
    appended = Appended(WRONG[slots])
    with checked_mode(), pytest.raises(IndexError, match=rf"^{name}: slots must be 0\.\.31"):
        appended.by(name, TORCH[name])
    assert appended.nothing_written()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OPS)
def test_a_pool_without_pages_takes_padding(backend: str, name: str) -> None:
    appended = Appended([-1, -1])
    appended.k, appended.v = appended.k[:0], appended.v[:0]
    appended.by(name, BACKENDS[backend][name])


def test_compiled_code_keeps_the_contract() -> None:
    """No graph break, and eager's pages."""
    append: Append = torch.compile(CPU["kv_append"], fullgraph=True, backend="aot_eager")
    appended = Appended(SLOTS["the first slot, the last, and padding between"])
    appended.by("kv_append", append)
    appended.check(*rotations(appended))
