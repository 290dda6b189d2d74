"""``advance`` in plain torch; see the op for its contract."""

from __future__ import annotations

from typing import Any

import torch


def advance(*arguments: Any) -> None:
    """``advance``."""
    leaf, start, length, page_indptr, pages, first_slot, sampled, tokens, positions, slots, rows, page_size = arguments
    leaf = leaf[:rows].long()
    padding, node = leaf < 0, leaf.clamp(min=0)
    offset = length[node].long()
    within = first_slot[node] + offset
    page = page_indptr[node] + within // page_size
    there = (page < page_indptr[node + 1]) & ~padding
    slot = pages[torch.where(there, page, 0)].long() * page_size + within % page_size
    slots[:rows] = torch.where(there, slot, -1)
    positions[:rows] = torch.where(padding, 0, start[node] + offset - (~there).long())
    tokens[:rows] = torch.where(padding, 0, sampled[:rows].clamp(min=0))
    length[node[there]] += 1
