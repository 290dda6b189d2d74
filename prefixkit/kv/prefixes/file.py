"""Prefix files: token prefixes with their KV, in safetensors; ``write.py`` says what is in one.

>>> trie, sources = trie_of([tokens_of_one, tokens_of_another])
>>> def kv(begin, end):  # of trie.tokens[begin:end]
...     return keys[:, begin:end], values[:, begin:end]
>>> write_prefixes("few_shot.safetensors", trie, kv, spec, kv_fingerprint(model))
>>> with open_prefixes("few_shot.safetensors", spec, kv_fingerprint(model), vocab_size) as file:
...     for node in range(len(file.trie)):
...         tokens, (keys, values) = file.trie.prefix(node), file.read(*file.trie.span(node))
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from prefixkit.kv.kv_pool import KVSpec
from prefixkit.kv.prefixes.trie import PrefixTrie
from prefixkit.kv.prefixes.write import (
    ARRAYS,
    BLOCK,
    DTYPES,
    FORMAT,
    SHAPE,
    VERSION,
    checksum_of,
    digest_of,
    metadata_of,
    prefixkit_version,
)
from prefixkit.paths import as_path


class PrefixFileError(ValueError):
    """A prefix file cannot be used; nothing was taken from it."""


class NotAPrefixFile(PrefixFileError):
    """A file is something else."""


class TornPrefixFile(PrefixFileError):
    """A prefix file is not as it was written: cut off, changed, or made by other means."""


class PrefixFileMismatch(PrefixFileError):
    """A prefix file is of another model, dtype, layout or vocabulary, or of a newer version of prefixkit."""


@dataclass(eq=False)
class PrefixFile:
    """A prefix file that :func:`open_prefixes` has checked and mapped into memory; a context manager.

    A file must not be written to in place while it is open; :func:`write_prefixes` does not.

    Attributes:
        path: Where it is.
        trie: The prefixes.
        spec: What the KV is of, on the CPU.
    """

    path: Path
    trie: PrefixTrie
    spec: KVSpec
    _checksums: NDArray[np.uint8]
    _file: Any
    _last: tuple[int, list[Tensor]] = (-1, [])

    def read(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """K and V of the tokens ``[begin, end)`` of ``trie.tokens``, those of a node for its ``span``.

        Only the blocks that hold them are read and checked; each once, where ranges are asked for in order.

        Returns:
            Two tensors ``[layers, end - begin, kv_heads, head_dim]`` on the CPU, copies.

        Raises:
            ValueError: the file is closed, or the range is outside of it.
            TornPrefixFile: KV is not as it was written.
        """
        if self._file is None:
            raise ValueError(f"{self.path} is closed; open it again to read from it")
        if not 0 <= begin < end <= len(self.trie.tokens):
            raise ValueError(f"{self.path}: tokens {begin} to {end} asked, of {len(self.trie.tokens)}")
        shape = (self.spec.num_layers, end - begin, self.spec.kv_heads, self.spec.head_dim)
        found = torch.empty(shape, dtype=self.spec.dtype), torch.empty(shape, dtype=self.spec.dtype)
        for block in range(begin // BLOCK, -(-end // BLOCK)):
            low = block * BLOCK
            first, last = max(begin, low), min(end, low + BLOCK)
            for whole, part in zip(found, self._block(block), strict=True):
                whole[:, first - begin : last - begin] = part[:, first - low : last - low]
        return found

    def _block(self, block: int) -> list[Tensor]:
        if block != self._last[0]:
            low, high = block * BLOCK, min((block + 1) * BLOCK, len(self.trie.tokens))
            # What was checked is what is given out: a copy.
            slices = [self._file.get_slice(name)[:, low:high] for name in "kv"]
            parts = [one.clone(memory_format=torch.contiguous_format) for one in slices]
            if digest_of(parts) != self._checksums[block].tobytes():
                raise _torn(self.path, f"the KV of tokens {low} to {high} has another checksum")
            self._last = block, parts
        return self._last[1]

    def close(self) -> None:
        """Give the mapped memory back."""
        self._file, self._last = None, (-1, [])

    def __enter__(self) -> PrefixFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def open_prefixes(path: str | Path, spec: KVSpec, fingerprint: str, vocab_size: int) -> PrefixFile:
    """Open a prefix file and check all of it but its KV, which is checked as it is read.

    Args:
        path: A file that :func:`write_prefixes` wrote.
        spec, fingerprint, vocab_size: Of the model that is to use it; the device is no part of it.

    Raises:
        PrefixFileError: it cannot be used; its subclasses say why.
        OSError: it cannot be read.
    """
    path = as_path(path)
    with path.open("rb") as opened:
        head = opened.read(4096)
    try:
        file = safe_open(path, "pt")
        metadata = dict(file.metadata() or {})  # type: ignore[no-untyped-call]
    except (SafetensorError, UnicodeError) as error:
        if FORMAT.encode() in head:
            raise _torn(path, str(error)) from error
        raise NotAPrefixFile(f"{path} is no prefix file ({error}); pass one that session.save() wrote") from error
    if metadata.get("format") != FORMAT:
        raise NotAPrefixFile(f"{path} is in safetensors, but no prefix file; pass one that session.save() wrote")
    _check_version(path, metadata)
    arrays = _arrays(path, file, metadata)
    _check_model(path, metadata, spec, fingerprint)
    try:
        trie = PrefixTrie(arrays["parents"], arrays["lengths"], arrays["tokens"])
    except ValueError as error:
        raise _torn(path, f"its prefixes are no trie: {error}") from error
    if (highest := int(trie.tokens.max())) >= vocab_size:
        raise PrefixFileMismatch(
            f"{path} holds token {highest}, outside of the model's vocabulary of {vocab_size}; "
            "load the model it was saved from, or save its prefixes again"
        )
    held = KVSpec(spec.num_layers, spec.kv_heads, spec.head_dim, spec.dtype)
    return PrefixFile(path, trie, held, arrays["checksums"].reshape(-1, 32), file)


# -- checking ----------------------------------------------------------------------------------------------------------


def _torn(path: Path, why: str) -> TornPrefixFile:
    return TornPrefixFile(
        f"{path} is not as it was written ({why}): it was cut off or changed; delete it and save its prefixes again"
    )


def _check_version(path: Path, metadata: dict[str, str]) -> None:
    version = -1
    with suppress(ValueError):
        version = int(metadata.get("format_version", ""))
    if version < 1:
        raise _torn(path, f"its format version is {metadata.get('format_version')!r}")
    if version > VERSION:
        raise PrefixFileMismatch(
            f"{path} has format version {version}, written by prefixkit {metadata.get('prefixkit')}; this prefixkit "
            f"({prefixkit_version()}) reads up to {VERSION}: update it, or save the prefixes again"
        )


def _arrays(path: Path, file: Any, metadata: dict[str, str]) -> dict[str, NDArray[Any]]:
    """All arrays but K and V, with the checksum that the metadata has; K and V are as the metadata says."""
    names = [*ARRAYS, "checksums"]
    try:
        there = set(file.keys())
        wanted = {"dtype", "block", "fingerprint", "checksum", "prefixkit", *SHAPE}
        if missing := (wanted - metadata.keys()) | ({*names, "k", "v"} ^ there):
            raise _torn(path, f"its parts are not those of a prefix file: {', '.join(sorted(missing))}")
        facts = {name: (file.get_slice(name).get_dtype(), file.get_slice(name).get_shape()) for name in there}
        for name in names:
            dtype = ARRAYS[name][0] if name in ARRAYS else "U8"
            if facts[name][0] != dtype:
                raise _torn(path, f"its {name} are {facts[name][0]}, not {dtype}")
        arrays = {name: file.get_tensor(name).clone().numpy() for name in names}
    except (SafetensorError, UnicodeError, RuntimeError) as error:
        raise _torn(path, str(error)) from error
    if checksum_of(metadata, list(arrays.values())) != metadata["checksum"]:
        raise _torn(path, "its header has another checksum")
    _check_shapes(path, metadata, facts, arrays)
    return arrays


def _check_shapes(path: Path, metadata: dict[str, str], facts: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> None:
    dtypes = {str(dtype).removeprefix("torch."): name for dtype, name in DTYPES.items()}
    try:
        layers, heads, dim = (int(metadata[name]) for name in SHAPE)
        block = int(metadata["block"])
    except ValueError as error:
        raise _torn(path, str(error)) from error
    count = arrays["tokens"].size
    wanted = (dtypes.get(metadata["dtype"]), [layers, count, heads, dim])
    for name in "kv":
        if facts[name] != wanted:
            raise _torn(path, f"its {name} is {facts[name]}, not {wanted}")
    if block != BLOCK or facts["checksums"][1] != [-(-count // BLOCK), 32]:
        raise _torn(path, f"{count} tokens have no {facts['checksums'][1]} checksums for blocks of {block}")


def _check_model(path: Path, metadata: dict[str, str], spec: KVSpec, fingerprint: str) -> None:
    held = {name: metadata[name] for name in ("dtype", *SHAPE)}
    asked = {name: value for name, value in metadata_of(spec, fingerprint).items() if name in held}
    if held["dtype"] != asked["dtype"]:
        raise PrefixFileMismatch(
            f"{path} holds KV in {held['dtype']}, and the model's is {asked['dtype']}; load the model in "
            f"{held['dtype']}, or save its prefixes again"
        )
    if held != asked:
        told = [", ".join(f"{name} {facts[name]}" for name in SHAPE) for facts in (held, asked)]
        raise PrefixFileMismatch(
            f"{path} holds KV of {told[0]}, and the model has {told[1]}; load the model it was saved from, with as "
            "many processes under tensor parallelism, or save its prefixes again"
        )
    if metadata["fingerprint"] != fingerprint:
        raise PrefixFileMismatch(
            f"{path} was saved from another model, or from other weights or adapters of it: its fingerprint is "
            f"{metadata['fingerprint'][:16]}, and the model's is {fingerprint[:16]}; KV of other weights cannot be "
            "used: load that model, or save its prefixes again"
        )
