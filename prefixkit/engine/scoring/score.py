"""Log-probabilities of given continuations: what they and their prompts share is computed once, nothing is sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.engine.scoring.context_run import ContextRun, Longs
from prefixkit.engine.scoring.contexts import Continued, lay_out
from prefixkit.engine.sharing_report import Report
from prefixkit.kv.budget import Budget
from prefixkit.kv.store import KVStore
from prefixkit.runners.batch import Outputs, Results, Runner, Targets
from prefixkit.tree.pages import pages_for

Ints = NDArray[np.int32]

# Logits of one step at most, in bytes of float32; their log-softmax takes as many again.
MOST_LOGIT_BYTES = 2**28


@dataclass(frozen=True, eq=False)
class Score:
    """How likely a continuation is.

    Attributes:
        tokens: ``[length]`` int32 its token ids.
        logprobs: ``[length]`` float32 the model's own log-probability of each: natural logarithm, after the prompt and
            the continuation's tokens before it, without temperature or filters.
        greedy: ``[length]`` bool, whether greedy decoding takes it: no token is likelier there, and of equally likely
            ones it is the first.
    """

    tokens: Ints
    logprobs: NDArray[np.float32]
    greedy: NDArray[np.bool_]

    @property
    def total(self) -> float:
        """The log-probability of the whole continuation."""
        return float(self.logprobs.sum(dtype=np.float64))

    @property
    def is_greedy(self) -> bool:
        """Whether greedy decoding gives this continuation."""
        return bool(self.greedy.all())


def score(
    runner: Runner,
    store: KVStore,
    prompts: Sequence[Ints],
    continuations: Sequence[Sequence[Ints]],
    *,
    prefill_chunk: int,
    vocab: int,
    report: Report,
) -> list[list[Score]]:
    """The score of each continuation of each prompt.

    Contexts that do not fit the store together are computed one after the other; what has been computed stays in the
    prefix cache.  The tree may hold any other sequences, with or without KV: a token that is computed already, but
    after which something is wanted, runs again and writes nothing.

    Args:
        runner: Runs steps.
        store: Where KV lives.
        prompts: ``[length]`` token ids each, at least one.
        continuations: Of each prompt, ``[length]`` token ids each, at least one.
        prefill_chunk: Tokens that a step computes at most; fewer where their logits would take more than
            :data:`MOST_LOGIT_BYTES`.
        vocab: Columns of the logits.
        report: What was computed is added to it.

    Raises:
        KVBudgetTooSmall: a prompt with one of its continuations does not fit the store, beside what is pinned; raised
            before anything runs.
        ValueError: the logits before a token hold NaN, +inf or no finite value.
    """
    check_fits(prompts, continuations, store.budget())
    texts = Continued.of(prompts, continuations)
    contexts = lay_out(texts)
    targets = np.concatenate([tokens for each in continuations for tokens in each])[contexts.number].astype(np.int64)
    results = list[tuple[slice, Tensor, Tensor]]()  # read at the end: until then the host does not wait for a device

    def outputs(rows: Longs, which: slice) -> Outputs:
        return Outputs(targets=Targets(rows, targets[which]))

    def accept(step: Results, which: slice) -> None:
        assert step.target_logprobs is not None and step.target_greedy is not None, "asked for"
        results.append((which, step.target_logprobs, step.target_greedy))

    most_wanted = max(1, MOST_LOGIT_BYTES // (4 * vocab))
    ContextRun(runner, store, contexts, prefill_chunk, most_wanted, report, outputs, accept).run()
    number = np.concatenate([contexts.number[which] for which, _, _ in results])
    logprobs, greedy = np.full(len(number), np.nan, np.float32), np.zeros(len(number), np.bool_)
    logprobs[number] = torch.cat([part for _, part, _ in results]).cpu().numpy()
    greedy[number] = torch.cat([part for _, _, part in results]).cpu().numpy()
    if len(broken := np.flatnonzero(np.isnan(logprobs))):
        raise ValueError(
            f"the logits before {contexts.name(int(broken[0]))} hold NaN, +inf or no finite value, so it has no "
            "log-probability; look at what the model computed"
        )
    report.prompts, report.scored = report.prompts + len(prompts), report.scored + len(texts)
    lengths = [(len(prompts[index]), len(continuations[index][number])) for index, number in texts.pairs]
    report.tokens_plain_batch += sum(before + own - 1 for before, own in lengths)
    ends = np.cumsum([len(tokens) for each in continuations for tokens in each])[:-1]
    parts = iter(zip(np.split(logprobs, ends), np.split(greedy, ends), strict=True))
    return [[Score(tokens, *next(parts)) for tokens in each] for each in continuations]


def check_fits(prompts: Sequence[Ints], continuations: Sequence[Sequence[Ints]], budget: Budget) -> None:
    """Raise KVBudgetTooSmall if a context cannot be in the store even alone."""
    for index, (prompt, each) in enumerate(zip(prompts, continuations, strict=True)):
        if pages_for(len(prompt) + max(map(len, each)) - 1, budget.tree.page_size) <= budget.pages:
            continue
        for number, tokens in enumerate(each):
            if pages := budget.pages_lacking(np.concatenate((prompt, tokens[:-1]))):
                what = f"prompt {index} of {len(prompt)} tokens with its continuation {number} of {len(tokens)} tokens"
                raise budget.error(what, pages, "shorten the two")
