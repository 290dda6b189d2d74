"""``prefixkit inspect`` on unusual prompts; its forecast against counts by hand and the report of a real run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import prefixkit
from prefixkit.cli.commands.inspect import estimate
from prefixkit.cli.views import plant
from prefixkit.testing.application.command_line import run
from prefixkit.testing.tiny import ByteTokenizer, tiny_llama


def test_prompts_that_each_extend_the_one_before(folders: dict[str, Path], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": n, "prompt": "x" * n}) + "\n" for n in range(1, 1501)))
    shown = run("inspect", "--model", folders["plain"], "--input", prompts).stdout
    assert "1,500 prompts, 1,125,750 tokens, 1,500 of them distinct" in shown
    assert "1 token  shared by 1,500" in shown


def test_a_terminal_without_these_letters_gets_escapes(folders: dict[str, Path], prompts: Path) -> None:
    shown = run("inspect", "--model", folders["plain"], "--input", prompts, charset="ascii").stdout
    assert "\\u201cdef\\u201d" in shown


def test_the_forecast_counted_by_hand() -> None:
    tree, _ = plant([[1, 2, 3, 4], [1, 2, 3, 5, 6], [1, 2, 3, 4], [9]], list("abcd"), page_size=1)
    report = estimate(tree, samples=2, max_new_tokens=3, bytes_per_token=10)
    sequences, grown = 8, 2  # the third token sampled is never computed
    assert tree.snapshot().num_tokens == 7
    assert report.tokens_computed == 7 + sequences * grown
    assert report.tokens_plain_batch == 2 * (4 + 5 + 4 + 1) + sequences * grown
    assert report.kv_bytes_held_peak == (7 + sequences * grown) * 10
    assert report.kv_bytes_unshared_peak == report.tokens_plain_batch * 10
    # Two steps: each reads the prompts, and 1, then 2 tokens of each sample's own.
    assert report.kv_bytes_read == (2 * 7 + sequences * (1 + 2)) * 10
    assert report.kv_bytes_read_unshared == (2 * 28 + sequences * (1 + 2)) * 10


@pytest.mark.parametrize("page_size", [1, 16, 128])
def test_a_run_without_stops_is_what_was_forecast(page_size: int) -> None:
    model = prefixkit.patch(tiny_llama())
    prompts = [list(range(40)), list(range(30)) + [99] * 7, list(range(40))]
    run = prefixkit.generate(
        model, ByteTokenizer(), prompts, n=3, max_new_tokens=6, stop_token_ids=(), page_size=page_size
    ).report
    tree, _ = plant(prompts, ["a", "b", "c"], page_size)
    forecast = estimate(tree, 3, 6, prefixkit.models.kv_spec(model).bytes_per_token)
    for what in ("prompts", "samples", "new_tokens", "tokens_computed", "tokens_plain_batch", "kv_bytes_held_peak"):
        assert getattr(run, what) == getattr(forecast, what), what
