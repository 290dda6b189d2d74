"""Run folders with hostile answers and problems, whose samples, problems, verdicts, events and manifests are damaged.

>>> python scripts/damaged_runs.py --places 2000

The command line judges, reports and exports each folder, whole and damaged: there must be no traceback, undamaged
samples must keep their verdicts and be reported and exported, and messages must name damaged lines with file and line.
Prints its results, or fails.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from prefixkit.testing.application.damage import Whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--places", type=int, default=2000, help="Damaged places in all.")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    given = parser.parse_args()
    print(f"seed {given.seed}")
    chance, folders, places, samples = random.Random(given.seed), 0, 0, 0
    while places < given.places:
        with tempfile.TemporaryDirectory() as work:
            whole = Whole(Path(work, "whole"), chance, problems=16, samples=5)
            for _ in range(5):
                places += whole.check_damaged(Path(work, "damaged"), chance, most=9)
                places += whole.check_manifest(Path(work, "manifest"), chance)
        folders, samples = folders + 1, samples + len(whole.outcomes)
        print(
            f"{folders} folders, {samples} answers to hostile and ordinary problems; {places} damaged places",
            flush=True,
        )


if __name__ == "__main__":
    main()
