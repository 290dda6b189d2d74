"""Splitting a node in two, and merging the two again."""

from __future__ import annotations

import numpy as np

from prefixkit.tree.node import Node
from prefixkit.tree.pages import PageAllocator


def split(node: Node, at: int, upper_id: int, allocator: PageAllocator) -> Node:
    """Split a node before token ``at``; return the new upper half, which holds the tokens ``[0, at)``.

    The node becomes the lower half, ``[at, length)``: the sequences that end here and the children need no
    update.  A split inside a page leaves the page to both halves.
    """
    assert node.parent is not None, node
    assert 0 < at < node.length, (node, at)
    page, offset = divmod(node.first_slot + at, node.page_size)  # where the lower half begins
    upper_pages = node.page_buffer[: page + (offset > 0)].copy()
    if offset:
        allocator.share(int(upper_pages[page]))  # the page that the split cuts

    tokens = node.token_buffer[:at].copy()
    upper = Node(upper_id, node.parent, node.page_size, tokens, upper_pages, node.first_slot)
    upper.start = node.start  # behind a gap, perhaps
    upper.link_after(node.previous_in_page)
    node.link_after(upper if offset else None)
    upper.computed = min(node.computed, at)
    upper.state = node.state_at(upper.computed) if upper.computed else -1
    upper.checkpoints = {offset: slot for offset, slot in node.checkpoints.items() if offset < at}
    upper.uses, upper.used_at = node.uses, node.used_at
    wanted = at in node.checkpoints
    node.parent.replace_child(node, upper)

    node.token_buffer = node.token_buffer[at:]
    node.page_buffer = node.page_buffer[page:]
    node.first_slot = offset
    node.start += at
    node.length -= at
    node.state = node.state if node.computed > at else -1
    node.computed = max(node.computed - at, 0)
    node.checkpoints = {offset - at: slot for offset, slot in node.checkpoints.items() if offset > at}
    if wanted and upper.computed < at:
        upper.checkpoints[at] = -1
    upper.adopt(node)
    return upper


def absorb_parent(node: Node, allocator: PageAllocator) -> None:
    """Undo a split: merge the tokens and pages of a node's parent, whose only child it is, into the node."""
    parent = node.parent
    assert parent is not None, node
    assert parent.parent is not None, node
    assert node.can_absorb(parent), node
    shared = int(node.first_slot > 0)  # both hold the page where their slots meet: one holder is enough
    allocator.release(node.pages[:shared])
    node.page_buffer = np.concatenate([parent.pages, node.pages[shared:]])
    node.token_buffer = np.concatenate([parent.tokens, node.tokens])
    node.first_slot = parent.first_slot
    node.start = parent.start
    own = {parent.length + offset: slot for offset, slot in node.checkpoints.items()}
    node.checkpoints = {**parent.checkpoints, **own}
    if node.computed:
        node.checkpoints[parent.computed] = parent.state
    else:
        node.state = parent.state
    node.length += parent.length
    node.computed += parent.computed
    node.link_after(parent.previous_in_page)
    parent.parent.replace_child(parent, node)
