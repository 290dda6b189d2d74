"""Which exceptions become one line, and which stay a traceback."""

from __future__ import annotations

import errno
import io
import os

import numpy as np
import pytest
import torch
from rich.console import Console

from prefixkit.cli.errors import FAILED, REFUSED, at_work, reported


def said(error: BaseException, code: int = FAILED) -> str:
    console = Console(file=io.StringIO(), width=500)
    with pytest.raises(SystemExit) as stopped, reported(console):
        raise error
    assert stopped.value.code == code
    shown: str = console.file.getvalue()  # type: ignore[attr-defined]
    return shown


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        MemoryError("Unable to allocate 9.31 TiB"),
        torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
    ],
)
def test_out_of_memory_is_one_line_with_the_remedy(error: Exception) -> None:
    shown = said(error)
    assert shown.startswith("error: out of memory (")
    assert shown.endswith("or a smaller --dtype or model\n")
    assert shown.count("\n") == 1


def test_what_torch_and_numpy_raise_is_known() -> None:
    for allocate in (lambda: torch.empty(2**57, dtype=torch.uint8), lambda: np.empty(2**57, np.uint8)):
        with pytest.raises((RuntimeError, MemoryError)) as caught:
            allocate()
        assert said(caught.value).startswith("error: out of memory (")


def test_a_file_whose_name_says_so_is_not_out_of_memory() -> None:
    shown = said(ValueError("out of memory.jsonl:1: not UTF-8"), REFUSED)
    assert shown == "error: out of memory.jsonl:1: not UTF-8\n"


def test_a_defect_keeps_its_traceback() -> None:
    with pytest.raises(RuntimeError, match="shapes do not match"), reported(Console(file=io.StringIO())):
        raise RuntimeError("shapes do not match")


def test_an_error_at_work_has_another_status_than_a_refusal() -> None:
    assert said(ValueError("what was asked"), REFUSED) == "error: what was asked\n"
    with pytest.raises(SystemExit) as stopped, reported(Console(file=io.StringIO())), at_work():
        raise ValueError("the logits hold NaN")
    assert stopped.value.code == FAILED
