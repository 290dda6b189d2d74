"""``prefixkit sample``: prompts in, JSONL out, line by line as samples finish."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from prefixkit.cli.loading import check_device, check_dtype, load_model, load_tokenizer, resolve
from prefixkit.cli.output import LineFile
from prefixkit.cli.prompts import Prompt, Source, encode_prompts, load_prompts, task_stop, uses_chat
from prefixkit.cli.report_view import headline, show_report
from prefixkit.cli.stream import Batch, Memory, stream
from prefixkit.cli.terminal import line
from prefixkit.sampling.params import SamplingParams


@dataclass(frozen=True)
class SampleOptions:
    """What to sample, how, and where it goes.

    Attributes:
        model: Name, folder or ``demo``.
        out: Standard output where None.
        logprobs: Write each token's log-probability too.
        chat: Use the tokenizer's chat template; None where it has one.
        compiled: On a GPU, decode through torch.compile.
    """

    model: str
    source: Source
    params: SamplingParams
    memory: Memory
    out: Path | None = None
    overwrite: bool = False
    logprobs: bool = False
    chat: bool | None = None
    dtype: str = "auto"
    device: str = "cpu"
    compiled: bool = False


def run_sample(options: SampleOptions, console: Console) -> None:
    """Sample and write; every check that needs no model comes before one is loaded."""
    check_dtype(options.dtype)
    check_device(options.device)
    _check_apart(options.source.input, options.out)
    prompts = load_prompts(options.source)
    with LineFile(options.out, overwrite=options.overwrite) as out:
        location = resolve(options.model, lambda message: console.print(line(f"{message} …")))
        tokenizer = load_tokenizer(location)
        batch, params = prepare(options, prompts, tokenizer)
        model = load_model(location, options.dtype, options.device)
        result = stream(
            model,
            tokenizer,
            batch,
            params,
            out,
            console,
            memory=options.memory,
            logprobs=options.logprobs,
            compiled=options.compiled,
            keep=False,
        )
    show_report(result.report, headline(result.report), console)
    if options.out is not None:
        console.print(line(f"{out.lines:,} samples in {out.name}"), soft_wrap=True)


def prepare(options: SampleOptions, prompts: Sequence[Prompt], tokenizer: Any) -> tuple[Batch, SamplingParams]:
    """What ``generate`` is asked: the prompts as token ids, by the chat template where it is used, and the parameters
    with the task's stop strings after the user's.

    Raises:
        ValueError: ``options.chat`` asks for a chat template and the tokenizer has none.
    """
    chat = uses_chat(tokenizer, options.chat)
    batch = Batch([prompt.id for prompt in prompts], encode_prompts(tokenizer, prompts, chat))
    return batch, replace(options.params, stop=options.params.stop + task_stop(options.source.task, chat))


def _check_apart(prompts: Path | None, out: Path | None) -> None:
    """Refuse to write over the prompts, by whatever name or link."""
    with suppress(OSError):  # where one of them is absent, they are not the same
        if prompts is not None and out is not None and out.samefile(prompts):
            raise ValueError(f"--out {out} is the file of the prompts, --input {prompts}; choose another --out")
