"""How two processes that share a model sum and gather: through memory that both see, or by torch.distributed."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from prefixkit.agreement import everywhere
from prefixkit.models.tensor_parallel import agreement_of, process_group
from prefixkit.ops.backend import choose
from prefixkit.ops.shared_parts import BLOCKS, SHARED_BYTES, VECTOR_BYTES, addresses_of
from prefixkit.torch_private import shared_memory

log = logging.getLogger("prefixkit")


@dataclass(frozen=True, eq=False)
class PartExchange:
    """What a process sums and gathers by.

    Attributes:
        group: The processes, as torch's collectives take them.
        addresses: What the ops ``sum_parts`` and ``gather_parts`` take; None where ``torch.distributed`` is called.
        held: What the addresses are of.
    """

    group: Any
    addresses: Tensor | None = None
    held: tuple[Any, ...] = ()

    def addresses_for(self, weight: Tensor) -> Tensor | None:
        """The addresses, where the op can sum what a product with a weight ``[width, columns]`` gives."""
        return None if weight.shape[0] * weight.element_size() % VECTOR_BYTES else self.addresses


_known: WeakKeyDictionary[nn.Module, PartExchange] = WeakKeyDictionary()


def part_exchange(model: PreTrainedModel) -> PartExchange:
    """How the processes of a model sum and gather; all of them ask for it first at the same place.

    Two processes on linked GPUs write to each other's memory: what NCCL takes 15 us for (64 rows of 4,096) takes 6.
    More of them, which would send more that way than by NCCL's rings, and CPUs go through ``torch.distributed``.
    """
    if (known := _known.get(model)) is None:
        known = _known[model] = _made(model)
    return known


def _made(model: PreTrainedModel) -> PartExchange:
    group, device = process_group(model), model.device
    if group.size() != 2 or device.type != "cuda" or choose(device).name != "cuda":
        return PartExchange(group)
    memory, why = None, "this torch has no symmetric memory"
    try:
        memory = shared_memory(SHARED_BYTES, device, group)
    except RuntimeError as error:
        why = str(error).splitlines()[0]
    epochs = torch.zeros(BLOCKS, dtype=torch.int32, device=device)
    torch.cuda.synchronize(device)  # flags are zero before the other process raises one
    if not everywhere(agreement_of(model), memory is not None):
        log.info("the processes of %s sum and gather through NCCL: %s", type(model).__name__, why)
        return PartExchange(group)
    assert memory is not None
    log.info("the processes of %s sum and gather through memory that both see", type(model).__name__)
    rank = group.rank()
    own, theirs = memory.parts[rank], memory.parts[1 - rank]
    return PartExchange(group, addresses_of(own, theirs, epochs), (memory, epochs))
