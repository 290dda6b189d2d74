"""Models with multi-head latent attention on a tree: what they say, what they round, and what they expand."""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from itertools import pairwise
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.cache_utils import DynamicCache

import prefixkit
from prefixkit import TreeCache
from prefixkit.models import facts_of
from scripts.tiny_models import tiny_config, tiny_model
from tests.models.generate.generating import BEAMS, SAMPLED, compared, generate
from tests.models.tiny_families import VOCAB, make_model

TEXTS = ["axk1", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_linear", "longcat_flash"]
TEXTS += ["minicpm3", "youtu"]
IMAGES = ["kimi_k25", "mistral4"]
DENSE = {"first_k_dense_replace": 2, "v_head_dim": 16, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8}
DENSE |= {"qk_nope_head_dim": 16, "num_key_value_heads": 4}


@pytest.fixture(params=TEXTS + IMAGES)
def family(request: pytest.FixtureRequest) -> str:
    if request.param not in CONFIG_MAPPING:
        pytest.skip("a later transformers has it")
    return str(request.param)


def make(family: str) -> PreTrainedModel:
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"make({family!r}, seed={seed})")
    torch.manual_seed(seed)
    if family in IMAGES:
        return tiny_model(tiny_config(family), "", AutoModelForImageTextToText)
    return tiny_model(tiny_config(family, vocab_size=VOCAB), "", AutoModelForCausalLM)


def padded(rng: Any) -> dict[str, Tensor]:
    """Three rows behind padding, which share the head of their text."""
    ids = torch.from_numpy(rng.integers(101, VOCAB, (3, 24)))
    mask = torch.ones_like(ids)
    for row, pad in enumerate((0, 4, 7)):
        ids[row, :pad], mask[row, :pad] = 0, 0
        ids[row, pad : pad + 12] = ids[0, :12]
    return {"input_ids": ids, "attention_mask": mask}


def expanded_by(model: nn.Module) -> list[int]:
    """Tokens that the model's attention modules expand from now on, a number for each call."""
    counts: list[int] = []
    for module in model.modules():
        if (expand := getattr(module, "expand_kv", None)) is not None:

            def counted(latent: Tensor, rotary: Tensor, expand: Any = expand) -> tuple[Tensor, Tensor]:
                counts.append(latent.shape[2])
                return expand(latent, rotary)  # type: ignore[no-any-return]

            module.expand_kv = counted
    return counts


@pytest.mark.drawn(2)
def test_its_layers_attend_in_two_parts(family):
    facts = facts_of(make(family))
    assert facts.layers and all(kind.absorbs for kind in facts.layers)
    assert [kind.part.part.value for kind in facts.plan_kinds] == ["expanded", "absorbed"]


def test_a_tree_gives_the_logits_of_the_original_model(tiny, drive, dense_logits, rng):
    """Prompts in steps of 13 tokens, one that ends in the midst of what is known, then decode steps of all."""
    for kind in ("deepseek_v3", "minicpm3"):
        model = tiny(kind, **DENSE)
        run, head = drive(model), rng.integers(3, VOCAB, 20).tolist()
        sequences = [run.tree.insert([*head, *rng.integers(3, VOCAB, own).tolist()]) for own in (1, 9, 17)]
        run.run(13)
        sequences.append(run.tree.insert([*head[:7], *rng.integers(3, VOCAB, 3).tolist()]))
        sequences += run.tree.fork(sequences[1], 2)
        for _ in range(9):
            run.tree.extend_each(sequences, rng.integers(3, VOCAB, len(sequences)).tolist())
            run.run()
        for sequence in sequences:
            tokens = sequence.tokens().tolist()
            assert (run.logits_of(tokens) - dense_logits(model, tokens)).abs().max() <= 1e-4
        assert run.tokens_run == run.tree.snapshot().num_tokens, "a shared token runs once"


@pytest.mark.drawn(2)
def test_tokens_are_those_without_the_patch(family, rng):
    model = make(family)
    for options in (SAMPLED, BEAMS, {"do_sample": False}):
        want, got, cache = compared(model, padded(rng), max_new_tokens=5, **options)
        assert isinstance(cache, TreeCache), options
        assert torch.equal(got, want), options


@pytest.mark.drawn(2)
def test_log_probabilities_are_those_without_a_tree(family, rng):
    """Samples of a prompt, then a prompt that shares half of it, in a session that knows the first."""
    model = make(family)
    reference = copy.deepcopy(model)
    prefixkit.patch(model)
    first = rng.integers(101, VOCAB, 40).tolist()
    second = [*first[:23], *rng.integers(101, VOCAB, 9).tolist()]
    with prefixkit.Session(model, kv_budget="4MiB") as session:
        for prompt in (first, second):
            for sample in session.generate([prompt], n=3, max_new_tokens=5, stop_token_ids=()):
                with torch.no_grad():
                    logits = reference(torch.tensor([[*prompt, *sample.tokens]])).logits[0, len(prompt) - 1 : -1]
                want = logits.log_softmax(1).gather(1, torch.tensor(sample.tokens)[:, None])[:, 0]
                torch.testing.assert_close(torch.tensor(sample.logprobs), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["deepseek_v2", "minicpm3"])
def test_a_cache_goes_on_with_more_text(kind, rng):
    """Twice, the second time cropped; and without a tree the cache that it falls back to goes on as well."""
    model, more = make(kind), torch.from_numpy(rng.integers(101, VOCAB, (3, 6)))
    given = padded(rng)

    def turns(cache: Any) -> Tensor:
        ids, mask = given["input_ids"], given["attention_mask"]
        for turn in range(3):
            ids = generate(model, {"input_ids": ids, "attention_mask": mask}, past_key_values=cache, max_new_tokens=5)
            if turn == 1:
                cache.crop(-4)
                ids = ids[:, :-3]
            if turn == 1 and isinstance(cache, TreeCache):
                cache.fall_back()
            ids = torch.cat((ids, more), 1)
            mask = torch.nn.functional.pad(given["attention_mask"], (0, ids.shape[1] - 24), value=1)
        return ids

    want = turns(DynamicCache(config=model.config))
    prefixkit.patch(model, tree_cache="always")
    assert torch.equal(turns(TreeCache(model)), want)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("kind", "dtype"), [("deepseek_v3", torch.bfloat16), ("minicpm3", torch.float16)], ids=str)
def test_it_errs_no_more_than_the_unpatched_model(kind, dtype, drive, dense_logits, rng):
    """Prompts in chunks and decode steps, against the same weights in float64: the norms over 4 models."""
    ours = theirs = 0.0
    for _ in range(4):
        model = make_model(kind, **DENSE).to(dtype)
        exact, tokens = copy.deepcopy(model).double(), rng.integers(3, VOCAB, 60).tolist()
        run = drive(model)
        sequences = [run.tree.insert(tokens[:40])]
        run.run(25)
        sequences += run.tree.fork(sequences[0], 3)
        for at in range(40, 60):
            run.tree.extend_each(sequences, [tokens[at], *rng.integers(3, VOCAB, 3).tolist()])
            run.run()
        for sequence in sequences:
            text = sequence.tokens().tolist()
            want = dense_logits(exact, text).double()[40:]
            ours += float((run.logits_of(text).double()[40:] - want).square().sum())
            theirs += float((dense_logits(model, text).double()[40:] - want).square().sum())
    print(f"{kind} {dtype}: {(ours / theirs) ** 0.5:.3f} of the unpatched model's error")
    assert ours <= 1.5**2 * theirs


def test_decode_steps_expand_nothing(tiny, drive, rng):
    run = drive(tiny("deepseek_v3", **DENSE))
    counts = expanded_by(run.model)
    sequence = run.tree.insert(rng.integers(3, VOCAB, 40).tolist())
    run.run()
    assert sorted(counts) == [1, 1, 40, 40], "each layer has expanded the prompt; its own code expands a token for us"
    sequences = [sequence, *run.tree.fork(sequence, 7)]
    run.tree.extend_each(sequences, [5] * 8)
    run.run()
    counts.clear()
    for token in range(20):
        run.tree.extend_each(sequences, [token + 5] * 8)
        run.run()
    assert counts == [1] * 2 * 20


def test_a_prefix_of_many_samples_is_expanded_once_a_step_and_their_own_tokens_are_not(tiny, drive, rng):
    """Queries of 100 rows cost more by latents of 64 than the expansion of what they share."""
    run = drive(tiny("deepseek_v3", **DENSE | {"kv_lora_rank": 64}), num_pages=512)
    sequence = run.tree.insert(rng.integers(3, VOCAB, 200).tolist())
    run.run()
    sequences = [sequence, *run.tree.fork(sequence, 99)]
    counts = expanded_by(run.model)
    for tokens in (1, 2, 3):
        run.tree.extend_each(sequences, rng.integers(3, VOCAB, 100).tolist())
        step = replace(run.step(), layer_counts=(2, 2))
        assert step.kv_tokens == (200 + 100 * tokens, 100 * (200 + tokens)), "both parts read, and count once unshared"
        counts.clear()
        run.run()
    assert sorted(counts) == [1, 1, 200, 200], "after the first step, in which the maps were measured"


@torch.no_grad()
def test_adapters_and_writes_are_seen_at_once(drive, dense_logits, rng):
    """Of one patched model: adapters that are zeros, then trained, disabled, and weights written in place."""
    config = peft.LoraConfig(r=2, target_modules=["kv_b_proj"])
    model = peft.get_peft_model(make_model("deepseek_v3", **DENSE), config).eval()
    layers = [layer.self_attn.kv_b_proj for layer in model.base_model.model.model.layers]
    said = list[Tensor]()

    def judge() -> None:
        run = drive(model, copied=False)
        sequence = run.tree.insert(rng.integers(3, VOCAB, 30).tolist())
        run.run()
        sequences = [sequence, *run.tree.fork(sequence, 3)]
        for _ in range(4):
            run.tree.extend_each(sequences, rng.integers(3, VOCAB, 4).tolist())
            run.run()
        for one in sequences:
            tokens = one.tokens().tolist()
            assert (run.logits_of(tokens) - dense_logits(model, tokens)).abs().max() <= 1e-4
        said.append(dense_logits(model, list(range(3, 13))))

    judge()
    for layer in layers:
        layer.lora_B["default"].weight.data.normal_()
    judge()
    for layer in layers:
        layer.base_layer.weight.mul_(0.5)
    judge()
    with model.disable_adapter():
        judge()
        for layer in layers:
            layer.base_layer.weight.data.mul_(2.0)
        judge()
    assert all((one - other).abs().max() > 0.01 for one, other in pairwise(said)), "each change matters"
    model.merge_adapter()
    judge()
