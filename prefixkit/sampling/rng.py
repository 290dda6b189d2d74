"""Counter-based random numbers: one stateless stream per sample, addressed by step.

Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011).  A sample's key
is derived from its seed, its index, its prompt, and the number of equal prompts before that one; the counter is the
step.  So a sample's numbers are the same alone or in a batch, on any device, and a sample resumed at a later step
continues as if it had never stopped.

A uniform's exact bits, for other implementations: with the 64-bit ``key`` and ``step``,

    key words      k0 = key & 0xffffffff,   k1 = key >> 32
    counter words  c0 = step & 0xffffffff,  c1 = step >> 32,  c2 = c3 = 0
    x0..x3         = Philox4x32-10(counter, key)
    uniform        = ((x0 >> 5) * 2**26 + (x1 >> 6)) * 2**-53

that is, the upper 27 bits of x0 above the upper 26 bits of x1: a 53-bit integer, scaled exactly in float64.  x2 and x3
are not used, and c2 and c3 are reserved for further streams of the same step.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Words = NDArray[np.uint32]

_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85  # golden ratio, sqrt(3) - 1: the Weyl sequences of the key schedule
_ROUNDS = 10
_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)


def philox4x32(counter: Words, key: Words) -> Words:
    """The Philox4x32-10 bijection.

    ``counter [..., 4]`` and ``key [..., 2]``, whose leading dimensions broadcast, give ``[..., 4]`` random words.
    """
    # Words are held in 64-bit lanes: a 32 x 32 bit product fits a lane exactly.
    c0, c1, c2, c3 = np.moveaxis(counter.astype(np.uint64), -1, 0)
    k0, k1 = np.moveaxis(key.astype(np.uint64), -1, 0)
    for turn in range(_ROUNDS):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        r0 = (k0 + np.uint64(turn * _KEY_STEPS[0])) & _LOW
        r1 = (k1 + np.uint64(turn * _KEY_STEPS[1])) & _LOW
        c0, c1, c2, c3 = (second >> _HALF) ^ c1 ^ r0, second & _LOW, (first >> _HALF) ^ c3 ^ r1, first & _LOW
    return np.stack(np.broadcast_arrays(c0, c1, c2, c3), axis=-1).astype(np.uint32)


def sample_key(seed: int, index: int, tokens: ArrayLike, occurrence: int = 0) -> np.uint64:
    """The key of sample ``index`` of a prompt: equal on every machine, and different if any argument differs.

    BLAKE2b with an 8-byte digest, the person ``prefixkit`` and the occurrence as salt (uint64), over the seed and the
    index as uint64 and the tokens as int32; all numbers, including the digest, are little-endian.

    Args:
        seed: 0 to 2**64 - 1.
        index: Which sample of the prompt, from 0.
        tokens: ``[length]`` the prompt's token ids.
        occurrence: Number of equal prompts before this one in the input.
    """
    prompt = np.ascontiguousarray(tokens, dtype="<i4")
    seeded, salt = struct.pack("<QQ", seed, index), struct.pack("<Q", occurrence)
    digest = hashlib.blake2b(seeded, digest_size=8, person=b"prefixkit", salt=salt)
    digest.update(prompt.data)
    return np.uint64(int.from_bytes(digest.digest(), "little"))


def uniforms(keys: NDArray[np.uint64], steps: NDArray[np.integer[Any]]) -> NDArray[np.float64]:
    """``[rows]`` float64 in [0, 1), of 53 random bits: the ``steps[i]``-th of the stream of ``keys[i]``.

    Args:
        keys: ``[rows]`` from :func:`sample_key`.
        steps: ``[rows]`` number of tokens that the sample has sampled before; at least 0.
    """
    keys, steps = np.broadcast_arrays(np.asarray(keys, dtype=np.uint64), np.asarray(steps).astype(np.uint64))
    zeros = np.zeros_like(steps)
    counter = np.stack([steps & _LOW, steps >> _HALF, zeros, zeros], axis=-1)
    words = philox4x32(counter.astype(np.uint32), np.stack([keys & _LOW, keys >> _HALF], axis=-1).astype(np.uint32))
    high, low = words[..., 0] >> np.uint32(5), words[..., 1] >> np.uint32(6)
    return (high * 2.0**26 + low) * 2.0**-53
