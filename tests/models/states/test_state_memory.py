"""The memory of states: what the report counts, what budgets leave them, and what is said where that is too little."""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers.models.lfm2.modeling_lfm2 as lfm2

import prefixkit
from prefixkit import BeamParams, KVBudgetTooSmall, SamplingParams, Session
from prefixkit.cli.commands.inspect import estimate
from prefixkit.cli.views import plant
from prefixkit.engine.sharing_report import Report
from prefixkit.kv.kv_pool import KVPoolTooLarge
from prefixkit.models import facts_of, kv_spec
from prefixkit.testing.application.command_line import run, write_prompts
from prefixkit.testing.tiny import byte_tokenizer, tiny_llama
from prefixkit.torch_private import without_memory
from tests.models.states.hybrids import HYBRIDS, VOCAB, make_hybrid

SHORT = SamplingParams(max_new_tokens=4, stop_token_ids=())


@pytest.fixture
def model() -> Any:
    return prefixkit.patch(make_hybrid("qwen3_next"))


def text(tokens: int) -> list[int]:
    rng = random.Random(0)
    return [rng.randrange(3, VOCAB) for _ in range(tokens)]


# -- what the report counts --------------------------------------------------------------------------------------------


def test_states_are_counted_as_forecast(model: Any) -> None:
    """One for each sample, at each prompt's end, and where prompts part."""
    prompts, each = [text(30), [*text(20), 5, 6], [7, 8]], kv_spec(model).bytes_per_state
    report = prefixkit.generate(model, None, prompts, n=3, max_new_tokens=4, stop_token_ids=()).report
    forecast = estimate(plant(prompts, list("abc"), 16)[0], 3, 4, kv_spec(model).bytes_per_token, each)
    assert report.bytes_per_state == each
    assert report.state_bytes_held_peak == forecast.state_bytes_held_peak == (9 + 4) * each
    assert f"13 states of {each:,} bytes held at peak, {13 * each / 2**20:.1f} MiB" in str(report)


def test_beams_and_scores_count_states(model: Any) -> None:
    each = kv_spec(model).bytes_per_state
    with Session(model) as session:
        searched = session.beam_search([text(10)], BeamParams(num_beams=3, max_new_tokens=6, stop_token_ids=()))
        assert 4 * each <= searched.report.state_bytes_held_peak <= (2 * 4 + 3 * 3) * each
        session.score([text(10)], [[[3, 4], [5, 6]]])
        assert 3 * each <= session.report.state_bytes_held_peak <= 6 * each
        assert session.report.bytes_per_state == each


def test_models_without_states_count_none() -> None:
    report = prefixkit.generate(prefixkit.patch(tiny_llama()), None, [[5, 6]], max_new_tokens=2).report
    assert report.bytes_per_state == report.state_bytes_held_peak == 0
    assert "states of" not in str(report)


def test_peaks_of_several_reports_are_the_highest() -> None:
    total = Report(state_bytes_held_peak=10, bytes_per_state=5)
    total.add(Report(state_bytes_held_peak=15, bytes_per_state=5).counts())
    assert (total.state_bytes_held_peak, total.bytes_per_state) == (15, 5)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("kind", HYBRIDS)
def test_the_size_of_a_state_is_known_without_weights(kind: str) -> None:
    model = make_hybrid(kind).to(torch.bfloat16)
    with without_memory():
        empty = type(model)._from_config(model.config, dtype=torch.bfloat16)
    assert kv_spec(empty).bytes_per_state == kv_spec(model).bytes_per_state > 0


# -- budgets -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "given", "states", "remedy"),
    [
        (SamplingParams(n=50, max_new_tokens=4), 16, 9, r"or more$"),
        (BeamParams(num_beams=4, max_new_tokens=4), 38, 20, r"or more or lower num_beams$"),
    ],
    ids=["samples", "beams"],
)
def test_a_budget_too_small_for_one_request_says_which_is_enough(
    model: Any, params: Any, given: int, states: int, remedy: str
) -> None:
    each = facts_of(model).spec.bytes_per_state
    budget = given * each
    with Session(model, kv_budget=budget) as session, pytest.raises(KVBudgetTooSmall) as raised:
        session.run([prefixkit.Request(0, torch.tensor(text(5)).int().numpy(), params)])
    said = str(raised.value)
    assert f"need {states} states of {each} bytes at once, {states * each} bytes" in said
    assert f"may take {session_half(budget, model)} bytes" in said
    assert re.search(remedy, said)
    enough = re.search(r"raise kv_budget to (\d+) bytes", said)
    assert enough is not None and int(enough[1]) == 2 * states * each
    with Session(model, kv_budget=int(enough[1])) as session:
        session.run([prefixkit.Request(0, torch.tensor(text(5)).int().numpy(), params)])


def session_half(budget: int, model: Any) -> int:
    """What whole pages in half of a budget leave for states."""
    page = 16 * facts_of(model).spec.bytes_per_token
    return budget - budget // 2 // page * page


def test_a_budget_for_one_call_leaves_states_what_its_pages_do_not_take(model: Any) -> None:
    """Pages are made for what requests need, which is little; states may take the rest of what was given."""
    report = prefixkit.generate(model, None, [text(5)], SHORT, n=40, kv_budget="2MiB").report
    assert report.state_bytes_held_peak > 40 * report.bytes_per_state > 2**18


def test_models_without_attention_leave_states_all_but_little_of_a_budget() -> None:
    with Session(prefixkit.patch(make_hybrid("mamba")), kv_budget="8GiB") as session:
        pool = session.store.pool
        tokens = pool.num_pages * pool.page_size * pool.spec.bytes_per_token
        assert session.store.state_bytes_allowed == 2**33 - tokens > 0.9 * 2**33


def test_a_budget_that_holds_no_page_beside_states(model: Any) -> None:
    with pytest.raises(ValueError, match=r"kv_budget=5000 bytes holds no page; a page of .*half of it is for states"):
        Session(model, kv_budget=5000)


def test_a_budget_too_small_for_kv_says_that_states_have_half_of_it(model: Any) -> None:
    with (
        Session(model, kv_budget=40 * facts_of(model).spec.bytes_per_state) as session,
        pytest.raises(KVBudgetTooSmall, match=r"but the KV budget holds .*, its other half being for states; raise"),
    ):
        session.generate([text(5)], max_new_tokens=2000)


def test_without_a_budget_free_memory_is_what_is_asked_for(model: Any) -> None:
    with Session(model) as session:
        session.store.free = lambda: 0
        with pytest.raises(
            KVBudgetTooSmall, match=r"may take 0 bytes .* of the memory that is free; free some memory$"
        ):
            session.generate([text(5)], SHORT)
        assert session.store.pool.states.slots == 0


def test_generate_keeps_its_own_cache_where_there_is_no_memory_for_states(
    model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "prefixkit")
    ids, options = torch.tensor([text(12)]), {"max_new_tokens": 5, "do_sample": False}
    want = prefixkit.patch(model, tree_cache="never").generate(ids, **options)
    prefixkit.patch(model, tree_cache="always")
    with Session(model) as session:
        session.store.free = lambda: 0
        assert torch.equal(model.generate(ids, **options), want)
    assert [line for line in caplog.messages if "generate() keeps transformers' own cache: layers that keep" in line]


def test_memory_that_the_device_does_not_have(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "prefixkit")
    with Session(model, kv_budget="1MiB") as session:
        store = session.store
        store.most_state_bytes = 2**62
        with pytest.raises(KVPoolTooLarge, match=r"states take .* GiB, which cpu cannot give .*; lower kv_budget"):
            store.have_slots(2**45, 9)
        assert store.pool.states.slots == store.tree.states.count == 0
        session.generate([text(5)], SHORT)
        slots = store.pool.states.slots
        store.have_slots(2**45, 9)
        assert store.pool.states.slots == store.tree.states.count == slots
        assert [line for line in caplog.messages if f"{slots} are kept at once" in line]
        session.generate([text(5)], SHORT)


# -- the command line --------------------------------------------------------------------------------------------------


def test_the_command_line_samples_and_forecasts(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    model = make_hybrid("lfm2", vocab_size=max(len(tokenizer), VOCAB))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    common = ["--model", tmp_path / "model", "--input", prompts, "--max-new-tokens", 3, "-n", 2]
    for budget in ([], ["--kv-budget", "1MiB"]):
        shown = run("sample", *common, *budget).stderr
        assert "states of 768 bytes held at peak" in " ".join(shown.split())
    assert "states of 768 bytes held at peak" in " ".join(run("inspect", *common).stdout.split())


# -- layers between which others lie -----------------------------------------------------------------------------------


def test_an_attention_layer_that_is_refused_is_named(scaled_twice: Callable[[ModuleType], None]) -> None:
    scaled_twice(lfm2)
    model = make_hybrid("lfm2")
    model.set_attn_implementation("sdpa")
    with pytest.raises(prefixkit.UnsupportedModel, match=r"^model\.layers\.1\.self_attn \(Lfm2Attention\) attends in"):
        kv_spec(model)
