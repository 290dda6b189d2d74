"""``prefixkit sample``: prompts in, JSONL out, line by line as samples finish."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

import prefixkit
from prefixkit.cli.errors import Interrupted
from prefixkit.cli.loading import check_device, check_dtype, load_model, load_tokenizer, resolve
from prefixkit.cli.output import LineFile
from prefixkit.cli.progress import Meter
from prefixkit.cli.prompts import Source, encode_prompts, load_prompts, task_stop, uses_chat
from prefixkit.cli.terminal import line
from prefixkit.cli.views import show_report
from prefixkit.engine.memory import parse_size
from prefixkit.engine.request import Sample
from prefixkit.sampling.params import SamplingParams
from prefixkit.session import Result
from prefixkit.tree.pages import MAX_PAGE_SIZE


def run_sample(
    model: str,
    source: Source,
    params: SamplingParams,
    console: Console,
    *,
    out: Path | None,
    overwrite: bool,
    logprobs: bool,
    dtype: str,
    device: str,
    kv_budget: str | None,
    page_size: int,
    compiled: bool,
) -> None:
    """Sample and write, by the options of the command; every check that needs no model comes before one is loaded."""
    budget = None if kv_budget is None else parse_size(kv_budget, "--kv-budget")
    if not 1 <= page_size <= MAX_PAGE_SIZE:
        raise ValueError(f"--page-size must be 1 to {MAX_PAGE_SIZE} tokens, got {page_size}")
    check_dtype(dtype)
    check_device(device)
    _check_apart(source.input, out)
    prompts = load_prompts(source)
    with LineFile(out, overwrite=overwrite) as file:
        location = resolve(model, console)
        tokenizer = load_tokenizer(location)
        chat = uses_chat(tokenizer, source.chat)
        encoded = encode_prompts(tokenizer, prompts, chat)
        params = replace(params, stop=params.stop + task_stop(source.task, chat))
        loaded = load_model(location, dtype, device)
        options = {"kv_budget": budget, "page_size": page_size, "compiled": compiled, "keep": False}
        result = stream(loaded, tokenizer, encoded, params, file, console, logprobs=logprobs, **options)
    show_report(result.report, result.report.headline, console)
    if out is not None:
        console.print(line(f"{file.lines:,} samples in {file.name}"), soft_wrap=True)


def _check_apart(prompts: Path | None, out: Path | None) -> None:
    """Refuse to write over the prompts, by whatever name or link."""
    with suppress(OSError):  # where one of them is absent, they are not the same
        if prompts is not None and out is not None and out.samefile(prompts):
            raise ValueError(f"--out {out} is the file of the prompts, --input {prompts}; choose another --out")


def stream(
    model: Any,
    tokenizer: Any,
    prompts: Mapping[str | int, Sequence[int]],
    params: SamplingParams,
    out: LineFile,
    console: Console,
    *,
    logprobs: bool = False,
    **options: Any,
) -> Result:
    """Sample prompts by id under a progress bar, with more ``options`` of ``generate``; each sample becomes a line.

    Raises:
        Interrupted: Ctrl-C; what had finished is in ``out``, whole.
    """
    ids, wanted = list(prompts), len(prompts) * params.n
    with Meter(wanted, params.max_new_tokens, console) as meter:

        def finished(sample: Sample) -> None:
            record: dict[str, Any] = {
                "id": ids[sample.prompt_index],
                "index": sample.index,
                "text": sample.text,
                "tokens": sample.tokens,
            }
            if logprobs:
                record["logprobs"] = [round(value, 6) for value in sample.logprobs]
            out.write(record | {"finish_reason": sample.finish_reason})
            meter.count_sample(len(sample.tokens))

        try:
            return prefixkit.generate(
                model, tokenizer, prompts.values(), params, **options, on_sample=finished, on_step=meter.count_tokens
            )
        except KeyboardInterrupt:
            place = f"they are in {out.name}, every line whole" if out.lines else f"nothing was written to {out.name}"
            raise Interrupted(f"{out.lines} of {wanted} samples had finished; {place}") from None
