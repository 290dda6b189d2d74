"""Tokens become text without special tokens, whose text is known where stop strings may hold it."""

from tokenizers import AddedToken

from prefixkit.engine.runs.detokenizer import detokenizer_of, special_tokens
from prefixkit.testing.tiny import ByteTokenizer, byte_tokenizer


def test_special_tokens_are_those_that_a_tokenizer_lists_and_leaves_out():
    tokenizer = byte_tokenizer()
    decode = lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True)  # noqa: E731
    tokenizer.add_tokens(["<plain>"])
    tokenizer.add_tokens([AddedToken("<other>", special=True)])
    assert special_tokens(tokenizer, decode) == {256: "<|end|>", 257: "<|pad|>", 259: "<other>"}
    assert special_tokens(ByteTokenizer(), lambda tokens: bytes(tokens).decode()) == {}


def test_a_tokenizer_writes_text_without_special_tokens_and_none_writes_nothing():
    made = detokenizer_of(byte_tokenizer())
    assert made.decode([*byte_tokenizer()("hi")["input_ids"], 256]) == "hi"
    assert made.special_tokens == {256: "<|end|>", 257: "<|pad|>"}
    assert detokenizer_of(None).decode is None
