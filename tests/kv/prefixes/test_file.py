"""Prefix files: what is written is read again, and a failure while a file is written leaves the one before."""

from __future__ import annotations

import errno
import os
import resource
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from prefixkit.kv.prefixes.file import PrefixFileError, open_prefixes
from prefixkit.kv.prefixes.front_coding import front_coded
from prefixkit.kv.prefixes.write import BLOCK, write_prefixes
from tests.kv.prefixes.saved import MODEL, SPEC, VOCAB, Saved

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
