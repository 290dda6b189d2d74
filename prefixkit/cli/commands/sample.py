"""``prefixkit sample``: prompts in, samples out as they finish: to a run folder, or as lines to standard output."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from prefixkit.cli.commands.devices import run_on_devices
from prefixkit.cli.commands.env import versions
from prefixkit.cli.commands.evaluate import open_judge, solved_of
from prefixkit.cli.errors import Interrupted, at_work
from prefixkit.cli.loading import (
    DEMO,
    check_device,
    check_dtype,
    check_processes,
    choose_device,
    load_model,
    load_tokenizer,
    resolve,
)
from prefixkit.cli.options import parse_devices
from prefixkit.cli.output import standard_output, write_line
from prefixkit.cli.progress import Meter
from prefixkit.cli.prompted import Prompted, Settings, manifest_of, prompted
from prefixkit.cli.terminal import line
from prefixkit.cli.views import branches, plant, show_report
from prefixkit.engine.memory import check_fits, pages_needed
from prefixkit.engine.request import Request, Sample
from prefixkit.engine.sharing_report import Report
from prefixkit.evaluation.campaign.folder import RunFolder, check_place, create
from prefixkit.evaluation.campaign.run import Goal, Progress, record_of, run_campaign
from prefixkit.evaluation.judge import Judge, available
from prefixkit.evaluation.tasks.encode import uses_chat
from prefixkit.evaluation.tasks.source import Source, load
from prefixkit.kv.budget import Budget
from prefixkit.kv.device_memory import free_for
from prefixkit.kv.limits import parse_size, session_pages
from prefixkit.models import patched_facts
from prefixkit.models.families import text_config
from prefixkit.models.tensor_parallel import agreement_of
from prefixkit.models.weights.model_fingerprint import model_fingerprint
from prefixkit.sampling.params import SamplingParams
from prefixkit.session.requests import requests_for
from prefixkit.session.session import Session
from prefixkit.tree.pages import check_page_size
from prefixkit.tree.radix import PrefixTree

# Samples at once without --in-flight: enough to keep a device at work; a killed process loses no more than these.
IN_FLIGHT = {"cpu": 128, "cuda": 1024}


def run_sample(source: Source, params: SamplingParams, settings: Settings, console: Console) -> None:
    """Sample and write; checks that need no model run before it is loaded, and nothing is written before all checks."""
    _check(settings)
    problems = load(source, settings.prompting)
    if settings.tensor_parallel:
        check_processes(settings.device)
    device, why = choose_device(settings.device)
    if settings.compiled and device == "cpu":
        raise ValueError("--compiled is for GPUs, and the device is the CPU; leave it out, or give --device cuda")
    if settings.revision is not None and (settings.model == DEMO or Path(settings.model).is_dir()):
        raise ValueError(f"--revision {settings.revision}: {settings.model} is no model of the hub's; leave it out")
    with at_work():
        location = resolve(settings.model, console)
    tokenizer = load_tokenizer(location, settings.revision)
    chat = uses_chat(tokenizer, settings.chat)
    asked = prompted(tokenizer, problems, params, chat)
    _goal(asked, settings)
    if settings.round is not None:
        available()
    if settings.run is not None and not check_place(settings.run):
        known = RunFolder(settings.run).manifest  # finds differences that need no weights before these are loaded
        manifest = manifest_of(asked, params, settings, tokenizer, chat)
        known.check_same(manifest, str(settings.run), ("tokenizer", "chat", "params", "logprobs", "prompts"))
    model = load_model(
        location, settings.dtype, device, settings.revision, split=settings.tensor_parallel, kv_dtype=settings.kv_dtype
    )
    why = f"split over {agreement_of(model).processes} processes" if settings.tensor_parallel else why
    sample_prompted(model, tokenizer, asked, params, settings, chat, console, why)


def sample_prompted(
    model: Any,
    tokenizer: Any,
    asked: Sequence[Prompted],
    params: SamplingParams,
    settings: Settings,
    chat: bool,
    console: Console,
    why: str = "",
) -> RunFolder | None:
    """Sample what is missing with a loaded model; returns the run folder, if there is one.

    Of processes that share the model the first does this, and the others run the same steps as the first.

    Args:
        why: A line about the device, shown once nothing can be refused any more.
    """
    manifest, goal = manifest_of(asked, params, settings, tokenizer, chat), _goal(asked, settings)
    _check_stops(model, params)
    prompts, each = [one.tokens for one in asked], [one.params for one in asked]
    requests = requests_for(SamplingParams, patched_facts(model), tokenizer, prompts, each, {})
    with _open_session(model, tokenizer, requests, settings) as session, _helped(session) as first:
        stops = requests[0].params.stop_token_ids or ()
        fingerprint = "" if settings.run is None else model_fingerprint(model, stops)
        if not first:
            _help(session)
            return None
        if settings.run is None:
            _say(why, settings, console)
            _to_standard_output(session, requests, asked, settings, console)
            return None
        manifest = replace(manifest, fingerprint=fingerprint, dtype=_dtypes(model, settings))
        with at_work(OSError):
            folder = create(settings.run, manifest, [one.asked for one in asked])
        tree, _ = plant([one.tokens for one in asked], [str(one.asked.problem.id) for one in asked])
        with at_work():
            folder.keep_tree(branches(tree, tokenizer.decode, max(one.params.n for one in asked)))
        _say(why, settings, console)
        with ExitStack() as stack:
            judge = None if goal.round is None else stack.enter_context(open_judge(settings.quiet))
            sample_into(folder, session, requests, goal, settings, console, judge)
    return folder


@contextmanager
def _helped(session: Session) -> Iterator[bool]:
    """Whether this is the first of the processes that share the model; its exit from the block ends the others."""
    agreement = agreement_of(session.model)
    yield not agreement.rank
    if not agreement.rank:
        agreement.first(None)


def _help(session: Session) -> None:
    """Run the requests that the first process runs, until it ends."""
    while (wanted := agreement_of(session.model).first(None)) is not None:
        session.run(wanted, return_samples=False, on_sample=lambda sample: None)


def _run(session: Session, wanted: list[Request], give: Callable[[Sample], None], meter: Meter) -> Report:
    """Run requests here and in the processes that share the model; each process gets every token."""
    own = agreement_of(session.model).first(wanted)
    return session.run(own, return_samples=False, on_sample=give, on_step=meter.count_tokens).report


def _say(text: str, settings: Settings, console: Console) -> None:
    if text and not settings.quiet:
        console.print(line(text), soft_wrap=True)


def sample_on_devices(devices: str, source: Source, settings: Settings, console: Console) -> None:
    """Run a process for each device, with its part of the samples."""
    _check(settings)
    for wrong, why in (
        (settings.run is None, "processes share a run folder; give --run FOLDER"),
        (settings.compiled and "cpu" in devices, "--compiled is for GPUs; leave it out"),
        (settings.part.of > 1, "--shard divides the samples already; give one of the two"),
        (settings.tensor_parallel, "--tensor-parallel has processes of its own; give one of the two"),
        (settings.device != "auto", f"--device {settings.device} names another; give one of the two"),
        (str(source.input) == "-", "processes cannot share standard input; give --input a file"),
    ):
        if wrong:
            raise ValueError(f"--devices {devices}: {why}")
    names = parse_devices(devices)
    for name in names:
        check_device(name, option="--devices")
    run_on_devices(names, sys.argv[1:], console)


def sample_into(
    folder: RunFolder,
    session: Session,
    requests: Sequence[Request],
    goal: Goal,
    settings: Settings,
    console: Console,
    judge: Judge | None = None,
) -> None:
    """Sample what a run folder lacks, under a progress bar; a judge finds the solved problems after each round."""
    meter = Meter(console, settings.quiet, lambda: _condition(session))

    def begin(progress: Progress) -> None:
        meter.expect(progress.there, progress.wanted, max(one.params.max_new_tokens for one in requests))

    def sampler(wanted: list[Request], give: Callable[[Sample], None]) -> Report:
        return _run(session, wanted, give, meter)

    params = [one.params for one in requests if isinstance(one.params, SamplingParams)]
    solved = None if judge is None else solved_of(folder, goal.part, judge, settings.quiet, console)
    note = {"argv": shlex.join(sys.argv[1:]), "versions": versions(), "device": str(session.model.device)}
    with at_work(), meter:
        try:
            progress = run_campaign(
                folder,
                [one.tokens for one in requests],
                params,
                goal,
                sampler,
                solved=solved,
                on_begin=begin,
                on_sample=lambda sample: meter.count_sample(len(sample.tokens)),
                under_way=lambda: session.report,
                **note,
            )
        except KeyboardInterrupt:
            raise Interrupted(
                f"{meter.done:,} of {meter.wanted:,} samples had finished; they are in {folder.path}, and the same "
                "command resumes the run"
            ) from None
    if not settings.quiet:
        total = progress.there + progress.samples
        if progress.samples:
            show_report(progress.report, progress.report.headline, console)
        console.print(
            line(f"{total:,} samples in {folder.path}, {progress.there:,} of them from before"), soft_wrap=True
        )


def _to_standard_output(
    session: Session, requests: Sequence[Request], asked: Sequence[Prompted], settings: Settings, console: Console
) -> None:
    """Write each sample as a line as it finishes."""
    stream, meter = standard_output(), Meter(console, settings.quiet, lambda: _condition(session))
    first = settings.first_index
    wanted = [
        replace(one, indices=range(first, one.params.n))
        for one in requests
        if isinstance(one.params, SamplingParams) and first < one.params.n
    ]

    def finished(sample: Sample) -> None:
        name = asked[sample.prompt_index].asked.problem.id
        write_line(stream, record_of(sample, name, settings.logprobs))
        meter.count_sample(len(sample.tokens))

    with at_work(), meter:
        meter.expect(
            0, sum(len(one.sample_indices) for one in wanted), max(one.params.max_new_tokens for one in wanted)
        )
        try:
            report = _run(session, wanted, finished, meter)
        except KeyboardInterrupt:
            raise Interrupted(f"{meter.done:,} of {meter.wanted:,} samples had finished, every line whole") from None
    if not settings.quiet:
        show_report(report, report.headline, console)


def _condition(session: Session) -> str:
    """Memory in use, and the share of prompt and sampled tokens that were not computed again."""
    report = session.report
    said = f"KV {report.kv_bytes_held_peak / 2**20:,.0f} MiB"
    if report.bytes_per_state:
        said += f" and states {report.state_bytes_held_peak / 2**20:,.0f} MiB"
    if report.tokens_plain_batch > report.tokens_computed:
        said += f", {1 - report.tokens_computed / report.tokens_plain_batch:.0%} shared"
    return said


def _goal(asked: Sequence[Prompted], settings: Settings) -> Goal:
    most = max(one.params.n for one in asked)
    if settings.round is not None and not all(one.asked.problem.tests for one in asked):
        raise ValueError(
            "--stop-when-solved judges candidates, and problems have no tests; give problems that bring some"
        )
    if settings.first_index >= most:
        raise ValueError(
            f"--first-index {settings.first_index} leaves no sample: prompts have at most {most}, with indices from 0; "
            "give a smaller one, or raise -n or a problem's own n"
        )
    return Goal(settings.first_index, [one.params.n for one in asked], settings.part, settings.round)


def _check(settings: Settings) -> None:
    check_page_size(settings.page_size)
    check_dtype(settings.dtype, settings.kv_dtype)
    if settings.kv_budget is not None:
        parse_size(settings.kv_budget, "--kv-budget")
    for name, value, least in (
        ("--first-index", settings.first_index, 0),
        ("--in-flight", settings.in_flight, 1),
        ("--stop-when-solved", settings.round, 1),
    ):
        if value is not None and value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    if settings.run is None:
        if settings.part.of > 1 or settings.round is not None:
            raise ValueError("--shard and --stop-when-solved need a run folder; give --run FOLDER")
        standard_output()


def _dtypes(model: Any, settings: Settings) -> str:
    """The dtypes in which samples are computed, as text."""
    own = str(model.dtype).removeprefix("torch.")
    return own if settings.kv_dtype is None else f"{own}, K and V in {settings.kv_dtype}"


def _check_stops(model: Any, params: SamplingParams) -> None:
    """Refuse stop tokens that the model cannot sample."""
    size = text_config(model).vocab_size
    if strange := [one for one in params.stop_token_ids or () if one >= size]:
        raise ValueError(f"--stop-token-ids {strange[0]}: the model's tokens are from 0 to {size - 1}")


def _open_session(model: Any, tokenizer: Any, requests: Sequence[Request], settings: Settings) -> Session:
    """A session whose pool holds all samples that run at once, within the budget."""
    from prefixkit.models import kv_spec

    spec = kv_spec(model)
    running = settings.in_flight or IN_FLIGHT[spec.device.type]
    budget = None if settings.kv_budget is None else parse_size(settings.kv_budget, "--kv-budget")
    size = settings.page_size
    free = agreement_of(model).least(free_for(spec.shares))
    pages = min(session_pages(spec, budget, size, free), max(1, pages_needed(requests, size, running)))
    check_fits(requests, Budget(PrefixTree(pages, size), spec.bytes_per_token, [], bool(spec.states)))
    return Session(
        model,
        tokenizer,
        kv_budget=budget if spec.states else pages * size * spec.bytes_per_token,  # states use memory left by KV
        page_size=size,
        compiled=settings.compiled,
        most_running=running,
    )
