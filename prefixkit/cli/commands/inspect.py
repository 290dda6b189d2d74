"""``prefixkit inspect``: the tokens that prompts share, and what sharing them would save, before anything runs."""

from __future__ import annotations

from rich.console import Console

from prefixkit.cli.loading import check_dtype, empty_model, load_tokenizer, resolve
from prefixkit.cli.terminal import line
from prefixkit.cli.views import plant, show_report, show_tree
from prefixkit.engine.sharing_report import Report
from prefixkit.evaluation.report.numbers import plural
from prefixkit.evaluation.tasks.encode import encode_all, uses_chat
from prefixkit.evaluation.tasks.prompting import Prompting
from prefixkit.evaluation.tasks.source import Source, load
from prefixkit.tree import PrefixTree
from prefixkit.tree.pages import pages_for


def run_inspect(
    model: str,
    source: Source,
    prompting: Prompting,
    chat: bool | None,
    dtype: str,
    console: Console,
    *,
    samples: int,
    max_new_tokens: int,
    page_size: int,
    most: int,
) -> None:
    """Draw the tree of the prompts and say what sharing it saves; reads a tokenizer and a config, no weights."""
    from prefixkit.models import kv_spec

    for name, value in (("-n", samples), ("--max-new-tokens", max_new_tokens), ("--most", most)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    check_dtype(dtype)
    problems = load(source, prompting)
    location = resolve(model, console)
    tokenizer = load_tokenizer(location)
    encoded = encode_all(tokenizer, problems, uses_chat(tokenizer, chat))
    tree, names = plant(list(encoded.values()), list(map(str, encoded)), page_size)
    snapshot = tree.snapshot()
    total, distinct = snapshot.num_tokens_unshared, snapshot.num_tokens
    title = (
        f"{plural(len(problems), 'prompt')}, {total:,} tokens, {distinct:,} of them distinct: "
        f"a token serves {total / max(1, distinct):.1f} prompts"
    )
    show_tree(tree, names, tokenizer.decode, title, console, samples=samples, most=most)
    spec = kv_spec(empty_model(location, dtype))
    bytes_per_token = spec.bytes_per_token
    report = estimate(tree, samples, max_new_tokens, bytes_per_token, spec.bytes_per_state)
    console.print()
    show_report(report, f"{report.samples:,} samples of {max_new_tokens:,} new tokens each, at most", console)
    console.print(line(f"One token's KV takes {bytes_per_token:,} bytes in this model; reads are those of decoding."))


def estimate(
    tree: PrefixTree, samples: int, max_new_tokens: int, bytes_per_token: int, bytes_per_state: int = 0
) -> Report:
    """The report of a run in which all samples of all prompts run at once, each to ``max_new_tokens``.

    The last token of a sample is never computed; ``bytes_per_token`` is a token's KV over all layers,
    ``bytes_per_state`` a state over all layers that keep one: each sample and each node of the prompts' tree has one.
    """
    snapshot, grown = tree.snapshot(), max_new_tokens - 1
    prompts, distinct = len(snapshot.sequence_id), snapshot.num_tokens
    sequences, prompt_tokens = prompts * samples, snapshot.num_tokens_unshared * samples
    pages = tree.allocator.num_pages - tree.allocator.free + sequences * pages_for(grown, tree.page_size)
    # Of the samples that begin at a node, the first continues in its last page.
    pages -= sum(pages_for(grown, tree.page_size) - node.pages_to_add(grown) for node in tree.nodes() if node.sequences)
    own_reads = sequences * grown * (grown + 1) // 2
    return Report(
        prompts=prompts,
        samples=sequences,
        new_tokens=sequences * max_new_tokens,
        tokens_computed=distinct + sequences * grown,
        tokens_plain_batch=prompt_tokens + sequences * grown,
        kv_bytes_held_peak=pages * tree.page_size * bytes_per_token,
        kv_bytes_unshared_peak=(prompt_tokens + sequences * grown) * bytes_per_token,
        state_bytes_held_peak=(sequences + len(tree.nodes())) * bytes_per_state,
        bytes_per_state=bytes_per_state,
        kv_bytes_read=(distinct * grown + own_reads) * bytes_per_token,
        kv_bytes_read_unshared=(prompt_tokens * grown + own_reads) * bytes_per_token,
    )
