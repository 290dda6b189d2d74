"""Fixtures of the tests of ``model.generate()``."""

from __future__ import annotations

import logging

import pytest
import torch

from tests.models.tiny_families import VOCAB


@pytest.fixture
def padded(rng):
    """Three rows of different length, left-padded, of which two share their first tokens."""
    ids = torch.from_numpy(rng.integers(3, VOCAB, (3, 20)))
    mask = torch.ones_like(ids)
    for row, pad in enumerate((0, 5, 9)):
        ids[row, :pad], mask[row, :pad] = 0, 0
    ids[1, 5], ids[2, 9] = 5, 6
    ids[0, :6] = ids[1, 5:11]
    ids[0, 6], ids[1, 11] = 7, 8
    return {"input_ids": ids, "attention_mask": mask}


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO, "prefixkit")
    return lambda: [one.getMessage() for one in caplog.records if "transformers' own cache" in one.getMessage()]
