"""What a model's attention layers do, measured: two forward passes over four tokens.

Attention over a tree assumes that a layer attends over the keys and values that it caches, with a causal mask and the
arguments of its attention function, and that nothing else in the model mixes tokens: a token's row depends on the
token, its position and attention alone.  The probe replaces attention and returns each row's own values as its output,
so rows of the same token at the same position must be equal throughout the model, whatever other rows are in the pass.
In the second pass the cache claims to hold a long text: the model makes the mask that it would make for that text, so
the probe sees windows and chunks without having the text.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from prefixkit.agreement import everywhere
from prefixkit.kv.layer_kinds import LayerKind
from prefixkit.models.attention_class import argument_names, forward_below, is_tree_class, original_class, tree_class
from prefixkit.models.bound_forwards import become
from prefixkit.models.device_map import is_spread
from prefixkit.models.families import attention_layers, known_positions, pretrained_model, text_config
from prefixkit.models.model_calls import logits_of, random_part
from prefixkit.models.model_errors import UnsupportedModel
from prefixkit.models.own_attention.bodies import body_class, known_bodies
from prefixkit.models.own_attention.compare import compare_own_code
from prefixkit.models.probe.cache import ProbeCache
from prefixkit.models.probe.measured import ORDER, ROWS, Probed, close
from prefixkit.models.probe.position_tables import PositionTables
from prefixkit.models.states.mixer_class import mixer_class, mixers
from prefixkit.models.states.taken_cache import step_inputs
from prefixkit.models.steps.step_cache import empty_mask
from prefixkit.models.tensor_parallel import agreement_of, is_sharded, tp_size
from prefixkit.models.variants.layer_variants import measuring
from prefixkit.torch_private import unlogged

_LONGEST = 1 << 17  # about as many tokens as the cache claims to hold
_ATTEMPTS = 3
SCALES_FROM = "log_scaling_n_floor"  # in a config: positions up to which queries are not scaled


def probe(model: nn.Module) -> Probed:
    """Measure the attention layers of a model, patched or not.

    If a model whose tensors have shapes but no values cannot run to its end, because it asks for values, all layers are
    assumed to be of the first attention layer's kind.

    Raises:
        UnsupportedModel: an assumption of attention over a tree does not hold; the message says which.
    """
    inner, layers = pretrained_model(model), attention_layers(model)
    states, agreement = mixers(inner), agreement_of(inner)
    fake = getattr(next(inner.parameters()), "fake_mode", None)
    with measuring(), torch.no_grad(), _accepting_trees(inner, layers.values(), states.values()), fake or nullcontext():
        if fake is not None or _device(inner).type == "meta":
            return _shapes(inner, layers, states)
        if random_part(inner) is None:
            compare_own_code(inner, _call_of(inner), layers, torch.tensor(_tokens(inner, 0), device=_device(inner)))
        differing = set[str]()
        for attempt in range(_ATTEMPTS):
            found, probed = _look_both_ways(inner, layers, states, _tokens(inner, attempt))
            if everywhere(agreement, found is None):  # each process sees its own heads
                return probed
            found = found or "another process of the model has found a difference"
            # Sums in nondeterministic order may flip a near tie between two experts, but not three times in one place.
            differing.add(found)
    if everywhere(agreement, len(differing) == 1):
        raise UnsupportedModel(f"{type(inner).__name__}: {differing.pop()}")
    return probed


def _shapes(model: PreTrainedModel, layers: dict[str, nn.Module], states: dict[str, nn.Module]) -> Probed:
    """What the layers of a model without values cache."""
    cache = ProbeCache(layers, None, shapes_only=True, mixers=states)
    try:
        with unlogged():
            _run(model, cache, [1] * ROWS)
    except UnsupportedModel:
        if states or not cache.kinds:
            raise
        return Probed(tuple(cache.kinds[:1]) * len(layers), numbers=cache.numbers, is_spread=is_spread(model))
    return Probed(
        tuple(cache.kinds),
        numbers=cache.numbers,
        computed_by=cache.computed_by,
        states=cache.states.found,
        is_spread=is_spread(model),
        state_devices=cache.states.devices,
        state_calls=cache.states.calls,
    )


def _look_both_ways(
    model: PreTrainedModel, layers: dict[str, nn.Module], states: dict[str, nn.Module], text: Sequence[int]
) -> tuple[str | None, Probed]:
    """:func:`_look`; for a model without an argument for positions again, with offsets, if the first look fails."""
    if "position_ids" in argument_names(model):
        return _look(model, layers, states, text)
    first: UnsupportedModel | None = None
    try:
        found, probed = _look(model, layers, states, text)
        if found is None:
            return None, probed
    except UnsupportedModel as error:
        first = error
    try:
        by_offsets, other = _look(model, layers, states, text, offsets=True)
    except UnsupportedModel:
        by_offsets = "not so either"
    if by_offsets is None:
        return None, other
    if first is not None:
        raise first
    return found, probed


def _look(
    model: PreTrainedModel,
    layers: dict[str, nn.Module],
    states: dict[str, nn.Module],
    text: Sequence[int],
    *,
    offsets: bool = False,
) -> tuple[str | None, Probed]:
    """One probe: the difference that it has found, or None, and what it has measured of the layers."""
    length = _length(model)
    order = torch.tensor([ORDER], device=_device(model))
    step, plain, long = (ProbeCache(layers, of, mixers=states, offsets=offsets) for of in (None, 0, length))
    given: dict[str, Any] = {"position_ids": order, "attention_mask": empty_mask(order.device)}
    if "logits_to_keep" in argument_names(model):
        rows = [0, ROWS - 1]  # on several devices a tensor would lie on another device than the rows that it selects
        given["logits_to_keep"] = rows if is_spread(model) else torch.tensor(rows, device=order.device)
    with PositionTables() as tables:
        logits = _run(model, step, text, **given)
    shown = {"attention_mask": torch.ones(1, length + ROWS, device=_device(model))} if offsets else {}
    _run(model, long, text, position_ids=_positions(model, length), **shown)
    measured = Probed(
        tuple(long.kinds),
        numbers=step.numbers,
        computed_by=step.computed_by,
        states=step.states.found,
        asks_positions=step.asks_positions,
        takes_offsets=offsets,
        is_spread=is_spread(model),
        state_devices=step.states.devices,
        state_calls=step.states.calls,
        positions=tables.positions,
    )
    if random_part(model) is not None:
        scales = any(kind.biased for kind in long.kinds)  # maybe: rows cannot be compared
        return None, replace(measured, scales_padded=scales)
    if not any(hasattr(module, "rope_deltas") for module in model.modules()):  # which a pass leaves for the next
        _run(model, plain, text)
    counts_from_zero = not plain.rows or all(
        close(rows[:-1], others[:-1], kind.dtype)
        for kind, rows, others in zip(long.kinds, step.rows, plain.rows, strict=True)
    )
    scales = any(kind.biased for kind in long.kinds) and _scales_padded(model, layers, states, text, step)
    return _difference(step, logits), replace(measured, counts_from_zero=counts_from_zero, scales_padded=scales)


def _scales_padded(
    model: PreTrainedModel,
    layers: dict[str, nn.Module],
    states: dict[str, nn.Module],
    text: Sequence[int],
    step: ProbeCache,
) -> bool:
    """Whether rows after a long text, at the positions of a step, differ from the rows of that step."""
    behind = ProbeCache(layers, _length(model), mixers=states)
    _run(model, behind, text, position_ids=torch.arange(ROWS, device=_device(model))[None])
    return not all(
        close(rows[:-1], others[:-1], kind.dtype)
        for kind, rows, others in zip(step.kinds, step.rows, behind.rows, strict=True)
    )


def rows_at(model: nn.Module, positions: Tensor) -> list[Tensor]:
    """For each layer ``[4, ...]`` the queries, keys and values of four tokens at ``positions [4]``.

    Raises:
        UnsupportedModel: as :func:`probe`.
    """
    inner, layers = pretrained_model(model), attention_layers(model)
    states = mixers(inner)
    cache = ProbeCache(layers, None, mixers=states)
    with measuring(), torch.no_grad(), _accepting_trees(inner, layers.values(), states.values()):
        _run(inner, cache, _tokens(inner, 0), position_ids=positions[None], attention_mask=empty_mask(positions.device))
    return cache.rows


def ignores_zeros(model: nn.Module, name: str, whole: bool) -> bool:
    """Whether passing zeros as this argument of ``forward``, one per token (``whole``: of all tokens, else of the new
    ones), changes no bit of what a model computes, nor the masks that its layers get.
    """
    inner, layers = pretrained_model(model), attention_layers(model)
    states = mixers(inner)

    def seen(length: int, *names: str) -> tuple[list[LayerKind], list[Any]]:
        cache, count = ProbeCache(layers, length, mixers=states), ROWS + length * whole
        given = {name: torch.zeros(1, count, dtype=torch.int64, device=_device(inner)) for name in names}
        logits = _run(inner, cache, _tokens(inner, 0), position_ids=_positions(inner, length), **given)
        return cache.kinds, [*cache.rows, logits]

    def same(length: int) -> bool:
        (kinds, rows), (others, other_rows) = seen(length), seen(length, name)
        return kinds == others and all(map(torch.equal, rows, other_rows))

    if tp_size(inner) > 1:
        return False  # a process that sees a difference would run another pass without the others
    try:
        with torch.no_grad(), _accepting_trees(inner, layers.values(), states.values()):
            return all(any(same(length) for _ in range(_ATTEMPTS)) for length in (0, _length(inner)))
    except UnsupportedModel:
        return False


def _run(model: PreTrainedModel, cache: ProbeCache, tokens: Sequence[int], **given: Any) -> Tensor | None:
    """Run four tokens through a model; returns the logits of the first and the last, ``[2, vocab]``.

    For a model without a language-model head it returns their last hidden states: other heads may use only some rows.
    """
    input_ids = torch.tensor([tokens], device=_device(model))
    given = step_inputs(model, cache, {"input_ids": input_ids, "use_cache": True, **given})
    try:
        if model.can_generate():
            rows = logits_of(_call_of(model)(**given))
        else:
            rows = getattr(model.base_model(**given), "last_hidden_state", None)
    except (UnsupportedModel, torch.OutOfMemoryError):
        raise
    except Exception as error:
        said = str(error).strip().partition("\n")[0]
        raise UnsupportedModel(
            f"{type(model).__name__} cannot run a step over a tree, which has neither a mask nor a cache of one "
            f"length: {_place(error)}{type(error).__name__}: {said}"
        ) from error
    ran = len({module for _, module in cache.ran}) + cache.states.modules
    if ran != (expected := len(cache.modules) + len(cache.states.names)):
        why = "in training mode with gradient checkpointing a model drops its cache; call model.eval()"
        other = "those after them did not attend to the cache that the model was given"
        checkpointing = model.training and getattr(model, "is_gradient_checkpointing", False)
        raise UnsupportedModel(
            f"{type(model).__name__}: {ran} of {expected} layers attended or kept a state; "
            f"{why if checkpointing else other}"
        )
    cache.sort()
    return None if rows is None else rows[0].float()[[0, -1]]


def _call_of(model: PreTrainedModel) -> Callable[..., Any]:
    """The function that runs a model, which may be inside a call already: its hooks and contexts must not be entered
    twice, but a sharded model needs its hooks to gather its weights.
    """
    return model if is_sharded(model) else forward_below(model)


def _place(error: BaseException) -> str:
    """The class name of the innermost module whose forward pass has failed, as the beginning of a message."""
    place = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and frame.f_code.co_name != "_call_impl":
            place = f"{original_class(module).__name__}: "
    return place


def _difference(step: ProbeCache, logits: Tensor | None) -> str | None:
    """A message that says which rows differ that should be equal, and why that may be; None if none differ."""
    for (_, module), rows, kind in zip(step.ran, step.rows, step.kinds, strict=True):
        if not close(rows[0], rows[-1], kind.dtype):
            return (
                f"before {step.modules[module]} the model mixes tokens, or takes no position_ids: the same token at "
                "the same position gets other keys among other tokens"
            )
    dtypes = [*(kind.dtype for kind in step.kinds), *(one.dtype for of in step.states.found for one in of)]
    smallest = min(dtypes, key=lambda dtype: dtype.itemsize)
    if logits is not None and not close(logits[0], logits[-1], smallest):
        return "after its last attention layer the model mixes tokens, or does not keep the logits that it is asked for"
    return None


def _device(model: PreTrainedModel) -> torch.device:
    """The device that a model runs on: for each call accelerate moves an offloaded model's weights to it."""
    for module in model.modules() if model.device.type == "meta" else ():
        hook = getattr(module, "_hf_hook", None)
        for each in getattr(hook, "hooks", (hook,)):
            if (device := getattr(each, "execution_device", None)) is not None:
                return torch.device(device)
    return model.device


def _length(model: PreTrainedModel) -> int:
    """Tokens that the cache claims to hold: enough that masks show windows, and a chunk starts in the next four."""
    config = text_config(model)
    names = "attention_chunk_size", "sliding_window", SCALES_FROM
    chunk, window, scales_from = (getattr(config, name, None) or 0 for name in names)
    most = max(_LONGEST, 2 * chunk, window + 2 * ROWS, 2 * scales_from)
    if "position_ids" not in argument_names(model):  # it counts from the cache's length
        # An index beyond an embedding is fatal on a GPU.
        most = min(most, max(2 * ROWS, known_positions(model) - 4 * ROWS))
    return most - most % max(chunk, 1) - ROWS // 2


def _positions(model: PreTrainedModel, length: int) -> Tensor:
    """``[1, 4]`` positions after ``length`` tokens, or the last positions that the model certainly supports."""
    # Some models count positions from that of a padding token, so some positions are left as a margin.
    return min(length, max(0, known_positions(model) - 4 * ROWS)) + torch.arange(ROWS, device=_device(model))[None]


def _tokens(model: PreTrainedModel, attempt: int) -> list[int]:
    """Token ids that the config does not name as special tokens, in another order than positions."""
    text = text_config(model)
    special = set[object]()
    for config in (model.config, text):
        special |= {value for name, value in vars(config).items() if "token" in name and isinstance(value, int)}
    plain = [token for token in range(min(64, text.vocab_size)) if token not in special]
    first, second, third = (plain[(attempt * 3 + i) % len(plain)] for i in range(3))
    return [first, third, second, first]


@contextmanager
def _accepting_trees(model: nn.Module, layers: Iterable[nn.Module], states: Iterable[nn.Module]) -> Iterator[None]:
    """Let attention modules that are not patched take our caches, and layers that were compiled run as they are."""
    classes = {module: tree_class(original_class(module)) for module in layers}  # type: ignore[arg-type]  # classes hash
    classes |= {module: mixer_class(original_class(module)) for module in states}  # type: ignore[arg-type]
    classes |= {module: body_class(original_class(module)) for module in known_bodies(model.modules())}  # type: ignore[arg-type]
    changed = [module for module in classes if not is_tree_class(type(module))]
    try:
        for module in changed:
            become(module, classes[module])
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module in changed:
            become(module, original_class(module))
