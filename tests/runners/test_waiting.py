"""Which ops make the host wait for a device; the meta device stands for one."""

from __future__ import annotations

import pytest
import torch

from prefixkit.runners.graph_arrays import CannotCapture
from prefixkit.runners.waiting import RefuseWaiting, waits

aten = torch.ops.aten
THERE, HERE = torch.zeros(4, device="meta"), torch.zeros(4)
MASK, INDEX = (torch.zeros(4, dtype=dtype, device="meta") for dtype in (torch.bool, torch.int64))


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "answer"),
    [
        (aten._local_scalar_dense.default, (THERE,), {}, True),
        (aten._local_scalar_dense.default, (HERE,), {}, False),
        (aten.nonzero.default, (THERE,), {}, True),
        (aten.index.Tensor, (THERE, [MASK]), {}, True),
        (aten.index.Tensor, (THERE, [None, INDEX]), {}, False),
        (aten.index_put_.default, (THERE, [MASK], THERE), {}, True),
        (aten.index_put_.default, (THERE, [INDEX], THERE), {}, False),
        (aten.index_put_.default, (THERE, [MASK, None], HERE[0]), {}, False),
        (aten.index_put_.default, (THERE, [MASK, INDEX], HERE[0]), {}, True),
        (aten.index_put_.default, (THERE, [MASK], HERE[0], True), {}, True),
        (aten.index_put_.default, (THERE, [MASK], THERE[0]), {}, True),
        (aten.add.Tensor, (THERE, THERE), {}, False),
        (aten._to_copy.default, (THERE,), {"device": torch.device("cpu")}, True),
        (aten._to_copy.default, (HERE,), {"device": torch.device("meta")}, True),
        (aten._to_copy.default, (THERE,), {"dtype": torch.float64}, False),
        (aten.copy_.default, (HERE, THERE), {}, True),
        (aten.copy_.default, (THERE, HERE, True), {}, False),
        (aten.copy_.default, (HERE, HERE), {}, False),
    ],
)
def test_an_op_waits_where_the_host_has_to_see_what_a_device_holds(func, args, kwargs, answer):
    assert waits(func, args, kwargs) == answer


def test_a_step_that_waits_is_refused_and_another_is_left_alone():
    with RefuseWaiting():
        assert torch.equal(HERE.add(1).nonzero().flatten(), torch.arange(4)), "the host's own numbers are there"
        THERE.mul(2)
        with pytest.raises(CannotCapture, match=r"the model waits for the GPU in each step.*aten\.nonzero"):
            THERE.nonzero()
    with pytest.raises(NotImplementedError):
        THERE.nonzero().tolist()
