"""A planner of each backend that works without a GPU, and a small tree to plan for."""

from __future__ import annotations

import numpy as np

from prefixkit.attention.gpu.gpu_cost import H200
from prefixkit.attention.queries import Queries
from prefixkit.attention.sharing import CPU_COST, HeadShape
from prefixkit.attention.step import Step
from prefixkit.backends.cuda.device_planner import CudaPlanner, plan_in_torch
from prefixkit.backends.torch.host_planner import BoundPlan, TorchPlanner, find_plan
from prefixkit.tree.radix import PrefixTree
from prefixkit.tree.sequence import Sequence

SHAPE = HeadShape(heads=4, kv_heads=2, head_dim=8, itemsize=4)


def cpu_planner() -> TorchPlanner:
    return TorchPlanner(SHAPE, CPU_COST)


def cuda_planner() -> CudaPlanner:
    """Of one multiprocessor; it plans in numpy."""
    return CudaPlanner(SHAPE, H200, num_sms=1)


PLANNERS = {"torch": cpu_planner, "cuda": cuda_planner}


def in_torch(step: Step) -> BoundPlan:
    """A step's plan for plain torch; of a plan for the kernels it is made now."""
    found = find_plan(step.plan[0]) if len(step.plan) == 1 else plan_in_torch(step.plan)
    assert found is not None
    return found


def runs(*triples: tuple[int, int, int]) -> Queries:
    """Queries of tokens ``[begin, end)`` of nodes, as ``(node, begin, end)``."""
    return Queries(*(np.array(column, dtype=np.int32) for column in zip(*triples, strict=True)))


def grown_tree() -> tuple[PrefixTree, list[Sequence]]:
    """A prompt of five tokens whose KV is complete, and two leaves of one token each."""
    tree = PrefixTree(64, page_size=4)
    prompt = tree.insert([10, 11, 12, 13, 14])
    forks = tree.fork(prompt, 2)
    tree.extend_each(forks, [20, 30])
    tree.mark_computed([prompt.node], [5])
    return tree, forks
