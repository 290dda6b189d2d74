"""The command line: parsing only.  What a command needs is imported when it runs: ``--help`` waits for no torch.

``sample`` reports on standard error, so that standard output is free for samples.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from prefixkit.cli.errors import reported
from prefixkit.cli.terminal import line, terminal

app = typer.Typer(
    help="Sample many sequences that share prefixes, each shared piece computed, stored and read once.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Model = Annotated[str, typer.Option(help='A model\'s name or folder, or "demo" for SmolLM2-135M-Instruct.')]
Input = Annotated[Path | None, typer.Option(help='JSONL of {"id": ..., "prompt": ...}.', metavar="FILE")]
Task = Annotated[str | None, typer.Option(help="A built-in task instead of --input: humaneval.")]
FewShot = Annotated[int, typer.Option(help="Solved problems of the task to put before each; they are not asked.")]
Limit = Annotated[int | None, typer.Option(help="Only the first so many prompts.")]
Samples = Annotated[int, typer.Option("-n", "--samples", help="Samples of each prompt.")]
MaxNewTokens = Annotated[int, typer.Option(help="Tokens of a sample at most.")]
PageSize = Annotated[int, typer.Option(help="Tokens per KV page, 1 to 128.")]
Chat = Annotated[
    bool | None, typer.Option("--chat/--no-chat", help="Use the chat template.  [default: where there is one]")
]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto: as stored.")]
Seed = Annotated[
    int,
    typer.Option(
        help="With the prompt, its place among equal prompts, and the sample's index, this fixes a sample's random "
        "numbers. In float32 a sample is the same in any batch, but for near-ties within rounding; in bfloat16 and "
        "float16 rounding changes many samples with the batch, and only an equal call gives equal samples."
    ),
]


@app.command()
@reported()
def demo(
    out: Annotated[
        Path, typer.Option(envvar="PREFIXKIT_DEMO_OUT", help="JSONL file for the samples; replaced.", metavar="FILE")
    ] = Path("prefixkit-demo.jsonl"),
    samples: Samples = 8,
    max_new_tokens: MaxNewTokens = 96,
    seed: Seed = 0,
) -> None:
    """Sample programs for four HumanEval problems from SmolLM2-135M (downloads 93 MB on first use)."""
    from prefixkit.cli.demo import run_demo

    run_demo(out, samples, max_new_tokens, seed, terminal())


@app.command()
@reported()
def sample(
    model: Model,
    input: Input = None,
    task: Task = None,
    few_shot: FewShot = 0,
    limit: Limit = None,
    n: Samples = 1,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens that hold this probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep the so many likeliest tokens; 0 keeps all.")] = 0,
    min_p: Annotated[float, typer.Option(help="Keep tokens this likely relative to the likeliest.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="1 is none.")] = 1.0,
    max_new_tokens: MaxNewTokens = 128,
    seed: Seed = 0,
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends a sample; may be given again.")] = None,
    dtype: Dtype = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    compiled: Annotated[
        bool,
        typer.Option("--compiled", help="On a GPU, decode through torch.compile: some seconds first, then faster."),
    ] = False,
    kv_budget: Annotated[
        str | None, typer.Option(help='KV to hold at most, e.g. "2GiB"; prompts beyond it wait.', metavar="SIZE")
    ] = None,
    page_size: PageSize = 16,
    chat: Chat = None,
    logprobs: Annotated[bool, typer.Option("--logprobs", help="Write each token's log-probability too.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="JSONL file for the samples.  [default: standard output]", metavar="FILE")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the file that --out names, when the first sample is there.")
    ] = False,
) -> None:
    """Sample continuations of prompts; each is written as it finishes."""
    from prefixkit.cli.prompts import Source
    from prefixkit.cli.sample import run_sample
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
        stop=tuple(stop or ()),
    )
    run_sample(
        model,
        Source(input, task, few_shot, limit, chat),
        params,
        terminal(stderr=True),
        out=out,
        overwrite=overwrite,
        logprobs=logprobs,
        dtype=dtype,
        device=device,
        kv_budget=kv_budget,
        page_size=page_size,
        compiled=compiled,
    )


@app.command()
@reported()
def inspect(
    model: Model,
    input: Input = None,
    task: Task = None,
    few_shot: FewShot = 0,
    limit: Limit = None,
    n: Samples = 1,
    max_new_tokens: MaxNewTokens = 128,
    page_size: PageSize = 16,
    chat: Chat = None,
    dtype: Dtype = "auto",
    most: Annotated[int, typer.Option(help="Children of a node to draw.")] = 10,
) -> None:
    """Draw what prompts share and say what that would save; loads no weights, runs nothing."""
    from prefixkit.cli.inspect import run_inspect
    from prefixkit.cli.prompts import Source

    source = Source(input, task, few_shot, limit, chat)
    run_inspect(
        model, source, dtype, terminal(), samples=n, max_new_tokens=max_new_tokens, page_size=page_size, most=most
    )


@app.command()
@reported()
def env() -> None:
    """Versions, threads, devices and the backend in use: paste this into a report of a problem."""
    from prefixkit.cli.env import run_env

    run_env(terminal())


@app.command()
@reported()
def warmup(
    arch: Annotated[
        str | None, typer.Option(help="A target such as sm_90a.  [default: the GPUs of this machine]")
    ] = None,
) -> None:
    """Compile the CUDA kernels ahead, so that nothing waits for them later."""
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
    # threads on two busy cores, sampling is 5 to 9 times slower than with threads that sleep.  torch reads it when
    # imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    app()
