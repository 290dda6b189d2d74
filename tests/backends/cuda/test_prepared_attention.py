"""What a launch of attention demands of pages before anything runs; no GPU needed."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cuda.bindings.driver")

from prefixkit.backends.cuda.prepared_attention import prepare_attention
from prefixkit.ops.arguments import FP8, BadShape
from tests.fake_gpu import pretend


@pytest.mark.parametrize("further", [1, 2, 8])
def test_pages_in_e4m3_begin_at_multiples_of_16_bytes(further: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also at an odd byte, where no word of 16 bits begins."""
    pretend(monkeypatch, (9, 0))
    memory = torch.zeros(4 * 16 * 2 * 64 + 16, dtype=torch.uint8)
    pages = memory[further : further + 4 * 16 * 2 * 64].view(FP8).view(4, 16, 2, 64)
    q, positions = torch.zeros(1, 2, 64, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(BadShape, match="pages must begin at multiples of 16 bytes; make them with KVPool"):
        prepare_attention(q, pages, pages, None, positions, "causal", None)
