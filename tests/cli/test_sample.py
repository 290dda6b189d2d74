"""``prefixkit sample``: what it checks before it touches a file, and what a failing run leaves alone."""

from __future__ import annotations

import fcntl
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prefixkit.sampling.params import SamplingParams
from tests.command_line import lines, run

Folders = dict[str, Path]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--page-size", 1000], "--page-size must be 1 to 128 tokens, got 1000"),
        (["--page-size", 0], "--page-size must be 1 to 128 tokens, got 0"),
        (["--kv-budget", "1KiB"], "holds no page"),
        (["--device", "mps"], "--device must be a torch device of type cpu or cuda, such as cuda:0; got mps"),
        (["--model", "/nowhere"], "/nowhere"),
    ],
)
def test_overwriting_loses_nothing_to_a_run_that_is_refused(
    folders: Folders, prompts: Path, tmp_path: Path, options: list[object], says: str
) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("precious\n")
    common = ["--model", folders["plain"], "--input", prompts, "--max-new-tokens", 2, "--out", out, "--overwrite"]
    assert says in run("sample", *common, *options, code=1).stderr
    assert out.read_text() == "precious\n"


def test_a_task_brings_its_prompts_and_stops(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []

    def stream(model: Any, tokenizer: Any, prompts: dict[str, list[int]], params: SamplingParams, *_: Any, **__: Any):
        assert params == SamplingParams(stop=("X", "\n```"))
        texts.extend(map(tokenizer.decode, prompts.values()))
        raise KeyboardInterrupt

    monkeypatch.setattr("prefixkit.cli.sample.stream", stream)
    run(
        "sample",
        "--model",
        folders["chat"],
        "--task",
        "humaneval",
        "--few-shot",
        1,
        "--limit",
        2,
        "--stop",
        "X",
        code=130,
    )
    assert [text.count("<user>Complete this Python function:") for text in texts] == [2, 2]
    assert texts[0].endswith('"""')


def symlink(target: Path, link: Path) -> None:
    link.symlink_to(target)


def hard_link(target: Path, link: Path) -> None:
    link.hardlink_to(target)


@pytest.mark.parametrize("name", ["same", "relative", symlink, hard_link])
def test_the_output_is_never_the_input(
    folders: Folders,
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str | Callable[[Path, Path], None],
) -> None:
    monkeypatch.chdir(tmp_path)
    before = prompts.read_bytes()
    out = {"same": prompts, "relative": Path("..") / tmp_path.name / prompts.name}.get(str(name), tmp_path / "link")
    if callable(name):
        name(prompts, out)
    common = ["--model", folders["plain"], "--input", prompts, "--max-new-tokens", 2]
    said = run("sample", *common, "--out", out, "--overwrite", code=1).stderr
    assert f"--out {out} is the file of the prompts, --input {prompts}; choose another --out" in said
    assert prompts.read_bytes() == before


def test_a_second_writer_is_refused_and_changes_nothing(folders: Folders, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("")
    common = ["--model", folders["plain"], "--input", prompts, "--max-new-tokens", 2, "--out", out, "--overwrite"]
    with out.open("a") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        first.write("the first run's\n")
        first.flush()
        assert (
            f"cannot write to {out}: another run is writing to it; choose another --out"
            in run("sample", *common, code=1).stderr
        )
    assert out.read_text() == "the first run's\n"
    run("sample", *common)
    assert len(lines(out)) == 3


def test_nothing_is_left_of_a_new_file_when_the_model_cannot_be_loaded(prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    run("sample", "--model", tmp_path / "absent", "--input", prompts, "--out", out, code=1)
    assert not out.exists()


@pytest.mark.parametrize("command", ["sample", "inspect"])
def test_code_of_a_model_folder_is_never_run_whatever_standard_input_says(
    folders: Folders, prompts: Path, tmp_path: Path, command: str
) -> None:
    folder, trace = tmp_path / "model", tmp_path / "trace"
    shutil.copytree(folders["plain"], folder)
    code = f"open({str(trace)!r}, 'w')\nfrom transformers import LlamaConfig as C, LlamaForCausalLM as M\n"
    (folder / "own.py").write_text(code)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}}
    (folder / "config.json").write_text(json.dumps(config))
    done = run(command, "--model", folder, "--input", prompts, "--max-new-tokens", 2, code=1, typed="y\n" * 9)
    assert not trace.exists()
    assert f"{folder} needs Python code of its own" in done.stderr
    assert "trust_remote_code=True" in done.stderr  # the remedy, in Python


def test_names_are_shown_as_they_are_and_not_as_markup(folders: Folders, prompts: Path, tmp_path: Path) -> None:
    (tmp_path / "[bold]out[").mkdir()
    out = tmp_path / "[bold]out[" / "red]:warning:.jsonl"  # a closing tag to rich, which none opened
    common = ["--model", folders["plain"], "--input", prompts, "--max-new-tokens", 2]
    assert f"3 samples in {out}" in run("sample", *common, "--out", out).stderr
    assert f"{out} exists already" in run("sample", *common, "--out", out, code=1).stderr


def test_control_characters_of_prompts_ids_and_samples_reach_no_terminal(folders: Folders, tmp_path: Path) -> None:
    hostile = "\x1b]0;title\x07\r\x7f\x9b31m\u202e\u2066"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": f"{n}{hostile}", "prompt": f"{hostile}{n}"}) + "\n" for n in "ab"))
    common = ["--model", folders["plain"], "--input", prompts, "--max-new-tokens", 40, "-n", 4]
    drawn = run("inspect", *common)
    sampled = run("sample", *common, "--temperature", 3)
    prompts.write_text(prompts.read_text() * 2)
    refused = run("sample", *common, code=1)
    for shown in (drawn.stdout, drawn.stderr, sampled.stdout, sampled.stderr, refused.stderr):
        letters = set(re.sub("\rLoading weights[^\r\n]*", "", shown))  # transformers' own bar
        assert not letters & {"\u202e", "\u2066"}
        assert not {letter for letter in letters if ord(letter) < 32 or 127 <= ord(letter) < 160} - {"\n"}
    assert {json.loads(line)["id"] for line in sampled.stdout.splitlines()} == {f"{n}{hostile}" for n in "ab"}


def test_memory_that_is_not_there_is_an_error_with_a_remedy(folders: Folders, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    common = ["--model", folders["plain"], "--input", prompts, "--out", out, "--max-new-tokens", 1900]
    # More than processors address.
    said = run("sample", *common, "-n", 2_000_000_000, "--kv-budget", "99999TiB", code=1).stderr
    assert "error: out of memory (" in said
    assert "lower -n, --max-new-tokens or --kv-budget" in said
    assert not out.exists()


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_damaged_model_folder_is_named(folders: Folders, prompts: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(folders["plain"], folder)
    (folder / name).write_bytes((folder / name).read_bytes()[:1000])
    said = run("sample", "--model", folder, "--input", prompts, code=1).stderr
    assert f"of {folder} (" in said
    assert "copy or download them again" in said
