"""What sharing would save, before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prefixkit.engine.report import Report
from prefixkit.tree import PrefixTree


@dataclass(frozen=True)
class Forest:
    """A tree of prompts, and each prompt's sequence in it.

    Attributes:
        tree: The prompts' tokens, each shared one once.
        names: Sequence id to prompt name.
    """

    tree: PrefixTree
    names: dict[int, str]


def plant(prompts: Sequence[Sequence[int]], names: Sequence[str], page_size: int) -> Forest:
    """The tree of some sequences of token ids."""
    tree = PrefixTree(sum(len(prompt) for prompt in prompts), page_size)
    return Forest(tree, {tree.insert(prompt).id: name for prompt, name in zip(prompts, names, strict=True)})


def estimate(tree: PrefixTree, samples: int, max_new_tokens: int, bytes_per_token: int) -> Report:
    """The report of a run in which every sample draws all its tokens, all samples at once.

    Args:
        tree: The prompts.
        samples: Samples of each prompt.
        max_new_tokens: Tokens per sample; the last one drawn is never computed.
        bytes_per_token: KV bytes of a token over all layers.
    """
    snapshot = tree.snapshot()
    prompts = len(snapshot.sequence_id)
    sequences, grown = prompts * samples, max_new_tokens - 1
    prompt_tokens = snapshot.num_tokens_unshared * samples
    pages = tree.allocator.num_pages - tree.allocator.free + sequences * -(-grown // tree.page_size)
    own_reads = sequences * grown * (grown + 1) // 2
    return Report(
        prompts=prompts,
        samples=sequences,
        new_tokens=sequences * max_new_tokens,
        tokens_computed=snapshot.num_tokens + sequences * grown,
        tokens_plain_batch=prompt_tokens + sequences * grown,
        kv_bytes_held_peak=pages * tree.page_size * bytes_per_token,
        kv_bytes_unshared_peak=(prompt_tokens + sequences * grown) * bytes_per_token,
        kv_bytes_read=(snapshot.num_tokens * grown + own_reads) * bytes_per_token,
        kv_bytes_read_unshared=(prompt_tokens * grown + own_reads) * bytes_per_token,
    )
