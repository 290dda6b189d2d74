"""What kernels know about a variant at compile time: the constants of ``struct Variant``."""

from __future__ import annotations

from dataclasses import dataclass

from prefixkit.attention.variants.variant import Variant


@dataclass(frozen=True)
class Flags:
    """Flags that follow from the text of a variant's functions; ``csrc/attention/variant.cuh`` explains each flag.

    Attributes:
        linear: The bias that is added to scores changes by the same amount from key to key.
        decides: Masks can be decided for whole blocks.
        has_tanh: Tanh is applied to scores.
    """

    linear: bool
    decides: bool
    has_tanh: bool

    def text(self, variant: Variant) -> str:
        """The C++ of these flags and the variant's own."""
        known = {
            "HAS_SCORE": variant.score_mods,
            "HAS_MASK": variant.mask_mods,
            "HAS_SINK": variant.has_sinks,
            "HAS_TANH": self.has_tanh and not variant.approximate,
            "LOOKS_AHEAD": variant.looks_ahead,
            "SUMS": variant.sums,
            "ADDS": variant.score_mods and variant.biases is not None,
            "LINEAR": self.linear,
            "READS_SEQUENCE": variant.reads("b"),
            "READS_HEAD": variant.reads("h", scores=False),
            "DECIDES": self.decides,
        }
        flags = (f"    static constexpr bool {name} = {str(bool(holds)).lower()};\n" for name, holds in known.items())
        return "".join(flags) + f"    using Tanh = {'HardwareTanh' if variant.approximate else 'AnyTanh'};\n"
