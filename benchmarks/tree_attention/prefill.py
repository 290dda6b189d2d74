"""Prompts: whole, in chunks, and several with a common prefix, against causal SDPA of each sequence; see ``share``."""

from dataclasses import astuple, dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.runner import Row, replay_us
from benchmarks.tree_attention.inputs import Pool, ours, prepare
from benchmarks.tree_attention.rivals import outcome
from benchmarks.tree_attention.workloads import HEAD_DIM, MATMUL_TFLOPS, PAGE, Workload
from prefixkit.testing import named_trees


@dataclass(frozen=True)
class Prompts:
    """``count`` prompts of ``prefix + tokens``, the last ``chunk`` of them queries; the prefix may be cached."""

    name: str
    tokens: int
    chunk: int
    count: int = 1
    prefix: int = 0
    cached: bool = True

    def flops(self, heads: int) -> tuple[float, float]:
        """Flops of the tree, and of the sequences one by one."""

        def pairs(queries: int, length: int) -> float:
            return queries * length - queries * (queries - 1) / 2

        length = self.prefix + self.tokens
        of_tree = self.count * pairs(self.chunk, length) + (0 if self.cached else pairs(self.prefix, self.prefix))
        of_each = self.count * pairs(self.chunk if self.cached else length, length)
        return 4.0 * HEAD_DIM * heads * of_tree, 4.0 * HEAD_DIM * heads * of_each


WHOLE = {f"{tokens >> 10}K": Prompts(f"prompt of {tokens >> 10}K", tokens, tokens) for tokens in (4096, 32768, 131072)}
PROMPTS = [
    *((32, 8, prompt) for prompt in WHOLE.values()),
    *((*heads, WHOLE["32K"]) for heads in ((8, 1), (32, 32))),
    (32, 8, Prompts("8 prompts of 4K", 4096, 4096, count=8)),
    (32, 8, Prompts("2K chunk at the end of 32K", 32768, 2048)),
    (32, 8, Prompts("8K chunk at the end of 128K", 131072, 8192)),
    (32, 8, Prompts("8 x 4K after 32K, cached", 4096, 4096, count=8, prefix=32768)),
    (32, 8, Prompts("8 x 4K after 32K", 4096, 4096, count=8, prefix=32768, cached=False)),
    (32, 8, Prompts("64 x 512 after 8K", 512, 512, count=64, prefix=8192, cached=False)),
    (32, 8, Prompts("16 x 1K after 4K", 1024, 1024, count=16, prefix=4096, cached=False)),
]


def measure(pool: Pool, heads: int, kv_heads: int, prompts: Prompts) -> Row:
    torch.cuda.empty_cache()
    snapshot, queries = named_trees.prompts(*astuple(prompts)[1:])
    inputs = prepare(Workload(prompts.name, heads, kv_heads, snapshot), queries, pool)
    of_tree, of_rivals = prompts.flops(heads)
    row: Row = {"rows": queries.num_rows, "us": round(replay_us(partial(ours, inputs)), 1)}
    # If prompts share a prefix, the aim is a speed-up of the rivals' flops over the tree's.
    row |= {"floor_us": round(of_tree / MATMUL_TFLOPS / 1e6, 2), "share": round(of_rivals / of_tree, 3)}
    row["plan_ms"] = round(inputs.plan_ms, 1)
    expected = _by_sequence(ours(inputs, 0), prompts)[-1]
    q = _by_sequence(inputs.q[0], prompts).transpose(1, 2).contiguous()
    k, v = (_sequences(pages[0], prompts) for pages in (inputs.k, inputs.v))
    rivals = {name: partial(attend, q, k, v, inputs.scale) for name, attend in RIVALS.items()}
    last = {"of": lambda out: out.transpose(1, 2)[-1], "digits": 1}
    row["rivals"] = {name: outcome(lambda run=run: run, expected, 1, **last) for name, run in rivals.items()}
    return row


def _by_sequence(rows: Tensor, prompts: Prompts) -> Tensor:
    """``[count, queries, heads, head size]`` from a tree's rows, the shared ones in each sequence."""
    shared = 0 if prompts.cached else prompts.prefix
    own = rows[shared:].view(prompts.count, prompts.chunk, *rows.shape[1:])
    return torch.cat((rows[:shared].expand(prompts.count, *rows[:shared].shape), own), dim=1)


def _sequences(pages: Tensor, prompts: Prompts) -> Tensor:
    """``[count, kv_heads, length, head size]`` the K or V of each sequence."""
    kv_heads = pages.shape[1]
    assert prompts.prefix % PAGE == 0 and prompts.tokens % PAGE == 0
    shared, own = pages.transpose(0, 1).reshape(kv_heads, -1, HEAD_DIM).tensor_split([prompts.prefix], dim=1)
    each = own.view(kv_heads, prompts.count, prompts.tokens, HEAD_DIM).transpose(0, 1)
    return torch.cat((shared.expand(prompts.count, *shared.shape), each), dim=2)


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float, _: int) -> Tensor:
    """Causal attention, with ends aligned."""
    by_token = (t.transpose(1, 2) for t in (q, k, v))
    sizes = q.shape[2], k.shape[2]
    out = torch.ops.aten._flash_attention_forward(*by_token, None, None, *sizes, 0.0, True, False, scale=scale)[0]
    return out.transpose(1, 2)


def _cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float, _: int) -> Tensor:
    """The same by cuDNN.  Torch's cuDNN aligns beginnings: tokens before the queries are a separate call, merged."""
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    count, heads, queries, _ = q.shape
    before = k.shape[2] - queries
    own = attend(q, k[:, :, before:], v[:, :, before:], None, before > 0, 0.0, True, False, scale=scale)
    if not before:
        return own[0]
    from benchmarks.tree_attention.merge import merge

    past = attend(q, k[:, :, :before], v[:, :, :before], None, True, 0.0, False, False, scale=scale)
    lses = [part[1].view(count, heads, queries) for part in (past, own)]
    merged = merge([past[0], own[0]], lses, [queries, queries], heads)
    return merged.view(count, queries, heads, HEAD_DIM).transpose(1, 2)


RIVALS = {"sdpa_flash": _flash, "sdpa_cudnn": _cudnn}
