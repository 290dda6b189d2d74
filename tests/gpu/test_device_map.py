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
from prefixkit import MemoryPolicy, SamplingParams, Session
from prefixkit.testing.tiny import tiny_llama
from tests.dispatched import dispatched
from tests.gpu.test_generation import ENDS, NEW, errors, padded  # noqa: F401 - a fixture
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


def test_a_file_of_prefixes_goes_from_two_gpus_to_one_and_back(tmp_path: Path) -> None:
    whole, given = prefixkit.patch(model_of(64, torch.bfloat16)), prompts(16)
    spread = prefixkit.patch(dispatched(model_of(64, torch.bfloat16), *PLACES))
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


@pytest.mark.parametrize("options", [{"do_sample": True, "num_return_sequences": 4}, {"num_beams": 4}])
def test_rows_of_generate_err_no_more_than_the_unpatched_model(options: Any, padded: Any) -> None:  # noqa: F811
    model = model_of(64, torch.bfloat16)
    exact = copy.deepcopy(model).double()
    torch.manual_seed(5)
    stock = errors(model, exact, padded, model.generate(**padded, max_new_tokens=NEW, **ENDS, **options))
    prefixkit.patch(dispatched(model, *PLACES))
    torch.manual_seed(5)
    out = model.generate(**padded, max_new_tokens=NEW, **ENDS, **options)
    assert isinstance(out.past_key_values, prefixkit.TreeCache) and not out.past_key_values.fell_back
    assert "num_beams" in options or errors(model, exact, padded, out) <= 1.5 * stock


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
