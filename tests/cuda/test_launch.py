"""What a launch tells the driver, as far as that can be seen without a GPU."""

import gc
import weakref
from functools import partial

import pytest
import torch

driver = pytest.importorskip("cuda.bindings.driver")

from prefixkit.backends.cuda import attention as cuda_attention  # noqa: E402
from prefixkit.backends.cuda.prepared_attention import launch_signature  # noqa: E402
from prefixkit.cuda import tensor_maps as cuda_maps  # noqa: E402
from prefixkit.cuda.launch import LaunchCache, _config  # noqa: E402

IDS = driver.CUlaunchAttributeID
COOPERATIVE, PDL = IDS.CU_LAUNCH_ATTRIBUTE_COOPERATIVE, IDS.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


@pytest.mark.parametrize(("cooperative", "pdl"), [(True, False), (False, True), (True, True)])
def test_a_launch_asks_for_all_blocks_at_once_and_for_an_early_start_only_where_told(cooperative, pdl):
    config = _config((132, 2, 1), 512, 232_448, 7, cooperative, pdl)
    asked = {attribute.id: attribute.value for attribute in config.attrs}
    assert set(asked) == {name for name, wanted in ((COOPERATIVE, cooperative), (PDL, pdl)) if wanted}
    if cooperative:
        assert asked[COOPERATIVE].cooperative == 1
    if pdl:
        assert asked[PDL].programmaticStreamSerializationAllowed == 1
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (132, 2, 1)
    assert (config.blockDimX, config.sharedMemBytes, config.numAttrs) == (512, 232_448, cooperative + pdl)
    assert int(config.hStream) == 7


def test_the_same_launch_is_described_once():
    one = _config((132, 1, 1), 512, 1024, 0, True, True)
    assert _config((132, 1, 1), 512, 1024, 0, True, True) is one
    assert _config((132, 1, 1), 512, 1024, 1, True, True) is not one


def pages(num_pages=4, dtype=torch.bfloat16):
    return torch.zeros(num_pages, 16, 2, 64, dtype=dtype)


def test_launches_are_prepared_for_any_number_of_queries():
    """Prefills come in many lengths, and each preparation would be kept."""

    def signature(key="causal", rows=1, heads=4, head_dim=64, dtype=torch.float32, k=None, v=None, sinks=None):
        k, v = (pages() if x is None else x for x in (k, v))
        return launch_signature(key, torch.zeros(rows, heads, head_dim, dtype=dtype), k, v, sinks)

    signatures = {signature(rows=rows) for rows in range(100)}
    assert len(signatures) == 1
    others = [
        signature(key="sliding_window(7)"),
        signature(heads=8),
        signature(head_dim=128),
        signature(dtype=torch.float16),
        signature(k=pages(5)),
        signature(v=pages(5)),
        signature(k=pages(dtype=torch.float16)),
        signature(k=pages().transpose(1, 2).contiguous().transpose(1, 2)),
        signature(sinks=torch.zeros(4)),
        signature(sinks=torch.zeros(5)),
        signature(sinks=torch.zeros(4).half()),
        signature(sinks=torch.zeros(8)[::2]),
        launch_signature("causal", torch.zeros(4, 64), pages(), pages(), None),
    ]
    assert len({*signatures, *others}) == 1 + len(others)


def test_tensor_maps_are_made_once_for_a_layer_and_cached_up_to_a_number():
    made, layers = [], [(pages(), pages()) for _ in range(3)]

    def make(k_pages, v_pages, rotary_pages):
        made.append((k_pages.data_ptr(), v_pages.data_ptr()))
        return (made[-1][0].to_bytes(8, "little"),)

    cache = LaunchCache()
    cached = partial(cuda_maps.cached_tensor_maps, cache, make=make)
    for _ in range(5):
        for k, v in layers:
            assert cached(k, v, "signature") == (k.data_ptr().to_bytes(8, "little"),)
    assert len(made) == 3
    cached(*layers[0], "another signature at the same address")
    assert len(made) == 4
    for number in range(3 * LaunchCache.SIZE):
        cached(*layers[0], number)
        assert len(cache) <= LaunchCache.SIZE


@pytest.mark.parametrize("elements", [0, 1, 7, 8, 9, 1000, 2**20 - 1, 2**20, 2**20 + 1])
def test_partial_states_have_room_and_little_more(elements):
    space = cuda_attention.partials_workspace(elements, torch.device("cpu"))
    assert elements <= space.numel() <= elements * 9 / 8
    if elements:
        assert space.numel() <= 1 << (elements - 1).bit_length(), "what is sized to a power of two stays below it"


def test_partial_states_go_when_the_call_returns():
    held = weakref.ref(cuda_attention.partials_workspace(1000, torch.device("cpu")))
    gc.collect()
    assert held() is None
