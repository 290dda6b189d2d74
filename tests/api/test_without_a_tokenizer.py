"""Token ids are sampled without a tokenizer; text is refused."""

import pytest

import prefixkit
from tests.api.cases import PROMPTS, TOKENIZER, tokens_of

IDS = [TOKENIZER(prompt)["input_ids"] for prompt in PROMPTS]


def test_token_ids_are_sampled_without_text(model):
    options = {"n": 2, "max_new_tokens": 8, "seed": 3}
    events = []
    bare = prefixkit.generate(model, None, IDS, on_token=events.append, **options)
    assert tokens_of(bare) == tokens_of(prefixkit.generate(model, TOKENIZER, IDS, **options))
    assert {sample.text for sample in bare} == {event.text for event in events} == {""}


@pytest.mark.parametrize("prompt", ["text", [{"role": "user", "content": "hi"}]])
def test_text_is_refused(model, prompt):
    with pytest.raises(ValueError, match=r"prompt 1 is .*tokenizer is None; pass the model's tokenizer, or .* ids"):
        prefixkit.generate(model, None, [[1], prompt])


def test_a_single_text_is_refused(model):
    with pytest.raises(ValueError, match=r"prompt 0 is text"):
        prefixkit.generate(model, None, "text")


def test_stop_strings_are_refused(model):
    with pytest.raises(ValueError, match=r"stop strings .*END.* tokenizer is None; .*stop_token_ids"):
        prefixkit.generate(model, None, [[1]], stop="END")
