"""Looped models, whose modules run several times in a step: each run has KV, and states, of its own."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import prefixkit
from prefixkit import SamplingParams, Session, TreeCache, variants
from prefixkit.models import UnsupportedModel, facts_of, kv_spec
from prefixkit.models.families import attention_layers
from prefixkit.models.requirements import CACHE
from prefixkit.testing.integrity import check_tree
from prefixkit.torch_private import without_memory
from scripts.tiny_models import tiny_config, tiny_model
from tests.models.compile.decode import Decode
from tests.models.generate.generating import BEAMS, SAMPLED, compared, generate
from tests.models.states.hybrids import VOCAB, assert_logprobs, assert_samples, by_pass, padded

FAMILIES = ["dory", "hrm_text", "inkling2_loop_text"]
# Dory: 4 layers, of which 1 and 2 run three times.  HRM: two stacks of 2 layers, which run 3 * 2 and 2 times.
LAYERS = {"dory": 8, "hrm_text": 16, "inkling2_loop_text": 8}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def seed() -> int:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print("seed", seed)
    return seed


def make(family: str, seed: int = 0, **options: Any) -> PreTrainedModel:
    if family not in CONFIG_MAPPING:
        pytest.skip("a later transformers has it")
    torch.manual_seed(seed)
    if family == "inkling2_loop_text":
        options["unpadded_vocab_size"] = VOCAB
    return tiny_model(tiny_config(family, vocab_size=VOCAB, **options), "")


@pytest.mark.parametrize("family", ["dory", "hrm_text"])
@pytest.mark.parametrize("budget", [13, 10**6])
def test_a_tree_gives_the_logits_of_the_original_model(family, budget, drive, dense_logits, rng):
    """Of prompts that part anywhere and run in pieces, and of forks."""
    model = make(family)
    run, head = drive(model), rng.integers(3, VOCAB, 20).tolist()
    texts = [[*head[:shared], *rng.integers(3, VOCAB, own).tolist()] for shared, own in ((20, 6), (20, 3), (11, 9))]
    sequences = [run.tree.insert(text) for text in texts]
    run.run(budget)
    sequences += run.tree.fork(sequences[0], 2)
    for _ in range(3):
        run.tree.extend_each(sequences, rng.integers(3, VOCAB, len(sequences)).tolist())
        run.run()
    check_tree(run.tree)
    for sequence in sequences:
        tokens = sequence.tokens().tolist()
        truth = dense_logits(model, tokens)
        assert (run.logits_of(tokens) - truth).abs().max() <= 1e-4 * min(1, truth.std())


@pytest.mark.drawn(1)
def test_samples_have_the_probabilities_of_one_forward_pass(family, seed):
    """In steps of few tokens, and in calls that go on from samples."""
    assert_samples(make(family, seed), seed)


def test_scores_are_those_of_one_forward_pass(family, rng):
    model = prefixkit.patch(make(family))
    prompt, *targets = (rng.integers(3, VOCAB, count).tolist() for count in (15, 3, 6))
    with Session(model) as session:
        scores = session.score([prompt], [targets])
    for target, score in zip(targets, scores[0], strict=True):
        truth = by_pass(model, [*prompt, *target], len(prompt))
        assert torch.allclose(torch.tensor(score.logprobs).double(), truth.double(), atol=1e-4)


def test_a_prefix_from_a_file_does_not_run_again(family, rng, tmp_path):
    model, path = prefixkit.patch(make(family)), tmp_path / "prefix.safetensors"
    text = rng.integers(3, VOCAB, 40).tolist()
    with Session(model, kv_budget="16MiB") as session:
        session.save(path, [text])
    with Session(model, kv_budget="16MiB") as session:
        assert session.load(path) == len(text)
        found = session.generate([[*text, 7]], SamplingParams(n=2, max_new_tokens=4, stop_token_ids=()))
        assert session.report.tokens_computed == 1 + 2 * 3
        assert_logprobs(model, [[*text, 7]], [*found])


@pytest.mark.drawn(2)
@pytest.mark.parametrize("options", [SAMPLED, BEAMS, {"do_sample": False}], ids=["samples", "beams", "greedy"])
def test_tokens_are_those_without_the_patch(family, options, seed):
    want, got, cache = compared(make(family, seed), padded(seed), max_new_tokens=6, **options)
    assert isinstance(cache, TreeCache)
    assert not cache.fell_back
    assert torch.equal(got, want)


@pytest.mark.drawn(1)
def test_a_cache_goes_on_with_more_text(family, seed):
    """And so does the cache that it falls back to, or is pickled as, with the KV of every run."""
    model, given = make(family, seed), padded(seed)
    more = torch.randint(3, VOCAB, (3, 4), generator=torch.Generator().manual_seed(seed + 1))

    def turns(cache: Any) -> torch.Tensor:
        ids, mask = given["input_ids"], given["attention_mask"]
        for turn in range(3):
            ids = generate(model, {"input_ids": ids, "attention_mask": mask}, **{CACHE: cache}, max_new_tokens=3)
            if turn == 1 and isinstance(cache, TreeCache):
                assert len(pickle.loads(pickle.dumps(cache)).layers) == len(cache) == LAYERS[family]
                cache.fall_back()
            ids = torch.cat((ids, more), 1)
            mask = torch.nn.functional.pad(given["attention_mask"], (0, ids.shape[1] - 24), value=1)
        return ids

    want = turns(DynamicCache(config=model.config))
    prefixkit.patch(model, tree_cache="always")
    assert torch.equal(turns(TreeCache(model)), want)


def test_each_run_is_a_layer_of_kv(family):
    facts = facts_of(make(family))
    assert len(facts.layers) == len(facts.spec.layers) == LAYERS[family]
    assert facts.spec.bytes_per_token == sum(kind.k_dim * kind.kv_heads * 2 * 4 for kind in facts.layers)


@pytest.mark.parametrize("family", ["dory", "hrm_text"])
def test_kv_is_counted_without_weights(family):
    """As ``prefixkit inspect`` does."""
    model = make(family)
    with without_memory():
        empty = AutoModelForCausalLM.from_config(model.config)
    assert kv_spec(empty) == kv_spec(model)


def test_layers_are_numbered_as_in_the_cache_of_the_model():
    """The layers that a model adds to its cache come last, in whatever order they run."""
    facts = facts_of(make("dory"))
    windows = [kind.visible.window for kind in facts.layers]
    one, other = windows[0], windows[1]
    assert one != other
    assert windows == [one, other, one, other, *[other, one] * 2]
    assert facts.probed.computed_by == (0, 1, 2, 3, 1, 2, 1, 2)


def test_a_stack_is_numbered_by_the_first_layer_that_it_stores():
    model = make("hrm_text", H_cycles=2, L_cycles=2)
    names = [f"model.{stack}_module.layers.{number}.self_attn" for stack in "LH" for number in range(2)]
    assert list(attention_layers(model)) == names
    assert facts_of(model).probed.computed_by == (0, 1, 0, 1, 4, 5) * 2


def test_a_variant_applies_to_every_run_of_its_module():
    model = make("dory")
    facts = facts_of(prefixkit.patch(model, variant={2: variants.alibi([0.5] * 4)}))
    assert [place for place, kind in enumerate(facts.layers) if kind.variant is not None] == [2, 5, 7]


def test_a_copy_of_a_patched_model_applies_its_variants():
    model = make("hrm_text", H_cycles=2, L_cycles=2)
    prefixkit.patch(model, variant={4: variants.alibi([0.5] * 4)})
    for one in (model, copy.deepcopy(model)):
        places = [place for place, kind in enumerate(facts_of(one).layers) if kind.variant is not None]
        assert places == [4, 10], "of the upper stack"


def test_other_loops_are_measured_and_computed_anew(seed):
    """Even if as many layers cache as much as before."""
    model = prefixkit.patch(make("hrm_text", seed, H_cycles=3, L_cycles=1))
    prompt, greedy = [5, 6, 7, 8, 9], SamplingParams(temperature=0, max_new_tokens=3, stop_token_ids=())
    with Session(model, kv_budget="1MiB") as session:
        assert_logprobs(model, [prompt], [*session.generate([prompt], greedy)])
        model.config.H_cycles, model.config.L_cycles = 2, 2
        assert_logprobs(model, [prompt], [*session.generate([prompt], greedy)])
        assert session.report.prompt_tokens_found == 0


LOOPS = [
    ("hrm_text", {"H_cycles": 3, "L_cycles": 1}, {"H_cycles": 2, "L_cycles": 2}),  # as many layers cache as before
    ("dory", {"n_recurrent_loops": 3}, {"n_recurrent_loops": 2}),
    ("dory", {"n_recurrent_loops": 1}, {"n_recurrent_loops": 3}),
]


@pytest.mark.parametrize(("family", "before", "after"), LOOPS)
@pytest.mark.parametrize("how", ["given", "made", "copied", "pickled"])
def test_a_cache_of_other_loops_is_computed_anew(family, before, after, how, seed, caplog):
    """And a warning says so, whether there is a cache of transformers to fall back to or not."""
    model, given = prefixkit.patch(make(family, seed, **before), tree_cache="always"), padded(seed)
    fixed = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    first = generate(model, given, **fixed, **({} if how == "made" else {CACHE: TreeCache(model)}))
    for name, number in after.items():
        setattr(model.config, name, number)
    cache = first[CACHE]
    if how == "copied":
        cache = copy.deepcopy(cache)
    elif how == "pickled":
        cache = pickle.loads(pickle.dumps(cache))
    mask = torch.nn.functional.pad(given["attention_mask"], (0, 4), value=1)
    grown = {"input_ids": first.sequences, "attention_mask": mask}
    found = generate(model, grown, **fixed, **{CACHE: cache})
    assert "the model has changed since its cache was made; the cache is computed anew" in caplog.text
    want = generate(prefixkit.unpatch(model), grown, **fixed)
    assert torch.equal(found.sequences, want.sequences)
    for got, true in zip(found.logits, want.logits, strict=True):
        assert (got - true).abs().max() <= 1e-4 * min(1, true.std())


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("family", "options"), [("dory", {}), ("hrm_text", {"H_cycles": 3, "L_cycles": 3})])
def test_compiled_layers_compute_the_same(family, options, dynamo, drive, rng):
    """However many loops there are: torch makes at most 8 graphs of one function."""
    decode = Decode(drive, make(family, **options), rng)
    runner = decode.runner()
    for _ in range(3):
        step = decode.step()
        assert torch.allclose(runner(step), decode.driver.runner(step), atol=1e-5)
        decode.done()
    assert runner.compiled.reason is None


def test_kv_of_the_last_loop_alone_is_refused():
    """The result of a text then depends on where passes cut it, as transformers computes it."""
    model = make("dory", recurrent_kv_cache_mode="last_loop")
    ids = padded(0)["input_ids"][:1]
    with torch.no_grad():
        cache = model(ids[:, :12]).get(CACHE)
        pieces, whole = model(ids[:, 12:], **{CACHE: cache}).logits, model(ids).logits[:, 12:]
    assert (pieces - whole).abs().max() > 1e-2 * whole.std()
    with pytest.raises(UnsupportedModel, match="load the model with recurrent_kv_cache_mode='per_loop'"):
        facts_of(model).layers  # noqa: B018


def test_one_loop_is_no_loop():
    model = make("dory", n_recurrent_loops=1, recurrent_kv_cache_mode="last_loop")
    assert len(facts_of(model).layers) == 4
    assert not facts_of(model).probed.computed_by


class Twice(LlamaDecoderLayer):
    """Runs twice, for the same layer of the cache."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        once = super().forward(hidden_states, *args, **kwargs)
        return super().forward(once, *args, **kwargs)


def test_a_module_that_caches_for_one_layer_twice_is_refused(tiny):
    model = tiny("llama")
    model.model.layers[1] = Twice(model.config, 1).eval()
    with pytest.raises(UnsupportedModel, match=r"layers\.1\.self_attn .* caches KV of layer 1 after model\.layers\.1"):
        facts_of(model).layers  # noqa: B018
