"""(c) Questions about one long document: the document is shared, each question has its own short suffix."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.hydragen.cases import two_level
from benchmarks.hydragen.engine_runs import engine_seconds
from benchmarks.hydragen.jobs import Job, Row
from benchmarks.hydragen.step import Rig
from benchmarks.hydragen.throughput import step_row

LETTER = "c"
METHODS_HERE = ("flash", "hydragen", "ours")
# Shape: tokens of the document, of an answer; questions: with their priority.
CASES = {
    "Yi-6B": (19_947, 128, {64: 2, 128: 3, 256: 1, 512: 3, 1024: 1}),
    "tiny": (199, 6, {3: 1}),
}
TEXT = (
    "the river of a quiet town ran under old bridges while traders sold salt cloth copper and grain to those who came by "
    "boat or on foot before winter closed every road that led north"
)
NAMES = ("Ada", "Bruno", "Carla", "Dmitri", "Elif", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Keiko", "Lars")
THINGS = ("harbour", "library", "market", "mill", "observatory", "station", "tower", "workshop")


def jobs(shapes: list[str], document: Path | None = None) -> list[Job]:
    text = document.read_text() if document else None
    found = []
    for shape in shapes:
        length, new, counts = CASES.get(shape, (0, 0, {}))
        for count, priority in counts.items():
            run = partial(_row, text, length, new, count)
            found.append(Job(LETTER, shape, f"{count} questions", priority, 12.0, run))
    return found


def facts(count: int) -> list[tuple[str, str]]:
    """``(statement, question)`` for so many planted facts, all different."""
    found = []
    for index in range(count):
        name, thing = NAMES[index % len(NAMES)], THINGS[index // len(NAMES) % len(THINGS)]
        which = f"{name} number {index // (len(NAMES) * len(THINGS))}"
        statement = f"The code of the {thing} that belongs to {which} is {(index * 7919) % 100_000}."
        found.append((statement, f"What is the code of the {thing} that belongs to {which} ?"))
    return found


def document_words(text: str | None, length: int, planted: list[str], seed: int = 11) -> list[str]:
    """``length`` words: the text, or words at random, with the planted statements strewn evenly over it."""
    rng, words_known = random.Random(seed), TEXT.split()
    plain = text.split() if text else []
    inserted = [statement.split() for statement in planted]
    free = length - sum(map(len, inserted))
    if free < 0:
        raise ValueError(f"{len(planted)} facts do not fit a document of {length} words; plant fewer")
    plain = (plain + [rng.choice(words_known) for _ in range(max(0, free - len(plain)))])[:free]
    words: list[str] = []
    for index, statement in enumerate(inserted):
        begin, end = (free * part // (len(inserted) or 1) for part in (index, index + 1))
        words += plain[begin:end] + statement
    return words if inserted else plain


class Vocabulary:
    """Ids of words in the order in which they first came."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._ids: dict[str, int] = {}

    def encode(self, words: list[str]) -> np.ndarray:
        """``[words]`` int32."""
        ids = [self._ids.setdefault(word, len(self._ids)) % self._size for word in words]
        return np.array(ids, np.int32)


def prompts(text: str | None, length: int, count: int, vocab: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """The document's tokens, and those of each question about it."""
    known = facts(count)
    # Half of the document for facts at most; other questions ask in vain.
    room = length // 2 // max(len(statement.split()) for statement, _ in known)
    vocabulary = Vocabulary(vocab)
    document = vocabulary.encode(document_words(text, length, [statement for statement, _ in known[:room]]))
    return document, [vocabulary.encode(question.split()) for _, question in known]


def _row(text: str | None, length: int, new: int, count: int, rig: Rig) -> Row:
    document, questions = prompts(text, length, count, rig.shape.vocab)
    case = two_level(count, length, new, private=len(questions[0]))
    row = step_row(case, rig, METHODS_HERE, compiled=())
    whole = [np.concatenate((document, question)) for question in questions]
    engine_seconds(rig, [prompt[-64:] for prompt in whole], n=1, new=2)
    prefill = engine_seconds(rig, [document], n=1, new=1)["seconds"]
    ours = engine_seconds(rig, whole, n=1, new=new)
    for found in row["methods"].values():
        if "step_ms" in found:
            found["total_s"] = round(prefill + found["step_ms"] * new / 1e3, 3)
    return row | {"engine": ours, "prefill_s": prefill, "question_tokens": len(questions[0])}
