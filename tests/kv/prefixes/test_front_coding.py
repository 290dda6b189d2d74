"""Token sequences by front coding."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from prefixkit.kv.prefixes.front_coding import front_coded

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=12)


def arrays(sequences):
    return [np.array(sequence, np.int32) for sequence in sequences]


def test_sequences_are_in_order_without_what_they_share():
    coded, sources = front_coded(arrays([[5, 6, 7, 8], [5, 6, 9], [5, 6], [1], [300, 2], [5, 6, 9]]))
    assert coded.lengths.tolist() == [1, 4, 3, 2]
    assert coded.shared.tolist() == [0, 0, 2, 0]
    assert coded.tokens.tolist() == [1, 5, 6, 7, 8, 9, 300, 2]
    assert sources == [3, 0, 1, 4]
    assert [(tokens.tolist(), *where) for tokens, *where in coded] == [
        ([1], 0, 0),
        ([5, 6, 7, 8], 0, 1),
        ([5, 6, 9], 2, 5),
        ([300, 2], 0, 6),
    ]


@given(SEQUENCES)
def test_each_shared_token_is_there_once(sequences):
    coded, sources = front_coded(arrays(sequences))
    begins = {tuple(sequence[:end]) for sequence in sequences for end in range(1, len(sequence) + 1)}
    assert len(coded.tokens) == len(begins)
    assert [tokens.tolist() for tokens, *_ in coded] == [sequences[source] for source in sources]
    assert {tuple(sequences[source]) for source in sources} == {
        one for one in begins if not any(other[: len(one)] == one and other != one for other in begins)
    }


def test_long_sequences_that_begin_one_another():
    tokens = np.arange(5000, dtype=np.int32)
    coded, sources = front_coded([tokens[:end] for end in range(1, 5001)])
    assert sources == [4999]
    assert np.array_equal(coded.tokens, tokens)
