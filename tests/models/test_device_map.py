"""A model whose layers lie on two devices gives what it gives on one, and each device holds what its layers cache."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import dispatch_model
from transformers import PreTrainedModel

import prefixkit
from prefixkit import SamplingParams, Session, variants
from prefixkit.kv.device_memory import free_for
from prefixkit.kv.limits import bytes_for_workspace, call_pages, session_pages
from prefixkit.models import UnsupportedModel, kv_spec
from prefixkit.testing.tiny import tiny_llama
from scripts.tiny_models import tiny_config, tiny_model
from tests.dispatched import dispatched
from tests.models.split_over_two import FAMILIES, results
from tests.models.tiny_families import VOCAB
from tests.two_devices import FIRST, SECOND, TwoDevices

PLACES = "cpu:0", "cpu:1"
PARAMS = SamplingParams(n=3, max_new_tokens=12, seed=1, stop_token_ids=())


@pytest.fixture
def two() -> Iterator[TwoDevices]:
    with TwoDevices() as made:
        yield made


@pytest.fixture
def prompts(rng: np.random.Generator) -> list[list[int]]:
    """Two texts that share thirty tokens."""
    head = rng.integers(101, VOCAB, 30).tolist()
    return [head + rng.integers(101, VOCAB, count).tolist() for count in (2, 7)]


def tokens_of(model: PreTrainedModel, prompts: list[list[int]], variant: Any = None) -> list[list[int]]:
    """Samples of one session, and rows of one call of ``generate()``."""
    prefixkit.patch(model, variant=variant)
    with Session(model, kv_budget="4MiB") as session:
        found = [sample.tokens for sample in session.generate(prompts, PARAMS)]
    torch.manual_seed(0)
    options: dict[str, Any] = {"num_return_sequences": 3, "do_sample": True, "max_new_tokens": 4, "pad_token_id": 0}
    out = model.generate(torch.tensor(prompts[:1]), return_dict_in_generate=True, **options)
    assert isinstance(out.past_key_values, prefixkit.TreeCache) and not out.past_key_values.fell_back
    return found + out.sequences.tolist()


def test_calls_give_what_they_give_on_one_device() -> None:
    """Samples, scores, beams, values, preempted samples and ``generate()``, to the bit."""
    seed = int.from_bytes(os.urandom(4), "little")
    print("seed", seed)
    model = tiny_llama(num_hidden_layers=3)
    expected = results(FAMILIES[0], prefixkit.patch(copy.deepcopy(model)), seed)
    with TwoDevices():
        found = results(FAMILIES[0], prefixkit.patch(dispatched(model, *PLACES)), seed)
    assert found["preemptions"] > 0
    for name, value in expected.items():
        assert np.array_equal(found[name], value) if isinstance(value, np.ndarray) else found[name] == value, name


# States and experts; latents and indexers, the second layer taking what the first has selected; windows and sinks.
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {},
    "glm_moe_dsa": {"indexer_types": ["full", "shared"]},
    "gpt_oss": {},
}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_all_kinds_find_what_they_cache_beside_them(kind: str, prompts: list[list[int]]) -> None:
    torch.manual_seed(0)
    model = tiny_model(tiny_config(kind, vocab_size=VOCAB, **KINDS[kind]), "")
    expected = tokens_of(copy.deepcopy(model), prompts)
    with TwoDevices():
        assert tokens_of(dispatched(model, *PLACES, alternate=True), prompts) == expected


def follows(slopes: torch.Tensor) -> Callable[..., Any]:
    return lambda score, b, h, q_idx, kv_idx: score + slopes.to(q_idx.device)[h] * (kv_idx - q_idx)


@pytest.mark.parametrize(
    "variant",
    [variants.streaming_llm(2, 8), prefixkit.variant(follows(torch.tensor([0.5, 0.1, 0.0, 0.2])))],
    ids=["positions in the cache", "a captured tensor"],
)
def test_variants_read_what_they_need_on_each_device(variant: Any, prompts: list[list[int]]) -> None:
    model = tiny_llama(num_hidden_layers=4)
    expected = tokens_of(copy.deepcopy(model), prompts, variant)
    with TwoDevices():
        assert tokens_of(dispatched(model, *PLACES, alternate=True), prompts, variant) == expected


def test_files_of_prefixes_go_to_models_on_other_devices(two: TwoDevices, prompts: Any, tmp_path: Path) -> None:
    whole, spread = tiny_llama(num_hidden_layers=3), dispatched(tiny_llama(num_hidden_layers=3), *PLACES)
    for number, (source, target) in enumerate([(whole, spread), (spread, whole)]):
        path = tmp_path / str(number)
        with Session(prefixkit.patch(source), kv_budget="1MiB") as session:
            session.save(path, prompts)
        with Session(prefixkit.patch(target), kv_budget="1MiB") as session:
            session.load(path)
            assert session.generate(prompts, max_new_tokens=1).report.tokens_computed == len(prompts)


def test_a_step_is_copied_to_another_device_once(two: TwoDevices, tiny: Any, drive: Any) -> None:
    """Positions and slots; what else moves accelerate's hooks move, for each layer."""
    run = drive(dispatched(tiny(), *PLACES), copied=False)
    run.tree.insert([*range(3, 12)])
    run.runner.cache.begin(run.step())
    before = two.moved[SECOND]
    there = run.runner.cache.step_on(SECOND)
    assert run.runner.cache.step_on(SECOND) is there and two.moved[SECOND] == before + 2
    assert there.positions.device == there.slots.device == SECOND
    assert run.runner.cache.step_on(None).positions.device == FIRST


def test_other_positions_on_another_device_are_an_error(two: TwoDevices, tiny: Any, drive: Any) -> None:
    model = dispatched(tiny(), *PLACES)
    run = drive(model, copied=False)
    run.tree.insert([*range(3, 12)])
    moved = lambda module, args, kwargs: (args, kwargs | {"position_ids": kwargs["position_ids"] + 1})  # noqa: E731
    hook = model.model.layers[1].register_forward_pre_hook(moved, with_kwargs=True)
    with pytest.raises(ValueError, match="position_ids other than the step's"):
        run.run()
    hook.remove()
    run.run()


def test_the_device_with_the_least_room_for_its_layers_decides(two: TwoDevices, free_memory: Any) -> None:
    """A layer of three lies on the first device; a step's activations lie on each."""
    spec = kv_spec(dispatched(tiny_llama(num_hidden_layers=3), *PLACES))
    assert spec.places == "cpu and cpu:1" and spec.shares == {FIRST: 1 / 3, SECOND: 2 / 3}
    page, room = 16 * spec.bytes_per_token, {FIRST: 3 << 20, SECOND: 4 << 20}
    free_memory(room)
    free = free_for(spec.shares)
    assert free == 6 << 20, "two thirds of it fill the second device"
    assert session_pages(spec, None, 16, free) == (3 << 20) // page
    cuda = [torch.device("cuda", index) for index in (0, 1)]
    gpus, work = replace(spec, device=cuda[0], layer_devices=(cuda[0], cuda[1], cuda[1])), 1 << 20
    room |= zip(cuda, (room[FIRST], room[SECOND]), strict=True)
    free = free_for(gpus.shares, bytes_for_workspace(gpus, work))
    assert call_pages(gpus, None, 16, free, work) == int((0.95 * room[SECOND] - work) * 3 / 2) // page
    room[FIRST] = 1 << 20
    assert free_for(spec.shares) == 3 << 20


def test_what_cannot_lie_on_two_devices_is_named(two: TwoDevices) -> None:
    offloaded = {"model.embed_tokens": "cpu:0", "model.layers.0": "cpu:0", "model.layers.1": "cpu:1"}
    offloaded |= {"model.norm": "cpu", "model.rotary_emb": "cpu:1", "lm_head": "cpu"}
    model = dispatch_model(tiny_llama(), offloaded, main_device="cpu:0", skip_keys="past_key_values")
    with pytest.raises(UnsupportedModel, match=r"loads some of their weights anew for each step.*on more GPUs"):
        kv_spec(model)
    sharing = tiny_model(tiny_config("gemma3n_text", vocab_size=VOCAB), "")
    with pytest.raises(UnsupportedModel, match="on cpu:1; layers that share KV must lie on one device"):
        kv_spec(dispatched(sharing, *PLACES))
