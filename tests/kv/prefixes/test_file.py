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

from prefixkit.kv.kv_pool import KVSpec
from prefixkit.kv.prefixes.file import (
    NotAPrefixFile,
    PrefixFileError,
    PrefixFileMismatch,
    TornPrefixFile,
    open_prefixes,
)
from prefixkit.kv.prefixes.trie import PrefixTrie, trie_of
from prefixkit.kv.prefixes.write import BLOCK, checksum_of, digest_of, write_prefixes

SPEC = KVSpec(num_layers=3, kv_heads=2, head_dim=4)
VOCAB, MODEL = 1000, "fingerprint of a model"


class Saved:
    """Prefixes of 70, 170 and 80 tokens, of which 60 and 130 are shared, with random KV, in a file."""

    def __init__(self, folder, spec=SPEC):
        rng = np.random.default_rng(0)
        first = rng.integers(0, VOCAB - 1, 170)
        second = np.concatenate([first[:60], [VOCAB - 1], first[:19]])
        self.spec, self.path = spec, folder / "prefixes.safetensors"
        self.trie, _ = trie_of([first, second, first[:130]])
        shape = (spec.num_layers, len(self.trie.tokens), spec.kv_heads, spec.head_dim)
        self.k, self.v = (torch.randn(shape).to(spec.dtype) for _ in range(2))
        self.asked = []
        self.write()

    def kv(self, begin, end):
        self.asked.append((begin, end))
        return self.k[:, begin:end], self.v[:, begin:end]

    def write(self, **changes):
        given = {"trie": self.trie, "kv": self.kv, "spec": self.spec, "fingerprint": MODEL, **changes}
        write_prefixes(self.path, **given)

    def open(self, **changes):
        given = {"spec": self.spec, "fingerprint": MODEL, "vocab_size": VOCAB, **changes}
        return open_prefixes(self.path, **given)

    def read_all(self):
        with self.open() as file:
            return file.read(0, len(file.trie.tokens))

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
        arrays = [held[name].numpy() for name in ("parents", "lengths", "tokens", "checksums") if name in held]
        save_file(held, self.path, facts | {"checksum": checksum_of(facts, arrays)})


@pytest.fixture
def saved(tmp_path):
    return Saved(tmp_path)


# -- what is written is read -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_round_trip(dtype, tmp_path):
    saved = Saved(tmp_path, replace(SPEC, dtype=dtype))
    with saved.open() as file:
        assert file.spec == saved.spec
        for name in ("parents", "lengths", "tokens", "starts", "offsets"):
            assert np.array_equal(getattr(file.trie, name), getattr(saved.trie, name))
        for node in range(len(file.trie)):
            begin, end = file.trie.span(node)
            k, v = file.read(begin, end)
            assert k.dtype == v.dtype == dtype
            assert torch.equal(k, saved.k[:, begin:end])
            assert torch.equal(v, saved.v[:, begin:end])


def test_any_range_of_tokens(saved):
    count = len(saved.trie.tokens)
    with saved.open() as file:
        for begin, end in [
            (0, 1),
            (BLOCK - 1, BLOCK + 1),
            (BLOCK, 2 * BLOCK),
            (count - 1, count),
            (0, count),
            (7, 150),
        ]:
            k, v = file.read(begin, end)
            assert torch.equal(k, saved.k[:, begin:end])
            assert torch.equal(v, saved.v[:, begin:end])


def test_safetensors_reads_it_too(saved):
    tensors = load_file(saved.path)
    assert torch.equal(tensors["k"], saved.k)
    assert torch.equal(tensors["v"], saved.v)
    assert tensors["tokens"].tolist() == saved.trie.tokens.tolist()


def test_kv_is_asked_for_in_blocks_and_in_order(saved):
    count = len(saved.trie.tokens)
    assert saved.asked == [(at, min(at + BLOCK, count)) for at in range(0, count, BLOCK)]


def test_what_was_read_is_a_copy_and_outlives_the_file(saved):
    with saved.open() as file:
        k, _ = file.read(0, 5)
    k += 1
    assert torch.equal(saved.read_all()[0], saved.k)
    with pytest.raises(ValueError, match=r"prefixes.safetensors is closed; open it again"):
        file.read(0, 5)


@pytest.mark.parametrize(("begin", "end"), [(-1, 3), (3, 3), (5, 3), (0, 10**6)])
def test_ranges_outside_of_the_file(begin, end, saved):
    with saved.open() as file, pytest.raises(ValueError, match=f"tokens {begin} to {end} asked, of 190"):
        file.read(begin, end)


def test_a_file_is_mapped_and_kv_is_checked_when_it_is_read(saved):
    saved.flip(saved.place("k")[0] + BLOCK * SPEC.kv_heads * SPEC.head_dim * 4)
    with saved.open() as file:
        with open("/proc/self/maps") as maps:
            assert str(saved.path) in maps.read()
        assert torch.equal(file.read(0, BLOCK)[0], saved.k[:, :BLOCK])
        assert torch.equal(file.read(2 * BLOCK, 190)[1], saved.v[:, 2 * BLOCK :])
        with pytest.raises(
            TornPrefixFile, match=r"the KV of tokens 64 to 128 has another checksum.*save its prefixes again"
        ):
            file.read(BLOCK - 1, BLOCK + 1)


def test_short_nodes_of_one_block_are_checked_together(saved):
    with saved.open() as file:
        file.read(0, 1)
        saved.flip(saved.place("k")[0])
        for at in range(1, BLOCK):
            assert torch.equal(file.read(at, at + 1)[0], saved.k[:, at : at + 1]), "it is what was checked"
        file.read(BLOCK, BLOCK + 1)
        with pytest.raises(TornPrefixFile):
            file.read(0, 1)


def test_a_file_that_is_replaced_while_it_is_open(saved):
    with saved.open() as file:
        before = saved.k.clone()
        saved.k += 1
        saved.write()
        assert torch.equal(file.read(0, 190)[0], before)
    assert torch.equal(saved.read_all()[0], before + 1)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fingerprint": "f" * 64}, "saved from another model.*fingerprint is fingerprint of a, .*model's is ffff"),
        (
            {"spec": replace(SPEC, dtype=torch.float16)},
            "KV in float32, and the model's is float16; load the model in float32",
        ),
        ({"spec": replace(SPEC, num_layers=2)}, "num_layers 3, .*the model has num_layers 2, kv_heads 2, head_dim 4"),
        ({"spec": replace(SPEC, kv_heads=1)}, "kv_heads 2, .*the model has num_layers 3, kv_heads 1, head_dim 4"),
        ({"spec": replace(SPEC, head_dim=8)}, "head_dim 4, .*the model has num_layers 3, kv_heads 2, head_dim 8"),
        ({"vocab_size": VOCAB - 1}, "holds token 999, outside of the model's vocabulary of 999"),
    ],
    ids=["fingerprint", "dtype", "layers", "heads", "head_dim", "vocabulary"],
)
def test_a_file_of_another_model(changes, message, saved):
    with pytest.raises(PrefixFileMismatch, match=message):
        saved.open(**changes)


def test_the_device_is_no_part_of_the_layout(saved):
    with saved.open(spec=replace(SPEC, device=torch.device("meta"))) as file:
        assert file.read(0, 1)[0].device.type == "cpu"


def test_a_file_of_a_newer_version(saved):
    saved.rewrite({"format_version": "2", "prefixkit": "9.0"})
    with pytest.raises(
        PrefixFileMismatch, match=r"format version 2, written by prefixkit 9.0; .*reads up to 1: update it"
    ):
        saved.open()


@pytest.mark.parametrize("content", [b"", b"{}", os.urandom(1000), (2).to_bytes(8, "little") + b"{}"])
def test_files_of_other_formats(content, saved):
    saved.path.write_bytes(content)
    with pytest.raises(NotAPrefixFile, match=r"no prefix file.*pass one that"):
        saved.open()


def test_other_files_in_safetensors(saved):
    save_file({"k": saved.k}, saved.path)
    with pytest.raises(NotAPrefixFile, match="in safetensors, but no prefix file"):
        saved.open()


def test_a_file_that_is_not_there(tmp_path, saved):
    saved.path.unlink()
    with pytest.raises(FileNotFoundError):
        saved.open()


def test_every_byte_of_the_header_and_of_the_arrays(saved):
    """A flipped bit anywhere but in K and V is found when the file is opened."""
    end, _ = saved.header()
    places = [*range(end)]
    for name in ("parents", "lengths", "tokens", "checksums"):
        places += range(*saved.place(name))
    for at in places:
        saved.flip(at)
        with pytest.raises(PrefixFileError):
            saved.open()
        saved.flip(at)
    assert torch.equal(saved.read_all()[0], saved.k)


@pytest.mark.parametrize("name", ["k", "v"])
def test_bytes_of_kv(name, saved):
    begin, end = saved.place(name)
    for at in [begin, *range(begin + 5, end, 997), end - 1]:
        saved.flip(at)
        with pytest.raises(TornPrefixFile, match="has another checksum"):
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
        with pytest.raises(TornPrefixFile, match="cut off or changed; delete it and save its prefixes again"):
            saved.open()


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"parents": torch.tensor([0, 0, 0, 0])}, "node 0 has parent 0"),
        ({"parents": torch.tensor([-1, 0, 10**9, 0])}, "node 2 has parent 1000000000"),
        ({"parents": torch.tensor([-1, 0])}, "got 2 and 4"),
        ({"parents": torch.tensor([[-1, 0, 1, 0]])}, "one-dimensional"),
        ({"lengths": torch.tensor([60, 71, 40, 20])}, "the nodes have 191 tokens, but there are 190"),
        ({"lengths": torch.tensor([60, 2**62, 40, 20])}, "node 1 has"),
        ({"tokens": torch.full((190,), -1, dtype=torch.int32)}, "token -1 at 0"),
        ({"tokens": torch.zeros(190, dtype=torch.int32)}, "the same first token"),
        ({"tokens": torch.zeros(190, dtype=torch.int64)}, "tokens are I64, not I32"),
        ({"tokens": torch.zeros(10**6, dtype=torch.int32)}, "its k is"),
        ({"tokens": torch.zeros(0, dtype=torch.int32)}, "its k is"),
        ({"k": torch.zeros(3, 190, 2, 5)}, "its k is"),
        ({"v": torch.zeros(3, 190, 2, 4, dtype=torch.float16)}, "its v is"),
        ({"k": torch.zeros(0)}, "its k is"),
        ({"checksums": torch.zeros(2, 32, dtype=torch.uint8)}, "190 tokens have no"),
        ({"more": torch.zeros(1)}, "its parts are not those of a prefix file: more"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_tensors_made_by_hand(tensors, reason, saved):
    saved.rewrite(**tensors)
    with pytest.raises(TornPrefixFile, match=reason):
        saved.open()


@pytest.mark.parametrize(
    "facts",
    [{"num_layers": "x"}, {"num_layers": "-3"}, {"num_layers": "9" * 5000}, {"block": "1"}, {"dtype": "int8"}]
    + [{"format_version": version} for version in ("", "one", "0", "-1", "1.5")],
    ids=lambda facts: str(facts)[:30],
)
def test_metadata_made_by_hand(facts, saved):
    saved.rewrite(facts)
    with pytest.raises(TornPrefixFile):
        saved.open()


def test_a_vocabulary_is_checked_in_files_made_by_hand(saved):
    tokens = torch.from_numpy(saved.trie.tokens.copy())
    tokens[5] = 2**31 - 1
    saved.rewrite(tokens=tokens)
    with pytest.raises(PrefixFileMismatch, match="holds token 2147483647"):
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
    saved.k += 1
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda k: k[:, 1:], r"k of tokens 0 to 64 must be torch.float32 \[3, 64, 2, 4\], got .* \[3, 63, 2, 4\]"),
        (lambda k: k.half(), r"must be torch.float32 .*, got torch.float16"),
        (lambda k: k.transpose(0, 1), r"got torch.float32 \[64, 3, 2, 4\]"),
    ],
)
def test_kv_of_another_form(change, message, saved):
    before = saved.path.read_bytes()

    def changed(begin, end):
        k, v = saved.kv(begin, end)
        return change(k), v

    with pytest.raises(ValueError, match=message):
        saved.write(kv=changed)
    assert saved.path.read_bytes() == before


def test_a_folder_that_is_not_there(saved):
    saved.path = saved.path.parent / "missing" / "file"
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*missing; make it first"):
        saved.write()


def test_a_link_leads_to_the_new_file(saved, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(saved.path)
    saved.k += 1
    write_prefixes(link, saved.trie, saved.kv, SPEC, MODEL)
    assert link.is_symlink()
    assert torch.equal(saved.read_all()[0], saved.k)


def test_kv_that_is_a_view_of_pages(saved):
    """As a pool gives it: not contiguous, and of inference mode."""
    with torch.inference_mode():
        pages = saved.k.transpose(1, 2).contiguous().transpose(1, 2)
    saved.write(kv=lambda begin, end: (pages[:, begin:end], saved.v[:, begin:end]))
    assert torch.equal(saved.read_all()[0], saved.k)


def test_a_single_token(tmp_path):
    trie = PrefixTrie(np.array([-1]), np.array([1]), np.array([7]))
    k, v = torch.ones(3, 1, 2, 4), torch.zeros(3, 1, 2, 4)
    write_prefixes(tmp_path / "one", trie, lambda begin, end: (k, v), SPEC, MODEL)
    with open_prefixes(tmp_path / "one", SPEC, MODEL, VOCAB) as file:
        assert torch.equal(file.read(0, 1)[0], k)
        assert digest_of(file.read(0, 1)) == digest_of([k, v])
