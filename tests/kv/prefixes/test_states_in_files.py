"""Prefix files with states: what is written is read again; what is torn, or of a model with others, is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from prefixkit.kv.prefixes.file import PrefixFileError
from prefixkit.kv.prefixes.write import StatePlaces
from prefixkit.kv.state_pool import StatePool, StateTensor
from tests.kv.prefixes.saved import SPEC, Saved

CONVOLUTION = StateTensor(False, 0, (6, 3), torch.bfloat16)
RECURRENT = StateTensor(True, 0, (2, 4, 5), torch.float32)
COUNT = StateTensor(True, 1, (1,), torch.int64)
STATES = ((CONVOLUTION, RECURRENT), (COUNT,), (CONVOLUTION, RECURRENT))
NAMES = [
    *("states.0.convolution.0", "states.0.recurrent.0", "states.1.recurrent.1"),
    *("states.2.convolution.0", "states.2.recurrent.0"),
]
# Of prefixes of 170 and 80 tokens, of which the second shares 60.
PLACES = StatePlaces(np.array([1, 0, 0, 0]), np.array([80, 170, 60, 1]))


class SavedStates(Saved):
    def __init__(self, folder, spec=SPEC):
        self.places, self.pool = PLACES, StatePool(STATES, [torch.device("cpu")] * 3)
        self.pool.grow(9)
        self.slots = np.array([3, 9, 1, 4])
        for module in self.pool.tensors:
            for tensor in module:
                tensor.copy_(torch.randint(-999, 999, tensor.shape))
        super().__init__(folder, replace(spec, states=STATES))

    def states(self, number, begin, end):
        return self.pool.read_one(number, self.slots[begin:end])

    def write(self, **changes):
        super().write(**{"places": self.places, "states": self.states, **changes})


@pytest.fixture
def saved(tmp_path):
    return SavedStates(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_round_trip(dtype, tmp_path):
    saved = SavedStates(tmp_path, replace(SPEC, dtype=dtype))
    file = saved.open()
    assert np.array_equal(file.places.prefix, PLACES.prefix)
    assert np.array_equal(file.places.position, PLACES.position)
    assert torch.equal(file.read(0, 190), saved.all)
    for number, slot in enumerate(saved.slots):
        for ours, theirs in zip(file.read_state(number), saved.pool.read(np.array([slot])), strict=True):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs)


def test_safetensors_reads_states_by_their_names(saved):
    tensors = load_file(saved.path)
    assert [*tensors.keys() & set(NAMES)] and set(NAMES) <= tensors.keys()
    for name, expected in zip(NAMES, saved.pool.read(saved.slots), strict=True):
        assert tensors[name].dtype == expected.dtype
        assert torch.equal(tensors[name], expected)


def test_all_tensors_are_aligned(saved):
    _, header = saved.header()
    sizes = {"I64": 8, "I32": 4, "F32": 4, "BF16": 2, "U8": 1}
    for name, facts in header.items():
        assert name == "__metadata__" or facts["data_offsets"][0] % sizes[facts["dtype"]] == 0, name


def test_files_without_states_stay_of_the_version_before(tmp_path):
    _, header = Saved(tmp_path).header()
    assert header["__metadata__"]["format_version"] == "2"
    assert not [name for name in header if "state" in name]


def test_no_state_at_all(saved):
    saved.places = StatePlaces(np.empty(0, np.int64), np.empty(0, np.int64))
    saved.write()
    file = saved.open()
    assert len(file.places.prefix) == 0
    assert torch.equal(file.read(0, 190), saved.all)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ((), "holds states of 2 modules of .*, and layers of the model keep none"),
        (STATES[:2], "2 modules of convolution 6 x 3 .*, and layers of the model keep 1 modules of convolution 6 x 3"),
        (
            ((CONVOLUTION, replace(RECURRENT, shape=(2, 4, 6))), *STATES[1:]),
            "recurrent 2 x 4 x 5 torch.float32, .*keep 1 modules of .*recurrent 2 x 4 x 6 torch.float32",
        ),
        (
            ((replace(CONVOLUTION, dtype=torch.float32), RECURRENT), *STATES[1:]),
            "convolution 6 x 3 torch.bfloat16 and .*keep 1 modules of convolution 6 x 3 torch.float32 and",
        ),
    ],
    ids=["none", "fewer", "shape", "dtype"],
)
def test_a_file_of_a_model_with_other_states(states, message, saved):
    with pytest.raises(PrefixFileError, match=message):
        saved.open(spec=replace(saved.spec, states=states))


def test_a_file_without_states_for_a_model_that_keeps_some(tmp_path, saved):
    (tmp_path / "without").mkdir()
    before = Saved(tmp_path / "without")
    with pytest.raises(
        PrefixFileError, match=r"holds no states \(prefixkit .*, format version 2\), .*keep 2 modules of .*save its"
    ):
        before.open(spec=saved.spec)


def test_every_byte_that_says_where_states_are(saved):
    for name in ("state_prefix", "state_position", "state_checksums"):
        for at in range(*saved.place(name)):
            saved.flip(at)
            with pytest.raises(PrefixFileError, match="its header has another checksum"):
                saved.open()
            saved.flip(at)
    saved.open()


def test_bytes_of_states(saved):
    """Each is of one state, and no other is refused for it."""
    for name in NAMES:
        begin, end = saved.place(name)
        size = (end - begin) // 4
        for number, after in enumerate(("80 tokens of prefix 1", "170 tokens of prefix 0", "60 tokens", "1 tokens")):
            at = begin + number * size + size // 2
            saved.flip(at)
            file = saved.open()
            with pytest.raises(PrefixFileError, match=f"the state after {after}.* has another checksum"):
                file.read_state(number)
            for other in {0, 1, 2, 3} - {number}:
                file.read_state(other)
            saved.flip(at)


def test_a_file_that_was_cut_off(saved):
    whole = saved.path.read_bytes()
    for size in (len(whole) - 1, len(whole) - 130, saved.place(NAMES[0])[0] + 1, saved.place(NAMES[1])[0] + 1):
        saved.path.write_bytes(whole[:size])
        with pytest.raises(PrefixFileError, match="cut off or changed; delete it and save its prefixes again"):
            saved.open()


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"state_prefix": torch.tensor([1, 0, 0, 2])}, "its states do not follow"),
        ({"state_prefix": torch.tensor([1, 0, 0, -1])}, "its states do not follow"),
        ({"state_position": torch.tensor([80, 170, 60, 0])}, "its states do not follow"),
        ({"state_position": torch.tensor([81, 170, 60, 1])}, "its states do not follow"),
        ({"state_position": torch.tensor([60, 170, 60, 1])}, "its states do not follow"),
        ({"state_position": torch.tensor([80, 170, 60, 60])}, "its states do not follow"),
        ({"state_prefix": torch.tensor([1, 0, 0])}, "its tensors are"),
        ({"state_position": torch.tensor([80.0, 170, 60, 1])}, "its tensors are"),
        ({NAMES[0]: torch.zeros(4, 6, 4, dtype=torch.bfloat16)}, "its tensors are"),
        ({NAMES[0]: torch.zeros(4, 6, 3)}, "its tensors are"),
        ({NAMES[1]: torch.zeros(3, 2, 4, 5)}, "its tensors are"),
        ({"states.3.recurrent.0": torch.zeros(4, 2, 4, 5)}, "its tensors are"),
    ],
)
def test_tensors_made_by_hand(tensors, reason, saved):
    saved.rewrite(**tensors)
    with pytest.raises(PrefixFileError, match=reason):
        saved.open()
