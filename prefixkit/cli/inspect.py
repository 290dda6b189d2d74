"""``prefixkit inspect``: what prompts share, and what that would save, before anything runs."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console

from prefixkit.cli.loading import check_dtype, empty_model, load_tokenizer, resolve
from prefixkit.cli.prompts import Source, encode_prompts, load_prompts, uses_chat
from prefixkit.cli.report_view import show_report
from prefixkit.cli.savings import estimate, plant
from prefixkit.cli.terminal import line
from prefixkit.cli.tree_view import View, show_tree


@dataclass(frozen=True)
class InspectOptions:
    """Which prompts, and the run that is considered.

    Attributes:
        samples: Samples of each prompt.
        most: Children of a node that are drawn.
    """

    model: str
    source: Source
    samples: int = 1
    max_new_tokens: int = 128
    page_size: int = 16
    chat: bool | None = None
    dtype: str = "auto"
    most: int = 10

    def __post_init__(self) -> None:
        for name, value in (("-n", self.samples), ("--max-new-tokens", self.max_new_tokens), ("--most", self.most)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")


def run_inspect(options: InspectOptions, console: Console) -> None:
    """Draw the tree of the prompts and say what sharing it saves; reads a tokenizer and a config, no weights."""
    from prefixkit.models import kv_spec

    check_dtype(options.dtype)
    prompts = load_prompts(options.source)
    location = resolve(options.model, lambda message: console.print(line(f"{message} …")))
    tokenizer = load_tokenizer(location)
    tokens = encode_prompts(tokenizer, prompts, uses_chat(tokenizer, options.chat))
    forest = plant(tokens, [str(prompt.id) for prompt in prompts], options.page_size)
    snapshot = forest.tree.snapshot()
    total, distinct = snapshot.num_tokens_unshared, snapshot.num_tokens
    title = (
        f"{len(prompts):,} prompts, {total:,} tokens, {distinct:,} of them distinct: "
        f"a token serves {total / max(1, distinct):.1f} prompts"
    )
    view = View(forest.names, tokenizer.decode, options.samples, options.most)
    show_tree(forest.tree, view, title, console)
    bytes_per_token = kv_spec(empty_model(location, options.dtype)).bytes_per_token
    report = estimate(forest.tree, options.samples, options.max_new_tokens, bytes_per_token)
    console.print()
    show_report(report, f"{report.samples:,} samples of {options.max_new_tokens:,} new tokens each, at most", console)
    console.print(line(f"One token's KV takes {bytes_per_token:,} bytes in this model; reads are those of decoding."))
