"""The command line from end to end, on a tiny random model in a folder: what is written, shown, and refused."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

import prefixkit
from prefixkit.demo.model import FOLDER
from tests.command_line import lines, run
from tests.tiny import byte_tokenizer, tiny_llama


class TestSample:
    def test_every_sample_is_a_line(self, folders, prompts, tmp_path):
        out = tmp_path / "out.jsonl"
        result = run(
            "sample", "--model", folders["plain"], "--input", prompts, "-n", 2, "--max-new-tokens", 6, "--out", out
        )
        records = lines(out)
        keys = [(record["id"], record["index"]) for record in records]
        assert sorted(keys, key=str) == sorted([(name, i) for name in ("a", "b", 3) for i in (0, 1)], key=str)
        assert all(list(record) == ["id", "index", "text", "tokens", "finish_reason"] for record in records)
        assert all(0 < len(record["tokens"]) <= 6 for record in records)
        assert "tokens computed" in result.stderr
        assert "6 samples in" in result.stderr

    def test_they_are_those_of_generate(self, folders, prompts):
        options = ["--temperature", 0.7, "--top-p", 0.9, "--top-k", 50, "--min-p", 0.01, "--repetition-penalty", 1.1]
        options += ["--seed", 5, "--stop", "Q", "--max-new-tokens", 8, "-n", 2, "--logprobs", "--page-size", 1]
        result = run("sample", "--model", folders["plain"], "--input", prompts, *options)
        written = {(record["id"], record["index"]): record for record in map(json.loads, result.stdout.splitlines())}
        expected = prefixkit.generate(
            prefixkit.patch(tiny_llama()),
            byte_tokenizer(chat=False),
            ["def one():", "def two():", "while True:"],
            n=2,
            temperature=0.7,
            top_p=0.9,
            top_k=50,
            min_p=0.01,
            repetition_penalty=1.1,
            max_new_tokens=8,
            seed=5,
            stop="Q",
        )
        assert len(written) == len(expected) == 6
        for sample in expected:
            record = written["a" if sample.prompt_index == 0 else "b" if sample.prompt_index == 1 else 3, sample.index]
            assert (record["tokens"], record["text"]) == (sample.tokens, sample.text)
            assert record["finish_reason"] == sample.finish_reason
            assert record["logprobs"] == pytest.approx(sample.logprobs, abs=1e-5)

    def test_the_chat_template_is_used_where_there_is_one(self, folders, prompts):
        common = ["--input", prompts, "--limit", 1, "--max-new-tokens", 12, "--temperature", 0]
        texts = ["<user>def one():<assistant>", "def one():"]
        model, tokenizer = prefixkit.patch(tiny_llama()), byte_tokenizer()
        chat, plain = prefixkit.generate(model, tokenizer, texts, temperature=0, max_new_tokens=12)
        assert chat.tokens != plain.tokens, "the samples tell which text was the prompt"
        for asked, expected in (
            ([folders["chat"]], chat),
            ([folders["chat"], "--no-chat"], plain),
            ([folders["plain"]], plain),
        ):
            assert json.loads(run("sample", "--model", *asked, *common).stdout)["tokens"] == expected.tokens
        refused = run("sample", "--model", folders["plain"], "--chat", *common, code=1)
        assert "this tokenizer has no chat template" in refused.stderr

    def test_a_kv_budget_makes_prompts_wait_and_changes_nothing(self, folders, prompts, tmp_path):
        outputs = []
        for budget in ("64KiB", "1GiB"):
            out = tmp_path / f"{budget}.jsonl"
            common = ["--model", folders["plain"], "--input", prompts, "-n", 3, "--max-new-tokens", 8]
            run("sample", *common, "--kv-budget", budget, "--page-size", 4, "--out", out)
            outputs.append(sorted(out.read_text().splitlines()))
        assert outputs[0] == outputs[1]


class TestRefusals:
    """Bad input is refused in one line, before a model is loaded, and leaves nothing behind.

    The folder has no weights: to load the model would be another error.
    """

    def test_a_folder_without_weights_cannot_be_loaded(self, folders, prompts):
        assert "safetensors" in run("sample", "--model", folders["weightless"], "--input", prompts, code=1).stderr

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            (["-n", 0], "n must be at least 1"),
            (["--top-p", 0], "top_p must be in (0, 1]"),
            (["--temperature", -1], "temperature must be 0"),
            (["--max-new-tokens", 0], "max_new_tokens must be at least 1"),
            (["--kv-budget", "lots"], "a size must look like"),
            (["--dtype", "int3"], "--dtype must be one of auto, float32, bfloat16, float16, got int3"),
            (["--task", "humaneval"], "give either --input FILE or --task NAME"),
        ],
    )
    def test_options(self, folders, prompts, options, says):
        result = run("sample", "--model", folders["weightless"], "--input", prompts, *options, code=1)
        assert says in result.stderr
        assert result.stdout == ""

    def test_a_torn_line(self, folders, prompts):
        prompts.write_text(prompts.read_text() + '{"id": "c", "pro')
        result = run("sample", "--model", folders["weightless"], "--input", prompts, code=1)
        assert f"{prompts}:4: not a JSON object, perhaps torn" in result.stderr

    def test_an_output_that_cannot_be_written(self, folders, prompts, tmp_path):
        out = tmp_path / "absent" / "out.jsonl"
        result = run("sample", "--model", folders["weightless"], "--input", prompts, "--out", out, code=1)
        assert f"cannot write to {out}: No such file or directory" in result.stderr

    def test_an_output_that_exists(self, folders, prompts, tmp_path):
        out = tmp_path / "out.jsonl"
        out.write_text("precious\n")
        result = run("sample", "--model", folders["weightless"], "--input", prompts, "--out", out, code=1)
        assert "give --overwrite" in result.stderr
        assert out.read_text() == "precious\n"

    def test_a_model_that_is_not_there(self, prompts, tmp_path):
        out = tmp_path / "out.jsonl"
        result = run("sample", "--model", tmp_path / "nothing", "--input", prompts, "--out", out, code=1)
        assert result.stderr.startswith("error: ")
        assert not out.exists()


def test_a_kv_budget_too_small_for_one_sequence_says_the_need(folders, prompts, tmp_path):
    out = tmp_path / "out.jsonl"
    common = ["--model", folders["plain"], "--input", prompts, "--out", out]
    result = run("sample", *common, "--kv-budget", "20KiB", "--max-new-tokens", 100, code=1)
    assert "prompt 0 needs KV for" in result.stderr
    assert "MiB" in result.stderr
    assert not out.exists()


def test_a_device_that_is_not_there(folders, prompts):
    result = run("sample", "--model", folders["plain"], "--input", prompts, "--device", "cuda:127", code=1)
    assert "--device cuda:127: torch" in result.stderr and "CUDA device" in result.stderr
    result = run("sample", "--model", folders["plain"], "--input", prompts, "--device", "toaster", code=1)
    assert "--device must be a torch device" in result.stderr


def test_a_traceback_is_there_for_those_who_ask(folders, prompts, monkeypatch):
    monkeypatch.setenv("PREFIXKIT_TRACEBACK", "1")
    result = run("sample", "--model", folders["plain"], "--input", prompts, "-n", 0, code=1)
    assert isinstance(result.exception, ValueError)


def interrupt_after_a_line(command, out):
    """Run a command, press Ctrl-C once ``out`` has grown, and return its exit status and what it said."""
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],  # prefixkit is imported from there
        # Tests that run in the background inherit an ignored Ctrl-C, and would hand it on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        deadline = time.monotonic() + 120
        while not (out.exists() and out.stat().st_size) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        return process.wait(timeout=60), process.stderr.read()
    finally:
        process.kill()


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_an_interrupted_run_keeps_what_had_finished(folders, prompts, tmp_path):
    out = tmp_path / "out.jsonl"
    # One prompt at a time fits, so the first samples finish long before the last.
    arguments = ["--model", folders["plain"], "--input", prompts, "-n", "400", "--max-new-tokens", "500"]
    arguments += ["--kv-budget", "8MiB", "--stop", "e", "--out", out]
    command = [sys.executable, "-c", "from prefixkit.cli.app import main; main()", "sample", *map(str, arguments)]
    returncode, said = interrupt_after_a_line(command, out)
    assert returncode == 130, said
    finished = lines(out)  # every line is whole
    assert out.read_bytes().endswith(b"\n")
    assert f"{len(finished)} of 1200 samples had finished; they are in {out}, every line whole" in said
    assert all(record["finish_reason"] in {"stop", "length"} for record in finished)


class TestInspect:
    def test_draws_the_tree_and_says_what_would_be_saved(self, folders, prompts):
        result = run("inspect", "--model", folders["plain"], "--input", prompts, "-n", 4, "--max-new-tokens", 11)
        assert "3 prompts, 31 tokens, 27 of them distinct" in result.stdout
        assert "4 tokens  shared by 8  “def”" in result.stdout
        assert "6 tokens  shared by 4  b  “two():”" in result.stdout
        assert "147" in result.stdout  # computed: 27 + 12 samples x 10
        assert "244" in result.stdout  # a plain batch: 4 x 31 + 12 x 10
        assert "One token's KV takes 512 bytes" in result.stdout  # 2 layers, K and V, 2 heads of 16, float32

    def test_needs_no_weights(self, folders, prompts):
        result = run("inspect", "--model", folders["weightless"], "--input", prompts, "--dtype", "bfloat16")
        assert "One token's KV takes 256 bytes" in result.stdout

    @pytest.mark.parametrize("options", [["-n", 0], ["--max-new-tokens", 0], ["--most", 0], ["--page-size", 129]])
    def test_refuses_what_cannot_run(self, folders, prompts, options):
        result = run("inspect", "--model", folders["plain"], "--input", prompts, *options, code=1)
        assert result.stderr.startswith("error: ")


def test_env_says_which_backend_and_why():
    out = run("env").stdout
    assert torch.__version__ in out
    assert "backend" in out


class TestDemo:
    """The demo with a tiny model in place of SmolLM2: its shape, not its wit."""

    @pytest.fixture(autouse=True)
    def folder(self, folders, tmp_path, monkeypatch):
        """A cache with the tiny model at SmolLM2's place."""
        monkeypatch.setenv("PREFIXKIT_CACHE", str(tmp_path / "cache"))
        return shutil.copytree(folders["chat"], tmp_path / "cache" / FOLDER)

    def test_leaves_a_report_a_file_and_a_picture(self, tmp_path):
        out = tmp_path / "demo.jsonl"
        shown = run("demo", "--out", out, "-n", 2, "--max-new-tokens", 4).stdout
        assert len(lines(out)) == 8
        assert "4 problems after the same 5 solved examples, 2 samples of each" in shown
        assert "shared by 8" in shown
        assert "HumanEval/22: where its samples part" in shown
        assert "tokens computed" in shown
        assert "identical to the unpatched model's" in shown

    def test_says_so_when_tokens_differ(self, tmp_path, monkeypatch):
        def other(model, ids, **options):
            return torch.cat((ids, torch.zeros(1, 2, dtype=torch.int64)), 1)

        monkeypatch.setattr(LlamaForCausalLM, "generate", other)
        result = run("demo", "--out", tmp_path / "demo.jsonl", "-n", 1, "--max-new-tokens", 2, code=1)
        assert "HumanEval/22: greedy gives" in result.stderr

    def test_its_file_can_be_set_from_outside(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PREFIXKIT_DEMO_OUT", str(tmp_path / "elsewhere.jsonl"))
        run("demo", "-n", 1, "--max-new-tokens", 2)
        assert len(lines(tmp_path / "elsewhere.jsonl")) == 4


@pytest.mark.parametrize("command", ["demo", "sample"])
def test_the_help_of_seed_says_what_it_fixes_in_which_dtype(command):
    words = " ".join(run(command, "--help").output.replace("│", " ").split())
    for part in ("place among equal prompts", "In float32", "in bfloat16 and float16 rounding changes many samples"):
        assert part in words


def test_a_budget_that_is_no_size_is_named_by_its_option(folders, prompts):
    result = run("sample", "--model", folders["plain"], "--input", prompts, "--kv-budget", "2 gigs", code=1)
    assert 'error: --kv-budget: a size must look like "2GiB"' in " ".join(result.stderr.split())


def test_a_stop_string_may_be_a_special_token(folders, prompts, tmp_path):
    """The tiny model's end token stands in for one that is not in the list of stop tokens."""
    folder = tmp_path / "unending"
    model = tiny_llama()
    model.generation_config.eos_token_id = 258
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    options = ["-n", 40, "--max-new-tokens", 40, "--temperature", 1.5, "--dtype", "float32", "--stop", "<|end|>"]
    result = run("sample", "--model", folder, "--input", prompts, *options)
    records = [json.loads(line) for line in result.stdout.splitlines()]
    ended = [record for record in records if 256 in record["tokens"]]
    assert ended, "no sample has the end token; take more samples"
    for record in ended:
        assert record["tokens"].index(256) == len(record["tokens"]) - 1
        assert record["finish_reason"] == "stop" and "<|end|>" not in record["text"]
