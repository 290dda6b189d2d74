"""Memory over long runs: random histories of an engine, beams that are preempted, samples under memory pressure.

python scripts/memory_soak.py machine --part 1     # one of 10 parts: 201 histories of at most 100 steps
python scripts/memory_soak.py beams --steps 10000
python scripts/memory_soak.py pressure --preemptions 500

Prints its results, or fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from prefixkit.engine.memory import pages_per_run  # noqa: E402
from prefixkit.engine.policy import MemoryPolicy  # noqa: E402
from prefixkit.engine.request import BeamParams, Request  # noqa: E402
from prefixkit.sampling.params import SamplingParams  # noqa: E402
from prefixkit.tree.pages import pages_for  # noqa: E402

PARTS = 10
HISTORIES = 67  # for each of three page sizes: 10 parts have 2,010
SEARCHES = 24  # searches of one engine
SHARE = 0.1  # share of the pages that all samples need at once


def machine(part: int) -> None:
    """Run a part of the histories of ``tests/engine/test_state_machine.py``; its number is the seed."""
    test = "tests/engine/test_state_machine.py"
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", f"--hypothesis-seed={part}", test]
    size = {"PREFIXKIT_SOAK_RUNS": str(HISTORIES), "PREFIXKIT_SOAK_STEPS": "100"}
    print(f"part {part} of {PARTS}: {HISTORIES} histories of at most 100 steps for each page size", flush=True)
    subprocess.run(command, cwd=ROOT, env={**os.environ, **size, "PYTHONPATH": str(ROOT)}, check=True)


def prompts_of(seed: int, number: int, vocab: int) -> list[np.ndarray]:
    """Prompts with a head that all share."""
    rng = np.random.default_rng(seed)
    head = rng.integers(0, vocab, 20)
    return [np.concatenate([head, rng.integers(0, vocab, rng.integers(1, 30))]) for _ in range(number)]


def beams(steps: int, seed: int) -> None:
    """Searches in few pages, whose trees are compacted, against replays over whole sequences, for ``steps`` steps."""
    from prefixkit.testing.expected import assert_all_given_back, beams_alone
    from prefixkit.testing.fake_model import VOCAB, make_engine

    searches = done = copied = swapped = recomputed = 0
    for at in count(seed):
        rng = np.random.default_rng(at)
        sizes = rng.integers(2, 7, SEARCHES).tolist(), rng.integers(20, 80, SEARCHES).tolist()
        params = [
            BeamParams(beams, beams, max_new_tokens=tokens, stop_token_ids=(3, 4)[: i % 3])
            for i, (beams, tokens) in enumerate(zip(*sizes, strict=True))
        ]
        requests = [
            Request(i, *each) for i, each in enumerate(zip(prompts_of(at, SEARCHES, VOCAB), params, strict=True))
        ]
        page_size = int(rng.choice([1, 4, 16]))
        most = max(pages_for(len(one.tokens), page_size) + pages_per_run(one.params, page_size) for one in requests)
        policy = MemoryPolicy(preemption="swap" if at % 2 else "recompute", headroom=int(rng.choice([0, 1, 8])))
        engine, _ = make_engine(
            most, page_size, policy=policy
        )  # the smallest pool that each search passes its check in
        found = engine.run(requests)
        for request in requests:
            mine = [one for one in found if one.prompt_index == request.prompt_index]
            expected = beams_alone(request.tokens, request.params)
            assert [tuple(one.tokens) for one in mine] == [beam.tokens for beam in expected], f"seed {at}"
            assert [one.score for one in mine] == [beam.score for beam in expected], f"seed {at}"
            done += max(len(one.tokens) for one in mine)  # the search may have gone on
        searches += len(requests)
        copied += engine.report.kv_bytes_copied // engine.store.pool.spec.bytes_per_token
        swapped += engine.report.preempted_swapped
        recomputed += engine.report.preempted_recomputed
        assert_all_given_back(engine)
        if done >= steps:
            break
    assert copied and swapped + recomputed, "no pressure"
    print(
        f"beams: seeds {seed} to {at}, {searches} searches, {done} steps, {swapped} preempted by swap and "
        f"{recomputed} by recompute, {copied} tokens copied to compact trees; sequences and scores as replayed"
    )


def pressure(preemptions: int, seed: int) -> None:
    """Samples in a tenth of the memory that they need, against those without pressure: fake model and tiny Llama."""
    for name, sample in (("fake model", fake), ("tiny Llama, float32", llama)):
        for how in ("swap", "recompute"):
            reached = samples = total = 0
            began = time.monotonic()
            for at in count(seed):
                expected, report = sample(at, None, MemoryPolicy())
                assert report.preempted_swapped == report.preempted_recomputed == 0
                need = report.kv_bytes_held_peak
                found, report = sample(at, int(need * SHARE), MemoryPolicy(preemption=how, headroom=4))
                ties = near_ties(name, at, expected, found)
                samples, total = samples + len(found), total + ties
                reached += report.preempted_swapped if how == "swap" else report.preempted_recomputed
                if reached >= preemptions:
                    break
            print(
                f"pressure: {name}, seeds {seed} to {at}, {samples} samples in {SHARE:.0%} of the pages: {reached} "
                "preempted "
                f"by {how}, {time.monotonic() - began:.0f} s; tokens as without pressure, {total} samples after a "
                "near-tie",
                flush=True,
            )


def near_ties(name: str, seed: int, expected: list[Any], found: list[Any]) -> int:
    """The number of samples that differ; at the first differing token the random number must be near a boundary."""
    import torch

    from prefixkit.sampling.rng import sample_key, uniforms
    from prefixkit.testing.tiny import tiny_llama

    differ = [(one, other) for one, other in zip(expected, found, strict=True) if one != other]
    assert not differ or name != "fake model", f"seed {seed}"
    exact, requests = tiny_llama().double(), asked(seed, 256)
    for (prompt, index, tokens), (*_, others) in differ:
        at = next(i for i, (one, other) in enumerate(zip(tokens, others, strict=False)) if one != other)
        request = requests[prompt]
        key = sample_key(request.params.seed, index, request.tokens, request.occurrence)
        u = float(uniforms(np.array([key]), np.array([at]))[0])
        with torch.no_grad():
            logits = exact(torch.tensor([[*request.tokens.tolist(), *tokens[:at]]])).logits[0, -1]
        bounds = logits.softmax(-1).cumsum(0)[sorted((tokens[at], others[at]))[0]]
        # The error of sums of 259 float32 probabilities: at most half an ulp of 1 for each addition.
        assert abs(float(bounds) - u) < 259 * 2**-25, (seed, prompt, index, at, float(bounds) - u)
    return len(differ)


def asked(seed: int, vocab: int) -> list[Request]:
    return [
        Request(i, prompt, SamplingParams(n=16, max_new_tokens=48, seed=seed + i, stop_token_ids=(3,)))
        for i, prompt in enumerate(prompts_of(seed, 12, vocab))
    ]


def tokens_of(samples: Any) -> list[tuple[int, int, list[int]]]:
    return sorted((one.prompt_index, one.index, one.tokens) for one in samples)


def fake(seed: int, budget: int | None, policy: MemoryPolicy) -> tuple[list[Any], Any]:
    from prefixkit.testing.fake_model import VOCAB, make_engine

    engine, _ = make_engine(8192 if budget is None else budget // (4 * 8), 4, policy=policy)
    return tokens_of(engine.run(asked(seed, VOCAB))), engine.report


def llama(seed: int, budget: int | None, policy: MemoryPolicy) -> tuple[list[Any], Any]:
    import prefixkit
    from prefixkit.testing.tiny import ByteTokenizer, tiny_llama

    model = prefixkit.patch(tiny_llama())
    with prefixkit.Session(model, ByteTokenizer(), kv_budget=budget or "64MiB", page_size=4, memory=policy) as session:
        result = session.run(asked(seed, 256))
        return tokens_of(result), result.report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["machine", "beams", "pressure"])
    parser.add_argument("--part", type=int, default=0, choices=range(PARTS + 1), help="0: all")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--preemptions", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_grad_enabled(False)
    if given.what == "machine":
        for part in [given.part] if given.part else range(1, PARTS + 1):
            machine(part)
    elif given.what == "beams":
        beams(given.steps, given.seed)
    else:
        pressure(given.preemptions, given.seed)


if __name__ == "__main__":
    main()
