"""A patched model's own ``generate()`` on the tree: its class takes a TreeCache, and makes one where it pays."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from types import MethodType
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from prefixkit.kv.limits import DoesNotFit
from prefixkit.models.attention_class import WRAPPED, forward_below, original_class, subclass
from prefixkit.models.facts import ModelFacts, facts_of
from prefixkit.models.generate.generated_cache import GeneratedCache, generating, use_cache
from prefixkit.models.generate.tree_cache import TreeCache
from prefixkit.models.generate.tree_memory import replays
from prefixkit.models.model_errors import IncompleteStep, UnsupportedModel
from prefixkit.models.model_stores import drop_stores, kind_of, stores_of
from prefixkit.models.probe.passes import random_part
from prefixkit.models.weights.state import adapters_by_row
from prefixkit.tree.rows import distinct_tokens

log = logging.getLogger("prefixkit")

Mode = Literal["auto", "always", "never"]
MODES = ("auto", "always", "never")
_MODE = "_prefixkit_tree_cache"
# A tree pays from so many prompt tokens on that need not be computed again, if they are this share of all; and from so
# many new tokens on where steps replay CUDA graphs, which are captured once.
_FEWEST_SHARED, _SHARE, _FEWEST_REPLAYED = 32, 0.25, 32
# Arguments of a forward pass that attention over a tree understands, and those that change nothing it does.
_UNDERSTOOD = {"self", "input_ids", "attention_mask", "position_ids", "past_key_values", "logits_to_keep", "use_cache"}
_UNDERSTOOD |= {"cache_position", "return_dict", "num_items_in_batch"}
# What generate() needs for itself, and passes on to models that do not ask for it.
_OF_GENERATE = {"tokenizer", "assistant_tokenizer"}
# The kind of each token, which processors give: of text it is 0.
_KINDS = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
_REQUESTS = ("output_attentions", "output_hidden_states", "output_router_logits")


class NotOnTree(ValueError):
    """A call of a model cannot run on a tree."""


class FedAgain(NotOnTree):
    """Tokens do not go on from those in the cache, as those of a prompt that is given with its own cache."""


@functools.cache
def generating_class(original: type[nn.Module]) -> type[nn.Module]:
    """The subclass of a model's class that takes tree caches; always the same for one original."""
    signature = inspect.signature(original.forward)

    @functools.wraps(original.forward)
    def forward(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        cache = next((one for one in (*args, *kwargs.values()) if isinstance(one, TreeCache)), None)
        whole = forward_below(self)
        if cache is None:
            return whole(*args, **kwargs)
        given = signature.bind(self, *args, **kwargs).arguments
        for name, parameter in signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                given |= given.pop(name, {})
        return _forward(self, cache, given, whole)

    def prepare_cache(
        self: Any,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Let transformers make a cache, and put a tree cache in its place where a tree may pay."""
        before, beams = model_kwargs.get("past_key_values"), generation_config.num_beams or 1
        arguments = generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        done = inherited(self, *arguments, *args, **kwargs)
        made, mode = model_kwargs.get("past_key_values"), self.__dict__.get(_MODE, "auto")
        rows = max(beams, generation_config.num_return_sequences or 1) * batch_size
        wanted = mode == "always" or (
            mode == "auto" and (rows > 1 or self.device.type == "cuda" or len(stores_of(self)))
        )
        plain = before is None and generation_config.cache_implementation in (None, "dynamic")
        if wanted and plain and made is not None and not isinstance(made, TreeCache):
            if type(made) is not DynamicCache:
                log.info("generate() keeps transformers' own cache: it made a %s", type(made).__name__)
            elif _takes_caches(self):
                made = model_kwargs["past_key_values"] = GeneratedCache(self, made, mode == "always")
            else:
                log.info("generate() keeps transformers' own cache: the model's forward was replaced after the patch")
        if isinstance(made, TreeCache):
            use_cache(made)
            made.flush()  # what is given for the first step is checked
            if isinstance(made, GeneratedCache) and not made.fell_back and made.of_another_kind():
                log.info("generate() keeps transformers' own cache: the model's KV has another dtype or device now")
                made.fall_back()
            made.fork, made.final_length = beams > 1, max_cache_length
        return done

    @functools.wraps(original.generate)  # type: ignore[attr-defined]
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        with generating():
            return original.generate(self, *args, **kwargs)  # type: ignore[attr-defined]

    inherited: Callable[..., Any] = original._prepare_cache_for_generation  # type: ignore[attr-defined]
    methods: dict[str, Callable[..., Any]] = {"forward": forward, "generate": generate}
    methods["_prepare_cache_for_generation"] = prepare_cache
    return subclass(original, _blank, methods)


def _blank(original: type[nn.Module]) -> nn.Module:
    cls = generating_class(original)  # type: ignore[arg-type]  # classes hash
    return cls.__new__(cls)


def generates(model: nn.Module) -> bool:
    """Whether a model has a ``generate`` of transformers."""
    return issubclass(original_class(model), GenerationMixin)


def set_mode(model: nn.Module, mode: Mode) -> None:
    """Say when ``generate`` is to make a tree cache, from now on with no KV of before."""
    model.__dict__[_MODE] = mode
    drop_stores(model)


def wrap_forward(model: nn.Module) -> None:
    """Get before a forward that the model itself was given, as by accelerate for mixed precision."""
    forward = model.__dict__.get("forward")
    if forward is not None and not _takes_caches(model):
        model.__dict__[WRAPPED] = forward
        model.__dict__["forward"] = MethodType(type(model).forward, model)


def _takes_caches(model: nn.Module) -> bool:
    """Whether a call of the model comes to the forward of its patched class."""
    held = "_old_forward" if "_hf_hook" in model.__dict__ else "forward"
    ours, forward = type(model).forward, model.__dict__.get(held, type(model).forward)
    while forward is not None:
        if getattr(forward, "__func__", forward) is ours:
            return True
        forward = getattr(forward, "__wrapped__", None) or getattr(forward, "func", None)
    return False


def drop_mode(model: nn.Module) -> None:
    """Leave no trace of :func:`set_mode` and :func:`wrap_forward`."""
    model.__dict__.pop(_MODE, None)
    if (wrapped := model.__dict__.pop(WRAPPED, None)) is not None:
        model.__dict__["forward"] = wrapped
    drop_stores(model, all_traces=True)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _forward(model: PreTrainedModel, cache: TreeCache, given: dict[str, Any], whole: Callable[..., Any]) -> Any:
    """A forward pass of a padded batch over the tree of its rows."""
    given.pop("self")
    if isinstance(cache, GeneratedCache) and cache.fell_back:
        return whole(**given | {"past_key_values": cache.fallback})
    began = not cache.get_seq_length()
    try:
        with cache.in_use:
            logits = _logits(model, cache, given)
    except (NotOnTree, DoesNotFit, UnsupportedModel, IncompleteStep) as error:
        if isinstance(error, FedAgain):
            cache = GeneratedCache.of(cache)
        elif not isinstance(cache, GeneratedCache) or (isinstance(error, IncompleteStep) and not began):
            raise
        log.info("generate() keeps transformers' own cache: %s", error)
        if began:
            cache.reset()
        return whole(**given | {"past_key_values": cache.fall_back()})
    out = CausalLMOutputWithPast(logits=logits.to(cache.memory.dtype), past_key_values=cache)
    returns = given.get("return_dict")
    return out if returns or (returns is None and getattr(model.config, "return_dict", True)) else out.to_tuple()


def _logits(model: PreTrainedModel, cache: TreeCache, given: dict[str, Any]) -> Tensor:
    """``[rows, kept, vocab]``.

    Raises:
        NotOnTree, DoesNotFit: nothing has changed.
        ValueError: the attention mask would bring padding back, which was never computed.
    """
    if cache.model is not model:
        raise NotOnTree(f"the cache belongs to another {type(cache.model).__name__}; make one for this model")
    tokens, keep = _checked(model, given), given.get("logits_to_keep", 0)
    count = min(keep, tokens.shape[1]) or tokens.shape[1]
    mask, positions, length = given.get("attention_mask"), given.get("position_ids"), cache.get_seq_length()
    until = length + tokens.shape[1]
    if not length:
        pad, facts = _padding(mask, tokens), facts_of(model)
        _check_positions(positions is not None or facts.counts_from_zero, positions, pad, 0, until)
        own = tokens.cpu().numpy()
        if own.min() < 0 or own.max() >= 2**31:
            raise NotOnTree("input_ids holds numbers that are no token ids")
        own = own.astype(np.int32)
        if isinstance(cache, GeneratedCache) and not cache.always:
            _check_it_pays(cache, facts, own, pad)
        if adapters_by_row(facts.state):
            raise NotOnTree("PEFT's adapter_names gives rows adapters of their own, and rows share their tokens")
        steps = cache.start(facts, own, pad)
        try:
            _check_model(cache, given, until)
            return steps.compute(count)
        except KeyboardInterrupt:
            cache.abandon()
            raise
        except BaseException:
            cache.reset()
            raise
    if len(tokens) != cache.batch_size:
        raise NotOnTree(f"input_ids has {len(tokens)} rows, and the cache {cache.batch_size}")
    if mask is not None and tuple(mask.shape) != (len(tokens), until):
        raise FedAgain(
            f"the attention mask has shape {tuple(mask.shape)}, but {length} tokens of {len(tokens)} rows are in the "
            f"cache and {tokens.shape[1]} are to come"
        )
    if mask is not None and cache.repeats:  # what is before was checked when the first of these steps came
        pad = cache.padding if bool(mask[:, length:].all()) else np.full(len(tokens), until)
    else:
        pad = _padding(mask, tokens)
    if (pad < cache.padding).any():
        raise ValueError(
            "the attention mask lets rows see their padding, which was masked when the cache was filled and so never "
            "computed; pass the same attention_mask, continued by ones"
        )
    if (pad != cache.padding).any():
        raise NotOnTree("the attention mask hides other tokens than those that were hidden when the cache was filled")
    _check_positions(cache.memory.counts_from_zero, positions, pad, length, until)
    _check_model(cache, given, until)
    return cache.go_on(tokens, count)


def _checked(model: PreTrainedModel, given: dict[str, Any]) -> Tensor:
    """The token ids of a forward pass.

    Raises:
        NotOnTree: it asks for more than logits after tokens, or could not be the same twice.
    """
    tokens, keep = given.get("input_ids"), given.get("logits_to_keep", 0)
    if given.get("inputs_embeds") is not None or not isinstance(tokens, Tensor):
        raise NotOnTree("rows are given as embeddings, and a tree is one of token ids")
    if tokens.ndim != 2 or not tokens.numel() or tokens.is_floating_point():
        raise NotOnTree(f"input_ids are {tokens.dtype} {tuple(tokens.shape)}, not token ids [rows, length]")
    if not isinstance(keep, int) or keep < 0:
        raise NotOnTree(f"logits_to_keep={keep!r} is no number of last tokens")
    for name in _REQUESTS:
        wanted = given.get(name)
        if wanted or (wanted is None and getattr(model.config, name, False)):
            raise NotOnTree(f"{name} is asked for, which there are none of for rows whose tokens are computed once")
    for name, value in given.items():
        if name not in _UNDERSTOOD and not _changes_nothing(model, name, value, tokens):
            raise NotOnTree(f"attention over a tree would ignore {name}")
    if given.get("use_cache") is False:
        raise NotOnTree("use_cache is False")
    if torch.is_grad_enabled() and any(one.requires_grad for one in model.parameters()):
        raise NotOnTree("attention over a tree has no backward; call the model under torch.no_grad()")
    if model.training:
        if model.is_gradient_checkpointing:
            raise NotOnTree("the model is in training mode with gradient checkpointing, which drops the cache")
        if (dropout := random_part(model)) is not None:
            raise NotOnTree(f"the model is in training mode, where {dropout} is random; call model.eval() first")
    return tokens


def _changes_nothing(model: PreTrainedModel, name: str, value: Any, tokens: Tensor) -> bool:
    """Whether an argument asks for nothing that a tree does not do, or is of kinds for :func:`_check_model`."""
    if value is None or value is False or (isinstance(value, (dict, list, tuple)) and not value):
        return True
    if name in _KINDS:
        return isinstance(value, Tensor) and value.ndim == 2 and len(value) == len(tokens) and not bool(value.any())
    unasked = name in _OF_GENERATE and name not in inspect.signature(original_class(model).forward).parameters
    return unasked or (name == "is_causal" and value is True)


def _check_model(cache: TreeCache, given: dict[str, Any], until: int) -> None:
    """Raise NotOnTree where chunks of attention are not causal over the rows, or token kinds of 0 change results."""
    memory = cache.memory
    if memory.longest is not None and (own := until - int(cache.padding.min())) > memory.longest:
        raise NotOnTree(f"a row comes to {own} tokens, and attention in chunks is causal for {memory.longest}")
    for name in _KINDS:
        kinds = given.get(name)  # of all tokens, or of the new ones
        whole = None if kinds is None else {until: True, given["input_ids"].shape[1]: False}.get(kinds.shape[1])
        if kinds is not None and (whole is None or not memory.ignores_zeros(name, whole)):
            raise NotOnTree(f"attention over a tree would ignore {name}, and zeros change what the model computes")


def _padding(mask: Any, tokens: Tensor) -> NDArray[np.int64]:
    """``[rows]`` tokens of padding before each row."""
    rows = len(tokens)
    if mask is None:
        return np.zeros(rows, np.int64)
    if not isinstance(mask, Tensor) or mask.ndim != 2 or len(mask) != rows or mask.shape[1] < tokens.shape[1]:
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise NotOnTree(f"the attention mask is {shape}, not [rows, length] beside ids of {tuple(tokens.shape)}")
    there = (mask != 0).cpu().numpy()
    pad: NDArray[np.int64] = there.argmax(1).astype(np.int64)
    if not there[:, -1].all() or (there.sum(1) != there.shape[1] - pad).any():
        raise NotOnTree("the attention mask has holes, or padding on the right; pad on the left")
    return pad


def _check_positions(counts_from_zero: bool, position_ids: Any, pad: NDArray[np.int64], begin: int, end: int) -> None:
    """Raise NotOnTree unless positions, of images as of text, count the tokens after the padding."""
    if position_ids is None:
        if pad.any():
            raise NotOnTree("rows are padded, but there are no position_ids, without which padding counts as text")
        if not counts_from_zero:
            raise NotOnTree("there are no position_ids, and without them the model counts from elsewhere than 0")
        return
    wrong = FedAgain if begin else NotOnTree
    given = position_ids.cpu().numpy() if isinstance(position_ids, Tensor) else np.empty((0, 0))
    expected = np.arange(begin, end) - pad[:, None]
    if given.ndim not in (2, 3) or given.shape[-1] != end - begin or given.shape[-2] not in (1, len(pad)):
        raise wrong(f"position_ids has shape {given.shape}, not {expected.shape}")
    if (np.where(expected < 0, 0, given - expected) != 0).any():
        raise wrong("position_ids do not count the tokens of each row from its first")


def _check_it_pays(cache: TreeCache, facts: ModelFacts, tokens: NDArray[np.int32], pad: NDArray[np.int64]) -> None:
    """Raise NotOnTree where rows share too little, and their steps are too few or cannot replay graphs."""
    if cache.final_length - tokens.shape[1] >= _FEWEST_REPLAYED and replays(facts):
        return
    total, distinct = distinct_tokens(tokens, pad)
    distinct -= stores_of(cache.model).known(kind_of(facts, cache.page_size), tokens[0, pad[0] :])
    if total - distinct < max(_FEWEST_SHARED, _SHARE * total):
        raise NotOnTree(f"of {total} prompt tokens only {total - distinct} are shared, which does not pay")
