"""A campaign on many machines: Ray actors, each with a model of its own, sample parts of it into one folder.

The run folder lies on a file system that all machines see.  If a process is lost with its machine, Ray starts another
actor, which continues its part: samples in the folder are not sampled again.  Arguments behind ``--`` are those of
``prefixkit sample``::

    python examples/ray_campaign.py --replicas 16 -- --model FOLDER --task humaneval -n 1000 --run /shared/runs/a
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


class Replica:
    """A process on a machine of Ray's choice; it sees the GPUs that Ray assigned to it."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.arguments = arguments

    def sample(self, part: str) -> str:
        """Sample what the run folder lacks of a part, written ``I/N``."""
        from prefixkit.__main__ import main as prefixkit

        print(f"samples part {part}", flush=True)
        sys.argv = ["prefixkit", "sample", *self.arguments, "--shard", part, "--quiet"]
        try:
            prefixkit()
        except SystemExit as end:
            if end.code:
                raise RuntimeError(f"part {part} ended with status {end.code}") from None
        return part


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, required=True, help="processes with a model, one for each GPU")
    parser.add_argument("--parts", type=int, help="parts of the campaign; as many as replicas by default")
    parser.add_argument("--gpus", type=float, default=1, help="GPUs of a replica; 0 for the CPU")
    parser.add_argument("sample", nargs=argparse.REMAINDER, help="-- and the arguments of prefixkit sample")
    given = parser.parse_args(arguments)
    import ray
    from ray.util import ActorPool

    own, count = [one for one in given.sample if one != "--"], given.parts or given.replicas
    ray.init()
    # A lost replica is started again, and its task is tried again.
    actor = ray.remote(num_gpus=given.gpus, max_restarts=-1, max_task_retries=-1)(Replica)
    replicas = ActorPool([actor.remote(own) for _ in range(given.replicas)])
    parts = [f"{index}/{count}" for index in range(count)]
    for part in replicas.map_unordered(lambda replica, part: replica.sample.remote(part), parts):
        print(f"part {part} is done", flush=True)


if __name__ == "__main__":
    main()
