"""Verdicts on the candidates of a run folder: a line each, written at once, so that judging can be resumed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from prefixkit.evaluation.campaign.folder import RunFolder
from prefixkit.evaluation.campaign.lines import append, line_of, lines_said, read_lines, some
from prefixkit.evaluation.judge import BadTests, Judge, digest_of, key_of
from prefixkit.evaluation.judge.verdict import Verdict
from prefixkit.evaluation.tasks.answers import program
from prefixkit.evaluation.tasks.problem import Problem
from prefixkit.evaluation.tasks.typed import made, typed


@dataclass(frozen=True)
class Judged:
    """A candidate and its verdict.

    Attributes:
        place: The problem's place in the manifest.
        index: The sample's index.
        key: A hash of the program, the tests and the limits: candidates of equal keys have equal verdicts.
        verdict: Its verdict.
    """

    place: int
    index: int
    key: str
    verdict: Verdict


def _judged(places: Mapping[str | int, int], record: dict[str, Any]) -> Judged:
    place, index = places[record.pop("id")], typed(record.pop("index"), int, "index")
    return Judged(place, index, typed(record.pop("key"), str, "key"), made(Verdict, record))


class Verdicts:
    """The known verdicts on a run folder's candidates, by key: verdicts under other tests or limits never count.

    Args:
        folder: The run folder; samples may still be written to it.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.asked = folder.asked()
        self.known: dict[str, Verdict] = {}
        self.written: dict[tuple[int, int], str] = {}  # the key in each sample's line of verdicts
        self._digests = [None if one.problem.tests is None else self._digest(folder, one.problem) for one in self.asked]
        for path in sorted((folder.path / "verdicts").glob("*.jsonl")):
            found, bad = read_lines(path, partial(_judged, folder.places))
            for one in found:
                self.known[one.key] = one.verdict
                self.written[one.place, one.index] = one.key
            if bad:
                folder.warn(f"{path}: {lines_said(bad, 'verdict')}; prefixkit evaluate judges its sample again")

    @staticmethod
    def _digest(folder: RunFolder, problem: Problem) -> bytes | None:
        try:
            return digest_of(problem)
        except RecursionError:
            folder.damage.setdefault(f"{problem.where}: the tests are nested too deeply to be judged by")
            return None

    def of(self, place: int, text: str) -> tuple[str, str | None, Verdict | None]:
        """The program in a sample's text, its key, and its verdict; no key if its problem has no tests."""
        one, digest = self.asked[place], self._digests[place]
        code = program(one.problem, text, one.begun)
        if digest is None:
            return code, None, None
        key = key_of(code, one.problem, digest)
        return code, key, self.known.get(key)


def judge_samples(
    folder: RunFolder,
    judge: Judge,
    tag: str = "all",
    *,
    wanted: Callable[[int, int], bool] = lambda place, index: True,
    on_verdict: Callable[[Judged], None] = lambda judged: None,
) -> None:
    """Judge the candidates that have no verdict yet, each program of a problem once.

    Args:
        folder: The run folder; samples may still be written to it.
        judge: Runs the candidates.
        tag: Names the file of verdicts; no other judging process has the same.
        wanted: Whether a sample is judged, by its problem's place and its index.
        on_verdict: Called with each verdict, known ones included.

    Raises:
        BadTests: the tests of a problem do not run; the candidates of all others have their verdicts.
        OSError: a verdict cannot be written.
    """
    verdicts = Verdicts(folder)
    bad: dict[int, BadTests] = {}
    path = folder.path / "verdicts" / f"{tag}.jsonl"
    with _opened(path) as file:

        def keep(judged: Judged) -> None:
            verdicts.known[judged.key] = judged.verdict
            if verdicts.written.get((judged.place, judged.index)) != judged.key:
                name = folder.manifest.prompts[judged.place].id
                line = line_of({"id": name, "index": judged.index, "key": judged.key, **asdict(judged.verdict)})
                append(file, line, path, "the verdicts before are kept")
            on_verdict(judged)

        def unknown() -> Iterator[tuple[tuple[int, int, str], str, Any]]:
            for record in folder.samples():
                place, index = folder.places[record["id"]], record["index"]
                if place in bad or not wanted(place, index):
                    continue
                code, key, verdict = verdicts.of(place, record["text"])
                if key is not None and verdict is not None:
                    keep(Judged(place, index, key, verdict))
                elif key is not None:
                    yield (place, index, key), code, verdicts.asked[place].problem

        def note(key: tuple[int, int, str], error: BadTests) -> None:
            bad.setdefault(key[0], error)

        for (place, index, key), verdict in judge.verdicts(unknown(), note):
            keep(Judged(place, index, key, verdict))
    if bad:
        said = f"the tests of {len(bad)} of {len(verdicts.asked)} problems do not run, the others are judged: "
        raise BadTests(said + some(list(map(str, bad.values()))))


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A file to which verdicts are appended; an earlier torn line is cut off first."""
    path.parent.mkdir(exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        os.ftruncate(file, path.read_bytes().rfind(b"\n") + 1)
        yield file
    finally:
        os.close(file)
