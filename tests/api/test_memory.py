"""KV budgets and page sizes."""

import numpy as np
import pytest

import prefixkit
from prefixkit.kv.budget import KVBudgetTooSmall
from tests.api.cases import HEAD, PROMPTS, TOKENIZER, tokens_of


@pytest.mark.parametrize("page_size", [1, 7, 16, 128])
def test_without_a_budget_all_samples_run_together(model, page_size):
    rng = np.random.default_rng(8)
    print("seed 8")
    head = rng.integers(0, 256, 100)
    prompts = [[*head[: rng.integers(50, 100)], *rng.integers(0, 256, rng.integers(1, 40))] for _ in range(12)]
    result = prefixkit.generate(
        model, TOKENIZER, prompts, n=3, max_new_tokens=9, stop_token_ids=(), page_size=page_size
    )
    assert result.report.steps == 9


@pytest.mark.parametrize("budget", [80 * 1024, "80KiB", "81920", np.int64(80 * 1024), 80.0 * 1024])
def test_a_budget_as_people_write_it(model, budget):
    with prefixkit.Session(model, kv_budget=budget) as session:
        assert session.store.pool.bytes == 80 * 1024


def test_a_call_within_a_budget_holds_no_more(model):
    few = prefixkit.generate(model, TOKENIZER, PROMPTS, n=4, max_new_tokens=8, kv_budget="80KiB")
    assert 0 < few.report.kv_bytes_held_peak <= 80 * 1024
    assert tokens_of(few) == tokens_of(prefixkit.generate(model, TOKENIZER, PROMPTS, n=4, max_new_tokens=8))


def test_a_budget_too_small_for_one_sequence(model):
    with pytest.raises(KVBudgetTooSmall, match=r"prompt 0 .* needs KV for .* tokens .* MiB"):
        prefixkit.generate(model, TOKENIZER, [HEAD], max_new_tokens=64, kv_budget=2**14)


@pytest.mark.parametrize("budget", [0, -5, 100])
def test_a_budget_that_holds_no_page(model, budget):
    with pytest.raises(ValueError, match="holds no page"):
        prefixkit.generate(model, TOKENIZER, [HEAD], kv_budget=budget)


def test_a_budget_that_the_device_cannot_give(model):
    with pytest.raises(
        ValueError, match=r"KV for \d+ tokens takes .* GiB, which cpu cannot give .*; lower kv_budget, or num_pages"
    ):
        prefixkit.Session(model, kv_budget="100000TiB")


@pytest.mark.parametrize("page_size", [0, 129])
def test_a_page_size_out_of_range(model, page_size):
    with pytest.raises(ValueError, match="page_size must be"):
        prefixkit.generate(model, TOKENIZER, [HEAD], page_size=page_size)
