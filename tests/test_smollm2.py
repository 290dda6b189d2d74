"""A real model on real problems: SmolLM2-135M-Instruct over HumanEval, against its unpatched self."""

import pytest
import torch

import prefixkit
from prefixkit.evaluation.tasks.source import Source, load


@pytest.fixture(scope="module")
def heads():
    """The two shortest of the first 24, for most of the time goes into reading prompts."""
    return sorted((problem.head.rstrip() for problem in load(Source(task="humaneval", limit=24))), key=len)[:2]


def stock(model, tokenizer, text, **options):
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, return_dict_in_generate=True, **options
    )
    return out, ids.shape[1]


def test_greedy_10_tokens_of_2_problems_sampled_together_are_the_unpatched_models(smol, heads):
    model, tokenizer = smol
    with prefixkit.patched(model):
        result = prefixkit.generate(model, tokenizer, heads, temperature=0, max_new_tokens=10)
    assert not prefixkit.models.is_patched(model)
    # In one padded batch, for weights are read once a step then, and the test takes a third of the time.
    ids = tokenizer(heads, padding=True, padding_side="left", return_tensors="pt")
    out = model.generate(**ids, do_sample=False, max_new_tokens=10)[:, ids["input_ids"].shape[1] :].tolist()
    for sample, theirs, head in zip(result, out, heads, strict=True):
        end = theirs.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in theirs else None
        assert sample.tokens == theirs[:end], head


def test_beams_are_those_of_transformers(smol, heads):
    model, tokenizer = smol
    options = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 4}
    with prefixkit.patched(model):
        result = prefixkit.beam_search(model, tokenizer, heads, **options)
    for index in range(2):
        out, length = stock(model, tokenizer, heads[index], output_scores=True, **options)
        for sample, sequence, score in zip(result.of_prompt(index), out.sequences, out.sequences_scores, strict=True):
            assert sample.tokens == sequence[length : length + len(sample.tokens)].tolist()
            assert sample.score == pytest.approx(score.item(), abs=1e-4)


def test_seeded_samples_do_not_depend_on_company_order_or_pages(smol, heads):
    model, tokenizer = smol
    options = {"n": 2, "temperature": 0.8, "top_p": 0.95, "max_new_tokens": 4, "seed": 5}
    with prefixkit.patched(model):
        together = prefixkit.generate(model, tokenizer, heads, **options)
        backward = prefixkit.generate(model, tokenizer, heads[::-1], page_size=1, **options)
        alone = prefixkit.generate(model, tokenizer, heads[1:2], page_size=128, **options)
    for index in range(2):
        expected = [sample.tokens for sample in together.of_prompt(index)]
        assert [sample.tokens for sample in backward.of_prompt(1 - index)] == expected
    assert [sample.tokens for sample in alone] == [sample.tokens for sample in together.of_prompt(1)]
