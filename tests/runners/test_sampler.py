"""The likeliest tokens of each row."""

import pytest
import torch

from prefixkit.runners.sampler import top_tokens


@pytest.mark.parametrize("vocab", [260, 2048], ids=["token by token", "by blocks"])
def test_the_likeliest_tokens_come_best_first(vocab):
    seed = torch.seed()
    print(f"seed {seed}")
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(seed))
    logits[1, 3] = torch.nan
    logits[2] = -torch.inf
    logits[2, 300 % vocab] = 1.0
    logprobs = torch.log_softmax(logits, -1)
    ids, scores = top_tokens(logits, 6, logprobs.amax(-1))
    rows = [0, 3, 4]
    expected = logprobs.topk(6)
    assert torch.equal(ids[rows], expected.indices[rows])
    torch.testing.assert_close(scores[rows], expected.values[rows])
    assert ids[1, 0] == 3
    assert ids[2, 0] == 300 % vocab
