"""The settings of one call: where its samples go, how tokens become text, and its report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from prefixkit.engine.request import Sample, TokenEvent
from prefixkit.engine.runs.detokenizer import Detokenizer
from prefixkit.engine.sharing_report import Report


@dataclass(frozen=True, eq=False)
class Call:
    """Where the samples of one call go, how its tokens become text, and its report.

    Attributes:
        detokenizer: Makes the text of samples; needed for stop strings and ``Sample.text``.
        return_samples: Whether the call returns its samples; else they go to ``on_sample`` alone.
        on_sample: Called with each sample as it finishes.
        on_token: Called with each token of a sample as it is sampled.
        on_step: Called after each step with the number of tokens that the step sampled.
        report: Counts the call's steps.

    Raises:
        ValueError: the samples would neither be returned nor passed to ``on_sample``.
        TypeError: a listener is not a function.
    """

    detokenizer: Detokenizer = field(default_factory=Detokenizer)
    return_samples: bool = True
    on_sample: Callable[[Sample], None] | None = None
    on_token: Callable[[TokenEvent], None] | None = None
    on_step: Callable[[int], None] | None = None
    report: Report = field(default_factory=Report)

    def __post_init__(self) -> None:
        if self.on_sample is None and not self.return_samples:
            raise ValueError(
                "return_samples=False drops every sample; pass on_sample to take them, or leave return_samples out"
            )
        for name in ("on_sample", "on_token", "on_step"):
            listener = getattr(self, name)
            if listener is not None and not callable(listener):
                raise TypeError(f"{name} must be a function, got {type(listener).__name__} {listener!r}")
