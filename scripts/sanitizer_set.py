"""A little of every kernel, for compute-sanitizer: a hundred times slower than without, so small and without pytest."""

from __future__ import annotations

import numpy as np
import torch

from prefixkit.attention import ops
from prefixkit.attention.formats import Queries

GPU = torch.device("cuda")


def append_copy_merge() -> None:
    for dtype, head_dim in ((torch.bfloat16, 128), (torch.float32, 20), (torch.float16, 3)):
        key, value = (torch.randn(9, 3, head_dim, device=GPU).to(dtype) for _ in "kv")
        k_pages, v_pages = (torch.zeros(4, 3, 5, head_dim, device=GPU, dtype=dtype).transpose(1, 2) for _ in "kv")
        slots = torch.tensor([7, 1, 19, -1, 0, 3, 12, 5, 4], device=GPU)
        torch.ops.prefixkit.kv_append(key, value, k_pages, v_pages, slots)
        torch.ops.prefixkit.kv_copy(
            k_pages, v_pages, torch.tensor([1, 7], device=GPU), torch.tensor([7, 2], device=GPU)
        )
    for head_dim in (128, 6):
        out, lse = torch.randn(7, 3, head_dim, device=GPU), torch.randn(7, 3, device=GPU)
        indptr = torch.tensor([0, 3, 3, 7], dtype=torch.int32, device=GPU)
        torch.ops.prefixkit.merge_states(out, lse, indptr, torch.arange(7, dtype=torch.int32, device=GPU))


def tree_attention() -> None:
    """A chain with a star at its end: wide and narrow items, partial states, a node that begins inside a page."""
    from tests.attention.forests import SHARE_ALL, fill, make_snapshot, plan_of
    from tests.gpu.cases import on_gpu

    for dtype, head_dim, lengths in (
        (torch.bfloat16, 128, [300, 20, 5, 9, 1, 17]),
        (torch.float16, 64, [100, 7, 3, 30, 2, 5]),
    ):
        rng = np.random.default_rng(head_dim)
        snapshot, num_pages = make_snapshot(rng, [-1, 0, 1, 1, 1, 0], lengths, 16)
        last = np.array([2, 3, 4, 5], dtype=np.int32)
        begin = snapshot.length[last] - np.array([1, 1, 1, snapshot.length[5]], dtype=np.int32)
        queries = Queries(last, begin, snapshot.length[last])
        snapshot.ready[last] = begin
        case = fill(rng, snapshot, num_pages, queries, (8, 2, head_dim), dtype)
        call = on_gpu(case, plan_of(case, SHARE_ALL))
        out, lse = torch.ops.prefixkit.tree_attention(*call.arguments())
        assert bool(torch.isfinite(out).all()) and bool(torch.isfinite(lse).all())


def main() -> None:
    assert ops.SCHEMAS
    append_copy_merge()
    tree_attention()
    torch.cuda.synchronize()
    print("ran the sanitizer's set")


if __name__ == "__main__":
    main()
