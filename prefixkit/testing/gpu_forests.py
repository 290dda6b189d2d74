"""Large random forests made on the GPU: every kind of tree, ragged, with prefill and decode in one step.

Slots that no visible token owns hold NaN, so that a kernel's read of one shows in its output.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from prefixkit.attention.gpu.gpu_cost import H200, H200_COST
from prefixkit.attention.queries import Queries, StepTree
from prefixkit.attention.sharing import CostModel
from prefixkit.attention.step import Step, build_step
from prefixkit.backends.cuda.device_planner import TREE_TENSORS, WORK_TENSORS, CudaPlanner
from prefixkit.testing.forests import SHARE_ALL, SHARE_NONE, Case, make_snapshot
from prefixkit.tree.arrays import Ints
from prefixkit.tree.snapshot import TreeSnapshot

KINDS = ("forest", "chain", "star", "beams", "roots")
MOST_LEAVES, LONGEST_SUFFIX, DEEPEST = 2048, 4096, 256
# Most tokens x KV heads of a forest, and most query heads, so that 5,000 forests take minutes.
MOST_TOKENS, MOST_QUERY_HEADS = 400_000, 200_000
GROUPS, PAGE_SIZES, HEAD_DIMS, KV_HEADS = (1, 4, 8, 7), (1, 16, 64), (64, 128), (1, 2, 3, 8)


@dataclass(frozen=True, eq=False)
class Forest:
    """A case on a device, its cost model, and ``rng`` in its state after the draw."""

    seed: int
    kind: str
    case: Case
    cost: CostModel
    rng: np.random.Generator

    def __str__(self) -> str:
        case, shape = self.case, self.case.shape
        return (
            f"forest {self.seed}: {self.kind}, {case.snapshot.num_nodes} nodes, {case.snapshot.num_tokens} tokens, "
            f"{case.queries.num_rows} rows, heads {shape.heads}/{shape.kv_heads} x {shape.head_dim}, "
            f"pages of {case.snapshot.page_size}, {case.q.dtype}"
        )


def draw(seed: int, device: torch.device, growing: int = 0) -> Forest:
    """A random forest.  ``growing``: only leaves have queries, one each, and pages for that many further tokens."""
    rng = np.random.default_rng(seed)
    kv_heads, head_dim = int(rng.choice(KV_HEADS)), int(rng.choice(HEAD_DIMS))
    heads = kv_heads * int(rng.choice(GROUPS))
    kind = str(rng.choice(KINDS, p=[0.4, 0.1, 0.2, 0.2, 0.1]))
    leaves = int(np.exp(rng.uniform(0, np.log(MOST_LEAVES + 1))))
    parents = np.array(_parents(rng, kind, leaves), dtype=np.int32)
    is_leaf = np.bincount(parents[parents >= 0], minlength=len(parents)) == 0
    lengths = _lengths(rng, kind, is_leaf, MOST_TOKENS // kv_heads) + growing * is_leaf
    page_size = int(rng.choice(PAGE_SIZES))
    snapshot, num_pages = make_snapshot(rng, parents.tolist(), lengths.tolist(), page_size, orderly=bool(growing))
    ask = _growing_queries(snapshot, is_leaf, growing) if growing else _queries(rng, snapshot, is_leaf, heads)
    dtype = torch.bfloat16 if rng.random() < 0.5 else torch.float16
    case = fill(rng, snapshot, num_pages, ask, (heads, kv_heads, head_dim), dtype, device)
    return Forest(seed, kind, case, _cost(rng, snapshot, ask), rng)


def _parents(rng: np.random.Generator, kind: str, leaves: int) -> list[int]:
    """Parents in depth-first order."""
    if kind == "chain":
        return list(range(-1, min(leaves, DEEPEST) - 1))
    if kind == "roots":
        return [-1] * leaves
    if kind == "star":
        return [-1] + [0] * leaves
    if kind == "beams":
        return _beams(rng, leaves)
    # The parent of a new node is the last node or one of its ancestors, the deeper the likelier, or there is none.
    parents, above = [-1], [0]
    for node in range(1, 2 * leaves):
        climb = min(int(rng.geometric(0.4)) - 1, len(above))
        del above[len(above) - climb :]
        parents.append(above[-1] if above else -1)
        above.append(node)
    return parents


def _beams(rng: np.random.Generator, leaves: int) -> list[int]:
    """A root whose descendants fork in two, with uneven halves, until there are ``leaves`` leaves."""
    parents = [-1]
    work = [(0, leaves)]
    while work:
        above, below = work.pop()
        if below > 1:
            left = max(1, min(below - 1, int(rng.binomial(below, 0.5))))
            for part in (left, below - left):
                work.append((len(parents), part))
                parents.append(above)
    return _depth_first(parents)


def _depth_first(parents: list[int]) -> list[int]:
    """The same tree, numbered depth-first."""
    children: list[list[int]] = [[] for _ in parents]
    for node, above in enumerate(parents):
        if above >= 0:
            children[above].append(node)
    number: dict[int, int] = {}
    result: list[int] = []
    stack = [0]
    while stack:
        node = stack.pop()
        number[node] = len(result)
        result.append(number[parents[node]] if parents[node] >= 0 else -1)
        stack.extend(reversed(children[node]))
    return result


def _lengths(rng: np.random.Generator, kind: str, is_leaf: np.ndarray, most: int) -> np.ndarray:
    """Lengths of leaves, 0 to 4,096 tokens, and of inner nodes, up to as many; the more nodes, the rarer long ones."""
    budget = np.exp(rng.uniform(np.log(1000), np.log(most)))

    def ragged(count: int, longest: int, share: float) -> np.ndarray:
        mean = max(budget * share / max(count, 1), 1.0)
        power = max(float(rng.choice([0.3, 1.0, 3.0])), longest / mean - 1)  # the mean of u^p is 1 / (p + 1)
        drawn: np.ndarray = np.floor((longest + 1) * rng.random(count) ** power).astype(np.int64).clip(0, longest)
        return drawn

    lengths = np.zeros(len(is_leaf), dtype=np.int64)
    leaves = int(is_leaf.sum())
    lengths[is_leaf] = np.maximum(ragged(leaves, LONGEST_SUFFIX, 0.6), rng.random(leaves) < 0.9)
    inner = int((~is_leaf).sum())
    lengths[~is_leaf] = ragged(inner, 64 if kind == "beams" else LONGEST_SUFFIX, 0.4)
    if rng.random() < 0.5:
        lengths[0] += int(rng.integers(min(16_384, int(budget) + 1)))  # a long common prefix
    lengths[rng.integers(len(lengths))] += 1
    return lengths


def _queries(rng: np.random.Generator, snapshot: TreeSnapshot, is_leaf: np.ndarray, heads: int) -> Queries:
    """Last tokens, whole nodes and chunks, at leaves and inner nodes; some leaves' KV ends with their run."""
    occupied = np.flatnonzero(snapshot.length > 0)
    wanted = np.where(is_leaf[occupied], rng.choice([0.5, 1.0]), rng.choice([0.0, 0.1, 0.6]))
    chosen = occupied[rng.random(len(occupied)) < wanted]
    if not len(chosen):
        chosen = occupied[-1:]
    length = snapshot.length[chosen].astype(np.int64)
    begin, end = length - 1, length.copy()
    left = MOST_QUERY_HEADS // heads - len(chosen)
    for run in rng.permutation(len(chosen))[: int(rng.choice([0, 2, 64]))]:
        low = 0 if rng.random() < 0.5 else int(rng.integers(length[run]))
        high = int(length[run]) if rng.random() < 0.5 else int(rng.integers(low + 1, length[run] + 1))
        if high - low <= left:
            begin[run], end[run] = low, high
            left -= high - low
    leaf = is_leaf[chosen]
    snapshot.computed[chosen[leaf]] = rng.integers(begin[leaf], length[leaf] + 1)
    return Queries(chosen.astype(np.int32), begin.astype(np.int32), end.astype(np.int32))


def _growing_queries(snapshot: TreeSnapshot, is_leaf: np.ndarray, growing: int) -> Queries:
    leaf = np.flatnonzero(is_leaf & (snapshot.length > growing)).astype(np.int32)
    begin = snapshot.length[leaf] - growing - 1
    snapshot.computed[is_leaf] = np.maximum(snapshot.length[is_leaf] - growing - 1, 0)
    if not len(leaf):  # every leaf has the least length: its first token is the query
        leaf = np.flatnonzero(is_leaf).astype(np.int32)
        begin = np.zeros(len(leaf), dtype=np.int32)
    return Queries(leaf, begin, begin + 1)


def _cost(rng: np.random.Generator, snapshot: TreeSnapshot, queries: Queries) -> CostModel:
    """The cost model of an H200, or one that shares all or nothing if the work stays small."""
    choice = rng.random()
    rows = np.concatenate(([0], np.cumsum(StepTree(snapshot, queries).own_rows)))
    if choice < 0.15 and int((rows[snapshot.subtree_end] - rows[:-1]).sum()) < 20_000:
        return SHARE_ALL
    if choice > 0.85 and int(snapshot.depth()[queries.node].sum()) < 20_000 and queries.num_rows < 4_000:
        return SHARE_NONE
    return H200_COST


def fill(
    rng: np.random.Generator,
    snapshot: TreeSnapshot,
    num_pages: int,
    queries: Queries,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> Case:
    """Random queries, and random KV for every token that the step's queries may see; NaN in all other slots."""
    num_heads, kv_heads, head_dim = heads
    shape = (num_pages, kv_heads, snapshot.page_size, head_dim)
    k_pages, v_pages = (torch.full(shape, torch.nan, dtype=dtype, device=device).transpose(1, 2) for _ in "kv")
    generator = torch.Generator(device).manual_seed(int(rng.integers(2**62)))
    spread = float(rng.choice([0.3, 1.0, 4.0]))
    q = torch.randn(queries.num_rows, num_heads, head_dim, generator=generator, device=device).mul_(spread).to(dtype)
    case = Case(snapshot, queries, q, k_pages, v_pages, head_dim**-0.5)
    length = StepTree(snapshot, queries).length
    node = np.repeat(np.arange(snapshot.num_nodes), length)
    offset = np.arange(len(node)) - np.repeat(np.cumsum(length) - length, length)
    write(case, snapshot.slots(node, offset), generator)
    return case


def write(case: Case, slots: np.ndarray, generator: torch.Generator) -> None:
    """Write random keys and values into these slots, by torch's indexing."""
    page_size, kv_heads, head_dim = case.k_pages.shape[1:]
    where = torch.from_numpy(slots).to(case.q.device)
    for pages in (case.k_pages, case.v_pages):
        rows = torch.randn(len(slots), kv_heads, head_dim, generator=generator, device=case.q.device)
        pages[where // page_size, where % page_size] = rows.to(pages.dtype)


def step_of(case: Case, cost: CostModel, num_sms: int) -> Step:
    """The step as an engine would build it, planned in numpy for the kernels."""
    tokens = np.zeros(case.queries.num_rows, dtype=np.int64)
    planner = CudaPlanner(case.shape, replace(H200, sharing=cost), num_sms)
    return build_step(StepTree(case.snapshot, case.queries), tokens, tokens[:0], planner, case.q.device)


def attend(case: Case, step: Step) -> tuple[Tensor, Tensor]:
    """The op under test."""
    out, lse = torch.ops.prefixkit.tree_attention(
        case.q, case.k_pages, case.v_pages, step.positions, step.plan, case.scale, "causal"
    )
    return out, lse


def work_of(step: Step) -> list[Tensor]:
    """The tensors of a step's work, as ``Plan.arrays`` orders them."""
    return step.plan[:WORK_TENSORS]


def nodes_of(step: Step) -> list[Tensor]:
    """The tensors of a step's tree: start, length, page_indptr, pages, first_slot."""
    return step.plan[WORK_TENSORS : WORK_TENSORS + TREE_TENSORS]


def path_slots(snapshot: TreeSnapshot, node: int, end: int) -> np.ndarray:
    """Slots of all tokens that a query after tokens ``[0, end)`` of a node sees, in order of position."""
    nodes: list[int] = [node]
    while snapshot.parent[nodes[-1]] >= 0:
        nodes.append(int(snapshot.parent[nodes[-1]]))
    nodes.reverse()
    length: Ints = snapshot.length[nodes].copy()
    length[-1] = end
    of = np.repeat(np.array(nodes), length)
    return snapshot.slots(of, np.arange(len(of)) - np.repeat(np.cumsum(length) - length, length))
