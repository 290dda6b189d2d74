"""Samples under a JSON schema of 20 fields, compared with free ones: a decode step, and the host's work in it.

    python -m benchmarks.grammar [--shapes Llama-3.2-1B,Llama-3.1-8B] [--rows 64] [--new 128] [--turns 5] [--out FILE]

Random weights, and a made-up vocabulary: 128,256 tokens of 1 to 5 letters, digits and punctuation of JSON.  15 fields
are numbers, words, arrays and objects; the others are strings, which random weights hardly ever end.  *step*: decode
time over decode steps, the median of calls in turns.  *fill*, *accept*: the host's work in a step, timed alone, on
texts of the schema: its mean over the steps.  On a CPU: ``--shapes tiny --device cpu --new 16``.
"""

import dataclasses
import itertools
import json
import statistics
import string
import time
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import prefixkit
from benchmarks.runner import Row, Run, arguments, in_turns
from benchmarks.shapes import SHAPES
from prefixkit import SamplingParams, Session
from prefixkit.engine.runs.grammar_masks import GrammarMasks, GrammarPlace
from prefixkit.integrations import llguidance, xgrammar
from prefixkit.models import patched_facts
from prefixkit.session.grammars import matcher_of

VOCAB = 128_256
KINDS: list[dict[str, Any]] = [
    {"type": "integer"},
    {"type": "boolean"},
    {"enum": ["low", "medium", "high"]},
    {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 9},
    {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "integer"}}, "required": ["x", "y"]},
]
# A model with random weights hardly ever ends a string.
FIELDS = {f"field_{i}": KINDS[i % len(KINDS)] if i < 15 else {"type": "string"} for i in range(20)}
SCHEMA = {"type": "object", "properties": FIELDS, "required": [*FIELDS], "additionalProperties": False}


def tokenizer_of(vocab: int) -> Any:
    """A byte-level tokenizer with this many tokens, one of them an end token; only the tokens' bytes are used."""
    letters, consonants, vowels = string.ascii_letters, "bcdfghklmnprstvw", "aeiou"
    syllables = ["".join(pair) for pair in itertools.product(consonants, vowels)]
    words = [*map("".join, itertools.product(letters, repeat=2)), *map(str, range(10, 1000))]
    words += map("".join, itertools.product('{}[]",:.', repeat=3))
    words += (first + second for first, second in itertools.product(syllables, syllables))
    words += map("".join, itertools.product(syllables, syllables, consonants))
    words += map("".join, itertools.product(syllables, syllables, vowels))
    words = ["\u0120" + word if number % 2 else word for number, word in enumerate(dict.fromkeys(words))]
    tokens = dict.fromkeys([*sorted(pre_tokenizers.ByteLevel.alphabet()), *words])
    known = {token: number for number, token in enumerate(itertools.islice(tokens, vocab - 1))}
    core = Tokenizer(models.BPE(vocab=known, merges=[]))
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")


def steps(session: Session, rows: int, new: int, turns: int, grammars: dict[str, Any]) -> Row:
    """Milliseconds of a decode step, of calls in turns, after one of each."""
    prompt = np.random.default_rng(0).integers(0, VOCAB - 1, 512).tolist()

    def step(grammar: Any, seed: int = 0) -> float:
        # No stop tokens: free samples do not end either.
        params = SamplingParams(n=rows, max_new_tokens=new, seed=seed, stop_token_ids=(), grammar=grammar)
        report = session.generate([prompt], params).report
        assert report.new_tokens == rows * new, "no sample ends"
        return 1e3 * report.seconds_in_decode / report.decode_steps

    for grammar in grammars.values():
        step(grammar)
    times = in_turns({name: lambda g=grammar: step(g) for name, grammar in grammars.items()}, turns)
    found = {name: statistics.median(own) for name, own in times.items()}
    row: Row = {f"{name}_ms": round(ms, 3) for name, ms in found.items()}
    return row | {f"{name}_over_free": round(ms / found["free"], 3) for name, ms in found.items() if name != "free"}


def host(session: Session, rows: int, new: int, grammar: Any) -> Row:
    """Milliseconds of compiling, and of filling and accepting along samples of the schema, for all rows of a step."""
    facts = patched_facts(session.model)
    began = time.perf_counter()
    matcher = matcher_of(facts, tokenizer_of(VOCAB), grammar)  # a tokenizer of its own: nothing is compiled for it yet
    compiled, fills, accepts = time.perf_counter() - began, [], []
    samples = session.generate([[1, 2, 3]], n=rows, max_new_tokens=new, stop_token_ids=(), grammar=grammar)
    masks = GrammarMasks([GrammarPlace(matcher.fork(), ()) for _ in samples])
    for tokens in np.array([sample.tokens for sample in samples]).T:
        times = [time.perf_counter()]
        masks.fill(VOCAB)
        times.append(time.perf_counter())
        masks.accept(tokens)
        times.append(time.perf_counter())
        fills.append(1e3 * (times[1] - times[0]))
        accepts.append(1e3 * (times[2] - times[1]))
    row = {"compile_s": round(compiled, 2), "fill_ms": round(statistics.mean(fills), 3)}
    return row | {"fill_most_ms": round(max(fills), 3), "accept_ms": round(statistics.mean(accepts), 3)}


def main() -> None:
    cuda = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = {"default": "Llama-3.2-1B,Llama-3.1-8B", "help": f"some of {', '.join(SHAPES)}"}
    options = arguments(__doc__, shapes=shapes, rows=[64], new=128, turns=5, device=cuda)
    run = Run(options, options.device)
    made = {"xgrammar": xgrammar.json_schema(SCHEMA, whitespace=False)}
    made["llguidance"] = llguidance.json_schema(SCHEMA, whitespace=False)
    run.result["schema"] = json.dumps(SCHEMA)
    for name in options.shapes.split(","):
        dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
        shape = dataclasses.replace(SHAPES[name], vocab=VOCAB)
        model = prefixkit.patch(shape.build(options.device, dtype))
        with Session(model, tokenizer_of(VOCAB), kv_budget="8GiB" if options.device == "cuda" else "64MiB") as session:
            for rows in options.rows:
                row: Row = {"shape": name, "rows": rows, "new": options.new}
                row |= steps(session, rows, options.new, options.turns, {"free": None, **made})
                row |= {of: host(session, rows, options.new, grammar) for of, grammar in made.items()}
                run.add("rows", row)
        del model, session
    run.finish("seconds")


if __name__ == "__main__":
    main()
