"""Stop strings are found at the token where a checker that decodes each token finds them, without decoding."""

from __future__ import annotations

import random

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from prefixkit.engine.runs.detokenizer import Detokenizer, detokenizer_of
from prefixkit.engine.runs.stop import StopChecker
from prefixkit.engine.runs.stop_filter import MET
from prefixkit.engine.runs.token_bytes import TokenBytes
from prefixkit.testing.tiny import ByteTokenizer, byte_tokenizer

TEXT = [
    "def f(x):\n    return x + 1\n\nclass A:\n    pass\n",
    "é你😀 naïve — “quoted”\n\n```\nprint(1)\n```\n",
    "  spaces   and\ttabs\n# comment\nif x:\n",
]
SPECIAL = ["<|end|>", "<think>"]


def byte_level() -> Tokenizer:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(TEXT * 3, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet))
    return core


def byte_fallback() -> Tokenizer:
    """As SentencePiece models decode: U+2581 for spaces, tokens for single bytes, one leading space left out."""
    words = [
        "\u2581",
        "\u2581def",
        "f",
        "(",
        "x",
        ")",
        ":",
        "\n",
        "\n\n",
        "\u2581\u2581",
        "class",
        "\u2581A",
        "é",
        "print",
    ]
    tokens = [f"<0x{byte:02X}>" for byte in range(256)] + words
    core = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [], byte_fallback=True))
    parts = decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    core.decoder = decoders.Sequence([*parts])
    return core


def of_transformers(core: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("<think>", special=True)]})
    tokenizer.add_tokens(["<code>", "naïve text"])
    return tokenizer


def of_gguf() -> Tokenizer:
    """A byte-level tokenizer as transformers 5.17 makes it of a GGUF: the decoder joins tokens before it maps them."""
    core = byte_level()
    parts = decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("\u2581", " "), decoders.ByteLevel()
    core.decoder = decoders.Sequence([*parts])
    return core


def of_gguf_with(text: str) -> PreTrainedTokenizerFast:
    """The same with an added token."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=of_gguf())
    tokenizer.add_tokens([text])
    return tokenizer


TOKENIZERS = {"byte level": of_transformers(byte_level()), "byte fallback": of_transformers(byte_fallback())}
TOKENIZERS["of a GGUF"] = PreTrainedTokenizerFast(tokenizer_object=of_gguf(), eos_token="<|end|>")
TOKENIZERS["of a GGUF"].add_special_tokens({"additional_special_tokens": [AddedToken("<think>", special=True)]})
TOKENIZERS["of a GGUF"].add_tokens(["<code>"])
STOPS = ("\nclass", "\ndef", "\n#", "\n\n", "x", "(x", " ", "```", "你😀", "<|end|>", "\n<think>", "<code>", "f<think>")


def by_decoding(tokens: list[int], stop: tuple[str, ...], detokenizer: Detokenizer) -> tuple[int | None, str]:
    """After how many tokens a checker that decodes each of them stops, and the text then."""
    checker = StopChecker((), stop, detokenizer.decode, detokenizer.special_tokens)
    for count, token in enumerate(tokens, 1):
        if checker.push([token]):
            return count, checker.text()
    return None, checker.text()


def by_filter(tokens: list[int], stop: tuple[str, ...], detokenizer: Detokenizer) -> tuple[int | None, str]:
    """The same, with the checker asked only where the filter says so, and of each token once it was wrong."""
    stop_filter, state, accepted = detokenizer.stop_filter(stop), np.zeros(1, np.int32), 0
    checker = StopChecker((), stop, detokenizer.decode, detokenizer.special_in(stop))
    assert stop_filter is not None
    for count, token in enumerate(tokens, 1):
        state = state if state[0] == MET else stop_filter.advance(state, np.array([token]))
        if state[0] == MET:
            if checker.push(tokens[accepted:count]):
                return count, checker.text()
            accepted = count
    if accepted < len(tokens):
        checker.push(tokens[accepted:])
    return None, checker.text()


def random_tokens(dice: random.Random, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Pieces of texts as they are encoded, special and single tokens, whose bytes form characters."""
    tokens = list[int]()
    for _ in range(dice.randint(1, 12)):
        text = dice.choice([*TEXT, *STOPS])
        begin = dice.randrange(len(text))
        tokens += tokenizer(text[begin : begin + dice.randint(1, 20)], add_special_tokens=False)["input_ids"]
        if dice.random() < 0.3:
            tokens.append(tokenizer.convert_tokens_to_ids(dice.choice([*SPECIAL, "<code>"])))
    return tokens


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("seed", range(6))
def test_samples_end_where_a_checker_that_decodes_each_token_ends_them(name, seed):
    dice, tokenizer = random.Random(seed), TOKENIZERS[name]
    detokenizer = detokenizer_of(tokenizer)
    for _ in range(40):
        tokens, stop = random_tokens(dice, tokenizer), tuple(dice.sample(STOPS, dice.randint(1, 3)))
        assert by_filter(tokens, stop, detokenizer) == by_decoding(tokens, stop, detokenizer), (tokens, stop)


def test_bytes_that_are_no_character_are_followed():
    """Byte-level tokens at random, most of which are no UTF-8."""
    dice, tokenizer = random.Random(0), TOKENIZERS["byte level"]
    detokenizer = detokenizer_of(tokenizer)
    for _ in range(200):
        tokens = [dice.randrange(len(tokenizer)) for _ in range(40)]
        stop = tuple(dice.sample(STOPS, 2))
        assert by_filter(tokens, stop, detokenizer) == by_decoding(tokens, stop, detokenizer), (tokens, stop)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_bytes_of_tokens_are_those_of_the_text(name):
    dice, tokenizer = random.Random(1), TOKENIZERS[name]
    found = TokenBytes.of(tokenizer)
    assert found is not None
    for _ in range(50):
        tokens = random_tokens(dice, tokenizer)
        joined = b"".join(found[token] for token in tokens).decode()
        assert tokenizer.decode(tokens, skip_special_tokens=True).lstrip(" ") == joined.lstrip(" ")
    assert found[10**6] == b"", "a token that the tokenizer does not know has no text"


class Shouting(PreTrainedTokenizerFast):
    """A tokenizer whose text is not its tokens' bytes."""

    def _decode(self, *args, **options):
        return super()._decode(*args, **options).upper()


def wordpiece() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordPiece({"a": 0, "##b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    core.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=core)


def metaspace() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE({"\u2581a": 0}, []))
    core.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=core)


@pytest.mark.parametrize(
    "tokenizer",
    [
        Shouting(tokenizer_object=byte_level()),
        wordpiece(),
        metaspace(),
        ByteTokenizer(),
        of_gguf_with("two words"),  # as text it turns all of the text that it is in into something else
        of_gguf_with("<0x0A>"),
    ],
)
def test_a_tokenizer_whose_text_may_be_more_than_its_bytes_has_no_filter(tokenizer):
    assert detokenizer_of(tokenizer).stop_filter(("x",)) is None


def test_a_decode_set_on_the_tokenizer_is_used():
    tokenizer = byte_tokenizer()
    tokenizer.decode = lambda tokens, skip_special_tokens: "text"
    detokenizer = detokenizer_of(tokenizer)
    assert detokenizer.decode([1]) == "text" and detokenizer.stop_filter(("x",)) is None


def test_a_replacement_character_is_looked_for_by_decoding():
    assert detokenizer_of(byte_tokenizer()).stop_filter(("\ufffd", "x")) is None
    assert detokenizer_of(byte_tokenizer()).stop_filter(()) is None
