"""Steps of which only the logits are wanted: somebody else samples, and says what each row runs next."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from prefixkit.attention.queries import decode_tree
from prefixkit.attention.uncomputed import choose_queries
from prefixkit.runners.batch import Batch, Outputs
from prefixkit.sampling.params import SamplingParams
from prefixkit.testing.expected import alone, run
from prefixkit.testing.fake_model import VOCAB, logits_after


@pytest.fixture
def rng():
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"rng seed {seed}")
    return np.random.default_rng(seed)


def computed_prompt(runner, tree, tokens, rows):
    """Sequences that share a prompt whose KV is there."""
    sequence = tree.insert(tokens)
    sequences = [sequence, *tree.fork(sequence, rows)]
    step = choose_queries(tree.snapshot(), [], [], 1000)
    runner.launch(Batch(step, np.asarray(tokens, np.int32), Outputs(np.array([len(tokens) - 1]))))
    tree.mark_computed([sequence.node], [len(tokens)])
    np.testing.assert_array_equal(runner.logits[0], logits_after(tokens))
    return sequences[1:]


def decode(runner, tree, sequences, tokens, steps):
    tree.extend_each(sequences, tokens)
    tree.reserve(sequences, [steps] * len(sequences))
    snapshot, nodes = tree.snapshot(), [one.node for one in sequences]
    order = np.argsort([node.index for node in nodes])
    leaves = np.array([nodes[i].index for i in order], np.int32)
    last = np.array(tokens, np.int32)[order]
    runner.launch(Batch(decode_tree(snapshot, leaves), last, Outputs(np.arange(len(order))), steps))
    return order


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 7])
def test_each_row_runs_the_token_that_it_is_given(graphs, rows, decoding, rng):
    made, _ = decoding()
    runner, tree = made.runner if graphs else made.runner.eager, made.store.tree
    runner.start_call()
    prompt = rng.integers(0, VOCAB, 9).tolist()
    sequences = computed_prompt(runner, tree, prompt, rows)
    texts = [[*prompt, int(token)] for token in rng.integers(0, VOCAB, rows)]
    order = decode(runner, tree, sequences, [text[-1] for text in texts], steps=11)
    for _ in range(11):
        np.testing.assert_array_equal(runner.logits, np.stack([logits_after(texts[row]) for row in order]))
        tokens = rng.integers(0, VOCAB, rows)
        for row, token in zip(order, tokens, strict=True):
            texts[row].append(int(token))
        runner.repeat(torch.from_numpy(tokens))
    assert (runner.counters().get("graph_steps", 0) > 0) == graphs


def test_sampled_steps_and_steps_for_logits_have_graphs_of_their_own(decoding, rng):
    made, _ = decoding()
    params = SamplingParams(n=3, max_new_tokens=7, seed=1)
    for first in (10, 11):  # another token than those of prompts whose KV is there
        samples = run(made, [np.arange(9)], params)
        assert [one.tokens for one in samples] == [alone(np.arange(9), params, one.index) for one in samples]
        sequences = computed_prompt(made.runner, made.store.tree, [first, *rng.integers(0, VOCAB, 7).tolist()], 3)
        decode(made.runner, made.store.tree, sequences, [1, 2, 3], steps=4)
        for sequence in [*sequences, *made.store.tree.root.children[0].sequences.values()]:
            if sequence.tree is not None:
                made.store.tree.release(sequence)
    assert made.runner.graphs.captures == 2
