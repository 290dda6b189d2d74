"""A little of every kernel, for compute-sanitizer: a hundred times slower than without, so small and without pytest."""

from __future__ import annotations

import torch

from prefixkit.attention import ops

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


def main() -> None:
    assert ops.SCHEMAS
    append_copy_merge()
    torch.cuda.synchronize()
    print("ran the sanitizer's set")


if __name__ == "__main__":
    main()
