"""The use of a session's memory: known prefixes, preemption, admission by present need, pages, beams.

    python -m benchmarks.memory --parts prefix,copies,swap,pressure,beams,pages --samples 16
        --page-sizes 1,8,16,32,128 --turns 2 --seconds 130 --out FILE    # one line, on a GPU: about 140 s
    python -m benchmarks.memory --device cpu --parts fill,policies --out FILE

Random weights (``shapes.toml``), bf16 on a GPU, float32 on a CPU; ``--shape`` takes one shape for every part.

*prefix*: seconds to the first token of a prompt of ``--few-shot`` tokens and ``--own`` more, cold, and with the
few-shot known; then ``--calls`` calls in a pool that holds ``--few-shot`` + 2,048 tokens: memory after each quarter.
*copies*: KV of this many tokens to host memory and back, microseconds a token, by page size; and computing it again.
*swap*: 8 prompts, 8 samples each, in a pool for all prompts and half of the samples' final KV, preempting by swap, by
recomputing, or by the cheaper of both; a session's first call, which captures graphs and allocates pinned memory, and
``--turns`` more, with other prompts; counts are those of the last call.
*pressure*: samples of 100 to 300 tokens with ``max_new_tokens`` of 1,024, in a pool in which ``--reserved`` samples
could reserve 1,024 tokens each: with prefixkit's admission, and with at most ``--reserved`` samples running.
``function`` ends samples by a stop function, at evenly spread lengths; ``ids`` by 1 in 200 of all tokens, pipelined.
*pages*: a decode step of 4 x 16 samples of prompts of 1,000 tokens, by page size.
*beams*: a beam search and transformers' own: seconds, GiB without the weights, bytes of KV copied.
*fill*, *policies*: the tree alone, see ``benchmarks.memory_tree``.

Predictions, and which of them were made before a run, are in ``benchmarks/README.md``.
"""

import gc
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

import prefixkit
from benchmarks.generate import timed
from benchmarks.memory_tree import measure_fill, measure_policies
from benchmarks.runner import OUT_OF_TIME, Row, Run, arguments, failure, free_memory
from benchmarks.shapes import SHAPES, Shape
from prefixkit import MemoryPolicy, SamplingParams, Session
from prefixkit.kv.kv_pool import KVPool
from prefixkit.models import kv_spec
from prefixkit.tree.pages import pages_for

PARTS = ["prefix", "copies", "swap", "pressure", "beams", "pages", "fill", "policies"]
OWN_SHAPES = {
    "cuda": {"prefix": "Llama-3.1-8B", "copies": "Llama-3.1-8B", "swap": "Llama-3.1-8B", "": "Llama-3.2-1B"},
    "cpu": {"prefix": "SmolLM2-135M", "copies": "SmolLM2-135M", "": "small"},
}
PAGE_SIZES = [1, 2, 4, 8, 16, 32, 64, 128]
PAGE, HEADROOM = 16, 64


class Measured:
    """A model, and helpers for the measurements with it.

    Attributes:
        model: The patched model.
        shape: Its sizes.
        bytes_per_token: Bytes of a token's KV.
    """

    def __init__(self, shape: Shape, options: Any) -> None:
        self.shape, self.options, self.device = shape, options, options.device
        dtype = torch.float32 if self.device == "cpu" else torch.bfloat16
        self.model = prefixkit.patch(shape.build(self.device, dtype))
        self.bytes_per_token = kv_spec(self.model).bytes_per_token
        self._rng = np.random.default_rng(0)

    def tokens(self, count: int) -> list[int]:
        """Random tokens of a new prompt."""
        return self._rng.integers(0, min(30000, self.shape.vocab), count).tolist()

    @contextmanager
    def session(self, tokens: int, **given: Any) -> Iterator[Session]:
        """A session whose pool holds ``tokens`` tokens."""
        with Session(self.model, kv_budget=tokens * self.bytes_per_token, **given) as session:
            yield session
        free_memory()

    def wait(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()

    def seconds(self, call: Callable[[], Any]) -> float:
        self.wait()
        began = time.perf_counter()
        call()
        self.wait()
        return time.perf_counter() - began

    def memory(self) -> Row:
        """MiB now: of the process (its peak, if not on Linux), and of tensors on a GPU."""
        gc.collect()
        try:
            with open("/proc/self/statm") as statm:
                resident = int(statm.read().split()[1]) * resource.getpagesize()
        except OSError:
            resident = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        row: Row = {"host_mib": round(resident / 2**20, 1)}
        return row if self.device == "cpu" else row | {"gpu_mib": round(torch.cuda.memory_allocated() / 2**20, 1)}


# -- known prefixes ----------------------------------------------------------------------------------------------------


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


# -- preemption --------------------------------------------------------------------------------------------------------


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


# -- admission ---------------------------------------------------------------------------------------------------------


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


# -- pages and beams ---------------------------------------------------------------------------------------------------


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


# -- all of them -------------------------------------------------------------------------------------------------------


def rows_of(part: str, on: Measured, options: Any) -> Iterator[Row]:
    """The rows of a part that needs a model, each as it is measured."""
    if part == "prefix":
        yield from prefix(on, options.few_shot, options.own, options.calls, options.turns)
    elif part == "copies":
        yield from copies(on, options.lengths, options.turns)
    elif part == "swap":
        yield from swap(on, options.swap_prompts, options.swap_new, options.turns + 1)
    elif part == "pressure":
        for ends in options.ends:
            yield pressure(on, ends, options.reserved, options.prompts, options.samples, options.max_new)
    elif part == "pages":
        for page_size in options.page_sizes:
            yield page_speed(on, page_size, options.few, options.many, options.turns)
    elif part == "beams":
        for count in options.beams:
            yield beams(on, count, options)


def measure(run: Run, part: str, on: Measured, options: Any) -> None:
    """Add a part's rows until the time is over; a failure is a row too, and the next part begins."""
    rows = rows_of(part, on, options)
    began = time.monotonic()
    try:
        while True:
            if run.left < 0:
                return run.add(part, {"shape": on.shape.name, "skipped": OUT_OF_TIME})
            row = next(rows, None)
            if row is None:
                return
            taken = round(time.monotonic() - began, 1)
            run.add(part, {"shape": on.shape.name, **row, "part_s": taken})
    except Exception as error:
        run.add(part, {"shape": on.shape.name, "failed": failure(error)})
    finally:
        rows.close()
        free_memory()


def main() -> None:
    sizes: Row = {"few_shot": 4096, "own": 64, "calls": 100, "lengths": [64, 256, 1024, 4096]}
    sizes |= {"swap_prompts": [256, 2048], "swap_new": 256, "reserved": 16, "prompts": 16, "samples": 32}
    sizes |= {"max_new": 1024, "ends": ["function", "ids"], "page_sizes": PAGE_SIZES, "few": 8, "many": 40}
    sizes |= {"beams": [2, 4, 8, 16], "beam_prompt": 2048, "beam_new": 128}
    sizes |= {"fill_prompts": 64, "fill_samples": 16, "fill_length": 1000, "zipf_prompts": 200, "zipf_requests": 4000}
    limits: Row = {"turns": 3, "seconds": {"type": float, "help": "begin nothing more after so long"}}
    options = arguments(__doc__, device="cuda", shape="", parts=PARTS, **limits, **sizes)
    options.new = options.beam_new  # what `benchmarks.generate` calls it
    run, chosen = Run(options, options.device), [part for part in PARTS if part in options.parts]
    own = OWN_SHAPES[options.device]
    names = {part: options.shape or own.get(part, own[""]) for part in chosen if part not in ("fill", "policies")}
    for name in dict.fromkeys(names.values()):
        on = Measured(SHAPES[name], options)
        for part in [part for part, of in names.items() if of == name]:
            measure(run, part, on, options)
        del on
        free_memory()
    if "fill" in chosen:
        measure_fill(run, options.page_sizes, options.fill_prompts, options.fill_samples, options.fill_length)
    if "policies" in chosen:
        measure_policies(run, options.zipf_prompts, options.zipf_requests)
    run.finish("seconds")


if __name__ == "__main__":
    main()
