"""*prefix*, *pages* and *beams*: calls of a session."""

import statistics
import time
from collections.abc import Iterator
from typing import Any

import prefixkit
from benchmarks.generate import timed
from benchmarks.memory.measured import PAGE, Measured
from benchmarks.runner import Row
from prefixkit import Session
from prefixkit.tree.pages import pages_for


def first_token(on: Measured, session: Session, prompt: list[int], new: int) -> Row:
    """Seconds until the first token of a call, and prompt tokens that were computed for it."""
    times: list[float] = []

    def call() -> Any:
        began = time.perf_counter()
        return session.generate(
            [prompt],
            max_new_tokens=new,
            stop_token_ids=(),
            on_token=lambda event: times.append(time.perf_counter() - began),
        )

    report = call().report
    on.wait()
    return {"s": times[0], "computed": report.tokens_computed - (new - 1), "found": report.prompt_tokens_found}


def prefix(on: Measured, few_shot: int, own: int, calls: int, turns: int) -> Iterator[Row]:
    new, pool = 4, 2 * (few_shot + own + PAGE) + 2048
    with on.session(pool) as session:
        known = on.tokens(few_shot)
        for length in (own,) if on.device == "cpu" else (own, few_shot + own):
            first_token(on, session, on.tokens(length), new)  # kernels, graphs
        cold = [first_token(on, session, on.tokens(few_shot + own), new) for _ in range(turns)]
        first_token(on, session, known + on.tokens(own), new)
        warm = [first_token(on, session, known + on.tokens(own), new) for _ in range(max(turns, 5))]
    cold_s, warm_s = (statistics.median(row["s"] for row in rows) for rows in (cold, warm))
    computed = {"cold_computed": [row["computed"] for row in cold], "warm_computed": [row["computed"] for row in warm]}
    times = {"cold_s": round(cold_s, 5), "warm_s": round(warm_s, 5), "warm_of_cold": round(warm_s / cold_s, 5)}
    yield {"few_shot": few_shot, "own": own, **times, **computed, "found": warm[0]["found"]}

    with on.session(few_shot + 2048) as session:
        known, evicted = on.tokens(few_shot), 0
        first_token(on, session, known + on.tokens(own), new)
        seen, found = [on.memory()], 0
        for call in range(calls):
            found += first_token(on, session, known + on.tokens(own), new)["found"]
            evicted += session.report.tokens_evicted
            if (call + 1) % max(1, calls // 4) == 0:
                seen.append(on.memory())
    budget = (few_shot + 2048) * on.bytes_per_token / 2**20
    kept = {"found_of_few_shot": round(found / calls / few_shot, 4), "tokens_evicted": evicted}
    yield {"calls": calls, "budget_mib": round(budget, 1), **kept, "memory_after_each_quarter": seen}


def page_speed(on: Measured, page_size: int, few: int, many: int, turns: int) -> Row:
    """Milliseconds of a decode step, by calls of ``few`` and ``many`` tokens whose prompts are known."""
    asked = [on.tokens(1000) for _ in range(4)]
    with on.session(4 * 1200 + 4 * 64 * (many + 256), page_size=page_size) as session:

        def call(new: int) -> None:
            session.generate(asked, n=16, max_new_tokens=new, stop_token_ids=(), seed=new)

        call(many), call(few)
        took = {n: statistics.median(on.seconds(lambda n=n: call(n)) for _ in range(turns)) for n in (few, many)}
    return {"page_size": page_size, "step_ms": round(1e3 * (took[many] - took[few]) / (many - few), 3)}


def beams(on: Measured, count: int, options: Any) -> Row:
    """Beam searches as in ``benchmarks.generate``; transformers reorders its KV after each step, by copying it all."""
    row: Row = {"beams": count, "prompt": options.beam_prompt, "new": options.beam_new}
    for name in ("stock", "tree"):
        row[name] = timed(name, on.model, "beams", count, options, options.beam_prompt)
    prefixkit.patch(on.model)
    length, new = options.beam_prompt, options.beam_new
    pages = pages_for(length, PAGE) + count * new + count
    with on.session(pages * PAGE) as session:

        def search() -> Any:
            asked = [on.tokens(length)]
            return session.beam_search(asked, num_beams=count, max_new_tokens=new, stop_token_ids=())

        search()
        times = [on.seconds(search) for _ in range(options.turns)]
        report = session.report
    row["session"] = {
        "s": round(statistics.median(times), 3),
        "pool_gib": round(pages * PAGE * on.bytes_per_token / 2**30, 3),
    }
    row["session"] |= {
        "kv_held_gib": round(report.kv_bytes_held_peak / 2**30, 4),
        "bytes_copied": report.kv_bytes_copied,
    }
    row["stock_bytes_reordered"] = sum(count * (length + i) for i in range(1, new)) * on.bytes_per_token
    if "s" in row["stock"]:
        row["stock_of_session"] = round(row["stock"]["s"] / row["session"]["s"], 2)
    return row
