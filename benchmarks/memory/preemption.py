"""*copies*, *swap* and *pressure*: what preemption moves and computes again, and how many samples are admitted."""

import statistics
from collections.abc import Iterator

import numpy as np

from benchmarks.memory.measured import HEADROOM, PAGE, Measured
from benchmarks.runner import Row
from prefixkit import MemoryPolicy, SamplingParams
from prefixkit.kv.kv_pool import KVPool
from prefixkit.models import kv_spec
from prefixkit.tree.pages import pages_for


def copies(on: Measured, lengths: list[int], turns: int) -> Iterator[Row]:
    """The pool's own copies, of pages in random order, as after many requests; the first turn does not count."""
    spec, most = kv_spec(on.model), max(lengths)
    with on.session(most + 1024) as session:

        def compute(length: int) -> float:
            prompt = [on.tokens(length)]
            return on.seconds(lambda: session.generate(prompt, max_new_tokens=1, stop_token_ids=()))

        computing = {n: statistics.median([compute(n) for _ in range(1 + turns)][1:]) / n for n in lengths}
    for page_size in (1, 16, 128):
        pages = 2 * pages_for(most, page_size)
        pool, rng = KVPool(spec, pages, page_size), np.random.default_rng(0)
        for length in lengths:
            own = rng.permutation(pages)[: pages_for(length, page_size)]
            slots = (own[:, None] * page_size + np.arange(page_size)).ravel()[:length].astype(np.int64)
            places, out, back = np.arange(length), [], []
            for _ in range(1 + turns):
                kv = pool.host_parts(length)
                out.append(on.seconds(lambda kv=kv, slots=slots, of=pool: of.read(slots, kv)))
                back.append(on.seconds(lambda kv=kv, slots=slots, of=pool, at=places: of.write(slots, kv, at)))
            times = {"out_us": out, "back_us": back}
            row: Row = {name: round(1e6 * statistics.median(each[1:]) / length, 3) for name, each in times.items()}
            swap = row["out_us"] + row["back_us"]
            row |= {"recompute_us": round(1e6 * computing[length], 3)}
            row |= {"recompute_of_swap": round(row["recompute_us"] / swap, 2)}
            rate = (
                round(on.bytes_per_token / row["out_us"] / 1e3, 2),
                round(on.bytes_per_token / row["back_us"] / 1e3, 2),
            )
            yield {"page_size": page_size, "tokens": length, **row, "GBps_out_and_back": rate}


def swap(on: Measured, lengths: list[int], new: int, calls: int, prompts: int = 8, samples: int = 8) -> Iterator[Row]:
    """Calls in the same pool by each way to preempt, and with a pool that holds all samples."""
    for length in lengths:
        asked = [[on.tokens(length) for _ in range(prompts)] for _ in range(calls)]
        all_prompts, all_samples = prompts * (length + PAGE), prompts * samples * (new + PAGE)
        row: Row = {"prompt": length, "samples": f"{prompts} x {samples}", "new": new}
        for name in ("roomy", "swap", "recompute", "auto"):
            pool = all_prompts + (all_samples if name == "roomy" else all_samples // 2)
            policy = MemoryPolicy(preemption="auto" if name == "roomy" else name, headroom=HEADROOM)
            with on.session(pool, memory=policy) as session:
                fixed: Row = {"n": samples, "max_new_tokens": new, "stop_token_ids": ()}
                session.generate([on.tokens(length)] * 2, **fixed | {"max_new_tokens": 4})
                took = [on.seconds(lambda s=session, f=fixed, of=of: s.generate(of, **f)) for of in asked]
                report = session.report
            row[name] = {
                "first_s": round(took[0], 3),
                "later_s": [round(seconds, 3) for seconds in took[1:]],
                "preempted_swapped": report.preempted_swapped,
                "preempted_recomputed": report.preempted_recomputed,
                "swapped_mib": round(report.kv_bytes_swapped / 2**20, 1),
                "tokens_computed": report.tokens_computed,
                "steps": report.steps,
                "captures_s": round(report.seconds_capturing, 2),
            }
        yield row


def pressure(on: Measured, ends: str, reserved: int, prompts: int, samples: int, new: int) -> Row:
    """All samples with prefixkit's admission, and with only as many at once as could reserve ``new`` tokens each."""
    length = 64
    pool = prompts * (length + PAGE) + reserved * pages_for(new, PAGE) * PAGE
    asked = [on.tokens(length) for _ in range(prompts)]
    low, high = round(new * 100 / 1024), round(new * 300 / 1024)
    how: Row = {"stop_token_ids": tuple(range(0, on.shape.vocab, (low + high) // 2))}
    if ends == "function":
        # A sample's first token decides its length: such tokens are as good as random numbers.
        how = {"stop_token_ids": (), "stop": lambda tokens, text: len(tokens) >= low + tokens[0] % (high - low + 1)}
    row: Row = {"ends": ends, "pool_tokens": pool, "samples": f"{prompts} x {samples}", "max_new_tokens": new}
    params = SamplingParams(n=samples, max_new_tokens=new, **how)
    for name, most in (("now", 4096), ("reserved", reserved)):
        running: list[int] = []
        with on.session(pool, most_running=most) as session:
            session.generate([on.tokens(length)] * 2, n=samples, max_new_tokens=4, stop_token_ids=())
            took = on.seconds(lambda s=session, r=running: s.generate(asked, params, on_step=r.append))
            report = session.report
        full = running[: max(1, len(running) * 2 // 3)]  # towards the end no sample is left to admit
        row[name] = {
            "s": round(took, 3),
            "tokens_per_s": round(report.new_tokens / took, 1),
            "mean_length": round(report.new_tokens / report.samples, 1),
            "mean_running": round(statistics.fmean(running), 2),
            "mean_running_in_first_two_thirds": round(statistics.fmean(full), 2),
            "most_running": max(running),
            "preempted": report.preempted_swapped + report.preempted_recomputed,
            "tokens_computed": report.tokens_computed,
            "steps": report.steps,
            "captures_s": round(report.seconds_capturing, 2),
        }
    now, before = row["now"], row["reserved"]
    row["concurrency_ratio"] = round(now["mean_running"] / before["mean_running"], 2)
    row["concurrency_of_reserved"] = round(now["mean_running_in_first_two_thirds"] / reserved, 2)
    return row | {"throughput_ratio": round(now["tokens_per_s"] / before["tokens_per_s"], 2)}
