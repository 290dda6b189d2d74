"""lm-evaluation-harness over a session: contexts that requests share are computed once.

    python -m prefixkit.integrations.lm_eval run --model prefixkit --model_args pretrained=NAME --tasks hellaswag

is lm-eval's own command line (lm-eval 0.4.13) with the additional model type ``prefixkit``.  In Python,
``lm_eval.simple_evaluate(model=PrefixLM(model, tokenizer=tokenizer), tasks=...)`` takes a loaded model.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    has_bos_prefix,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from tqdm import tqdm

from prefixkit.engine.request import Sample
from prefixkit.models import is_patched, patch
from prefixkit.sampling.params import SamplingParams
from prefixkit.session.prompts import Unpadded
from prefixkit.session.session import Session

Ints = npt.NDArray[np.int32]

log = logging.getLogger("prefixkit")

# Distinct tokens of one call of ``Session.score``: progress is shown, and lm-eval's cache written, after each call.
TOKENS_PER_CALL = 2**15
# The options that a task's ``generation_kwargs`` may set, with the defaults of transformers, which apply if the model's
# ``generation_config`` does not set them either.
_SAMPLING = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
_OFF = {**_SAMPLING, "top_k": 0}  # what None means in ``generation_kwargs``, as in transformers
_WITHOUT_EFFECT = {"use_cache", "do_sample"}  # the temperature decides whether to sample


@dataclass(frozen=True)
class _Scored:
    """A request of ``_loglikelihood_tokens``, cut to the tokens that the model can see.

    Attributes:
        index: Its index among the requests.
        tokens: Ids of the context and then the continuation.
        length: Number of tokens of the context, at least one and fewer than all.
        key: Its key in lm-eval's cache; None for a window of a rolling request.
    """

    index: int
    tokens: Ints
    length: int
    key: tuple[str, str] | None

    @property
    def context(self) -> Ints:
        return self.tokens[: self.length]

    @property
    def continuation(self) -> Ints:
        return self.tokens[self.length :]


@dataclass(frozen=True)
class _Wanted:
    """Generation requests with one text and the same options, which get different samples.

    Attributes:
        indices: Their indices among the requests.
        context, options: The text and the options of the requests.
        tokens: The text's token ids.
        until: Stop strings.
        params: Sampling parameters.
    """

    indices: list[int]
    context: str
    options: dict[str, Any]
    tokens: list[int]
    until: list[str]
    params: SamplingParams


@register_model("prefixkit")
class PrefixLM(HFLM):  # type: ignore[misc]  # lm-eval has no types
    """lm-eval's ``hf`` model, over :meth:`prefixkit.Session.score` and :meth:`prefixkit.Session.stream`.

    Requests run in the lexicographic order of their tokens, in calls of some 32,000 distinct tokens.  ``batch_size`` is
    only the number of rolling windows that are scored at a time.  Log-probabilities are float32, as with
    ``softmax_dtype="float32"``.

    Args:
        pretrained: A name, a folder or a loaded model, which stays patched.
        kv_budget, page_size, compiled: As for :class:`prefixkit.Session`.
        options: Arguments of ``HFLM``.

    Attributes:
        session: The session over the model.

    Raises:
        ValueError: the model is an encoder-decoder model.
        UnsupportedModel: see :func:`prefixkit.patch`.
    """

    def __init__(
        self,
        pretrained: Any,
        *,
        kv_budget: float | str | None = None,
        page_size: int = 16,
        compiled: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(pretrained, **options)
        if self.backend != "causal":
            raise ValueError(
                f"{type(self.model).__name__} is evaluated as {self.backend!r}, and prefixkit runs decoders alone; "
                "use --model hf"
            )
        if not is_patched(self.model):
            patch(self.model)
        self.session = Session(self.model, self.tokenizer, kv_budget=kv_budget, page_size=page_size, compiled=compiled)
        # Token ids by text; filled only during loglikelihood().
        self._encoded = dict[str, Ints]()

    def _detect_batch_size(self, requests: Sequence[Any] | None = None, pos: int = 0) -> int:
        """The number of rolling windows scored at a time with ``batch_size="auto"``; found without trial runs."""
        return int(self.max_batch_size)

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """As in ``HFLM``; one call of the multithreaded tokenizer tokenizes each distinct text once."""
        pairs = [(context, own) for context, own in (request.args for request in requests) if context.strip()]
        texts = [text for context, own in pairs for text in (context.rstrip(), context + own)]
        self._encoded = self._encode(texts, self.tokenizer.decode(self.prefix_token_id))
        try:
            found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm)
            return found
        finally:
            self._encoded = {}

    def _encode(self, texts: Iterable[str], bos: str | None, truncation: bool = False) -> dict[str, Ints]:
        """Token ids by text, as in ``HFLM``: a text that begins with ``bos`` gets no special tokens."""
        distinct, found = [*dict.fromkeys(texts)], dict[str, Ints]()
        for with_bos in (False, True):
            some = [text for text in distinct if has_bos_prefix(text, bos) == with_bos]
            special = False if with_bos else self.add_bos_token
            options = {} if special is None else {"add_special_tokens": special}
            if some:
                ids = self.tokenizer(some, truncation=truncation, return_attention_mask=False, **options)["input_ids"]
                found.update(zip(some, (np.array(each, np.int32) for each in ids), strict=True))
        return found

    def tok_encode(self, string: str, *given: Any, **options: Any) -> list[int] | Ints:
        """As in ``HFLM``; during :meth:`loglikelihood` the array of ids already encoded, which ``HFLM`` slices."""
        known = None if given or options else self._encoded.get(string)
        ids: list[int] | Ints = super().tok_encode(string, *given, **options) if known is None else known
        return ids

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int] | Ints, list[int] | Ints]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """The log-probability of each continuation, and whether greedy decoding gives it.

        Texts longer than the model are cut on the left, as ``HFLM`` cuts them.  ``override_bs`` has no effect: nothing
        is padded.
        """
        found: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        scored = sorted(
            (_Scored(index, *self._cut(context, own), key) for index, (key, context, own) in enumerate(requests)),
            key=lambda one: one.tokens.astype(">i4").tobytes(),  # in the order of the tokens
        )
        bar = self._bar(len(requests), "loglikelihood", disable_tqdm)
        for part in _in_calls(scored):
            groups = [list(group) for _, group in groupby(part, key=lambda one: one.context.tobytes())]
            prompts = [Unpadded(group[0].context.tolist()) for group in groups]
            own = [[Unpadded(one.continuation.tolist()) for one in group] for group in groups]
            with self._autocast():
                scores = self.session.score(prompts, own)
            for one, score in zip(part, chain.from_iterable(scores), strict=True):
                found[one.index] = (score.total, score.is_greedy)
                if one.key is not None:  # rolling requests are cached as a whole
                    self.cache_hook.add_partial("loglikelihood", one.key, found[one.index])
            bar.update(len(part))
        bar.close()
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """A text for each request, sampled with its ``generation_kwargs`` and cut before the first stop string.

        Equal requests get different samples.  Their seed is torch's, which lm-eval sets (``--seed``).

        Raises:
            ValueError: ``generation_kwargs`` set options that sessions do not have, or leave no room for the context.
        """
        found = [""] * len(requests)
        wanted = self._wanted([request.args for request in requests])
        bar = self._bar(len(requests), "generate_until", disable_tqdm)
        with self._autocast():
            for sample in self._samples(wanted):
                one = wanted[sample.prompt_index]
                index = one.indices[sample.index]
                found[index] = self._text(sample.tokens, one.until)
                self.cache_hook.add_partial("generate_until", (one.context, one.options), found[index])
                bar.update(1)
        bar.close()
        return found

    def _samples(self, wanted: list[_Wanted]) -> Iterator[Sample]:
        if not wanted:
            return iter(())
        return self.session.stream([Unpadded(one.tokens) for one in wanted], [one.params for one in wanted])

    def _cut(self, context: list[int] | Ints, continuation: list[int] | Ints) -> tuple[Ints, int]:
        """The tokens that the model can see, and how many of them belong to the context."""
        if not 0 < len(continuation) <= self.max_length or not len(context):
            raise ValueError(
                f"a context of {len(context)} tokens with a continuation of {len(continuation)} cannot be scored: the "
                f"first needs at least one, the second one to {self.max_length}; raise max_length, or mend the task"
            )
        context = context[-(self.max_length + 1 - len(continuation)) :]
        return np.concatenate((context, continuation), dtype=np.int32), len(context)

    def _wanted(self, given: Sequence[tuple[str, dict[str, Any]]]) -> list[_Wanted]:
        alike = defaultdict[tuple[str, str], list[int]](list)
        for index, (context, options) in enumerate(given):
            alike[context, json.dumps(options, sort_keys=True, default=repr)].append(index)
        bos = getattr(self.tokenizer, "bos_token", None)
        encoded = self._encode([context for context, _ in given], bos, bool(self.truncation))
        firsts = [(indices, *given[indices[0]]) for indices in alike.values()]
        return [self._one_wanted(indices, context, encoded[context], options) for indices, context, options in firsts]

    def _one_wanted(self, indices: list[int], context: str, ids: Ints, given: dict[str, Any]) -> _Wanted:
        options: dict[str, Any] = dict(normalize_gen_kwargs(given, self.max_gen_toks))
        eos = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        until = [text for text in handle_stop_sequences(options.pop("until"), eos=eos) if text]
        most = options.pop("max_gen_toks")
        if most >= self.max_length:
            raise ValueError(
                f"max_gen_toks={most} leaves no room for a context in the model's {self.max_length} tokens; ask for "
                "fewer, or raise max_length"
            )
        if len(ids) > (room := self.max_length - most):
            log.warning("a context of %d tokens is cut on the left to the %d that leave room", len(ids), room)
        tokens = ids[-room:].tolist()
        if (length := options.pop("max_length", None)) is not None:
            most = max(1, length - len(tokens))
        params = SamplingParams(
            n=len(indices),
            max_new_tokens=most,
            seed=torch.initial_seed() % 2**64,
            stop=tuple(until),
            **self._sampling(options),
        )
        return _Wanted(indices, context, given, tokens, until, params)

    def _sampling(self, options: dict[str, Any]) -> dict[str, Any]:
        """Fields of SamplingParams, from normalised generation options and the model's generation config."""
        asked = {name: _OFF.get(name) if value is None else value for name, value in options.items()}
        asked = {name: value for name, value in asked.items() if value is not None and name not in _WITHOUT_EFFECT}
        if asked.get("num_beams") == 1:
            del asked["num_beams"]
        if unknown := sorted(asked.keys() - _SAMPLING.keys()):
            raise ValueError(
                f"generation_kwargs set {unknown[0]}={asked[unknown[0]]!r}, which sessions do not have; they have "
                f"do_sample, until, max_gen_toks and {', '.join(_SAMPLING)}: leave it out, or use --model hf"
            )
        config = getattr(self.model, "generation_config", None)
        configured = {name: getattr(config, name, None) for name in _SAMPLING}
        known = {name: value for name, value in configured.items() if value is not None}
        fields = {**_SAMPLING, **known, **asked}
        if not options["do_sample"]:
            fields = {"temperature": 0.0, "repetition_penalty": fields["repetition_penalty"]}
        return fields

    def _text(self, tokens: list[int], until: list[str]) -> str:
        """The text of a sample as ``HFLM`` cuts it: without the thinking part, up to the first stop string."""
        end = self.think_end_token
        if isinstance(end, int) and end in tokens:
            tokens = tokens[len(tokens) - tokens[::-1].index(end) :]
        text = self.tok_decode(tokens)
        if isinstance(end, int):
            text = text.lstrip()
        cut: str = postprocess_generated_text(text, until, end if isinstance(end, str) else None)
        return cut

    def _autocast(self) -> torch.autocast:
        dtype = self.mixed_precision_dtype
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)

    def _bar(self, total: int, what: str, disable: bool) -> Any:
        return tqdm(total=total, disable=disable or self.rank != 0, desc=f"Running {what} requests")


def _in_calls(scored: Sequence[_Scored]) -> Iterator[list[_Scored]]:
    """Requests in the order of their tokens, cut into calls of some ``TOKENS_PER_CALL`` distinct tokens."""
    part, distinct, before = list[_Scored](), 0, np.empty(0, np.int32)
    for one in scored:
        tokens = one.tokens
        length = min(len(tokens), len(before))
        differ = np.flatnonzero(tokens[:length] != before[:length])
        distinct += len(tokens) - (int(differ[0]) if len(differ) else length)
        if part and distinct > TOKENS_PER_CALL:
            yield part
            part, distinct = [], len(tokens)
        part.append(one)
        before = tokens
    if part:
        yield part


def main() -> None:
    """The command line of lm-eval, with the model type that this module adds."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
