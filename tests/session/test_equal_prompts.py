"""Equal prompts are numbered, in one pass."""

import numpy as np

from prefixkit.session.prompts import occurrences


def arrays(*prompts):
    return [np.array(prompt, dtype=np.int32) for prompt in prompts]


def test_equal_prompts_are_counted_in_their_order():
    assert occurrences(arrays([1, 2], [1], [1, 2], [2, 1], [1], [1, 2])) == [0, 0, 1, 0, 1, 2]
    assert occurrences([]) == []


def test_prompts_are_equal_by_their_tokens_and_length():
    assert occurrences(arrays([0], [0, 0], [0, 0, 0], [0, 0])) == [0, 0, 0, 1]
