"""Variants of attention: Python functions, traced into expressions that every backend computes."""

from prefixkit.attention.variants.builtin import alibi as alibi
from prefixkit.attention.variants.builtin import attention_sinks as attention_sinks
from prefixkit.attention.variants.builtin import chunked as chunked
from prefixkit.attention.variants.builtin import rounded_alibi as rounded_alibi
from prefixkit.attention.variants.builtin import sigmoid as sigmoid
from prefixkit.attention.variants.builtin import sliding_window as sliding_window
from prefixkit.attention.variants.builtin import soft_cap as soft_cap
from prefixkit.attention.variants.composition import compose as compose
from prefixkit.attention.variants.evaluate import ForeignTensor as ForeignTensor
from prefixkit.attention.variants.mod import BadVariant as BadVariant
from prefixkit.attention.variants.registry import UnknownVariant as UnknownVariant
from prefixkit.attention.variants.registry import lookup as lookup
from prefixkit.attention.variants.registry import register as register
from prefixkit.attention.variants.tracing.untraceable import UntraceableVariant as UntraceableVariant
from prefixkit.attention.variants.transforms import BadTransform as BadTransform
from prefixkit.attention.variants.transforms import Streaming as Streaming
from prefixkit.attention.variants.variant import CAUSAL as CAUSAL
from prefixkit.attention.variants.variant import Variant as Variant
from prefixkit.attention.variants.variant import parts_of as parts_of
from prefixkit.attention.variants.variant import variant as variant
