"""The eager runner, which plans and runs steps one by one, on any device."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.agreement import ALONE, Agreement
from prefixkit.attention.gpu.staging import upload
from prefixkit.attention.planner import Planner
from prefixkit.attention.queries import StepTree
from prefixkit.attention.step import Step, build_step
from prefixkit.ops.sampling_records import MOST_VOCAB
from prefixkit.runners.batch import STEP_BY_STEP, Batch, Pace, Results, Sampling, TokenMasks
from prefixkit.runners.sampler import Sampler, top_tokens
from prefixkit.runners.targets import score_targets
from prefixkit.tree.state_slots import StateMoves


class CompiledModel(Protocol):
    """A model with compiled layers, as :class:`EagerRunner` takes it."""

    def __call__(self, step: Step) -> Tensor:
        """The logits, as ``model`` of :class:`EagerRunner` returns them."""

    def hidden(self, step: Step) -> Tensor:
        """The last hidden states, as ``hidden`` of :class:`EagerRunner` returns them."""

    def serves(self, step: Step, compiling: bool) -> bool:
        """Whether compiled layers serve a step; with ``compiling``, layers may be compiled for such steps first."""


class ShortSteps(Protocol):
    """Runs short steps by CUDA graphs, as :class:`EagerRunner` takes it."""

    def __call__(
        self,
        tree: StepTree,
        tokens: NDArray[np.integer],
        wanted: NDArray[np.integer],
        states: StateMoves | None,
    ) -> tuple[Step, Tensor] | None:
        """The step and its logits, from what ``build_step`` takes; None if no graph runs it."""


class EagerRunner:
    """Runs each step as it is launched (see ``Runner``).

    Args:
        model: Runs a step: ``Step -> logits [len(step.logit_rows), vocab]`` in float32, after appending the step's KV
            to the pool.
        planners: Plan attention for the heads of each kind of layers.
        device: The device of the model, or of its first layer.
        pace: By default the host changes the batch as soon as a row ends, because running an ended row costs more.
        hidden: Runs a step like ``model``, and returns last hidden states of these rows; None if no call wants them.
        compiled: Runs the steps that it serves, in place of ``model`` and ``hidden``; None: no layers are compiled.
        layer_counts: Number of layers of each kind.
        agreement: Agreement of the processes that share the model: all take the results of the first process.
        plan_devices: Where the plan of each planner goes; empty: to ``device``.

    Attributes:
        graphs: Runs short steps by CUDA graphs; None: there are none.
    """

    graph_bytes = 0
    logits: Tensor

    def __init__(
        self,
        model: Callable[[Step], Tensor],
        planners: Planner | Sequence[Planner],
        device: torch.device | str = "cpu",
        pace: Pace = STEP_BY_STEP,
        hidden: Callable[[Step], Tensor] | None = None,
        compiled: CompiledModel | None = None,
        layer_counts: tuple[int, ...] = (1,),
        agreement: Agreement = ALONE,
        plan_devices: Sequence[torch.device] = (),
    ) -> None:
        self.planners = (planners,) if isinstance(planners, Planner) else tuple(planners)
        self.model, self.layer_counts, self.device, self.pace = model, layer_counts, torch.device(device), pace
        self.hidden, self.compiled, self.agreement = hidden, compiled, agreement
        self.plan_devices = plan_devices
        self.graphs: ShortSteps | None = None
        self._sampler: Sampler | None = None
        self._states: StateMoves | None = None  # of the step launched last
        self._last: NDArray[np.int64] = np.empty(0, np.int64)  # the tokens that the last step sampled
        self._unread: deque[Results] = deque()
        self._masks: TokenMasks | None = None
        self.grammar_waits = 0

    def counters(self) -> dict[str, float]:
        return {"plans": sum(planner.plans_made for planner in self.planners), "grammar_waits": self.grammar_waits}

    @property
    def reads(self) -> tuple[int, int]:
        return self._step.kv_tokens

    @property
    def sees_part(self) -> bool:
        return any(planner.visible.limits for planner in self.planners)

    def drop_graphs(self) -> None:
        """Do nothing: each step reads the present weights, and there are no graphs."""

    def start_call(self, state: object = None) -> None:
        """Do nothing, for the same reason."""

    def launch(self, batch: Batch, compiling: bool = False) -> None:
        """Launch a batch as ``Runner.launch`` does; ``compiling``: whether layers may be compiled for this step."""
        self._unread.clear()
        self._tree, self._states = batch.tree, batch.states
        outputs = batch.outputs
        if outputs.hidden is not None:
            states = self._run(batch.tokens, outputs.hidden, compiling, hidden=True)
            self.agreement.broadcast(states)
            self._unread.append(Results(hidden=states))
            return
        wanted = np.unique(np.concatenate((outputs.rows, outputs.logits, outputs.target_rows)))
        logits = self._run(batch.tokens, wanted, compiling)
        results, of_rows = Results(), _rows_of(logits, np.searchsorted(wanted, outputs.rows))
        if outputs.sampling is None:
            self.agreement.broadcast(of_rows)
            self.logits = of_rows
        else:
            results = self._choose(of_rows, outputs.sampling)
        if len(outputs.logits):
            results = replace(results, logits=_rows_of(logits, np.searchsorted(wanted, outputs.logits)))
        if len(outputs.targets):
            with torch.inference_mode():
                logprobs, greedy = score_targets(logits, np.searchsorted(wanted, outputs.target_rows), outputs.targets)
            self.agreement.broadcast(logprobs, greedy)
            results = replace(results, target_logprobs=logprobs, target_greedy=greedy)
        self._unread.append(results)

    def repeat(self, tokens: Tensor | None = None) -> None:
        self._tree = self._tree.grown(1)
        self._states = None if self._states is None else self._states.repeated()
        if tokens is not None:
            self.logits = self._run(tokens.cpu().numpy(), np.arange(len(tokens)))
            self.agreement.broadcast(self.logits)
            return
        logits = self._run(self._last.clip(min=0), np.arange(len(self._last)))  # after -1 the row has ended
        if self._masks is not None:
            self._masks.accept(self._last)
        self._unread.append(self._choose(logits, None))

    def select_rows(self, rows: NDArray[np.intp]) -> None:
        self._tree, self._last = self._tree.select_rows(rows), self._last[rows]
        self._states = None if self._states is None else self._states.select_rows(rows.tolist())
        if self._masks is not None:
            self._masks.select_rows(rows)
        assert self._sampler is not None, "a batch with rows was launched"
        self._sampler.select_rows(upload([rows.astype(np.int64)], self._sampler.device)[0])

    def read(self) -> Results:
        return self._unread.popleft()

    def sample(self, logits: Tensor, sampling: Sampling) -> Results:
        return self._choose(logits, sampling)

    def _run(
        self,
        tokens: NDArray[np.integer],
        wanted: NDArray[np.integer],
        compiling: bool = False,
        hidden: bool = False,
    ) -> Tensor:
        """Run a step; returns the logits of the ``wanted`` rows, or with ``hidden`` their last hidden states."""
        by_graph = None if self.graphs is None or hidden else self.graphs(self._tree, tokens, wanted, self._states)
        if by_graph is not None:
            self._step, logits = by_graph
            return logits
        layers = self.planners, self.device, self.layer_counts
        step = self._step = build_step(self._tree, tokens, wanted, *layers, self._states, self.plan_devices)
        if self.compiled is not None and self.compiled.serves(step, compiling):
            return self.compiled.hidden(step) if hidden else self.compiled(step)
        if not hidden:
            return self.model(step)
        assert self.hidden is not None, "a runner of a model that gives hidden states"
        return self.hidden(step)

    def _choose(self, logits: Tensor, sampling: Sampling | None) -> Results:
        """Choose the next tokens of the rows; without ``sampling``, as the last step did."""
        rows, vocab = logits.shape
        if sampling is not None:
            self._top, self._process, self._drawn = sampling.top, sampling.process, sampling.drawn
            self._masks = sampling.masks
        if not rows:
            return Results()
        sampler = self._sampler_for(rows, vocab, logits.device)
        if sampling is not None:
            sampler.upload_params(slice(0, rows), sampling.batch)
        if self._process is not None:
            self.agreement.broadcast(logits)  # so that processors with state see the same in all processes
        scores = logits if self._process is None else self._process(logits.clone())
        allowed = None
        if self._masks is not None:
            self.grammar_waits += 1
            (allowed,) = upload([self._masks.fill(vocab)], sampler.device)
        tokens, logprobs = sampler.sample(scores.to(sampler.device), self._drawn, allowed)
        if self._process is not None:  # the log-probability is the model's own
            models = torch.log_softmax(logits, -1).gather(1, tokens.to(logits.device).clamp(min=0)[:, None])[:, 0]
            logprobs = torch.where(tokens < 0, logprobs, models.to(tokens.device))
            excluded = _has_none(scores) & ~_has_none(logits)  # processors may exclude all tokens, as a grammar may
            logprobs = torch.where(excluded.to(tokens.device), -math.inf, logprobs)
        top, of_drawn = top_tokens(logits, self._top, logprobs.to(logits.device)), sampler.drawn[:rows]
        self.agreement.broadcast(tokens, logprobs, *([of_drawn] if self._drawn else []))
        self.agreement.broadcast(*top)  # on the logits' device, which may differ from that of the tokens
        self._last = tokens.cpu().numpy().copy()
        ids, best = (part.cpu().numpy() for part in top)
        drawn = of_drawn.cpu().numpy().copy() if self._drawn else None
        return Results(self._last, logprobs.cpu().numpy().copy(), ids, best, drawn)

    def _sampler_for(self, rows: int, vocab: int, device: torch.device) -> Sampler:
        """A sampler for at least ``rows`` rows, reused for the next batch."""
        device = device if vocab <= MOST_VOCAB else torch.device("cpu")
        old = self._sampler
        if old is None or old.rows < rows or (old.vocab, old.device) != (vocab, device):
            with torch.inference_mode(False):  # tensors born in inference mode could not be written outside it
                self._sampler = old = Sampler(rows, vocab, device)
        return old


def _rows_of(logits: Tensor, rows: NDArray[np.intp]) -> Tensor:
    """These rows of logits; the host does not wait for the device."""
    if np.array_equal(rows, np.arange(len(rows))):
        return logits[: len(rows)]
    return logits[upload([rows.astype(np.int64)], logits.device)[0]]


def _has_none(logits: Tensor) -> Tensor:
    """``[rows]`` bool, whether all logits of a row are -inf."""
    return logits.amax(-1).isneginf()
