"""The results of run folders, as the report shows them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from prefixkit.cli.tallies import problem_of, tally
from prefixkit.engine.sharing_report import Report
from prefixkit.evaluation.campaign.folder import TREE, RunFolder
from prefixkit.evaluation.report import Branch, Facts, Group, Picture, Progress, Saved, SavedRow
from prefixkit.evaluation.tasks.typed import typed


def facts_of(folders: Sequence[RunFolder]) -> Facts:
    """The results of all folders together; each of several folders is a group with its own curve; ValueError if their
    problems differ.
    """
    first = folders[0]
    for other in folders[1:]:
        if other.places.keys() != first.places.keys():
            raise ValueError(f"{other.path} has other problems than {first.path}; report on them apart")
    tallies = [tally(folder, first, group) for group, folder in enumerate(folders)]
    groups = [
        Group(label, tuple((one.counts.total() - one.counts["unjudged"], one.counts["passed"]) for one in own))
        for label, own in zip(_labels(folders), tallies, strict=True)
    ]
    problems = [
        problem_of(prompt.id, [own[place] for own in tallies]) for place, prompt in enumerate(first.manifest.prompts)
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


def _pictures(folder: RunFolder) -> tuple[Picture, ...]:
    """The picture of what the prompts share, if there is one."""
    try:
        roots = tuple(typed(folder.tree(), list[Branch], "tree"))
        return (Picture(f"What the prompts share, of {len(folder.places):,} problems", roots),) if roots else ()
    except (ValueError, TypeError, RecursionError) as error:
        folder.warn(f"{folder.path / TREE} is no tree of prompts ({error}); the report has no picture of it")
        return ()


def _labels(folders: Sequence[RunFolder]) -> list[str]:
    """A label for each folder: its temperature if that tells the folders apart, else its name."""
    heats = [folder.manifest.params.get("temperature") for folder in folders]
    if all(isinstance(heat, int | float) for heat in heats) and len(set(heats)) == len(folders):
        return [f"T={heat:g}" for heat in heats]
    return [folder.path.resolve().name for folder in folders]


def _parameters(folders: Sequence[RunFolder]) -> dict[str, str]:
    """The parameters of all folders; a parameter that differs between them has all its values."""
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
    """The reports of all processes that came to an end, in one: counts are added, and the highest peaks are taken."""
    total = Report()
    for event in _events(folder, "ended"):
        total.add(event.get("report", {}))
    return total


def _seconds(folder: RunFolder) -> float:
    """Wall time in which some process was sampling, by the history; a killed process counts up to its last line."""
    spans = sorted((points[0].seconds, points[-1].seconds) for points in _progress(folder))
    total, end = 0.0, 0.0
    for first, last in spans:
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


def _saved(reports: Sequence[Report]) -> Saved:
    """What sharing saved in the folder that shared most: peaks of different folders are of different moments."""
    total = max(reports, key=lambda report: report.tokens_plain_batch)
    if not total.tokens_plain_batch:
        return Saved()
    return Saved(
        rows=tuple(SavedRow(*row) for row in total.rows()),
        tokens=total.tokens_plain_batch - total.tokens_computed,
        kv_bytes=total.kv_bytes_unshared_peak - total.kv_bytes_held_peak,
    )


def _progress(folder: RunFolder) -> Iterator[tuple[Progress, ...]]:
    """The progress of each process over time, from the start of the first."""
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
