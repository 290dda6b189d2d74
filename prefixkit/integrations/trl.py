"""Rollouts of TRL's trainers from a session on the model that trains (TRL 1.16).

>>> from prefixkit.integrations.trl import SessionGRPOTrainer
>>> trainer = SessionGRPOTrainer(model=model, reward_funcs=reward, args=GRPOConfig(...), train_dataset=dataset)

There is no second copy of the weights, and weights need no synchronisation: a session detects changed weights.  The
samples of a prompt share its KV, and the session frees its memory before the update.  :class:`SessionRollouts` is the
mixin for users' own trainer classes; :func:`session_rollouts` makes a ``rollout_func`` for TRL's unchanged
``GRPOTrainer``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from trl import GRPOTrainer, RLOOTrainer
from trl.extras.profiling import profiling_context

from prefixkit.engine.request import Sample
from prefixkit.integrations.trl_importance import corrected, evaluating
from prefixkit.models import is_patched, patch, text_config
from prefixkit.models.tensor_parallel import tp_size
from prefixkit.sampling.params import Logprobs, SamplingParams
from prefixkit.session.prompts import Unpadded
from prefixkit.session.requests import REFUSED_FIELDS, configured
from prefixkit.session.session import Session

log = logging.getLogger("prefixkit")


@dataclass(frozen=True)
class Rollouts:
    """How a trainer's completions are sampled; its config sets temperature, filters and lengths.

    Attributes:
        logprobs: Which log-probabilities of completions the importance correction uses: ``"sampled"``, those after
            temperature, penalty and filters, renormalised, so that the correction is exact; ``"model"``, those before
            the filters, so that the correction covers rounding and a repetition penalty only.
        release_memory: Whether the session frees its memory after each batch of completions, for the update; otherwise
            the pool and CUDA graphs stay, and the next batch starts sooner.
        kv_budget, page_size, compiled: As for :class:`prefixkit.Session`.

    Raises:
        ValueError: ``logprobs`` has another value.
    """

    logprobs: Logprobs = "sampled"
    release_memory: bool = True
    kv_budget: float | str | None = None
    page_size: int = 16
    compiled: bool = False

    def __post_init__(self) -> None:
        if self.logprobs not in ("sampled", "model"):
            raise ValueError(f"logprobs must be 'sampled' or 'model', got {self.logprobs!r}")


class SessionRollouts:
    """A mixin for ``GRPOTrainer`` and ``RLOOTrainer``; it must be the first base class of a trainer.

    Completions come from a session on the trainer's model, which is patched and stays patched.  During sampling modules
    are in evaluation mode, without dropout, as the importance correction requires.

    The correction is TRL's for vLLM, by the fields ``vllm_importance_sampling_correction``, ``_mode``, ``_clip_min``
    and ``_clip_max`` of ``GRPOConfig``: the ratio of the model's probabilities, from a forward pass as in training, to
    those of the rollout.  The advantages are multiplied by the ratio, which is equivalent to TRL's losses; the loss
    "vespo" applies the ratio itself.  ``RLOOConfig`` has no such fields: for RLOO the ratio is that of whole
    completions, and a ratio above 3 counts as 0.

    Args:
        rollouts: Settings of the rollouts; None: ``Rollouts()``.
        given, options: Arguments of the trainer.

    Raises:
        ValueError: the trainer shards its model (DeepSpeed, FSDP) or splits it (tensor parallelism), has a backend of
            its own (vLLM, continuous batching), trains an image-text model, or sets generation options that sessions
            do not have.
        TypeError: ``rollouts`` is not a ``Rollouts``.
        UnsupportedModel: see :func:`prefixkit.patch`.
    """

    def __init__(self, *given: Any, rollouts: Rollouts | None = None, **options: Any) -> None:
        sampler = _Sampler(_as_rollouts(rollouts))
        # TRL's trainers connect to vLLM in their constructor, so check first; their third argument is the config.
        _check_backend(type(self).__name__, options.get("args", given[2] if len(given) > 2 else None))
        super().__init__(*given, **options)
        _check(self)
        self._sampler = sampler
        _params(self, self._sampler.rollouts)  # or raise
        if not is_patched(model := self.model):  # type: ignore[attr-defined]  # the trainer's
            patch(model)
        self._sampled_logps = list[list[float]]()  # of the completions sampled last

    @property
    def session(self) -> Session | None:
        """The session that samples completions; None before the first completions."""
        return self._sampler.session

    def _generate(self, prompts: Any) -> Any:
        """TRL's hook: completions, with tools of several turns, between which the session keeps its memory."""
        try:
            return super()._generate(prompts)  # type: ignore[misc]  # the trainer's
        finally:
            self._sampler.end()

    def _generate_single_turn(
        self, prompt_ids: Any, images: Any, multimodal_fields: Any, *given: Any, **options: Any
    ) -> Any:
        """TRL's hook: one completion for each entry of ``prompt_ids``; for GRPO with log-probabilities."""
        if images is not None:
            raise ValueError("prompts have images, which sessions do not take; train with TRL's own generation")
        ids, self._sampled_logps = self._sampler(self, prompt_ids)
        return (ids, self._sampled_logps) if isinstance(self, GRPOTrainer) else ids

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        """TRL's hook: a batch for the loss, here with corrected advantages."""
        batch = super()._generate_and_score_completions(inputs)  # type: ignore[misc]  # the trainer's
        return corrected(self, batch, self._sampled_logps)


class SessionGRPOTrainer(SessionRollouts, GRPOTrainer):  # type: ignore[misc]  # TRL has no types
    """TRL's ``GRPOTrainer`` with rollouts from a session: see :class:`SessionRollouts`."""


class SessionRLOOTrainer(SessionRollouts, RLOOTrainer):  # type: ignore[misc]
    """TRL's ``RLOOTrainer`` with rollouts from a session: see :class:`SessionRollouts`."""


def session_rollouts(rollouts: Rollouts | None = None) -> Callable[[list[Any], Any], dict[str, Any]]:
    """A ``rollout_func`` for ``GRPOTrainer``: completions from a session on the trainer's model.

    TRL passes such a function one prompt for each completion.  Chat messages go through the tokenizer's template here.
    Images and tools are not supported, and there is no importance correction: TRL uses the log-probabilities of a
    ``rollout_func`` for its off-policy mask only.

    Args:
        rollouts: How completions are sampled; None: ``Rollouts()``.

    Raises:
        TypeError: ``rollouts`` is not a ``Rollouts``.
        ValueError: as for :class:`SessionRollouts`, at the first call.
    """
    sampler = _Sampler(_as_rollouts(rollouts))

    def roll_out(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        _check(trainer)
        ids = [_encoded(trainer, prompt) for prompt in prompts]
        try:
            completions, logprobs = sampler(trainer, ids)
        finally:
            sampler.end()
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": logprobs}

    return roll_out


def _check(trainer: Any) -> None:
    """Raise ValueError, with the remedy, if a session cannot sample a trainer's completions."""
    name = type(trainer).__name__
    for what, there in (("DeepSpeed", trainer.is_deepspeed_enabled), ("FSDP", trainer.is_fsdp_enabled)):
        if there:
            raise ValueError(
                f"{name}: {what} shards the model over processes, and a session needs it whole; train with data "
                "parallelism (DDP), or with TRL's own generation"
            )
    if (processes := tp_size(trainer.model)) > 1:
        raise ValueError(
            f"{name}: the model is split over {processes} processes, which take the same steps, and TRL gives each of "
            "them prompts of its own; train with data parallelism (DDP), or with TRL's own generation"
        )
    _check_backend(name, trainer.args)
    if getattr(trainer, "_is_vlm", False):
        raise ValueError(f"{name}: sessions sample text, and the model takes images; train with TRL's own generation")


def _check_backend(name: str, args: Any) -> None:
    """Raise ValueError if a config selects another generation backend; ``name`` is the trainer's."""
    for field in ("use_vllm", "use_transformers_continuous_batching"):
        if getattr(args, field, False):
            raise ValueError(f"{name}: {field}=True asks for another backend; leave it out")


def _as_rollouts(given: Rollouts | None) -> Rollouts:
    if not isinstance(given, Rollouts | None):
        raise TypeError(f"rollouts must be Rollouts, got {type(given).__name__} {given!r}; pass Rollouts(...), or none")
    return Rollouts() if given is None else given


def _params(trainer: Any, rollouts: Rollouts, seed: int = 0) -> SamplingParams:
    """Sampling parameters from the trainer's generation config."""
    config = trainer.generation_config
    asked = configured(config, " ".join(REFUSED_FIELDS.values()).split())
    if (several := config.num_return_sequences or 1) != 1:  # TRL's list has a prompt once per completion
        asked["num_return_sequences"] = several
    if asked:
        given = ", ".join(f"{name}={value!r}" for name, value in asked.items())
        raise ValueError(
            f"{type(trainer).__name__}: generation_kwargs set {given}, which sessions do not have; leave it out"
        )
    stop, temperature = config.stop_strings or (), config.temperature if config.do_sample else 0.0
    penalty = config.repetition_penalty or 1.0
    # TRL masks what follows its own end-of-sequence tokens, also where generation_kwargs set others.
    own = [config.eos_token_id] if isinstance(config.eos_token_id, int) else config.eos_token_id or []
    vocab = text_config(trainer.model).vocab_size  # the tokenizer's end may be a token that the model lacks
    stops = [token for token in dict.fromkeys((*trainer.eos_token_ids, *own)) if 0 <= token < vocab]
    models = rollouts.logprobs == "model" and temperature == penalty == 1  # equal to the model's, which cost nothing
    return SamplingParams(
        temperature=temperature,
        top_k=config.top_k or 0,
        top_p=1.0 if config.top_p is None else config.top_p,
        min_p=config.min_p or 0.0,
        repetition_penalty=penalty,
        max_new_tokens=config.max_new_tokens,
        seed=seed,
        stop_token_ids=tuple(stops),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        logprobs="model" if models else "sampled",
    )


@dataclass(eq=False)
class _Sampler:
    """Samples completions from a session on the model of a trainer.

    Attributes:
        rollouts: How completions are sampled.
        session: The session; None before the first completions.
    """

    rollouts: Rollouts
    session: Session | None = None

    def __call__(self, trainer: Any, prompt_ids: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[list[float]]]:
        """A completion for each prompt, in order, and its log-probabilities; equal prompts get different completions.

        The seed is drawn from torch's generator, which the trainer seeds for each process and saves in its checkpoints.
        """
        params = _params(trainer, self.rollouts, int(torch.randint(2**63 - 1, ())))
        with profiling_context(trainer, "prefixkit.generate"), evaluating(trainer.model), _autocast(trainer):
            session = self._session(trainer)
            samples = session.generate([Unpadded(ids) for ids in prompt_ids], params)
        return [sample.tokens for sample in samples], [_logprobs(sample, self.rollouts) for sample in samples]

    def end(self) -> None:
        """Release the session's memory, unless the rollouts keep it."""
        if self.session is not None and self.rollouts.release_memory:
            self.session.release_memory()

    def _session(self, trainer: Any) -> Session:
        """The session, with its memory allocated; a new session if the trainer has another model."""
        model, how = trainer.model, self.rollouts
        if self.session is None or self.session.model is not model:
            if not is_patched(model):
                patch(model)
            sizes = {"kv_budget": how.kv_budget, "page_size": how.page_size, "compiled": how.compiled}
            self.session = Session(model, trainer._tokenizer, **sizes)  # type: ignore[arg-type]  # by name
            log.info("%s: completions are sampled by a session on the model that trains", type(trainer).__name__)
        self.session.resume()
        return self.session


def _logprobs(sample: Sample, rollouts: Rollouts) -> list[float]:
    if rollouts.logprobs == "sampled" or sample.masses is None:
        return sample.logprobs
    return [own + math.log(mass) for own, mass in zip(sample.logprobs, sample.masses, strict=True)]


def _encoded(trainer: Any, prompt: Any) -> list[int]:
    """A prompt's token ids; the tokenizer's template formats chat messages."""
    if isinstance(prompt, str):
        return list(trainer.processing_class(prompt)["input_ids"])
    template = {"chat_template": trainer.chat_template, **trainer.chat_template_kwargs}
    made = trainer.processing_class.apply_chat_template(
        prompt, add_generation_prompt=True, tokenize=True, return_dict=True, **template
    )
    return list(made["input_ids"])


@contextmanager
def _autocast(trainer: Any) -> Iterator[None]:
    """Mixed precision as in training, around all work of a session.

    Accelerate's autocast wraps the model's ``forward``, which the session's inspection of the layers does not call.
    That autocast also caches cast weights until it exits, and a CUDA graph would read them after that.
    """
    model, accelerator = trainer.model, trainer.accelerator
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision)
    if dtype is None:
        yield
        return
    wrapped = model.__dict__.get("forward") if hasattr(model, "_original_forward") else None
    if wrapped is not None:
        model.forward = model._original_forward
    kind = accelerator.device.type
    try:
        with torch.autocast(kind, dtype=dtype, cache_enabled=kind == "cpu"):
            yield
    finally:
        if wrapped is not None:
            model.forward = wrapped
