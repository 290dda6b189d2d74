"""Prefix files: what is written is read again, and what is torn, changed or of another model is refused."""

from __future__ import annotations

import errno
import json
import os
import resource
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from prefixkit.kv.prefixes.file import PrefixFileError, open_prefixes
from prefixkit.kv.prefixes.front_coding import front_coded
from prefixkit.kv.prefixes.write import ARRAYS, BLOCK, Origin, arrays_of, checksum_of, write_prefixes
from prefixkit.testing.kv_specs import spec_of_alike

SPEC = spec_of_alike(num_layers=3, kv_heads=2, head_dim=4)
VOCAB, MODEL = 1000, Origin("fingerprint of a model")


class Saved:
    """Prefixes of 70, 170 and 80 tokens, of which 60 and 130 are shared, with random KV, in a file."""

    def __init__(self, folder, spec=SPEC):
        rng = np.random.default_rng(0)
        first = rng.integers(0, VOCAB - 1, 170).astype(np.int32)
        second = np.concatenate([first[:60], np.array([VOCAB - 1], np.int32), first[:19]])
        self.spec, self.path = spec, folder / "prefixes.safetensors"
        self.prefixes, _ = front_coded([first, second, first[:130]])
        self.all = torch.randn(190, spec.size).to(spec.dtype)
        self.asked = []
        self.write()

    def kv(self, begin, end):
        self.asked.append((begin, end))
        return self.all[begin:end]

    def write(self, **changes):
        given = {"prefixes": self.prefixes, "kv": self.kv, "spec": self.spec, "origin": MODEL, **changes}
        write_prefixes(self.path, **given)

    def open(self, **changes):
        given = {"spec": self.spec, "origin": MODEL, "vocab_size": VOCAB, **changes}
        return open_prefixes(self.path, **given)

    def read_all(self):
        return self.open().read(0, 190)

    def header(self):
        content = self.path.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        return end, json.loads(content[8:end])

    def place(self, name):
        """Where in the file a tensor's bytes begin and end."""
        end, header = self.header()
        return tuple(end + at for at in header[name]["data_offsets"])

    def flip(self, at):
        with self.path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1]))

    def rewrite(self, metadata=None, **tensors):
        """The file made by hand: some of its parts are others, all checksums are right."""
        held = load_file(self.path) | tensors
        with safe_open(self.path, "pt") as file:
            facts = file.metadata() | (metadata or {})
        arrays = [held[name].numpy() for name in arrays_of(facts) if name in held]
        save_file(held, self.path, facts | {"checksum": checksum_of(facts, arrays)})


@pytest.fixture
def saved(tmp_path):
    return Saved(tmp_path)


# -- what is written is read -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_round_trip(dtype, tmp_path):
    saved = Saved(tmp_path, replace(SPEC, dtype=dtype))
    file = saved.open()
    for name in ("lengths", "shared", "tokens"):
        assert np.array_equal(getattr(file.prefixes, name), getattr(saved.prefixes, name))
    for tokens, shared, begin in file.prefixes:
        kv = file.read(begin, begin + len(tokens) - shared)
        assert kv.dtype == dtype
        assert torch.equal(kv, saved.all[begin : begin + len(tokens) - shared])


def test_any_range_of_tokens(saved):
    file = saved.open()
    for begin, end in [(0, 1), (BLOCK - 1, BLOCK + 1), (BLOCK, 2 * BLOCK), (189, 190), (0, 190), (7, 150)]:
        assert torch.equal(file.read(begin, end), saved.all[begin:end])


def test_safetensors_reads_it_too(saved):
    tensors = load_file(saved.path)
    assert torch.equal(tensors["kv"], saved.all)
    assert tensors["tokens"].tolist() == saved.prefixes.tokens.tolist()


def test_kv_is_asked_for_in_blocks_and_in_order(saved):
    assert saved.asked == [(at, min(at + BLOCK, 190)) for at in range(0, 190, BLOCK)]


def test_what_was_read_is_a_copy(saved):
    file = saved.open()
    kv = file.read(0, 5)
    kv += 1
    assert torch.equal(file.read(0, 190), saved.all)


def test_a_file_is_mapped_and_kv_is_checked_when_it_is_read(saved):
    saved.flip(saved.place("kv")[0] + BLOCK * saved.all[0].nbytes)
    file = saved.open()
    with open("/proc/self/maps") as maps:
        assert str(saved.path) in maps.read()
    assert torch.equal(file.read(0, BLOCK), saved.all[:BLOCK])
    assert torch.equal(file.read(2 * BLOCK, 190), saved.all[2 * BLOCK :])
    with pytest.raises(PrefixFileError, match=r"KV of tokens 64 to 128 has another checksum.*save its prefixes again"):
        file.read(BLOCK - 1, BLOCK + 1)


def test_short_ranges_of_one_block_are_checked_together(saved):
    file = saved.open()
    file.read(0, 1)
    saved.flip(saved.place("kv")[0])
    for at in range(1, BLOCK):
        assert torch.equal(file.read(at, at + 1), saved.all[at : at + 1]), "it is what was checked"
    file.read(BLOCK, BLOCK + 1)
    with pytest.raises(PrefixFileError):
        file.read(0, 1)


def test_a_file_that_is_replaced_while_it_is_open(saved):
    file, before = saved.open(), saved.all.clone()
    saved.all += 1
    saved.write()
    assert torch.equal(file.read(0, 190), before)
    assert torch.equal(saved.read_all(), before + 1)


# -- what is refused ---------------------------------------------------------------------------------------------------


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


# -- what fails while a file is written --------------------------------------------------------------------------------


@contextmanager
def no_file_beyond(size):
    """Writing more than so many bytes to a file fails, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("share", [0, 0.3, 0.99])
def test_a_disk_that_is_full(share, saved):
    before = saved.path.read_bytes()
    saved.all += 1
    with no_file_beyond(int(share * len(before))), pytest.raises(OSError) as raised:
        saved.write()
    assert raised.value.errno == errno.EFBIG
    assert raised.value.__notes__ == [f"{saved.path} was not written; what was there before is there still"]
    assert saved.path.read_bytes() == before
    assert os.listdir(saved.path.parent) == [saved.path.name]


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_an_interruption_leaves_the_file_of_before(error, saved):
    before = saved.path.read_bytes()

    def interrupted(begin, end):
        if begin:
            raise error
        return saved.kv(begin, end)

    with pytest.raises(error):
        saved.write(kv=interrupted)
    assert saved.path.read_bytes() == before
    assert os.listdir(saved.path.parent) == [saved.path.name]


def test_a_folder_that_is_not_there(saved):
    saved.path = saved.path.parent / "missing" / "file"
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*missing; make it first"):
        saved.write()


def test_a_link_leads_to_the_new_file(saved, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(saved.path)
    saved.all += 1
    write_prefixes(link, saved.prefixes, saved.kv, SPEC, MODEL)
    assert link.is_symlink()
    assert torch.equal(saved.read_all(), saved.all)


def test_a_single_token(tmp_path):
    prefixes, _ = front_coded([np.array([7], np.int32)])
    kv = torch.ones(1, 48)
    write_prefixes(tmp_path / "one", prefixes, lambda begin, end: kv, SPEC, MODEL)
    assert torch.equal(open_prefixes(tmp_path / "one", SPEC, MODEL, VOCAB).read(0, 1), kv)
