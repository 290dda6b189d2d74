"""Beams are those of transformers, within a budget, and need no tokenizer."""

import pytest
import torch

import prefixkit
from prefixkit.testing.tiny import tiny_llama
from tests.api.cases import PROMPTS, TOKENIZER, tokens_of


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("num_beams", "rules"),
    [
        *((beams, {}) for beams in (2, 3, 5, 8)),
        (3, {"length_penalty": 2.0}),
        *((beams, {"early_stopping": early}) for beams in (2, 5) for early in (True, "never")),
    ],
    ids=str,
)
def test_sequences_and_scores_are_those_of_transformers(model, num_beams, rules):
    result = prefixkit.beam_search(
        model, TOKENIZER, PROMPTS[:3], num_beams=num_beams, num_return_sequences=2, max_new_tokens=12, **rules
    )
    plain = tiny_llama()
    for index, prompt in enumerate(PROMPTS[:3]):
        ids = torch.tensor([TOKENIZER(prompt)["input_ids"]])
        out = plain.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            num_beams=num_beams,
            num_return_sequences=2,
            max_new_tokens=12,
            return_dict_in_generate=True,
            output_scores=True,
            **rules,
        )
        for sample, sequence, score in zip(result.of_prompt(index), out.sequences, out.sequences_scores, strict=True):
            expected = [token for token in sequence[ids.shape[1] :].tolist() if token != plain.config.pad_token_id]
            assert sample.tokens == expected
            assert sample.score == pytest.approx(score.item(), abs=1e-4)


def test_a_budget_is_kept(model):
    found = prefixkit.beam_search(model, TOKENIZER, PROMPTS[2], num_beams=2, max_new_tokens=4, kv_budget="1MiB")
    assert found.report.kv_bytes_held_peak <= 2**20


def test_a_search_without_a_number_of_beams_is_refused(model):
    with pytest.raises(TypeError, match=r"beam search needs num_beams=..., or params=BeamParams\(num_beams=...\)"):
        prefixkit.beam_search(model, TOKENIZER, PROMPTS, max_new_tokens=4)


def test_beams_are_searched_without_text(model):
    ids = [TOKENIZER(prompt)["input_ids"] for prompt in PROMPTS[:2]]
    bare, text = (prefixkit.beam_search(model, t, ids, num_beams=3, max_new_tokens=6) for t in (None, TOKENIZER))
    assert tokens_of(bare) == tokens_of(text)
    assert {sample.text for sample in bare} == {""}
