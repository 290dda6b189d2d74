"""K and V in e4m3 reach every verb: a model that is patched so does what it does under a variant that rounds them."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import prefixkit
from prefixkit import MemoryPolicy, PrefixFileError, Session
from prefixkit.models import UnsupportedModel, kv_spec
from prefixkit.ops.arguments import FP8
from prefixkit.testing.tiny import tiny_llama
from scripts.tiny_models import tiny_config, tiny_model

OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "stop_token_ids": ()}
GREEDY = OPTIONS | {"temperature": 0.0}
FIXED = [[*range(40), *range(last, last + 9)] for last in (50, 90, 130)]


def rounded(x: Tensor, positions: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(FP8).to(x.dtype)


ROUNDED = prefixkit.variant(key=rounded, value=rounded)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    seed = int.from_bytes(os.urandom(4), "little")
    print("seed", seed)
    rng = np.random.default_rng(seed)
    head = rng.integers(5, 250, 40).tolist()
    return [[*head, *rng.integers(5, 250, n).tolist()] for n in (9, 3, 17)]


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def models(request: Any) -> list[Any]:
    """One that holds K and V in e4m3, and one that rounds them and holds what comes of it in its own dtype."""
    plain = tiny_llama(seed=4).to(request.param)
    how: list[dict[str, Any]] = [{"kv_dtype": "fp8"}, {"variant": ROUNDED}]
    return [prefixkit.patch(copy.deepcopy(plain), tree_cache="always", **one) for one in how]


def same(verb: Any, models: list[Any], **sizes: Any) -> list[Any]:
    """What a verb gives in a session of each model; the same."""
    found = []
    for model in models:
        with Session(model, **sizes) as session:
            found.append(verb(session))
    return found


def texts(samples: Any) -> Any:
    return [(sample.tokens, sample.logprobs) for sample in samples]


def test_samples(models: list[Any], prompts: list[list[int]]) -> None:
    ours, expected = same(lambda session: texts(session.generate(prompts, n=3, seed=5, **OPTIONS)), models)
    assert ours == expected


def test_samples_that_are_preempted() -> None:
    """By copies to host memory, of what pages hold to the last bit.

    At fixed prompts and in float32: batches of other shapes round otherwise, and a number on the edge between two of
    e4m3 becomes the other one.
    """
    model, options = prefixkit.patch(tiny_llama(seed=4), kv_dtype="fp8"), OPTIONS | {"max_new_tokens": 30, "seed": 5}
    memory, budget = MemoryPolicy(preemption="swap", headroom=1), 200 * kv_spec(model).bytes_per_token
    with Session(model, kv_budget=budget, page_size=4, memory=memory) as session:
        found = session.generate(FIXED, n=8, **options)
        assert found.report.preempted_swapped and found.report.kv_bytes_swapped
    with Session(model) as session:
        expected = session.generate(FIXED, n=8, **options)
    assert [sample.tokens for sample in found] == [sample.tokens for sample in expected]


def test_beams_and_scores(models: list[Any], prompts: list[list[int]]) -> None:
    def beams(session: Session) -> Any:
        found = session.beam_search(prompts, num_beams=4, max_new_tokens=6, stop_token_ids=())
        return [(list(beam.tokens), beam.score) for beam in found]

    def scores(session: Session) -> Any:
        continuations = [[prompts[1][-5:], prompts[2][-7:]]] * 3
        return [list(score.logprobs) for of in session.score(prompts, continuations) for score in of]

    for verb in (beams, scores):
        ours, expected = same(verb, models)
        assert ours == expected


def test_search_nodes(models: list[Any], prompts: list[list[int]]) -> None:
    def search(session: Session) -> Any:
        root = session.prompt(prompts[0])
        nodes = session.step(root.fork(2, seeds=[1, 2]), max_new_tokens=4, stop_token_ids=())
        return [np.asarray(node.tokens).tolist() for node in nodes]

    ours, expected = same(search, models)
    assert ours == expected


def test_the_models_own_generate(models: list[Any], prompts: list[list[int]]) -> None:
    found = []
    for model in models:
        torch.manual_seed(0)
        ids = torch.tensor([prompts[0]])
        found.append(model.generate(ids, do_sample=True, num_return_sequences=3, max_new_tokens=8).tolist())
    assert found[0] == found[1]


def test_what_leaves_the_tree_has_the_dtype_of_the_model(models: list[Any], prompts: list[list[int]]) -> None:
    """A cache of transformers gets the numbers that the pool holds."""
    ids = torch.tensor([prompts[0]])
    how: dict[str, Any] = {"do_sample": False, "max_new_tokens": 2, "return_dict_in_generate": True}
    caches = [model.generate(ids, **how).past_key_values for model in models]
    for ours, expected in zip(*(cache.layers for cache in caches), strict=True):
        for one, other in ((ours.keys, expected.keys), (ours.values, expected.values)):
            assert one.dtype == models[0].dtype and torch.equal(one, other)


def test_a_pool_of_as_many_bytes_holds_as_many_times_the_tokens(models: list[Any]) -> None:
    ours, wide = (kv_spec(model) for model in models)
    assert ours.dtype == FP8 and ours.compute_dtype == wide.dtype
    assert wide.bytes_per_token == ours.bytes_per_token * wide.dtype.itemsize


def test_kv_of_another_dtype_is_not_found(prompts: list[list[int]]) -> None:
    plain = tiny_llama(seed=4)
    model = prefixkit.patch(copy.deepcopy(plain))
    with Session(model) as session:
        exact = session.generate(prompts[:1], **GREEDY)
        prefixkit.patch(model, kv_dtype="fp8")
        rounded = session.generate(prompts[:1], **GREEDY)
        assert not rounded.report.prompt_tokens_found and rounded[0].logprobs != exact[0].logprobs
        prefixkit.patch(model)
        again = session.generate(prompts[:1], **GREEDY)
        assert texts(again) == texts(exact)


def test_files_of_prefixes_name_it(tmp_path: Path) -> None:
    """At fixed prompts and in float32, as the preempted samples."""
    model = prefixkit.patch(tiny_llama(seed=4), kv_dtype="fp8")
    with Session(model) as session:
        expected = session.generate(FIXED, **GREEDY)
        session.save(tmp_path / "ours", FIXED)
    with Session(model) as session:
        session.load(tmp_path / "ours")
        result = session.generate(FIXED, **GREEDY)
        assert result.report.prompt_tokens_found
        assert [sample.tokens for sample in result] == [sample.tokens for sample in expected]
    exact = prefixkit.patch(tiny_llama(seed=4))
    with (
        Session(exact) as session,
        pytest.raises(PrefixFileError, match=r'KV in float8_e4m3fn.*patch it with kv_dtype="fp8"'),
    ):
        session.load(tmp_path / "ours")


def test_what_is_no_dtype_or_no_kv_is_refused_and_nothing_changes() -> None:
    model = tiny_llama()
    with pytest.raises(ValueError, match="kv_dtype must be 'fp8', or None for the model's own dtype; got 'int8'"):
        prefixkit.patch(model, kv_dtype="int8")  # type: ignore[arg-type]
    latents = tiny_model(tiny_config("deepseek_v2"), "DeepseekV2ForCausalLM")
    with pytest.raises(UnsupportedModel, match="rounds K and V, and layers of DeepseekV2ForCausalLM cache latents"):
        prefixkit.patch(latents, kv_dtype="fp8")
    for one in (model, latents):
        assert not any("prefixkit" in name for module in one.modules() for name in vars(module))


def test_a_block_keeps_it_and_unpatch_leaves_no_trace(prompts: list[list[int]]) -> None:
    model = prefixkit.patch(tiny_llama(), kv_dtype="fp8")
    with prefixkit.patched(model):
        assert kv_spec(model).dtype == FP8
    assert kv_spec(model).dtype == FP8
    prefixkit.unpatch(model)
    assert kv_spec(model).dtype == torch.float32


def test_layers_that_keep_states_stay_exact_beside_it(prompts: list[list[int]]) -> None:
    plain = tiny_model(tiny_config("granitemoehybrid"), "GraniteMoeHybridForCausalLM")
    models = [
        prefixkit.patch(copy.deepcopy(plain), **how)  # type: ignore[arg-type]
        for how in ({"kv_dtype": "fp8"}, {"variant": ROUNDED})
    ]
    short = [[token % 90 + 5 for token in prompt] for prompt in prompts]
    ours, expected = same(lambda session: texts(session.generate(short, n=2, seed=5, **OPTIONS)), models)
    assert ours == expected
