"""The language-model head of a model split over two processes: they exchange columns through memory that both map.

Under the plan's style each process computes some columns of the logits.  The ``forward`` that transformers sets on the
module runs the class's ``forward`` on local weights and makes a DTensor of its result, which NCCL gathers and which is
copied once more; but a DTensor that is already whole is returned as it is.  So only the class's ``forward`` changes, as
in ``attention_class.py``: in steps of compiled layers it gathers with the op ``gather_parts``, which gives the same
bits.  Where each process samples a part of the rows, each gets the columns of its rows alone: half of the bytes.
"""

from __future__ import annotations

import functools
import logging
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import prefixkit.ops.library  # noqa: F401 - registers torch.ops.prefixkit
from prefixkit.models.attention_class import is_tree_class, original_class
from prefixkit.models.bound_forwards import become, is_own_forward, subclass
from prefixkit.models.compile.part_exchange import part_exchange
from prefixkit.models.tensor_parallel import process_mesh, tp_size
from prefixkit.ops.shared_parts import VECTOR_BYTES
from prefixkit.threads import set_within

log = logging.getLogger("prefixkit")

# Styles of a plan under which each process computes some of the outputs, and all processes get all outputs.
_GATHERED = ("colwise_gather_output", "colwise_rep")


@dataclass(frozen=True, eq=False)
class GatheredHead:
    """A head whose columns the op ``gather_parts`` gathers in place of transformers.

    Attributes:
        module: The head.
        mesh: The device mesh of the processes, for DTensors.
        addresses, rank: Arguments of the op ``gather_parts``.
        own_rows: Whether each process gets the logits of its half of the rows alone, if their number is even.
    """

    module: nn.Linear
    mesh: Any
    addresses: Tensor
    rank: int
    own_rows: bool = False

    def in_step(self, own_rows: bool = False) -> AbstractContextManager[None]:
        """Within this context, for a step of this thread, gather the head's columns."""
        return set_within(_head, replace(self, own_rows=own_rows))

    def whole(self, columns: Tensor) -> Tensor:
        """The logits as a whole DTensor, or ``columns`` if their number differs per process or does not suit the op.

        With ``own_rows`` the DTensor has different rows in each process, which transformers does not look into.

        Args:
            columns: ``[..., rows, columns]``.
        """
        from torch.distributed.tensor import DTensor, Replicate  # not in every build of torch

        if isinstance(columns, DTensor) or torch.is_grad_enabled():
            return columns
        width = columns.shape[-1]
        if width * self.mesh.size() != self.module.out_features or width * columns.element_size() % VECTOR_BYTES:
            return columns
        part, sent = columns.contiguous(), None
        if self.own_rows and columns.shape[-2] % 2 == 0:
            halves = [half.contiguous() for half in columns.chunk(2, -2)]
            part, sent = halves[self.rank], halves[1 - self.rank]
        whole = torch.ops.prefixkit.gather_parts(part, self.addresses, self.rank, sent)
        return DTensor.from_local(whole, self.mesh, [Replicate()], run_check=False)


# The head that gathers columns in this thread's step.
_head: ContextVar[GatheredHead | None] = ContextVar("_head", default=None)


def gathered_head(model: PreTrainedModel) -> GatheredHead | None:
    """The head of a patched model, whose columns the processes gather in steps; ``unpatch`` restores its class.

    Args:
        model: The model; all processes must call this function together.

    Returns:
        None if transformers gathers: the processes share no memory, the plan splits the head in another style or not at
        all, or the head is no plain linear layer with the ``forward`` that tensor parallelism sets.
    """
    if tp_size(model) == 1 or (exchange := part_exchange(model)).addresses is None:
        return None
    head: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if not isinstance(head, nn.Linear) or original_class(head) is not nn.Linear:
        return None
    name = next(name for name, module in model.named_modules() if module is head)
    style = (getattr(model, "_tp_plan", None) or {}).get(name)
    if style not in _GATHERED or not is_own_forward(head, head.__dict__.get("forward")):
        return None
    if not is_tree_class(type(head)):
        become(head, head_class(nn.Linear))
        log.info("the processes of %s gather logits as they sum", type(model).__name__)
    return GatheredHead(head, process_mesh(model), exchange.addresses, exchange.group.rank())


@functools.cache
def head_class(original: type[nn.Module]) -> type[nn.Module]:
    """The subclass of a head's class that gathers in steps; one subclass per original class."""

    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        columns = original.forward(self, *args, **kwargs)  # looked up at each call, as in attention_class.py
        head = None if torch.compiler.is_compiling() else _head.get()
        return columns if head is None or head.module is not self else head.whole(columns)

    return subclass(original, head_class, {"forward": forward})
