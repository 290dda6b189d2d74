"""The command line: parsing only.  Each command imports its modules when it runs, so ``--help`` imports no torch.

``sample`` reports on standard error, so that standard output is free for samples.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from prefixkit.cli.errors import Commands, reported
from prefixkit.cli.options import parse_part, parse_token_ids, read_config, unescape
from prefixkit.cli.terminal import line, terminal

app = typer.Typer(
    help="Sample many sequences that share prefixes; shared KV is computed, stored and read once.",
    epilog="Exit status: 0 done, 1 failed at work, 2 asked for what cannot be done (nothing is written), "
    "130 interrupted.",
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"prefixkit {version('prefixkit')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


Model = Annotated[str, typer.Option(help='A model\'s name or folder, or "demo" for SmolLM2-135M-Instruct.')]
Input = Annotated[
    Path | None,
    typer.Option(
        help='JSONL of {"id": ..., "prompt": ...}, or a data set (docs/reference/tasks.md); also .json, .gz, .parquet; '
        "- for standard input.",
        metavar="FILE",
    ),
]
Format = Annotated[str, typer.Option(help="Format of --input: auto, or a data set's name.")]
Language = Annotated[str, typer.Option(help="Programs' language, if --input has none: python or cpp.")]
System = Annotated[str, typer.Option(help="Instructions at the start of every prompt.")]
FewShotFile = Annotated[Path | None, typer.Option(help="Examples before each, in place of --few-shot.", metavar="FILE")]
Prefill = Annotated[bool, typer.Option("--prefill/--no-prefill", help="Keep answers that the data set begins.")]
Task = Annotated[str | None, typer.Option(help="A built-in task instead of --input: humaneval.")]
FewShot = Annotated[
    int, typer.Option(help="Solved problems of the same source shown before each prompt; they are not asked.")
]
Limit = Annotated[int | None, typer.Option(help="Use only this many prompts, the first ones.")]
Samples = Annotated[int, typer.Option("-n", "--samples", help="Samples of each prompt.")]
MaxNewTokens = Annotated[int, typer.Option(help="Most tokens of a sample.")]
PageSize = Annotated[int, typer.Option(help="Tokens per KV page, 1 to 128.")]
Chat = Annotated[
    bool | None, typer.Option("--chat/--no-chat", help="Use the chat template.  [default: if there is one]")
]
Run = Annotated[Path, typer.Argument(help="A run folder.", metavar="RUN")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no report; errors only.")]
Config = Annotated[
    Path | None,
    typer.Option(
        callback=read_config, is_eager=True, help="TOML file of options: max-new-tokens = 512.", metavar="FILE"
    ),
]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto: as stored.")]
KVDtype = Annotated[str | None, typer.Option(help="fp8: pages hold K and V, rounded, in 8 bits.", metavar="DTYPE")]
Seed = Annotated[
    int,
    typer.Option(
        help="With the prompt, its place among equal prompts, and the sample's index, this fixes a sample's random "
        "numbers. In float32 a sample is the same in any batch, except for near-ties within rounding; in bfloat16 and "
        "float16 rounding changes many samples with the batch, and only an equal call gives equal samples."
    ),
]


@app.command()
@reported()
def demo(
    run: Annotated[
        Path, typer.Option(envvar="PREFIXKIT_DEMO_RUN", help="Run folder for the samples.", metavar="FOLDER")
    ] = Path("prefixkit-demo"),
    samples: Samples = 8,
    max_new_tokens: MaxNewTokens = 96,
    seed: Seed = 0,
) -> None:
    """Run a small campaign: SmolLM2-135M writes HumanEval programs, which are judged (downloads 93 MB on first use)."""
    from prefixkit.cli.commands.demo import run_demo

    run_demo(run, samples, max_new_tokens, seed, terminal())


@app.command()
@reported()
def sample(
    model: Model,
    input: Input = None,
    task: Task = None,
    format: Format = "auto",
    language: Language = "python",
    few_shot: FewShot = 0,
    few_shot_file: FewShotFile = None,
    system: System = "",
    prefill: Prefill = True,
    limit: Limit = None,
    n: Samples = 1,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens that hold this probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep this many tokens, the likeliest; 0 keeps all.")] = 0,
    min_p: Annotated[float, typer.Option(help="Keep tokens this likely relative to the likeliest.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Penalty on earlier tokens; 1 is off.")] = 1.0,
    max_new_tokens: MaxNewTokens = 128,
    seed: Seed = 0,
    stop: Annotated[
        list[str] | None,
        typer.Option(help=r"A string that ends a sample, with escapes \n, \t, \xNN, \uNNNN; may be repeated."),
    ] = None,
    stop_token_ids: Annotated[
        str | None, typer.Option(help="Ids that end a sample, comma-separated.  [default: the model's]", metavar="IDS")
    ] = None,
    dtype: Dtype = "auto",
    kv_dtype: KVDtype = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ..., or auto: a free GPU, else the CPU.")] = "auto",
    devices: Annotated[
        str | None, typer.Option(help="Start a process for each, with a part of the samples: 0,1.", metavar="LIST")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a model on the hub.")] = None,
    compiled: Annotated[
        bool,
        typer.Option("--compiled", help="On a GPU, run layers through torch.compile: some seconds first, then faster."),
    ] = False,
    tensor_parallel: Annotated[
        bool,
        typer.Option(
            "--tensor-parallel", help="Split the model over the processes of torchrun, one of which writes samples."
        ),
    ] = False,
    kv_budget: Annotated[
        str | None, typer.Option(help='Most memory for KV, e.g. "2GiB"; prompts that do not fit wait.', metavar="SIZE")
    ] = None,
    page_size: PageSize = 16,
    in_flight: Annotated[
        int | None,
        typer.Option(help="Most samples at once, and most that a kill loses.  [default: 128, on a GPU 1,024]"),
    ] = None,
    chat: Chat = None,
    logprobs: Annotated[bool, typer.Option("--logprobs", help="Write each token's log-probability too.")] = False,
    run: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the samples, made if missing; an existing run is resumed.  "
            "[default: lines on standard output]",
            metavar="FOLDER",
        ),
    ] = None,
    first_index: Annotated[int, typer.Option(help="Omit each prompt's samples before this index, from 0.")] = 0,
    shard: Annotated[str, typer.Option(help="Sample only part I of N, from 0.", metavar="I/N")] = "0/1",
    stop_when_solved: Annotated[
        int | None,
        typer.Option(help="Judge after every K samples of each problem, and stop sampling solved ones.", metavar="K"),
    ] = None,
    quiet: Quiet = False,
    config: Config = None,
) -> None:
    """Sample continuations of prompts; resume a run folder, whatever stopped it."""
    from prefixkit.cli.commands.sample import run_sample, sample_on_devices
    from prefixkit.cli.prompted import Settings
    from prefixkit.evaluation.tasks.prompting import Prompting
    from prefixkit.evaluation.tasks.source import Source
    from prefixkit.sampling.params import SamplingParams

    params = SamplingParams(
        n=n,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        max_new_tokens=max_new_tokens,
        seed=seed,
        stop=tuple(unescape(one, "--stop") for one in stop or ()),
        stop_token_ids=parse_token_ids(stop_token_ids),
    )
    settings = Settings(
        model=model,
        prompting=Prompting(few_shot, few_shot_file, unescape(system, "--system"), prefill),
        chat=chat,
        revision=revision,
        dtype=dtype,
        kv_dtype=kv_dtype,
        device=device,
        run=None if run is None or str(run) == "-" else run,
        first_index=first_index,
        part=parse_part(shard),
        in_flight=in_flight,
        round=stop_when_solved,
        kv_budget=kv_budget,
        page_size=page_size,
        compiled=compiled,
        tensor_parallel=tensor_parallel,
        logprobs=logprobs,
        quiet=quiet,
    )
    source = Source(input, task, format, language, limit)  # type: ignore[arg-type]  # it checks the language
    console = terminal(stderr=True)
    if devices:
        sample_on_devices(devices, source, settings, console)
    else:
        run_sample(source, params, settings, console)


@app.command()
@reported()
def evaluate(
    run: Run,
    jobs: Annotated[int | None, typer.Option(help="Candidates judged at once.  [default: the cores]")] = None,
    unsafe_no_sandbox: Annotated[
        bool,
        typer.Option(
            "--unsafe-no-sandbox",
            help="Run candidates as plain processes with your permissions: they can read and write your files.",
        ),
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Judge the candidates of a run folder that have no verdict yet, in a sandbox (bubblewrap)."""
    from prefixkit.cli.commands.evaluate import run_evaluate

    run_evaluate(run, jobs, unsafe_no_sandbox, quiet, terminal(stderr=True))


@app.command()
@reported()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders; each gets a curve.", metavar="RUN...")],
    out: Annotated[
        Path | None, typer.Option(help="The page; JSON goes beside it.  [default: report.html in the first run]")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Report the results of run folders, in the terminal and as a page that opens offline."""
    from prefixkit.cli.commands.report import run_report

    run_report(runs, out, quiet, terminal())


@app.command()
@reported()
def export(
    run: Run,
    format: Annotated[str, typer.Option(help="human-eval, evalplus, or programs: id, index, program, verdict.")],
    out: Annotated[str, typer.Option(help="JSONL file, which must not exist, or - for standard output.")] = "-",
) -> None:
    """Write the candidates of a run folder in the formats of other tools."""
    from prefixkit.cli.commands.export import run_export

    run_export(run, format, out, terminal(stderr=True))


@app.command()
@reported()
def inspect(
    model: Model,
    input: Input = None,
    task: Task = None,
    format: Format = "auto",
    language: Language = "python",
    few_shot: FewShot = 0,
    few_shot_file: FewShotFile = None,
    system: System = "",
    prefill: Prefill = True,
    limit: Limit = None,
    n: Samples = 1,
    max_new_tokens: MaxNewTokens = 128,
    page_size: PageSize = 16,
    chat: Chat = None,
    dtype: Dtype = "auto",
    most: Annotated[int, typer.Option(help="Most children to draw of a node.")] = 10,
) -> None:
    """Draw what prompts share, and estimate what sharing saves; loads no weights."""
    from prefixkit.cli.commands.inspect import run_inspect
    from prefixkit.evaluation.tasks.prompting import Prompting
    from prefixkit.evaluation.tasks.source import Source

    run_inspect(
        model,
        Source(input, task, format, language, limit),  # type: ignore[arg-type]  # it checks the language
        Prompting(few_shot, few_shot_file, unescape(system, "--system"), prefill),
        chat,
        dtype,
        terminal(),
        samples=n,
        max_new_tokens=max_new_tokens,
        page_size=page_size,
        most=most,
    )


@app.command()
@reported()
def env() -> None:
    """Show versions, threads, devices and the backend in use, for bug reports."""
    from prefixkit.cli.commands.env import run_env

    run_env(terminal())


@app.command()
@reported()
def warmup(
    arch: Annotated[
        str | None, typer.Option(help="A target such as sm_90a.  [default: the GPUs of this machine]")
    ] = None,
) -> None:
    """Compile the CUDA kernels ahead of time, and measure the GPU's costs."""
    from prefixkit.backends.cuda.warmup import measure_costs, targets, warm_up
    from prefixkit.cuda import kernel_cache

    console = terminal()
    for done in warm_up(targets(arch)):
        took = "was there" if done.seconds is None else f"{done.seconds:.1f} s"
        console.print(line(f"{done.arch}  {done.unit}: {took}"))
    console.print(line(f"kept in {kernel_cache.folder()}"))
    if arch is None:
        for cost in measure_costs():
            console.print(line(cost))


def main() -> None:
    """Entry point of the ``prefixkit`` script."""
    # OpenMP threads that spin while they wait starve each other as soon as other work shares the cores: with two
    # threads on two busy cores, sampling is 5 to 9 times slower than with threads that sleep.  torch reads the variable
    # when it is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    app()
