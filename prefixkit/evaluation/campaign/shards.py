"""Files of samples that only grow: each process that samples has one open file; the others are closed.

A shard is ``NAME.jsonl``, a sample a line.  It is closed by writing ``NAME.json``, which lists its samples and has its
checksum: one rename, so that a shard is open or closed whatever stops the process.  An open shard may end in a torn
line, which the process that closes it next cuts off.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from prefixkit.evaluation.campaign.lines import NO_RECORD, append, line_of, lines_said
from prefixkit.evaluation.tasks.typed import made, typed
from prefixkit.paths import put

log = logging.getLogger("prefixkit")

LINES, BYTES = 4096, 64 << 20  # a shard is closed at whichever comes first
INDICES = 2**31  # sample indices of a prompt, from 0
SYNC_SECONDS = 5.0  # a power failure loses the samples of at most this many seconds
_CHANGED = "its content has changed since it was closed (SHA-256)"


class DamagedShard(ValueError):
    """A closed shard has changed since it was closed."""


@dataclass(frozen=True)
class Closed:
    """The content of a closed shard.

    Attributes:
        samples, tokens: The numbers of both.
        size, sha256: The file's size in bytes and its SHA-256.
        ranges: By the prompt's place in the manifest, the first and last of each run of consecutive sample indices.
    """

    samples: int
    tokens: int
    size: int
    sha256: str
    ranges: Mapping[int, list[list[int]]]

    def to_json(self) -> bytes:
        ranges = [[place, own] for place, own in sorted(self.ranges.items())]
        return (json.dumps({**self.__dict__, "ranges": ranges}) + "\n").encode()

    @classmethod
    def read(cls, index: Path) -> Closed:
        """The content that the file ``index`` describes.

        Raises:
            DamagedShard: the file does not hold what :meth:`to_json` writes.
        """
        try:
            record = json.loads(index.read_bytes())
            pairs = typed(record["ranges"], list[tuple[int, list[list[int]]]], "ranges")
            closed = made(cls, {**record, "ranges": dict(pairs)})
            runs = [run for _, own in pairs for run in own]
            held = sum(last + 1 - first if 0 <= first <= last < INDICES else INDICES for first, last in runs)
            if held > closed.samples:
                raise ValueError("its ranges are of more samples")
            return closed
        except NO_RECORD as error:
            raise DamagedShard(_damaged(index.with_suffix(".jsonl"), f"{index.name} is not readable")) from error


def ranges_of(pairs: Iterable[tuple[int, int]]) -> dict[int, list[list[int]]]:
    """The runs of consecutive sample indices of each prompt, from ``(place, index)`` of each sample."""
    found: dict[int, list[list[int]]] = {}
    for place, index in sorted(pairs):
        own = found.setdefault(place, [])
        if own and own[-1][1] >= index - 1:
            own[-1][1] = index
        else:
            own.append([index, index])
    return found


class ShardWriter:
    """Appends samples to shards ``FOLDER/TAG-00000.jsonl``, ``FOLDER/TAG-00001.jsonl`` and so on.

    The operating system has a line before :meth:`write` returns: a killed process loses none.

    Args:
        folder: The folder of the shards.
        tag: The writer's name; no other living writer has it.
        lines, size: A shard is closed at this many samples or bytes, whichever comes first.
    """

    def __init__(self, folder: Path, tag: str, lines: int = LINES, size: int = BYTES) -> None:
        self.folder, self.tag, self.lines, self.most = folder, tag, lines, size
        self._file: int | None = None
        self._synced = time.monotonic()

    def write(self, place: int, record: Mapping[str, Any]) -> None:
        """Append the sample ``record["index"]`` of the prompt at ``place``.

        Raises:
            OSError: the line could not be written whole; the file is truncated to its size before.
        """
        line, file = line_of(record), self._open() if self._file is None else self._file
        append(file, line, self._path, "the samples before are whole")
        self._digest.update(line)
        self._size += len(line)
        self._have.append((place, int(record["index"])))
        self._tokens += len(record["tokens"])
        if time.monotonic() - self._synced > SYNC_SECONDS:
            os.fsync(file)
            self._synced = time.monotonic()
        if len(self._have) >= self.lines or self._size >= self.most:
            self.close()

    def close(self) -> None:
        """Close the open shard, if there is one."""
        if self._file is not None:
            file, self._file = self._file, None
            try:
                os.fsync(file)
            finally:
                os.close(file)
            closed = Closed(len(self._have), self._tokens, self._size, self._digest.hexdigest(), ranges_of(self._have))
            _put_index(self._path, closed)

    def _open(self) -> int:
        taken = [path.stem for path in self.folder.glob(f"{self.tag}-*.jsonl")]
        number = max((int(stem.rpartition("-")[2]) for stem in taken), default=-1) + 1
        self._path = self.folder / f"{self.tag}-{number:05}.jsonl"
        self._file = file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
        self._size, self._tokens, self._digest = 0, 0, hashlib.sha256()
        self._have: list[tuple[int, int]] = []
        self._synced = time.monotonic()
        return file


def open_shards(folder: Path) -> list[Path]:
    """The shards that are not closed, of all writers."""
    return sorted(path for path in folder.glob("*.jsonl") if not path.with_suffix(".json").exists())


def recover(path: Path, places: Mapping[str | int, int]) -> None:
    """Close a shard whose writer is gone: cut off a torn line, and remove the file if nothing is left.

    Args:
        path: The shard.
        places: The place in the manifest of each prompt's id.

    Raises:
        DamagedShard: a line before the last is not a sample of the campaign.
    """
    content = path.read_bytes()
    whole, have, tokens = 0, list[tuple[int, int]](), 0
    for number, line in enumerate(BytesIO(content), start=1):
        record = _sample_of(line, places)
        if record is None:
            if whole + len(line) < len(content):
                raise DamagedShard(_damaged(path, f"line {number} is no sample of this campaign"))
            log.warning("%s: cut off a line that was written in part", path.name)
            break
        whole += len(line)
        have.append((places[record["id"]], record["index"]))
        tokens += len(record["tokens"])
    if not have:
        path.unlink()
        return
    with path.open("r+b") as file:
        file.truncate(whole)
        os.fsync(file.fileno())
    closed = Closed(len(have), tokens, whole, hashlib.sha256(content[:whole]).hexdigest(), ranges_of(have))
    _put_index(path, closed)


def held(folder: Path, prompts: int) -> list[bytearray]:
    """For each prompt of the manifest, the samples that closed shards hold: a byte for each index, 1 if it is held.

    Raises:
        DamagedShard: a closed shard is missing, or has changed since it was closed.
    """
    shards = {index.with_suffix(".jsonl"): Closed.read(index) for index in sorted(folder.glob("*.json"))}
    with ThreadPoolExecutor(4) as threads:  # hashing releases Python's lock
        list(threads.map(_check_content, shards, shards.values()))
    have = [bytearray() for _ in range(prompts)]
    for path, closed in shards.items():
        for place, ranges in closed.ranges.items():
            if not 0 <= place < prompts:
                raise DamagedShard(_damaged(path, f"{path.stem}.json has no prompts of this campaign"))
            for first, last in ranges:
                mark(have[place], first, last)
    return have


def mark(have: bytearray, first: int, last: int) -> None:
    """Note in ``have`` that the samples from ``first`` to ``last`` exist."""
    have.extend(bytes(max(0, last + 1 - len(have))))
    have[first : last + 1] = b"\1" * (last + 1 - first)


def _check_content(path: Path, closed: Closed) -> None:
    size = path.stat().st_size if path.exists() else None
    if size != closed.size:
        there = "is missing" if size is None else f"has {size} bytes, not the {closed.size} that it was closed with"
        raise DamagedShard(_damaged(path, there))
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != closed.sha256:
            raise DamagedShard(_damaged(path, _CHANGED))


def read_samples(
    path: Path, places: Mapping[str | int, int], damage: Callable[[str], object]
) -> Iterator[dict[str, Any]]:
    """The samples of a shard, in the order in which they finished; of an open shard, those whose lines are whole.

    Args:
        path: The shard.
        places: The place in the manifest of each prompt's id.
        damage: Called with a message for lines that are not samples of the campaign, or if a closed shard has changed.
    """
    index, closed = path.with_suffix(".json"), None
    try:
        closed = Closed.read(index) if index.exists() else None
    except DamagedShard as error:
        damage(str(error))
    digest, have, bad = hashlib.sha256(), list[tuple[int, int]](), list[int]()
    if not path.exists():
        if closed is not None:  # else its writer has removed it
            damage(_damaged(path, "is missing"))
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            digest.update(line)
            record = _sample_of(line, places)
            if record is not None:
                have.append((places[record["id"]], record["index"]))
                yield record
            elif closed is not None or line.endswith(b"\n"):
                bad.append(number)
    if bad:
        damage(_damaged(path, lines_said(bad, "sample of this campaign")))
    elif closed is not None and digest.hexdigest() != closed.sha256:
        damage(_damaged(path, _CHANGED))
    elif closed is not None and ranges_of(have) != closed.ranges:
        damage(_damaged(path, f"{index.name} has the ranges of other samples"))


def _sample_of(line: bytes, places: Mapping[str | int, int]) -> dict[str, Any] | None:
    """The sample in a line; None if the line is torn, or something else."""
    try:
        record = json.loads(line)
        id, index, tokens, text = (record[name] for name in ("id", "index", "tokens", "text"))
    except NO_RECORD:
        return None
    known = type(id) in (str, int) and id in places and type(index) is int and 0 <= index < INDICES
    whole = known and type(text) is str and type(tokens) is list and set(map(type, tokens)) <= {int}
    return record if whole and line.endswith(b"\n") else None


def _put_index(path: Path, closed: Closed) -> None:
    try:
        put(path.with_suffix(".json"), closed.to_json())
    except OSError as error:
        said = f"{path} cannot be closed ({error.strerror}); its samples are whole, and the next run closes it"
        raise OSError(said) from error


def _damaged(path: Path, what: str) -> str:
    return (
        f"{path}: {what}; restore the file, or remove {path.name} and {path.with_suffix('.json').name}: "
        "its samples are then sampled again"
    )
