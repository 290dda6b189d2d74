"""Random forests as flat arrays, built without the prefix tree, so that attention is tested independently of it."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace

import numpy as np
import torch
from torch import Tensor

from prefixkit.attention.bsr import decompose
from prefixkit.attention.gpu.gpu_cost import H200, GpuCost
from prefixkit.attention.gpu.gpu_plan import make_gpu_plan
from prefixkit.attention.plan import Plan, make_plan
from prefixkit.attention.queries import Queries, StepTree
from prefixkit.attention.sharing import CPU_COST, CostModel, HeadShape
from prefixkit.attention.variants import CAUSAL, Variant, lookup
from prefixkit.backends.torch import tuning
from prefixkit.backends.torch.host_planner import bind
from prefixkit.backends.torch.program.layer_program import Program, compile_program
from prefixkit.backends.torch.run_program import run_program
from prefixkit.backends.torch.tuning import Heads, Tuning
from prefixkit.ops import library as ops  # noqa: F401
from prefixkit.tree.arrays import Ints
from prefixkit.tree.snapshot import TreeSnapshot

PAGE_SIZES = (1, 2, 3, 4, 8, 16, 32, 64, 128)
SHARE_ALL = CostModel(item=0.0, kv_byte=1.0, partial_byte=0.0)
SHARE_NONE = CostModel(item=1e9, kv_byte=0.0, partial_byte=0.0)


@dataclass(frozen=True, eq=False)
class Case:
    """A forest, some queries and the KV that they attend to.

    Slots that no token owns hold NaN, so that a read of one shows in the output.  Only variants with sinks read
    ``sinks``, ``[heads]``.
    """

    snapshot: TreeSnapshot
    queries: Queries
    q: Tensor
    k_pages: Tensor
    v_pages: Tensor
    scale: float
    sinks: Tensor | None = None

    @property
    def shape(self) -> HeadShape:
        kv_heads, head_dim = self.k_pages.shape[2:]
        return HeadShape(self.q.shape[1], kv_heads, head_dim, self.q.element_size(), self.v_pages.shape[3])

    @property
    def row_node(self) -> Ints:
        return self.queries.row_node()

    @property
    def positions(self) -> Tensor:
        return torch.from_numpy(self.snapshot.start[self.row_node].astype(np.int64) + self.queries.row_offset())

    def sinks_for(self, variant: Variant) -> Tensor | None:
        """The sinks that the op takes under this variant."""
        return self.sinks if variant.has_sinks else None


def random_parents(rng: np.random.Generator, nodes: int) -> list[int]:
    """Parents in depth-first order: a random forest, a chain, a star, or lone roots."""
    shape = rng.choice(["forest", "chain", "star", "roots"], p=[0.7, 0.1, 0.1, 0.1])
    if shape == "chain":
        return list(range(-1, nodes - 1))
    if shape == "star":
        return [-1] + [0] * (nodes - 1)
    if shape == "roots":
        return [-1] * nodes
    parents = [-1]
    for node in range(1, nodes):
        # In depth-first order the parent of a new node is the last node or one of its ancestors, or there is none.
        open_nodes = [node - 1]
        while open_nodes[-1] >= 0:
            open_nodes.append(parents[open_nodes[-1]])
        parents.append(int(rng.choice(open_nodes)))
    return parents


def make_snapshot(
    rng: np.random.Generator, parents: list[int], lengths: list[int], page_size: int, *, orderly: bool = False
) -> tuple[TreeSnapshot, int]:
    """A snapshot with these nodes, and the number of pages of its pool.

    Unless ``orderly``, pages are in random order, nodes begin inside pages, and some children continue in the page in
    which their parent ends, as after a split.
    """
    nodes = len(parents)
    parent, length = np.array(parents, dtype=np.int32), np.array(lengths, dtype=np.int32)
    start, first_slot = np.zeros(nodes, dtype=np.int32), np.zeros(nodes, dtype=np.int32)
    subtree_end = np.arange(1, nodes + 1, dtype=np.int32)
    pages: list[list[int]] = []
    continued: set[int] = set()
    fresh = 0
    for node in range(nodes):
        above = parents[node]
        own: list[int] = []
        if above >= 0:
            start[node] = start[above] + length[above]
            cut = (first_slot[above] + length[above]) % page_size
            if not orderly and cut and pages[above] and above not in continued and rng.random() < 0.5:
                continued.add(above)
                first_slot[node] = cut
                own = [pages[above][-1]]
        if not own and not orderly and rng.random() < 0.3:
            first_slot[node] = rng.integers(page_size)
        count = -(-(first_slot[node] + length[node]) // page_size) if length[node] or own else 0
        own += range(fresh, fresh + count - len(own))
        fresh = max(fresh, *(page + 1 for page in own), 0) if own else fresh
        pages.append(own)
    for node in range(nodes - 1, -1, -1):
        if parents[node] >= 0:
            subtree_end[parents[node]] = max(subtree_end[parents[node]], subtree_end[node])
    num_pages = fresh + (0 if orderly else int(rng.integers(1, 4))) or 1
    place = np.arange(num_pages) if orderly else rng.permutation(num_pages)
    flat = np.array([place[page] for own in pages for page in own], dtype=np.int32)
    snapshot = TreeSnapshot(
        version=0,
        page_size=page_size,
        parent=parent,
        subtree_end=subtree_end,
        start=start,
        length=length,
        computed=length.copy(),
        first_slot=first_slot,
        page_indptr=np.cumsum([0, *map(len, pages)]).astype(np.int32),
        pages=flat,
        sequence_node=np.zeros(0, dtype=np.int32),
        sequence_id=np.zeros(0, dtype=np.int64),
    )
    return snapshot, num_pages


def random_queries(rng: np.random.Generator, snapshot: TreeSnapshot) -> Queries:
    """Runs at inner nodes and leaves: single last tokens, whole nodes, chunks.  Some leaves' KV ends with their run."""
    leaf = snapshot.subtree_end == np.arange(snapshot.num_nodes) + 1
    occupied = np.flatnonzero(snapshot.length > 0)
    chosen = occupied[rng.random(len(occupied)) < rng.choice([0.4, 0.8, 1.0])]
    if not len(chosen):
        chosen = occupied[-1:]
    runs = []
    for node in chosen.tolist():
        length = int(snapshot.length[node])
        kind = rng.choice(["decode", "prefill", "chunk"])
        begin, end = {"decode": (length - 1, length), "prefill": (0, length), "chunk": (0, 0)}[str(kind)]
        if kind == "chunk":
            begin = int(rng.integers(length))
            end = int(rng.integers(begin + 1, length + 1))
        if leaf[node]:
            snapshot.computed[node] = rng.integers(begin, length + 1)
        runs.append((node, begin, end))
    return Queries(*(np.array(column, dtype=np.int32) for column in zip(*runs, strict=True)))


def fill(
    rng: np.random.Generator,
    snapshot: TreeSnapshot,
    num_pages: int,
    queries: Queries,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    spread: float = 1.0,
    v_dim: int | None = None,
) -> Case:
    """Random queries and sinks, and random KV for every token of the tree, written through ``kv_append``.

    ``heads`` is (heads, kv_heads, head_dim); ``spread`` scales the queries, and with them the sharpness of the softmax;
    ``v_dim`` is the head size of V, by default ``head_dim``.
    """
    num_heads, kv_heads, head_dim = heads
    v_dim = head_dim if v_dim is None else v_dim
    k_pages, v_pages = (
        torch.full((num_pages, snapshot.page_size, kv_heads, dim), torch.nan, dtype=dtype) for dim in (head_dim, v_dim)
    )
    node = np.repeat(np.arange(snapshot.num_nodes), snapshot.length)
    offset = np.concatenate([np.arange(length) for length in snapshot.length])
    slots = torch.from_numpy(snapshot.slots(node, offset))
    key, value, q = (
        torch.from_numpy(rng.standard_normal((rows, of, dim), dtype=np.float32)).mul_(by).to(dtype)
        for rows, of, dim, by in (
            (len(slots), kv_heads, head_dim, 1.0),
            (len(slots), kv_heads, v_dim, 1.0),
            (queries.num_rows, num_heads, head_dim, spread),
        )
    )
    torch.ops.prefixkit.kv_append(key, value, k_pages, v_pages, slots)
    sinks = torch.from_numpy(2 * rng.standard_normal(num_heads)).to(dtype)
    return Case(snapshot, queries, q, k_pages, v_pages, head_dim**-0.5, sinks)


def random_case(
    rng: np.random.Generator,
    dtype: torch.dtype = torch.float32,
    heads: tuple[int, int, int] | None = None,
    v_dim: int | None = None,
    *,
    plain: bool = False,
) -> Case:
    """A small forest of any kind, or with ``plain`` a batch of sequences that share nothing; ``heads`` and ``v_dim`` as
    :func:`fill` takes them.
    """
    if heads is None:
        kv_heads = int(rng.choice([1, 2, 3]))
        heads = kv_heads * int(rng.choice([1, 2, 3, 4])), kv_heads, int(rng.choice([32, 64, 80]))
    nodes = int(rng.integers(1, 10))
    lengths = rng.integers(0, int(rng.choice([3, 12, 40])), nodes)
    lengths[rng.integers(nodes)] += 1
    parents = [-1] * nodes if plain else random_parents(rng, nodes)
    snapshot, num_pages = make_snapshot(rng, parents, lengths.tolist(), int(rng.choice(PAGE_SIZES)))
    queries = random_queries(rng, snapshot)
    return fill(rng, snapshot, num_pages, queries, heads, dtype, float(rng.choice([0.3, 1.0, 4.0])), v_dim)


def plan_of(case: Case, cost: CostModel, *, shared: np.ndarray | None = None, paths: bool = False) -> Plan:
    """The case's plan with every row whole; ``shared`` and ``paths`` as ``decompose`` takes them."""
    rows = decompose(StepTree(case.snapshot, case.queries), case.shape, cost, shared, paths=paths)
    return make_plan([rows], StepTree(case.snapshot, case.queries).length, case.queries.num_rows)


def gpu_plan_of(
    case: Case,
    cost: CostModel,
    num_sms: int = 3,
    tile_rows: int = H200.sharing.tile_heads,
    decode_rows: int = H200.sharing.decode_heads,
    *,
    shared: np.ndarray | None = None,
    gpu: GpuCost = H200,
    paths: bool = False,
) -> Plan:
    """A plan for kernels of this many blocks and rows per item: rows are cut into tiles, and their KV is split."""
    tree = StepTree(case.snapshot, case.queries)
    gpu = replace(gpu, sharing=replace(gpu.sharing, tile_heads=tile_rows, decode_heads=decode_rows))
    formats = [decompose(tree, case.shape, cost, shared, paths=paths)]
    return make_gpu_plan(formats, tree.length, case.queries.num_rows, case.shape, num_sms, gpu)


def random_split_plan(
    rng: np.random.Generator, case: Case, cost: CostModel, shared: np.ndarray | None = None, *, paths: bool = False
) -> Plan:
    """A plan with few queries per tile and KV splits of few tokens, as for a large GPU."""
    roles = [
        replace(role, kv_tile=int(rng.integers(1, 9)), start=0.0, write=0.0, merge=0.0, least=1)
        for role in (H200.tile, H200.decode)
    ]
    gpu = replace(H200, tile=roles[0], decode=roles[1])
    tile_rows = int(rng.choice([16, 128]))
    return gpu_plan_of(case, cost, int(rng.choice([1, 3, 40])), tile_rows, shared=shared, gpu=gpu, paths=paths)


def random_plan(rng: np.random.Generator, case: Case, *, split: float = 0.3) -> Plan:
    """A random valid plan for the case: each node shared or not, half of the plans by paths, and a fraction ``split``
    of them with rows and KV split.
    """
    cost = (CPU_COST, SHARE_ALL, SHARE_NONE)[rng.integers(3)]
    shared = rng.random(case.snapshot.num_nodes) < 0.5 if rng.random() < 0.4 else None
    paths = bool(rng.random() < 0.5)
    if split and rng.random() < split:
        return random_split_plan(rng, case, cost, shared, paths=paths)
    return plan_of(case, cost, shared=shared, paths=paths)


def int_tensors(*arrays: np.ndarray | list[int]) -> list[Tensor]:
    return [torch.from_numpy(np.array(array, dtype=np.int32)) for array in arrays]


def node_tensors(case: Case) -> list[Tensor]:
    snapshot = case.snapshot
    length = StepTree(snapshot, case.queries).length
    return int_tensors(snapshot.start, length, snapshot.page_indptr, snapshot.pages, snapshot.first_slot)


def attend(case: Case, plan: Plan, variant: str = "causal") -> tuple[Tensor, Tensor]:
    """The op under test."""
    step = bind(plan, StepTree(case.snapshot, case.queries))  # alive during the call
    out, lse = torch.ops.prefixkit.tree_attention(
        case.q,
        case.k_pages,
        case.v_pages,
        case.positions,
        step.tensors,
        case.scale,
        variant,
        case.sinks_for(lookup(variant)),
    )
    return out, lse


def program_of(case: Case, plan: Plan, variant: Variant = CAUSAL, costs: Tuning = tuning.CPU) -> Program:
    """The program for a CPU, with the given costs."""
    return _program(case, plan, variant, costs, on_cpu=True)


def gpu_program_of(case: Case, plan: Plan, variant: Variant = CAUSAL, costs: Tuning = tuning.GPU) -> Program:
    """The program for plain torch on a GPU; it runs on any device."""
    return _program(case, plan, variant, costs, on_cpu=False)


def _program(case: Case, plan: Plan, variant: Variant, costs: Tuning, *, on_cpu: bool) -> Program:
    shape = case.shape
    heads = Heads(*astuple(shape), tuning=costs)
    tree = StepTree(case.snapshot, case.queries)
    return compile_program(
        plan, tree, len(case.k_pages), heads, variant, case.q.dtype, on_cpu=on_cpu, device=case.q.device
    )


def run_on(case: Case, program: Program, variant: Variant = CAUSAL) -> tuple[Tensor, Tensor]:
    """The results of a program on the case's tensors, with pages in the layout of its device."""
    k, v = (of if program.on_cpu else head_major(of) for of in (case.k_pages, case.v_pages))
    return run_program(program, case.q, k, v, case.scale, variant, case.sinks_for(variant))


def head_major(pages: Tensor) -> Tensor:
    """``[pages, page_size, kv_heads, head_dim]`` with strides that store a page head by head."""
    return pages.transpose(1, 2).contiguous().transpose(1, 2)
