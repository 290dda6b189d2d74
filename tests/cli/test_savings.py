"""The forecast against counting by hand, and against the report of a real run."""

import pytest

import prefixkit
from prefixkit.cli.savings import estimate, plant
from tests.tiny import ByteTokenizer, tiny_llama

PROMPTS = [[1, 2, 3, 4], [1, 2, 3, 5, 6], [1, 2, 3, 4], [9]]  # 8 distinct tokens


def test_counts_by_hand():
    forest = plant(PROMPTS, list("abcd"), page_size=1)
    report = estimate(forest.tree, samples=2, max_new_tokens=3, bytes_per_token=10)
    sequences, grown = 8, 2  # the third token drawn is never computed
    assert forest.tree.snapshot().num_tokens == 7
    assert report.tokens_computed == 7 + sequences * grown
    assert report.tokens_plain_batch == 2 * (4 + 5 + 4 + 1) + sequences * grown
    assert report.kv_bytes_held_peak == (7 + sequences * grown) * 10
    assert report.kv_bytes_unshared_peak == report.tokens_plain_batch * 10
    # Two steps: each reads the prompts, and 1, then 2 tokens of each sample's own.
    assert report.kv_bytes_read == (2 * 7 + sequences * (1 + 2)) * 10
    assert report.kv_bytes_read_unshared == (2 * 28 + sequences * (1 + 2)) * 10


@pytest.mark.parametrize("page_size", [1, 16, 128])
def test_a_run_without_stops_is_what_was_forecast(page_size):
    model = prefixkit.patch(tiny_llama())
    prompts = [list(range(40)), list(range(30)) + [99] * 7, list(range(40))]
    run = prefixkit.generate(
        model, ByteTokenizer(), prompts, n=3, max_new_tokens=6, stop_token_ids=(), page_size=page_size
    ).report
    forest = plant(prompts, ["a", "b", "c"], page_size)
    forecast = estimate(forest.tree, 3, 6, prefixkit.models.kv_spec(model).bytes_per_token)
    for what in ("prompts", "samples", "new_tokens", "tokens_computed", "tokens_plain_batch", "kv_bytes_held_peak"):
        assert getattr(run, what) == getattr(forecast, what), what
