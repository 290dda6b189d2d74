"""The pool's size: what is needed, within what is left."""

import types

import numpy as np
import pytest
import torch

from prefixkit.attention.gpu.capacity import MOST_PARTIAL_BYTES
from prefixkit.engine import memory as sizing
from prefixkit.engine.request import BeamParams, Request
from prefixkit.engine.request_state import admission_order
from prefixkit.runners.short_steps import ROWS, most_short_rows
from prefixkit.sampling.params import SamplingParams
from prefixkit.testing.kv_specs import spec_of_alike
from prefixkit.tree.radix import PrefixTree

SPEC = spec_of_alike(2, 4, 16)
PAGE = 8 * SPEC.bytes_per_token
CONFIG = types.SimpleNamespace(hidden_size=64, intermediate_size=160, num_attention_heads=4, vocab_size=1000)


def requests(n=3, new=17):
    return [Request(i, np.arange(20 + i), SamplingParams(n=n, max_new_tokens=new)) for i in range(2)]


def test_the_pool_holds_what_all_need_at_once_and_no_more():
    # 20 shared tokens in 3 pages, one more in a page of its own; each of 6 samples keeps 16 tokens of KV in 2 pages.
    assert sizing.pool_pages(requests(), SPEC, None, 8, 10**9) == 3 + 1 + 6 * 2


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_what_all_need_at_once_is_what_a_tree_of_them_takes(page_size):
    rng = np.random.default_rng(4)
    prompts = [rng.integers(0, 3, rng.integers(1, 40)) for _ in range(60)]
    asked = [Request(i, prompt, SamplingParams(max_new_tokens=1)) for i, prompt in enumerate(prompts)]
    tree = PrefixTree(4000, page_size)
    for request in admission_order(asked):
        tree.insert(request.tokens)
    assert sizing.pages_needed(asked, page_size) >= tree.allocator.num_pages - tree.allocator.free


def test_a_budget_bounds_it(caplog):
    caplog.set_level("INFO", "prefixkit")
    assert sizing.pool_pages(requests(), SPEC, 5 * PAGE + 1, 8, 10**9) == 5
    assert "5 of the 16 pages" in caplog.text


def test_a_budget_without_a_page_is_to_be_raised():
    with pytest.raises(ValueError, match=r"kv_budget=100 bytes holds no page; .*; raise kv_budget$"):
        sizing.pool_pages(requests(), SPEC, 100, 8, 10**9)


def test_on_a_gpu_steps_come_first():
    spec = spec_of_alike(2, 4, 16, torch.float32, torch.device("cuda"))
    assert sizing.pool_pages(requests(n=50), spec, None, 8, 100 * PAGE, workspace=55 * PAGE) == 40
    with pytest.raises(ValueError, match=r"holds no page.*MiB besides.*fewer samples"):
        sizing.pool_pages(requests(), spec, None, 8, 100 * PAGE, workspace=95 * PAGE)


def test_steps_take_more_for_more_samples_up_to_as_many_as_run():
    few, many = (sizing.step_bytes(CONFIG, SPEC, requests(n=n), 1024) for n in (1, 100))
    assert many > few > 1000 * 1024
    most = sizing.step_bytes(CONFIG, SPEC, requests(n=sizing.MOST_RUNNING), 1024)
    assert most == sizing.step_bytes(CONFIG, SPEC, requests(n=9 * sizing.MOST_RUNNING), 1024)
    beams = [Request(0, np.arange(5), BeamParams(num_beams=6))]
    assert sizing.step_bytes(CONFIG, SPEC, beams, 1024) == sizing.step_bytes(CONFIG, SPEC, requests(n=3), 1024)


def test_graphs_of_short_steps_have_room_for_the_rows_of_their_bucket():
    """Of layers with few heads of K and V, which have fewer weights than others; and of rows padded beyond a chunk."""
    hidden, inner, layers, chunk = 2048, 11008, 36, 1700
    config = types.SimpleNamespace(
        hidden_size=hidden, intermediate_size=inner, num_attention_heads=16, num_key_value_heads=2, vocab_size=1
    )
    spec = spec_of_alike(layers, 2, 128, torch.bfloat16)
    weights = layers * hidden * (2 * 2048 + 2 * 256 + 3 * inner)
    rows = max(bucket for bucket in ROWS if bucket <= most_short_rows(layers, weights))
    assert rows == 2048 == min(bucket for bucket in ROWS if bucket >= chunk)
    of_a_row = 2 * (4 * hidden + 4 * 2048 + 3 * inner)
    assert sizing.step_bytes(config, spec, (), chunk) >= (chunk + rows) * of_a_row + 2 * MOST_PARTIAL_BYTES
