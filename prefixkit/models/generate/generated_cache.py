"""The cache that ``generate`` makes by itself: a tree, or what transformers would have taken."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partialmethod
from typing import Any, cast

from transformers import Cache, DynamicCache, PreTrainedModel

from prefixkit.models.facts import facts_of
from prefixkit.models.families import text_config
from prefixkit.models.generate.tree_cache import TreeCache
from prefixkit.models.model_errors import UnsupportedModel


class GeneratedCache(TreeCache):
    """What ``generate`` makes by itself: it is a tree for as long as it can be, then the cache that it stands for.

    Args:
        model: The model that generates.
        fallback: The cache that transformers has made.
        always: Whether the tree is used wherever it can be, not only where it pays.

    Attributes:
        fell_back: Whether it has become that cache.
    """

    def __init__(self, model: PreTrainedModel, fallback: Cache, always: bool) -> None:
        super().__init__(model)
        self.fallback, self.always, self.fell_back = fallback, always, False

    @classmethod
    def of(cls, cache: TreeCache) -> GeneratedCache:
        """``cache`` itself, which from now on can become one of transformers."""
        made: Any = cache
        if not isinstance(cache, cls):
            made.__class__, made.fallback = cls, DynamicCache(config=text_config(cache.model))
            made.always, made.fell_back = True, False
        return cast(GeneratedCache, made)

    def fall_back(self) -> Cache:
        """Become the cache of transformers, with the KV that there is."""
        if not self.fell_back:
            self.copy_to(self.fallback)
            self.reset()
            self.fell_back = True
        return self.fallback

    def of_another_kind(self) -> bool:
        """Whether the model now computes KV that the pool does not take."""
        try:
            return self._steps is not None and self._steps.store.pool.spec != facts_of(self.model).spec
        except UnsupportedModel:
            return True

    @property
    def layers(self) -> list[Any]:
        return self.fallback.layers if self.fell_back else super().layers

    @layers.setter
    def layers(self, none: list[Any]) -> None:
        """What the base class would keep."""

    def __deepcopy__(self, memo: dict[int, Any]) -> TreeCache:
        if not self.fell_back and self.get_seq_length():
            return super().__deepcopy__(memo)
        other = self._empty(memo)
        other.fell_back = self.fell_back
        return other

    def _empty(self, memo: dict[int, Any]) -> GeneratedCache:
        return GeneratedCache(self.model, copy.deepcopy(self.fallback, memo), self.always)

    def __reduce__(self) -> tuple[Any, ...]:
        return (copy.copy, (self.fallback,)) if self.fell_back else super().__reduce__()

    def activate_past_recording(self) -> None:
        self.fallback.activate_past_recording()  # type: ignore[no-untyped-call]


_calls = threading.local()


@contextmanager
def generating() -> Iterator[None]:
    """A call of ``generate()``: the caches that it uses stay in their KV stores until its end."""
    outer = getattr(_calls, "uses", None)
    try:
        with ExitStack() as _calls.uses:
            yield
    finally:
        _calls.uses = outer


def use_cache(cache: TreeCache) -> None:
    """The call of ``generate()`` under way, if there is one, uses this cache."""
    if (uses := getattr(_calls, "uses", None)) is not None:
        uses.enter_context(cache.in_use)


def _of_the_present_cache(cache: GeneratedCache, *args: Any, method: str, **kwargs: Any) -> Any:
    return getattr(cache.fallback if cache.fell_back else super(GeneratedCache, cache), method)(*args, **kwargs)


_MOVING = ("reorder_cache", "batch_select_indices", "batch_repeat_interleave", "crop")
for _method in ("get_seq_length", "__len__", *_MOVING):
    setattr(GeneratedCache, _method, partialmethod(_of_the_present_cache, method=_method))
