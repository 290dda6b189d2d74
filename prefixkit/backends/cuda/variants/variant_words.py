"""The values of variants in a GPU's memory: words that the text of ``variant_header`` reads, in its order."""

from __future__ import annotations

import math
import struct
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from prefixkit.attention.variants.evaluate import on_device
from prefixkit.attention.variants.expression import Type
from prefixkit.attention.variants.variant import Variant, versions_of
from prefixkit.ops.arguments import BadShape


class VariantWords:
    """A variant's values on a device, at fixed addresses, because captured graphs read them.

    It references the tensors that the variant captures, but not the variant, and is freed with the variant.
    """

    def __init__(self, variant: Variant, device: torch.device) -> None:
        self._captured, self._versions = variant.captured, variant.versions
        # Captured tensors that kernels read in place, and copies of those that follow the scores to their device.
        self._held = [on_device(captured, device) for captured in variant.captured]
        self.tensor = torch.tensor(_words(variant, self._held) or [0], dtype=torch.int32, device=device)

    def refresh(self) -> None:
        """Copy captured tensors again if they were changed in place."""
        if self._captured and (versions := versions_of(self._captured)) != self._versions:
            for captured, held in zip(self._captured, self._held, strict=True):
                if held is not captured.tensor:
                    held.copy_(captured.tensor.detach())
            self._versions = versions


def _words(variant: Variant, held: list[Tensor]) -> list[int]:
    """All words that ``header`` numbers, in its order."""
    words, tensors = list[int](), iter(held)
    for mod in variant.mods:
        assert mod.expression is not None
        for scalar in mod.expression.scalars:
            words += _scalar_content(scalar)
        for _ in mod.expression.tensors:
            words += _tensor_content(next(tensors))
    return words


def _scalar_content(scalar: bool | int | float) -> list[int]:
    kind = Type.of(scalar)
    if kind is Type.FLOAT:
        number = _float32(float(scalar))
        return [_bits(number), _bits(_float32(1 / number if number else math.inf))]
    number = int(scalar)
    if kind is Type.BOOL:
        return [number, 0]
    return [*_long(max(-(2**63), min(number, 2**63 - 1))), *_magic(number)]


def _float32(number: float) -> float:
    """The number as float32; infinite beyond the range."""
    return float(torch.tensor(number, dtype=torch.float32, device="cpu"))


def _long(number: int) -> tuple[int, int]:
    low, high = struct.unpack("<ii", struct.pack("<q", number))
    return low, high


def _bits(number: float) -> int:
    (bits,) = struct.unpack("<i", struct.pack("<f", number))
    return int(bits)


def _magic(divisor: int) -> tuple[int, int, int]:
    """``m``, ``s`` and ``t`` of ``n // divisor == (n * m >> 32) + (n & t) >> s`` for all ``n`` of 31 bits.

    After Granlund and Montgomery (1994): ``m = ceil(2**(32 + s) / divisor)``, of 32 bits except for powers of two.
    """
    if not 0 < divisor < 1 << 31:
        return 0, 0, 0
    shift = divisor.bit_length() - 1
    if divisor == 1 << shift:
        return 0, shift, -1
    (signed,) = struct.unpack("<i", struct.pack("<I", -(-(1 << 32 + shift) // divisor)))
    return signed, shift, 0


def _tensor_content(tensor: Tensor) -> list[int]:
    words = [*_long(tensor.data_ptr())]
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if max(size, stride) >= 1 << 31:
            raise BadShape(f"tree_attention: a variant captures a tensor of {list(tensor.shape)}, too long for kernels")
        words += [size, stride]
    return words


_words_of: WeakKeyDictionary[Variant, dict[torch.device, VariantWords]] = WeakKeyDictionary()


def words_on_device(variant: Variant, device: torch.device) -> VariantWords:
    """A variant's values on a device, made once.

    Raises:
        ForeignTensor: it captures a tensor on another device.
    """
    known = _words_of.setdefault(variant, {})
    if device not in known:
        known[device] = VariantWords(variant, device)
    return known[device]
