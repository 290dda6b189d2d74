"""The importance correction of TRL's trainers: probabilities before the update over those of the rollout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

# Defaults of the fields of GRPOConfig for TRL's correction of vLLM; they serve RLOOConfig, which has no such fields.
_CORRECTION: dict[str, Any] = {"correction": True, "mode": "sequence_mask", "clip_min": None, "clip_max": 3.0}


def corrected(trainer: Any, batch: dict[str, Any], sampled: Sequence[Sequence[float]]) -> dict[str, Any]:
    """A batch for the loss, with advantages multiplied by the importance ratio.

    Args:
        trainer: A ``GRPOTrainer`` or ``RLOOTrainer``, whose config sets the correction as for vLLM.
        batch: A batch as TRL makes it.
        sampled: The log-probabilities with which completions were sampled, for batches without them.
    """
    fields = ((f"vllm_importance_sampling_{name}", default) for name, default in _CORRECTION.items())
    corrects, mode, *bounds = (getattr(trainer.args, *field) for field in fields)
    if not corrects:
        return batch
    mask = batch["completion_mask"] * batch.get("tool_mask", 1)
    own = batch["sampling_per_token_logps"] if "sampling_per_token_logps" in batch else _padded(sampled, mask)
    by_token = "old_logps" not in batch  # RLOO has log-probabilities of whole completions
    if by_token:
        difference = (_logps_before(trainer, batch) - own) * mask
        seen = difference[mask.bool()]
    else:
        difference = (batch["old_logps"] - (own * mask).sum(1))[:, None]
        seen = difference[:, 0] / mask.sum(1).clamp(min=1)
    ratio = importance_ratio(difference, mode, *bounds)
    _log(trainer, seen.abs(), ratio if ratio.shape[1] == 1 else ratio[mask.bool()])
    if getattr(trainer, "loss_type", None) == "vespo":  # which applies the ratio itself
        return {**batch, "importance_sampling_ratio": ratio}
    advantages = batch["advantages"]
    return {**batch, "advantages": advantages[:, None] * ratio if by_token else advantages * ratio[:, 0]}


def importance_ratio(
    difference: Tensor,
    mode: str,
    clip_min: float | None,
    clip_max: float | None,
) -> Tensor:
    """The importance ratio, as TRL computes it for vLLM.

    Args:
        difference: ``[completions, tokens]`` float log-probabilities before the update minus those of the rollout, 0
            where no token was sampled; or ``[completions, 1]`` their sums.
        mode: "token_truncate", "token_mask", "sequence_truncate" or "sequence_mask": whether each token or each
            completion has a ratio, and whether a ratio beyond the bounds is clamped to them (truncate) or 0 (mask).
        clip_min, clip_max: The bounds; None: no bound.

    Returns:
        ``[completions, tokens]``, or ``[completions, 1]`` for completions.

    Raises:
        ValueError: ``mode`` is none of these.
    """
    level, _, beyond = mode.partition("_")
    if level not in ("token", "sequence") or beyond not in ("truncate", "mask"):
        raise ValueError(
            f"vllm_importance_sampling_mode must be 'token_truncate', 'token_mask', 'sequence_truncate' or "
            f"'sequence_mask', got {mode!r}"
        )
    ratio = (difference.sum(1, keepdim=True) if level == "sequence" else difference).exp()
    if clip_min is None and clip_max is None:
        return ratio
    held = ratio.clamp(min=clip_min, max=clip_max)
    return held if beyond == "truncate" else torch.where(held == ratio, ratio, 0)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode, and restore each module's mode at the end."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _logps_before(trainer: Any, batch: Any) -> Tensor:
    """``[completions, tokens]`` log-probabilities before the update: TRL's, or those of one more forward pass."""
    if "old_per_token_logps" in batch:
        known: Tensor = batch["old_per_token_logps"]
        return known
    ids = torch.cat((batch["prompt_ids"], batch["completion_ids"]), dim=1)
    mask = torch.cat((batch["prompt_mask"], batch["completion_mask"]), dim=1)
    args, length = trainer.args, batch["completion_ids"].shape[1]
    rows = args.per_device_train_batch_size if trainer.model.training else args.per_device_eval_batch_size
    with torch.no_grad(), evaluating(trainer.model):  # as the completions were sampled
        found: Tensor = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, length, rows)[0]
    return found


def _padded(rows: Sequence[Sequence[float]], mask: Tensor) -> Tensor:
    """``[rows, tokens]`` float32 in the shape of the mask, rows padded with zeros at the end."""
    found = torch.zeros(mask.shape)
    for row, own in zip(found, rows, strict=True):
        row[: len(own)] = torch.tensor(own)
    return found.to(mask.device)


def _log(trainer: Any, difference: Tensor, ratio: Tensor) -> None:
    """Log the metrics that TRL logs for vLLM, under the same names."""
    metrics = trainer._metrics["train" if trainer.model.training else "eval"]
    for name, values in (("sampling_logp_difference", difference), ("importance_sampling_ratio", ratio)):
        own = values.flatten() if values.numel() else values.new_zeros(1)
        for how in ("min", "mean", "max"):
            each = trainer.accelerator.gather(getattr(own, how)()[None])
            metrics[f"sampling/{name}/{how}"].append(getattr(each, how)().item())
