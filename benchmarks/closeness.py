"""How far a run's log-probabilities and greedy tokens are from another's, where batches have several shapes."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.runner import Row

Array = NDArray[Any]
TOKENS, HEAD, NEW = 128, 16, 32  # of a text, the tokens after its head are scored, and NEW are generated
SHAPES = (64, 2)  # texts of a batch: cuBLAS has the same kernels for 8 texts as for 64, and one row is not compiled
RESAMPLES = 10_000


@dataclass(frozen=True)
class Texts:
    """What a model says of texts of random tokens, for each of ``SHAPES``.

    Attributes:
        logprobs: ``[shapes, texts, TOKENS - HEAD]`` float64, of the texts' own tokens.
        greedy: ``[shapes, texts, NEW]`` int64, greedy tokens after the texts.
    """

    logprobs: Array
    greedy: Array

    def save(self, path: Path) -> None:
        """Write both to a file, ``.npz``."""
        np.savez(path, logprobs=self.logprobs, greedy=self.greedy)

    @staticmethod
    def load(path: Path) -> "Texts":
        """What :meth:`save` wrote."""
        with np.load(path) as found:
            return Texts(found["logprobs"], found["greedy"])


def run_texts(session: Any, vocab: int, texts: int) -> Texts:
    """Score and continue random texts in batches of each shape; no batch finds KV of an earlier one."""
    prompts: list[list[int]] = np.random.default_rng(5).integers(5, vocab, (texts, TOKENS)).tolist()
    session.generate(prompts, temperature=0, max_new_tokens=NEW)  # compiles layers that can be compiled
    logprobs, greedy = [], []
    for size in SHAPES:
        session.weights_changed()  # drops KV
        batches = [prompts[first : first + size] for first in range(0, texts, size)]
        scores = [session.score([one[:HEAD] for one in own], [[one[HEAD:]] for one in own]) for own in batches]
        logprobs.append([np.asarray(score.logprobs, np.float64) for batch in scores for (score,) in batch])
        session.weights_changed()
        results = [session.generate(own, temperature=0, max_new_tokens=NEW) for own in batches]
        greedy.append([sample.tokens for batch in results for sample in batch])
    return Texts(np.array(logprobs), np.array(greedy))


def closeness(one: Texts, other: Texts | None = None, seed: int = 0) -> Row:
    """Differences between batches of other shapes in ``one``, and between ``other`` and ``one`` in equal shapes.

    Returns:
        For each of both: the mean difference of log-probabilities (nats), and the tokens before greedy samples differ,
        as a share of all (mean) and in number (median).  With ``other``, ``ratio`` and ``tokens_ratio`` are the
        second's mean divided by the first's, with 95% intervals from resampled texts.
    """
    pairs = list(combinations(range(len(one.logprobs)), 2))
    apart = [np.abs(one.logprobs[a] - one.logprobs[b]).mean(-1) for a, b in pairs]
    same = [equal_until(one.greedy[a], one.greedy[b]) for a, b in pairs]
    row: Row = {"texts": one.logprobs.shape[1], "batches": _summary(apart, same, one.greedy.shape[-1])}
    if other is None:
        return row
    own = np.abs(other.logprobs - one.logprobs).mean(-1)
    until = [equal_until(*two) for two in zip(other.greedy, one.greedy, strict=True)]
    row["processes"] = _summary(own, until, one.greedy.shape[-1])
    for name, above, below in (("ratio", own, apart), ("tokens_ratio", until, same)):
        row[name], row[f"{name}_interval"] = ratio(np.mean(above, 0), np.mean(below, 0), seed)
    return row


def equal_until(one: Array, other: Array) -> Array:
    """``[texts]``: the number of tokens before the first that differs, of ``[texts, tokens]``."""
    differ = np.concatenate([one != other, np.ones((len(one), 1), bool)], -1)
    return differ.argmax(-1)


def ratio(above: Array, below: Array, seed: int = 0) -> tuple[float | None, list[float] | None]:
    """The ratio of the means of two values of each text, and its 95% interval from resampled texts.

    Returns:
        Both are None where so few of ``below`` are above 0 that they all are 0 in one of the samples.
    """
    drawn = np.random.default_rng(seed).integers(0, len(above), (RESAMPLES, len(above)))
    sampled = below[drawn].mean(-1)
    if not sampled.all():
        return None, None
    low, high = np.quantile(above[drawn].mean(-1) / sampled, (0.025, 0.975))
    return round(float(above.mean() / below.mean()), 3), [round(float(low), 3), round(float(high), 3)]


def _summary(apart: Sequence[Array] | Array, same: Sequence[Array], new: int) -> Row:
    return {
        "difference": float(f"{np.mean(apart):.4g}"),
        "equal_share": round(float(np.mean(same)) / new, 3),
        "median_equal": float(np.median(same)),
    }
