"""Prefix files in safetensors, and how they are written: a header, tensors and their checksums.

``parents``, ``lengths`` and ``tokens`` are the trie's; ``k`` and ``v`` are ``[layers, tokens, kv_heads, head_dim]``,
whose tokens are those of the trie; ``checksums`` ``[blocks, 32]`` are the SHA-256 of K and then V of each ``BLOCK``
tokens.  The metadata has the facts of the KV, and a checksum of those and of all tensors but K and V.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.kv.kv_pool import KVSpec
from prefixkit.kv.prefixes.trie import PrefixTrie
from prefixkit.paths import as_path, replacing

# K and V of the tokens ``[begin, end)`` of a trie, ``[layers, end - begin, kv_heads, head_dim]`` each, on any device.
ReadKV = Callable[[int, int], tuple[Tensor, Tensor]]

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


def check_place(path: str | Path) -> Path:
    """Where a file is to be written: the one that a link leads to is replaced, not the link; OSError if none can be."""
    path = as_path(path).resolve()
    if path.is_dir():
        raise IsADirectoryError(f"{path} cannot be written: it is a folder; name a file in it")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: there is no folder {path.parent}; make it first")
    return path


def write_prefixes(path: str | Path, trie: PrefixTrie, kv: ReadKV, spec: KVSpec, fingerprint: str) -> None:
    """Write prefixes and their KV to a file, ``BLOCK`` tokens at a time.

    The file is complete before it takes the place of one that was there.

    Args:
        path: In a folder that exists.
        trie: The prefixes.
        kv: Gives their KV; called for ranges of at most ``BLOCK`` tokens, in order.
        spec, fingerprint: What the KV is of, but for the device, and of which model (:func:`kv_fingerprint`).

    Raises:
        ValueError: ``kv`` gave tensors of another shape or dtype.
        OSError: the file cannot be written, for lack of space, say.  What was there before is there still.
    """
    path = check_place(path)
    blocks = -(-len(trie.tokens) // BLOCK)
    arrays = {name: getattr(trie, name).astype(f"<i{np.dtype(kind).itemsize}") for name, (_, kind) in ARRAYS.items()}
    metadata = metadata_of(spec, fingerprint)
    shape = (spec.num_layers, len(trie.tokens), spec.kv_heads, spec.head_dim)
    entries = {name: (ARRAYS[name][0], array.shape) for name, array in arrays.items()}
    entries |= dict.fromkeys("kv", (DTYPES[spec.dtype], shape)) | {"checksums": ("U8", (blocks, 32))}
    header, places = header_of({**metadata, "checksum": "0" * 64}, entries)
    try:
        with replacing(path) as file:
            file.write(header)
            for name, array in arrays.items():
                _write(file, places[name], array.tobytes())
            checksums = _write_kv(file, trie, kv, spec, places)
            _write(file, places["checksums"], checksums.tobytes())
            metadata["checksum"] = checksum_of(metadata, [*arrays.values(), checksums])
            _write(file, 0, header_of(metadata, entries)[0])
    except OSError as error:
        error.add_note(f"{path} was not written; what was there before is there still")
        raise


def _write(file: BinaryIO, at: int, content: bytes | memoryview) -> None:
    file.seek(at)
    file.write(content)


def _write_kv(file: BinaryIO, trie: PrefixTrie, kv: ReadKV, spec: KVSpec, places: dict[str, int]) -> NDArray[np.uint8]:
    """Write all KV; the checksums of its blocks, ``[blocks, 32]``."""
    count, checksums = len(trie.tokens), []
    token = spec.kv_heads * spec.head_dim * spec.dtype.itemsize  # bytes
    for begin in range(0, count, BLOCK):
        end = min(begin + BLOCK, count)
        wanted = (spec.num_layers, end - begin, spec.kv_heads, spec.head_dim)
        parts = []
        for name, given in zip("kv", kv(begin, end), strict=True):
            if tuple(given.shape) != wanted or given.dtype != spec.dtype:
                raise ValueError(
                    f"write_prefixes: {name} of tokens {begin} to {end} must be {spec.dtype} {list(wanted)}, got "
                    f"{given.dtype} {list(given.shape)}"
                )
            parts.append(given.detach().cpu().contiguous())
            for layer, tokens in enumerate(bytes_of(parts[-1])):
                _write(file, places[name] + (layer * count + begin) * token, tokens.data)
        checksums.append(digest_of(parts))
    return np.frombuffer(b"".join(checksums), np.uint8)
