"""Prefix files: token prefixes with their KV, in safetensors; ``write.py`` says what is in one."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from prefixkit.kv.kv_pool import KVSpec
from prefixkit.kv.prefixes.front_coding import FrontCoded
from prefixkit.kv.prefixes.write import (
    ARRAYS,
    BLOCK,
    FORMAT,
    VERSION,
    bytes_of,
    checksum_of,
    metadata_of,
    prefixkit_version,
    tensors_of,
)
from prefixkit.paths import as_path


class PrefixFileError(ValueError):
    """A prefix file cannot be used; nothing was taken from it."""


@dataclass(eq=False)
class PrefixFile:
    """A prefix file that :func:`open_prefixes` has checked and mapped into memory.

    A file must not be written to in place while it is open; :func:`write_prefixes` does not.

    Attributes:
        path: Where it is.
        prefixes: The prefixes.
    """

    path: Path
    prefixes: FrontCoded
    _checksums: NDArray[np.uint8]
    _file: Any
    _last: tuple[int, Tensor] | None = None

    def read(self, begin: int, end: int) -> Tensor:
        """KV of the tokens ``[begin, end)``, at least one, of ``prefixes.tokens``.

        Only the blocks that hold them are read and checked; each once, where ranges are asked for in order.

        Returns:
            ``[end - begin, spec.size]`` on the CPU, a copy.

        Raises:
            PrefixFileError: KV is not as it was written.
        """
        blocks = torch.cat([self._block(block) for block in range(begin // BLOCK, -(-end // BLOCK))])
        return blocks[begin % BLOCK :][: end - begin]

    def _block(self, block: int) -> Tensor:
        if self._last is None or block != self._last[0]:
            low, high = block * BLOCK, min((block + 1) * BLOCK, len(self.prefixes.tokens))
            # What was checked is what is given out: a copy.
            kv = self._file.get_slice("kv")[low:high].clone(memory_format=torch.contiguous_format)
            if hashlib.sha256(bytes_of(kv)).digest() != self._checksums[block].tobytes():
                raise _torn(self.path, f"the KV of tokens {low} to {high} has another checksum")
            self._last = block, kv
        return self._last[1]


def open_prefixes(path: str | Path, spec: KVSpec, fingerprint: str, vocab_size: int) -> PrefixFile:
    """Open a prefix file and check all of it but its KV, which is checked as it is read.

    Args:
        path: A file that :func:`write_prefixes` wrote.
        spec, fingerprint, vocab_size: Of the model that is to use it; the device is no part of it.

    Raises:
        PrefixFileError: it cannot be used; the message says why.
        OSError: it cannot be read.
    """
    path = as_path(path)
    with path.open("rb") as opened:
        head = opened.read(4096)
    try:
        file: Any = safe_open(path, "pt")
        metadata = dict(file.metadata() or {})
    except (SafetensorError, UnicodeError) as error:
        if FORMAT.encode() in head:
            raise _torn(path, str(error)) from error
        raise PrefixFileError(f"{path} is no prefix file ({error}); pass one that session.save() wrote") from error
    if metadata.get("format") != FORMAT:
        raise PrefixFileError(f"{path} is in safetensors, but no prefix file; pass one that session.save() wrote")
    if (found := metadata.get("format_version")) != str(VERSION):
        raise PrefixFileError(
            f"{path} has format version {found}, written by prefixkit {metadata.get('prefixkit')}; this prefixkit "
            f"({prefixkit_version()}) reads {VERSION}: load it with that one, or save the prefixes again"
        )
    try:
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
        tensors = {name: (part.get_dtype(), part.get_shape()) for name, part in parts.items()}
        arrays = [file.get_tensor(name).clone().numpy() for name in ARRAYS]
    except (SafetensorError, UnicodeError, RuntimeError, TypeError) as error:
        raise _torn(path, str(error)) from error
    if checksum_of(metadata, arrays) != metadata.get("checksum"):
        raise _torn(path, "its header has another checksum")
    _check_model(path, metadata, spec, fingerprint)
    lengths, shared, tokens, checksums = arrays
    if tensors != (wanted := tensors_of(spec, len(lengths), len(tokens))):
        raise _torn(path, f"its tensors are {tensors}, not {wanted}")
    own, before = lengths - shared, np.append(0, lengths[:-1])
    wrong = (own < 1) | (own > len(tokens)) | (shared < 0) | (shared > before)
    if wrong.any() or own.sum() != len(tokens):
        raise _torn(path, "its prefixes do not have the lengths that it says")
    if outside := tokens[(tokens < 0) | (tokens >= vocab_size)].tolist():
        raise PrefixFileError(
            f"{path} holds token {outside[0]}, outside of the model's vocabulary of {vocab_size}; "
            "load the model it was saved from, or save its prefixes again"
        )
    return PrefixFile(path, FrontCoded(lengths, shared, tokens), checksums, file)


def _torn(path: Path, why: str) -> PrefixFileError:
    return PrefixFileError(
        f"{path} is not as it was written ({why}): it was cut off or changed; delete it and save its prefixes again"
    )


def _check_model(path: Path, metadata: dict[str, str], spec: KVSpec, fingerprint: str) -> None:
    names, ours = ("dtype", "layers"), metadata_of(spec, fingerprint)
    held, asked = ({name: facts.get(name) for name in names} for facts in (metadata, ours))
    if held["dtype"] != asked["dtype"]:
        raise PrefixFileError(
            f"{path} holds KV in {held['dtype']}, and the model's is {asked['dtype']}; load the model in "
            f"{held['dtype']}, or save its prefixes again"
        )
    if held != asked:
        raise PrefixFileError(
            f"{path} holds KV of {held['layers']}, and the model has {asked['layers']}; load the model it was saved "
            "from, with as many processes under tensor parallelism, or save its prefixes again"
        )
    if (theirs := metadata.get("fingerprint", "")) != fingerprint:
        raise PrefixFileError(
            f"{path} was saved from another model, or from other weights or adapters of it: its fingerprint is "
            f"{theirs[:16]}, and the model's is {fingerprint[:16]}; KV of other weights cannot be "
            "used: load that model, or save its prefixes again"
        )
