"""Decoding by CUDA graphs: the tokens of single steps, whatever ends, arrives or is planned anew between them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import prefixkit
from prefixkit.attention.step import Step
from prefixkit.attention.variants import register, variant
from prefixkit.backends.cuda.device_planner import say_plain_torch
from prefixkit.engine.request import BeamParams, Request, Sample
from prefixkit.runners.short_steps import USES
from prefixkit.sampling.params import SamplingParams
from prefixkit.testing.engines import make_engine
from prefixkit.testing.integrity import check_tree
from tests.gpu.test_model import model_of, prompts
from tests.grammars import STOP, Residues
from tests.grammars import asked as grammar_request


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return prefixkit.patch(model_of(128, torch.bfloat16))


def requests(number: int, **params: object) -> list[Request]:
    settings = SamplingParams(**params)  # type: ignore[arg-type]
    return [Request(i, np.array(p), settings) for i, p in enumerate(prompts(number))]


def texts(samples: list[Sample]) -> list[list[int]]:
    return [sample.tokens for sample in samples]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_are_those_of_single_steps(model: torch.nn.Module, temperature: float) -> None:
    """48 rows are a bucket, so both run the same products on the same numbers of rows."""
    asked = requests(11, n=8, temperature=temperature, max_new_tokens=80, seed=4)
    fast, slow = make_engine(model, asked), make_engine(model, asked, graphs=False)
    found, expected = fast.run(asked), slow.run(asked)
    assert texts(found) == texts(expected)
    assert [s.finish_reason for s in found] == [s.finish_reason for s in expected]
    np.testing.assert_allclose(
        np.concatenate([s.logprobs for s in found]),
        np.concatenate([s.logprobs for s in expected]),
        rtol=1e-4,
        atol=1e-4,
    )
    assert fast.report.captures == 1 and fast.report.graph_bytes > 0
    assert fast.report.graph_steps == fast.report.decode_steps == 79
    assert fast.report.kv_bytes_read == slow.report.kv_bytes_read


def under_grammars(model: torch.nn.Module, ends: bool, **params: Any) -> list[Request]:
    """Six prompts, of which one has no grammar; where nothing ``ends``, all samples have equally many tokens."""
    asked, stops = [], (STOP,) if ends else ()
    for index, prompt in enumerate(prompts(11)):
        grammar = None if index == 2 else Residues(2 + index, 5 * index if ends else 99, 20 if ends else 99)
        own = SamplingParams(n=8, temperature=0.8, seed=4, stop_token_ids=stops, grammar=grammar, **params)
        asked.append(grammar_request(index, np.array(prompt), own, model.config.vocab_size))  # type: ignore[union-attr]
    return asked


@pytest.mark.parametrize("logprobs", ["model", "sampled"])
def test_samples_under_grammars_are_those_of_single_steps(model: torch.nn.Module, logprobs: str) -> None:
    """Masks are filled on the host between the model's graph and the sampling."""
    asked = under_grammars(model, False, max_new_tokens=60, logprobs=logprobs)
    fast, slow = make_engine(model, asked), make_engine(model, asked, graphs=False)
    found, expected = fast.run(asked), slow.run(asked)
    assert texts(found) == texts(expected)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, rtol=1e-4, atol=1e-4)
    assert fast.report.graph_steps == fast.report.decode_steps == 59
    assert fast.report.grammar_waits >= 60, "and of first tokens"


def test_samples_under_grammars_end_apart_and_rows_are_compacted(model: torch.nn.Module) -> None:
    """The grammar's matcher refuses a token of another row."""
    asked = under_grammars(model, True, max_new_tokens=60)
    fast = make_engine(model, asked)
    found = fast.run(asked)
    assert {s.finish_reason for s in found} == {"stop", "length", "dead_end"}
    assert all(len(s.tokens) <= 21 or s.prompt_index == 2 for s in found)
    assert fast.report.graph_steps > 20


def test_probabilities_of_samples_are_those_of_single_steps(model: torch.nn.Module) -> None:
    asked = requests(11, n=8, temperature=0.8, top_p=0.9, max_new_tokens=40, seed=4, logprobs="sampled")
    fast, slow = make_engine(model, asked), make_engine(model, asked, graphs=False)
    found, expected = fast.run(asked), slow.run(asked)
    assert texts(found) == texts(expected)
    assert fast.report.graph_steps == fast.report.decode_steps == 39
    for one, other in zip(found, expected, strict=True):
        assert one.masses is not None and other.masses is not None
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(one.masses, other.masses, rtol=1e-4)


@pytest.mark.parametrize("head_dim", [64, 96, 256])
def test_any_head_size_gives_the_tokens_of_single_steps(head_dim: int) -> None:
    """Of Hopper's kernel, of the portable one, and of its tiles of 64 rows."""
    model = prefixkit.patch(model_of(head_dim, torch.bfloat16))
    asked = requests(22, n=8, temperature=0.8, max_new_tokens=40, seed=6)
    fast, slow = make_engine(model, asked), make_engine(model, asked, graphs=False)
    assert texts(fast.run(asked)) == texts(slow.run(asked))
    assert fast.report.captures == 1 and fast.report.graph_steps == 39
    assert fast.report.kv_bytes_read == slow.report.kv_bytes_read


@pytest.mark.parametrize("page_size", [1, 16])
def test_beams_in_graphs_are_those_of_single_steps_and_run_beside_samples(
    model: torch.nn.Module, page_size: int
) -> None:
    """Stop tokens are many, so that beams end at different steps; 16-bit near-ties may fall to the other side."""
    beams = BeamParams(6, 6, max_new_tokens=40, stop_token_ids=tuple(range(0, 256, 40)))
    samples = SamplingParams(n=4, temperature=0.8, max_new_tokens=40, seed=3)
    asked = [Request(i, np.array(p), samples if i % 3 == 2 else beams) for i, p in enumerate(prompts(31))]
    engine = make_engine(model, asked, page_size=page_size)
    found, expected = engine.run(asked), make_engine(model, asked, graphs=False, page_size=page_size).run(asked)
    assert engine.report.graph_steps == engine.report.decode_steps > 30
    close = [a.score == pytest.approx(b.score, rel=1e-3) for a, b in zip(found, expected, strict=True) if a.score]
    assert sum(close) >= len(close) - 4
    check_tree(engine.store.tree)
    engine.store.cache.clear()
    assert engine.store.tree.allocator.free == engine.store.tree.allocator.num_pages


def test_logits_processors_run_between_a_graph_and_the_sampler(model: torch.nn.Module) -> None:
    """One that leaves a token no choice, by all tokens so far and by how often it was called."""

    def chosen(tokens: list[int], calls: int) -> int:
        return (7 * tokens[-1] + len(tokens) + 3 * calls) % 250

    def leaves_no_choice() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        calls: list[int] = []

        def processor(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            logits[0, chosen(ids[0].tolist(), len(calls))] += 1000.0
            return logits

        return processor

    asked = requests(33, n=4, temperature=0.8, max_new_tokens=30, seed=5, logits_processors=leaves_no_choice)
    engine = make_engine(model, asked)
    found, expected = engine.run(asked), make_engine(model, asked, graphs=False).run(asked)
    for sample in found:
        tokens = asked[sample.prompt_index].tokens.tolist()
        for calls in range(1, 31):
            tokens.append(chosen(tokens, calls))
        assert sample.tokens == tokens[-30:]
    logprobs = [np.concatenate([sample.logprobs for sample in samples]) for samples in (found, expected)]
    np.testing.assert_allclose(*logprobs, rtol=0.05, atol=0.05)
    assert engine.report.graph_steps == engine.report.unpipelined["logits processors"] == 29


def test_runs_agree_bit_by_bit(model: torch.nn.Module) -> None:
    asked = requests(12, n=5, temperature=1.0, max_new_tokens=70, seed=1, stop_token_ids=tuple(range(0, 256, 9)))
    first, second = (make_engine(model, asked).run(asked) for _ in range(2))
    assert first == second


def test_planning_anew_changes_nothing_but_rounding(model: torch.nn.Module) -> None:
    asked = requests(13, n=8, temperature=0.0, max_new_tokens=60)
    expected = make_engine(model, asked).run(asked)
    engine = make_engine(model, asked)
    engine.runner.replan_every = 7
    found = engine.run(asked)
    same = [a == b for a, b in zip(texts(found), texts(expected), strict=True)]
    assert sum(same) >= len(same) - 2, "pieces are cut elsewhere, so a near-tie may fall to the other side, but seldom"


def test_rows_that_end_leave_and_waiting_prompts_come_in(model: torch.nn.Module) -> None:
    """Samples end at random; half of the pages they would need together: pages are used again, and all come back."""
    ids = tuple(range(0, 256, 16))
    asked = requests(14, n=12, temperature=1.2, max_new_tokens=96, seed=3, stop_token_ids=ids)
    free = make_engine(model, asked)
    budget = free.store.pool.bytes // 2
    tight = make_engine(model, asked, kv_budget=budget)
    samples = tight.run(asked)
    assert len(samples) == 72
    assert tight.report.kv_bytes_held_peak <= budget
    check_tree(tight.store.tree)
    tight.store.cache.clear()
    assert tight.store.tree.allocator.free == tight.store.tree.allocator.num_pages
    for sample in samples:
        ended = [token in ids for token in sample.tokens]
        assert not any(ended[:-1])
        assert sample.finish_reason == ("stop" if ended[-1] else "length")
        assert len(sample.tokens) <= 96


def test_an_engine_that_runs_again_captures_nothing_new(model: torch.nn.Module) -> None:
    asked = requests(15, n=8, temperature=0.9, max_new_tokens=40)
    engine = make_engine(model, asked)
    for _ in range(1 + USES):  # the first call computes all prompts, the others their last tokens: a short step
        engine.run(asked)
    captures = engine.report.captures
    engine.run(asked)  # capturing gave torch's spare memory back, which prompts take again
    gc.collect()  # what earlier tests left
    held = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(3):
        engine.run(asked)
    assert engine.report.captures == captures
    # Less, where something of an earlier test goes meanwhile.
    assert torch.cuda.memory_allocated() <= held[0] and torch.cuda.memory_reserved() <= held[1]


def test_a_batch_that_outgrows_its_arrays_is_captured_again(model: torch.nn.Module) -> None:
    small, large = requests(16, n=1, max_new_tokens=30), requests(16, n=30, max_new_tokens=30)
    engine = make_engine(model, large)
    engine.run(small)
    few = engine.report.captures
    assert len(engine.run(large)) == 180
    assert engine.report.captures > few


def test_a_model_that_waits_for_the_gpu_decodes_without_graphs(caplog: pytest.LogCaptureFixture) -> None:
    """And the GPU is none the worse for having been asked."""
    model = model_of(128, torch.bfloat16)
    inner = model.model.layers[1].mlp

    def waits(x: torch.Tensor) -> torch.Tensor:
        return type(inner).forward(inner, x) * (1.0 if float(x.abs().max()) < 1e9 else 0.0)

    asked = requests(17, n=4, temperature=0.0, max_new_tokens=20)
    expected = make_engine(prefixkit.patch(model), asked).run(asked)
    inner.forward = waits
    engine = make_engine(model, asked)
    found = engine.run(asked)
    assert "decoding step by step: the model waits for the GPU" in caplog.text
    assert engine.report.captures == engine.report.graph_steps == 0
    same = [a == b for a, b in zip(texts(found), texts(expected), strict=True)]
    assert sum(same) >= len(same) - 2, "batches of other sizes round otherwise"
    torch.cuda.synchronize()


def test_attention_without_a_kernel_decodes_without_graphs_and_says_so_once(
    model: torch.nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    """A variant that is not traced runs in plain torch, which lists its calls on the host: no graph can hold them."""
    third = variant(lambda score, b, h, q, kv: score / 3, name="a third", traced=False)
    key = register(third)
    asked = requests(18, n=4, temperature=0.0, max_new_tokens=20)
    expected = make_engine(model, asked, graphs=False).run(asked)
    engine = make_engine(model, asked)
    inner, pages = engine.runner.model, (engine.store.pool.pages(0)[0], engine.store.pool.pages(0)[1])  # type: ignore[attr-defined]

    def also_by_torch(step: Step) -> torch.Tensor:
        q = torch.zeros(step.num_rows, 8, 128, dtype=torch.bfloat16, device="cuda")
        torch.ops.prefixkit.tree_attention(q, *pages, step.positions, step.plan, 1.0, key)
        return inner(step)

    engine.runner.model = also_by_torch  # type: ignore[attr-defined]
    engine.runner.eager.graphs = None  # type: ignore[attr-defined]  # they would run the model as it was
    for _ in range(2):
        same = [a == b for a, b in zip(texts(engine.run(asked)), texts(expected), strict=True)]
        assert sum(same) >= len(same) - 2, "batches of other sizes round otherwise"
    said = [record.getMessage() for record in caplog.records if "decoding step by step" in record.getMessage()]
    assert len(said) == 1 and "nor a variant that was not traced; run eagerly" in said[0]
    assert engine.report.captures == engine.report.graph_steps == 0


def test_float32_decodes_without_graphs_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    say_plain_torch.clear()
    model = prefixkit.patch(model_of(64, torch.float32))
    asked = requests(19, n=3, temperature=0.8, max_new_tokens=20)
    expected = make_engine(model, asked, graphs=False).run(asked)
    engine = make_engine(model, asked)
    assert texts(engine.run(asked)) == texts(expected)
    ours = [record for record in caplog.records if record.name == "prefixkit"]
    warnings = [record.getMessage() for record in ours if record.levelname == "WARNING"]
    warnings = [line for line in warnings if not line.startswith("compiling")]  # sampling, where no test came before
    assert warnings == ["tree_attention runs in plain torch: float32 has no kernel"]
    assert engine.report.captures == engine.report.graph_steps == 0
