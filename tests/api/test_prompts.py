"""What may be a prompt, and what is refused with a remedy."""

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

import prefixkit
from prefixkit.testing.tiny import ByteTokenizer
from tests.api.cases import TOKENIZER


def test_text_tokens_and_chat_are_one(model):
    options = {"temperature": 0, "max_new_tokens": 4}
    (text,) = prefixkit.generate(model, TOKENIZER, "<user>hi<assistant>", **options)
    ids = TOKENIZER("<user>hi<assistant>")["input_ids"]
    (listed,) = prefixkit.generate(model, TOKENIZER, [ids], **options)
    (array,) = prefixkit.generate(model, TOKENIZER, torch.tensor([ids]), **options)
    (chat,) = prefixkit.generate(model, TOKENIZER, [[{"role": "user", "content": "hi"}]], **options)
    assert text.tokens == listed.tokens == array.tokens == chat.tokens


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "at least one prompt"),
        ([""], "prompt 0 is an empty string"),
        (["a", []], "prompt 1 has no tokens"),
        ([[1, 2, 260]], "prompt 0: token 260 is outside the model's vocabulary of 260"),
        ([[1, -100]], "token -100 is outside"),
        (torch.tensor([[1, 2], [257, 3]]), "prompt 1 is padded on the left"),
        (torch.tensor([[1, 257], [2, 3]]), "prompt 0 is padded on the right"),
    ],
)
def test_values_that_cannot_be_prompts(model, prompts, message):
    with pytest.raises(ValueError, match=message):
        prefixkit.generate(model, TOKENIZER, prompts)


@pytest.mark.parametrize(
    "prompts",
    [
        [[256 + 1, 65, 66], [67, 68, 69]],
        [[65, 66, 67], [68, 69, 257]],
        [np.array([65, 66]), torch.tensor([67, 257])],
        [[257, 257, 65], [257, 66, 67]],
        np.array([[65, 257]]),
    ],
)
def test_token_ids_that_came_padded(model, prompts):
    message = r'prompt \d is padded on the (left|right) .*tokenizer\(texts\)\["input_ids"\]'
    with pytest.raises(ValueError, match=message):
        prefixkit.generate(model, TOKENIZER, prompts)


@pytest.mark.parametrize("edge", ["eos_token_id", "bos_token_id", "unk_token_id"])
def test_a_padding_token_with_another_role_may_stand_once_at_an_edge(model, edge):
    tokenizer = ByteTokenizer()
    setattr(tokenizer, edge, tokenizer.pad_token_id)
    options = {"max_new_tokens": 1}
    assert len(prefixkit.generate(model, tokenizer, [[257, 65, 66], [67, 68, 257]], **options)) == 2
    with pytest.raises(ValueError, match="prompt 1 is padded on the left"):
        prefixkit.generate(model, tokenizer, [[67, 68, 69], [257, 257, 66]], **options)


@pytest.mark.parametrize(
    "prompts",
    [
        [[257, 65, 66]],  # alone
        [[257, 65, 66], [65, 66]],  # of two lengths
        [[65, 257, 66], [67, 68, 69]],  # within
        ["a", [257, 65]],  # beside text
    ],
)
def test_what_may_be_meant_is_not_taken_for_padding(model, prompts):
    assert len(prefixkit.generate(model, TOKENIZER, prompts, max_new_tokens=1)) == len(prompts)


@pytest.mark.parametrize(
    "prompts",
    [
        BatchEncoding({"input_ids": [[1, 2]], "attention_mask": [[1, 1]]}),
        {"input_ids": torch.tensor([[1, 2]])},
        [BatchEncoding({"input_ids": [1, 2]})],
    ],
)
def test_what_a_tokenizer_returns_is_not_prompts_but_holds_them(model, prompts):
    with pytest.raises(TypeError, match=r'\["input_ids"\]'):
        prefixkit.generate(model, TOKENIZER, prompts)


def test_messages_are_to_be_put_in_a_list(model):
    with pytest.raises(TypeError, match=r"prompt 0 is one chat message.*list of messages"):
        prefixkit.generate(model, TOKENIZER, [{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("prompts", [[[1.5]], [[[1, 2]]], {"input_ids": [[1]], "attention_mask": [[1]]}])
def test_types_that_cannot_be_prompts(model, prompts):
    with pytest.raises(TypeError, match="prompt"):
        prefixkit.generate(model, TOKENIZER, prompts)
