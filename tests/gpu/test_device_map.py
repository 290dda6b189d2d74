"""A model whose layers lie on two GPUs gives what it gives on one."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import prefixkit
from prefixkit import MemoryPolicy, SamplingParams, Session, variants
from prefixkit.attention.variants import compose
from prefixkit.testing.tiny import tiny_llama
from tests.dispatched import dispatched
from tests.gpu.test_generation import ENDS, NEW, errors, padded  # noqa: F401 - a fixture
from tests.gpu.test_latents import errors_of as of_latents
from tests.gpu.test_latents import exact as latent_model  # noqa: F401 - a fixture
from tests.gpu.test_layer_variants import GREEDY
from tests.gpu.test_layer_variants import errors as of_variants
from tests.gpu.test_memory import OPTIONS, logprob_errors
from tests.gpu.test_model import model_of, prompts
from tests.models.split_over_two import FAMILIES, results
from tests.models.states.hybrids import VOCAB, make_hybrid

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
PLACES = "cuda:0", "cuda:1"


def test_calls_give_in_float32_what_they_give_on_one_gpu() -> None:
    """Samples, scores, beams, values, preempted samples and ``generate()``; plain torch attends."""
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print("seed", seed)
    model = tiny_llama(num_hidden_layers=4)
    expected = results(FAMILIES[0], prefixkit.patch(copy.deepcopy(model).to(PLACES[0])), seed)
    found = results(FAMILIES[0], prefixkit.patch(dispatched(model, *PLACES)), seed)
    assert found["preemptions"] > 0
    for name, value in expected.items():
        if isinstance(value, np.ndarray):
            np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-4, err_msg=name)
        else:
            assert found[name] == value, name


@pytest.mark.parametrize("alternate", [False, True], ids=["halves", "every second layer"])
def test_samples_err_no_more_than_the_unpatched_model(alternate: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Our kernels run on both GPUs, with room for all samples, and under pressure with KV swapped."""
    caplog.set_level(logging.INFO, "prefixkit")
    model, given = model_of(64, torch.bfloat16), prompts(11)
    exact, plain = copy.deepcopy(model).double(), copy.deepcopy(model)
    prefixkit.patch(dispatched(model, *PLACES, alternate=alternate))
    for budget in ("64MiB", "4400KiB"):
        with Session(model, kv_budget=budget, memory=MemoryPolicy(preemption="swap", headroom=16)) as session:
            for _ in range(2):
                result = session.generate(given, **OPTIONS)
            ours, stock = logprob_errors(plain, exact, given, result)
            assert ours <= 1.5 * stock
            assert bool(result.report.preempted_swapped) == (budget != "64MiB")
            store = session.store
            assert store is not None
            where = [store.pool.pages(layer)[0].device.index for layer in range(4)]
            assert where == ([0, 1, 0, 1] if alternate else [0, 0, 1, 1])
    said = " ".join(record.getMessage() for record in caplog.records)
    assert "without CUDA graphs: the model's weights lie on several devices" in said


@pytest.mark.parametrize("kv_dtype", [None, "fp8"])
def test_a_file_of_prefixes_goes_from_two_gpus_to_one_and_back(kv_dtype: Any, tmp_path: Path) -> None:
    whole, given = prefixkit.patch(model_of(64, torch.bfloat16), kv_dtype=kv_dtype), prompts(16)
    spread = prefixkit.patch(dispatched(model_of(64, torch.bfloat16), *PLACES), kv_dtype=kv_dtype)
    for number, (source, target) in enumerate([(spread, whole), (whole, spread)]):
        path, kept = tmp_path / f"{number}.safetensors", list[torch.Tensor]()
        for model, save in ((source, True), (target, False)):
            with Session(model, kv_budget="64MiB") as session:
                session.save(path, given) if save else session.load(path)
                store = session.store
                assert store is not None
                kept.append(torch.cat(store.pool.read(store.tree.match(given[0]).node.slots)))
                assert save or session.generate(given, max_new_tokens=1).report.tokens_computed == len(given)
        assert torch.equal(*kept)


def test_rows_of_generate_err_no_more_than_the_unpatched_model(padded: Any) -> None:  # noqa: F811
    model, options = model_of(64, torch.bfloat16), {"do_sample": True, "num_return_sequences": 4, **ENDS}
    exact = copy.deepcopy(model).double()
    torch.manual_seed(5)
    stock = errors(model, exact, padded, model.generate(**padded, max_new_tokens=NEW, **options))
    prefixkit.patch(dispatched(model, *PLACES))
    torch.manual_seed(5)
    out = model.generate(**padded, max_new_tokens=NEW, **options)
    assert isinstance(out.past_key_values, prefixkit.TreeCache) and not out.past_key_values.fell_back
    assert errors(model, exact, padded, out) <= 1.5 * stock


def follows(numbers: torch.Tensor) -> Any:
    return lambda b, h, q_idx, kv_idx: numbers.to(q_idx.device)[q_idx] == numbers.to(q_idx.device)[kv_idx]


def test_variants_that_capture_tensors_are_applied_on_both_gpus() -> None:
    """Documents and ALiBi, by our kernels; a tensor that does not follow the scores to their GPU is an error."""
    numbers = torch.arange(2048, device=PLACES[0]) // 300
    documents = prefixkit.variant(mask_mod=lambda *at: follows(numbers)(*at) & (at[3] <= at[2]), name="documents")
    variant = compose(documents, variants.alibi([2.0**-n for n in range(1, 9)]))
    model = model_of(128, torch.bfloat16)
    spread = dispatched(copy.deepcopy(model), *PLACES)
    samples = prefixkit.generate(prefixkit.patch(spread, variant=variant), None, prompts(21), **GREEDY)
    ours, stock = of_variants(model, variant, samples)
    assert ours <= 1.5 * stock
    stays = prefixkit.variant(lambda score, b, h, q_idx, kv_idx: score + numbers[kv_idx], name="stays")
    with pytest.raises(ValueError, match="on cuda:0, but its scores are on cuda:1"):
        prefixkit.generate(prefixkit.patch(spread, variant=stays), None, prompts(21), **GREEDY)


def test_latents_are_attended_to_on_both_gpus(latent_model: Any) -> None:  # noqa: F811
    rng = np.random.default_rng(7)
    model, given = copy.deepcopy(latent_model).to(torch.bfloat16), [rng.integers(3, VOCAB, 700).tolist()]
    spread = prefixkit.patch(dispatched(copy.deepcopy(model), *PLACES))
    with Session(spread, kv_budget="64MiB") as session:
        found = [*session.generate(given, n=32, max_new_tokens=12, seed=1, stop_token_ids=())]
    ours, stock = of_latents(model, latent_model, given, found)
    assert ours <= 1e-4 + 1.5 * stock


@pytest.mark.parametrize("family", ["qwen3_next", "nemotron_h"])
def test_states_lie_beside_their_layers(family: str) -> None:
    rng, params = np.random.default_rng(3), SamplingParams(n=4, max_new_tokens=12, seed=1, stop_token_ids=())
    head = rng.integers(3, VOCAB, 30).tolist()
    given = [head + rng.integers(3, VOCAB, count).tolist() for count in (2, 7)]
    model, tokens = make_hybrid(family), list[list[list[int]]]()
    for one in (copy.deepcopy(model).to(PLACES[0]), dispatched(model, *PLACES)):
        with Session(prefixkit.patch(one), kv_budget="16MiB") as session:
            tokens.append([sample.tokens for sample in session.generate(given, params)])
    assert tokens[0] == tokens[1]
