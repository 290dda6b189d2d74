"""Prefix files that are torn, changed or of another model are refused."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from prefixkit.kv.prefixes.file import PrefixFileError
from prefixkit.kv.prefixes.write import ARRAYS, Origin
from prefixkit.testing.kv_specs import spec_of_alike
from tests.kv.prefixes.saved import MODEL, SPEC, VOCAB


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"origin": replace(MODEL, variants="alibi(4 heads)#01 in layers 0 to 2")},
            "KV under no variant of attention, and the model applies alibi.4 heads.#01 in layers 0 to 2: give patch",
        ),
        ({"origin": Origin("f" * 64)}, "saved from another model.*fingerprint is fingerprint of a, .*model's is ffff"),
        (
            {"spec": replace(SPEC, dtype=torch.float16)},
            "KV in float32, and the model's is float16; load the model in float32",
        ),
        ({"spec": spec_of_alike(2, 2, 4)}, "3 layers of 2 x 4 and 2 x 4, .*the model has 2 layers of 2 x 4 and 2 x 4"),
        ({"spec": spec_of_alike(3, 1, 4)}, "3 layers of 2 x 4 .*the model has 3 layers of 1 x 4 and 1 x 4"),
        ({"spec": spec_of_alike(3, 2, 8)}, "3 layers of 2 x 4 .*the model has 3 layers of 2 x 8 and 2 x 8"),
        ({"vocab_size": VOCAB - 1}, "holds token 999, outside of the model's vocabulary of 999"),
    ],
    ids=["variant", "fingerprint", "dtype", "layers", "heads", "head_dim", "vocabulary"],
)
def test_a_file_of_another_model(changes, message, saved):
    with pytest.raises(PrefixFileError, match=message):
        saved.open(**changes)


def test_the_device_is_no_part_of_the_layout(saved):
    file = saved.open(spec=replace(SPEC, device=torch.device("meta")))
    assert file.read(0, 1).device.type == "cpu"


@pytest.mark.parametrize("version", ["1", "4", "", "one"])
def test_a_file_of_another_version(version, saved):
    saved.rewrite({"format_version": version, "prefixkit": "9.0"})
    with pytest.raises(
        PrefixFileError,
        match=rf"format version {version}, written by prefixkit 9.0; .*reads 2 and 3: load it with that",
    ):
        saved.open()


def test_a_version_that_the_file_does_not_have(saved):
    saved.rewrite({"format_version": "3"})
    with pytest.raises(PrefixFileError, match=r"not as it was written.*state_prefix"):
        saved.open()


@pytest.mark.parametrize("content", [b"", b"{}", os.urandom(1000), (2).to_bytes(8, "little") + b"{}"])
def test_files_of_other_formats(content, saved):
    saved.path.write_bytes(content)
    with pytest.raises(PrefixFileError, match=r"no prefix file.*pass one that"):
        saved.open()


def test_other_files_in_safetensors(saved):
    save_file({"kv": saved.all}, saved.path)
    with pytest.raises(PrefixFileError, match="in safetensors, but no prefix file"):
        saved.open()


def test_a_file_that_is_not_there(tmp_path, saved):
    saved.path.unlink()
    with pytest.raises(FileNotFoundError):
        saved.open()


def test_every_byte_of_the_header_and_of_the_arrays(saved):
    """A flipped bit anywhere but in K and V is found when the file is opened."""
    end, _ = saved.header()
    places = [*range(end)]
    for name in ARRAYS:
        places += range(*saved.place(name))
    for at in places:
        saved.flip(at)
        with pytest.raises(PrefixFileError):
            saved.open()
        saved.flip(at)
    assert torch.equal(saved.read_all(), saved.all)


def test_bytes_of_kv(saved):
    begin, end = saved.place("kv")
    for at in [begin, *range(begin + 5, end, 997), end - 1]:
        saved.flip(at)
        with pytest.raises(PrefixFileError, match="has another checksum"):
            saved.read_all()
        saved.flip(at)


def test_a_file_that_was_cut_off_or_goes_on(saved):
    whole, (end, _) = saved.path.read_bytes(), saved.header()
    for size in (1, 7, 8, 60, end - 1):
        saved.path.write_bytes(whole[:size])
        with pytest.raises(PrefixFileError):
            saved.open()
    for content in (whole[:end], whole[: end + 1], whole[: len(whole) // 2], whole[:-1], whole + b"\0"):
        saved.path.write_bytes(content)
        with pytest.raises(PrefixFileError, match="cut off or changed; delete it and save its prefixes again"):
            saved.open()


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"lengths": torch.tensor([170, 81])}, "its prefixes do not"),
        ({"lengths": torch.tensor([170, 2**62])}, "its prefixes do not"),
        ({"shared": torch.tensor([1, 61])}, "its prefixes do not"),
        ({"shared": torch.tensor([-1, 60])}, "its prefixes do not"),
        ({"lengths": torch.tensor([10, 240]), "shared": torch.tensor([0, 60])}, "its prefixes do not"),
        ({"lengths": torch.tensor([190, 60])}, "its prefixes do not"),
        ({"lengths": torch.tensor([190])}, r"its tensors are .*'shared': \('I64', \[2\]\)"),
        ({"lengths": torch.tensor([[170, 80]])}, "its tensors are"),
        ({"tokens": torch.zeros(190, dtype=torch.int64)}, "its tensors are"),
        ({"tokens": torch.zeros(10**6, dtype=torch.int32)}, "its tensors are"),
        ({"tokens": torch.zeros(0, dtype=torch.int32)}, "its tensors are"),
        ({"kv": torch.zeros(190, 2, 3, 2, 5)}, "its tensors are"),
        ({"kv": torch.zeros(190, 2, 3, 2, 4, dtype=torch.float16)}, "its tensors are"),
        ({"kv": torch.zeros(0)}, "its tensors are"),
        ({"checksums": torch.zeros(2, 32, dtype=torch.uint8)}, "its tensors are"),
        ({"more": torch.zeros(1)}, "its tensors are"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_tensors_made_by_hand(tensors, reason, saved):
    saved.rewrite(**tensors)
    with pytest.raises(PrefixFileError, match=reason):
        saved.open()


@pytest.mark.parametrize("facts", [{"layers": "x"}, {"layers": ""}, {"dtype": "int8"}])
def test_metadata_made_by_hand(facts, saved):
    saved.rewrite(facts)
    with pytest.raises(PrefixFileError, match="and the model"):
        saved.open()


def test_a_vocabulary_is_checked_in_files_made_by_hand(saved):
    for token in (-1, 2**31 - 1):
        tokens = torch.from_numpy(saved.prefixes.tokens.copy())
        tokens[5] = token
        saved.rewrite(tokens=tokens)
        with pytest.raises(PrefixFileError, match=f"holds token {token}"):
            saved.open()
