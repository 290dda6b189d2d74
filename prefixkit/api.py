"""The public verbs: sample or search many continuations of many prompts, sharing what the prompts share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Unpack

from prefixkit.assembly import make_engine
from prefixkit.engine.request import BeamFields, BeamParams, Sample, TokenEvent
from prefixkit.requests import Prompts, beam_requests, sampling_requests
from prefixkit.sampling.params import SamplingFields, SamplingParams
from prefixkit.session import Result, run


def generate(
    model: Any,
    tokenizer: Any,
    prompts: Prompts,
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    kv_budget: float | str | None = None,
    page_size: int = 16,
    prefill_chunk: int | None = None,
    compiled: bool = False,
    keep: bool = True,
    on_sample: Callable[[Sample], None] | None = None,
    on_token: Callable[[TokenEvent], None] | None = None,
    on_step: Callable[[int], None] | None = None,
    **fields: Unpack[SamplingFields],
) -> Result:
    """Sample ``n`` continuations of each prompt.

    What the prompts share is found token by token, computed once, stored once and read once per step.

    A sample's random numbers depend on four things only: the tokens of its prompt, how many equal prompts stand before
    that one in ``prompts`` (its occurrence, so that equal prompts get different samples), its seed, and its index.
    They do not depend on the other prompts, ``kv_budget``, ``page_size`` or ``prefill_chunk``.  Its logits do, by
    rounding: matrix products of other shapes add in another order.  In float32 a token changes only if its random
    number lies within that rounding, about 1e-6, of the boundary between two tokens.  In bfloat16 and float16 that is
    common, and most longer samples differ from some token on: only an equal call gives equal samples there.

    Of the model's ``generation_config`` the end-of-sequence tokens are used and, where neither ``params`` nor a field
    says one, the repetition penalty.  Temperature and filters are those given here; what else it sets, such as
    ``no_repeat_ngram_size``, is refused by name.

    Args:
        model: A model that :func:`prefixkit.patch` has patched.
        tokenizer: Its tokenizer; None where all prompts are token ids: samples have no text then, and stop strings are
            refused.
        prompts: Strings, lists of token ids without padding, or lists of chat messages.  Token ids of one length, in
            several lists or a 2-D array, are refused as padded if one of them begins or ends with the tokenizer's
            padding token; with two of it, where that token has another role too (such as end of text).
        params: How to sample: one for all prompts, or one per prompt.
        kv_budget: KV to hold at most, in bytes or as a size such as ``"2GiB"``; prompts beyond it wait for others to
            finish. None takes what the run needs, up to half of the memory that is free, on a GPU up to what the
            largest step leaves.
        page_size: Tokens per KV page, 1 to 128.
        prefill_chunk: Prompt tokens computed per step at most; None: 1,024 on the CPU, 8,192 on a GPU.
        compiled: On a GPU, decode through torch.compile: steps are a fifth to a third shorter, after some seconds of
            compiling, once for each model; less where torch finds the result in its cache on disk.
        keep: Whether the result holds the samples.  False gives them to ``on_sample`` only, so that memory does not
            grow with what has finished.
        on_sample: Called with each sample as it finishes.
        on_token: Called with each token as it is sampled, which takes the host some time for each.
        on_step: Called after each step with how many tokens it sampled: for progress, at next to no cost.
        fields: Fields of :class:`SamplingParams`, in place of those of ``params``; ``n`` and ``seed`` may be lists, one
            per prompt, and ``stop`` one string.

    Returns:
        The samples, if they are kept, and a report.  Each sample's ``logprobs`` are those of the model itself, before
        temperature and filters.

    Raises:
        NotPatched: the model is not patched.
        ValueError: a parameter or a prompt is out of range, ``kv_budget`` too small for one sequence, or text is needed
            and ``tokenizer`` is None.
        TypeError: a parameter or a prompt of another type.
    """
    requests = sampling_requests(model, tokenizer, prompts, params, fields)
    engine = make_engine(
        model, requests, kv_budget=kv_budget, page_size=page_size, prefill_chunk=prefill_chunk, compiled=compiled
    )
    engine.listen(keep, on_sample, on_token, on_step)
    return run(engine, model, tokenizer, requests)


def beam_search(
    model: Any,
    tokenizer: Any,
    prompts: Prompts,
    params: BeamParams | Sequence[BeamParams] | None = None,
    *,
    kv_budget: float | str | None = None,
    page_size: int = 16,
    prefill_chunk: int | None = None,
    on_sample: Callable[[Sample], None] | None = None,
    **fields: Unpack[BeamFields],
) -> Result:
    """Search for the likeliest continuations of each prompt; beams fork and go on the tree.

    The sequences and scores are those of transformers' ``generate(num_beams=..., do_sample=False)``.

    Args:
        model, tokenizer, prompts, kv_budget, page_size, prefill_chunk: As for :func:`generate`.
        params: How to search: one for all prompts, or one per prompt.
        on_sample: Called with each sequence as its search ends.
        fields: Fields of :class:`BeamParams`, in place of those of ``params``; ``num_beams`` has to be given.

    Returns:
        Samples with ``score`` set, ``index`` 0 being the best, and a report.

    Raises:
        NotPatched: the model is not patched.
        ValueError, TypeError: as for :func:`generate`.
    """
    requests = beam_requests(model, tokenizer, prompts, params, fields)
    engine = make_engine(model, requests, kv_budget=kv_budget, page_size=page_size, prefill_chunk=prefill_chunk)
    engine.listen(on_sample=on_sample)
    return run(engine, model, tokenizer, requests)
