"""Many random cases in one test."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest

AT_ONCE = 20


def seeds(count: int) -> Callable[[Callable[..., None]], Any]:
    """Runs a test with each ``seed`` below ``count``, twenty in a case, for pytest takes longer than many a seed."""

    def decorate(test: Callable[..., None]) -> Any:
        @functools.wraps(test)
        def run(some: range, **given: Any) -> None:
            for seed in some:
                print("seed", seed)
                test(seed=seed, **given)

        own = inspect.signature(test)
        others = (each for name, each in own.parameters.items() if name != "seed")
        run.__signature__ = own.replace(  # type: ignore[attr-defined]
            parameters=[inspect.Parameter("some", inspect.Parameter.POSITIONAL_OR_KEYWORD), *others]
        )
        parts = [range(first, min(first + AT_ONCE, count)) for first in range(0, count, AT_ONCE)]
        return pytest.mark.parametrize("some", parts, ids=lambda part: f"seeds {part[0]}-{part[-1]}")(run)

    return decorate
