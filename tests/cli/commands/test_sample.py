"""``prefixkit sample``: what it checks before it touches a file, and what a failing run leaves alone."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from prefixkit.evaluation.campaign.folder import RunFolder
from prefixkit.testing.application.command_line import run

Folders = dict[str, Path]


def test_a_task_brings_its_prompts_tests_and_stops(folders: Folders, tmp_path: Path) -> None:
    common = ["--model", folders["chat"], "--task", "humaneval", "--few-shot", 1, "--limit", 2, "--max-new-tokens", 2]
    run("sample", *common, "--stop", "X", "--run", tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    for prompt, asked in zip(folder.manifest.prompts, folder.asked(), strict=True):
        assert prompt.params["stop"] == ["X", "\n```"]
        questions = [one["content"] for one in asked.problem.messages if one["role"] == "user"]
        assert [text.startswith("Complete this Python function:") for text in questions] == [True, True]
        assert asked.problem.tests is not None
        assert asked.begun.endswith('"""')


def test_a_run_is_gone_on_with_and_grows(folders: Folders, prompts: Path, tmp_path: Path) -> None:
    common = [
        "sample",
        "--model",
        folders["plain"],
        "--input",
        prompts,
        "--max-new-tokens",
        3,
        "--run",
        tmp_path / "run",
    ]
    run(*common, "-n", 2)
    assert "9 samples in" in run(*common, "-n", 3).stderr
    assert "12 samples in" in " ".join(run(*common, "-n", 5, "--first-index", 4).stderr.split())
    indices = sorted({one["index"] for one in RunFolder(tmp_path / "run").samples()})
    assert indices == [0, 1, 2, 4]


def test_options_may_come_from_a_file(folders: Folders, prompts: Path, tmp_path: Path) -> None:
    config = tmp_path / "options.toml"
    config.write_text('max_new_tokens = 3\nn = 2\nstop = ["Q"]\nlogprobs = true\n', encoding="utf-8-sig")
    common = ["sample", "--model", folders["plain"], "--input", prompts, "--config", config]
    found = [json.loads(line) for line in run(*common).stdout.splitlines()]
    assert len(found) == 6 and all(len(one["tokens"]) <= 3 and "logprobs" in one for one in found)
    assert len(run(*common, "-n", 1).stdout.splitlines()) == 3, "the command line goes before the file"
    config.write_text('n = 1\nmax_new_tokens = 40\ntemperature = 1\nstop = "1f"\nlogprobs = false\nchat = false\n')
    texts = [json.loads(line)["text"] for line in run(*common).stdout.splitlines()]
    config.write_text('n = 1\nmax_new_tokens = 40\nstop = ["1f"]\n')
    assert texts == [json.loads(line)["text"] for line in run(*common).stdout.splitlines()], "one string is one stop"


def test_a_limit_beyond_all_is_all(folders: Folders, prompts: Path) -> None:
    common = ["sample", "--model", folders["plain"], "--input", prompts, "--max-new-tokens", 1]
    assert len(run(*common, "--limit", 10**20).stdout.splitlines()) == 3


def test_quiet_says_nothing(folders: Folders, prompts: Path, tmp_path: Path) -> None:
    common = ["sample", "--model", folders["plain"], "--input", prompts, "--max-new-tokens", 2, "--quiet"]
    shown = run(*common, "--run", tmp_path / "run")
    assert shown.output == ""
    assert len(run(*common).stdout.splitlines()) == 3


def test_prompts_may_come_from_standard_input(folders: Folders, prompts: Path) -> None:
    common = ["sample", "--model", folders["plain"], "--max-new-tokens", 2, "--temperature", 0]
    piped = run(*common, "--input", "-", typed=prompts.read_text())
    assert sorted(piped.stdout.splitlines()) == sorted(run(*common, "--input", prompts).stdout.splitlines())


def test_stop_strings_may_hold_escapes(folders: Folders, prompts: Path, tmp_path: Path) -> None:
    common = ["sample", "--model", folders["plain"], "--input", prompts, "--max-new-tokens", 2]
    run(*common, "--stop", r"\n\x41\u00e9\\", "--run", tmp_path / "run")
    assert RunFolder(tmp_path / "run").manifest.params["stop"] == ["\nAé\\"]


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
    done = run(command, "--model", folder, "--input", prompts, "--max-new-tokens", 2, code=2, typed="y\n" * 9)
    assert not trace.exists()
    assert f"{folder} needs Python code of its own" in done.stderr
    assert "trust_remote_code=True" in done.stderr  # the remedy, in Python


def test_names_are_shown_as_they_are_and_not_as_markup(folders: Folders, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "[bold]out[" / "red]:warning:"  # a closing tag to rich, which none opened
    common = ["--model", folders["plain"], "--input", prompts, "--max-new-tokens", 2]
    assert f"3 samples in {out}" in run("sample", *common, "--run", out).stderr
    assert (
        f"{out} holds samples of another campaign" in run("sample", *common, "--run", out, "--seed", 1, code=2).stderr
    )


def test_control_characters_of_prompts_ids_and_samples_reach_no_terminal(folders: Folders, tmp_path: Path) -> None:
    hostile = "\x1b]0;title\x07\r\x7f\x9b31m\u202e\u2066"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": f"{n}{hostile}", "prompt": f"{hostile}{n}"}) + "\n" for n in "ab"))
    common = ["--model", folders["plain"], "--input", prompts, "--max-new-tokens", 40, "-n", 4]
    drawn = run("inspect", *common)
    sampled = run("sample", *common, "--temperature", 3)
    prompts.write_text(prompts.read_text() * 2)
    refused = run("sample", *common, code=2)
    for shown in (drawn.stdout, drawn.stderr, sampled.stdout, sampled.stderr, refused.stderr):
        letters = set(re.sub("\rLoading weights[^\r\n]*", "", shown))  # transformers' own bar
        assert not letters & {"\u202e", "\u2066"}
        assert not {letter for letter in letters if ord(letter) < 32 or 127 <= ord(letter) < 160} - {"\n"}
    assert {json.loads(line)["id"] for line in sampled.stdout.splitlines()} == {f"{n}{hostile}" for n in "ab"}


def test_memory_that_is_not_there_is_an_error_with_a_remedy(folders: Folders, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    common = ["--model", folders["plain"], "--input", prompts, "--run", out, "--max-new-tokens", 1900]
    # More than processors address.
    said = run(
        "sample", *common, "-n", 2_000_000_000, "--in-flight", 2_000_000_000, "--kv-budget", "99999TiB", code=1
    ).stderr
    assert "error: out of memory (" in said
    assert "lower -n, --in-flight, --max-new-tokens or --kv-budget" in said
    assert not out.exists()


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_damaged_model_folder_is_named(folders: Folders, prompts: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(folders["plain"], folder)
    (folder / name).write_bytes((folder / name).read_bytes()[:1000])
    said = run("sample", "--model", folder, "--input", prompts, code=2).stderr
    assert f"of {folder} (" in said
    assert "copy or download them again" in said
