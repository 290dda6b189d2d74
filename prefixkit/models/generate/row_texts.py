"""Rows of a TreeCache whose tokens may see later ones: operations that would change which tokens they see raise."""

from __future__ import annotations

import numpy as np

from prefixkit.models.model_errors import UnsupportedVariant
from prefixkit.tree.arrays import Ints
from prefixkit.tree.rows import Rows


def check_followed(rows: Rows, tokens: Ints) -> None:
    """Raise UnsupportedVariant if rows and the ``[rows, count]`` tokens appended to them would see other tokens as one
    text than as two separate texts.
    """
    if rows.tree.spelling is None:
        return
    for sequence, own in zip(rows.sequences, tokens, strict=True):
        whole = rows.tree.keys_of(np.concatenate((sequence.tokens(), own)))
        if (whole != np.concatenate((sequence.keys(), own))).any():
            raise UnsupportedVariant(
                f"{len(own)} tokens follow {sequence.length} in a TreeCache, and under the model's variant they see "
                "later ones, or are seen by those before them: give the whole text with an empty cache"
            )


def check_cut(rows: Rows, length: int) -> None:
    """Raise UnsupportedVariant if a cut after the first ``length`` tokens of rows, padding included, would separate
    tokens that see one another.
    """
    if rows.tree.spelling is None:
        return
    for sequence, pad in zip(rows.sequences, rows.pad.tolist(), strict=True):
        left = max(0, length - pad)
        if rows.tree.spelling.left(sequence.keys()[:left][-1:]).any():
            raise UnsupportedVariant(
                f"TreeCache.crop: token {left} of a row has seen tokens after it; crop before or after all that see "
                "one another, or reset() the cache"
            )
