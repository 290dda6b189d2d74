"""What an error of a CUDA graph capture says: that a step cannot be captured, or that something broke.

A step that cannot be captured runs without a graph.  A fault of the GPU (an illegal address, a failed launch, a
device-side assert) leaves the GPU unusable for the process, so it has to be reported as what it is.
"""

from __future__ import annotations

import torch

# Numbers of the CUDA runtime, which are the driver's too.
_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
_NOT_SUPPORTED = 801  # cudaErrorNotSupported: what runs in a stream, but in no graph
_CAPTURE = range(900, 909)  # cudaErrorStreamCaptureUnsupported to cudaErrorStreamCaptureWrongThread


def reason_of(error: BaseException) -> BaseException:
    """What to report of an error that ended a capture: a fault that it followed, else a lack of memory, else itself.

    The end of a failed capture raises an error of its own, so the reason may lie behind it.
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
    # The text of each of them speaks of a capture, or of capturing.
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
    """CUDA's number of an error, where torch tells it."""
    code = getattr(error, "error_code", None)
    return code if isinstance(code, int) else None
