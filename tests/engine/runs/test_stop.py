"""A sample ends where it should, and its text is what a decoder makes of all its tokens."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, decoders, models

from prefixkit.engine.runs.stop import StopChecker
from tests.seeds import seeds

WORDS = ["Hello", " world", "!", " the", " end", " of", " it", "\n", "\n\n", "E", "N", "D", " STOP", "ST", "OP", "é"]
SAMPLES = ["Hello world! 😀", "naïve 你好世界 🏳️‍🌈 end", "a\nb\n\nEND of it", "👍🏽👍🏽 STOP it"]


def byte_tokens(data):
    """Bytes under the printable names that byte-level tokenizers give them."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in printable]
    names = {value: chr(value) for value in printable} | {value: chr(256 + at) for at, value in enumerate(others)}
    return "".join(names[value] for value in data)


def byte_level():
    """Like GPT-2's: any byte is a token, so a character can take four of them."""
    vocabulary = [byte_tokens(bytes([value])) for value in range(256)]
    vocabulary += [byte_tokens(word.encode()) for word in WORDS if len(word.encode()) > 1]
    return build(vocabulary, decoders.ByteLevel())


def metaspace():
    """Like Llama's: a word's space is part of its token, the first one's is dropped, and rare characters are bytes."""
    vocabulary = [f"<0x{value:02X}>" for value in range(256)] + [word.replace(" ", "▁") for word in WORDS] + ["▁Hello"]
    vocabulary += [f"▁{letter}" for letter in "abc"] + list("abc")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return build(vocabulary, decoders.Sequence(steps))


def build(vocabulary, decoder):
    vocabulary = list(dict.fromkeys(vocabulary))
    tokenizer = Tokenizer(models.WordLevel({token: at for at, token in enumerate(vocabulary)}, unk_token=vocabulary[0]))
    tokenizer.decoder = decoder
    return tokenizer


TOKENIZERS = {"byte_level": byte_level(), "metaspace": metaspace()}


def as_bytes(name, text):
    """The text, every byte a token of its own."""
    vocab = TOKENIZERS[name].get_vocab()
    names = [f"<0x{value:02X}>" if name == "metaspace" else byte_tokens(bytes([value])) for value in text.encode()]
    return [vocab[token] for token in names]


def follow(tokens, stop, decode, stop_token_ids=(), special=None):
    """Push tokens until one ends the sample; returns how many were pushed, what was streamed, and the checker."""
    checker = StopChecker(stop_token_ids, stop, decode, special)
    streamed = []
    for count, token in enumerate(tokens, 1):
        stopped = checker.push([token])
        streamed.append(checker.delta())
        if stopped:
            return count, streamed, checker
    streamed.append(checker.flush())
    return None, streamed, checker


def letters(tokens):
    return "".join(map(chr, tokens))


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", SAMPLES)
def test_characters_of_many_bytes_are_streamed_whole(name, text):
    _, streamed, checker = follow(as_bytes(name, text), (), TOKENIZERS[name].decode)
    assert "".join(streamed) == checker.text() == text
    assert not any("\ufffd" in piece for piece in streamed)


@pytest.mark.parametrize("name", TOKENIZERS)
@seeds(30)
def test_what_is_streamed_joins_to_the_text(name, seed):
    dice, vocab = random.Random(seed), TOKENIZERS[name].get_vocab_size()
    words = [token for token in range(vocab) if token > 255] or range(vocab)
    tokens = []
    for _ in range(40):
        tokens += dice.choice([[dice.choice(words)], as_bytes(name, dice.choice("é你😀 z"))])
    _, streamed, checker = follow(tokens, ("\u0000never",), TOKENIZERS[name].decode)
    assert "".join(streamed) == checker.text() == TOKENIZERS[name].decode(tokens)


def test_bytes_that_never_become_a_character_do_not_stall_the_stream():
    decode = TOKENIZERS["byte_level"].decode
    broken = TOKENIZERS["byte_level"].get_vocab()[byte_tokens(b"\xf0")]
    tokens = [broken] * 50 + as_bytes("byte_level", "ok 😀")
    _, streamed, checker = follow(tokens, (), decode)
    assert "".join(streamed) == checker.text() == "\ufffd" * 50 + "ok 😀"
    assert all(streamed[10:50])


def test_tokens_without_text_do_not_lose_the_space_after_them():
    tokenizer = metaspace()
    tokenizer.add_special_tokens(["<think>"])
    vocab = tokenizer.get_vocab()
    tokens = [vocab["▁Hello"], *[vocab["<think>"]] * 9, vocab["▁world"], vocab["▁end"]]
    _, streamed, checker = follow(tokens, (), tokenizer.decode)
    assert "".join(streamed) == checker.text() == "Hello world end"


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("stop", [("END",), ("D of", "zzz"), ("\n\n",), ("\n\nEND of it",), ("b\n", "never")])
def test_a_stop_string_is_found_across_tokens(name, stop):
    text = "a\nb\n\nEND of it"
    count, streamed, checker = follow(as_bytes(name, text), stop, TOKENIZERS[name].decode)
    begin = text.index(stop[0])
    assert count == len(text[:begin].encode()) + len(stop[0])
    assert "".join(streamed) == checker.text() == text[:begin]


def test_a_stop_string_inside_a_token_cuts_it():
    pieces = ["I say", " go STOP now", " on"]
    count, _, checker = follow([0, 1, 2], ("STOP",), lambda tokens: "".join(pieces[token] for token in tokens))
    assert (count, checker.text()) == (2, "I say go ")


def test_of_stop_strings_that_one_token_completes_the_earliest_counts():
    pieces = ["ab", "cdef"]
    for stop in (("ef", "bcd", "cd"), ("bcd", "ef")):
        _, _, checker = follow([0, 1], stop, lambda tokens: "".join(pieces[token] for token in tokens))
        assert checker.text() == "a"


def test_of_stop_strings_the_one_that_is_complete_first_counts():
    count, _, checker = follow([*b"xabcd"], ("abcd", "bc"), letters)
    assert (count, checker.text()) == (4, "xa")


def test_a_stop_string_before_an_unfinished_character_is_found_at_once():
    token = b"say END\xf0\x9f"
    count, _, checker = follow([0], ("END",), lambda tokens: (token * len(tokens)).decode(errors="replace"))
    assert (count, checker.text()) == (1, "say ")


def test_an_unfinished_character_is_not_taken_for_a_replacement_character():
    decode = TOKENIZERS["byte_level"].decode
    count, _, checker = follow(as_bytes("byte_level", "a😀b"), ("\ufffd",), decode)
    assert (count, checker.text()) == (None, "a😀b")


def test_bytes_that_never_become_a_character_are_replacement_characters_for_a_stop_string():
    decode = TOKENIZERS["byte_level"].decode
    broken = TOKENIZERS["byte_level"].get_vocab()[byte_tokens(b"\xf0")]
    tokens = [*as_bytes("byte_level", "ab"), *[broken] * 20, *as_bytes("byte_level", "c")]
    count, streamed, checker = follow(tokens, ("b\ufffd\ufffd",), decode)
    assert checker.text() == "".join(streamed) == "a"
    assert count <= 2 + 2 + 3, "three more bytes show that the first two are no character"


@seeds(40)
def test_random_texts_end_at_the_first_stop_string(seed):
    dice = random.Random(seed)
    tokens = [ord(dice.choice("ab")) for _ in range(60)]
    stop = tuple("".join(dice.choice("ab") for _ in range(dice.randint(2, 9))) for _ in range(3))
    whole = letters(tokens)
    ends = [end for end in range(1, 61) if any(whole[:end].endswith(string) for string in stop)]
    count, streamed, checker = follow(tokens, stop, letters)
    assert count == (ends[0] if ends else None)
    expected = min(whole[:count].index(string) for string in stop if string in whole[:count]) if ends else None
    assert checker.text() == "".join(streamed) == whole[:expected]


def test_what_may_begin_a_stop_string_is_held_back():
    checker = StopChecker((), ("END", "NOW"), letters)
    seen = []
    for token in b"xENxEND":
        checker.push([token])
        seen.append(checker.delta())
    assert seen == ["x", "", "", "ENx", "", "", ""]


def test_what_was_held_back_comes_at_the_end():
    _, streamed, checker = follow([*b"this is the EN"], ("END",), letters)
    assert streamed[-1] == "EN"
    assert checker.text() == "this is the EN"


def test_a_stop_token_ends_the_sample_and_is_not_in_its_text():
    count, streamed, checker = follow([*b"hi.", 7, 8], (), letters, stop_token_ids=(7, 9))
    assert (count, checker.text(), "".join(streamed)) == (4, "hi.", "hi.")


def test_a_stop_token_releases_what_was_held_back():
    count, streamed, checker = follow([*b"hi EN", 7], ("END",), letters, stop_token_ids=(7,))
    assert (count, checker.text(), "".join(streamed)) == (6, "hi EN", "hi EN")


def test_without_stop_strings_nothing_is_decoded_before_the_end():
    calls = []
    checker = StopChecker((7,), (), lambda tokens: calls.append(list(tokens)) or "text")
    assert [checker.push([token]) for token in (1, 2, 7)] == [False, False, True]
    assert calls == []
    assert checker.text() == "text"
    assert calls == [[1, 2]]


def test_only_a_few_tokens_are_decoded_at_a_time():
    sizes = []
    checker = StopChecker((), ("zzz",), lambda tokens: sizes.append(len(tokens)) or letters(tokens))
    for token in b"the quick brown fox jumps over the lazy dog" * 5:
        checker.push([token])
    assert max(sizes) <= 2
    assert len(sizes) <= 2 * 215


SPECIAL = {1: "<end>", 2: "<user>", 3: "<x>"}


def plain_letters(tokens):
    """Letters without special tokens."""
    return letters([token for token in tokens if token not in SPECIAL])


@pytest.mark.parametrize(
    ("tokens", "stop", "count", "text"),
    [
        ([*b"hi", 1, *b"on"], ("<end>",), 3, "hi"),
        ([1], ("<end>",), 1, ""),
        ([*b"hi", 2, *b"Bob:", 9], ("<user>Bob:",), 7, "hi"),
        ([*b"hi\n", 1], ("\n<end>",), 4, "hi"),
        ([*b"hi", 2, 1, *b"go"], ("<user><end>",), 4, "hi"),
        ([*b"a", 2, *b"b", 1, *b"c"], ("a<user>b<end>c",), 5, ""),
        ([*b"hi\n", 3, 1], ("\n<end>",), None, "hi\n"),  # another special token stands between
        ([*b"hi", 1], ("end>",), None, "hi"),  # only a part of one: text is all there is to look in
        ([*b"hi<end>on"], ("<end>",), 7, "hi"),  # the same letters, sampled one by one
        ([*b"fo", 3, *b"o", 1], ("foo", "<end>"), 4, ""),  # those without special tokens look in the text
        ([*b"xab", 1], ("ab<end>", "<end>"), 4, "x"),  # the earliest of two that one token completes
    ],
)
def test_stop_strings_of_special_tokens(tokens, stop, count, text):
    found, streamed, checker = follow(tokens, stop, plain_letters, special=SPECIAL)
    assert (found, checker.text(), "".join(streamed)) == (count, text, text)


@seeds(40)
def test_random_texts_with_special_tokens_end_at_the_first_stop_string(seed):
    dice, names = random.Random(seed), {ord("a"): "a", ord("b"): "b", **SPECIAL}
    tokens = [dice.choice([*names]) for _ in range(60)]
    stop = tuple(
        dice.choice(["", "a", "b"]) + names[dice.choice([1, 2])] + dice.choice(["", "ab", "<x>"]) for _ in "12"
    )
    seen = ["".join(names[token] for token in tokens[:end]) for end in range(61)]
    ends = [end for end in range(61) if any(string in seen[end] for string in stop)]
    count, streamed, checker = follow(tokens, stop, plain_letters, special=SPECIAL)
    assert count == (ends[0] if ends else None)
    cut = (
        seen[count][: min(seen[count].index(string) for string in stop if string in seen[count])] if ends else seen[60]
    )
    for special in SPECIAL.values():
        cut = cut.replace(special, "")
    assert checker.text() == "".join(streamed) == cut


def test_many_special_tokens_in_a_row_are_followed():
    count, _, checker = follow([*b"hi", *[3] * 5000, 1], ("<x><end>",), plain_letters, special=SPECIAL)
    assert (count, checker.text()) == (5003, "hi")


def test_an_unfinished_character_before_a_special_token_stays_as_it_is():
    decode, vocab = TOKENIZERS["byte_level"].decode, TOKENIZERS["byte_level"].get_vocab()
    end = max(vocab.values()) + 1
    tokens = [*as_bytes("byte_level", "a"), vocab[byte_tokens(b"\xf0")], end]
    without = lambda tokens: decode([token for token in tokens if token != end])  # noqa: E731
    count, streamed, checker = follow(tokens, ("<end>",), without, special={end: "<end>"})
    assert (count, checker.text(), "".join(streamed)) == (3, "a\ufffd", "a\ufffd")


def test_stop_strings_need_a_decoder():
    with pytest.raises(ValueError, match="need text, but there is no decode; pass a tokenizer's decode"):
        StopChecker((), ("END",), None)
    checker = StopChecker((3,), (), None)
    assert [checker.push([1]), checker.push([3]), checker.text()] == [False, True, ""]


@pytest.mark.parametrize("last", [3, 7])
def test_many_tokens_at_once_are_as_one_by_one(last):
    at_once, one_by_one = (StopChecker((7,), (), lambda tokens: str(tokens)) for _ in range(2))
    tokens = [1, 2, 2, last]
    assert at_once.push(tokens) == [one_by_one.push([token]) for token in tokens][-1] == (last == 7)
    assert at_once.text() == one_by_one.text()
    assert at_once.flush() == one_by_one.flush()
