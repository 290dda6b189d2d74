"""Methods of a tree cache that run on its fallback cache once the tree cache has fallen back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

Method = TypeVar("Method", bound=Callable[..., Any])


class FallsBack(Protocol):
    """A cache that may fall back to another one."""

    fallback: Any  # the cache to fall back to
    fell_back: bool  # whether it has fallen back


def or_of_fallback(method: Method) -> Method:
    """``method`` of a tree cache; once the cache has fallen back, the fallback's method of that name."""

    @functools.wraps(method)
    def of_present(self: FallsBack, *args: Any, **kwargs: Any) -> Any:
        if self.fell_back:
            return getattr(self.fallback, method.__name__)(*args, **kwargs)
        return method(self, *args, **kwargs)

    return cast(Method, of_present)
