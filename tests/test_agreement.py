"""What processes agree on, by one process of gloo: what it sends it gets back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from prefixkit.agreement import ALONE, ProcessesDiffer, Together, all_or_none, everywhere


@pytest.fixture
def together(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield Together(torch.distributed.group.WORLD, torch.distributed.group.WORLD)
    torch.distributed.destroy_process_group()


def test_numbers_and_objects_come_back(together):
    assert (together.processes, together.rank) == (1, 0)
    assert together.least(-(2**62)) == -(2**62)
    assert everywhere(together, True) and not everywhere(together, False)
    assert together.first({"a": [1, range(3)]}) == {"a": [1, range(3)]}


@pytest.mark.parametrize("inference", [False, True])
def test_tensors_of_any_shape_dtype_and_stride_come_back(together, inference):
    with torch.inference_mode(inference):
        given = [
            torch.randn(3, 4).t()[1:],
            torch.randint(0, 9, (5,)),
            torch.tensor([True, False, True]),
            torch.randn(7).bfloat16(),
            torch.empty(0, 3),
            torch.tensor(2.5),
        ]
        want = [one.clone() for one in given]
    together.broadcast(*given)
    assert all(map(torch.equal, given, want))
    together.broadcast()
    together.exchange(*(one for one in given if one.is_contiguous() and one.ndim))
    assert all(map(torch.equal, given, want))


@dataclass(frozen=True)
class Asked:
    tokens: np.ndarray
    stops: tuple[object, ...]


@pytest.fixture
def change(monkeypatch):
    """Lets a function change what processes find before they compare it."""

    def compared(by):
        reduce = torch.distributed.all_reduce
        monkeypatch.setattr(torch.distributed, "all_reduce", lambda found, *how: (by(found), reduce(found, *how)))

    return compared


def test_equal_content_has_equal_digests(together, change):
    seen = []
    change(lambda found: seen.append(found.tolist()))
    values = [
        lambda: Asked(np.arange(4), (lambda tokens: True, "end")),
        lambda: Asked(np.arange(4), (lambda tokens: True, "end.")),
        lambda: Asked(np.arange(4, dtype=np.int16), (lambda tokens: True, "end")),
        lambda: Asked(np.arange(5), (lambda tokens: True, "end")),
        lambda: {"a": torch.arange(3)},
        lambda: {"a": torch.arange(3).int()},
        lambda: [[1], 2],
        lambda: [1, [2]],
        lambda: [range(3), object()],
    ]
    for value in values:
        together.check("things", value)
        together.check("things", value)
    assert seen[::2] == seen[1::2] and len({*map(tuple, seen)}) == len(values)


def test_where_another_process_differs_this_one_raises(together, change):
    change(lambda found: found[0].sub_(1))
    with pytest.raises(
        ProcessesDiffer, match="1 processes that share the model have different seeds; call manual_seed"
    ):
        together.check("seeds", lambda: 5, "call manual_seed")


def test_what_fails_in_one_process_has_failed_in_all():
    class Other(type(ALONE)):
        def least(self, number):
            return 0

    def fails():
        raise KeyError("here")

    with pytest.raises(KeyError, match="here"):
        all_or_none(ALONE, KeyError, fails)
    with pytest.raises(KeyError, match="another process"):
        all_or_none(Other(), KeyError, lambda: 1)
    assert all_or_none(ALONE, KeyError, lambda: 1) == 1


def test_alone_nothing_is_computed_for_it():
    ALONE.check("things", lambda: pytest.fail("it is not called"))
    ALONE.broadcast(torch.empty(3))
    ALONE.exchange(torch.empty(3))
    assert ALONE.least(3) == 3 and ALONE.first("x") == "x"
