"""The command line from end to end, on a tiny random model in a folder: what is written, shown, and refused."""

import json
import os
import shutil
import signal
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

import prefixkit
from prefixkit.evaluation.campaign.folder import RunFolder
from prefixkit.evaluation.campaign.shards import ShardWriter
from prefixkit.evaluation.demo.model import FOLDER
from prefixkit.evaluation.judge.sandbox import bubblewrap
from prefixkit.testing.application.command_line import run
from prefixkit.testing.tiny import byte_tokenizer, tiny_llama


class TestSample:
    def test_every_sample_is_a_line(self, folders, prompts, tmp_path):
        out = tmp_path / "run"
        result = run(
            "sample", "--model", folders["plain"], "--input", prompts, "-n", 2, "--max-new-tokens", 6, "--run", out
        )
        records = list(RunFolder(out).samples())
        keys = [(record["id"], record["index"]) for record in records]
        assert sorted(keys, key=str) == sorted([(name, i) for name in ("a", "b", 3) for i in (0, 1)], key=str)
        assert all(list(record) == ["id", "index", "text", "tokens", "finish_reason"] for record in records)
        assert all(0 < len(record["tokens"]) <= 6 for record in records)
        assert "tokens computed" in result.stderr
        assert f"6 samples in {out}, 0 of them from before" in " ".join(result.stderr.split())

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
        refused = run("sample", "--model", folders["plain"], "--chat", *common, code=2)
        assert "this tokenizer has no chat template" in refused.stderr

    def test_a_kv_budget_makes_prompts_wait_and_changes_nothing(self, folders, prompts):
        outputs = []
        for budget in ("64KiB", "1GiB"):
            common = ["--model", folders["plain"], "--input", prompts, "-n", 3, "--max-new-tokens", 8]
            shown = run("sample", *common, "--kv-budget", budget, "--page-size", 4).stdout
            outputs.append(sorted(shown.splitlines()))
        assert outputs[0] == outputs[1]


def test_a_kv_budget_too_small_for_one_sequence_says_the_need(folders, prompts, tmp_path):
    out = tmp_path / "run"
    common = ["--model", folders["plain"], "--input", prompts, "--run", out]
    result = run("sample", *common, "--kv-budget", "20KiB", "--max-new-tokens", 100, code=2)
    assert "one sequence of prompt 0" in result.stderr
    assert "MiB" in result.stderr
    assert not out.exists()


def test_a_traceback_is_there_for_those_who_ask(folders, prompts, monkeypatch):
    monkeypatch.setenv("PREFIXKIT_TRACEBACK", "1")
    result = run("sample", "--model", folders["plain"], "--input", prompts, "-n", 0, code=1)
    assert isinstance(result.exception, ValueError)


@pytest.fixture
def interruptible():
    """SIGINT interrupts, as it does not in what a shell has started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_run_goes_on_where_it_was(folders, prompts, tmp_path, monkeypatch):
    numbers, arguments = [signal.SIGINT, signal.SIGTERM], ["--model", folders["plain"], "--input", prompts, "-n", 6]
    arguments += ["--max-new-tokens", 8, "--dtype", "float32", "--in-flight", 4, "--stop", "e", "--run"]
    interrupted = [tmp_path / number.name for number in numbers]
    write = ShardWriter.write
    for number, folder in zip(numbers, interrupted, strict=True):
        written = []

        def write_three(self, *record, number=number, written=written):
            if len(written) == 3:
                signal.raise_signal(number)
            written.append(record)
            write(self, *record)

        with monkeypatch.context() as patch:
            patch.setattr(ShardWriter, "write", write_three)
            said = run("sample", *arguments, folder, code=130).stderr
        assert "interrupted 3 of 18 samples had finished; they are in" in " ".join(said.split())
    run("sample", *arguments, tmp_path / "whole")

    def told(folder):
        return sorted((one["id"], one["index"], one["text"]) for one in RunFolder(folder).samples() if one["id"] != 3)

    for folder in interrupted:
        assert len(list(RunFolder(folder).samples())) == 3
        run("sample", *arguments, folder)
        assert told(folder) == told(tmp_path / "whole")
        assert len(list(RunFolder(folder).samples())) == 18


def test_processes_share_the_samples_of_a_run(folders, prompts, tmp_path, monkeypatch):
    """One part is of this process, and all that is left of the one that ``--devices`` starts."""
    out = tmp_path / "run"
    arguments = ["--model", folders["plain"], "--input", prompts, "-n", "17", "--max-new-tokens", "2", "--run", out]
    run("sample", *arguments, "--shard", "0/2")
    before = len(list(RunFolder(out).samples()))
    monkeypatch.chdir(Path(__file__).parents[2])  # the process imports prefixkit from there
    said = run("sample", *arguments, "--devices", "cpu").stderr
    assert "[cpu] " in said and f"51 samples in {out}, {before} of them from before" in " ".join(said.split())
    assert 0 < before < len(list(RunFolder(out).samples())) == 51
    assert {path.stem[:4] for path in (out / "samples").iterdir()} == {"0of2", "0of1"}
    said = run("sample", *arguments).stderr
    assert "51 of them from before" in said
    assert "tokens computed" not in said, "nothing is missing"


@pytest.mark.parametrize("name", ["manifest.html", "samples/0of1-00000.html", "tree.html", "problems.jsonl.gz"])
def test_a_report_does_not_take_the_place_of_the_campaigns_files(folders, prompts, tmp_path, name):
    arguments = ["--model", folders["plain"], "--input", prompts, "-n", "1", "--max-new-tokens", "1"]
    run("sample", *arguments, "--run", tmp_path / "run")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    said = run("report", tmp_path / "run", "--out", tmp_path / "run" / name, code=2).stderr
    assert "belongs to the run folder" in " ".join(said.split())
    (tmp_path / "config.json").write_text("{}")
    said = run("report", tmp_path / "run", "--out", tmp_path / "config.html", code=2).stderr
    assert "is no earlier report" in " ".join(said.split())
    assert {path: path.read_bytes() for path in before} == before
    for _ in range(2):
        run("report", tmp_path / "run", "--out", tmp_path / "report.html")


def test_half_a_surrogate_pair_is_no_stop_string(folders, prompts, tmp_path):
    arguments = ["--model", folders["plain"], "--input", prompts, "--run", tmp_path / "run"]
    assert "half a surrogate pair" in run("sample", *arguments, "--stop", "\\ud800", code=2).stderr
    assert not (tmp_path / "run").exists()


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
        result = run("inspect", "--model", folders["plain"], "--input", prompts, *options, code=2)
        assert result.stderr.startswith("error: ")


def test_env_says_which_backend_and_why():
    out = run("env").stdout
    assert version("torch") in out
    assert "backend" in out


class TestDemo:
    """The demo with a tiny model in place of SmolLM2: its shape, not its wit."""

    @pytest.fixture(autouse=True)
    def folder(self, folders, tmp_path, monkeypatch):
        """A cache with the tiny model at SmolLM2's place."""
        monkeypatch.setenv("PREFIXKIT_CACHE", str(tmp_path / "cache"))
        return shutil.copytree(folders["chat"], tmp_path / "cache" / FOLDER)

    def test_leaves_a_run_folder_a_report_and_a_picture(self, tmp_path):
        out = tmp_path / "demo"
        shown = run("demo", "--run", out, "-n", 2, "--max-new-tokens", 4).stdout
        assert len(list(RunFolder(out).samples())) == 8
        assert "4 problems after the same 5 solved examples, 2 samples of each" in shown
        assert "shared by 8" in shown
        assert "HumanEval/22: where its samples part" in shown
        assert "tokens computed" in shown
        assert "pass@k, mean over 4 problems" in shown or "nothing was judged" in shown
        assert "identical to the unpatched model's" in shown
        assert "<html" in (out / "report.html").read_text()

    def test_without_a_sandbox_it_says_that_nothing_was_judged_and_how_to_get_one(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PATH", str(tmp_path))
        bubblewrap.executable.cache_clear()
        try:
            shown = run("demo", "--run", tmp_path / "demo", "-n", 1, "--max-new-tokens", 2).stdout
        finally:
            bubblewrap.executable.cache_clear()
        (line,) = [line for line in shown.splitlines() if line.startswith("nothing was judged: ")]
        assert "apt-get install bubblewrap" in line
        assert "4 candidate programs in" in shown and "identical to the unpatched model's" in shown

    def test_says_so_when_tokens_differ_and_leaves_the_samples_where_the_environment_says(self, tmp_path, monkeypatch):
        def other(model, ids, **options):
            return torch.cat((ids, torch.zeros(1, 2, dtype=torch.int64)), 1)

        monkeypatch.setattr(LlamaForCausalLM, "generate", other)
        monkeypatch.setenv("PREFIXKIT_DEMO_RUN", str(tmp_path / "elsewhere"))
        result = run("demo", "-n", 1, "--max-new-tokens", 2, code=1)
        assert "HumanEval/22: greedy gives" in result.stderr
        assert len(list(RunFolder(tmp_path / "elsewhere").samples())) == 4


@pytest.mark.parametrize("command", ["demo", "sample"])
def test_the_help_of_seed_says_what_it_fixes_in_which_dtype(command):
    words = " ".join(run(command, "--help").output.replace("│", " ").split())
    for part in ("place among equal prompts", "In float32", "in bfloat16 and float16 rounding changes many samples"):
        assert part in words


def test_a_budget_that_is_no_size_is_named_by_its_option(folders, prompts):
    result = run("sample", "--model", folders["plain"], "--input", prompts, "--kv-budget", "2 gigs", code=2)
    assert 'error: --kv-budget: a size must look like "2GiB"' in " ".join(result.stderr.split())


def test_a_stop_string_may_be_a_special_token(folders, prompts, tmp_path):
    """The tiny model's end token stands in for one that is not in the list of stop tokens."""
    folder = tmp_path / "unending"
    model = tiny_llama()
    model.generation_config.eos_token_id = 258
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    options = ["-n", 20, "--max-new-tokens", 40, "--temperature", 1.5, "--dtype", "float32", "--stop", "<|end|>"]
    result = run("sample", "--model", folder, "--input", prompts, "--limit", 1, *options)
    records = [json.loads(line) for line in result.stdout.splitlines()]
    ended = [record for record in records if 256 in record["tokens"]]
    assert ended, "no sample has the end token; take more samples"
    for record in ended:
        assert record["tokens"].index(256) == len(record["tokens"]) - 1
        assert record["finish_reason"] == "stop" and "<|end|>" not in record["text"]
