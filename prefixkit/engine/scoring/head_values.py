"""What a head makes of hidden states at wanted tokens; what the texts share is computed once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from prefixkit.engine.scoring.context_run import ContextRun, Longs
from prefixkit.engine.scoring.contexts import Ints, lay_out
from prefixkit.engine.sharing_report import Report
from prefixkit.kv.store import KVStore
from prefixkit.runners.batch import Outputs, Results, Runner

# From ``[tokens, hidden_size]`` to ``[tokens, ...]``.
Head = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Marked:
    """Texts, and the positions of each whose values are wanted (see ``Texts``).

    Attributes:
        texts: ``[length]`` token ids each.
        positions: Of each, ascending, at least one.
    """

    texts: Sequence[Ints]
    positions: Sequence[Longs]

    def __len__(self) -> int:
        return len(self.texts)

    def tokens(self, text: int) -> Ints:
        return self.texts[text]

    def wanted(self, text: int) -> Longs:
        return self.positions[text]

    def name(self, text: int, number: int) -> str:
        return f"token {self.positions[text][number]} of prompt {text}"


def values(
    runner: Runner, store: KVStore, marked: Marked, head: Head, *, prefill_chunk: int, report: Report
) -> list[Tensor]:
    """The head's output after each wanted token of each text.

    Args:
        runner: Runs steps.
        store: Where KV lives.
        marked: The texts and what is wanted of them.
        head: Called after each step with the hidden states of its wanted tokens, on the device of the model.
        prefill_chunk: Tokens that a step computes at most.
        report: What was computed is added to it.

    Returns:
        For each text ``[positions, ...]`` on the CPU.

    Raises:
        KVBudgetTooSmall: a text does not fit the store, beside what is pinned; raised before anything runs.
        TypeError, ValueError: the head gave no tensor, or none with a row for each token.
    """
    budget = store.budget()
    for index, tokens in enumerate(marked.texts):
        if pages := budget.pages_lacking(tokens):
            raise budget.error(f"prompt {index} of {len(tokens)} tokens", pages, "shorten it")
    contexts, parts = lay_out(marked), list[tuple[slice, Tensor]]()

    def accept(step: Results, which: slice) -> None:
        assert step.hidden is not None, "asked for"
        parts.append((which, _applied(head, step.hidden)))

    def outputs(rows: Longs, which: slice) -> Outputs:
        return Outputs(hidden=rows)

    ContextRun(runner, store, contexts, prefill_chunk, prefill_chunk, report, outputs, accept).run()
    number = np.concatenate([contexts.number[which] for which, _ in parts])
    found = torch.cat([part for _, part in parts]).cpu()
    in_order = found[torch.from_numpy(np.argsort(number))]
    report.prompts += len(marked)
    report.tokens_plain_batch += sum(map(len, marked.texts))
    return list(torch.split(in_order, [len(positions) for positions in marked.positions]))


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
