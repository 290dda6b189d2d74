"""Prefix files in safetensors, and how they are written: a header, tensors and their checksums.

``lengths``, ``shared`` and ``tokens`` are the prefixes by front coding; ``kv`` ``[tokens, spec.size]`` is what is
cached of ``tokens``, as :meth:`KVPool.read` gives it; ``checksums`` ``[blocks, 32]`` are the SHA-256 of each ``BLOCK``
tokens of that.  The metadata has the facts of the KV, and a checksum of those and of all tensors but ``kv``.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.kv.kv_pool import KVSpec
from prefixkit.kv.prefixes.front_coding import FrontCoded
from prefixkit.paths import as_path, replacing

# KV of the tokens ``[begin, end)``, contiguous ``[end - begin, spec.size]`` on the CPU.
ReadKV = Callable[[int, int], Tensor]

FORMAT, VERSION = "prefixkit prefixes", 2
BLOCK = 64  # tokens
ARRAYS = ("lengths", "shared", "tokens", "checksums")
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_BYTES = {"I64": 8, "I32": 4, "F32": 4, "BF16": 2, "F16": 2, "U8": 1}


def prefixkit_version() -> str:
    """Of the installed package: an import of ``prefixkit`` from here would be a cycle."""
    try:
        return version("prefixkit")
    except PackageNotFoundError:
        return "unknown"


def metadata_of(spec: KVSpec, fingerprint: str) -> dict[str, str]:
    """What a file says of its KV, but for the checksum."""
    facts = {"format": FORMAT, "format_version": VERSION, "prefixkit": prefixkit_version(), "fingerprint": fingerprint}
    facts |= {"dtype": str(spec.dtype).removeprefix("torch."), "layers": spec.kinds}
    return {name: str(value) for name, value in facts.items()}


def tensors_of(spec: KVSpec, prefixes: int, tokens: int) -> dict[str, tuple[str, list[int]]]:
    """Dtype and shape of each tensor of a file."""
    return {
        "lengths": ("I64", [prefixes]),
        "shared": ("I64", [prefixes]),
        "tokens": ("I32", [tokens]),
        "kv": (_DTYPES[spec.dtype], [tokens, spec.size]),
        "checksums": ("U8", [-(-tokens // BLOCK), 32]),
    }


def checksum_of(metadata: dict[str, str], arrays: Sequence[NDArray[Any]]) -> str:
    """SHA-256 of all metadata but this, and of ``ARRAYS``."""
    facts = {name: value for name, value in metadata.items() if name != "checksum"}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for array in arrays:
        digest.update(array.tobytes())
    return digest.hexdigest()


def bytes_of(kv: Tensor) -> memoryview:
    """Those of a contiguous tensor, the same memory."""
    return kv.view(torch.uint8).numpy().data


def check_place(path: str | Path) -> Path:
    """Where a file is to be written: the one that a link leads to is replaced, not the link; OSError if none can be."""
    path = as_path(path).resolve()
    if path.is_dir():
        raise IsADirectoryError(f"{path} cannot be written: it is a folder; name a file in it")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: there is no folder {path.parent}; make it first")
    return path


def write_prefixes(path: str | Path, prefixes: FrontCoded, kv: ReadKV, spec: KVSpec, fingerprint: str) -> None:
    """Write prefixes and their KV to a file, which is complete before it takes the place of one that was there.

    Args:
        path: In a folder that exists.
        prefixes, kv: The prefixes, and what gives their KV: called for ranges of at most ``BLOCK`` tokens, in order.
        spec, fingerprint: What the KV is of, but for the device, and of which model (:func:`kv_fingerprint`).

    Raises:
        OSError: the file cannot be written, for lack of space, say.  What was there before is there still.
    """
    path, count = check_place(path), len(prefixes.tokens)
    arrays = [prefixes.lengths.astype("<i8"), prefixes.shared.astype("<i8"), prefixes.tokens.astype("<i4")]
    metadata, tensors = metadata_of(spec, fingerprint), tensors_of(spec, len(prefixes.lengths), count)
    try:
        with replacing(path) as file:
            file.write(_header(metadata | {"checksum": "0" * 64}, tensors))
            for array in arrays:
                file.write(array.tobytes())
            digests = b""
            for begin in range(0, count, BLOCK):
                block = bytes_of(kv(begin, min(begin + BLOCK, count)))
                digests += hashlib.sha256(block).digest()
                file.write(block)
            file.write(digests)
            checksum = checksum_of(metadata, [*arrays, np.frombuffer(digests, np.uint8)])
            file.seek(0)
            file.write(_header(metadata | {"checksum": checksum}, tensors))
    except OSError as error:
        error.add_note(f"{path} was not written; what was there before is there still")
        raise


def _header(metadata: dict[str, str], tensors: dict[str, tuple[str, list[int]]]) -> bytes:
    """The header of a file in safetensors, whose tensors lie one after another."""
    header: dict[str, Any] = {"__metadata__": metadata}
    begin = 0
    for name, (dtype, shape) in tensors.items():
        end = begin + _BYTES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
