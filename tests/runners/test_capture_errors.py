"""Which errors of a capture let decoding go on without graphs, and which must be seen."""

import pytest
import torch

from prefixkit.runners.capture_errors import first_line, is_about_capture, is_out_of_memory, reason_of

ADVICE = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call.\nCompile with `TORCH_USE_CUDA_DSA`."
)

CANNOT_CAPTURE = [
    (900, "CUDA error: operation not permitted when stream is capturing"),
    (901, "CUDA error: operation failed due to a previous error during capture"),
    (904, "CUDA error: capturing stream has unjoined work"),
    (905, "CUDA error: dependency created on uncaptured work in another stream"),
    (906, "CUDA error: operation would make the legacy stream depend on a capturing blocking stream"),
    (801, "CUDA error: operation not supported"),
]
FAULTS = [
    (700, "CUDA error: an illegal memory access was encountered"),
    (710, "CUDA error: device-side assert triggered"),
    (716, "CUDA error: misaligned address"),
    (719, "CUDA error: unspecified launch failure"),
]


def accelerator_error(code, text):
    error = torch.AcceleratorError(text + ADVICE)
    error.error_code = code
    return error


def forms(code, text):
    """As torch raises it with and without a number, and as it did before there was a type."""
    return accelerator_error(code, text), torch.AcceleratorError(text + ADVICE), RuntimeError(text + ADVICE)


def after(error, end):
    """``end`` as it is raised while ``error`` is on its way, by the end of the capture."""
    try:
        try:
            raise error
        finally:
            raise end
    except RuntimeError as raised:
        return raised


@pytest.mark.parametrize(("code", "text"), CANNOT_CAPTURE)
def test_cuda_says_what_cannot_be_captured(code, text):
    for error in forms(code, text):
        assert is_about_capture(reason_of(error)), error


@pytest.mark.parametrize(
    "text",
    [
        "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned.",
        "Offset increment outside graph capture encountered unexpectedly.",
        "launch of x: CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED (operation not permitted when stream is capturing); 4 rows",
    ],
)
def test_torch_and_our_launches_say_so_too(text):
    assert is_about_capture(reason_of(RuntimeError(text)))


@pytest.mark.parametrize(("code", "text"), FAULTS)
def test_a_fault_is_no_refusal_even_behind_the_end_of_its_capture(code, text):
    for error in forms(code, text):
        for raised in (error, after(error, accelerator_error(*CANNOT_CAPTURE[1]))):
            reason = reason_of(raised)
            assert reason is error
            assert not is_about_capture(reason) and not is_out_of_memory(reason)
            assert first_line(reason) == text


def test_a_fault_found_at_the_end_of_a_capture_is_one():
    fault = accelerator_error(*FAULTS[0])
    assert reason_of(after(accelerator_error(*CANNOT_CAPTURE[0]), fault)) is fault


def test_a_launch_of_ours_that_fails_is_a_fault():
    fault = RuntimeError("launch of tree_attention: CUDA_ERROR_LAUNCH_FAILED (unspecified launch failure); 4 rows")
    assert reason_of(after(fault, accelerator_error(*CANNOT_CAPTURE[1]))) is fault
    assert not is_about_capture(fault)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        accelerator_error(2, "CUDA error: out of memory"),
        RuntimeError("CUDA error: out of memory" + ADVICE),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("launch of plan_tree: CUDA_ERROR_OUT_OF_MEMORY (out of memory); room for 4 nodes"),
    ],
)
def test_a_lack_of_memory_is_found_behind_the_end_of_its_capture(error):
    for raised in (error, after(error, accelerator_error(*CANNOT_CAPTURE[1]))):
        assert reason_of(raised) is error
        assert is_out_of_memory(error)


def test_an_error_of_the_model_is_neither():
    error = RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)")
    assert reason_of(error) is error
    assert not is_about_capture(error) and not is_out_of_memory(error)
