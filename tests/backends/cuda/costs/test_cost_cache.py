"""Measured costs on the disk: whole or not at all; an estimate without them."""

import pytest

from prefixkit.attention.gpu.gpu_cost import H200
from prefixkit.backends.cuda.costs import cost_cache as gpu_cost_cache


def test_costs_come_back_as_they_were_kept(tmp_path):
    place = tmp_path / "deep" / "gpu.json"
    assert gpu_cost_cache.read(place) is None
    assert gpu_cost_cache.write(place, H200)
    assert gpu_cost_cache.read(place) == H200
    assert [path.name for path in place.parent.iterdir()] == ["gpu.json"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"sharing": {}, "tile": 1, "decode": 2}', "half a fi"])
def test_a_damaged_file_is_named_and_not_used(tmp_path, caplog, text):
    place = tmp_path / "gpu.json"
    place.write_text(text)
    assert gpu_cost_cache.read(place) is None
    assert "cannot be used" in caplog.text


def test_a_folder_that_cannot_be_written_is_named(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert not gpu_cost_cache.write(tmp_path / "file" / "gpu.json", H200)
    assert "cannot be kept" in caplog.text


def test_an_estimate_is_the_h200s_on_an_h200_and_scales_with_size_and_bandwidth():
    assert gpu_cost_cache.estimate(132, 4.8) == H200
    half = gpu_cost_cache.estimate(66, 2.4)
    assert half.decode.tokens_per_us == pytest.approx(H200.decode.tokens_per_us)
    assert half.sharing.kv_byte == pytest.approx(2 * H200.sharing.kv_byte)
    assert half.sharing.item == pytest.approx(2 * H200.sharing.item)
