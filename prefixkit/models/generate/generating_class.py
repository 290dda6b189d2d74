"""The class of a patched model: its ``generate()`` makes tree caches, and its ``forward`` accepts them."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, Literal

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from prefixkit.agreement import everywhere
from prefixkit.models.attention_class import WRAPPED, forward_below
from prefixkit.models.bound_forwards import subclass
from prefixkit.models.generate.forward import forward_on_tree
from prefixkit.models.generate.in_use import generating, note, use
from prefixkit.models.generate.tree_cache import TreeCache
from prefixkit.models.model_stores import drop_stores, stores_of
from prefixkit.models.requirements import CACHE
from prefixkit.models.states.taken_cache import cache_keyword, empty_cache

log = logging.getLogger("prefixkit")

Mode = Literal["auto", "always", "never"]
MODES = ("auto", "always", "never")
_SEED = "call torch.manual_seed with one number in each of them before generate()"
ONLY = "only"  # if layers apply variants, which need a tree: a call that cannot run on a tree raises an error
_MODE = "_prefixkit_tree_cache"


@functools.cache
def generating_class(original: type[nn.Module]) -> type[nn.Module]:
    """The subclass of a model's class that accepts tree caches; one subclass per original class."""
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
        return forward_on_tree(self, cache, given, whole)

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
        """Let transformers make a cache, and replace it by a tree cache if a tree may pay."""
        keyword = CACHE if CACHE == "cache" else cache_keyword(self)
        before, beams = model_kwargs.get(keyword), generation_config.num_beams or 1
        arguments = generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        done = inherited(self, *arguments, *args, **kwargs)
        made, mode = model_kwargs.get(keyword), self.__dict__.get(_MODE, "auto")
        rows = max(beams, generation_config.num_return_sequences or 1) * batch_size
        wanted = mode in ("always", ONLY) or (
            mode == "auto" and (rows > 1 or self.device.type == "cuda" or len(stores_of(self)))
        )
        agreement = stores_of(self).agreement
        wanted = everywhere(agreement, bool(wanted))
        if wanted and generation_config.do_sample:
            agreement.check("states of torch's generator", partial(_random_state, self.device), _SEED)
        if made is None and before is None and generation_config.use_cache and generation_mode is not None:
            made = empty_cache(self)  # for a model that makes its cache later
        plain = before is None and generation_config.cache_implementation in (None, "dynamic")
        if wanted and not plain and not isinstance(before, TreeCache):
            given = f"a {type(before).__name__} is given" if before is not None else None
            asked = given or f"cache_implementation={generation_config.cache_implementation!r} is asked for"
            log.info("generate() keeps transformers' own cache: %s", asked)
        elif wanted and not generation_config.use_cache:
            log.info("generate() keeps transformers' own cache: use_cache=False is asked for")
        elif wanted and made is not None and not isinstance(made, TreeCache):
            if type(made) is not DynamicCache and type(made) is not type(empty_cache(self)):
                log.info("generate() keeps transformers' own cache: it made a %s", type(made).__name__)
            elif _accepts_caches(self):
                tree = TreeCache(self)
                tree.fallback, tree.always = None if mode == ONLY else made, mode != "auto"
                made = model_kwargs[keyword] = tree
                note(tree)
            else:
                log.info("generate() keeps transformers' own cache: the model's forward was replaced after the patch")
        if isinstance(made, TreeCache):
            use(made.in_use)
            made.flush()  # the arguments of the first step are checked
            if made.fallback is not None and not made.fell_back and made.of_another_kind():
                log.info("generate() keeps transformers' own cache: the model's KV has another dtype or device now")
                made.fall_back()
            made.fork, made.final_length = beams > 1, max_cache_length
        return done

    @functools.wraps(original.generate)  # type: ignore[attr-defined]
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        with generating() as made:
            out = original.generate(self, *args, **kwargs)  # type: ignore[attr-defined]
            if isinstance(out, torch.Tensor):  # no cache is returned; as it is collected, Ctrl-C would be lost
                for cache in made:
                    cache.reset()
            return out

    inherited: Callable[..., Any] = original._prepare_cache_for_generation  # type: ignore[attr-defined]
    methods: dict[str, Callable[..., Any]] = {"forward": forward, "generate": generate}
    methods["_prepare_cache_for_generation"] = prepare_cache
    return subclass(original, generating_class, methods)


def _random_state(device: torch.device) -> torch.Tensor:
    """The state of torch's generator, on which the tokens that ``generate()`` samples on a device depend."""
    return torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)


def set_mode(model: nn.Module, mode: Mode, applies: bool) -> None:
    """Set when ``generate`` makes a tree cache, and drop the KV retained so far; ``applies``: whether layers apply
    variants of attention.
    """
    model.__dict__[_MODE] = ONLY if applies and mode != "never" else mode
    drop_stores(model)


def wrap_forward(model: nn.Module) -> None:
    """Wrap a ``forward`` that was set on the model itself, as by accelerate for mixed precision."""
    forward = model.__dict__.get("forward")
    if forward is not None and not _accepts_caches(model):
        model.__dict__[WRAPPED] = forward
        model.__dict__["forward"] = MethodType(type(model).forward, model)


def _accepts_caches(model: nn.Module) -> bool:
    """Whether a call of the model reaches the ``forward`` of its patched class."""
    held = "_old_forward" if "_hf_hook" in model.__dict__ else "forward"
    ours, forward = type(model).forward, model.__dict__.get(held, type(model).forward)
    while forward is not None:
        if getattr(forward, "__func__", forward) is ours:
            return True
        forward = getattr(forward, "__wrapped__", None) or getattr(forward, "func", None)
    return False


def drop_mode(model: nn.Module) -> None:
    """Undo :func:`set_mode` and :func:`wrap_forward`, and leave no trace of them."""
    model.__dict__.pop(_MODE, None)
    if (wrapped := model.__dict__.pop(WRAPPED, None)) is not None:
        model.__dict__["forward"] = wrapped
    drop_stores(model, all_traces=True)
