"""Log-probabilities of wanted tokens: those of torch over all rows at once."""

import numpy as np
import pytest
import torch

from prefixkit.runners.targets import score_targets


@pytest.mark.parametrize("vocab", [7, 70_000, 600_000], ids=["one part", "parts of several rows", "parts of one row"])
def test_targets_get_the_log_probabilities_of_their_rows(vocab):
    seed = np.random.SeedSequence().entropy
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.standard_normal((20, vocab)).astype(np.float32))
    logits[3, [2, 5]] = logits[3].amax()  # of equals the first counts
    rows, tokens = rng.integers(0, 20, 60), rng.integers(0, vocab, 60)  # in no order, some twice, some never
    rows[:3], tokens[:3] = 3, [2, 5, 2]
    tokens[30:] = logits.argmax(-1).numpy()[rows[30:]]
    logprobs, greedy = score_targets(logits, rows, tokens)
    assert torch.equal(logprobs, torch.log_softmax(logits, -1)[rows, tokens])
    assert torch.equal(greedy, logits.argmax(-1)[rows] == torch.from_numpy(tokens))


def test_no_targets():
    logprobs, greedy = score_targets(torch.zeros(2, 5), np.zeros(0, np.int64), np.zeros(0, np.int64))
    assert len(logprobs) == len(greedy) == 0
