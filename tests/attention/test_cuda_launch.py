"""What a launch tells the driver, as far as that can be seen without a GPU."""

import pytest
import torch

driver = pytest.importorskip("cuda.bindings.driver")

from prefixkit.attention import cuda_attention  # noqa: E402
from prefixkit.attention.cuda_checks import CudaError  # noqa: E402
from prefixkit.attention.cuda_launch import Layout, _config  # noqa: E402

IDS = driver.CUlaunchAttributeID
TOGETHER, FOLLOWS = IDS.CU_LAUNCH_ATTRIBUTE_COOPERATIVE, IDS.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


@pytest.mark.parametrize(("together", "follows"), [(True, False), (False, True), (True, True)])
def test_a_launch_asks_for_all_blocks_at_once_and_for_an_early_start_only_where_told(together, follows):
    config = _config((132, 2, 1), 512, 232_448, 7, together, follows)
    asked = {attribute.id: attribute.value for attribute in config.attrs}
    assert set(asked) == {name for name, wanted in ((TOGETHER, together), (FOLLOWS, follows)) if wanted}
    if together:
        assert asked[TOGETHER].cooperative == 1
    if follows:
        assert asked[FOLLOWS].programmaticStreamSerializationAllowed == 1
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (132, 2, 1)
    assert (config.blockDimX, config.sharedMemBytes, config.numAttrs) == (512, 232_448, together + follows)
    assert int(config.hStream) == 7


def test_the_same_launch_is_described_once():
    one = _config((132, 1, 1), 512, 1024, 0, True, True)
    assert _config((132, 1, 1), 512, 1024, 0, True, True) is one
    assert _config((132, 1, 1), 512, 1024, 1, True, True) is not one


def test_a_layout_pads_a_struct_as_c_does():
    assert Layout("PiiPf").packer.size == 8 + 4 + 4 + 8 + 4


def test_there_is_a_counter_for_every_graph_however_many_are_captured(monkeypatch):
    """As long as something runs without a graph now and then, which alone can make room."""
    zeros, graphs = torch.zeros, iter(range(10**6))
    monkeypatch.setattr(cuda_attention, "_counters", {})
    monkeypatch.setattr(cuda_attention, "_capture_id", lambda stream: next(graphs))
    monkeypatch.setattr(torch, "zeros", lambda size, dtype, device: zeros(size, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    with pytest.raises(CudaError, match="call it once before"):
        cuda_attention._counter(0, 7, capturing=True)
    alone = cuda_attention._counter(0, 7, capturing=False)
    assert cuda_attention._counter(0, 7, capturing=False) == alone
    seen = {alone}
    for count in range(3 * cuda_attention._COUNTERS):
        seen.add(cuda_attention._counter(0, 7, capturing=True))
        if count % 1000 == 0:
            assert cuda_attention._counter(0, 7, capturing=False) == alone
    assert len(seen) == 1 + 3 * cuda_attention._COUNTERS, "no two share one"
