"""Sample what a run folder lacks, and write each sample as it finishes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefixkit.engine.request import Request, Sample
from prefixkit.engine.sharing_report import Report
from prefixkit.evaluation.campaign.folder import Part, RunFolder
from prefixkit.evaluation.campaign.shards import ShardWriter, mark
from prefixkit.sampling.params import SamplingParams

log = logging.getLogger("prefixkit")

BLOCK = 16  # consecutive sample indices of a prompt in one part, if prompts are too few to divide among parts
NOTE_SECONDS = 10.0  # between two lines of progress in the history
LOGPROB_DIGITS = 6

# Samples requests, gives each sample as it finishes, and returns what was shared.
Sampler = Callable[[list[Request], Callable[[Sample], None]], Report]
# Of the prompts at these places, those solved by samples of indices below the second argument.
Solved = Callable[[Sequence[int], int], set[int]]


@dataclass(frozen=True)
class Goal:
    """Which samples are wanted.

    Attributes:
        first: The first sample index.
        until: For each prompt, the index after its last sample.
        part: The part of these samples that this process samples.
        round: The number of sample indices in a round, after which solved problems get no more samples; None: all
            samples are one round.
    """

    first: int
    until: Sequence[int]
    part: Part = Part()
    round: int | None = None

    def __post_init__(self) -> None:
        if self.first < 0:
            raise ValueError(f"the first index must be at least 0, got {self.first}")
        if self.round is not None and self.round < 1:
            raise ValueError(f"a round must have at least 1 sample of each problem, got {self.round}")
        if self.round is not None and self.part.of > 1 and not self.whole_prompts:
            raise ValueError(
                f"solved problems can be left alone only where each of the {self.part.of} shards has problems of its "
                f"own; {len(self.until)} problems are too few: give at most {max(1, len(self.until) // 4)} shards"
            )

    @property
    def whole_prompts(self) -> bool:
        """Whether all samples of a prompt belong to one part."""
        return self.part.of == 1 or len(self.until) >= 4 * self.part.of

    def rounds(self) -> Iterator[tuple[int, int]]:
        """The first index of each round, and the index after its last."""
        last, size = max(self.until, default=0), self.round
        if size is None:
            yield self.first, last
            return
        for first in range(self.first, last, size):
            yield first, min(last, first + size)

    def is_ours(self, place: int, index: int) -> bool:
        """Whether this part samples ``index`` of the prompt at ``place``, however many samples are wanted."""
        part = self.part
        if self.whole_prompts:
            return place * part.of // len(self.until) == part.index
        return (place + index // BLOCK) % part.of == part.index

    def missing(self, place: int, have: bytearray, first: int, until: int) -> Sequence[int]:
        """The sample indices of a prompt that belong to this part and are not sampled yet."""
        until = min(until, self.until[place])
        if not any(have[first:until]) and (self.part.of == 1 or (self.whole_prompts and self.is_ours(place, first))):
            return range(first, until)
        return [
            index
            for index in range(first, until)
            if not (index < len(have) and have[index]) and self.is_ours(place, index)
        ]


@dataclass
class Progress:
    """How many samples a run has made, and how many it is to make.

    Attributes:
        there: Samples that existed when the run began.
        wanted: Samples that the run has begun to sample.
        samples, tokens: Samples and tokens that the run has sampled.
        report: What these samples shared.
    """

    there: int = 0
    wanted: int = 0
    samples: int = 0
    tokens: int = 0
    report: Report = field(default_factory=Report)


def run_campaign(
    folder: RunFolder,
    tokens: Sequence[NDArray[np.int32]],
    params: Sequence[SamplingParams],
    goal: Goal,
    sampler: Sampler,
    *,
    solved: Solved | None = None,
    on_begin: Callable[[Progress], None] = lambda progress: None,
    on_sample: Callable[[Sample], None] = lambda sample: None,
    under_way: Callable[[], Report] = Report,
    **note: Any,
) -> Progress:
    """Sample what the folder lacks of a goal; whatever ends the run, finished samples are in the folder.

    Args:
        folder: Where samples go; its manifest describes the prompts.
        tokens: The token ids of each prompt.
        params: The sampling parameters of each prompt.
        goal: The samples that are wanted.
        sampler: Samples requests.
        solved: Returns after each round the problems that are solved; these get no more samples.
        on_begin: Called before each round with the progress.
        on_sample: Called with each sample once it is written.
        under_way: Gives the report of a call of the sampler that was stopped.
        note: Further fields for the history: the command, versions.

    Raises:
        FolderBusy: another process is sampling the same.
        DamagedShard: a shard of the folder has changed.
        OSError: a sample cannot be written.
    """
    with folder.locked(goal.part):
        began = time.time()
        folder.note(event="began", at=began, part=goal.part.tag, first=goal.first, n=max(goal.until), **note)
        have, progress, prompts = folder.have(), Progress(), folder.manifest.prompts
        progress.there = sum(map(sum, have))
        writer = _Writer(folder, goal.part.tag, have, progress, on_sample)
        try:
            for first, until in goal.rounds():
                ours = [place for place in range(len(tokens)) if goal.is_ours(place, first)]
                done = set() if solved is None or not first else solved(ours, first)
                requests = [
                    Request(place, own, replace(each, n=len(indices)), prompt.occurrence, indices)
                    for place, (prompt, own, each) in enumerate(zip(prompts, tokens, params, strict=True))
                    if place not in done and (indices := goal.missing(place, have[place], first, until))
                ]
                progress.wanted += sum(len(one.sample_indices) for one in requests)
                on_begin(progress)
                if requests:
                    try:
                        shared = sampler(requests, writer.write)
                    except BaseException:
                        progress.report.add(under_way().counts())
                        raise
                    progress.report.add(shared.counts())
            writer.shards.close()
        finally:
            took = time.time() - began
            folder.note(
                event="ended", at=began + took, part=goal.part.tag, samples=progress.samples, tokens=progress.tokens,
                seconds=took, report=progress.report.counts(),
            )  # fmt: skip
    return progress


@dataclass
class _Writer:
    """Writes samples to the folder, and the run's progress every ``NOTE_SECONDS``."""

    folder: RunFolder
    tag: str
    have: list[bytearray]
    progress: Progress
    on_sample: Callable[[Sample], None]
    noted: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.shards = ShardWriter(self.folder.shards, self.tag)

    def write(self, sample: Sample) -> None:
        place, manifest = sample.prompt_index, self.folder.manifest
        record = record_of(sample, manifest.prompts[place].id, manifest.logprobs)
        self.shards.write(place, record)
        mark(self.have[place], sample.index, sample.index)
        self.progress.samples += 1
        self.progress.tokens += len(record["tokens"])
        if time.monotonic() - self.noted > NOTE_SECONDS:
            self.noted = time.monotonic()
            at, own = time.time(), self.progress
            self.folder.note(event="progress", at=at, part=self.tag, samples=own.samples, tokens=own.tokens)
        self.on_sample(sample)


def record_of(sample: Sample, id: str | int, logprobs: bool) -> dict[str, Any]:
    """The line of a sample: the id of its problem, its index, its text and tokens, and why it ended."""
    record: dict[str, Any] = {"id": id, "index": sample.index, "text": sample.text, "tokens": sample.tokens}
    if logprobs:
        record["logprobs"] = [round(value, LOGPROB_DIGITS) for value in sample.logprobs]
    return record | {"finish_reason": sample.finish_reason}
