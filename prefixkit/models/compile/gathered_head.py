"""The language-model head of a model that two processes share: its columns go through memory that both see.

Under the plan's style each process has the logits of some tokens.  transformers' ``forward`` of the module runs the
class's on local weights and makes a DTensor of what it gives, which is gathered by NCCL and copied once more; but a
DTensor that is whole is taken as it is.  So the class's ``forward``, and nothing else, changes, as in
``attention_class.py``: in steps of compiled layers it gathers by the op ``gather_parts``, with the same bits.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import prefixkit.ops.library  # noqa: F401 - registers torch.ops.prefixkit
from prefixkit.models.attention_class import is_tree_class, original_class, subclass
from prefixkit.models.bound_forwards import become, is_own_forward
from prefixkit.models.compile.part_exchange import part_exchange
from prefixkit.models.tensor_parallel import process_mesh, tp_size
from prefixkit.ops.shared_parts import VECTOR_BYTES

log = logging.getLogger("prefixkit")

# Styles of a plan: each process computes some of the outputs, and all get them.
_GATHERED = ("colwise_gather_output", "colwise_rep")


@dataclass(frozen=True, eq=False)
class GatheredHead:
    """A head whose columns are gathered otherwise than by transformers.

    Attributes:
        module: The head.
        mesh: The processes, as DTensors take them.
        addresses, rank: What the op ``gather_parts`` takes.
    """

    module: nn.Linear
    mesh: Any
    addresses: Tensor
    rank: int

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """For the length of a step of this thread, gather the head's columns."""
        token = _head.set(self)
        try:
            yield
        finally:
            _head.reset(token)

    def whole(self, columns: Tensor) -> Tensor:
        """The logits as a whole DTensor, where all processes have as many columns, which fit; or what was given."""
        from torch.distributed.tensor import DTensor, Replicate  # not in every build of torch

        if isinstance(columns, DTensor) or torch.is_grad_enabled():
            return columns
        width = columns.shape[-1]
        if width * self.mesh.size() != self.module.out_features or width * columns.element_size() % VECTOR_BYTES:
            return columns
        whole = torch.ops.prefixkit.gather_parts(columns.contiguous(), self.addresses, self.rank)
        return DTensor.from_local(whole, self.mesh, [Replicate()], run_check=False)


# The head of the step that is in progress in this thread.
_head: ContextVar[GatheredHead | None] = ContextVar("_head", default=None)


def gathered_head(model: PreTrainedModel) -> GatheredHead | None:
    """The head of a patched model, of which the processes gather columns in steps; ``unpatch`` restores its class.

    Args:
        model: The model; all processes ask at the same place.

    Returns:
        None where transformers gathers: the processes see no memory of each other, the plan splits the head in another
        style or not at all, or it is no plain linear layer whose ``forward`` transformers has replaced as known.
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
    """The subclass of a head's class that gathers in steps; one for each original."""

    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        columns = original.forward(self, *args, **kwargs)  # looked up at each call, as in attention_class.py
        head = None if torch.compiler.is_compiling() else _head.get()
        return columns if head is None or head.module is not self else head.whole(columns)

    return subclass(original, _blank, {"forward": forward})


def _blank(original: type[nn.Module]) -> nn.Module:
    cls = head_class(original)  # type: ignore[arg-type]  # classes hash
    return cls.__new__(cls)
