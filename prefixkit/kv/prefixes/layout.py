"""What is in a prefix file: a header of safetensors, its tensors and their checksums.

``parents``, ``lengths`` and ``tokens`` are the trie's; ``k`` and ``v`` are ``[layers, tokens, kv_heads, head_dim]``,
whose tokens are those of the trie; ``checksums`` ``[blocks, 32]`` are the SHA-256 of K and then V of each ``BLOCK``
tokens.  The metadata has the facts of the KV, and a checksum of those and of all tensors but K and V.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.kv.kv_pool import KVSpec

FORMAT, VERSION = "prefixkit prefixes", 1
BLOCK = 64  # tokens
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
ARRAYS = {"parents": ("I64", np.int64), "lengths": ("I64", np.int64), "tokens": ("I32", np.int32)}
SHAPE = ("num_layers", "kv_heads", "head_dim")


def prefixkit_version() -> str:
    """Of the installed package: an import of ``prefixkit`` from here would be a cycle."""
    try:
        return version("prefixkit")
    except PackageNotFoundError:
        return "unknown"


def metadata_of(spec: KVSpec, fingerprint: str) -> dict[str, str]:
    """What a file says of its KV, but for the checksum."""
    dtype = str(spec.dtype).removeprefix("torch.")
    facts = {"format": FORMAT, "format_version": VERSION, "prefixkit": prefixkit_version(), "fingerprint": fingerprint}
    facts |= {"dtype": dtype, "block": BLOCK} | {name: getattr(spec, name) for name in SHAPE}
    return {name: str(value) for name, value in facts.items()}


def header_of(
    metadata: dict[str, str], entries: dict[str, tuple[str, tuple[int, ...]]]
) -> tuple[bytes, dict[str, int]]:
    """The header of a file in safetensors, and where in the file each tensor begins."""
    sizes = {"I64": 8, "I32": 4, "F32": 4, "BF16": 2, "F16": 2, "U8": 1}
    header: dict[str, Any] = {"__metadata__": metadata}
    begins, begin = {}, 0
    for name, (dtype, shape) in entries.items():
        end = begin + sizes[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        begins[name], begin = begin, end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    whole = len(text).to_bytes(8, "little") + text
    return whole, {name: len(whole) + begin for name, begin in begins.items()}


def bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """``[layers, bytes]`` of a contiguous tensor, the same memory."""
    rows: NDArray[np.uint8] = tensor.view(torch.uint8).numpy().reshape(len(tensor), -1)
    return rows


def digest_of(parts: Sequence[Tensor]) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(bytes_of(part).data)
    return digest.digest()


def checksum_of(metadata: dict[str, str], arrays: Sequence[NDArray[Any]]) -> str:
    """SHA-256 of all metadata but this, and of all arrays but K and V, in the order of the file."""
    facts = {name: value for name, value in metadata.items() if name != "checksum"}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for array in arrays:
        digest.update(array.tobytes())
    return digest.hexdigest()
