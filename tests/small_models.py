"""Two small models that have learnt something, and text for them: scripts/train_small_models.py made them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from prefixkit.testing.tiny import ByteTokenizer

SMALL = ("hybrid", "latent")
FOLDER = Path(__file__).parent / "data/small_models"
TOKENIZER: Any = ByteTokenizer()
HEAD = '''"""Tables in text files."""

import os


def read_table(path, separator=","):
    """Return a list of lists of strings."""
    records = []
    with open(path) as file:
        for line in file:
            records.append(line.rstrip().split(separator))
    return records


'''
ENDINGS = (
    "def write_table(path, records, ",
    "def read_header(path",
    "class Table:\n    def __init__(self, ",
    "def column(records, index):\n    if index < 0:\n        raise Ind",
)
PROMPTS = [HEAD + ending for ending in ENDINGS]


def small_model(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """In evaluation mode; experts run by code that takes every dtype."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(FOLDER / name, dtype=dtype).eval()
    model.set_experts_implementation("eager")
    return model


def tokens_of(text: str) -> list[int]:
    return list(text.encode())
