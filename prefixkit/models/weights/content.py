"""Whether KV of earlier calls may be used: the version of the weights, and a comparison of their memory's content.

torch counts most writes to a tensor, and these counters are read.  It does not count a write through
``tensor.data``, another tensor over the same memory, a numpy view or a raw pointer.  So memory is compared too, by
digests in integer arithmetic: each 64-bit word is multiplied by an odd number that depends on its place, modulo 2**64,
so a change of one word always changes the sum, and so does exchanging words.

A sample of every tensor is compared at each call.  All memory is compared if that costs less than the KV saves, and for
at most 1/100 of the time while no comparison finds a change.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

import prefixkit.ops.library  # noqa: F401  (declares torch.ops.prefixkit)
from prefixkit.models.weights.borrowed import WITH_MEMORY, borrowed, optimizer_steps, parts_of
from prefixkit.models.weights.state import ModelState, state_of
from prefixkit.ops.digest_op import odd_numbers

Compare = Literal["auto", "always"]
COMPARE = ("auto", "always")
SETTING = "_prefixkit_compare_weights"  # the attribute of patched attention modules that holds the setting

# 64-bit words in the sample of a tensor; the most words of a model that is compared whole at each call.
_SAMPLE, _SMALL = 64, 1 << 17
# Comparing all memory reads each weight once, and a token of a prompt multiplies by each weight once: this many tokens
# take as long as a comparison on one core at 60 GFLOP/s and 6 GB/s, and on an H200 at 600 TFLOP/s and 1.2 TB/s.
_TOKENS_WORTH = {"cpu": 32, "cuda": 512}
# All memory is compared for at most this share of the time; and at most ``_BURST`` times in a row.
_SHARE, _BURST = 1 / 100, 3
_VERSIONS_KNOWN = 4


def kv_version(model: nn.Module, found: Callable[[], int] = lambda: 0, state: ModelState | None = None) -> int:
    """A number that differs from an earlier one whenever what the model computes may have changed in between.

    ``docs/howto/memory.md`` lists the changes that it detects.  Weights that move without a change of values, as packed
    weights do, keep their version, and adapters that are switched back get their earlier version again.

    The sample can miss a write that torch does not count and that changes only some elements, such as one row of a
    matrix, if the KV found is short or all memory was compared three times in short succession;
    ``prefixkit.patch(model, compare_weights="always")`` compares all memory.  Changes that are undone before the next
    call of this function are not detected.  A model whose weights are loaded anew for each step, as by accelerate's
    offloading, has a new version after each step.

    No two models share a number.  The model is not kept alive.

    Args:
        found: Returns how many tokens' KV of earlier calls this call would use; called only if that matters.
        state: The model's state, if the caller has it.
    """
    with _lock:
        content = _contents.setdefault(model, _Content())
    with content.lock:
        return content.version(model, found, state_of(model) if state is None else state)


_contents: WeakKeyDictionary[nn.Module, _Content] = WeakKeyDictionary()
_lock = threading.Lock()
_numbers = itertools.count(1)


@dataclass(slots=True)
class _Known:
    """A version that a model had.

    Attributes:
        facts: What is compared first: how modules run, torch's counters of writes, dtypes and strides.
        objects: The ``forward`` that modules were given, those of their classes, and tensors without readable memory.
        places, steps: Addresses of the weights, and steps of optimizers: if these differ, all memory is compared.
        sample, whole: Digests of the memory; ``whole`` is None if the sample covers all memory.
        number: The number that :func:`kv_version` has returned.
    """

    facts: list[Hashable]
    objects: list[weakref.ref[Any]]
    places: list[tuple[int, int]]
    steps: int
    sample: int
    whole: int | None
    number: int

    def is_of(self, facts: list[Hashable], objects: Sequence[Any]) -> bool:
        same = len(objects) == len(self.objects) and facts == self.facts
        return same and all(map(is_, objects, [known() for known in self.objects]))


class _Content:
    """The latest versions of a model, and the reader of its memory."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._words, self._allowance = _Words(), _Allowance()
        self._known: list[_Known] = []  # the latest last

    def version(self, model: nn.Module, found: Callable[[], int], state: ModelState) -> int:
        steps = optimizer_steps()
        tensors = _with_memory([*state.tensors, *state.plain])
        facts = [*state.modes, *_writes(state.tensors)]
        facts += [tensor.dtype for tensor in tensors]
        facts += [tensor.stride() for tensor in tensors]
        self._words.update(tensors)
        places, sample = self._words.places, self._words.sample()
        # accelerate loads offloaded weights for each step into new tensors.
        without_memory = [one for one, place in zip(tensors, places, strict=True) if not place[0]]
        objects = [*state.forwards, *state.of_classes, *without_memory]
        known = next((one for one in reversed(self._known) if one.is_of(facts, objects)), None)
        moved = known is not None and (known.places != places or known.steps != steps)
        if known is None or sample != known.sample or not self._agrees(state, known, moved, found):
            whole = None if self._words.small else self._words.all()
            known = _Known(facts, [weakref.ref(one) for one in objects], places, steps, sample, whole, next(_numbers))
            self._known = [*self._known[1 - _VERSIONS_KNOWN :], known]
            self._allowance.restore()
        known.places, known.steps = places, steps
        return known.number

    def _agrees(self, state: ModelState, known: _Known, moved: bool, found: Callable[[], int]) -> bool:
        """Whether all memory is unchanged; True without a comparison if comparing is not worth its time."""
        if known.whole is None:
            return True
        if moved:
            return self._words.all() == known.whole
        if not (tokens := found()):
            return True
        settings = (module.__dict__[SETTING] for module in state.modules if SETTING in module.__dict__)
        always = next(settings, "auto") == "always"
        if not always and (tokens < self._words.tokens_worth or not self._allowance.has_some()):
            return True
        began = time.perf_counter()
        same = self._words.all() == known.whole
        self._allowance.spend(time.perf_counter() - began)
        return same


def _with_memory(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors with memory of their own that these tensors are or consist of, without sparse ones."""
    if not WITH_MEMORY.issuperset(map(type, tensors)):
        tensors = [part for tensor in tensors for part in parts_of(tensor)]
    return [tensor for tensor in tensors if tensor.layout is torch.strided]


def _writes(tensors: list[Tensor]) -> list[int]:
    """torch's version counters; empty if a tensor was made in inference mode, in which torch counts no writes."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:
        return []


class _Allowance:
    """How many comparisons of all memory may run: a burst at first, then as many as fit a share of the time."""

    def __init__(self) -> None:
        self._left, self._seconds, self._at = float(_BURST), float("inf"), 0.0

    def has_some(self) -> bool:
        """Whether another comparison may run now."""
        now = time.perf_counter()
        self._left, self._at = min(_BURST, self._left + _SHARE * (now - self._at) / self._seconds), now
        return self._left >= 1

    def spend(self, seconds: float) -> None:
        """Count a comparison that took ``seconds``; the fastest so far sets the rate, because slower ones waited."""
        self._left, self._seconds = self._left - 1, min(self._seconds, seconds)

    def restore(self) -> None:
        """Allow a full burst again: weights of this model change in ways that torch may not count."""
        self._left = float(_BURST)


class _Words:
    """The memory of tensors as words; it does not keep the memory alive, so it is read only while the tensors live.

    Attributes:
        places: Address and bytes of each tensor.
        small: Whether the sample covers all memory.
        tokens_worth: Tokens of a prompt that are computed in the time that :meth:`all` takes.
    """

    def __init__(self) -> None:
        self.places: list[tuple[int, int]] = []
        self._words: list[Tensor] = []
        self._samples: list[tuple[list[Tensor], Tensor]] = []
        self.small, self.tokens_worth = True, 0

    def update(self, tensors: Sequence[Tensor]) -> None:
        """Set the tensors of the next digests; their memory is looked up again if any of them has moved."""
        places = [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]
        if places == self.places:
            return
        held = {place: tensor for place, tensor in zip(places, tensors, strict=True) if place[0]}  # tied weights once
        self._words = [words for tensor in held.values() for words in _words_of(tensor)]
        self.small = sum(map(len, self._words)) <= _SMALL
        self.tokens_worth = max((_TOKENS_WORTH[words.device.type] for words in self._words), default=0)
        groups = defaultdict[tuple[torch.device, torch.dtype], list[Tensor]](list)
        for words in self._words:
            groups[words.device, words.dtype].append(words if self.small else _spread(words))
        self._samples = [(group, odd_numbers(0, sum(map(len, group)), device)) for (device, _), group in groups.items()]
        self.places = places

    def sample(self) -> int:
        """The digest of some words of each tensor."""
        return sum(int((torch.cat(group) * weights).sum()) for group, weights in self._samples)

    def all(self) -> int:
        """The digest of all words."""
        totals: dict[torch.device, Tensor] = {}
        place = 0
        for words in self._words:
            if words.device not in totals:
                totals[words.device] = torch.zeros(1, dtype=torch.int64, device=words.device)
            torch.ops.prefixkit.digest(words, place, totals[words.device])
            place += len(words)
        return sum(map(int, totals.values()))


def _spread(words: Tensor) -> Tensor:
    """Some words from all over a tensor; their stride is odd, so that they are not all from one column."""
    stride = max(1, ((len(words) - 1) // (_SAMPLE - 1) - 1) | 1) if len(words) > _SAMPLE else 1
    return words.as_strided((min(_SAMPLE, len(words)),), (stride,))


def _words_of(tensor: Tensor) -> list[Tensor]:
    """The memory from a tensor's first element to its last, as 64-bit words, or as bytes if words do not fit it."""
    if not tensor.numel() or tensor.device.type not in _TOKENS_WORTH:
        return []
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin, size = tensor.data_ptr(), elements * tensor.itemsize
    kind = torch.uint8 if begin % 8 or size % 8 else torch.int64
    return [borrowed(begin, tensor.device, (size // kind.itemsize,), (1,), kind)]
