"""A run folder: the samples of a campaign, by whichever processes, and their verdicts.

======================  ==============================================================================================
``manifest.json``       what the samples depend on (:mod:`manifest`); written once
``problems.jsonl.gz``   the problems, with their tests, and the part of a program that precedes each sample
``samples/``            shards (:mod:`shards`)
``verdicts/``           verdicts on candidates, a line each (:mod:`verdicts`)
``tree.json``           the prefix tree of the prompts, to be drawn
``history.jsonl``       when samples were made, by which command, how fast, and what they shared
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefixkit.evaluation.campaign.lines import NO_RECORD, line_of, lines_said, read_lines, some
from prefixkit.evaluation.campaign.manifest import Manifest
from prefixkit.evaluation.campaign.shards import held, open_shards, read_samples, recover
from prefixkit.evaluation.tasks.problem import Problem
from prefixkit.evaluation.tasks.typed import typed
from prefixkit.paths import put

if sys.platform != "win32":
    import fcntl

log = logging.getLogger("prefixkit")

_PROBLEMS, TREE = "problems.jsonl.gz", "tree.json"
# What else a run folder holds.
_FILES, _FOLDERS = ("manifest.json", "history.jsonl", TREE), ("samples", "locks", "verdicts")
# Types of the fields that an event of the history may have, and the last second that a date can express.
_FIELDS: dict[str, Any] = {
    **{"event": str, "at": float, "part": str, "argv": str, "samples": int, "tokens": int},
    "report": Mapping[str, float | Mapping[str, float]],
}
_LAST = 253_402_300_799


class NotARun(ValueError):
    """A folder is not a run folder, or cannot become one."""


class DamagedRun(ValueError):
    """Parts of a run folder are damaged; all else was read."""


class FolderBusy(OSError):
    """Another process is sampling the same part of a campaign, or judging it."""


@dataclass(frozen=True)
class Asked:
    """A problem as the model was asked it.

    Attributes:
        problem: The problem, with its tests.
        begun: The part of the program that precedes each sample; "" if the answer starts the program, or has it in a
            code block.
        damaged: Whether its line cannot be read: then only the problem's id is known.
    """

    problem: Problem
    begun: str
    damaged: bool = False


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
    """An existing run folder.

    Attributes:
        damage: The samples and problems that could not be read so far, each with file and line, as an ordered set;
            see :func:`check_whole`.

    Raises:
        NotARun: the folder does not exist, or holds something else.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damage: dict[str, None] = {}
        self._warned: set[str] = set()
        place = path / "manifest.json"
        if not place.is_file():
            what = "holds no manifest.json" if path.is_dir() else "is a file" if path.exists() else "does not exist"
            raise NotARun(f"{path} is no run folder: it {what}; prefixkit sample --run FOLDER makes one")
        self.manifest = Manifest.from_json(place.read_bytes(), str(place))
        self.places = {prompt.id: place for place, prompt in enumerate(self.manifest.prompts)}

    @property
    def shards(self) -> Path:
        return self.path / "samples"

    def asked(self) -> list[Asked]:
        """The problems as they were asked, in the order of the manifest; unreadable ones are added to ``damage``."""
        place, prompts = self.path / _PROBLEMS, self.manifest.prompts
        remedy = "give the command of prefixkit sample again, which writes it anew, or restore it"
        content = _problems_of(self.path)
        if content is None:
            raise NotARun(f"{place} is missing or damaged; {remedy}")
        lines = content.split(b"\n")[:-1]
        if len(lines) != len(prompts):
            raise NotARun(f"{place} is damaged: it has {len(lines)} lines for {len(prompts)} problems; {remedy}")
        found, bad = list[Asked](), list[int]()
        for number, (line, prompt) in enumerate(zip(lines, prompts, strict=True), start=1):
            one = _asked(line)
            if one is None or one.problem.id != prompt.id:
                bad.append(number)
                one = Asked(Problem(prompt.id, f"{place}:{number}", (), ""), "", damaged=True)
            found.append(one)
        if bad:
            self.damage.setdefault(f"{place}: {lines_said(bad, 'problem of this campaign')}; {remedy}")
        return found

    def samples(self) -> Iterator[dict[str, Any]]:
        """Every sample, each once, whole lines of open shards included; lines that are no samples of the campaign are
        added to ``damage``.
        """
        seen = [set[int]() for _ in self.manifest.prompts]
        found = {path.with_suffix(".jsonl") for kind in ("json", "jsonl") for path in self.shards.glob(f"*.{kind}")}
        for path in sorted(found):
            for record in read_samples(path, self.places, self.damage.setdefault):
                own, index = seen[self.places[record["id"]]], record["index"]
                if index not in own:
                    own.add(index)
                    yield record

    def warn(self, what: str) -> None:
        """Log once what was skipped without loss."""
        if what not in self._warned:
            self._warned.add(what)
            log.warning("%s", what)

    def have(self) -> list[bytearray]:
        """The samples that closed shards hold, in the form of :func:`~prefixkit.evaluation.campaign.shards.held`."""
        return held(self.shards, len(self.manifest.prompts))

    def keep_tree(self, branches: list[dict[str, Any]]) -> None:
        """Write the tree of the prompts for the report: nodes with ``tokens``, ``shared_by``, ``text``,
        ``children``.
        """
        put(self.path / TREE, json.dumps(branches).encode())

    def tree(self) -> Any:
        """The tree that :meth:`keep_tree` has written; ValueError or RecursionError if its file is no longer JSON."""
        place = self.path / TREE
        return json.loads(place.read_bytes()) if place.exists() else []

    def history(self) -> list[dict[str, Any]]:
        """The events of :meth:`note`, in order; other lines are skipped, with a warning."""
        place = self.path / "history.jsonl"
        events, bad = read_lines(place, _event) if place.exists() else ([], [])
        if bad:
            self.warn(f"{place}: {lines_said(bad, 'event of a run')}; it is passed over")
        return events

    def note(self, **event: Any) -> None:
        """Append an event to the history; a failed write is passed over, since samples matter more."""
        try:
            with (self.path / "history.jsonl").open("ab", buffering=0) as file:
                file.write(line_of(event))
        except OSError as error:
            log.warning("%s: the history lacks the event %r: %s", self.path, event.get("event"), error.strerror)

    @contextmanager
    def locked(self, part: Part) -> Iterator[None]:
        """Sample ``part`` alone: close shards that others left open, and lock out others that would sample the same.

        Parts of one division may be sampled at once; a process that samples a part of another division is refused.

        Raises:
            FolderBusy: another process is sampling the same.
            DamagedShard: an open shard cannot be closed.
        """
        with ExitStack() as stack:
            locks, busy = self.path / "locks", f"another process is sampling {self.path}"
            stack.enter_context(_lock(locks / f"of{part.of}", busy, shared=True))
            for other in sorted(locks.glob("of*")):
                if other.name != f"of{part.of}":
                    with _lock(other, f"{busy} in another division than {part.of}"):
                        pass
            stack.enter_context(_lock(locks / part.tag, f"{busy}, the same part of it"))
            with _lock(locks / "closing", "", wait=True):
                for path in open_shards(self.shards):
                    tag = path.stem.rpartition("-")[0]
                    if tag == part.tag or not _is_locked(locks / tag):
                        recover(path, self.places)
            yield

    def owns(self, file: Path) -> bool:
        """Whether a path is that of a file that the folder keeps the campaign in."""
        place = self.path.resolve()
        if place not in (file := file.resolve()).parents:
            return False
        first, *below = file.relative_to(place).parts
        return first in _FOLDERS if below else first in (_PROBLEMS, *_FILES, *_FOLDERS)

    @contextmanager
    def judging(self) -> Iterator[None]:
        """Judge the whole folder alone; FolderBusy if another process is judging it."""
        with _lock(self.path / "locks" / "judging", f"another process is judging {self.path}"):
            yield


def check_place(path: Path) -> bool:
    """Whether a run folder can be made at ``path``; False if there is one already.

    Raises:
        NotARun: ``path`` is a file, or a folder with files that do not belong to a run folder.
    """
    names = sorted(one.name for one in path.iterdir()) if path.is_dir() else []
    if "manifest.json" in names:
        return False
    ours = {_PROBLEMS, *_FOLDERS}
    strange = [name for name in names if name not in ours and not name.startswith(".making-")]
    if strange or (path.exists() and not path.is_dir()):
        what = f"holds {strange[0]}" if strange else "is a file"
        raise NotARun(f"{path} is no run folder, and {what}; choose a new or empty folder for --run")
    return True


def create(path: Path, manifest: Manifest, asked: Sequence[Asked]) -> RunFolder:
    """The run folder of a campaign: a new one, or an existing one with an equal manifest.

    Raises:
        OtherCampaign: the folder holds samples of another campaign.
        NotARun: the folder holds files that do not belong to a run folder.
        OSError: the folder cannot be written.
    """
    rows = (json.dumps({"problem": one.problem.to_json(), "begun": one.begun}) for one in asked)
    lines = "".join(f"{row}\n" for row in rows).encode()
    problems = gzip.compress(lines, mtime=0)
    if check_place(path):
        path.mkdir(parents=True, exist_ok=True)
    with _lock(path / "locks" / "creating", "", wait=True):  # another process may be creating the folder
        if check_place(path):
            put(path / _PROBLEMS, problems)
            put(path / "manifest.json", manifest.to_json().encode("utf-8", "backslashreplace"))
        folder = RunFolder(path)
        folder.manifest.check_same(manifest, str(path))
        (path / "samples").mkdir(exist_ok=True)  # a copy of the folder may lack it while it is empty
        if (known := _problems_of(path)) != lines:
            if known is not None:
                log.warning("%s: the tests of its problems have changed; the new ones take their place", path)
            put(path / _PROBLEMS, problems)
    for key, was in folder.manifest.versions.items():
        if was != (now := manifest.versions.get(key)):
            log.warning("%s was begun with %s %s, and goes on with %s", path, key, was, now)
    return folder


def check_whole(folders: Sequence[RunFolder], done: str) -> None:
    """Raise DamagedRun if parts of the folders could not be read, after all else was ``done``."""
    damage = [what for folder in folders for what in folder.damage]
    if damage:
        raise DamagedRun(f"all else was {done}, but {some(damage)}")


def _problems_of(path: Path) -> bytes | None:
    """The lines of the problems; None if they are missing or damaged."""
    try:
        return gzip.decompress((path / _PROBLEMS).read_bytes())
    except (OSError, EOFError, zlib.error):
        return None


def _asked(line: bytes) -> Asked | None:
    try:
        record = json.loads(line)
        return Asked(Problem.from_json(record["problem"]), typed(record["begun"], str, "begun"))
    except NO_RECORD:
        return None


def _event(record: dict[str, Any]) -> dict[str, Any]:
    """``record`` as an event, each field checked."""
    for name in {"event", "at", *(_FIELDS.keys() & record.keys())}:
        typed(record[name], _FIELDS[name], name)
    if min(record["at"], *(record.get(name, 0) for name in ("samples", "tokens"))) < 0 or record["at"] > _LAST:
        raise ValueError("a time or a count is none")
    return record


@contextmanager
def _lock(place: Path, busy: str, *, shared: bool = False, wait: bool = False) -> Iterator[None]:
    """Hold a lock; FolderBusy if another process holds it.  On file systems without locks nothing is locked."""
    place.parent.mkdir(exist_ok=True)
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
