"""A forward pass of a patched model over the tree of its rows, or the reason why it cannot run on a tree."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import ModelOutput

from prefixkit.kv.kv_pool import KVPoolTooLarge
from prefixkit.kv.limits import DoesNotFit
from prefixkit.models.attention_class import argument_names
from prefixkit.models.facts import ModelFacts, facts_of
from prefixkit.models.generate.tree_cache import TreeCache
from prefixkit.models.model_calls import random_part
from prefixkit.models.model_errors import IncompleteStep, UnsupportedModel
from prefixkit.models.model_stores import kind_of, stores_of
from prefixkit.models.requirements import CACHE, CACHE_KEYWORDS
from prefixkit.models.states.taken_cache import cache_keyword, has_attention
from prefixkit.models.steps.step_runner import planners_of, plannings_of
from prefixkit.models.weights.state import adapters_by_row
from prefixkit.tree.rows import distinct_tokens

log = logging.getLogger("prefixkit")

# A tree pays if at least this many prompt tokens, and at least this share of all, need not be computed again; and from
# this number of new tokens on if steps replay CUDA graphs, which are captured once.
_FEWEST_SHARED, _SHARE, _FEWEST_REPLAYED = 32, 0.25, 32
# Arguments of a forward pass that attention over a tree supports, and those that do not affect it.
_UNDERSTOOD = {"input_ids", "attention_mask", "position_ids", "logits_to_keep", "use_cache"}
_UNDERSTOOD |= {"cache_position", "return_dict", "num_items_in_batch"}
# Arguments that generate() itself needs, and passes also to models whose forward does not name them.
_OF_GENERATE = {"tokenizer", "assistant_tokenizer"}
# Names of the kind of each token, which processors return: text has kind 0.
_KINDS = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
_REQUESTS = ("output_attentions", "output_hidden_states", "output_router_logits")


@dataclass
class _OutputWithStates(ModelOutput):
    """The output of a model without attention, before transformers 5.24."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    cache_params: Any = None


class NotOnTree(ValueError):
    """A call of a model cannot run on a tree."""


class FedAgain(NotOnTree):
    """Tokens do not continue those in the cache, as when a prompt is passed again with its own cache."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def forward_on_tree(model: PreTrainedModel, cache: TreeCache, given: dict[str, Any], whole: Callable[..., Any]) -> Any:
    """A forward pass of a padded batch over the tree of its rows."""
    given = {name: value for name, value in given.items() if name not in ("self", *CACHE_KEYWORDS)}
    if cache.fell_back:
        return whole(**given | {cache_keyword(model): cache.fallback})
    began = not cache.get_seq_length()
    try:
        with cache.in_use:
            logits = _logits(model, cache, given)
    except (NotOnTree, DoesNotFit, KVPoolTooLarge, UnsupportedModel, IncompleteStep) as error:
        stays = cache.fallback is None or (isinstance(error, IncompleteStep) and not began)
        if stays and not isinstance(error, FedAgain):
            raise
        log.info("generate() keeps transformers' own cache: %s", error)
        if began:
            cache.reset()
        return whole(**given | {cache_keyword(model): cache.fall_back()})
    logits = logits.to(cache.steps.dtype)
    held: dict[str, Any] = {CACHE: cache}
    out: ModelOutput = CausalLMOutputWithPast(logits=logits, **held)
    if cache_keyword(model) == "cache_params":
        out = _OutputWithStates(logits=logits, cache_params=cache)
    returns = given.get("return_dict")
    return out if returns or (returns is None and getattr(model.config, "return_dict", True)) else out.to_tuple()


def _logits(model: PreTrainedModel, cache: TreeCache, given: dict[str, Any]) -> Tensor:
    """``[rows, kept, vocab]`` logits.

    Raises:
        NotOnTree, DoesNotFit: nothing has changed.
        ValueError: the attention mask shows padding that was masked before, and so was never computed.
        UnsupportedVariant: the KV in the cache was computed under another variant than the model applies now.
    """
    if cache.model is not model:
        raise NotOnTree(f"the cache belongs to another {type(cache.model).__name__}; make one for this model")
    tokens, keep = _checked(model, given), given.get("logits_to_keep", 0)
    count = min(keep, tokens.shape[1]) or tokens.shape[1]
    mask, positions, length = given.get("attention_mask"), given.get("position_ids"), cache.get_seq_length()
    until = length + tokens.shape[1]
    if not length:
        pad, facts = _padding(mask, tokens), facts_of(model)
        _check_positions(facts.counts_from_zero, positions, pad, 0, until)
        own = tokens.cpu().numpy()
        if own.min() < 0 or own.max() >= 2**31:
            raise NotOnTree("input_ids holds numbers that are no token ids")
        own = own.astype(np.int32)
        if not cache.always:
            _check_it_pays(cache, facts, own, pad)
        if adapters_by_row(facts.state):
            raise NotOnTree("PEFT's adapter_names gives rows adapters of their own, and rows share their tokens")
        steps = cache.start(facts, own, pad)
        cache.unplaced = positions is None and bool(pad.any())
        try:
            _check_model(cache, given, until)
            return steps.compute(count)
        except KeyboardInterrupt:
            cache.abandon()
            raise
        except BaseException:
            cache.reset()
            raise
    cache.steps.check_variants()
    if not cache.repeats and cache.steps.loops.changed:
        cache.move()
    if len(tokens) != cache.batch_size:
        raise NotOnTree(f"input_ids has {len(tokens)} rows, and the cache {cache.batch_size}")
    if mask is not None and tuple(mask.shape) != (len(tokens), until):
        raise FedAgain(
            f"the attention mask has shape {tuple(mask.shape)}, but {length} tokens of {len(tokens)} rows are in the "
            f"cache and {tokens.shape[1]} are to come"
        )
    if mask is None and not has_attention(model):
        pad = cache.padding
    elif mask is not None and cache.repeats:  # the first of these steps checked the mask before
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
    if pad.any() and cache.unplaced != (positions is None):
        raise NotOnTree("rows are padded, and position_ids are given for a part of their tokens alone")
    _check_positions(cache.steps.counts_from_zero, positions, pad, length, until)
    _check_model(cache, given, until)
    return cache.go_on(tokens, count)


def _checked(model: PreTrainedModel, given: dict[str, Any]) -> Tensor:
    """The token ids of a forward pass.

    Raises:
        NotOnTree: the call asks for more than logits after tokens, or its result is random.
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
    """Whether a tree may ignore an argument, or :func:`_check_model` checks it, as kinds of tokens that are all 0."""
    if value is None or value is False or (isinstance(value, (dict, list, tuple)) and not value):
        return True
    if name in _KINDS:
        return isinstance(value, Tensor) and value.ndim == 2 and len(value) == len(tokens) and not bool(value.any())
    unasked = name in _OF_GENERATE and name not in argument_names(model)
    return unasked or (name == "is_causal" and value is True)


def _check_model(cache: TreeCache, given: dict[str, Any], until: int) -> None:
    """Raise NotOnTree if padding changes results, or if passing token kinds of 0 does."""
    steps = cache.steps
    if steps.scales_from is not None and cache.padding.any() and until > steps.scales_from:
        raise NotOnTree(f"the model scales queries after {steps.scales_from} tokens, padding counted")
    if cache.padding.any() and steps.compresses:
        raise NotOnTree("rows are padded, and the model compresses padding with the text after it")
    if cache.padding.any() and not steps.keeps_padding_out():
        raise NotOnTree("rows are padded, and the model lets padding into the state that its layers keep")
    if cache.unplaced and cache.padding.any() and not steps.ignores_padding(max(until, cache.final_length)):
        raise NotOnTree("rows are padded, but there are no position_ids, without which padding counts as text")
    for name in _KINDS:
        kinds = given.get(name)  # of all tokens, or of the new ones
        whole = None if kinds is None else {until: True, given["input_ids"].shape[1]: False}.get(kinds.shape[1])
        if kinds is not None and (whole is None or not steps.ignores_zeros(name, whole)):
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
    """Raise NotOnTree unless all positions, including those for images, count the tokens after the padding."""
    if position_ids is None:
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
    """Raise NotOnTree if rows share too little, and their steps are too few or cannot replay CUDA graphs."""
    if cache.final_length - tokens.shape[1] >= _FEWEST_REPLAYED and _replays(facts):
        return
    total, distinct = distinct_tokens(tokens, pad)
    stores = stores_of(cache.model)
    distinct -= stores.agreement.least(stores.known(kind_of(facts, cache.page_size), tokens[0, pad[0] :]))
    if total - distinct < max(_FEWEST_SHARED, _SHARE * total):
        raise NotOnTree(f"of {total} prompt tokens only {total - distinct} are shared, which does not pay")


def _replays(facts: ModelFacts) -> bool:
    """Whether decode steps of a patched model can replay CUDA graphs."""
    return plannings_of(facts, planners_of(facts)) is not None
