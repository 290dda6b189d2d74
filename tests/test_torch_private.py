"""torch's private names are there, and what stands in for one that is gone gives the same."""

import importlib

import pytest
import torch

from prefixkit import torch_private as private


def traced(x):
    return x + 1


def leave_modes():
    with private.outside_modes():
        return torch.zeros(1)


GRAPH = torch.fx.symbolic_trace(traced)
LAZY = {
    "torch._dynamo.maybe_mark_dynamic": lambda: private.mark_dynamic(torch.zeros(3), 0),
    "torch._C._dynamo.eval_frame.reset_code": lambda: private.drop_compiled(traced.__code__),
    "torch._guards.detect_fake_mode": lambda: (
        private.fake_mode_of([torch.zeros(3), 1]) is None or pytest.fail("a mode")
    ),
    "torch._subclasses.fake_tensor.FakeTensorMode": private.without_memory,
    "torch.utils._python_dispatch._disable_current_modes": leave_modes,
    "torch._dynamo.exc.FailOnRecompileLimitHit": private.compiler_errors,
}


def test_this_torch_lacks_nothing():
    for use in LAZY.values():
        use()
    of_gpus = [] if torch.version.cuda else ["_cuda_"]  # a build for CPUs has none of these
    assert not [name for name in private.missing if not any(part in name for part in of_gpus)]


@pytest.mark.parametrize("name", LAZY)
def test_what_is_gone_is_noted_and_done_without(name, monkeypatch):
    module, _, attribute = name.rpartition(".")
    try:
        owner = importlib.import_module(module)
    except ImportError:  # modules within torch._C are attributes
        owner = torch._C._dynamo.eval_frame
    known = len(private.missing)
    monkeypatch.delattr(owner, attribute)
    LAZY[name]()
    noted = private.missing[known:]
    del private.missing[known:]
    assert len(noted) == 1 and noted[0].endswith(attribute)


def test_tensors_without_memory_are_so_on_the_meta_device_too(monkeypatch):
    monkeypatch.delattr("torch._subclasses.fake_tensor.FakeTensorMode")
    with private.without_memory():
        assert torch.zeros(3, 4).device.type == "meta"
    private.missing.clear()


def test_a_graph_that_nothing_compiles_runs_as_it_is(monkeypatch):
    monkeypatch.delattr("torch._inductor.compile_fx.compile_fx")
    assert private.compile_graph(GRAPH, [torch.ones(2)], {})(torch.ones(2)).tolist() == [2.0, 2.0]
    private.missing.clear()


@pytest.mark.parametrize("storage", [private.storage_over, private.public_storage])
def test_memory_that_another_tensor_holds_is_read_and_written(storage):
    held = torch.arange(6, dtype=torch.int32)
    over = torch.empty(0, dtype=torch.int32).set_(storage(held.data_ptr() + 8, torch.device("cpu"), 16), 0, (4,))
    assert over.data_ptr() == held.data_ptr() + 8 and over.tolist() == [2, 3, 4, 5]
    over[0] = 9
    assert held.tolist() == [0, 1, 9, 3, 4, 5]


def test_tensors_over_one_memory_are_counted():
    first = torch.zeros(8)
    assert private.tensors_over(first) == 1
    views = [first[2:], first.view(2, 4)]
    assert private.tensors_over(first) == private.tensors_over(views[0]) == 3


def test_where_torch_does_not_count_tensors_their_number_is_unknown(monkeypatch):
    monkeypatch.setattr(private, "use_count", lambda storage: 0)
    assert private.tensors_over(torch.zeros(8)) is None
