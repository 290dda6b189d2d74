"""Log-probabilities of given continuations, and values of a head; tokens that texts share are computed once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.engine.scoring.context_run import ContextRun
from prefixkit.engine.scoring.contexts import Text, continued
from prefixkit.runners.batch import Outputs
from prefixkit.tree.arrays import Ints, Longs

# Maps hidden states ``[tokens, hidden_size]`` to values ``[tokens, ...]``.
Head = Callable[[Tensor], Tensor]

# Most bytes of one step's float32 logits, for which memory is always reserved; their log-softmax takes as many again.
MOST_LOGIT_BYTES = 2**28
# Most bytes if the GPU has free memory: steps of few tokens would take the host longer than the device.
_MOST_SPARE_LOGIT_BYTES = 2**30


@dataclass(frozen=True, eq=False)
class Score:
    """The log-probabilities of a continuation's tokens.

    Attributes:
        tokens: ``[length]`` int32 its token ids.
        logprobs: ``[length]`` float32 the model's own log-probability of each token, given the prompt and the earlier
            tokens of the continuation: natural logarithm, without temperature or filters.
        greedy: ``[length]`` bool, whether greedy decoding takes this token: no token is likelier, and among equally
            likely tokens its id is the lowest.
    """

    tokens: Ints
    logprobs: NDArray[np.float32]
    greedy: NDArray[np.bool_]

    def __repr__(self) -> str:
        return f"Score({len(self.tokens)} tokens, total={self.total:.6g}, is_greedy={self.is_greedy})"

    @property
    def total(self) -> float:
        """The log-probability of the whole continuation."""
        return float(self.logprobs.sum(dtype=np.float64))

    @property
    def is_greedy(self) -> bool:
        """Whether greedy decoding gives this continuation."""
        return bool(self.greedy.all())


def logit_bytes(free: int) -> int:
    """Most bytes of a step's float32 logits on a GPU that has ``free`` bytes left."""
    return max(MOST_LOGIT_BYTES, min(_MOST_SPARE_LOGIT_BYTES, free // 4))


def score(
    run: ContextRun, prompts: Sequence[Ints], continuations: Sequence[Sequence[Ints]], vocab: int
) -> list[list[Score]]:
    """The score of each continuation of each prompt.

    Contexts that do not fit the store together are computed one after the other; computed KV stays in the prefix cache.
    The tree may hold any other sequences, with or without KV: a wanted token that has KV already runs again and writes
    no KV.

    Args:
        run: Computes the texts, in steps of fewer tokens if the logits would take more than :func:`logit_bytes`.
        prompts: ``[length]`` token ids each, at least one.
        continuations: For each prompt, ``[length]`` token ids each, at least one.
        vocab: Columns of the logits.

    Raises:
        KVBudgetTooSmall: a prompt with one of its continuations does not fit the store besides the pinned KV; raised
            before any step runs.
        ValueError: the logits before a token hold NaN, +inf or no finite value.
    """
    texts, budget = continued(prompts, continuations), run.store.budget()
    pairs = [(index, number) for index, each in enumerate(continuations) for number in range(len(each))]
    run.store.check_spans([(f"prompt {index}", len(prompt)) for index, prompt in enumerate(prompts)], run.chunk)
    # A prompt's tokens do not see its continuations, as they do not see the tokens that a model samples.
    keys = [run.store.tree.keys_of(text.tokens, len(prompts[of])) for (of, _), text in zip(pairs, texts, strict=True)]
    texts = [text._replace(tokens=own) for text, own in zip(texts, keys, strict=True)]
    for (index, number), text in zip(pairs, texts, strict=True):
        if pages := budget.pages_lacking(text.tokens):
            own = f"its continuation {number} of {len(text.wanted)} tokens"
            raise budget.error(f"prompt {index} of {len(prompts[index])} tokens with {own}", pages, "shorten the two")
    targets = np.concatenate([tokens for each in continuations for tokens in each]).astype(np.int64)

    def outputs(rows: Longs, which: Longs) -> Outputs:
        return Outputs(targets=targets[which], target_rows=rows)

    # Results are read at the end; until then the host does not wait for the device.
    spec, most = run.store.pool.spec, MOST_LOGIT_BYTES
    if spec.device.type == "cuda":  # the logits lie there, beside its share of the KV
        most = logit_bytes(int(run.store.free() * spec.shares[spec.device]))
    steps = run.results(texts, outputs, max(1, most // (4 * vocab)))
    results = [(which, step.target_logprobs, step.target_greedy) for which, step in steps]
    place = np.concatenate([which for which, _, _ in results])
    logprobs, greedy = np.empty(len(place), np.float32), np.empty(len(place), np.bool_)
    logprobs[place] = torch.cat([part for _, part, _ in results if part is not None]).cpu().numpy()
    greedy[place] = torch.cat([part for _, _, part in results if part is not None]).cpu().numpy()
    ends = np.cumsum([len(text.wanted) for text in texts])
    if len(broken := np.flatnonzero(np.isnan(logprobs))):
        at = int(np.searchsorted(ends, broken[0], "right"))
        token = int(broken[0] - ends[at] + len(texts[at].wanted))
        raise ValueError(
            f"the logits before token {token} of continuation {pairs[at][1]} of prompt {pairs[at][0]} hold NaN, "
            "+inf or no finite value, so it has no log-probability; look at what the model computed"
        )
    report = run.report
    report.prompts, report.scored = report.prompts + len(prompts), report.scored + len(texts)
    report.tokens_plain_batch += sum(len(text.tokens) for text in texts)
    parts = iter(zip(np.split(logprobs, ends[:-1]), np.split(greedy, ends[:-1]), strict=True))
    return [[Score(tokens, *next(parts)) for tokens in each] for each in continuations]


def values(run: ContextRun, texts: Sequence[Text], head: Head) -> list[Tensor]:
    """The head's output after each wanted token of each text.

    Args:
        run: Computes the texts.
        texts: The texts, with their wanted positions.
        head: Called after each step with the hidden states of its wanted tokens, on the device of the model.

    Returns:
        For each text ``[positions, ...]`` on the CPU.

    Raises:
        KVBudgetTooSmall: a text does not fit the store besides the pinned KV; raised before any step runs.
        TypeError, ValueError: the head is not a function, raised before any step runs too; or it returned no tensor or
            a tensor without one row per token, or it raised torch's RuntimeError.
    """
    if not callable(head):
        raise TypeError(f"head must be a function of hidden states, got {type(head).__name__} {head!r}")
    budget = run.store.budget()
    run.store.check_spans([(f"prompt {index}", len(text.tokens)) for index, text in enumerate(texts)], run.chunk)
    texts = [text._replace(tokens=run.store.tree.keys_of(text.tokens)) for text in texts]
    for index, text in enumerate(texts):
        if pages := budget.pages_lacking(text.tokens):
            raise budget.error(f"prompt {index} of {len(text.tokens)} tokens", pages, "shorten it")
    numbers, parts = [], []
    for which, step in run.results(texts, lambda rows, _: Outputs(hidden=rows)):
        assert step.hidden is not None, "asked for"
        numbers.append(which)
        parts.append(_applied(head, step.hidden))
    in_order = torch.cat(parts).cpu()[torch.from_numpy(np.argsort(np.concatenate(numbers)))]
    run.report.prompts += len(texts)
    run.report.tokens_plain_batch += sum(len(text.tokens) for text in texts)
    return list(torch.split(in_order, [len(text.wanted) for text in texts]))


def _applied(head: Head, hidden: Tensor) -> Tensor:
    """The head's output, computed without gradients and outside inference mode."""
    try:
        with torch.no_grad():
            made = head(hidden.clone())
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # of torch, if shapes, dtypes or devices do not fit
        raise ValueError(
            f"the head failed on hidden states {list(hidden.shape)} in {hidden.dtype} on {hidden.device}: {error}; it "
            "has to take these as the model gives them"
        ) from error
    if not isinstance(made, Tensor):
        raise TypeError(f"a head must return a tensor, got {type(made).__name__}; it is called with hidden states")
    if not made.ndim or len(made) != len(hidden):
        raise ValueError(
            f"a head must return a row for each of the {len(hidden)} hidden states {list(hidden.shape)}, got "
            f"{list(made.shape)}"
        )
    return made.detach()
