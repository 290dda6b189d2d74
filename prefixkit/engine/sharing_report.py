"""Counts of what a run shared and saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

# Reads the cumulative counters of the runner and the scheduler, keyed by field of the report.
Counters = Callable[[], Mapping[str, float]]


@dataclass
class Report:
    """Counts of one run, against what a plain batch of the same sequences would have cost.

    A plain batch computes each sequence's tokens separately, and holds and reads a separate KV cache for each sequence.

    Attributes:
        prompts: Prompts sampled, or scored.
        samples: Samples finished.
        new_tokens: Tokens sampled.
        scored: Continuations scored.
        steps: Forward passes.
        plans: Attention plans made; the other steps reused one.
        tokens_computed: Tokens that went through the model.
        tokens_plain_batch: Tokens that a plain batch would have sent through the model.
        kv_bytes_held_peak: KV bytes held at the peak, in whole pages, without reserved pages.
        kv_bytes_unshared_peak: Peak of the KV bytes that the live sequences would have held without sharing.
        state_bytes_held_peak: Peak of the bytes of states that sequences held, for layers that keep a state in place of
            KV: states at their ends and at checkpoints before, without states that only the prefix cache retains.
        bytes_per_state: Bytes of one state, over all these layers; 0 for models without such layers.
        kv_bytes_read: KV bytes that attention read.
        kv_bytes_read_unshared: KV bytes that attention would have read without sharing.
        kv_bytes_copied: KV bytes copied within the pool, to merge short nodes of beams into longer ones.
        seconds: Wall time, in seconds.
        decode_steps: Steps that ran no prompt tokens.
        seconds_in_decode: Wall time of these steps, in seconds, until the host had their tokens, including the capture
            of graphs; the rest of ``seconds`` was spent on prompts and first tokens.
        graph_steps: Steps that CUDA graphs ran.
        unpipelined: Number of decode steps that could not be launched before the host had read the previous step's
            tokens, for each reason.
        grammar_waits: Steps with grammars: in each the host waits once, while the model computes, for the tokens of the
            previous step, and fills the masks of allowed tokens.
        captures: CUDA graphs captured.
        seconds_capturing: Time spent capturing, in seconds.
        graph_bytes: Bytes of GPU memory that graphs share.
        prompt_tokens: Tokens of admitted prompts; a prompt that is admitted again after preemption counts again.
        prompt_tokens_found: Those of ``prompt_tokens`` whose KV existed already, from earlier requests or from others
            in flight.
        tokens_evicted: Tokens whose KV was evicted from the prefix cache.
        preempted_swapped, preempted_recomputed: How often a sample or search was preempted and its KV swapped, or
            recomputed.
        kv_bytes_swapped: KV bytes copied to host memory.
    """

    prompts: int = 0
    samples: int = 0
    new_tokens: int = 0
    scored: int = 0
    steps: int = 0
    plans: int = 0
    tokens_computed: int = 0
    tokens_plain_batch: int = 0
    kv_bytes_held_peak: int = 0
    kv_bytes_unshared_peak: int = 0
    state_bytes_held_peak: int = 0
    bytes_per_state: int = 0
    kv_bytes_read: int = 0
    kv_bytes_read_unshared: int = 0
    kv_bytes_copied: int = 0
    seconds: float = 0.0
    decode_steps: int = 0
    seconds_in_decode: float = 0.0
    graph_steps: int = 0
    unpipelined: dict[str, int] = field(default_factory=dict)
    grammar_waits: int = 0
    captures: int = 0
    seconds_capturing: float = 0.0
    graph_bytes: int = 0
    prompt_tokens: int = 0
    prompt_tokens_found: int = 0
    tokens_evicted: int = 0
    preempted_swapped: int = 0
    preempted_recomputed: int = 0
    kv_bytes_swapped: int = 0
    _counters: Counters | None = field(default=None, repr=False, compare=False)
    _before: dict[str, float] = field(default_factory=dict, repr=False, compare=False)

    def start(self, counters: Counters) -> None:
        """Count the increases of ``counters`` from now on."""
        self._before = {name: value - getattr(self, name) for name, value in counters().items()}
        self._counters = counters  # set last: if an interrupt comes before, `end` has nothing to subtract from

    def update(self) -> None:
        """Update the counts from the counters."""
        if self._counters is not None:
            for name, value in self._counters().items():
                setattr(self, name, value - self._before[name])

    def end(self) -> None:
        """Stop counting, and drop the counters: a report that outlives its call must not hold the pool."""
        self.update()
        self._counters = None

    def counts(self) -> dict[str, Any]:
        """All counts, as values that JSON can represent."""
        return {one.name: getattr(self, one.name) for one in fields(self) if not one.name.startswith("_")}

    def add(self, counts: Mapping[str, Any]) -> None:
        """Add counts of steps or of another run, as :meth:`counts` gives them; of two peaks the higher is taken."""
        self.update()
        for name, value in counts.items():
            before = vars(self).get(name)
            if isinstance(before, dict) and isinstance(value, Mapping):
                setattr(self, name, {key: before.get(key, 0) + value.get(key, 0) for key in {**before, **value}})
            elif isinstance(before, int | float) and isinstance(value, int | float):
                peak = name.endswith("_peak") or name in ("graph_bytes", "bytes_per_state")
                setattr(self, name, max(before, value) if peak else before + value)

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all samples per second of wall time."""
        return self.new_tokens / self.seconds if self.seconds else 0.0

    def rows(self) -> list[tuple[str, str, str, str]]:
        """``(what, prefixkit, plain batch, ratio)`` for a table."""
        return [
            _row("tokens computed", self.tokens_computed, self.tokens_plain_batch, "{:,}"),
            _row(
                "KV held at peak, MiB", self.kv_bytes_held_peak / 2**20, self.kv_bytes_unshared_peak / 2**20, "{:,.1f}"
            ),
            _row("KV read, GiB", self.kv_bytes_read / 2**30, self.kv_bytes_read_unshared / 2**30, "{:,.2f}"),
        ]

    @property
    def states_held(self) -> str:
        """How many states were held at once, and their memory, in one line."""
        held, each = self.state_bytes_held_peak, self.bytes_per_state
        return f"{held // max(1, each):,} states of {each:,} bytes held at peak, {held / 2**20:,.1f} MiB"

    @property
    def headline(self) -> str:
        """The run in one line."""
        if self.scored:
            computed = f"{self.tokens_computed:,} tokens computed in {self.seconds:.1f} s"
            return f"{_count(self.scored, 'continuation')} of {_count(self.prompts, 'prompt')} scored, {computed}"
        return (
            f"{_count(self.samples, 'sample')} of {_count(self.prompts, 'prompt')}, {self.new_tokens:,} new tokens in "
            f"{self.seconds:.1f} s: {self.tokens_per_second:,.0f} tokens/s"
        )

    def __repr__(self) -> str:
        return f"Report({self.headline})"

    def __str__(self) -> str:
        lines = [f"{self.headline}, {self.steps} steps, {self.plans} plans"]
        if self.graph_steps:
            lines.append(
                f"{self.graph_steps} steps by CUDA graphs, {self.captures} captured in {self.seconds_capturing:.1f} s, "
                f"which share {self.graph_bytes / 2**20:,.0f} MiB"
            )
        if self.prompt_tokens_found:
            share = self.prompt_tokens_found / self.prompt_tokens
            lines.append(
                f"{self.prompt_tokens_found:,} of {self.prompt_tokens:,} prompt tokens ({share:.0%}) had KV already"
            )
        if preempted := self.preempted_swapped + self.preempted_recomputed:
            lines.append(
                f"{preempted} times a sample was preempted, {self.preempted_swapped} of them by swapping its KV"
            )
        lines += [f"{steps} steps not pipelined: {reason}" for reason, steps in self.unpipelined.items()]
        if self.grammar_waits:
            lines.append(f"{self.grammar_waits} steps waited for the host, which said what grammars allow")
        lines += [self.states_held] if self.bytes_per_state else []
        lines.append(f"{'':24}{'prefixkit':>14}{'plain batch':>14}{'saved':>10}")
        lines += [f"{what:24}{ours:>14}{plain:>14}{ratio:>10}" for what, ours, plain, ratio in self.rows()]
        return "\n".join(lines)


def _row(what: str, ours: float, plain: float, form: str) -> tuple[str, str, str, str]:
    ratio = f"{plain / ours:.1f}x" if ours else "-"
    return what, form.format(ours), form.format(plain), ratio


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'s' * (number != 1)}"
