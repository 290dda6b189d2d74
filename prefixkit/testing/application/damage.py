"""Run folders with hostile or damaged contents, and checks of what commands report of the rest."""

from __future__ import annotations

import gzip
import json
import random
import shutil
from pathlib import Path
from typing import Any

from prefixkit.evaluation.campaign.folder import Asked, RunFolder, create
from prefixkit.evaluation.campaign.manifest import describe_prompts
from prefixkit.evaluation.campaign.shards import ShardWriter
from prefixkit.evaluation.campaign.verdicts import Verdicts
from prefixkit.evaluation.tasks.problem import Calls, Checks, Limits, Problem, Streams
from prefixkit.testing.application.command_line import run
from prefixkit.testing.application.run_folders import manifest_of, prompts_of

STRANGE = {"strange": [None, 1.5]}  # no field has this type
MOST = 9  # most damaged lines of one file: messages name no more
COMMANDS = (["evaluate", "--jobs", 2], ["report"], ["export", "--format", "programs"])
NAMES = {
    "samples/*.jsonl": ("id", "index", "text", "tokens"),
    "verdicts/*.jsonl": ("id", "index", "key", "outcome", "case", "detail", "seconds"),
    "history.jsonl": ("event", "at", "part", "samples", "tokens", "argv", "report"),
    "problems.jsonl.gz": ("id", "messages", "text", "head", "name", "language", "tests", "limits", "text_stop"),
}


def problem(chance: random.Random, number: int) -> Problem:
    """A problem of any kind; the tests of one problem in five are unusable for every judge."""
    name = f"p/{number}"
    if chance.random() < 0.8:
        tests: Any = chance.choice(
            [
                Calls("f", (((1,), 2),)),
                Streams((("1", "2"),), "numbers"),
                Checks("assert f(1) == 2", ("f",)),
            ]
        )
    else:
        deep: Any = 1
        for _ in range(chance.choice([50, 250, 400])):
            deep = [deep]
        tests = chance.choice(
            [
                Calls("f", (((deep,), 2),)),
                Calls("f", (((1,), deep),)),
                Streams((("1", "9" * chance.choice([4_000, 6_000])),), "numbers"),
                Checks("assert (", ("f",)),
                Checks("assert f(1) == 2", ("no name\0",)),
                Streams((("\ud800", "\ud800"),), "tokens", checker="\0"),
            ]
        )
    asked = "" if isinstance(tests, Streams) else "f"
    head = "" if isinstance(tests, Streams) or chance.random() < 0.5 else "def f(x):\n"
    where, limits = f"problems.jsonl:{number + 1}", Limits(seconds=3.0)
    return Problem(name, where, (), head or name, head=head, name=asked, tests=tests, limits=limits)


def text(chance: random.Random) -> str:
    """An answer: a right one, a wrong one, or the output of a looping model, and worse."""
    count, size = chance.choice([90, 250, 900]), chance.choice([5, 100, 250, 1_000, 3_000])
    ends = "\nprint(f(1))\n"
    good = "def f(x):\n    return x + 1\n" + chance.choice(["", ends, "print(int(input()) + 1)\n"])
    strange = [
        "def f(x):\n    if x == 0:\n        return 0\n"
        + "".join(f"    elif x == {i}:\n        return {i + 1}\n" for i in range(1, count)),
        "if x == 0:\n    y = 0\n" + "".join(f"elif x == {i}:\n    y = {i}\n" for i in range(1, count)) + good,
        f"{good}y = {' + '.join(['1'] * size)}\n",
        good + "x = y\n" * size + "y = (",
        f"def f(x): return {'(' * size}x + 1{')' * size}\n",
        f"def f(x): return {'-' * size}x\n",
        f"{good}y = {'lambda: ' * size}1\n",
        f"{good}y = a{'.b()' * size}\n",
        f"{good}y = {'9' * 5000}\nz = 0x{'f' * 5000}\n",
        f"def f(x):\n    return '\\d' is x + 0if 1else 2\n{ends}",
        f"{good}\0",
        f"{good}\ud800\udc00\ud800",
        "".join(" " * i + "if x:\n" for i in range(min(size, 120))) + " " * min(size, 120) + "pass\n",
        f"```python\n{good}" * 3,
        "`" * size + " \t" * size + "x`\n" + good,
        f"x{' ' * size}\n" + good,
        "<think>" * size + "</think>" + good,
        "".join(chance.choice("(){}[]'\"\\\n\t #:=defifx0\0\x1b\u202e\ud800é") for _ in range(size)),
        good[: chance.randrange(len(good))],
        "",
    ]
    return good if chance.random() < 0.4 else chance.choice(strange)


def folder_of(path: Path, chance: random.Random, problems: int, samples: int) -> RunFolder:
    """A run folder with problems and answers of any kind, in closed shards, one open, with history and tree."""
    found = [problem(chance, number) for number in range(problems)]
    asked = [Asked(one, one.head) for one in found]
    prompts = describe_prompts([one.id for one in found], prompts_of(problems), [{}] * problems)
    manifest = manifest_of(problems, prompts=prompts, params={"temperature": 1.0, "seed": 7}, logprobs=False)
    folder = create(path, manifest, asked)
    for tag in ("0of1", "1of2"):
        writer = ShardWriter(folder.shards, tag, lines=max(2, problems * samples // 4))
        for index in range(samples):
            for place in range(problems):
                if place % 2 == (tag == "1of2"):
                    writer.write(place, {"id": f"p/{place}", "index": index, "text": text(chance), "tokens": [1, 2]})
    folder.keep_tree([{"tokens": 3, "shared_by": 2, "text": "x", "children": []}])
    for number in range(12):
        event = ("began", "progress", "ended")[number % 3]
        report = {"tokens_computed": 5, "unpipelined": {"why": 1}}
        folder.note(event=event, at=1e9 + number, part="0of1", samples=number, tokens=9, argv="sample", report=report)
    return folder


def contents(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


def damaged(chance: random.Random, line: bytes, names: tuple[str, ...]) -> bytes:
    """A damaged copy of the line."""
    kind = chance.choice(["cut", "random", "type", "type", "type", "deep", "deeper", "huge", "other", "lacks"])
    if kind == "cut":
        return line[: chance.randrange(1, len(line) - 2)]
    if kind == "random":
        return b"\xff" + chance.randbytes(chance.randrange(200)).replace(b"\n", b"")
    if kind == "other":
        return chance.choice([b"[1]", b"5", b"null", b'"x"', b"{}", b"[" * 100_000, b"9" * 5_000, b"\x1b[2J"])
    record = json.loads(line)
    inner = record.get("problem", record)
    name = chance.choice([one for one in names if one in inner])
    if kind == "lacks":
        del inner[names[0]]
    elif kind == "huge" and name not in ("at", "seconds", "tokens", "samples"):
        inner[name] = 10**400
    elif kind.startswith("deep"):
        inner[name] = "DEEP"
        depth = 400 if kind == "deep" else 100_000
        return json.dumps(record).encode().replace(b'"DEEP"', b"[" * depth + b"]" * depth)
    else:
        inner[name] = STRANGE if name != "report" else {"x": {"y": "z"}}
    return json.dumps(record).encode()


def damage_lines(chance: random.Random, path: Path, names: tuple[str, ...], most: int) -> list[int]:
    """Damage up to ``most`` lines of a file; returns their numbers, from 1."""
    lines = contents(path).split(b"\n")[:-1]
    chosen = sorted(chance.sample(range(len(lines)), min(most, MOST, len(lines))))
    for place in chosen:
        lines[place] = damaged(chance, lines[place], names)
    content = b"".join(line + b"\n" for line in lines)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return [place + 1 for place in chosen]


def outcomes(folder: RunFolder) -> dict[tuple[Any, int], str | None]:
    """The outcome of every readable sample."""
    verdicts, found = Verdicts(folder), dict[tuple[Any, int], str | None]()
    for one in folder.samples():
        verdict = verdicts.of(folder.places[one["id"]], one["text"])[2]
        found[one["id"], one["index"]] = None if verdict is None else verdict.outcome
    return found


def commands(folder: RunFolder) -> tuple[str, list[dict[str, Any]], list[int]]:
    """Evaluate, report and export: their messages, the exported lines, and the exit statuses."""
    said, lines, codes = "", list[dict[str, Any]](), list[int]()
    for name, *options in COMMANDS:
        done = run(name, folder.path, *options, code=None)
        assert done.exception is None or isinstance(done.exception, SystemExit), (name, done.exc_info)
        assert done.exit_code in (0, 1, 2) and "Traceback" not in done.stderr and "\x1b" not in done.stderr, done.stderr
        assert done.stderr.count("error: ") == (done.exit_code > 0), done.stderr
        assert "Warning" not in done.stderr, done.stderr
        said, codes = f"{said} {done.stderr}", [*codes, done.exit_code]
        if name == "export" and done.exit_code < 2:
            lines = [json.loads(line) for line in done.stdout.splitlines()]
    return " ".join(said.split()), lines, codes


class Whole:
    """An undamaged run folder with its outcomes; tests damage copies of it."""

    def __init__(self, path: Path, chance: random.Random, problems: int, samples: int) -> None:
        self.folder = folder_of(path, chance, problems, samples)
        said, exported, codes = commands(self.folder)
        self.outcomes = outcomes(self.folder)
        assert 2 not in codes and len(exported) == len(self.outcomes) == problems * samples, said
        for place, one in enumerate(self.folder.asked()):
            judged = {outcome for (name, _), outcome in self.outcomes.items() if name == f"p/{place}"}
            named = f"problems.jsonl:{place + 1}: " in said
            assert None not in judged or named, (str(one.problem.tests)[:200], said[-999:])

    def check_damaged(self, path: Path, chance: random.Random, most: int) -> int:
        """Damage a copy and check the commands' messages; returns the number of damaged places."""
        shutil.copytree(self.folder.path, path)
        intact, named, count = dict(self.outcomes), list[tuple[str, list[int]]](), 0
        for pattern, names in NAMES.items():
            for one in sorted(path.glob(pattern)):
                before = contents(one).split(b"\n")
                bad = damage_lines(chance, one, names, chance.randrange(1, most + 1))
                named.append((one.name, bad))
                count += len(bad)
                for number in bad if pattern.startswith("samples") else ():
                    record = json.loads(before[number - 1])
                    intact.pop((record["id"], record["index"]), None)
                if one.suffix == ".gz":
                    lost = {json.loads(before[number - 1])["problem"]["id"] for number in bad}
                    intact = {key: outcome for key, outcome in intact.items() if key[0] not in lost}
        for one in (path / "tree.json", chance.choice(sorted((path / "samples").glob("*.json")))):
            one.write_bytes(chance.choice([b"", b"[5]", b"[" * 100_000, json.dumps([STRANGE]).encode(), b"\xff"]))
            named.append((one.name, []))
            count += 1
        said, exported, codes = commands(RunFolder(path))
        assert codes == [1, 1, 1], said
        found, unsure = outcomes(RunFolder(path)), {key[0] for key, was in self.outcomes.items() if was is None}
        for key, was in intact.items():  # if tests do not run, the order decides which samples get a verdict
            assert key in found and (found[key] == was or key[0] in unsure), (key, was, found.get(key))
        assert intact.keys() <= {(one["id"], one["index"]) for one in exported}, said
        assert json.loads((path / "report.json").read_text())["pass_at_k"] is not None
        for name, bad in named:
            assert name in said, (name, said)
            lines = ", ".join(map(str, bad))
            assert not bad or any(f"{name}: {how} {lines} is no " in said for how in ("line", "each of the lines")), (
                f"{name} {lines}: {said[said.find(name) - 99 :][:999]}"
            )
        shutil.rmtree(path)
        return count

    def check_manifest(self, path: Path, chance: random.Random) -> int:
        """Damage the manifest of a copy, and check that each command reports it in one line."""
        shutil.copytree(self.folder.path, path)
        place = path / "manifest.json"
        record = json.loads(place.read_bytes())
        names = ("model", "dtype", "fingerprint", "tokenizer", "chat", "params", "logprobs", "prompts", "versions")
        if chance.random() < 0.3:
            inner = chance.choice(record["prompts"])
            name = chance.choice(["id", "sha256", "tokens", "occurrence"])
            inner[name] = chance.choice([STRANGE, None, [], 10**400])
            place.write_text(json.dumps(record))
        else:
            place.write_bytes(damaged(chance, place.read_bytes().replace(b"\n", b" "), names))
        for command, *options in COMMANDS:
            done = run(command, path, *options, code=2)
            assert place.name in done.stderr and done.stderr.count("\n") == 1, done.stderr
        shutil.rmtree(path)
        return 1
