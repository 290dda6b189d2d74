"""Engines that accumulate the counts of their calls, for tests and benchmarks of steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from prefixkit.engine.call import Call
from prefixkit.engine.engine import Engine
from prefixkit.engine.loop import Loop
from prefixkit.engine.policy import EngineSettings
from prefixkit.engine.request import Request, Sample
from prefixkit.engine.scoring.score import Score
from prefixkit.engine.sharing_report import Report
from prefixkit.kv.store import KVStore
from prefixkit.models import patched_facts
from prefixkit.runners.batch import Runner
from prefixkit.session import assembly


class ReportingEngine(Engine):
    """An engine whose calls use the same listeners, and add to one report.

    Attributes:
        options: Listeners, detokenizer and ``return_samples`` of runs without a ``Call``.
        report: The counts of all calls; assign a new report to reset them.
        last: The loop of the last call; None before the first.
    """

    def __init__(self, runner: Runner, store: KVStore, options: dict[str, Any] | None = None, **settings: Any) -> None:
        super().__init__(runner, store, EngineSettings(**settings))
        self.options = {} if options is None else options
        self.report = Report()
        self.last: Loop | None = None

    def loop(self, call: Call) -> Loop:
        self.last = loop = super().loop(call)
        return loop

    def run(self, requests: Iterable[Request], call: Call | None = None) -> list[Sample]:
        return super().run(requests, self._call() if call is None else call)

    def stream(self, requests: Iterable[Request], call: Call | None = None) -> Iterator[Sample]:
        return super().stream(requests, self._call() if call is None else call)

    def score(self, *args: Any, **options: Any) -> list[list[Score]]:
        return super().score(*args, **{"report": self.report} | options)

    def _call(self) -> Call:
        return Call(**self.options, report=self.report)


def make_engine(model: Any, requests: Sequence[Request], **options: Any) -> ReportingEngine:
    """An engine over a patched model, without a session; see :func:`prefixkit.session.assembly.make_engine`."""
    made = assembly.make_engine(patched_facts(model), requests, **options)
    return ReportingEngine(made.runner, made.store, **vars(made.settings))
