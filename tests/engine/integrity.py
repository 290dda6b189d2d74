"""Proof that an engine's pool holds what its tree says: read every slot, trust nothing stored."""

from __future__ import annotations

import numpy as np

from prefixkit.engine.engine import Engine
from prefixkit.testing.fake_model import FakeModel, values_of
from prefixkit.testing.integrity import check_tree
from prefixkit.tree import Node
from tests.tree.model import path


def nodes_of(engine: Engine) -> list[Node]:
    """All nodes of its tree, those that only the prefix cache keeps too, the root first."""
    nodes = [engine.store.tree.root]
    for node in nodes:  # the list grows while it is read
        nodes.extend(node.children)
    return nodes


def check_engine(engine: Engine, model: FakeModel) -> None:
    """The tree is consistent, and the slot of each computed token holds the KV of precisely the tokens up to it."""
    check_tree(engine.store.tree)
    keys, values = (pages.numpy().reshape(-1) for pages in model.pages)
    for node in nodes_of(engine):
        if node.computed:
            slots, prefix = node.slots[: node.computed], path(node)
            np.testing.assert_array_equal(keys[slots], node.tokens[: node.computed], err_msg=f"tokens of {node}")
            expected = values_of(prefix, model.weights)[node.start : node.start + node.computed]
            np.testing.assert_array_equal(values[slots], expected, err_msg=f"prefix, or weights, of {node}")


def check_idle(engine: Engine, pinned: int) -> None:
    """No sequence is left but those that are pinned."""
    assert sum(len(node.sequences) for node in nodes_of(engine)) == pinned
    assert engine.store.tree.reserved == 0
