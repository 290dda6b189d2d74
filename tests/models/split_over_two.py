"""What two processes do with the models in a folder, each with a half of the heads; and the same in one process."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

import prefixkit
from prefixkit import SamplingParams, variants
from prefixkit.agreement import ProcessesDiffer
from prefixkit.models.attention_class import is_patched
from prefixkit.models.compile import gathered_head
from prefixkit.models.compile.part_exchange import PartExchange
from prefixkit.models.tensor_parallel import agreement_of
from prefixkit.testing.application.command_line import run, save_model, write_prompts
from prefixkit.testing.tiny import VOCAB, byte_tokenizer, tiny_llama

FAMILIES = ("llama", "qwen2")
ALWAYS = [[*range(30, 70), *more] for more in ([3, 4, 5], [*range(90, 99)], [7])]
PAGES = 12  # which eighteen samples outgrow
CAMPAIGN = ("-n", "3", "--max-new-tokens", "5", "--quiet", "--logprobs")


def save_models(folder):
    """A Llama and a Qwen2, with biases of q, k and v, which two processes can halve; and one that they cannot."""
    save_model(folder / "llama", chat=False)
    torch.manual_seed(1)
    of_heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": None, "initializer_range": 0.3}
    # Logits of half of the tokens are a multiple of 16 bytes, which they are not in the Llama.
    sizes = {"vocab_size": VOCAB + 4, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    qwen = Qwen2ForCausalLM(Qwen2Config(**sizes, **of_heads, bos_token_id=None, tie_word_embeddings=True))
    for layer in qwen.model.layers:
        for part in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            torch.nn.init.normal_(part.bias)
    qwen.save_pretrained(folder / "qwen2")
    tiny_llama(num_attention_heads=6, num_key_value_heads=3, hidden_size=96).save_pretrained(folder / "three")
    write_prompts(folder / "prompts.jsonl")


def load(folder, split):
    config = DistributedConfig(tp_plan="auto") if split else None
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=config).eval()


class Forbidding:
    """A logits processor that forbids half of the tokens: each process that is not the first forbids the other half."""

    def __init__(self, rank):
        self.half = slice(rank, None, 2)

    def __call__(self, tokens, scores):
        scores = scores.clone()
        scores[:, self.half] = -torch.inf
        return scores


def results(family, model, seed, rank=0):
    """What calls of a patched model give, by their names; equal in one process and in each of two."""
    rng, always = np.random.default_rng(seed), SamplingParams(max_new_tokens=6, seed=0)
    head = rng.integers(3, 250, 40).tolist()
    prompts = [head + rng.integers(3, 250, count).tolist() for count in (3, 9, 1)]
    continuations = [[rng.integers(3, 250, 4).tolist() for _ in range(2)] for _ in prompts]
    made = {}
    with prefixkit.Session(model, kv_budget="1MiB") as session:
        made["bytes per token"] = session.store.pool.spec.bytes_per_token
        params = made["params"] = SamplingParams(n=3, max_new_tokens=8, seed=seed, top_p=0.9, logprobs="sampled")
        sampled = session.generate(prompts, params)
        made["samples"] = [(prompts[sample.prompt_index], sample.index, sample.tokens) for sample in sampled]
        made["log-probabilities"] = np.concatenate([sample.logprobs for sample in sampled])
        scores = session.score(prompts, continuations)
        made["scores"] = np.concatenate([score.logprobs for each in scores for score in each])
        if family != FAMILIES[0]:
            return made
        # Tokens of one process, whatever the seed: a random number on an edge, where rounding decides, is seldom.
        processed = session.generate(ALWAYS, replace(always, logits_processors=lambda: Forbidding(rank)))
        made["processed"] = [sample.tokens for sample in processed]
        beams = session.beam_search(ALWAYS, num_beams=3, num_return_sequences=2, max_new_tokens=6)
        made["beams"] = [beam.tokens for beam in beams]
        made["beam scores"] = np.array([beam.score for beam in beams])
        made["values"] = torch.stack(session.values(prompts, lambda hidden: hidden[:, :8])).cpu().numpy()
    few = PAGES * 16 * made["bytes per token"]
    with prefixkit.Session(model, kv_budget=few, memory=prefixkit.MemoryPolicy(headroom=4)) as session:
        result = session.generate(prompts, replace(params, n=6, max_new_tokens=24, stop_token_ids=()))
        made["preempted"] = [(prompts[sample.prompt_index], sample.index, sample.tokens) for sample in result]
        made["preemptions"] = result.report.preempted_swapped + result.report.preempted_recomputed
    batch = torch.tensor([ALWAYS[2]], device=model.device)
    torch.manual_seed(0)
    for name, options in {
        "generate()": {"do_sample": True, "num_return_sequences": 4},
        "generate() with beams": {"do_sample": False, "num_beams": 3},
    }.items():
        out = model.generate(
            batch, max_new_tokens=8, eos_token_id=None, pad_token_id=0, return_dict_in_generate=True, **options
        )
        made[name] = out.sequences.tolist()
        assert isinstance(out.past_key_values, prefixkit.TreeCache) and not out.past_key_values.fell_back
    return made


def integrations(model):
    """What grammars and lm-eval make of a patched model, likewise; their packages are not needed for the rest."""
    from lm_eval.api.instance import Instance

    from prefixkit.integrations.lm_eval import PrefixLM
    from prefixkit.integrations.xgrammar import regex

    made, params = {}, SamplingParams(n=3, max_new_tokens=12, seed=0, grammar=regex("[a-f]{2,4}(-[0-9]{2})+;"))
    with prefixkit.Session(model, byte_tokenizer(), kv_budget="1MiB") as session:
        result = session.generate(ALWAYS, params)
        made["grammar"] = [(sample.text, sample.finish_reason) for sample in result]
    lm = PrefixLM(model, tokenizer=byte_tokenizer(), kv_budget="1MiB")
    options = {"until": ["\n"], "max_gen_toks": 8, "do_sample": False}
    texts = [("Is it? Maybe.\nSo:", own) for own in (" yes", " no", " not at all")]
    asked = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(texts)]
    made["lm-eval scores"] = np.array(lm.loglikelihood(asked, disable_tqdm=True))
    asked = [Instance("generate_until", {}, (context, options), index) for index, (context, _) in enumerate(texts)]
    made["lm-eval texts"] = lm.generate_until(asked, disable_tqdm=True)
    lm.session.close()
    return made


def refusals(folder, model, rank):
    """What the processes say to calls that are not the same in both, and to what cannot be halved."""
    said = {}
    with prefixkit.Session(model, kv_budget="1MiB") as session:
        for name, options in {"length": {"max_new_tokens": 4 + rank}, "prompts": {}}.items():
            prompt = [5, 6, 7 + rank * (name == "prompts")]
            try:
                session.generate([prompt], **{"max_new_tokens": 4, **options})
            except ProcessesDiffer as error:
                said[name] = str(error)
        said["after"] = [sample.tokens for sample in session.generate([[5, 6, 7]], max_new_tokens=4)]
        with torch.no_grad():
            if rank == 1:  # of these weights the other process knows nothing
                model.model.layers[0].mlp.up_proj.weight.to_local().mul_(1.5)
        said["changed"] = [sample.tokens for sample in session.generate([[5, 6, 7]], max_new_tokens=4)]
        said["KV found after a change"] = session.report.prompt_tokens_found
    torch.manual_seed(rank)
    try:
        model.generate(torch.tensor([[*range(40)]]), do_sample=True, num_return_sequences=3, max_new_tokens=2)
    except ProcessesDiffer as error:
        said["seeds"] = str(error)
    try:
        prefixkit.patch(model, variant=variants.alibi([0.5, 0.25]))
    except prefixkit.UnsupportedVariant as error:
        said["heads"] = str(error)
    prefixkit.patch(model, variant=variants.soft_cap(3.0))
    said["capped"] = prefixkit.generate(model, None, [[5, 6, 7]], max_new_tokens=4)[0].logprobs
    prefixkit.patch(model)
    three = load(folder / "three", split=True)
    try:
        prefixkit.patch(three)
    except prefixkit.UnsupportedModel as error:
        said["three"] = str(error), is_patched(three)
    return said


def head(model):
    """Logits that transformers gathers, and those that a step gathers of all rows and of the process's own rows, with a
    stand-in of the op; and its calls.
    """
    shapes, group = [], torch.distributed.group.WORLD

    def gather_parts(part, addresses, rank, sent):
        assert rank == group.rank()
        shapes.append(part.shape)
        parts = [torch.empty_like(part) for _ in range(2)]
        torch.distributed.all_gather(parts, part if sent is None else sent)
        parts[rank] = part
        return torch.cat(parts, -1)

    memory = PartExchange(group, torch.zeros(5, dtype=torch.int64))
    with (
        torch.inference_mode(),
        patch.object(torch.ops.prefixkit, "gather_parts", gather_parts),
        patch.object(gathered_head, "part_exchange", lambda model: memory),
    ):
        batch = torch.tensor([range(30, 72)])
        found = [model(batch).logits]
        for own_rows in (False, True):
            with gathered_head.gathered_head(model).in_step(own_rows):
                found.append(model(batch).logits)
    return *found, shapes


def exchanged(agreement):
    """Tensors of which each process has written its half of the rows, once they have exchanged these."""
    given = [torch.full((6, 2), -1), torch.full((4,), torch.nan), torch.full((2, 3), -1, dtype=torch.int32)]
    for one in given:
        one.chunk(2)[agreement.rank].fill_(agreement.rank)
    agreement.exchange(*given)
    return given


def files(folder, model):
    """Prefixes that are saved, a file for each process, and read again."""
    with prefixkit.Session(model, kv_budget="1MiB") as session:
        session.save(folder / "prefixes.safetensors", [[*range(30, 70)]])
    with prefixkit.Session(model, kv_budget="1MiB") as session:
        return session.load(folder / "prefixes.safetensors"), session.generate([[*range(30, 71)]], n=2).report


def one_of_two(folder, seed, rank, said):
    """What one of two processes does, with the environment that torchrun gives it; what it says is in ``said``."""
    with said.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ.update(WORLD_SIZE="2", RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)  # OpenMP's threads, if there are any, are the parent's
    found = {}
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    for family in FAMILIES:
        model = prefixkit.patch(load(folder / family, split=True))
        assert agreement_of(model).rank == rank
        found["exchanged"] = exchanged(agreement_of(model))
        found[family] = results(family, model, seed, rank)
        found[f"head of {family}"] = head(model)
        if family == FAMILIES[0]:
            found[family] |= integrations(model)
    loaded, report = files(folder, model)
    found["files"] = loaded, report.prompt_tokens_found
    found["refusals"] = refusals(folder, model, rank)
    arguments = ("sample", "--model", folder / "llama", "--input", folder / "prompts.jsonl", *CAMPAIGN)
    run(*arguments, "--tensor-parallel", "--run", folder / "two")
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(found))
    torch.distributed.destroy_process_group()
