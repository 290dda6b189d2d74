"""Samples are the unpatched model's, the report counts what they share, and they need not be kept."""

import copy
import logging

import numpy as np
import pytest
import torch

import prefixkit
from prefixkit.engine.request import Request
from prefixkit.sampling.params import SamplingParams
from prefixkit.testing.engines import make_engine
from prefixkit.testing.tiny import EOS, tiny_llama
from tests.api.cases import HEAD, PROMPTS, TOKENIZER
from tests.models.tiny_families import make_model


def stock_greedy(prompt, new=20):
    plain = tiny_llama()
    ids = torch.tensor([TOKENIZER(prompt)["input_ids"]])
    out = plain.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new)
    return out[0, ids.shape[1] :].tolist()


def test_greedy_tokens_are_those_of_the_unpatched_model(model):
    result = prefixkit.generate(model, TOKENIZER, PROMPTS, temperature=0, max_new_tokens=20)
    assert [sample.tokens for sample in result] == [stock_greedy(prompt) for prompt in PROMPTS]


def test_texts_that_grow_past_a_chunk_of_attention_are_the_unpatched_models():
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    plain = make_model("llama4_text", head_dim=16, attention_chunk_size=20, floor_scale=12, **experts)
    model, prompt = prefixkit.patch(copy.deepcopy(plain)), [5, 9, 7, 3, 8]
    options = {"temperature": 0, "max_new_tokens": 30, "stop_token_ids": ()}
    (sample,) = prefixkit.generate(model, None, [prompt], **options)
    want = plain.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=30, eos_token_id=None, pad_token_id=0)
    assert sample.tokens == want[0, 5:].tolist()
    with prefixkit.Session(model, None, kv_budget="1MiB") as session:
        assert session.generate([prompt], **options)[0].tokens == sample.tokens


def test_a_samples_logprobs_are_the_models_own(model):
    (sample,) = prefixkit.generate(model, TOKENIZER, PROMPTS[:1], temperature=0.7, top_k=5, max_new_tokens=8, seed=3)
    prompt = TOKENIZER(PROMPTS[0])["input_ids"]
    with torch.no_grad():
        logits = tiny_llama()(torch.tensor([prompt + sample.tokens])).logits[0, len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(sample.tokens)[:, None])[:, 0]
    np.testing.assert_allclose(sample.logprobs, expected.numpy(), atol=1e-4)


def test_the_report_counts_what_was_shared(model):
    result = prefixkit.generate(model, TOKENIZER, PROMPTS, n=3, max_new_tokens=5, stop_token_ids=())
    report = result.report
    lengths = [len(TOKENIZER(prompt)["input_ids"]) for prompt in PROMPTS]
    head = len(TOKENIZER(HEAD)["input_ids"])
    assert report.tokens_plain_batch == sum(3 * (length + 4) for length in lengths)
    distinct = head + (lengths[0] - head) + (lengths[1] - head) + lengths[2]
    # "    " is shared by the two bodies as well.
    assert report.tokens_computed == distinct - 4 + 15 * 4
    assert (report.prompts, report.samples, report.new_tokens) == (5, 15, 75)
    assert report.kv_bytes_read < report.kv_bytes_read_unshared
    assert "tokens computed" in str(report)


def test_samples_that_are_not_kept_go_to_on_sample_and_are_counted(model):
    options = {"n": 3, "max_new_tokens": 8, "seed": 3}
    seen = []
    result = prefixkit.generate(model, TOKENIZER, PROMPTS, return_samples=False, on_sample=seen.append, **options)
    kept = prefixkit.generate(model, TOKENIZER, PROMPTS, **options)
    assert result.samples == ()
    assert sorted(seen, key=lambda sample: (sample.prompt_index, sample.index)) == list(kept)
    assert result.report.samples == 15
    assert result.report.new_tokens == kept.report.new_tokens


def test_torchs_default_dtype_and_device_do_not_matter(model):
    options = {"n": 2, "max_new_tokens": 8, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 4, "page_size": 4}
    sampled = prefixkit.generate(model, TOKENIZER, PROMPTS, **options)
    searched = prefixkit.beam_search(model, TOKENIZER, PROMPTS, num_beams=3, max_new_tokens=8)
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")  # nothing can be computed from what is made there
    try:
        assert prefixkit.generate(model, TOKENIZER, PROMPTS, **options).samples == sampled.samples
        found = prefixkit.beam_search(model, TOKENIZER, PROMPTS, num_beams=3, max_new_tokens=8)
        assert found.samples == searched.samples
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def test_sequences_beyond_the_models_positions_are_warned_of(model, caplog):
    with caplog.at_level(logging.WARNING, "prefixkit"):
        prefixkit.generate(model, TOKENIZER, [[1] * 2040], temperature=0, max_new_tokens=9, stop_token_ids=[EOS])
        assert not caplog.text, "the KV of the last token is not computed"
        prefixkit.generate(model, TOKENIZER, [[1] * 2040], temperature=0, max_new_tokens=10, stop_token_ids=[EOS])
    assert "made for 2048 positions" in caplog.text


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_a_text_beyond_the_positions_that_a_model_has_learned_is_refused_before_any_runs(family):
    """OPT's table has two rows before those of positions."""
    model = prefixkit.patch(make_model(family, max_position_embeddings=32))
    short, long, longer = [5] * 8, [5] * 30, [5] * 33
    with prefixkit.Session(model) as session:
        options = {"temperature": 0, "stop_token_ids": ()}
        assert [len(one.tokens) for one in session.generate([short, long], max_new_tokens=3, **options)] == [3, 3]
        for call in (
            lambda: session.generate([short, long], max_new_tokens=4, **options),
            lambda: session.beam_search([long], num_beams=2, max_new_tokens=4),
            lambda: session.score(long, [[5, 6, 7, 8]]),
            lambda: session.values([longer], lambda hidden: hidden),
        ):
            with pytest.raises(ValueError, match=r"has learned 32 positions .*; pass shorter prompts or fewer"):
                call()
        assert session.report.prompt_tokens == 38


def test_without_graphs_nothing_is_compiled_and_the_log_says_so(caplog):
    requests = [Request(0, np.arange(3, 9), SamplingParams(max_new_tokens=2, temperature=0.0))]
    engine = make_engine(prefixkit.patch(tiny_llama()), requests, compiled=True)
    assert "layers run without torch.compile: there are no CUDA graphs" in caplog.text
    assert len(engine.run(requests)[0].tokens) == 2


def test_a_wrapper_without_a_config_runs_as_the_model_in_it() -> None:
    class Policy(torch.nn.Module):
        def __init__(self, model: torch.nn.Module) -> None:
            super().__init__()
            self.base = model

        def forward(self, **kwargs: object) -> object:
            return self.base(**kwargs)

    model = tiny_llama()
    model.generation_config.eos_token_id = 7
    prefixkit.patch(model)
    want, got = (
        prefixkit.generate(each, TOKENIZER, ["hello"], n=3, seed=1, max_new_tokens=9).samples
        for each in (model, Policy(model).eval())
    )
    assert [sample.tokens for sample in got] == [sample.tokens for sample in want]
