"""The attention classes with code of their own that run on a tree, by file and name.

No file of transformers is imported here: a class is looked up when a model contains it.
"""

from __future__ import annotations

import functools

from torch import nn

from prefixkit.models.own_attention.bert import bert, roformer
from prefixkit.models.own_attention.bloom import bloom
from prefixkit.models.own_attention.diffllama import TwoValues, halves
from prefixkit.models.own_attention.falcon import falcon, repeated
from prefixkit.models.own_attention.gptj import gpt_neo, gpt_neox_japanese, gptj
from prefixkit.models.own_attention.jetmoe import HeadsInTurn
from prefixkit.models.own_attention.mpt import mpt
from prefixkit.models.own_attention.own_code import OwnCode, transformers_name
from prefixkit.models.own_attention.xglm import xglm

_KNOWN: dict[tuple[str, str] | None, OwnCode] = {
    ("big_bird", "BigBirdSelfAttention"): OwnCode(bert),
    ("bloom", "BloomAttention"): OwnCode(bloom),
    ("codegen", "CodeGenAttention"): OwnCode(core=gptj),
    ("diffllama", "DiffLlamaAttention"): OwnCode(adapt=TwoValues, restore=halves),
    ("falcon", "FalconAttention"): OwnCode(falcon, restore=repeated),
    ("gpt_neo", "GPTNeoSelfAttention"): OwnCode(core=gpt_neo, index="layer_id"),
    ("gpt_neox_japanese", "GPTNeoXJapaneseAttention"): OwnCode(core=gpt_neox_japanese),
    ("gptj", "GPTJAttention"): OwnCode(core=gptj),
    ("jetmoe", "JetMoeAttention"): OwnCode(adapt=HeadsInTurn),
    ("megatron_bert", "MegatronBertSelfAttention"): OwnCode(bert),
    ("mpt", "MptAttention"): OwnCode(mpt),
    ("rembert", "RemBertSelfAttention"): OwnCode(bert),
    ("roformer", "RoFormerSelfAttention"): OwnCode(roformer),
    ("xglm", "XGLMAttention"): OwnCode(xglm),
}


@functools.cache
def own_code(cls: type[nn.Module]) -> OwnCode | None:
    """The replacement for an attention class's own code on a tree; None for a class that needs none."""
    return _KNOWN.get(transformers_name(cls))


@functools.cache
def code_of(cls: type[nn.Module]) -> OwnCode:
    """The same; for a class that needs no replacement, an OwnCode that replaces nothing."""
    return own_code(cls) or OwnCode()  # type: ignore[arg-type]  # classes hash
