"""What is in a CUDA graph of a decode step: the tree grows, the model runs, the next tokens are sampled."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from prefixkit.attention.step import Step
from prefixkit.runners.batch import Sampling
from prefixkit.runners.capture import Capture, Captured, GraphOutput
from prefixkit.runners.capture_errors import first_line, is_about_capture, reason_of
from prefixkit.runners.graph_arrays import CannotCapture, GraphArrays
from prefixkit.runners.sampler import top_tokens

# Graphs give at least this many of the likeliest tokens, if any.
_FEWEST_TOP = 16


def capture_step(
    capture: Capture, model: Callable[[Step], Tensor], arrays: GraphArrays, output: GraphOutput, step: Step
) -> Captured:
    """Capture a step over the static buffers.

    Raises:
        CannotCapture: the step does what no graph can hold.
        RuntimeError: there is no memory for it, or the device has failed.
    """
    arrays.ring.allocate_top(arrays.most_top(output.top))
    captured = Captured()

    def run() -> None:
        if output.uploads_batch:
            arrays.enqueue_copy(step.num_rows)
        arrays.tree.advance(step.num_rows)
        logits = model(step)
        if not output.samples:
            captured.logits = logits
            return
        sampled = arrays.sampler.sample(logits)
        if output.top:
            arrays.ring.copy(*sampled, top_tokens(logits, output.top, sampled[1]))

    try:
        captured.graph = capture(run)
    except RuntimeError as error:
        reason = reason_of(error)
        if is_about_capture(reason):
            raise CannotCapture(f"a step cannot be captured in a CUDA graph: {first_line(reason)}") from error
        raise reason from None  # out of memory, or broken
    return captured


def output_for(sampling: Sampling | None) -> GraphOutput:
    """What a graph gives where tokens are sampled in this way; a graph serves several numbers of likeliest tokens."""
    if sampling is None or sampling.process is not None:
        return GraphOutput(samples=False, uploads_batch=sampling is not None)
    top = max(_FEWEST_TOP, 1 << (sampling.top - 1).bit_length()) if sampling.top else 0
    return GraphOutput(samples=True, top=top, uploads_batch=top > 0)
