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
Lanes = NDArray[np.uint64]

_MULTIPLIERS = np.array((0xD2511F53, 0xCD9E8D57), np.uint64)
_KEY_STEPS = np.array((0x9E3779B9, 0xBB67AE85), np.uint64)  # golden ratio, sqrt(3) - 1: Weyl sequences of the keys
_SCHEDULE = np.multiply.outer(np.arange(10, dtype=np.uint64), _KEY_STEPS)  # ``[rounds, 2]``
_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)


def philox4x32(counter: Words, key: Words) -> Words:
    """The Philox4x32-10 bijection.

    ``counter [..., 4]`` and ``key [..., 2]``, whose leading dimensions broadcast, give ``[..., 4]`` random words.
    """
    lead = np.broadcast_shapes(counter.shape[:-1], key.shape[:-1])
    words = np.broadcast_to(counter, (*lead, 4)).reshape(-1, 4).T.astype(np.uint64)
    even, odd = _rounds(words[::2], words[1::2], np.broadcast_to(key, (*lead, 2)).reshape(-1, 2).T.astype(np.uint64))
    return np.stack((even[0], odd[0], even[1], odd[1]), axis=-1).astype(np.uint32).reshape(*lead, 4)


def _rounds(even: Lanes, odd: Lanes, key: Lanes) -> tuple[Lanes, Lanes]:
    """The rounds on words 0 and 2, on words 1 and 3, and on the key's words: each ``[2, n]``.

    Words are held in 64-bit lanes: a 32 x 32 bit product fits a lane exactly.
    """
    for of_round in (key + _SCHEDULE[:, :, None]) & _LOW:
        product = (even * _MULTIPLIERS[:, None])[::-1]
        even, odd = (product >> _HALF) ^ odd ^ of_round, product & _LOW
    return even, odd


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
    keys, steps = np.asarray(keys, dtype=np.uint64), np.asarray(steps).astype(np.uint64)
    even, odd, key = np.zeros((3, 2, len(keys)), dtype=np.uint64)
    even[0], odd[0] = steps & _LOW, steps >> _HALF
    key[0], key[1] = keys & _LOW, keys >> _HALF
    high, low = _rounds(even, odd, key)
    uniform: NDArray[np.float64] = ((high[0] >> np.uint64(5)) * 2.0**26 + (low[0] >> np.uint64(6))) * 2.0**-53
    return uniform
