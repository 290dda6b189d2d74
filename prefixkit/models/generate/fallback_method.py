"""Methods of a tree cache that its fallback answers, once the cache has become that."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

Method = TypeVar("Method", bound=Callable[..., Any])


class FallsBack(Protocol):
    """A cache that may become another one."""

    fallback: Any  # the other cache
    fell_back: bool  # whether it has become that


def or_of_fallback(method: Method) -> Method:
    """A method of a tree cache; of the cache that it has become, once it fell back."""

    @functools.wraps(method)
    def of_present(self: FallsBack, *args: Any, **kwargs: Any) -> Any:
        if self.fell_back:
            return getattr(self.fallback, method.__name__)(*args, **kwargs)
        return method(self, *args, **kwargs)

    return cast(Method, of_present)
