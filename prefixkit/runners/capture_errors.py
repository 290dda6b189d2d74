"""Classification of errors of a CUDA graph capture: the step cannot be captured, memory ran out, or the GPU faulted.

A step that cannot be captured runs without a graph.  A fault of the GPU (an illegal address, a failed launch, a
device-side assert) leaves the GPU unusable for the process, so it must be reported as a fault.
"""

from __future__ import annotations

import torch

# Error numbers of the CUDA runtime; the driver has the same.
_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
_NOT_SUPPORTED = 801  # cudaErrorNotSupported: work that a stream can run but a graph cannot hold
_CAPTURE = range(900, 909)  # cudaErrorStreamCaptureUnsupported to cudaErrorStreamCaptureWrongThread


def reason_of(error: BaseException) -> BaseException:
    """The error to report for one that ended a capture: a fault in its chain, else a lack of memory, else itself.

    The end of a failed capture raises an error of its own, so the reason may be its cause or context.
    """
    chain = list[BaseException]()
    one: BaseException | None = error
    while one is not None:
        chain.append(one)
        one = one.__cause__ or one.__context__
    faults, memory = filter(_is_fault, chain), filter(is_out_of_memory, chain)
    return next(faults, None) or next(memory, None) or error


def is_about_capture(error: BaseException) -> bool:
    """Whether an error says that the work cannot be captured: CUDA's own errors do, and torch's refusals."""
    # The message of each of these errors contains "capture" or "capturing".
    code, text = _code(error), first_line(error).lower()
    if code is not None:
        return code in _CAPTURE or code == _NOT_SUPPORTED
    return "captur" in text or (_is_of_cuda(error) and ("not supported" in text or "not_supported" in text))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the memory of a GPU, or pinned memory, ran out."""
    if isinstance(error, torch.OutOfMemoryError) or _code(error) == _OUT_OF_MEMORY:
        return True
    text = first_line(error).lower()
    return _is_of_cuda(error) and any(words in text for words in ("out of memory", "out_of_memory", "alloc_failed"))


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its type."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _is_fault(error: BaseException) -> bool:
    return _is_of_cuda(error) and not is_out_of_memory(error) and not is_about_capture(error)


def _is_of_cuda(error: BaseException) -> bool:
    text = str(error)
    return isinstance(error, torch.AcceleratorError) or "CUDA error:" in text or "CUDA_ERROR_" in text


def _code(error: BaseException) -> int | None:
    """The CUDA error number, if torch reports it."""
    code = getattr(error, "error_code", None)
    return code if isinstance(code, int) else None
