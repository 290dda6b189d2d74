"""Grammars are compiled once for a tokenizer and a vocabulary, as many as are kept."""

from __future__ import annotations

import gc
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from prefixkit.sampling.params import SamplingParams
from prefixkit.session import grammars
from prefixkit.session.grammars import CompiledGrammars
from prefixkit.testing.tiny import ByteTokenizer, byte_tokenizer
from tests.grammars import Residues


def test_tokens_have_the_bytes_that_they_add_and_special_ones_and_padding_none():
    tokens = []

    class Seen(Residues):
        @staticmethod
        def compiler(given, end):
            assert end == 256, "the first that no text holds"
            tokens.extend(given)
            return len(given)

    tokenizer = byte_tokenizer()
    assert CompiledGrammars(tokenizer, 270).matcher(Seen(2)).vocab == 270
    assert sorted(tokens[:256]) == [bytes([byte]) for byte in range(256)]
    assert tokens[256:] == [b""] * 14, "the end, padding, and what the model has beyond"
    assert tokens[tokenizer.convert_tokens_to_ids("\u0120")] == b" "


def test_a_grammar_is_compiled_again_once_others_have_taken_its_place():
    compiled = CompiledGrammars(byte_tokenizer(), 260, most=2)
    first, second = (compiled.matcher(Residues(modulus)) for modulus in (2, 3))
    assert compiled.matcher(Residues(2)) is first
    compiled.matcher(Residues(4))
    assert compiled.matcher(Residues(2)) is first, "used after the second"
    assert compiled.matcher(Residues(3)) is not second


def test_what_was_compiled_goes_with_its_tokenizer():
    class Facts:
        vocab_size = 260

    tokenizer = byte_tokenizer()
    found = weakref.ref(grammars.matcher_of(Facts, tokenizer, Residues(2)))
    assert grammars.matcher_of(Facts, tokenizer, Residues(2)) is found()
    tokenizer.add_tokens(["<more>"])
    assert grammars.matcher_of(Facts, tokenizer, Residues(2)) is not found(), "its tokens have changed"
    del tokenizer
    gc.collect()
    assert found() is None


def test_tokenizers_whose_bytes_are_not_known_are_refused():
    with pytest.raises(ValueError, match="not known of ByteTokenizer"):
        CompiledGrammars(ByteTokenizer(), 260)


def test_threads_that_ask_together_compile_a_grammar_once():
    compiled, asked = CompiledGrammars(byte_tokenizer(), 260), []

    class Slow(Residues):
        def compile(self, compiler):
            asked.append(self)
            time.sleep(0.05)
            return super().compile(compiler)

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: compiled.matcher(Slow(2)), range(4)))
    assert len(asked) == 1
    assert all(one is found[0] for one in found)


def test_a_grammar_is_an_object_with_a_hash():
    class Changing(Residues):
        __hash__ = None

    with pytest.raises(TypeError, match="grammar must be a grammar, got the class Residues; make one"):
        SamplingParams(grammar=Residues)
    with pytest.raises(TypeError, match=r"grammar must be hashable, .*unhashable.*frozen dataclass"):
        SamplingParams(grammar=Changing(2))
