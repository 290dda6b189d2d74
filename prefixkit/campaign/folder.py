"""A run folder: what a campaign has sampled, by whichever processes, and what it has come to.

======================  ==============================================================================================
``manifest.json``       what the samples depend on (:mod:`manifest`); written once
``problems.jsonl.gz``   the problems, with their tests, and what of a program precedes each sample
``samples/``            shards (:mod:`shards`)
``verdicts/``           what candidates came to, a line each (:mod:`verdicts`)
``tree.json``           what the prompts share, to be drawn
``history.jsonl``       when it was sampled, by which command, how fast, and what was shared
``locks/``              held by the processes that are sampling
======================  ==============================================================================================
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import sys
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefixkit.campaign.manifest import Manifest
from prefixkit.campaign.shards import check_content, closed_shards, open_shards, read_samples, recover
from prefixkit.paths import put
from prefixkit.tasks.problem import Problem

if sys.platform != "win32":
    import fcntl

log = logging.getLogger("prefixkit")

_PROBLEMS, _TREE = "problems.jsonl.gz", "tree.json"


class NotARun(ValueError):
    """A folder is no run folder, or cannot become one."""


class FolderBusy(OSError):
    """Another process is sampling the same part of a campaign."""


@dataclass(frozen=True)
class Asked:
    """A problem as it was asked.

    Attributes:
        problem: With its tests.
        begun: What of the program precedes each sample; "" where the answer starts with it, or brings it in a code
            block.
    """

    problem: Problem
    begun: str


@dataclass(frozen=True)
class Part:
    """The part of a campaign that one process samples: number ``index`` of ``of``, from 0."""

    index: int = 0
    of: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.of:
            raise ValueError(f"shard {self.index} of {self.of}: count shards from 0, below their number")

    @property
    def tag(self) -> str:
        return f"{self.index}of{self.of}"


class RunFolder:
    """A run folder that is there.

    Raises:
        NotARun: it is not there, or holds something else.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        place = path / "manifest.json"
        if not place.is_file():
            what = "holds no manifest.json" if path.is_dir() else "is a file" if path.exists() else "does not exist"
            raise NotARun(f"{path} is no run folder: it {what}; prefixkit sample --run FOLDER makes one")
        self.manifest = Manifest.from_json(place.read_text(encoding="utf-8"), str(place))
        self.places = {prompt.id: place for place, prompt in enumerate(self.manifest.prompts)}

    @property
    def shards(self) -> Path:
        return self.path / "samples"

    def asked(self) -> list[Asked]:
        """The problems as they were asked, in the order of the manifest."""
        place = self.path / _PROBLEMS
        try:
            records = [json.loads(line) for line in gzip.decompress(place.read_bytes()).splitlines()]
            return [Asked(Problem.from_json(record["problem"]), record["begun"]) for record in records]
        except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
            raise NotARun(
                f"{place} is missing or damaged ({type(error).__name__}); give the command of prefixkit sample again, "
                "which writes it anew, or restore it"
            ) from error

    def samples(self) -> Iterator[dict[str, Any]]:
        """Every sample, each once; of shards that are open, what is whole.

        Raises:
            DamagedShard: a closed shard is missing or of another length, or a line is no sample of the campaign.
        """
        closed_shards(self.shards)
        seen = [bytearray() for _ in self.manifest.prompts]
        for path in sorted(self.shards.glob("*.jsonl")):
            for record in read_samples(path, self.places):
                own, index = seen[self.places[record["id"]]], record["index"]
                if index >= len(own) or not own[index]:
                    mark(own, index, index)
                    yield record

    def have(self) -> list[bytearray]:
        """For each prompt of the manifest, which samples closed shards hold: a byte for each index, 1 where it is.

        Raises:
            DamagedShard: a closed shard has changed since.
        """
        shards = closed_shards(self.shards)
        with ThreadPoolExecutor(4) as threads:  # checksums leave Python's lock
            list(threads.map(check_content, shards, shards.values()))
        have = [bytearray() for _ in self.manifest.prompts]
        for closed in shards.values():
            for place, ranges in closed.ranges.items():
                own = have[place]
                for first, last in ranges:
                    mark(own, first, last)
        return have

    def keep_tree(self, branches: list[dict[str, Any]]) -> None:
        """Keep what the prompts share, for the report: nodes with ``tokens``, ``shared_by``, ``text``, ``children``."""
        put(self.path / _TREE, json.dumps(branches).encode())

    def tree(self) -> list[dict[str, Any]]:
        """What :meth:`keep_tree` has kept; nothing where there is none."""
        try:
            found: list[dict[str, Any]] = json.loads((self.path / _TREE).read_bytes())
        except (OSError, ValueError):
            return []  # it is a picture: a report does without
        return found

    def history(self) -> list[dict[str, Any]]:
        """What happened, in order: the events of :meth:`note`."""
        place = self.path / "history.jsonl"
        events = []
        for line in place.read_bytes().splitlines() if place.exists() else ():
            try:
                event = json.loads(line)
            except ValueError:
                continue  # torn
            if isinstance(event, dict) and isinstance(event.get("at"), int | float):
                events.append(event)
        return events

    def note(self, **event: Any) -> None:
        """Append an event to the history; where it cannot be written, samples are what matters."""
        line = (json.dumps(event, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
        try:
            file = os.open(self.path / "history.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                os.write(file, line)
            finally:
                os.close(file)
        except OSError as error:
            log.warning("%s: the history lacks the event %r: %s", self.path, event.get("event"), error.strerror)

    @contextmanager
    def locked(self, part: Part) -> Iterator[None]:
        """Sample ``part`` alone: close what others have left open, and keep those out that would sample the same.

        Parts of one division may be sampled at once; those of another division wait for them.

        Raises:
            FolderBusy: another process is sampling the same.
            DamagedShard: an open shard cannot be closed.
        """
        with ExitStack() as held:
            locks = self.path / "locks"
            locks.mkdir(exist_ok=True)
            busy = f"another process is sampling {self.path}"
            held.enter_context(_lock(locks / f"of{part.of}", busy, shared=True))
            for other in sorted(locks.glob("of*")):
                if other.name != f"of{part.of}":
                    with _lock(other, f"{busy} in another division than {part.of}"):
                        pass
            held.enter_context(_lock(locks / part.tag, f"{busy}, the same part of it"))
            with _lock(locks / "closing", "", wait=True):
                for path in open_shards(self.shards):
                    tag = path.stem.rpartition("-")[0]
                    if tag == part.tag or not _is_locked(locks / tag):
                        recover(path, self.places)
            yield


def check_place(path: Path) -> bool:
    """Whether there is no run folder yet at ``path``, but can be one.

    Raises:
        NotARun: it is a file, or a folder with files that are none of a run folder's.
    """
    if (path / "manifest.json").exists():
        return False
    ours = {_PROBLEMS, "samples", "locks", "verdicts"}
    names = sorted(one.name for one in path.iterdir()) if path.is_dir() else []
    strange = [name for name in names if name not in ours and not name.startswith(".making-")]
    if strange or (path.exists() and not path.is_dir()):
        what = f"holds {strange[0]}" if strange else "is a file"
        raise NotARun(f"{path} is no run folder, and {what}; choose a new or empty folder for --run")
    return True


def create(path: Path, manifest: Manifest, asked: Sequence[Asked]) -> RunFolder:
    """The run folder of a campaign: made, or found with an equal manifest.

    Raises:
        OtherCampaign: it holds samples of another one.
        NotARun: it holds files that are none of a run folder's.
        OSError: it cannot be written.
    """
    if check_place(path):
        (path / "samples").mkdir(parents=True, exist_ok=True)
        _put_problems(path, asked)
        put(path / "manifest.json", manifest.to_json().encode("utf-8", "backslashreplace"))
    folder = RunFolder(path)
    folder.manifest.check_same(manifest, str(path))
    if _problems_of(path) != _problem_lines(asked):
        log.warning("%s: the tests of its problems have changed; the new ones take their place", path)
        _put_problems(path, asked)
    changed = {key: (was, manifest.versions.get(key)) for key, was in folder.manifest.versions.items()}
    for key, (was, now) in changed.items():
        if was != now:
            log.warning("%s was begun with %s %s, and goes on with %s", path, key, was, now)
    return folder


def _problems_of(path: Path) -> bytes | None:
    """The lines of the problems; None where they are missing or damaged."""
    try:
        return gzip.decompress((path / _PROBLEMS).read_bytes())
    except (OSError, EOFError, zlib.error):
        return None


def _put_problems(path: Path, asked: Sequence[Asked]) -> None:
    put(path / _PROBLEMS, gzip.compress(_problem_lines(asked), mtime=0))


def _problem_lines(asked: Sequence[Asked]) -> bytes:
    lines = (json.dumps({"problem": one.problem.to_json(), "begun": one.begun}) + "\n" for one in asked)
    return "".join(lines).encode()


def mark(have: bytearray, first: int, last: int) -> None:
    """Note that the samples from ``first`` to ``last`` are there."""
    have.extend(bytes(max(0, last + 1 - len(have))))
    have[first : last + 1] = b"\1" * (last + 1 - first)


@contextmanager
def _lock(place: Path, busy: str, *, shared: bool = False, wait: bool = False) -> Iterator[None]:
    """Hold a lock; FolderBusy where another process holds it.  File systems without locks have none."""
    file = os.open(place, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if sys.platform != "win32":
            how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            try:
                fcntl.flock(file, how | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError as error:
                raise FolderBusy(f"{busy}; wait for its end, or stop it") from error
            except OSError:
                log.warning("%s: this file system has no locks; let one process at a time sample here", place.parent)
        yield
    finally:
        os.close(file)


def _is_locked(place: Path) -> bool:
    try:
        with _lock(place, ""):
            return False
    except FolderBusy:
        return True
