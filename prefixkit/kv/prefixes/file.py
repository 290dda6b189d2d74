"""Reading prefix files: token prefixes with their KV, in safetensors; ``write.py`` describes the format."""

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
    BLOCK,
    FORMAT,
    NO_STATES,
    VERSION,
    VERSION_OF_STATES,
    Origin,
    StatePlaces,
    arrays_of,
    bytes_of,
    checksum_of,
    metadata_of,
    prefixkit_version,
    state_tensors,
    tensors_of,
)
from prefixkit.paths import as_path

_FP8 = "float8_e4m3fn"


class PrefixFileError(ValueError):
    """A prefix file cannot be used; nothing was taken from it."""


@dataclass(eq=False)
class PrefixFile:
    """A prefix file that :func:`open_prefixes` has checked and mapped into memory.

    A file must not be written to in place while it is open; :func:`write_prefixes` does not.

    Attributes:
        path: Where it is.
        prefixes: The prefixes.
        places: Where the file's states belong; empty for models whose layers keep none.
    """

    path: Path
    prefixes: FrontCoded
    places: StatePlaces
    _checksums: NDArray[np.uint8]
    _state_checksums: NDArray[np.uint8]
    _state_names: tuple[list[str], list[str]]  # names of tensors, in the order of the model's modules and of the file
    _file: Any
    _last: tuple[int, Tensor] | None = None

    def read(self, begin: int, end: int) -> Tensor:
        """KV of the tokens ``[begin, end)``, at least one, of ``prefixes.tokens``.

        Only the blocks that hold these tokens are read and checked; each is read once if ranges are read in order.

        Returns:
            ``[end - begin, spec.size]`` on the CPU, a copy.

        Raises:
            PrefixFileError: KV is not as it was written.
        """
        blocks = torch.cat([self._block(block) for block in range(begin // BLOCK, -(-end // BLOCK))])
        return blocks[begin % BLOCK :][: end - begin]

    def read_state(self, number: int) -> list[Tensor]:
        """The state of this number, as :meth:`StatePool.read` returns it.

        Raises:
            PrefixFileError: the state is not as it was written.
        """
        by_module, in_file = self._state_names
        parts, digest = dict[str, Tensor](), hashlib.sha256()
        for name in in_file:
            part = self._file.get_slice(name)[number : number + 1].clone(memory_format=torch.contiguous_format)
            parts[name] = part
            digest.update(bytes_of(part))
        if digest.digest() != self._state_checksums[number].tobytes():
            after = f"{self.places.position[number]} tokens of prefix {self.places.prefix[number]}"
            raise _torn(self.path, f"the state after {after} has another checksum")
        return [parts[name] for name in by_module]

    def _block(self, block: int) -> Tensor:
        if self._last is None or block != self._last[0]:
            low, high = block * BLOCK, min((block + 1) * BLOCK, len(self.prefixes.tokens))
            # A copy, so that the bytes that are returned are the bytes that were checked.
            kv = self._file.get_slice("kv")[low:high].clone(memory_format=torch.contiguous_format)
            if hashlib.sha256(bytes_of(kv)).digest() != self._checksums[block].tobytes():
                raise _torn(self.path, f"the KV of tokens {low} to {high} has another checksum")
            self._last = block, kv
        return self._last[1]


def open_prefixes(path: str | Path, spec: KVSpec, origin: Origin, vocab_size: int) -> PrefixFile:
    """Open a prefix file and check all of it except KV and states, which are checked when they are read.

    Args:
        path: A file that :func:`write_prefixes` wrote.
        spec, origin, vocab_size: Those of the model that will use the file; the device may differ.

    Raises:
        PrefixFileError: the file cannot be used; the message says why.
        OSError: the file cannot be read.
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
    if (found := metadata.get("format_version")) not in {str(VERSION), str(VERSION_OF_STATES)}:
        raise PrefixFileError(
            f"{path} has format version {found}, written by prefixkit {metadata.get('prefixkit')}; this prefixkit "
            f"({prefixkit_version()}) reads {VERSION} and {VERSION_OF_STATES}: load it with that one, or save the "
            "prefixes again"
        )
    try:
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
        tensors = {name: (part.get_dtype(), part.get_shape()) for name, part in parts.items()}
        arrays = {name: file.get_tensor(name).clone().numpy() for name in arrays_of(metadata)}
    except (SafetensorError, UnicodeError, RuntimeError, TypeError) as error:
        raise _torn(path, str(error)) from error
    if checksum_of(metadata, [*arrays.values()]) != metadata.get("checksum"):
        raise _torn(path, "its header has another checksum")
    _check_model(path, metadata, spec, origin)
    lengths, shared, tokens = (arrays[name] for name in ("lengths", "shared", "tokens"))
    places = NO_STATES
    if "state_prefix" in arrays:
        places = StatePlaces(arrays["state_prefix"], arrays["state_position"])
    wanted = tensors_of(spec, len(lengths), len(tokens), len(places.prefix))
    if tensors != wanted:
        raise _torn(path, f"its tensors are {tensors}, not {wanted}")
    prefixes = FrontCoded(lengths, shared, tokens)
    _check_lengths(path, prefixes, places)
    if outside := tokens[(tokens < 0) | (tokens >= vocab_size)].tolist():
        raise PrefixFileError(
            f"{path} holds token {outside[0]}, outside of the model's vocabulary of {vocab_size}; "
            "load the model it was saved from, or save its prefixes again"
        )
    names = [*state_tensors(spec)]
    in_file = [name for name in wanted if name in names]
    state_checksums = arrays.get("state_checksums", arrays["checksums"][:0])
    return PrefixFile(path, prefixes, places, arrays["checksums"], state_checksums, (names, in_file), file)


def _check_lengths(path: Path, prefixes: FrontCoded, places: StatePlaces) -> None:
    lengths, shared = prefixes.lengths, prefixes.shared
    own, before = lengths - shared, np.append(0, lengths[:-1])
    wrong = (own < 1) | (own > len(prefixes.tokens)) | (shared < 0) | (shared > before)
    if wrong.any() or own.sum() != len(prefixes.tokens):
        raise _torn(path, "its prefixes do not have the lengths that it says")
    prefix, position = places.prefix, places.position
    inside = ((prefix >= 0) & (prefix < len(lengths))).all()
    inside = inside and ((position > shared[prefix]) & (position <= lengths[prefix])).all()
    if not inside or len({*zip(prefix.tolist(), position.tolist(), strict=True)}) < len(prefix):
        raise _torn(path, "its states do not follow the tokens that it says")


def _torn(path: Path, why: str) -> PrefixFileError:
    return PrefixFileError(
        f"{path} is not as it was written ({why}): it was cut off or changed; delete it and save its prefixes again"
    )


def _check_model(path: Path, metadata: dict[str, str], spec: KVSpec, origin: Origin) -> None:
    names, ours = ("dtype", "layers"), metadata_of(spec, origin)
    held, asked = ({name: facts.get(name) for name in names} for facts in (metadata, ours))
    if held["dtype"] != asked["dtype"]:
        remedy = f"load the model in {held['dtype']}"
        if held["dtype"] == _FP8:
            remedy = 'patch it with kv_dtype="fp8"'
        elif asked["dtype"] == _FP8:
            remedy = "patch it without a kv_dtype"
        raise PrefixFileError(
            f"{path} holds KV in {held['dtype']}, and the model's is {asked['dtype']}; {remedy}, or save its prefixes "
            "again"
        )
    if held != asked:
        raise PrefixFileError(
            f"{path} holds KV of {held['layers']}, and the model has {asked['layers']}; load the model it was saved "
            "from, with as many processes under tensor parallelism, or save its prefixes again"
        )
    states, kept = metadata.get("states"), ours.get("states")
    if states != kept:
        raise PrefixFileError(
            f"{path} holds {f'states of {states}' if states else 'no states'} (prefixkit {metadata.get('prefixkit')}, "
            f"format version {metadata['format_version']}), and layers of the model keep {kept or 'none'}; load the "
            "model it was saved from, or save its prefixes again"
        )
    if (applied := metadata.get("variants", "")) != origin.variants:
        raise PrefixFileError(
            f"{path} holds KV under {applied or 'no variant of attention'}, and the model applies "
            f"{origin.variants or 'none'}: give patch(model, variant=...) what the file was saved with, or save its "
            "prefixes again"
        )
    if (theirs := metadata.get("fingerprint", "")) != origin.fingerprint:
        raise PrefixFileError(
            f"{path} was saved from another model, or from other weights or adapters of it: its fingerprint is "
            f"{theirs[:16]}, and the model's is {origin.fingerprint[:16]}; KV of other weights cannot be "
            "used: load that model, or save its prefixes again"
        )
