"""Code of all benchmarks: command line, record of a run, times of captured graphs, contenders in turns, tables."""

import argparse
import gc
import json
import math
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib.metadata import distributions
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

Row = dict[str, Any]
Action = Callable[[], object]
ROOT = Path(__file__).parents[1]
OUT_OF_TIME = "out of time"
NVIDIA_SMI = ("nvidia-smi", "--id=0", "--format=csv,noheader,nounits")
GRAPH_US, WARM_US, LONG_CALL_US = 1_000.0, 10_000.0, 10_000.0


def arguments(doc: str | None, given: list[str] | None = None, **options: Any) -> argparse.Namespace:
    """The command line: ``--out FILE``, and an option for each keyword.

    A keyword's value is the option's default: a list of numbers takes ``64,256``, one of names some of these names,
    False is a flag, a dictionary is what ``add_argument`` takes.  ``resume=True`` adds ``--resume``.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = {"out": {"type": Path, "help": "where the results go, as JSON, after each row"}, **options}
    if options.get("resume"):
        known["resume"] = {"type": Path, "metavar": "RESULTS.json", "help": "keep these, and measure the rest"}
    for name, default in known.items():
        if isinstance(default, list):
            how: Row = {"type": partial(_listed, default), "default": default}
        elif default is False:
            how = {"action": "store_true"}
        else:
            how = default if isinstance(default, dict) else {"type": type(default), "default": default}
        parser.add_argument(f"--{name.replace('_', '-')}", **how)
    return parser.parse_args(given)


def _listed(default: list[Any], text: str) -> list[Any]:
    if not any(isinstance(one, str) for one in default):
        return [int(number) for number in text.split(",")]
    if unknown := sorted({name.strip() for name in text.split(",")} - set(default)):
        raise argparse.ArgumentTypeError(f"takes some of {', '.join(default)}, got {', '.join(unknown)}")
    return [name.strip() for name in text.split(",")]


class Run:
    """A run with these :func:`arguments`: the record in its JSON, and the time left of ``--seconds``."""

    def __init__(self, options: argparse.Namespace, device: str | None = None) -> None:
        self._began, self._before, self._options = time.monotonic(), 0.0, options
        self.result: Row = {"commit": commit} if (commit := _printed("git", "rev-parse", "--short", "HEAD")) else {}
        command = shlex.join(["python", *sys.orig_argv[1:]])
        self.result |= {"command": command, "machine": machine(device), "clocks": [clocks()]}
        self.result["options"] = {name: str(value) for name, value in vars(options).items()}

    @property
    def left(self) -> float:
        """Seconds until the run's limit."""
        return (getattr(self._options, "seconds", None) or math.inf) - (time.monotonic() - self._began)

    def taken_up(self, key: str, names: tuple[str, ...], beside: tuple[str, ...] = ()) -> set[str]:
        """Keep the finished rows under ``key`` of ``--resume``, and all under ``beside``; returns their identities."""
        if self._options.resume is None:
            return set()
        known, here = json.loads(self._options.resume.read_text()), self.result["machine"]
        if (before := known["machine"]) != here:
            raise SystemExit(f"those results are of another machine: {before}, this is {here}; leave --resume out")
        self.result |= {name: known[name] for name in beside}
        self.result[key] = [row for row in known[key] if row.get("skipped") != OUT_OF_TIME]
        self._before = self.result["seconds_before"] = known.get("seconds", 0.0)
        return {identity(row, names) for row in self.result[key]}

    def add(self, key: str, row: Row, line: str | None = None) -> None:
        """Append a row under ``key``, print its line or JSON, and write the file."""
        self.result.setdefault(key, []).append(row)
        print(json.dumps(row) if line is None else line, flush=True)
        self.write()

    def write(self) -> None:
        """The JSON so far."""
        self.result["seconds"] = round(self._before + time.monotonic() - self._began, 1)
        if out := self._options.out:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(self.result, indent=1) + "\n")

    def finish(self, *shown: str) -> None:
        """Write the JSON for the last time, and print the named parts of it."""
        self.result["clocks"].append(clocks())
        self.write()
        if shown := tuple(name for name in shown if name in self.result):
            print(json.dumps({name: self.result[name] for name in shown}, indent=1))


def identity(row: Mapping[str, Any], names: tuple[str, ...]) -> str:
    """The fields that distinguish a row from the others of its kind."""
    return json.dumps([row[name] for name in names])


def machine(device: str | None = None) -> Row:
    """Names and versions of the software and the device."""
    names = ("torch", "numpy", "transformers", "triton", "flashinfer-python", "cuda-core")
    packages = {name: next((of.version for of in distributions(name=name)), "not installed") for name in names}
    if device == "cpu" or not torch.cuda.is_available():
        cpuinfo = Path("/proc/cpuinfo")
        text = cpuinfo.read_text() if cpuinfo.exists() else ""
        known = re.search("model name.*: (.*)", text)
        cpu = known[1] if known else platform.processor()
        if number := re.search(r"cpu family\s*: (\d+)\nmodel\s*: (\d+)", text):  # names in virtual machines say little
            cpu += f" (family {number[1]}, model {number[2]})"
        return {"gpu": "none", "cpu": cpu, "python": platform.python_version(), **packages}
    gpu = torch.cuda.get_device_properties(0)
    found: Row = {"gpu": gpu.name, "multiprocessors": gpu.multi_processor_count, "l2_bytes": gpu.L2_cache_size}
    found |= {"driver": _printed(*NVIDIA_SMI, "--query-gpu=driver_version") or "unknown", "cuda": torch.version.cuda}
    return found | {"cudnn": torch.backends.cudnn.version(), "python": platform.python_version(), **packages}


def clocks() -> Row:
    """SM clock, power and temperature now; without a GPU the load of the CPUs."""
    if found := _printed(*NVIDIA_SMI, "--query-gpu=clocks.sm,power.draw,temperature.gpu"):
        return dict(zip(("sm_mhz", "watts", "celsius"), found.split(", "), strict=True))
    return {"load": f"{os.getloadavg()[0]:.2f}"}


def _printed(*command: str) -> str:
    """A command's output; "" if there is no such command, or it fails."""
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def input_sets(kv_bytes: int) -> int:
    """The number of input sets: more than twice the L2 of an H200, so that no set is in the L2 when its turn comes."""
    return max(1, min(8, int(1.5e8 // max(kv_bytes, 1)) + 1))


class Replay:
    """A captured graph of about a millisecond of calls through all input sets, so that its launch is negligible."""

    def __init__(self, run: Callable[[int], object], sets: int) -> None:
        for index in range(sets):
            run(index)
        about = max(_elapsed_us(partial(run, 0)), 1.0)
        self._calls = -(-max(8, min(64, int(GRAPH_US / about))) // sets) * sets if about < LONG_CALL_US else sets
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for call in range(self._calls):
                run(call % sets)

    def us(self, repeats: int = 7) -> float:
        """Microseconds of one call, the median over replays, after some milliseconds of replays to raise the clocks."""
        about = _elapsed_us(self._graph.replay)
        for _ in range(min(20, int(WARM_US / about))):
            self._graph.replay()
        repeats = repeats if about < 2 * LONG_CALL_US else 3
        return float(np.median([_elapsed_us(self._graph.replay) / self._calls for _ in range(repeats)]))


def replay_us(run: Callable[[int], object], sets: int = 1, repeats: int = 7) -> float:
    """Microseconds of ``run(index)`` over this many input sets; see :class:`Replay`."""
    return Replay(run, sets).us(repeats)


def _elapsed_us(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3


def captured(step: Callable[[], object], stream: torch.cuda.Stream | None = None) -> torch.cuda.CUDAGraph:
    """A step as a graph, after two steps that make what is made once; ``stream``: the stream of all three."""
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    return graph


def replayed_ms(graph: torch.cuda.CUDAGraph, count: int) -> list[float]:
    """Milliseconds of each of this many replays, after one more, so that none of them waits for the host."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    graph.replay()
    for event in events[:-1]:
        event.record()
        graph.replay()
    events[-1].record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in pairwise(events)]


def wall_seconds(
    run: Action, repeats: int = 1, warm: int = 0, wait: Action = lambda: None, clock: Any = time.perf_counter
) -> list[float]:
    """Seconds of each call on the host's clock, after ``warm`` that do not count; ``wait`` lets a device finish."""
    times = []
    for _ in range(warm + repeats):
        wait()
        began = clock()
        run()
        wait()
        times.append(clock() - began)
    return times[warm:]


def in_turns(contenders: Mapping[str, Callable[[], float]], turns: int) -> dict[str, list[float]]:
    """Run each contender once a turn, in the opposite order every other turn, so that drifting clocks favour none."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(turns):
        for name in list(contenders)[:: -1 if turn % 2 else 1]:
            times[name].append(contenders[name]())
    return times


def ceilings() -> dict[str, float]:
    """Bandwidth of a copy (bytes read and written), rate of a bf16 matrix product, one tiny node of a graph."""
    a, b = (torch.randn(1 << 30, dtype=torch.bfloat16, device="cuda") for _ in "ab")
    x, y = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in "xy")
    small = torch.zeros(1, device="cuda")
    copy = 2 * 2**31 / replay_us(lambda _: torch.neg(a, out=b)) / 1e6  # a kernel; copy_ is a copy engine's
    product, node = 2 * 8192**3 / replay_us(lambda _: x @ y) / 1e6, replay_us(lambda _: small.add_(1.0))
    return {"copy_TBps": round(copy, 3), "matmul_TFLOPs": round(product, 1), "graph_node_us": round(node, 3)}


def failure(error: Exception) -> str:
    """A contender's error in a line: it is a result, and not corrected here."""
    if isinstance(error, torch.OutOfMemoryError):
        torch.cuda.empty_cache()
        return "out of memory"
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"


def free_memory() -> None:
    """Free memory that nothing refers to, the GPU's too."""
    gc.collect()
    torch.cuda.empty_cache()


def spread(times: list[float]) -> dict[str, float]:
    """Best, median, mean, 99th percentile and worst."""
    best, median, p99, worst = (float(q) for q in np.quantile(times, (0.0, 0.5, 0.99, 1.0)))
    return {"best": best, "median": median, "mean": statistics.fmean(times), "p99": p99, "worst": worst}


def geomean(values: Iterable[float]) -> float:
    """Geometric mean; NaN of nothing."""
    known = list(values)
    return statistics.geometric_mean(known) if known else math.nan


def table(head: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """A markdown table."""
    head = [str(cell) for cell in head]
    lines = [head, ["---"] * len(head), *([str(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
