"""What a run shared, and what that saved."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prefixkit.engine.running import RunningBatch
    from prefixkit.runners.batch import Runner


# Counts of a runner, which go on from report to report, and where they are here.
_OF_RUNNER = {"plans_made": "plans", "graph_steps": "graph_steps", "captures": "captures"}
_OF_RUNNER["seconds_capturing"] = "seconds_capturing"


@dataclass
class Report:
    """Counts of one run, against what a plain batch of the same sequences would have cost.

    A plain batch computes every sequence's tokens for itself and keeps and reads a KV cache of its own for each.

    Attributes:
        prompts: Prompts sampled.
        samples: Samples finished.
        new_tokens: Tokens sampled.
        steps: Forward passes.
        plans: Attention plans made; the other steps reused one.
        tokens_computed: Tokens that went through the model.
        tokens_plain_batch: Tokens that a plain batch would have sent through it.
        kv_bytes_held_peak: KV bytes held at the fullest moment, in whole pages; reserved pages apart.
        kv_bytes_unshared_peak: What the sequences alive at their fullest moment would have held unshared.
        kv_bytes_read: KV bytes that attention read.
        kv_bytes_read_unshared: What it would have read for each sequence apart.
        kv_bytes_copied: KV bytes that were copied within the pool, to make one node of many that beams had left.
        seconds: Wall time.
        decode_steps: Steps that ran no prompt tokens.
        seconds_in_decode: Wall time of these steps, capturing included, until the host had their tokens; the rest of
            ``seconds`` went to prompts and first tokens.
        graph_steps: Steps that CUDA graphs ran.
        unpipelined: Decode steps that could not be launched before the tokens of the step before were read, by the
            reason.
        captures: CUDA graphs captured.
        seconds_capturing: What that took.
        graph_bytes: GPU memory that graphs share.
    """

    prompts: int = 0
    samples: int = 0
    new_tokens: int = 0
    steps: int = 0
    plans: int = 0
    tokens_computed: int = 0
    tokens_plain_batch: int = 0
    kv_bytes_held_peak: int = 0
    kv_bytes_unshared_peak: int = 0
    kv_bytes_read: int = 0
    kv_bytes_read_unshared: int = 0
    kv_bytes_copied: int = 0
    seconds: float = 0.0
    decode_steps: int = 0
    seconds_in_decode: float = 0.0
    graph_steps: int = 0
    unpipelined: dict[str, int] = field(default_factory=dict)
    captures: int = 0
    seconds_capturing: float = 0.0
    graph_bytes: int = 0
    _before: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_OF_RUNNER, 0), repr=False, compare=False)

    def begin(self, runner: Runner) -> None:
        """Count what the runner does from now on."""
        self._before = {name: getattr(runner, name) - getattr(self, ours) for name, ours in _OF_RUNNER.items()}

    def count(self, batch: RunningBatch, runner: Runner, bytes_per_token: int) -> None:
        """Add a batch that has run."""
        for name, ours in _OF_RUNNER.items():
            setattr(self, ours, getattr(runner, name) - self._before[name])
        self.steps += batch.steps
        if batch.decodes:
            self.decode_steps += batch.steps
            for reason in batch.unpipelined:
                self.unpipelined[reason] = self.unpipelined.get(reason, 0) + batch.steps
        self.tokens_computed += batch.rows_run
        self.kv_bytes_read += batch.kv_tokens_read * bytes_per_token
        self.kv_bytes_read_unshared += batch.kv_tokens_unshared * bytes_per_token
        self.kv_bytes_unshared_peak = max(self.kv_bytes_unshared_peak, batch.tokens_alone * bytes_per_token)
        held = batch.pages_held * batch.tree.page_size * bytes_per_token
        self.kv_bytes_held_peak = max(self.kv_bytes_held_peak, held)

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
    def headline(self) -> str:
        """The run in one line."""
        return (
            f"{self.samples:,} samples of {self.prompts:,} prompts, {self.new_tokens:,} new tokens "
            f"in {self.seconds:.1f} s: {self.tokens_per_second:,.0f} tokens/s"
        )

    def __str__(self) -> str:
        lines = [f"{self.headline}, {self.steps} steps, {self.plans} plans"]
        if self.graph_steps:
            lines.append(
                f"{self.graph_steps} steps by CUDA graphs, {self.captures} captured in {self.seconds_capturing:.1f} s, "
                f"which share {self.graph_bytes / 2**20:,.0f} MiB"
            )
        lines += [f"{steps} steps not pipelined: {reason}" for reason, steps in self.unpipelined.items()]
        lines.append(f"{'':24}{'prefixkit':>14}{'plain batch':>14}{'saved':>10}")
        lines += [f"{what:24}{ours:>14}{plain:>14}{ratio:>10}" for what, ours, plain, ratio in self.rows()]
        return "\n".join(lines)


def _row(what: str, ours: float, plain: float, form: str) -> tuple[str, str, str, str]:
    ratio = f"{plain / ours:.1f}x" if ours else "-"
    return what, form.format(ours), form.format(plain), ratio
