"""What a head makes of hidden states at wanted tokens; what the texts share is computed once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from prefixkit.engine.scoring.context_run import ContextRun
from prefixkit.engine.scoring.contexts import Text
from prefixkit.runners.batch import Outputs

# From ``[tokens, hidden_size]`` to ``[tokens, ...]``.
Head = Callable[[Tensor], Tensor]


def values(run: ContextRun, texts: Sequence[Text], head: Head) -> list[Tensor]:
    """The head's output after each wanted token of each text.

    Args:
        run: Computes the texts.
        texts: With what is wanted of them.
        head: Called after each step with the hidden states of its wanted tokens, on the device of the model.

    Returns:
        For each text ``[positions, ...]`` on the CPU.

    Raises:
        KVBudgetTooSmall: a text does not fit the store, beside what is pinned; raised before anything runs.
        TypeError, ValueError: the head gave no tensor, or none with a row for each token.
    """
    budget, lengths = run.store.budget(), [len(text.tokens) for text in texts]
    for index, (text, length) in enumerate(zip(texts, lengths, strict=True)):
        if pages := budget.pages_lacking(text.tokens):
            raise budget.error(f"prompt {index} of {length} tokens", pages, "shorten it")
    numbers, parts = [], []
    for which, step in run.results(texts, lambda rows, _: Outputs(hidden=rows)):
        assert step.hidden is not None, "asked for"
        numbers.append(which)
        parts.append(_applied(head, step.hidden))
    in_order = torch.cat(parts).cpu()[torch.from_numpy(np.argsort(np.concatenate(numbers)))]
    run.report.prompts += len(texts)
    run.report.tokens_plain_batch += sum(lengths)
    return list(torch.split(in_order, [len(text.wanted) for text in texts]))


def _applied(head: Head, hidden: Tensor) -> Tensor:
    """The head's output, without a graph for gradients, and outside of inference mode."""
    with torch.no_grad():
        made = head(hidden.clone())
    if not isinstance(made, Tensor):
        raise TypeError(f"a head must return a tensor, got {type(made).__name__}; it is called with hidden states")
    if not made.ndim or len(made) != len(hidden):
        raise ValueError(
            f"a head must return a row for each of the {len(hidden)} hidden states {list(hidden.shape)}, got "
            f"{list(made.shape)}"
        )
    return made.detach()
