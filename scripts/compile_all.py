"""Compile every kernel instantiation for every architecture, without a GPU, and compare the result with a budget.

    python scripts/compile_all.py --out build/kernels.json

Records registers, spills and static shared memory of each kernel; the sources assert their dynamic shared memory.
Exits with 1 if a kernel does not compile, if the compiler warns, or if a kernel takes more than
``scripts/kernel_budget.json`` allows; a source without a budget is an error too.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from prefixkit.cuda.nvrtc import Binary, CompileError, Unit, compile_unit, nvrtc_version

ARCHS = ("sm_80", "sm_89", "sm_90a", "sm_100")
BUDGET = Path(__file__).with_name("kernel_budget.json")
LIMITS = ("registers", "spill_stores", "spill_loads", "shared")
# Figures that ptxas reports of a kernel, per thread in registers and bytes; ``shared`` is the static part, per block.
REPORTED = {"spill_stores": "spill stores", "spill_loads": "spill loads", "stack": "stack frame", "shared": "smem"}
# Warnings, and ptxas's note that warpgroup products wait for each other, which makes a kernel half as fast.
WARNING = re.compile(r"warning|Potential Performance Loss", re.IGNORECASE)


def reports(log: str) -> dict[str, dict[str, int]]:
    """The figures of ``ptxas -v`` for each kernel, by symbol."""
    found = {}
    for part in re.split(r"Compiling entry function '", log)[1:]:
        if used := re.search(r"Used (\d+) registers", part):
            numbers = {name: re.search(rf"(\d+) bytes {what}", part) for name, what in REPORTED.items()}
            said = {name: int(number[1]) if number else 0 for name, number in numbers.items()}
            found[part.split("'", 1)[0]] = {"registers": int(used[1]), **said}
    return found


def warnings(log: str) -> list[str]:
    """The lines of a compiler's log that warn, or say that a kernel will be slow."""
    return [line for line in log.splitlines() if WARNING.search(line)]


def compile_one(job: tuple[Unit, str], compiler: Callable[[Unit, str], Binary] = compile_unit) -> dict[str, Any]:
    """One unit for one architecture, as a record for the JSON."""
    unit, arch = job
    began = time.perf_counter()
    defines = {name.removeprefix("PREFIXKIT_"): value for name, value in unit.defines}
    record: dict[str, Any] = {"file": unit.file, "defines": defines, "arch": arch}
    try:
        made = compiler(unit, arch)
    except CompileError as error:
        return {**record, "error": str(error), "kernels": {}}
    said = reports(made.log)
    return {
        **record,
        "seconds": round(time.perf_counter() - began, 2),
        "bytes": len(made.cubin),
        "warnings": warnings(made.log),
        "kernels": {name: said[symbol] for name, symbol in made.symbols.items() if symbol in said},
        "unreported": sorted(name for name, symbol in made.symbols.items() if symbol not in said),
    }


def allowance(budget: dict[str, dict[str, Any]], file: str, arch: str) -> dict[str, int] | None:
    """The budget of a kernel of a source file: its entry, with that entry's exceptions for the arch."""
    entry = budget.get(file)
    if entry is None:
        return None
    return {**{limit: entry[limit] for limit in LIMITS if limit in entry}, **entry.get(arch, {})}


def complaints(records: Iterable[dict[str, Any]], budget: dict[str, dict[str, Any]]) -> Iterator[str]:
    """All faults, a line each."""
    for record in records:
        where = f"{record['arch']} {record['file']} {record['defines'] or ''}".strip()
        if "error" in record:
            yield f"{where}: {record['error']}"
            continue
        yield from (f"{where}: {line}" for line in record["warnings"])
        yield from (f"{where}: no report on {name}" for name in record["unreported"])
        for name, used in record["kernels"].items():
            allowed = allowance(budget, record["file"], record["arch"])
            if allowed is None:
                yield f"{where}: it has no budget in {BUDGET.name}"
                continue
            for limit, most in allowed.items():
                if used[limit] > most:
                    yield f"{where}: {name} takes {used[limit]} {limit.replace('_', ' ')}, budget {most}"


def table(records: Iterable[dict[str, Any]]) -> Iterator[str]:
    """A line per kernel."""
    for record in records:
        for name, used in record["kernels"].items():
            defines = " ".join(f"{macro}={value}" for macro, value in record["defines"].items())
            yield (
                f"{record['arch']:7} {name} {defines}: {used['registers']} registers, "
                f"{used['spill_stores']}+{used['spill_loads']} B spilled, {used['shared']} B shared"
            )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: ``arguments``, or those of the process; its exit code."""
    from prefixkit.backends.cuda.kernels import compiled_ahead

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the record here")
    parser.add_argument("--arch", action="append", choices=ARCHS, help="only this one; may be repeated")
    parser.add_argument("--only", default="", help="only sources whose name contains this")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args(arguments)
    os.environ["CUDA_CACHE_DISABLE"] = "1"  # kernels from NVRTC's cache have no report
    jobs = [
        (unit, arch) for arch in options.arch or ARCHS for unit in compiled_ahead(arch) if options.only in unit.file
    ]
    began = time.perf_counter()
    with ProcessPoolExecutor(options.jobs) as pool:
        records = list(pool.map(compile_one, jobs))
    print("\n".join(table(records)))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        found = {"nvrtc": ".".join(map(str, nvrtc_version())), "units": records}
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    wrong = list(complaints(records, json.loads(BUDGET.read_text())))
    print(f"{len(jobs)} units in {time.perf_counter() - began:.1f} s, {len(wrong)} complaints")
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
