"""The public verbs: sample or search many continuations of many prompts, sharing what the prompts share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Unpack

from prefixkit.engine.frozen_heap import frozen_heap
from prefixkit.engine.request import BeamFields, BeamParams, Request, Sample, TokenEvent
from prefixkit.engine.scoring.contexts import continued
from prefixkit.engine.scoring.score import Score
from prefixkit.engine.sharing_report import Report
from prefixkit.models import ModelFacts, patched_facts
from prefixkit.sampling.params import SamplingFields, SamplingParams
from prefixkit.session.assembly import make_engine
from prefixkit.session.call_results import Result, call_of
from prefixkit.session.requests import Prompts, is_one_prompt, requests_for, scored_tokens, text_requests


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
    return_samples: bool = True,
    on_sample: Callable[[Sample], None] | None = None,
    on_token: Callable[[TokenEvent], None] | None = None,
    on_step: Callable[[int], None] | None = None,
    **fields: Unpack[SamplingFields],
) -> Result:
    """Sample ``n`` continuations of each prompt.

    What the prompts share is found token by token, computed once, stored once and read once per step.

    A sample's random numbers depend on four things only: the tokens of its prompt, how many equal prompts precede
    that one in ``prompts`` (its occurrence, so that equal prompts get different samples), its seed, and its index.
    They do not depend on the other prompts, ``kv_budget``, ``page_size`` or ``prefill_chunk``.  The sample's logits do
    depend on these through rounding: matrix products of different shapes add in different orders.  In float32 a token
    changes only if its random number is so close to the boundary between two tokens that rounding decides, which is
    rare under a filter.  In bfloat16 and float16 this is common, and most longer samples differ from some token on:
    only an equal call gives equal samples.

    The call uses the end-of-sequence tokens of the model's ``generation_config`` and, unless ``params`` or a field sets
    them, its repetition penalty and stop strings.  Temperature, filters and lengths are those of this call.  A
    ``generation_config`` with another setting that changes samples, such as ``no_repeat_ngram_size`` or ``num_beams``,
    is refused, and the error names the setting.

    Args:
        model: A model that :func:`prefixkit.patch` has patched.
        tokenizer: The model's tokenizer; None if all prompts are token ids: then samples have no text, and stop strings
            are refused.
        prompts: Strings, lists of token ids without padding, or lists of chat messages.  Token ids of one length, in
            several lists or a 2-D array, are refused as padded if one of them begins or ends with the tokenizer's
            padding token, or with two of them if that token has another role too (such as end of text).
        params: Parameters of sampling: one for all prompts, or one per prompt.
        kv_budget: Most memory for KV, in bytes or as a size such as ``"2GiB"``; samples that do not fit at once wait,
            or are preempted and resume later.  None: what the call needs, at most half of the free memory, or on a GPU
            what the largest step leaves free.
        page_size: Tokens per KV page, 1 to 128.
        prefill_chunk: Prompt tokens computed per step at most; None: 1,024 on the CPU, 8,192 on a GPU.
        compiled: On a GPU, run layers through torch.compile: decode steps take a fifth to a third less time, and
            prompts less time too.  Compiling takes some seconds once for each model, and less where torch finds the
            result in its cache on disk.  A call that samples only a few tokens captures no CUDA graph, and compiles
            nothing.
        return_samples: Whether the result holds the samples.  False passes them to ``on_sample`` only, so that memory
            does not grow with the number of finished samples.
        on_sample: Called with each sample as it finishes.
        on_token: Called with a :class:`TokenEvent` for each token as it is sampled, which takes the host some time for
            each token.
        on_step: Called after each step with the number of tokens that it sampled: for progress, at nearly no cost.
        fields: Fields of :class:`SamplingParams`, in place of those of ``params``; ``n`` and ``seed`` may be lists, one
            per prompt, and ``stop`` one string.

    Returns:
        The samples, if ``return_samples``, and a report.  Each sample's ``logprobs`` are those of the model itself,
        before temperature and filters.

    Raises:
        NotPatched: the model is not patched.
        ValueError: a parameter or a prompt is out of range, ``kv_budget`` too small for one sequence, a prompt with its
            new tokens longer than the table of positions that the model has learned, or text is needed and
            ``tokenizer`` is None.
        TypeError: a parameter or a prompt of another type.
    """
    facts = patched_facts(model)
    requests = requests_for(SamplingParams, facts, tokenizer, prompts, params, fields)
    pool = {"kv_budget": kv_budget, "page_size": page_size, "prefill_chunk": prefill_chunk, "compiled": compiled}
    return _run(facts, tokenizer, requests, pool, return_samples, on_sample, on_token, on_step)


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
    """Search for the likeliest continuations of each prompt; beams fork on the tree.

    The sequences and scores are those of transformers' ``generate(num_beams=..., do_sample=False)`` for two beams and
    more; with one, transformers decodes greedily and ignores length penalty and early stopping.  Where neither
    ``params`` nor a field for it is given, these two are those of the ``generation_config``.

    Args:
        model, tokenizer, prompts, kv_budget, page_size, prefill_chunk: As for :func:`generate`.
        params: Parameters of the search: one for all prompts, or one per prompt.
        on_sample: Called with each sequence as its search ends.
        fields: Fields of :class:`BeamParams`, in place of those of ``params``; ``num_beams`` has to be given.

    Returns:
        Samples with ``score`` set, ``index`` 0 being the best, and a report.

    Raises:
        NotPatched: the model is not patched.
        ValueError, TypeError: as for :func:`generate`.
    """
    facts = patched_facts(model)
    requests = requests_for(BeamParams, facts, tokenizer, prompts, params, fields)
    pool = {"kv_budget": kv_budget, "page_size": page_size, "prefill_chunk": prefill_chunk}
    return _run(facts, tokenizer, requests, pool, True, on_sample)


def _run(facts: ModelFacts, tokenizer: Any, requests: list[Request], pool: dict[str, Any], *listeners: Any) -> Result:
    """Run requests over a pool of their own; sizing the pool visits each request, so the heap is frozen before."""
    with frozen_heap(requests):
        engine, call = make_engine(facts, requests, **pool), call_of(facts, tokenizer, requests, *listeners)
        return Result(tuple(engine.run(requests, call)), call.report)


def score(
    model: Any,
    tokenizer: Any,
    prompts: Prompts,
    continuations: Sequence[Any],
    *,
    kv_budget: float | str | None = None,
    page_size: int = 16,
    prefill_chunk: int | None = None,
) -> list[Score] | list[list[Score]]:
    """Score given continuations: the model's own log-probability of each of their tokens.

    Every token that prompts and continuations share is computed once, common beginnings of continuations too.  The last
    token of a continuation is not computed, because its logits are not needed.

    Args:
        model, tokenizer, kv_budget, page_size, prefill_chunk: As for :func:`generate`.
        prompts: One prompt (a string, a 1-D array or list of token ids, or a list of chat messages), or a list of
            prompts, or a 2-D array of token ids.
        continuations: A list of continuations, each a string or a list of token ids, for the one prompt or for every
            prompt.  For a list of prompts it may also be a list of such lists, one for each prompt; it is taken as such
            if none of its elements is a continuation itself.  A string's own tokens, without special ones, follow the
            prompt's.  Tokens are not merged across the boundary, so a word's leading space belongs to the continuation.

    Returns:
        A :class:`Score` for each continuation of the one prompt; for a list of prompts a list of these for each prompt,
        even of a single one.

    Raises:
        NotPatched: the model is not patched.
        KVBudgetTooSmall: a prompt with one of its continuations does not fit ``kv_budget``; nothing was computed.
        ValueError: there is no prompt or no continuation, or one is empty or padded; a token is outside the vocabulary;
            text is given without a tokenizer; the number of lists differs from the number of prompts; or the model's
            logits are not finite.
        TypeError: something that is no prompt or no continuation.
    """
    facts, one = patched_facts(model), is_one_prompt(prompts)
    asked = scored_tokens(facts, tokenizer, [prompts] if one else prompts, continuations, one)
    engine = make_engine(
        facts,
        text_requests([text.tokens for text in continued(*asked)]),
        kv_budget=kv_budget,
        page_size=page_size,
        prefill_chunk=prefill_chunk,
        graphs=False,
        scores=True,
    )
    scores = engine.score(*asked, facts.vocab_size, Report())
    return scores[0] if one else scores
