"""``model.generate()`` as these tests call it, on models with the patch and without."""

from __future__ import annotations

import os

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from prefixkit import patch, unpatch

NEW = 11
ENDS = {"pad_token_id": 0, "eos_token_id": 2}
SAMPLED = {"do_sample": True, "num_return_sequences": 4}
BEAMS = {"do_sample": False, "num_beams": 3, "num_return_sequences": 2}
IMAGES = {"gemma3": "token_type_ids", "qwen2_vl": "mm_token_type_ids", "molmo2": "mm_token_type_ids"}


def image_model(model_type):
    """A tiny model of images and text, and the argument by which its processor tells them apart."""
    from scripts.tiny_models import tiny_config, tiny_model

    if model_type not in CONFIG_MAPPING:
        pytest.skip("a later transformers has it")
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"image_model({model_type!r}): seed {seed}")
    torch.manual_seed(seed)
    return tiny_model(tiny_config(model_type), "", AutoModelForImageTextToText), IMAGES[model_type]


def generate(model, inputs, seed=3, **options):
    torch.manual_seed(seed)
    return model.generate(**inputs, **{"max_new_tokens": NEW, **ENDS, **options})


def compared(model, inputs, mode="always", **options):
    """What the model generates unpatched, and patched with the cache that it returns."""
    want = generate(unpatch(model), inputs, **options)
    got = generate(patch(model, tree_cache=mode), inputs, **options, return_dict_in_generate=True)
    return want, got.sequences, got.past_key_values
