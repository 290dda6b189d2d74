"""Tree attention on one GPU: 87 decode workloads against their floors, rivals in the same run and recorded anchors.

python benchmarks/attention.py [--only TEXT] [--rivals NAMES] [--out FILE]    the 87 workloads
python benchmarks/attention.py --scales | --prefill                           larger trees; prompts instead of single tokens
python benchmarks/attention.py --plot RESULTS.json PICTURE.svg                no GPU needed

CUDA-graph replay, median, inputs rotated past the L2.  Layouts that a rival wants are made before its clock starts, and its
answer is compared with ours once.  Anchors (benchmarks/anchors) are other systems' times, recorded before on the same kind of
GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.tree_attention import report
from benchmarks.tree_attention.plot import plot


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="workloads whose name, heads first, contains this")
    parser.add_argument("--rivals", default="all", help="names with commas between; all; none")
    parser.add_argument("--scales", action="store_true", help="up to 32,768 leaves, 1M tokens, chains, combs")
    parser.add_argument(
        "--prefill", action="store_true", help="prompts of 4K to 128K tokens, chunks, prompts that share"
    )
    parser.add_argument("--shuffled", action="store_true", help="strew the tree's pages over the pool")
    parser.add_argument("--seconds", type=float, default=240.0, help="begin no more rivals after so long")
    parser.add_argument("--before", type=Path, help="an earlier run's JSON, to compare with")
    parser.add_argument("--out", type=Path, help="where the results go, as JSON")
    parser.add_argument("--plot", type=Path, nargs=2, metavar=("RESULTS", "PICTURE"))
    options = parser.parse_args()
    if options.plot:
        plot(*options.plot)
        return
    began = time.monotonic()
    result = _run(options)
    result["seconds"] = round(time.monotonic() - began, 1)
    print(
        json.dumps(
            {name: result[name] for name in ("faster than before", "summary", "skipped", "seconds") if name in result},
            indent=1,
        )
    )
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


def _run(options: argparse.Namespace) -> dict[str, object]:
    from benchmarks.tree_attention.timing import ceilings, machine

    result: dict[str, object] = {
        "machine": machine(),
        "ceilings": ceilings(),
        "options": {name: str(value) for name, value in vars(options).items()},
    }
    print(json.dumps(result["machine"]), json.dumps(result["ceilings"]), flush=True)
    if options.prefill:
        from benchmarks.tree_attention import prefill

        result["prefill"] = prefill.measure(options.only)
        return result
    from benchmarks.tree_attention.decode import measure
    from benchmarks.tree_attention.rivals import RIVALS
    from benchmarks.tree_attention.workloads import DECODE, HEADS, SCALES

    names = SCALES if options.scales else [(*heads, name) for heads in HEADS for name in DECODE]
    chosen = {"all": list(RIVALS), "none": []}.get(options.rivals, options.rivals.split(","))
    rows = measure(
        [w for w in names if options.only in f"{w[0]}/{w[1]} {w[2]}"], chosen, options.shuffled, options.seconds
    )
    result |= {"workloads": rows, "summary": report.summary(rows), "skipped": report.skipped(rows)}
    if options.before:
        before = json.loads(options.before.read_text())["workloads"]
        result["faster than before"] = report.compare(before, rows)
    return result


if __name__ == "__main__":
    main()
