"""Implementations of the ops: plain torch, and our CUDA kernels.  Importing this package registers them."""

from __future__ import annotations

from torch import device  # "torch" is a subpackage here

from prefixkit.attention.latent_parts import Part
from prefixkit.ops import attention_ops
from prefixkit.ops.backend import Backend, Choice, PartBackend, register
from prefixkit.threads import once


@once
def _torch() -> Backend:
    from prefixkit.backends.torch import (
        host_planner,
        latent_attention,
        plain_digest,
        plain_experts,
        plain_kv,
        plain_sampling,
        plain_states,
        plan_tree,
        products,
        run_program,
    )

    appends = plain_kv.kv_append, plain_kv.rotary_append, plain_kv.index_append
    return Backend(
        "torch",
        host_planner.planner_for,
        *appends,
        products.linear_pair,
        run_program.tree_attention,
        attention_ops.classify_blocks,
        latent_attention.latent_attention,
        latent_attention.merge_states,
        plain_kv.advance,
        plain_sampling.sample,
        plan_tree.plan_tree,
        plain_experts.expert_product,
        plain_states.conv_step,
        plain_states.mamba2_step,
        plain_states.delta_rule,
        plain_states.rms_norm,
        plain_digest.digest,
        products.part_of_product,
        products.sum_parts,
        products.gather_parts,
        expanded_attention=run_program.expanded_attention,
        latent_parts={
            Part.ABSORBED: PartBackend(latent_attention.planner_for, latent_attention.absorbed_state),
            Part.EXPANDED: PartBackend(latent_attention.planner_for, run_program.expanded_state),
        },
    )


@once
def _cuda() -> Backend:
    from prefixkit.backends.cuda import attention, device_planner, digests, kv, part_kernels, plan_launch, sampling
    from prefixkit.backends.cuda.experts.expert_product import expert_product, most_pairs
    from prefixkit.backends.cuda.latents import latent_kernels, latent_planners
    from prefixkit.backends.cuda.states import state_steps
    from prefixkit.backends.cuda.variants import block_classes
    from prefixkit.backends.torch.plain_kv import index_append
    from prefixkit.backends.torch.products import linear_pair

    append = kv.Append()
    appends = append.kv_append, append.rotary_append, index_append
    tree_attention, plain = attention.TreeAttention(), _torch()
    return Backend(
        "cuda",
        device_planner.planner_for,
        *appends,
        linear_pair,
        tree_attention,
        block_classes.classify_blocks,
        tree_attention.latents,
        latent_kernels.merge_states,
        kv.advance,
        sampling.sample,
        plan_launch.plan_tree,
        expert_product,
        state_steps.conv_step,
        state_steps.mamba2_step,
        state_steps.delta_rule,
        state_steps.rms_norm,
        digests.digest,
        part_kernels.part_of_product,
        part_kernels.sum_parts,
        part_kernels.gather_parts,
        latent_parts={part: PartBackend(latent_planners.planner_for, plain.latent_parts[part].attend) for part in Part},
        attend_latents=latent_kernels.attend,
        graph_planning=latent_planners.graph_planning,
        expert_pairs=most_pairs,
    )


def _probe_cuda(on: device) -> Choice:
    from prefixkit.backends.cuda.probe import probe

    return probe(on)


register("torch", _torch)
register("cuda", _cuda, _probe_cuda)
