"""The samples of a call as they finish."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prefixkit.engine.request import Sample


class Stream(Iterator[Sample]):
    """The samples of a call as they finish; :meth:`prefixkit.Session.stream` says how it begins and ends."""

    def __init__(self, begin: Callable[[], Any]) -> None:
        self._begin, self._cut = begin, ""
        self._samples: Any = None  # a generator, once it has begun

    def __next__(self) -> Sample:
        if self._cut:
            raise ValueError(f"the stream was cut short by {self._cut}; call session.stream() again for its samples")
        if self._samples is None:
            next(begun := self._begin())
            self._samples = begun
        try:
            return next(self._samples)  # type: ignore[no-any-return]
        except BaseException as error:
            if not isinstance(error, StopIteration) and self._samples.gi_frame is None:  # else its own callback asked
                self._cut = f"{type(error).__name__}: {error}"
            raise

    def close(self) -> None:
        """End it: samples that have not finished are dropped, and none follow."""
        self._samples = self._samples or (one for one in list[Sample]())
        self._samples.close()

    def cut(self, why: str) -> None:
        """End it where it is under way, between two samples; a further ``next`` raises with the reason."""
        if self._samples is not None and self._samples.gi_suspended:
            self._samples.close()
            self._cut = why
