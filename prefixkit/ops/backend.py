"""The backend that runs the ops on a device: chosen once per device, and named in one line of the log.

    cuda    our kernels
    torch   plain torch: on a CPU, and on a GPU where our kernels cannot run

``PREFIXKIT_BACKEND`` overrides the choice for GPUs: with ``cuda`` it is an error if our kernels cannot run, ``torch``
runs plain torch, and with ``cpu`` tensors on a GPU are an error.  Tensors on the CPU always run on the CPU.

Backends register themselves here (``prefixkit.backends``), so nothing below them imports one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from prefixkit.attention.gpu.capacity import PlanCapacity
from prefixkit.attention.latent_parts import LatentPart, Part
from prefixkit.attention.planner import Planner, StepPlan
from prefixkit.attention.queries import StepTree
from prefixkit.attention.sharing import HeadShape
from prefixkit.attention.visible import ALL, Visible
from prefixkit.ops.partial_states import State
from prefixkit.threads import once
from prefixkit.tree.arrays import Ints

log = logging.getLogger("prefixkit")

NAMES = ("cuda", "torch", "cpu")
VARIABLE = "PREFIXKIT_BACKEND"


class BackendError(ValueError):
    """The backend that ``PREFIXKIT_BACKEND`` names cannot run here, or does not exist."""


class NotCapturable(RuntimeError):
    """A CUDA graph tried to capture an op whose kernel calls the host lists anew for each step."""


@dataclass(frozen=True)
class Choice:
    """The backend that runs, why, and how to get our kernels ("" if they run, or cannot run here)."""

    name: str
    reason: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}" + (f"; {self.remedy}" if self.remedy else "")


class GraphPlanner(Protocol):
    """Makes plans on a device into static buffers, which captured decode steps read.

    Attributes:
        capacity: The most that a plan may hold.
        nodes: The most nodes that a tree may have.
        length: ``[nodes]`` int32 tokens of each node that are visible in the step, on the device.
        work: The plan's tensors, without those of the tree.
    """

    capacity: PlanCapacity
    nodes: int
    length: Tensor
    work: list[Tensor]

    def holds(self, tree: StepTree) -> bool:
        """Whether every plan that this tree can need fits."""

    def by_paths(self, tree: StepTree) -> bool:
        """Whether plans of a tree are by heavy paths."""

    def upload(self, tree: StepTree) -> None:
        """Upload a tree and its queries; PlanTooLarge if it does not fit."""

    def stage(self, tree: StepTree) -> None:
        """The host's part of :meth:`upload`."""

    def enqueue_copy(self) -> None:
        """Copy what :meth:`stage` wrote last to the device; a CUDA graph can capture it."""

    def plan(self) -> list[Tensor]:
        """Launch the planner on the current stream."""


class StaticPlans(Protocol):
    """The plans of one kind of layers over the static buffers of captured decode steps."""

    def holds(self, tree: StepTree) -> bool:
        """Whether a tree's plans fit."""

    def plan_of(self, tree: StepTree) -> StepPlan:
        """The plan of a tree that was uploaded, or will be."""

    def stage(self, tree: StepTree) -> None:
        """The host's part of :meth:`upload`, for :meth:`enqueue_copy`."""

    def upload(self, tree: StepTree) -> None:
        """Upload a tree and plan it, on the current stream; PlanTooLarge if it does not fit."""

    def enqueue_copy(self) -> None:
        """Copy what :meth:`stage` wrote last to the device, and plan it.  Can be captured."""

    def replan(self, tree: StepTree) -> None:
        """Plan again, for the present lengths of the tree's leaves."""

    def advance(self) -> None:
        """Update the plans after a step in which each leaf grew by a token.  Can be captured."""

    def clear(self) -> None:
        """Make the plans empty."""


class GraphPlanning(Protocol):
    """How decode steps in graphs are planned, for the heads of one planner.

    Attributes:
        visible: The range of keys that queries see.
        trims: Whether plans leave out the first tokens of nodes, see :meth:`unseen`.
        partial_bytes: Bytes of a partial state, of which attention allocates as many as a plan may have.
    """

    visible: Visible

    @property
    def trims(self) -> bool: ...

    @property
    def partial_bytes(self) -> int: ...

    def unseen(self, tree: StepTree) -> Ints:
        """``[nodes]`` tokens at the beginning of each node that these layers do not read."""

    def variant(self, tree: StepTree) -> Hashable:
        """A key of the kind of graph that this tree's steps need: trees with equal keys can share a graph."""

    def static_plans(self, tree: StepTree, rows: int, nodes: int, device: torch.device) -> StaticPlans | None:
        """Plans of up to ``rows`` rows over ``nodes`` nodes in their own buffers; None: :meth:`planner` makes plans."""

    def capacity_for(self, tree: StepTree, *, now: bool = False) -> PlanCapacity:
        """Capacity for any plan of this tree, however long its nodes become; ``now``: where nothing is trimmed, only
        for their present lengths, which may need much less.
        """

    def planner(self, nodes: int, capacity: PlanCapacity, device: torch.device, *, now: bool = False) -> GraphPlanner:
        """A planner for trees of up to ``nodes`` nodes and plans of up to ``capacity``; ``now``: which holds trees
        whose plans fit at the present lengths of their nodes.
        """

    def step_plan(self, work: list[Tensor], nodes: list[Tensor], tree: StepTree, *, paths: bool = False) -> StepPlan:
        """The plan that ``work`` holds, or will hold, over the tree in ``nodes``; ``paths``: by heavy paths."""


class PlannerFor(Protocol):
    """Makes the planner for heads of a shape, a device, a dtype, and the range of keys that queries see."""

    def __call__(
        self, shape: HeadShape, device: torch.device, dtype: torch.dtype, visible: Visible = ALL
    ) -> Planner: ...


@dataclass(frozen=True)
class PartBackend:
    """How a backend computes one part of attention over latents.

    Attributes:
        planner_for: Makes the part's planner, from the device, the dtype of the cache and the number of layers.  Each
            plan names its query rows (``StepPlan.rows``).
        attend: Computes the :class:`State` of the part's query rows over the BSR rows of the plan, from their positions
            ``[rows]`` int64 and ``StepPlan.tensors``; the output may be in the dtype of the cache.

            absorbed: ``(q [rows, heads, latent + rotary], (latent pages, rotary pages), positions, plan, scale,
            variant)``, q in float32 or the pages' dtype, to an output ``[rows, heads, latent]``; the pages are
            ``[pages, page_size, 1, latent]`` and ``[pages, page_size, 1, rotary]``.

            expanded: ``(q [rows, heads, k_dim], pages, expand, positions, plan, scale, variant)``, where ``expand``
            makes K and V of tokens (see ``expanded_attention``), to an output ``[rows, heads, v_dim]``.
    """

    planner_for: Callable[[LatentPart, torch.device, torch.dtype, int], Planner]
    attend: Callable[..., State]


@dataclass(frozen=True)
class Backend:
    """One implementation of the ops.

    Attributes:
        name: ``torch`` or ``cuda``.
        planner_for: Makes the planner for heads of a shape, a device, a dtype and what queries see; that planner makes
            the ``plan`` of ``tree_attention``.
        kv_append, rotary_append, index_append, linear_pair, tree_attention, classify_blocks, latent_attention,
            merge_states, advance, sample, plan_tree, expert_product, conv_step, mamba2_step, delta_rule,
            rms_norm, digest, part_of_product, sum_parts, gather_parts: The ops.
        expanded_attention: Attention over K and V that a function computes from the cached tensors, over tokens that
            are selected for each query, or with a bias for each; None: the backend has no such op.
        latent_parts: How the backend computes the parts of attention over latents; plain torch computes the others.
        attend_latents: Both parts in one call, for plans that are for the backend's own kernels: ``(q, pages, maps,
            positions, (expanded plan, absorbed plan), scale)`` to ``[T, heads, v_dim]``.
        graph_planning: How decode steps in CUDA graphs are planned, for the heads of a planner; returns None for
            planners whose plans cannot be made again in a graph.  None: the backend has no graphs.
        expert_pairs: The mean number of pairs per expert up to which ``expert_product``, on a device in a dtype, is
            faster than transformers' code or saves a wait of the host; 0: never.  None: never on any device.
    """

    name: str
    planner_for: PlannerFor
    kv_append: Callable[..., None]
    rotary_append: Callable[..., Tensor]
    index_append: Callable[..., None]
    linear_pair: Callable[..., Tensor]
    tree_attention: Callable[..., tuple[Tensor, Tensor]]
    classify_blocks: Callable[..., Tensor]
    latent_attention: Callable[..., tuple[Tensor, Tensor]]
    merge_states: Callable[..., Tensor]
    advance: Callable[..., None]
    sample: Callable[..., None]
    plan_tree: Callable[..., None]
    expert_product: Callable[..., Tensor]
    conv_step: Callable[..., Tensor]
    mamba2_step: Callable[..., Tensor]
    delta_rule: Callable[..., Tensor]
    rms_norm: Callable[..., Tensor]
    digest: Callable[..., None]
    part_of_product: Callable[..., Tensor]
    sum_parts: Callable[..., Tensor]
    gather_parts: Callable[..., Tensor]
    expanded_attention: Callable[..., tuple[Tensor, Tensor]] | None = None
    latent_parts: Mapping[Part, PartBackend] = field(default_factory=dict)
    attend_latents: Callable[..., Tensor] | None = None
    graph_planning: Callable[[Planner], GraphPlanning | None] | None = None
    expert_pairs: Callable[[torch.device, torch.dtype], float] | None = None


_Load = Callable[[], Backend]
_Probe = Callable[[torch.device], Choice]
_registered: dict[str, tuple[_Load, _Probe | None]] = {}


def register(name: str, load: _Load, probe: _Probe | None = None) -> None:
    """Register a backend; ``load`` imports it at its first use.

    ``probe`` says whether it runs on a GPU: a choice of this name, or of another name and why.  None: it always runs.
    """
    _registered[name] = load, probe


def wanted() -> str | None:
    """The value of ``PREFIXKIT_BACKEND``, or None if it is unset; BackendError if it names no backend."""
    name = os.environ.get(VARIABLE, "").strip().lower()
    if name and name not in NAMES:
        raise BackendError(
            f"{VARIABLE} must be one of {', '.join(NAMES)}, or unset for the best there is; got {name!r}"
        )
    return name or None


def choose(device: torch.device) -> Choice:
    """Choose the backend for tensors on a device.

    Raises:
        BackendError: the device is no CPU or CUDA device, or cannot run the backend that ``PREFIXKIT_BACKEND``
            names, or no backend is registered for it.
    """
    name = wanted()
    if device.type == "cpu":
        return Choice("cpu", "the tensors are on the CPU")
    if device.type != "cuda":
        raise BackendError(f"prefixkit runs on CPUs and CUDA devices, not on {device}; move the model to one of them")
    if name == "cpu":
        raise BackendError(
            f"{VARIABLE}=cpu, but the tensors are on {device}; move the model to the CPU, or unset {VARIABLE}"
        )
    if name == "torch":
        return Choice("torch", f"{VARIABLE}=torch", f"unset {VARIABLE} for the fast kernels")
    _, probe = _registration("cuda")
    assert probe is not None, "registered with one"
    choice = probe(device)
    if name == "cuda" and choice.name != "cuda":
        raise BackendError(f"{VARIABLE}=cuda, but the kernels cannot run: {choice.reason}; {choice.remedy}")
    return choice


def best() -> Choice:
    """The choice for the best device here, for ``prefixkit env``; raises BackendError as :func:`choose` does."""
    name = wanted()
    if torch.cuda.is_available():
        return Choice("cpu", f"{VARIABLE}=cpu") if name == "cpu" else choose(torch.device("cuda", 0))
    built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
    if name in ("cuda", "torch"):
        raise BackendError(f"{VARIABLE}={name}, but torch sees no CUDA device (it {built}); unset {VARIABLE}")
    return Choice("cpu", f"torch sees no CUDA device (it {built})")


def backend_for(device: torch.device) -> Backend:
    """The backend for tensors on a device; the first call for a GPU logs the choice and its reason.

    Raises:
        BackendError: see :func:`choose`.
    """
    if device.type == "cpu":
        return _registration("torch")[0]()
    # If a CPU tensor is among tensors on a GPU, the op's own check names it.
    index = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index
    return _on_gpu(torch.device(device.type, index))


def plain_torch() -> Backend:
    """The backend of plain torch, on any device: for ops that no kernel of ours computes."""
    return _registration("torch")[0]()


def graph_plannings(device: torch.device, planners: Sequence[Planner]) -> list[GraphPlanning] | None:
    """How decode steps of these planners are planned in CUDA graphs; None unless all of them can be."""
    make = backend_for(device).graph_planning
    found = [None if make is None else make(planner) for planner in planners]
    plannings = [planning for planning in found if planning is not None]
    return plannings if len(plannings) == len(planners) else None


def part_backend(device: torch.device, part: Part) -> PartBackend:
    """The code that computes a part of attention over latents on a device; raises as :func:`backend_for` does."""
    return backend_for(device).latent_parts.get(part) or plain_torch().latent_parts[part]


def choose_again() -> None:
    """Clear the choices for GPUs: the next call for each reads ``PREFIXKIT_BACKEND`` anew; for tests."""
    _on_gpu.clear()


@once
def _on_gpu(device: torch.device) -> Backend:
    choice = choose(device)
    (log.info if choice.name == "cuda" else log.warning)("attention on %s runs on %s", device, choice)
    return _registration(choice.name)[0]()


def _registration(name: str) -> tuple[_Load, _Probe | None]:
    if name not in _registered:
        raise BackendError(f"no backend {name!r} is registered; import prefixkit.backends first")
    return _registered[name]
