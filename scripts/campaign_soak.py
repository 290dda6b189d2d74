"""Campaigns that are killed, that fill a disk, and that have a million samples; prints its results, or fails.

python scripts/campaign_soak.py kills --runs 20 --kills 10
python scripts/campaign_soak.py devices --kills 10
python scripts/campaign_soak.py disk
python scripts/campaign_soak.py million
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from prefixkit.engine.request import Sample  # noqa: E402
from prefixkit.engine.sharing_report import Report  # noqa: E402
from prefixkit.evaluation.campaign.folder import Asked, Part, RunFolder, create  # noqa: E402
from prefixkit.evaluation.campaign.manifest import Manifest, describe_prompts  # noqa: E402
from prefixkit.evaluation.campaign.run import Goal, run_campaign  # noqa: E402
from prefixkit.evaluation.tasks.problem import Problem  # noqa: E402
from prefixkit.sampling.params import SamplingParams  # noqa: E402

SAMPLES = 24


def folder_of(path: Path, tokens: list[np.ndarray]) -> RunFolder:
    problems = [Problem(f"p/{i}", "soak", (), "x") for i in range(len(tokens))]
    prompts = describe_prompts([one.id for one in problems], tokens, [{}] * len(tokens))
    manifest = Manifest("tiny", "float32", "f", "t", False, {"seed": 5}, True, prompts, {})
    return create(path, manifest, [Asked(one, "") for one in problems])


def real(path: Path, disturb: random.Random | None = None, part: Part | None = None, n: int = SAMPLES) -> None:
    """Run one process of a campaign of a tiny model to its end."""
    import prefixkit
    from prefixkit.evaluation.campaign import shards
    from prefixkit.testing.tiny import ByteTokenizer, tiny_llama

    shards.ShardWriter.__init__.__defaults__ = (16, 1 << 20)
    tokens = [np.frombuffer(f"def f_{i % 7}(x): return".encode(), np.uint8).astype(np.int32) for i in range(8)]
    params = SamplingParams(n=n, seed=5, max_new_tokens=24, temperature=1.0)
    model = prefixkit.patch(tiny_llama())
    running = 16 if disturb is None else disturb.choice([3, 16, 40])
    session = prefixkit.Session(model, ByteTokenizer(), kv_budget="8MiB", most_running=running)

    def sampler(requests, give):
        return session.run(requests, return_samples=False, on_sample=give).report

    run_campaign(folder_of(path, tokens), tokens, [params] * 8, Goal(0, [n] * 8, part or Part()), sampler)


def forked(*arguments, **options) -> int:
    """Run :func:`real` in a process of its own; returns its id."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        real(*arguments, **options)
        code = 0
    except KeyboardInterrupt:
        code = 130
    except OSError as error:
        print(f"  {error}", flush=True)
        code = 3
    finally:
        os._exit(code)


def told(path: Path) -> dict:
    found = {}
    for one in RunFolder(path).samples():
        key = one["id"], one["index"]
        assert key not in found, f"{key} is there twice"
        found[key] = one
    return found


def check(path: Path, whole: dict) -> str:
    """Assert that a run's samples are those of an uninterrupted run, except at near-ties; returns a line about them."""
    found = told(path)
    assert found.keys() == whole.keys(), f"{len(whole.keys() - found.keys())} samples are lost"
    worst, ties = 0.0, 0
    for key, one in found.items():
        other, same = whole[key], len(one["tokens"])
        if one["tokens"] != other["tokens"]:
            pairs = enumerate(zip(one["tokens"], other["tokens"], strict=False))
            same, tokens = next(((i, pair) for i, pair in pairs if pair[0] != pair[1]), (0, (0, 0)))
            # A random number within rounding of the boundary between two tokens: neighbours in the vocabulary.
            assert abs(tokens[0] - tokens[1]) == 1, (key, one["tokens"], other["tokens"])
            ties += 1
        else:
            assert one == other | {"logprobs": one["logprobs"]}, (key, one, other)
        differences = np.subtract(one["logprobs"][:same], other["logprobs"][:same])
        worst = max(worst, float(np.abs(differences).max(initial=0)))
    assert worst <= 1e-4, worst
    assert ties <= len(found) / 50, f"{ties} of {len(found)} samples part"
    said = f"{len(found)} samples, 0 lost, 0 twice; log-probabilities within {worst:.1e}"
    return said + (f"; {ties} part at a near-tie" if ties else "")


def held(path: Path) -> int:
    """Bytes of all shards."""
    return sum(one.stat().st_size for one in (path / "samples").glob("*.jsonl"))


def wait_for(path: Path, more: float, processes: list[int]) -> None:
    """Wait until this many more bytes are written, or a process has ended."""
    begun = held(path)
    while held(path) < begun + more:
        if any(os.waitid(os.P_PID, one, os.WEXITED | os.WNOHANG | os.WNOWAIT) for one in processes):
            return
        time.sleep(0.001)


def kills(runs: int, times: int, seed: int, work: Path) -> None:
    import prefixkit  # noqa: F401 - once, before processes are forked
    from prefixkit.testing.tiny import tiny_llama  # noqa: F401

    assert os.waitpid(forked(work / "whole"), 0)[1] == 0
    whole, rng = told(work / "whole"), random.Random(seed)
    assert len(whole) == 8 * SAMPLES
    for run in range(runs):
        path, killed, torn, second, finished = work / f"run{run}", 0, 0, 0, 0
        while killed < times:
            if finished:  # all was there: more samples are wanted
                shutil.rmtree(path)
                finished = 0
            parts = [Part()] if rng.random() < 0.7 else [Part(0, 2), Part(1, 2)]
            at_work = [forked(path, rng, part) for part in parts]
            wait_for(path, rng.uniform(0, 0.3) * held(work / "whole"), at_work)
            if rng.random() < 0.3:  # a second writer, which is refused
                second += os.waitpid(forked(path, rng, parts[0]), 0)[1] >> 8 == 3
            time.sleep(rng.uniform(0, 0.02))
            for process in at_work:
                os.kill(process, rng.choice([signal.SIGKILL] * 4 + [signal.SIGTERM]))
                status = os.waitpid(process, 0)[1]
                killed += status != 0
                finished += status == 0
            for shard in (path / "samples").glob("*.jsonl"):
                if rng.random() < 0.5 and not shard.with_suffix(".json").exists() and shard.stat().st_size > 9:
                    with shard.open("ab") as file:  # as after a loss of power
                        file.write(rng.choice([b'{"id": "p/1", "ind', b"\0" * 50, b"{", b'{"id": "p/1"}']))
                        torn += 1
        assert os.waitpid(forked(path, rng), 0)[1] == 0
        said = check(path, whole)
        print(f"run {run}: {killed} kills, {torn} torn tails, {second} second writers refused; {said}", flush=True)
        shutil.rmtree(path)


def devices(times: int, seed: int, work: Path) -> None:
    """Kill a command that has started two processes: they end with it, and the same command resumes the run."""
    from prefixkit.testing.application.command_line import save_model, write_prompts

    (work / "model").mkdir()
    save_model(work / "model", chat=False)
    command = [sys.executable, "-m", "prefixkit", "sample", "--model", work / "model", "--logprobs", "--quiet"]
    command += ["--input", write_prompts(work / "prompts.jsonl"), "-n", "1500", "--max-new-tokens", "24"]
    subprocess.run([*command, "--run", work / "whole"], check=True, cwd=ROOT)
    whole, rng, path, killed = told(work / "whole"), random.Random(seed), work / "run", 0
    both = [*command, "--devices", "cpu,cpu", "--run", path]
    while killed < times:
        with subprocess.Popen(both, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT) as process:
            wait_for(path, rng.uniform(0, 0.3) * held(work / "whole"), [process.pid])
            process.send_signal(rng.choice([signal.SIGKILL, signal.SIGTERM]))
            process.communicate()  # until none of them has standard output
        killed += process.returncode != 0
        if not process.returncode:  # all was there: more samples are wanted
            check(path, whole)
            shutil.rmtree(path)
    subprocess.run(both, check=True, cwd=ROOT)
    print(f"two processes of one command: {killed} kills; {check(path, whole)}")


def disk(work: Path) -> None:
    """Sample to a file system of few KiB, which fills in the middle of a line, and is then made larger."""
    assert os.waitpid(forked(work / "whole"), 0)[1] == 0
    whole, place = told(work / "whole"), work / "small"
    place.mkdir()
    for size in (24, 40, 64):
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(place)], check=True)
        try:
            assert os.waitpid(forked(place / "run"), 0)[1] >> 8 == 3
            subprocess.run(["mount", "-o", "remount,size=16m", str(place)], check=True)
            there = len(told(place / "run")) if (place / "run" / "manifest.json").exists() else 0
            assert os.waitpid(forked(place / "run"), 0)[1] == 0
            said = check(place / "run", whole)
            print(f"a disk of {size} KiB: {there} samples before it was full; {said}", flush=True)
        finally:
            subprocess.run(["umount", str(place)], check=True)


def million(work: Path, prompts: int = 1000, n: int = 1000) -> None:
    tokens = [np.arange(i, i + 200, dtype=np.int32) for i in range(prompts)]
    params = [SamplingParams()] * prompts
    memory = []

    def sampler(requests, give):
        for request in requests:
            for index in request.sample_indices:
                text = f"    return sorted(numbers)[{index}] + {request.prompt_index}\n" * 4
                give(Sample(request.prompt_index, index, [*range(index % 90)], [-0.25] * (index % 90), text, "stop"))
            memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        return Report()

    began = time.perf_counter()
    folder = folder_of(work / "million", tokens)
    run_campaign(folder, tokens, params, Goal(0, [n] * prompts), sampler)
    took = time.perf_counter() - began
    size = sum(path.stat().st_size for path in folder.shards.iterdir())
    print(f"{prompts * n:,} samples written in {took:.1f} s, {size / 2**20:,.0f} MiB")
    tenth = len(memory) // 10
    print(
        f"resident memory at most, after a tenth and at the end: {memory[tenth] / 1024:.0f}, {memory[-1] / 1024:.0f} "
        "MiB"
    )
    assert memory[-1] < memory[tenth] + 20_000
    for goal in (Goal(0, [n] * prompts), Goal(0, [n + 1] * prompts, Part(3, 8))):
        began = time.perf_counter()
        progress = run_campaign(folder, tokens, params, goal, sampler)
        took = time.perf_counter() - began
        print(f"resumed in {took:.1f} s: {progress.there:,} samples were there, {progress.wanted:,} were missing")
        assert took < 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kills", "devices", "disk", "million"])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    given = parser.parse_args()
    print(f"seed {given.seed}")
    with tempfile.TemporaryDirectory() as work:
        if given.what == "kills":
            kills(given.runs, given.kills, given.seed, Path(work))
        elif given.what == "devices":
            devices(given.kills, given.seed, Path(work))
        else:
            {"disk": disk, "million": million}[given.what](Path(work))


if __name__ == "__main__":
    main()
