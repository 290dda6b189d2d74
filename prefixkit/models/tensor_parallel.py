"""Models that are split over processes: how the processes agree, and which splits attention over a tree rejects.

transformers splits a model by its own plan (``DistributedConfig(tp_plan="auto")`` under torchrun): parameters become
DTensors, modules run on each process's local part of them, and after each block the processes sum their hidden states.
So each process computes its share of the heads and holds their KV, and everything else is the same in all processes:
prompts, tree, plan, sampled tokens.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from prefixkit.agreement import ALONE, Agreement, Together
from prefixkit.models.model_errors import UnsupportedModel

# Names in plans of the projections, fused or not, to keys, and of those to queries, that are split by heads.
_TO_KEYS = ("k_proj", "qkv_proj", "query_key_value")
_TO_QUERIES = ("q_proj", "q_b_proj", *_TO_KEYS)
# Process 0 may work alone for long, as while candidates are judged; torchrun ends the others if process 0 fails.
_LONGEST_WAIT = timedelta(days=7)
_known: WeakKeyDictionary[nn.Module, Agreement] = WeakKeyDictionary()


def tp_size(model: nn.Module) -> int:
    """How many processes a transformers model is split over; 1 where it is not."""
    return int(getattr(model, "_tp_size", None) or 1)


def agreement_of(model: PreTrainedModel) -> Agreement:
    """The Agreement of the processes of a transformers model; all of them must make their first call together."""
    if tp_size(model) == 1:
        return ALONE
    if (known := _known.get(model)) is None:
        group = process_group(model)
        ranks = torch.distributed.get_process_group_ranks(group)
        host = torch.distributed.new_group(ranks, _LONGEST_WAIT, "gloo", use_local_synchronization=True)
        known = _known[model] = Together(group, host)
    return known


def process_group(model: nn.Module) -> Any:
    """The process group that a model is split over, for torch's collectives."""
    return process_mesh(model).get_group()


def process_mesh(model: nn.Module) -> Any:
    """The device mesh of the same processes, for DTensors."""
    mesh: Any = model._device_mesh
    return mesh["tp"] if mesh.ndim > 1 else mesh


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 shards a model, so that a forward pass of one process waits for those of the others."""
    return any(cls.__module__.startswith("torch.distributed") for cls in type(model).__mro__)


def refuse_sharded(model: PreTrainedModel) -> None:
    """Raise UnsupportedModel for a model that FSDP2 shards: processes with different prompts take different steps."""
    if is_sharded(model):
        raise UnsupportedModel(
            f"FSDP2 shards {type(model).__name__} over processes, each step of which waits for a step of the others, "
            "and a session takes as many as its own prompts need; split it by distributed_config=DistributedConfig("
            'tp_plan="auto") in place of that, or give each process a model of its own'
        )


def check_split(model: PreTrainedModel) -> None:
    """Raise UnsupportedModel if a model is split in a way that attention over a tree does not support."""
    name, processes = type(model).__name__, tp_size(model)
    asked = getattr(model.config, "distributed_config", None)
    for what, count in (("pipeline", "pp_size"), ("expert", "ep_size")):
        if (size := int(getattr(asked, count, None) or 1)) > 1:
            raise UnsupportedModel(
                f"{name} is split by {what} parallelism ({count}={size}), under which a step over a tree is not "
                'tested; load it with DistributedConfig(tp_plan="auto") alone'
            )
    if processes == 1:
        return
    plan, config = getattr(model, "_tp_plan", None) or {}, model.config.get_text_config()
    split = {rule.rpartition(".")[2] for rule, style in plan.items() if style in ("colwise", "packed_colwise")}
    for what, field, projections in (
        ("query heads", "num_attention_heads", _TO_QUERIES),
        ("KV heads", "num_key_value_heads", _TO_KEYS),
    ):
        heads = getattr(config, field, None)
        if isinstance(heads, int) and heads % processes and not split.isdisjoint(projections):
            raise UnsupportedModel(
                f"the {heads} {what} of {name} cannot be dealt out to {processes} processes; start as many as divide "
                f"{heads}"
            )
