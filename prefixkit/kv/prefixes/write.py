"""The format of prefix files, in safetensors, and writing them: a header, tensors and their checksums.

``lengths``, ``shared`` and ``tokens`` are the front-coded prefixes.  ``kv`` ``[tokens, spec.size]`` is what is cached
of ``tokens``, as :meth:`KVPool.read` returns it.  ``checksums`` ``[blocks, 32]`` are the SHA-256 of each ``BLOCK``
tokens of ``kv``.  The metadata has facts of the KV, and a checksum of these facts and of all tensors but ``kv``.

If layers keep a state in place of KV, ``state_prefix`` and ``state_position`` say which prefix each state belongs to
and how many of its tokens precede the state; the most important states come first.  Each tensor of the states has a
name, its own dtype and the shape ``[states, *shape]``.  ``state_checksums`` ``[states, 32]`` are the SHA-256 of each
state: of its tensors in the file's order.  The metadata's checksum covers these three arrays, not the states' tensors.
Such files have version 3, all others version 2.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefixkit.kv.kv_pool import KVSpec
from prefixkit.kv.prefixes.front_coding import FrontCoded
from prefixkit.kv.state_pool import StateTensor
from prefixkit.paths import as_path, check_replaceable, replacing
from prefixkit.tree.arrays import Longs

# Returns KV of the tokens ``[begin, end)``, contiguous ``[end - begin, spec.size]`` on the CPU.
ReadKV = Callable[[int, int], Tensor]
# Called with a tensor's number among those of all modules; returns its states ``[begin, end)``, contiguous, on the CPU.
ReadStates = Callable[[int, int, int], Tensor]

FORMAT, VERSION, VERSION_OF_STATES = "prefixkit prefixes", 2, 3
BLOCK = 64  # tokens
ARRAYS = ("lengths", "shared", "tokens", "checksums")
_STATE_ARRAYS = ("state_prefix", "state_position", "state_checksums")
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float8_e4m3fn: "F8_E4M3"}
_DTYPES |= {torch.float64: "F64", torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL"}
_BYTES = {"F64": 8, "I64": 8, "I32": 4, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "U8": 1, "BOOL": 1}
_AT_ONCE = 2**25  # bytes of states


def prefixkit_version() -> str:
    """The version of the installed package; importing ``prefixkit`` here would be a cycle."""
    try:
        return version("prefixkit")
    except PackageNotFoundError:
        return "unknown"


@dataclass(frozen=True)
class Origin:
    """What computed the KV.

    Attributes:
        fingerprint: The model's fingerprint (:func:`kv_fingerprint`).
        variants: A text that names the variants its layers apply, with digests of what they capture; empty if none.
    """

    fingerprint: str
    variants: str = ""


def metadata_of(spec: KVSpec, origin: Origin) -> dict[str, str]:
    """The metadata of a file, except for the checksum."""
    number = VERSION_OF_STATES if spec.states else VERSION
    facts = {"format": FORMAT, "format_version": number, "prefixkit": prefixkit_version()}
    facts |= {"fingerprint": origin.fingerprint}
    facts |= {"variants": origin.variants} if origin.variants else {}
    facts |= {"dtype": str(spec.dtype).removeprefix("torch."), "layers": spec.kinds}
    facts |= {"states": spec.state_kinds} if spec.states else {}
    return {name: str(value) for name, value in facts.items()}


def state_tensors(spec: KVSpec) -> dict[str, StateTensor]:
    """The tensors of a state of all modules, by their names in a file."""
    return {
        f"states.{number}.{'recurrent' if one.recurrent else 'convolution'}.{one.index}": one
        for number, module in enumerate(spec.states)
        for one in module
    }


def tensors_of(spec: KVSpec, prefixes: int, tokens: int, states: int = 0) -> dict[str, tuple[str, list[int]]]:
    """Dtype and shape of each tensor of a file; larger elements come first, so that all tensors are aligned."""
    found = {"lengths": ("I64", [prefixes]), "shared": ("I64", [prefixes]), "tokens": ("I32", [tokens])}
    found["kv"] = _DTYPES[spec.dtype], [tokens, spec.size]
    if spec.states:
        found |= {"state_prefix": ("I64", [states]), "state_position": ("I64", [states])}
        found |= {name: (_DTYPES[one.dtype], [states, *one.shape]) for name, one in state_tensors(spec).items()}
    found["checksums"] = "U8", [-(-tokens // BLOCK), 32]
    found |= {"state_checksums": ("U8", [states, 32])} if spec.states else {}
    return dict(sorted(found.items(), key=lambda one: -_BYTES[one[1][0]]))


def arrays_of(metadata: dict[str, str]) -> tuple[str, ...]:
    """The tensors of a file that the checksum of its metadata covers."""
    return ARRAYS + (_STATE_ARRAYS if metadata.get("format_version") == str(VERSION_OF_STATES) else ())


def checksum_of(metadata: dict[str, str], arrays: Sequence[NDArray[Any]]) -> str:
    """SHA-256 of all metadata except the checksum, and of the tensors that :func:`arrays_of` names."""
    facts = {name: value for name, value in metadata.items() if name != "checksum"}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for array in arrays:
        digest.update(array.tobytes())
    return digest.hexdigest()


def bytes_of(kv: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, not copied."""
    return kv.view(torch.uint8).numpy().data


def check_place(path: str | Path) -> Path:
    """Resolve the path of a file to write: a link's target is replaced, not the link; OSError if impossible."""
    path = as_path(path).resolve()
    if path.is_dir():
        raise IsADirectoryError(f"{path} cannot be written: it is a folder; name a file in it")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: there is no folder {path.parent}; make it first")
    check_replaceable(path)
    return path


@dataclass(frozen=True, eq=False)
class StatePlaces:
    """Where the states of a file belong, the most important first.

    Attributes:
        prefix: int64 ``[states]`` the number of the prefix.
        position: int64 ``[states]`` how many of its tokens precede the state: more than it shares with the one before.
    """

    prefix: Longs
    position: Longs


NO_STATES = StatePlaces(np.empty(0, np.int64), np.empty(0, np.int64))


def write_prefixes(
    path: str | Path,
    prefixes: FrontCoded,
    kv: ReadKV,
    spec: KVSpec,
    origin: Origin,
    places: StatePlaces | None = None,
    states: ReadStates | None = None,
) -> None:
    """Write prefixes and their KV to a file, which replaces an existing one only once it is complete.

    Args:
        path: In a folder that exists.
        prefixes, kv: The prefixes, and a function that reads their KV: called for ranges of at most ``BLOCK`` tokens,
            in order.
        spec, origin: What is cached, and what computed it; the device does not matter.
        places, states: If layers keep states, where these belong, and a function that reads them.

    Raises:
        OSError: the file cannot be written, for lack of space, say.  An existing file is unchanged.
    """
    path, places = check_place(path), NO_STATES if places is None else places
    arrays: dict[str, NDArray[Any]] = {
        "lengths": prefixes.lengths.astype("<i8"),
        "shared": prefixes.shared.astype("<i8"),
        "tokens": prefixes.tokens.astype("<i4"),
        "state_prefix": places.prefix.astype("<i8"),
        "state_position": places.position.astype("<i8"),
    }
    metadata = metadata_of(spec, origin)
    tensors = tensors_of(spec, len(prefixes.lengths), len(prefixes.tokens), len(places.prefix))
    numbers = {name: number for number, name in enumerate(state_tensors(spec))}
    digests = [hashlib.sha256() for _ in places.prefix]
    try:
        with replacing(path) as file:
            file.write(_header(metadata | {"checksum": "0" * 64}, tensors))
            for name in tensors:
                if name == "kv":
                    arrays["checksums"] = _write_kv(file, kv, len(prefixes.tokens))
                elif name in numbers and states is not None:
                    _write_states(file, partial(states, numbers[name]), digests)
                elif name not in numbers:
                    arrays["state_checksums"] = _joined([one.digest() for one in digests])
                    file.write(arrays[name].tobytes())
            checksum = checksum_of(metadata, [arrays[name] for name in arrays_of(metadata)])
            file.seek(0)
            file.write(_header(metadata | {"checksum": checksum}, tensors))
    except OSError as error:
        error.add_note(f"{path} was not written; what was there before is there still")
        raise


def _write_kv(file: IO[bytes], kv: ReadKV, count: int) -> NDArray[np.uint8]:
    """Write the KV of ``count`` tokens; returns its checksums."""
    digests = list[bytes]()
    for begin in range(0, count, BLOCK):
        block = bytes_of(kv(begin, min(begin + BLOCK, count)))
        digests.append(hashlib.sha256(block).digest())
        file.write(block)
    return _joined(digests)


def _joined(digests: Sequence[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(digests), np.uint8)


def _write_states(file: IO[bytes], read: Callable[[int, int], Tensor], digests: Sequence[Any]) -> None:
    """Write one tensor of all states, and add it to the digest of each."""
    begin, step = 0, 1
    while begin < len(digests):
        part = read(begin, min(begin + step, len(digests)))
        for index, digest in enumerate(digests[begin : begin + len(part)]):
            digest.update(bytes_of(part[index : index + 1]))
        file.write(bytes_of(part))
        begin, step = begin + len(part), max(1, _AT_ONCE // part[0].nbytes)


def _header(metadata: dict[str, str], tensors: dict[str, tuple[str, list[int]]]) -> bytes:
    """The safetensors header of a file whose tensors lie one after another."""
    header: dict[str, Any] = {"__metadata__": metadata}
    begin = 0
    for name, (dtype, shape) in tensors.items():
        end = begin + _BYTES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
