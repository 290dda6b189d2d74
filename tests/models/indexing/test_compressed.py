"""Attention to compressed tokens beside those of a window: entries of 4 tokens, of which 2 are selected, and of 8."""

from __future__ import annotations

import copy
import functools
import os
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.cache_utils import DynamicCache

import prefixkit
from prefixkit import TreeCache
from prefixkit.models import IncompleteStep, UnsupportedModel, facts_of, kv_spec
from scripts.tiny_models import tiny_config, tiny_model
from tests.models.generate.generating import BEAMS, SAMPLED, compared, generate
from tests.models.tiny_families import VOCAB

pytestmark = pytest.mark.skipif("deepseek_v4" not in CONFIG_MAPPING, reason="another transformers has it")


def make_model(seed: int | None = None, **options: Any) -> PreTrainedModel:
    seed = int.from_bytes(os.urandom(4), "little") if seed is None else seed
    print(f"make_model(seed={seed})")
    torch.manual_seed(seed)
    return tiny_model(tiny_config("deepseek_v4", vocab_size=VOCAB, **options), "")


def text_of(rng, length: int) -> dict[str, torch.Tensor]:
    ids = torch.from_numpy(rng.integers(3, VOCAB, (1, length)))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def test_a_tree_gives_the_logits_of_the_original_model(drive, dense_logits, rng):
    """Prompts of many lengths in steps of 13 tokens, then decode steps of all; forks inside of an entry and after."""
    model = make_model()
    run, head = drive(model), rng.integers(3, VOCAB, 22).tolist()
    sequences = [run.tree.insert([*head, *rng.integers(3, VOCAB, own).tolist()]) for own in (1, 6, 17)]
    sequences.append(run.tree.insert(rng.integers(3, VOCAB, 3).tolist()))
    run.run(13)
    sequences += run.tree.fork(sequences[1], 2)
    for _ in range(9):
        run.tree.extend_each(sequences, rng.integers(3, VOCAB, len(sequences)).tolist())
        run.run()
    for sequence in sequences:
        tokens = sequence.tokens().tolist()
        assert (run.logits_of(tokens) - dense_logits(model, tokens)).abs().max() <= 1e-4
    assert run.tokens_run == run.tree.snapshot().num_tokens, "a shared token runs once"


@pytest.mark.parametrize(
    "options",
    [
        {"index_topk": 64},
        {"compress_rates": {"compressed_sparse_attention": 64, "heavily_compressed_attention": 8}},
        {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 64}},
    ],
    ids=["selection", "selected entries", "other entries"],
)
def test_entries_matter(options, dense_logits, rng):
    """Or the other tests would compare windows with windows."""
    model, other, tokens = make_model(1), make_model(1, **options), rng.integers(3, VOCAB, 40).tolist()
    values = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if "position_bias" not in name:
                parameter.copy_(values[name])
    assert (dense_logits(model, tokens) - dense_logits(other, tokens)).abs().max() > 0.02


@pytest.mark.parametrize("options", [SAMPLED, BEAMS, {"do_sample": False}], ids=["samples", "beams", "greedy"])
def test_tokens_are_those_without_the_patch(options, rng):
    if "num_beams" in options and "reorder_cache" not in vars(_cache_class()):
        pytest.skip("this transformers leaves entries behind where beams change their order")
    want, got, cache = compared(make_model(), text_of(rng, 25), max_new_tokens=10, **options)
    assert isinstance(cache, TreeCache)
    assert torch.equal(got, want)


def _cache_class() -> type:
    from transformers.models.deepseek_v4 import modeling_deepseek_v4

    found: type = modeling_deepseek_v4.DeepseekV4CSACache
    return found


def test_padded_rows_keep_the_cache_of_transformers(rng):
    """Which compresses padding with the text."""
    given = text_of(rng, 25)
    given = {name: value.repeat(2, 1) for name, value in given.items()}
    given["attention_mask"][1, :3] = 0
    want, got, cache = compared(make_model(), given, max_new_tokens=5, do_sample=False)
    assert not isinstance(cache, TreeCache)
    assert torch.equal(got, want)


def test_a_cache_goes_on_with_more_text(rng):
    """Twice; and without a tree the cache that it falls back to goes on as well."""
    model, more, given = make_model(), torch.from_numpy(rng.integers(3, VOCAB, (1, 6))), text_of(rng, 22)

    def turns(cache: Any) -> torch.Tensor:
        ids = given["input_ids"]
        for turn in range(3):
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            ids = generate(model, inputs, past_key_values=cache, max_new_tokens=5, do_sample=False)
            if turn == 1 and isinstance(cache, TreeCache):
                cache.fall_back()
            ids = torch.cat((ids, more), 1)
        return ids

    want = turns(DynamicCache(config=model.config))
    prefixkit.patch(model, tree_cache="always")
    assert torch.equal(turns(TreeCache(model)), want)


def test_a_session_finds_and_saves_what_it_has_computed(tmp_path, rng):
    """With less memory than all samples need: what is cached of tokens is copied out and back."""
    model, memory = prefixkit.patch(make_model()), prefixkit.MemoryPolicy(preemption="swap", headroom=0)
    prompt, options = rng.integers(3, VOCAB, 30).tolist(), {"n": 4, "max_new_tokens": 20, "stop_token_ids": ()}
    found = []
    for pages in (200, 8):
        budget = pages * 16 * kv_spec(model).bytes_per_token
        with prefixkit.Session(model, kv_budget=budget, memory=memory) as session:
            found.append(session.generate([prompt], **options))
            session.save(tmp_path / str(pages), [prompt])
    assert found[1].report.preempted_swapped
    with prefixkit.Session(model, kv_budget="4MiB") as session:
        session.load(tmp_path / "8")
        found.append(session.generate([prompt], **options))
    assert found[2].report.prompt_tokens_found >= 29
    want = [sample.tokens for sample in found[0]]
    assert all([sample.tokens for sample in other] == want for other in found[1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_it_errs_no_more_than_the_unpatched_model(dtype, drive, dense_logits, rng):
    """Against the same weights in float64, where all entries are selected and all experts taken."""
    theirs, ours = [], []
    for seed in range(3):
        model = make_model(seed, num_experts_per_tok=4, index_topk=64).to(dtype)
        exact, tokens = copy.deepcopy(model).double(), rng.integers(3, VOCAB, 40).tolist()
        exact.config._experts_implementation = "eager"  # the default has no float64
        reference, own = dense_logits(exact, tokens).double(), dense_logits(model, tokens).double()
        run = drive(model)
        run.tree.insert(tokens)
        run.run(25)
        ours.append((run.logits_of(tokens).double() - reference).norm(dim=1))
        theirs.append((own - reference).norm(dim=1))
    tree, plain = torch.cat(ours).mean(), torch.cat(theirs).mean()
    print(f"errors {tree:.4f} on a tree, {plain:.4f} without")
    assert tree <= 1.5 * plain


def test_what_is_compressed_is_cached_beside_k_and_v():
    kinds = facts_of(make_model()).layers
    assert {tuple(one.name for one in kind.compressed) for kind in kinds} == {
        ("compressor",),
        ("compressor", "indexer"),
    }
    for kind in kinds:
        assert kind.visible.window == 7
        assert len(kind.cached) == kind.attended + len(kind.compressed)
        assert [tensor.size for tensor in kind.cached[2:]] == [one.kv + one.gate for one in kind.compressed]
        assert "with compressed tokens of" in str(kind)


def _counts_calls(compressor: Any) -> None:
    """Entries depend on how often it was called."""
    cls = type(compressor)

    @functools.wraps(cls.forward)
    def forward(self: Any, hidden: Any, query: Any, position_ids: Any, cache: Any, layer: Any) -> Any:
        kv, bias = cls.forward(self, hidden, query, position_ids, cache, layer)
        return (kv + 1 if cache is None else kv), bias

    compressor.__class__ = type(cls.__name__, (cls,), {"forward": forward})


def test_a_compressor_that_does_something_else_is_refused():
    model = make_model()
    _counts_calls(model.model.layers[0].self_attn.compressor)
    with pytest.raises(UnsupportedModel, match=r"layers\.0\.self_attn .* makes other entries of a text at once"):
        kv_spec(model)


def test_a_step_in_which_a_compressor_does_not_run_is_refused(drive, rng):
    """It would leave nothing of its tokens for later steps."""
    run = drive(make_model())
    run.tree.insert(rng.integers(3, VOCAB, 20).tolist())
    run.model.model.layers[1].self_attn.compressor = None
    with pytest.raises(IncompleteStep, match=r"layer 1 attends without its .* compressed tokens"):
        run.run()
