"""Draw samples, show how far they are, and write each as it finishes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

import prefixkit
from prefixkit.api import Result
from prefixkit.cli.errors import Interrupted
from prefixkit.cli.output import LineFile
from prefixkit.cli.progress import LiveMeter, Meter
from prefixkit.engine.request import Sample
from prefixkit.sampling.params import SamplingParams
from prefixkit.tree.pages import MAX_PAGE_SIZE


@dataclass(frozen=True)
class Batch:
    """Prompts ready for the model: what each is called, and its token ids."""

    ids: Sequence[str | int]
    tokens: Sequence[Sequence[int]]


@dataclass(frozen=True)
class Memory:
    """How much KV a run may hold (bytes; None: what it needs, within what is free), and in pages of how many tokens."""

    kv_budget: int | None = None
    page_size: int = 16

    def __post_init__(self) -> None:
        if not 1 <= self.page_size <= MAX_PAGE_SIZE:
            raise ValueError(f"--page-size must be 1 to {MAX_PAGE_SIZE} tokens, got {self.page_size}")


def stream(
    model: Any,
    tokenizer: Any,
    batch: Batch,
    params: SamplingParams,
    out: LineFile,
    console: Console,
    *,
    memory: Memory | None = None,
    logprobs: bool = False,
    compiled: bool = False,
    keep: bool = True,
) -> Result:
    """Sample ``batch`` under a progress bar; each finished sample is one line of ``out``, and
    in the result only if ``keep``.

    Raises:
        Interrupted: Ctrl-C; what had finished is in ``out``, whole.
    """
    meter = Meter(len(batch.ids) * params.n, params.max_new_tokens)
    chosen = asdict(params)
    del chosen["stop_token_ids"]  # left to the model's own end-of-text tokens
    with LiveMeter(meter, console) as live:

        def finished(sample: Sample) -> None:
            out.write(record(sample, batch.ids[sample.prompt_index], logprobs))
            live.sample(len(sample.tokens))

        try:
            return prefixkit.generate(
                model,
                tokenizer,
                batch.tokens,
                **chosen,
                **asdict(memory or Memory()),
                compiled=compiled,
                keep=keep,
                on_sample=finished,
                on_step=live.draw,
            )
        except KeyboardInterrupt:
            raise Interrupted(
                f"{out.lines} of {meter.samples_wanted} samples had finished; {_whereabouts(out)}"
            ) from None


def _whereabouts(out: LineFile) -> str:
    return f"they are in {out.name}, every line whole" if out.lines else f"nothing was written to {out.name}"


def record(sample: Sample, name: str | int, logprobs: bool) -> dict[str, Any]:
    """The sample as it is written."""
    line: dict[str, Any] = {"id": name, "index": sample.index, "text": sample.text, "tokens": sample.tokens}
    if logprobs:
        line["logprobs"] = [round(value, 6) for value in sample.logprobs]
    return {**line, "finish_reason": sample.finish_reason}
