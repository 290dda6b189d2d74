"""The public verbs: sample or search many continuations of many prompts, sharing what the prompts share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

import prefixkit.backends  # noqa: F401 - registers them
from prefixkit.attention.planner import Planner
from prefixkit.attention.sharing import HeadShape
from prefixkit.engine.engine import Engine
from prefixkit.engine.memory import MOST_RUNNING, pool_pages, prefill_chunk_for, step_bytes
from prefixkit.engine.report import Report
from prefixkit.engine.request import BeamParams, Request, Sample, TokenEvent
from prefixkit.engine.stop import special_tokens
from prefixkit.models import ModelRunner, NotPatched, is_patched, kv_spec, query_heads
from prefixkit.models.compile.packed_weights import moves
from prefixkit.ops.backend import backend_for
from prefixkit.ops.kv_pool import KVPool
from prefixkit.prompts import Prompt, encode_prompts, occurrences
from prefixkit.runners.decoder import Decoder
from prefixkit.runners.graph import GraphDecoder
from prefixkit.runners.sampler import sampler_of
from prefixkit.sampling.params import SamplingParams
from prefixkit.tree.radix import PrefixTree

log = logging.getLogger("prefixkit")


@dataclass(frozen=True)
class Result:
    """The samples of a run, if it keeps them, by prompt and then index, and the report of what they shared."""

    samples: tuple[Sample, ...]
    report: Report

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.samples)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]

    def of_prompt(self, prompt_index: int) -> list[Sample]:
        """The samples of one prompt."""
        return [sample for sample in self.samples if sample.prompt_index == prompt_index]


def generate(
    model: Any,
    tokenizer: Any,
    prompts: Prompt | Iterable[Prompt],
    *,
    n: int = 1,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    max_new_tokens: int = 128,
    seed: int | Sequence[int] = 0,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    kv_budget: float | str | None = None,
    page_size: int = 16,
    prefill_chunk: int | None = None,
    compiled: bool = False,
    keep: bool = True,
    on_sample: Callable[[Sample], None] | None = None,
    on_token: Callable[[TokenEvent], None] | None = None,
    on_step: Callable[[int], None] | None = None,
) -> Result:
    """Sample ``n`` continuations of each prompt.

    What the prompts share is found token by token, computed once, stored once and read once per step.

    A sample's random numbers depend on four things only: the tokens of its prompt, how many equal prompts stand before
    that one in ``prompts`` (its occurrence, so that equal prompts get different samples), its seed, and its index.
    They do not depend on the other prompts, ``kv_budget``, ``page_size`` or ``prefill_chunk``.  Its logits do, by
    rounding: matrix products of other shapes add in another order.  In float32 a token changes only if its random
    number lies within that rounding, about 1e-6, of the boundary between two tokens.  In bfloat16 and float16 that is
    common, and most longer samples differ from some token on: only an equal call gives equal samples there.

    Args:
        model: A model that :func:`prefixkit.patch` has patched.
        tokenizer: Its tokenizer; None where all prompts are token ids: samples have no text then, and stop strings are
            refused.
        prompts: Strings, lists of token ids without padding, or lists of chat messages.  Token ids of one length, in
            several lists or a 2-D array, are refused as padded if one of them begins or ends with the tokenizer's
            padding token; with two of it, where that token has another role too (such as end of text).
        n: Samples per prompt.
        temperature: 0 is greedy.
        top_k: 0 keeps all tokens.
        top_p: In (0, 1].
        min_p: In [0, 1).
        repetition_penalty: Over prompt and sampled tokens; 1 is none.
        max_new_tokens: Tokens sampled per sample at most.
        seed: One seed, or one per prompt; 0 to 2**64 - 1.
        stop: Strings that end a sample, left out of its text.  They may be or hold special tokens of the tokenizer,
            such as ``"<|im_end|>"``, which texts leave out.  None: none.
        stop_token_ids: Tokens that end a sample; None takes the model's end-of-sequence tokens.
        kv_budget: KV to hold at most, in bytes or as a size such as ``"2GiB"``; prompts beyond it wait for others to
            finish. None takes what the run needs, up to half of the memory that is free, on a GPU up to what the
            largest step leaves.
        page_size: Tokens per KV page, 1 to 128.
        prefill_chunk: Prompt tokens computed per step at most; None: 1,024 on the CPU, 8,192 on a GPU.
        compiled: On a GPU, decode through torch.compile: steps are a fifth to a third shorter, after some seconds of
            compiling for each bucket of batch sizes.
        keep: Whether the result holds the samples.  False gives them to ``on_sample`` only, so that memory does not
            grow with what has finished.
        on_sample: Called with each sample as it finishes.
        on_token: Called with each token as it is sampled, which takes the host some time for each.
        on_step: Called after each step with how many tokens it sampled: for progress, at next to no cost.

    Returns:
        The samples, if they are kept, and a report.  Each sample's ``logprobs`` are those of the model itself, before
        temperature and filters.

    Raises:
        NotPatched: the model is not patched.
        ValueError: a parameter or a prompt is out of range, ``kv_budget`` too small for one sequence, or text is needed
            and ``tokenizer`` is None.
        TypeError: a parameter or a prompt of another type.
    """
    strings = () if stop is None else (stop,) if isinstance(stop, str) else stop
    if tokenizer is None and strings:
        raise ValueError(
            f"stop strings {strings!r} are looked for in text, but tokenizer is None; "
            "pass the model's tokenizer, or use stop_token_ids"
        )
    if on_sample is None and not keep:
        raise ValueError("keep=False drops every sample; pass on_sample to take them, or leave keep out")
    encoded = _checked_prompts(model, tokenizer, prompts)
    seeds = _seeds(seed, len(encoded))
    stop_ids = _stop_ids(model, tokenizer) if stop_token_ids is None else stop_token_ids
    params = SamplingParams(
        n=n,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        max_new_tokens=max_new_tokens,
        stop_token_ids=stop_ids,  # type: ignore[arg-type]  # made a tuple, or refused, there
        stop=strings,  # type: ignore[arg-type]
    )
    each = zip(encoded, seeds, occurrences(encoded), strict=True)
    requests = [
        Request(index, tokens, replace(params, seed=own), before) for index, (tokens, own, before) in enumerate(each)
    ]
    engine = make_engine(
        model, requests, kv_budget=kv_budget, page_size=page_size, prefill_chunk=prefill_chunk, compiled=compiled
    )
    engine.keep, engine.on_token, engine.on_step = keep, on_token, on_step
    return _run(engine, model, tokenizer, requests, on_sample)


def beam_search(
    model: Any,
    tokenizer: Any,
    prompts: Prompt | Iterable[Prompt],
    *,
    num_beams: int,
    num_return_sequences: int = 1,
    length_penalty: float = 1.0,
    early_stopping: bool | Literal["never"] = False,
    max_new_tokens: int = 128,
    stop_token_ids: Sequence[int] | None = None,
    kv_budget: float | str | None = None,
    page_size: int = 1,
    prefill_chunk: int | None = None,
    on_sample: Callable[[Sample], None] | None = None,
) -> Result:
    """Search for the likeliest continuations of each prompt; beams fork and go on the tree, and no KV is ever copied.

    The sequences and scores are those of transformers' ``generate(num_beams=..., do_sample=False)``.

    Args:
        model: A model that :func:`prefixkit.patch` has patched.
        tokenizer: As for :func:`generate`.
        prompts: As for :func:`generate`.
        num_beams: Beams per prompt.
        num_return_sequences: Sequences to return per prompt, best first.
        length_penalty: Scores are divided by ``length ** length_penalty``.
        early_stopping: True stops at ``num_beams`` finished sequences, False when better ones are unlikely, "never"
            when they are impossible.
        max_new_tokens: Tokens per sequence at most.
        stop_token_ids: Tokens that end a sequence; None takes the model's end-of-sequence tokens.
        kv_budget: KV to hold at most, as for :func:`generate`.
        page_size: Tokens per KV page; 1 wastes nothing where beams fork at every token.
        prefill_chunk: Prompt tokens computed per step at most; None: 1,024 on the CPU, 8,192 on a GPU.
        on_sample: Called with each sequence as its search ends.

    Returns:
        Samples with ``score`` set, ``index`` 0 being the best, and a report.

    Raises:
        NotPatched: the model is not patched.
        ValueError, TypeError: as for :func:`generate`.
    """
    encoded = _checked_prompts(model, tokenizer, prompts)
    stop_ids = _stop_ids(model, tokenizer) if stop_token_ids is None else stop_token_ids
    params = BeamParams(
        num_beams=num_beams,
        num_return_sequences=num_return_sequences,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        max_new_tokens=max_new_tokens,
        stop_token_ids=stop_ids,  # type: ignore[arg-type]  # made a tuple, or refused, there
    )
    requests = [Request(index, tokens, params) for index, tokens in enumerate(encoded)]
    engine = make_engine(model, requests, kv_budget=kv_budget, page_size=page_size, prefill_chunk=prefill_chunk)
    return _run(engine, model, tokenizer, requests, on_sample)


def _run(
    engine: Engine, model: Any, tokenizer: Any, requests: list[Request], on_sample: Callable[[Sample], None] | None
) -> Result:
    _warn_of_length(model, requests)
    if tokenizer is not None:
        engine.decode = lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True))
        if any(isinstance(request.params, SamplingParams) and request.params.stop for request in requests):
            engine.special_tokens = special_tokens(tokenizer, engine.decode)
    engine.on_sample = on_sample
    return Result(tuple(engine.run(requests)), engine.report)


def make_engine(
    model: Any,
    requests: Sequence[Request],
    *,
    kv_budget: float | str | None = None,
    page_size: int = 16,
    prefill_chunk: int | None = None,
    graphs: bool = True,
    compiled: bool = False,
) -> Engine:
    """An engine over a patched model, with a pool that holds what these requests need, within the budget.

    Args:
        model: The patched model.
        requests: What it will be asked.
        kv_budget, page_size, prefill_chunk: See :func:`generate`.
        graphs: Decode by CUDA graphs, where the GPU's kernels run the attention.
        compiled: Layers in these graphs go through torch.compile, which takes seconds for each bucket of batch sizes.
    """
    spec = kv_spec(model)
    chunk = prefill_chunk_for(spec.device) if prefill_chunk is None else prefill_chunk
    workspace = step_bytes(model.config.get_text_config(), spec, requests, chunk)
    num_pages = pool_pages(requests, spec, kv_budget, page_size, workspace)
    pool = KVPool(spec, num_pages, page_size)
    shape = HeadShape(query_heads(model), spec.kv_heads, spec.head_dim, spec.dtype.itemsize)
    tree = PrefixTree(num_pages, page_size)
    backend = backend_for(spec.device)
    planner, runner = backend.planner_for(shape, spec.device, spec.dtype), ModelRunner(model, pool)
    decoder = graph_decoder(runner, planner, page_size, spec.device) if graphs else None
    if compiled and decoder is None:
        log.warning("layers run without torch.compile: there are no CUDA graphs to compile them for")
    elif compiled:  # prompts come in any length, so they keep a runner that compiles nothing
        decoder = graph_decoder(ModelRunner(model, pool, compiled=True), planner, page_size, spec.device, shrink=0.5)
    return Engine(
        runner,
        pool,
        tree,
        planner,
        prefill_chunk=chunk,
        decoder=decoder,
        sampler=sampler_of(spec.device),
        most_running=MOST_RUNNING,
    )


def graph_decoder(
    runner: ModelRunner, planner: Planner, page_size: int, device: torch.device, shrink: float = 1.0
) -> Decoder | None:
    """What decodes by CUDA graphs; None where that cannot be, with a line in the log if it is a GPU."""
    if device.type != "cuda":
        return None
    backend = backend_for(device)
    planning = None if backend.graph_planning is None else backend.graph_planning(planner)
    if planning is None:
        log.info("decoding without CUDA graphs: attention does not run on kernels whose plans this GPU can make")
        return None
    return GraphDecoder(runner.compute, planning, page_size, device, shrink, runner.addresses, moves)


def _checked_prompts(model: Any, tokenizer: Any, prompts: Prompt | Iterable[Prompt]) -> list[NDArray[np.int32]]:
    if not is_patched(model):
        raise NotPatched(f"{type(model).__name__} is not patched; call model = prefixkit.patch(model) first")
    return encode_prompts(tokenizer, prompts, model.config.get_text_config().vocab_size)


def _seeds(seed: Any, count: int) -> list[Any]:
    """The seed of each prompt; what each of them is, ``SamplingParams`` checks."""
    if isinstance(seed, int) or getattr(seed, "ndim", None) == 0:  # arrays and tensors of no dimension are numbers
        return [seed] * count
    if isinstance(seed, str | bytes) or not isinstance(seed, Iterable):
        raise TypeError(f"seed must be one integer or one per prompt, got {type(seed).__name__} {seed!r}")
    seeds = seed.tolist() if hasattr(seed, "tolist") else list(seed)
    if len(seeds) != count:
        raise ValueError(f"seed must be one integer or one per prompt, got {len(seeds)} for {count} prompts")
    return list(seeds)


def _stop_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """The end-of-sequence tokens of the generation config, else the tokenizer's."""
    ids = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = getattr(tokenizer, "eos_token_id", None) if ids is None else ids
    if ids is None:
        return ()
    return (int(ids),) if isinstance(ids, int) else tuple(int(token) for token in ids)


def _warn_of_length(model: Any, requests: Sequence[Request]) -> None:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    longest = max(len(request.tokens) + request.params.max_new_tokens for request in requests)
    if limit is not None and longest > limit:
        log.warning("sequences may reach %d tokens, but the model was made for %d positions", longest, limit)
