"""``digest`` by our kernel."""

from __future__ import annotations

from torch import Tensor

from prefixkit.backends.cuda import layouts
from prefixkit.backends.cuda.kernels import DIGEST, digest_name
from prefixkit.cuda import jit
from prefixkit.cuda.launch import launch

_THREADS, _AHEAD = 256, 8  # of digest.cu
BLOCKS = 1024  # the most of a launch: they keep every GPU busy


def digest(words: Tensor, start: int, total: Tensor) -> None:
    """``digest``; the op has checked its arguments."""
    count = len(words)
    blocks = min(BLOCKS, -(-count // (_THREADS * _AHEAD)))
    if not blocks:
        return
    function = jit.load(DIGEST, words.device.index)[digest_name(words.itemsize)]
    values = words.data_ptr(), total.data_ptr(), start, count, blocks
    what = f"digest on {words.device}: {count} words of {words.itemsize} bytes"
    launch(layouts.DIGEST.check(function), layouts.DIGEST, values, (blocks, 1, 1), _THREADS, 0, what.__str__)
