"""What run folders came to, as the report shows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any

from prefixkit.engine.sharing_report import Report
from prefixkit.evaluation.campaign.folder import TREE, RunFolder
from prefixkit.evaluation.campaign.verdicts import Verdicts
from prefixkit.evaluation.report import Branch, Candidate, Facts, Group, Picture, Problem, Progress, Saved, SavedRow
from prefixkit.evaluation.tasks.typed import typed

EXAMPLES = 3  # candidates of a problem that are shown: one that passed, and others
_TEXT = 20_000  # characters of one that are kept


@dataclass
class _Tally:
    """What is counted of a problem's samples."""

    counts: Counter[str] = field(default_factory=Counter)
    programs: Counter[bytes] = field(default_factory=Counter)
    tokens: int = 0
    first_solved: int | None = None
    examples: dict[str, tuple[bytes, Candidate]] = field(default_factory=dict)  # by outcome


def facts_of(folders: Sequence[RunFolder]) -> Facts:
    """What the folders hold together; of several, each is a group with a curve of its own; ValueError where their
    problems differ.
    """
    first = folders[0]
    for other in folders[1:]:
        if other.places.keys() != first.places.keys():
            raise ValueError(f"{other.path} has other problems than {first.path}; report on them apart")
    tallies = [[_Tally() for _ in first.places] for _ in folders]
    for folder, own in zip(folders, tallies, strict=True):
        _count(folder, first, own)
    groups = [
        Group(label, tuple((one.counts.total() - one.counts["unjudged"], one.counts["passed"]) for one in own))
        for label, own in zip(_labels(folders), tallies, strict=True)
    ]
    problems = [
        _problem(prompt.id, [own[place] for own in tallies]) for place, prompt in enumerate(first.manifest.prompts)
    ]
    began = [event for folder in folders for event in _events(folder, "began")]
    first_at = min((event["at"] for event in began), default=0)
    return Facts(
        title=", ".join(folder.path.resolve().name for folder in folders),
        model=first.manifest.model,
        when=datetime.fromtimestamp(first_at, UTC).strftime("%Y-%m-%d %H:%M UTC") if began else "",
        parameters=_parameters(folders),
        versions=first.manifest.versions,
        commands=tuple(dict.fromkeys(f"prefixkit {event.get('argv', '')}" for event in began)),
        problems=tuple(problems),
        groups=tuple(groups) if len(folders) > 1 else (),
        new_tokens=sum(one.tokens for own in tallies for one in own),
        seconds=sum(map(_seconds, folders)),
        saved=_saved([_report(folder) for folder in folders]),
        progress=tuple(points for folder in folders for points in _progress(folder)),
        pictures=_pictures(first),
    )


def _count(folder: RunFolder, first: RunFolder, tallies: list[_Tally]) -> None:
    """Go through the samples of a folder, for tallies in the order of the first folder's problems."""
    verdicts = Verdicts(folder)
    for record in folder.samples():
        tally = tallies[first.places[record["id"]]]
        text, _, verdict = verdicts.of(folder.places[record["id"]], record["text"])
        outcome = "unjudged" if verdict is None else verdict.outcome
        digest = blake2b(text.encode("utf-8", "backslashreplace"), digest_size=16).digest()
        tally.counts[outcome] += 1
        tally.programs[digest] += 1
        tally.tokens += len(record["tokens"])
        if outcome == "passed" and (tally.first_solved is None or record["index"] < tally.first_solved):
            tally.first_solved = record["index"]
        if outcome not in tally.examples:
            detail = "" if verdict is None else verdict.detail
            tally.examples[outcome] = digest, Candidate(text[:_TEXT], outcome, detail, len(record["tokens"]))


def _problem(id: str | int, tallies: Sequence[_Tally]) -> Problem:
    """What a problem's samples came to, of all folders together."""
    counts: Counter[str] = sum((one.counts for one in tallies), Counter())
    programs: Counter[bytes] = sum((one.programs for one in tallies), Counter())
    examples = {outcome: found for one in reversed(tallies) for outcome, found in one.examples.items()}
    order = sorted(examples, key=lambda outcome: (outcome != "passed", -counts[outcome]))[:EXAMPLES]
    shown = (examples[outcome] for outcome in order)
    samples = counts.total()
    solved = [one.first_solved for one in tallies if one.first_solved is not None]
    return Problem(
        str(id),
        counts,
        distinct=len(programs) if samples else None,
        mean_tokens=sum(one.tokens for one in tallies) / samples if samples else None,
        first_solved=min(solved, default=None),
        candidates=tuple(replace(one, count=programs[digest]) for digest, one in shown),
    )


def _pictures(folder: RunFolder) -> tuple[Picture, ...]:
    """What the prompts share."""
    try:
        roots = tuple(typed(folder.tree(), list[Branch], "tree"))
        return (Picture(f"What the prompts share, of {len(folder.places):,} problems", roots),) if roots else ()
    except (ValueError, TypeError, RecursionError) as error:
        folder.warn(f"{folder.path / TREE} is no tree of prompts ({error}); the report has no picture of it")
        return ()


def _labels(folders: Sequence[RunFolder]) -> list[str]:
    """How the folders differ: by temperature where that tells them apart, else by name."""
    heats = [folder.manifest.params.get("temperature") for folder in folders]
    if all(isinstance(heat, int | float) for heat in heats) and len(set(heats)) == len(folders):
        return [f"T={heat:g}" for heat in heats]
    return [folder.path.resolve().name for folder in folders]


def _parameters(folders: Sequence[RunFolder]) -> dict[str, str]:
    """The parameters of all, those that differ with every value."""
    first = folders[0].manifest
    return {
        **{
            name: ", ".join(dict.fromkeys(str(one.manifest.params.get(name)) for one in folders))
            for name in first.params
        },
        "dtype": first.dtype,
        "chat template": "yes" if first.chat else "no",
        "model": first.fingerprint[:16],
    }


def _events(folder: RunFolder, *kinds: str) -> list[dict[str, Any]]:
    return [event for event in folder.history() if event["event"] in kinds]


def _report(folder: RunFolder) -> Report:
    """The reports of all processes that came to an end: counts are added, peaks are those of the highest."""
    total = Report()
    for event in _events(folder, "ended"):
        total.add(event.get("report", {}))
    return total


def _seconds(folder: RunFolder) -> float:
    """Wall time in which some process was sampling, by the history: of one that was killed, to its last line."""
    spans = sorted((points[0].seconds, points[-1].seconds) for points in _progress(folder))
    total, end = 0.0, 0.0
    for first, last in spans:
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


def _saved(reports: Sequence[Report]) -> Saved:
    """Of the folder that shared most: peaks of different folders are of different moments."""
    total = max(reports, key=lambda report: report.tokens_plain_batch)
    if not total.tokens_plain_batch:
        return Saved()
    return Saved(
        rows=tuple(SavedRow(*row) for row in total.rows()),
        tokens=total.tokens_plain_batch - total.tokens_computed,
        kv_bytes=total.kv_bytes_unshared_peak - total.kv_bytes_held_peak,
    )


def _progress(folder: RunFolder) -> Iterator[tuple[Progress, ...]]:
    """How far each process was, and when, since the first began."""
    events = _events(folder, "began", "progress", "ended")
    if not events:
        return
    zero, done, tokens = events[0]["at"], 0, 0
    running: dict[str, list[Progress]] = {}
    for event in events:
        part, at = str(event.get("part")), event["at"] - zero
        if event["event"] == "began":
            if left := running.pop(part, []):  # it was killed
                done, tokens = left[-1].samples, left[-1].tokens
                yield tuple(left)
            running[part] = [Progress(at, done, tokens)]
            continue
        begun = running.setdefault(part, [Progress(at, done, tokens)])
        first = begun[0]
        begun.append(Progress(at, first.samples + event.get("samples", 0), first.tokens + event.get("tokens", 0)))
        if event["event"] == "ended":
            done, tokens = begun[-1].samples, begun[-1].tokens
            yield tuple(running.pop(part))
    yield from (tuple(points) for points in running.values())
