"""Models that transformers splits over two processes: what both give is what one process gives."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from filelock import FileLock
from transformers.distributed.configuration_utils import DistributedConfig

import prefixkit
from prefixkit.evaluation.campaign.folder import RunFolder
from prefixkit.models.attention_class import is_patched
from prefixkit.sampling.rng import sample_key, uniforms
from prefixkit.sampling.specification import sample_tokens
from prefixkit.testing.application.command_line import run
from prefixkit.testing.tiny import tiny_llama
from tests.models.split_over_two import CAMPAIGN, FAMILIES, integrations, load, one_of_two, results, save_models

pytestmark = pytest.mark.first  # begun late, two workers would wait for one of them


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    """What each of two processes found, what one finds, and the folder: one run, which workers share."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    folder = shared / "split"
    with FileLock(shared / "split.lock"):
        if not (folder / "one.pickle").exists():
            folder.mkdir()
            run_both(folder, int(np.random.SeedSequence().generate_state(1)[0]))
    first, second, one = (pickle.loads((folder / f"{name}.pickle").read_bytes()) for name in (0, 1, "one"))
    return (first, second), one, folder


def run_both(folder, seed):
    """Run two processes, and meanwhile the same in this one; what they come to is in the folder."""
    print("seed", seed)
    save_models(folder)
    said = [folder / f"{rank}.txt" for rank in range(2)]
    forked = multiprocessing.get_context("fork")  # they need not import torch again
    both = [forked.Process(target=one_of_two, args=(folder, seed, rank, said[rank])) for rank in range(2)]
    with ExitStack() as stack:
        for process in both:
            process.start()
            stack.callback(process.kill)
        models = {family: prefixkit.patch(load(folder / family, split=False)) for family in FAMILIES}
        one = {family: results(family, model, seed) for family, model in models.items()}
        one[FAMILIES[0]] |= integrations(models[FAMILIES[0]])
        arguments = ("sample", "--model", folder / "llama", "--input", folder / "prompts.jsonl", *CAMPAIGN)
        run(*arguments, "--run", folder / "one")
        until = time.monotonic() + 120
        while None in (codes := [process.exitcode for process in both]) and {*codes} <= {None, 0}:
            assert time.monotonic() < until, "the processes wait for each other"
            time.sleep(0.02)
    assert codes == [0, 0], "\n".join(path.read_text() for path in said)
    (folder / "one.pickle").write_bytes(pickle.dumps(one))


def equal(one, other):
    return np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other


@pytest.mark.parametrize("family", FAMILIES)
def test_both_processes_give_the_same_bit_by_bit(split, family):
    (first, second), _, _ = split
    assert [name for name in first[family] if not equal(first[family][name], second[family][name])] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_are_those_of_one_process(split, family):
    """But where rounding decides: float32 sums over heads are taken in another order, and a token may be on an edge."""
    (first, _), one, folder = split
    for name in {"samples", "preempted"} & one[family].keys():
        for (prompt, index, ours), (_, _, theirs) in zip(first[family][name], one[family][name], strict=True):
            if ours != theirs:
                at = next(at for at, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1])
                model = load(folder / family, split=False)
                found = likely_to_be(model, [*prompt, *ours[:at]], one[family]["params"], (index, prompt, at))
                assert {ours[at], theirs[at]} <= found


def likely_to_be(model, tokens, params, place):
    """The tokens that a sample may get after others, by rounding of logits: noise of three times what is measured."""
    index, prompt, step = place
    u = uniforms(np.array([sample_key(params.seed, index, tuple(prompt))]), np.array([step]))
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, -1:]
    noisy = (logits + 3e-5 * torch.randn_like(logits) for _ in range(100))
    return {int(sample_tokens(one, params, u, [np.array(tokens)])[0]) for one in noisy}


def test_searches_and_generate_give_what_one_process_gives(split):
    (first, _), one, _ = split
    for name in ("processed", "beams", "generate()", "generate() with beams", "grammar", "lm-eval texts"):
        assert first["llama"][name] == one["llama"][name], name


@pytest.mark.parametrize("family", FAMILIES)
def test_numbers_are_those_of_one_process_within_rounding(split, family):
    (first, _), one, _ = split
    numbers = {"log-probabilities", "beam scores", "scores", "values", "lm-eval scores"}
    for name in numbers & one[family].keys():
        np.testing.assert_allclose(first[family][name], one[family][name], rtol=1e-4, atol=1e-4, err_msg=name)


def test_each_process_holds_half_of_the_kv_and_preempts(split):
    for found in split[0]:
        for family in FAMILIES:
            assert 2 * found[family]["bytes per token"] == split[1][family]["bytes per token"]
        assert found[FAMILIES[0]]["preemptions"] > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_gathers_the_logits_that_transformers_gathers(split, family):
    """Bit by bit; the Qwen2's head is its embedding, which is split by tokens too.  The Llama's columns do not fit."""
    for rank, found in enumerate(split[0]):
        expected, got, own, shapes = found[f"head of {family}"]
        assert torch.equal(got, expected)
        if family == "llama":
            assert torch.equal(own, expected) and shapes == []
            continue
        _, rows, vocab = expected.shape
        assert torch.equal(own, expected.chunk(2, 1)[rank])
        assert shapes == [(1, rows, vocab // 2), (1, rows // 2, vocab // 2)]


def test_rows_that_processes_have_written_in_parts_are_whole_in_both(split):
    for found in split[0]:
        for one in found["exchanged"]:
            zeros, ones = one.chunk(2)
            assert not zeros.any() and bool((ones == 1).all())


def test_calls_that_differ_are_refused_in_both_and_later_ones_run(split):
    first, second = (found["refusals"] for found in split[0])
    for found in (first, second):
        for name in ("length", "prompts"):
            assert found[name].startswith("the 2 processes that share the model have different requests; make the same")
        assert "different states of torch's generator; call torch.manual_seed with one number" in found["seeds"]
    assert first["after"] == second["after"]


def test_weights_that_change_in_one_process_change_in_both(split):
    first, second = (found["refusals"] for found in split[0])
    assert first["changed"] == second["changed"]
    assert first["KV found after a change"] == second["KV found after a change"] == 0


def test_heads_that_cannot_be_dealt_out_are_refused_and_nothing_is_patched(split):
    for found in split[0]:
        said, patched = found["refusals"]["three"]
        assert (
            said == "the 3 KV heads of LlamaForCausalLM cannot be dealt out to 2 processes; start as many as divide 3"
        )
        assert not patched


def test_variants_that_look_at_heads_are_refused_and_others_run(split):
    first, second = (found["refusals"] for found in split[0])
    says = "split over 2 processes, each of which numbers its own heads from 0, and the variant reads h"
    assert says in first["heads"] and says in second["heads"]
    assert first["capped"] == second["capped"] and np.isfinite(first["capped"]).all()


def test_each_process_has_files_of_its_own_kv(split):
    found, _, folder = split
    assert [each["files"] for each in found] == [(40, 40)] * 2
    assert {path.name for path in folder.glob("*.safetensors")} == {
        f"prefixes-{rank}of2.safetensors" for rank in (0, 1)
    }


def test_a_campaign_is_that_of_one_process_and_one_writes_it(split):
    folder = split[2]
    one, two = (RunFolder(folder / name) for name in ("one", "two"))
    assert one.manifest == two.manifest
    samples = [{(sample["id"], sample["index"]): sample["tokens"] for sample in of.samples()} for of in (one, two)]
    assert samples[0] == samples[1] and len(samples[0]) == 9
    assert len([event for event in two.history() if event["event"] == "began"]) == 1
    assert len([*two.shards.glob("*.jsonl")]) == 1


@pytest.mark.parametrize(("size", "said"), [("pp_size", "pipeline parallelism"), ("ep_size", "expert parallelism")])
def test_other_splits_are_refused_by_name(size, said):
    model = tiny_llama()
    model.config.distributed_config = DistributedConfig(**{size: 2, "tp_size": 2})
    with pytest.raises(prefixkit.UnsupportedModel, match=rf"LlamaForCausalLM is split by {said} \({size}=2\)"):
        prefixkit.patch(model)
    assert not is_patched(model)


def test_a_session_over_a_model_that_fsdp2_shards_is_refused():
    model = prefixkit.patch(tiny_llama())
    made_by = {"__module__": "torch.distributed.fsdp._fully_shard"}
    model.__class__ = type("FSDPLlama", (type(model),), made_by)
    with pytest.raises(prefixkit.UnsupportedModel, match="FSDP2 shards FSDPLlama over processes"):
        prefixkit.Session(model)
    with pytest.raises(prefixkit.UnsupportedModel, match="FSDP2 shards"):
        prefixkit.generate(model, None, [[5, 6]], max_new_tokens=1)
