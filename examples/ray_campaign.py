"""A campaign on many machines: Ray Data runs a part of it on each GPU, and one folder holds the samples.

The run folder lies on a file system that all machines see.  A part that fails, with its machine, is run again and
samples what is missing.  Arguments are those of ``prefixkit sample``::

    python examples/ray_campaign.py --parts 16 -- --model FOLDER --task humaneval -n 1000 --run /shared/runs/a
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from typing import Any


def sample_part(row: dict[str, Any]) -> dict[str, Any]:
    """Sample one part where Ray has put this process; the process sees the GPUs that Ray gave it."""
    part = f"{row['index']}/{row['of']}"
    command = [sys.executable, "-m", "prefixkit", "sample", *row["arguments"], "--shard", part, "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"part {part} ended with status {done.returncode}: {done.stderr[-2000:]}")
    return {"part": part}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=int, required=True, help="parts of the campaign, one or more for each GPU")
    parser.add_argument("--gpus", type=float, default=1, help="GPUs of a part; 0 for the CPU")
    parser.add_argument("sample", nargs=argparse.REMAINDER, help="-- and the arguments of prefixkit sample")
    given = parser.parse_args(arguments)
    import ray

    own = [one for one in given.sample if one != "--"]
    rows = [{"index": index, "of": given.parts, "arguments": own} for index in range(given.parts)]
    ray.data.DataContext.get_current().max_errored_blocks = 0
    parts = ray.data.from_items(rows, override_num_blocks=given.parts).map(sample_part, num_gpus=given.gpus)
    for row in parts.iter_rows():
        print(f"part {row['part']} is done")


if __name__ == "__main__":
    main()
