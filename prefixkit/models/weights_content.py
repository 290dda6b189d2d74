"""Whether KV of earlier calls may be used: the version of the weights, and a comparison of what their memory holds.

torch counts most writes to a tensor, and ``weights_version`` reads these counters.  It does not count a write through
``tensor.data``, another tensor over the same memory, a numpy view or a raw pointer.  So memory is compared too, by
digests in integer arithmetic: each 64-bit word is multiplied by an odd number that depends on its place, modulo 2**64,
so a change of one word always changes the sum, and words that change places do.

A sample of every tensor is compared at each call; all of the memory where that costs less than the KV saves, and at
most for 1/100 of the time, as long as it finds nothing.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from prefixkit.models.families import pretrained_model
from prefixkit.models.weights_memory import borrowed, parts_of
from prefixkit.models.weights_version import ModelState, WeightsVersion, counters_of, state_of, version_of

Compare = Literal["auto", "always"]
COMPARE = ("auto", "always")
SETTING = "_prefixkit_compare_weights"  # the attribute of a patched model that has its choice

# 64-bit words of a sample of a tensor; models of so few words are compared whole at each call.
_SAMPLE, _SMALL = 64, 1 << 17
# Words of the accumulator of a digest of all memory: it stays in the cache while memory streams by.
_BLOCK = {"cpu": 1 << 16, "cuda": 1 << 22}
_WITH_MEMORY = frozenset({Tensor, nn.Parameter})  # classes whose tensors do not consist of others
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
# To compare all memory reads each weight once, and a token of a prompt multiplies by it once: so many tokens take as
# long on one core at 60 GFLOP/s and 6 GB/s, and on an H200 at 600 TFLOP/s and 2 TB/s.
_TOKENS_WORTH = {"cpu": 32, "cuda": 512}
# All memory is compared for at most this share of the time; and so often at once.
_SHARE, _BURST = 1 / 100, 3
_VERSIONS_KNOWN = 4


@dataclass(frozen=True, slots=True)
class KVVersion:
    """What :func:`kv_version` returns: the version of the weights, and a number for what their memory holds."""

    weights: WeightsVersion
    content: int


def kv_version(model: nn.Module, found: Callable[[], int] = lambda: 0) -> KVVersion:
    """A value that differs from an earlier one whenever what the model computes may have changed in between.

    It sees what :func:`weights_version` sees, and writes that torch does not count.  What the sample can miss is a
    write to some elements alone, such as one row of a matrix, where the KV found is short or all memory was compared
    three times in short succession; ``prefixkit.patch(model, compare_weights="always")`` compares all memory.

    Args:
        model: A transformers model, patched or not, or a wrapper around one.  It is not kept alive.
        found: How many tokens' KV of earlier calls this call would use; asked for where it matters.
    """
    with _lock:
        content = _contents.setdefault(model, _Content())
    with content.lock:
        return content.version(model, found, pretrained_model(model).__dict__.get(SETTING, "auto"))


_contents: WeakKeyDictionary[nn.Module, _Content] = WeakKeyDictionary()
_lock = threading.Lock()


class _Content:
    """What the memory of a model's weights held when it was last looked at."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._words = _Words()
        self._digests: dict[WeightsVersion, tuple[int, int | None, int]] = {}  # of the sample, of all; which content
        self._contents = 0  # that were seen
        self._allowance = _Allowance()
        self._last: tuple[list[Hashable] | None, WeightsVersion] | None = None  # counters, and what they stand for

    def version(self, model: nn.Module, found: Callable[[], int], compare: Compare) -> KVVersion:
        version = self._weights(state_of(model))
        sample = self._words.sample()
        known = self._digests.pop(version, None)
        if known is not None and sample == known[0] and self._agrees(known[1], found, compare):
            self._digests[version] = known
        else:
            self._contents += 1
            self._digests[version] = sample, None if self._words.small else self._words.all(), self._contents
            self._allowance.restore()
            while len(self._digests) > _VERSIONS_KNOWN:
                del self._digests[next(iter(self._digests))]
        return KVVersion(version, self._digests[version][2])

    def _weights(self, state: ModelState) -> WeightsVersion:
        """The version by torch's counters; words are those of the state."""
        counters, last = counters_of(state), self._last
        if last is not None and counters is not None and counters == last[0]:
            objects = [*state.tensors, *state.forwards]
            if len(objects) == len(last[1].objects) and all(map(is_, objects, [one() for one in last[1].objects])):
                if state.plain:
                    self._words.update([*state.tensors, *state.plain])
                return last[1]
        version = version_of(state)
        self._last = counters, version
        self._words.update([*state.tensors, *state.plain])
        return version

    def _agrees(self, before: int | None, found: Callable[[], int], compare: Compare) -> bool:
        """Whether all memory holds what it held, if it is worth the time to compare it."""
        if before is None:
            return True
        wanted = 1 if compare == "always" else self._words.tokens_worth
        if found() < wanted or (compare == "auto" and not self._allowance.has_some()):
            return True
        began = time.perf_counter()
        same = self._words.all() == before
        self._allowance.spend(time.perf_counter() - began)
        return same


class _Allowance:
    """How many comparisons of all memory may run: some at once, and as many as take a share of the time."""

    def __init__(self) -> None:
        self._left, self._seconds, self._at = float(_BURST), float("inf"), 0.0

    def has_some(self) -> bool:
        """Whether another comparison may run now."""
        now = time.perf_counter()
        self._left, self._at = min(_BURST, self._left + _SHARE * (now - self._at) / self._seconds), now
        return self._left >= 1

    def spend(self, seconds: float) -> None:
        """One has taken so long; the fastest counts, because others were held up."""
        self._left, self._seconds = self._left - 1, min(self._seconds, seconds)

    def restore(self) -> None:
        """As if none had run: weights do change here in ways that torch does not count."""
        self._left = float(_BURST)


class _Words:
    """The memory of tensors as words, without a hold on it: what is read is read while the tensors live.

    Attributes:
        small: Whether a sample is all there is.
        tokens_worth: Tokens of a prompt that are computed in the time that :meth:`all` takes.
    """

    def __init__(self) -> None:
        self._places: list[tuple[int, int]] = []
        self._words: list[Tensor] = []
        self._samples: list[tuple[Sequence[Tensor], Tensor]] = []
        self.small, self.tokens_worth = True, 0

    def update(self, tensors: Iterable[Tensor]) -> None:
        """Take the tensors that the next digests are of; their memory is looked up again where it is elsewhere."""
        flat = list[Tensor]()
        for tensor in tensors:
            flat += (tensor,) if type(tensor) in _WITH_MEMORY else parts_of(tensor)
        try:
            places = [(tensor.data_ptr(), tensor.nbytes) for tensor in flat]
        except RuntimeError:  # some are of layouts without one memory
            flat = [tensor for tensor in flat if tensor.layout == torch.strided]
            places = [(tensor.data_ptr(), tensor.nbytes) for tensor in flat]
        if places == self._places:
            return
        held = {place: tensor for place, tensor in zip(places, flat, strict=True) if place[0]}  # tied weights once
        self._words = [words for tensor in held.values() for words in _words_of(tensor)]
        self.small = sum(map(len, self._words)) <= _SMALL
        self.tokens_worth = max((_TOKENS_WORTH[words.device.type] for words in self._words), default=0)
        groups = defaultdict[tuple[torch.device, torch.dtype], list[Tensor]](list)
        for words in self._words:
            groups[words.device, words.dtype].append(words if self.small else _spread(words))
        self._samples = [(group, _weights(sum(map(len, group)), device)) for (device, _), group in groups.items()]
        self._places = places

    def sample(self) -> int:
        """The digest of some words of each tensor."""
        return _sum((torch.cat(group) * weights).sum() for group, weights in self._samples)  # type: ignore[arg-type]

    def all(self) -> int:
        """The digest of all words."""
        sums: dict[torch.device, Tensor] = {}
        for words in self._words:
            if (device := words.device) not in sums:
                sums[device] = torch.zeros(_BLOCK[device.type], dtype=torch.int64, device=device)
            for block in torch.split(words, len(sums[device])):
                there = sums[device][: len(block)]
                torch.add(block, there, alpha=_ODD, out=there)
        return _sum((whole * _weights(len(whole), device)).sum() for device, whole in sums.items())


def _sum(sums: Iterable[Tensor]) -> int:
    return sum(int(one) for one in sums)


def _weights(count: int, device: torch.device) -> Tensor:
    """An odd number for each of so many places."""
    return (torch.arange(count, dtype=torch.int64, device=device) * 2 + 1) * _ODD


def _spread(words: Tensor) -> Tensor:
    """Some words from all over a tensor; an odd stride, so that they are not all of one column."""
    stride = max(1, ((len(words) - 1) // (_SAMPLE - 1) - 1) | 1) if len(words) > _SAMPLE else 1
    return words.as_strided((min(_SAMPLE, len(words)),), (stride,))


def _words_of(tensor: Tensor) -> list[Tensor]:
    """The memory from a tensor's first element to its last, as 64-bit words, or as bytes where it has none."""
    if not tensor.numel() or tensor.device.type not in _BLOCK:
        return []
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin, size = tensor.data_ptr(), elements * tensor.itemsize
    kind = torch.uint8 if begin % 8 or size % 8 else torch.int64
    return [borrowed(begin, tensor.device, (size // kind.itemsize,), (1,), kind)]
