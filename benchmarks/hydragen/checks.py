"""Whether the methods compute the same: each core's attention over the KV that the tree holds."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from benchmarks.hydragen.cases import Case
from benchmarks.hydragen.methods import METHODS, Parts, Tree
from benchmarks.hydragen.step import Rig
from benchmarks.tree_attention.decode import MOST_DIFFERENCE

CASE = Case(((1, 200), (4, 37)), batch=16, new=24, private=5)
DRAWN = 11


def differences(rig: Rig) -> dict[str, float | str]:
    """For each method but none: the norm of its difference from ours, over the norm of ours; or why it has no answer."""
    print("seed 7")
    torch.manual_seed(7)
    state = rig.state(CASE)
    spec = rig.shape.kv_spec(rig.device, rig.dtype, layers=1)
    rig.arena.reset()
    tree = Tree(state, spec, rig.shape.heads, rig.arena)
    q, key, value = (
        torch.randn(CASE.batch, heads, spec.head_dim, device=rig.device).to(rig.dtype)
        for heads in (rig.shape.heads, spec.kv_heads, spec.kv_heads)
    )
    found: dict[str, float | str] = {}
    with torch.no_grad():
        tree.at(DRAWN)
        tree.append(0, key, value)
        ours = tree.attend(0, q, spec.head_dim**-0.5).float()
        for name, kind in METHODS.items():
            if not issubclass(kind, Parts):
                continue
            try:
                core = kind(state, spec, rig.shape.heads, rig.arena)
                _copy(tree, core)
                core.at(DRAWN)
                core.append(0, key, value)
                out = core.attend(0, q, spec.head_dim**-0.5).float()
                found[name] = round(float((out - ours).norm() / ours.norm()), 6)
            except Exception as error:  # a method's failure is a result
                found[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
    return found


def complaints(found: dict[str, float | str]) -> dict[str, str]:
    """Methods that do not compute what ours does, and why."""
    bad: dict[str, str] = {}
    for name, by in found.items():
        if isinstance(by, str):
            bad[name] = by
        elif not by < MOST_DIFFERENCE:
            bad[name] = f"differs from ours by {by} of the norm"
    return bad


def _copy(tree: Tree, core: Parts) -> None:
    """The tree's KV into the layout of ``core``."""
    nodes = tree.state.tree.nodes
    for which in (0, 1):
        for index in range(core.levels):
            level = torch.stack([_tokens(tree, node, which) for node in nodes[index].tolist()])
            core.level_kv[0][index][which].copy_(level.transpose(1, 2))
        for row, leaf in enumerate(nodes[-1].tolist()):
            own = torch.cat([_tokens(tree, node, which) for node in _path(tree, leaf)[core.levels :]])
            core.own_kv[0][which][row].copy_(own)


def _path(tree: Tree, node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = int(tree.state.tree.snapshot.parent[node])
    return path[::-1]


def _tokens(tree: Tree, node: int, which: int) -> Tensor:
    """``[tokens, kv_heads, head_dim]`` K or V of a node."""
    snapshot, pages = tree.state.tree.snapshot, (tree.pool.k(0), tree.pool.v(0))[which]
    slots = torch.from_numpy(snapshot.slots(np.int32(node), np.arange(snapshot.length[node]))).to(pages.device)
    return pages[slots // pages.shape[1], slots % pages.shape[1]]
