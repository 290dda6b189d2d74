"""Scoring over a fake model: right log-probabilities in any tree, each shared token computed once, all given back."""

from itertools import product

import numpy as np
import pytest
import torch

from prefixkit.engine.request import BeamParams
from prefixkit.engine.scoring.score import MOST_LOGIT_BYTES, logit_bytes
from prefixkit.engine.sharing_report import Report
from prefixkit.kv.budget import KVBudgetTooSmall
from prefixkit.sampling.params import SamplingParams
from prefixkit.testing.expected import assert_all_given_back, run
from prefixkit.testing.fake_model import VOCAB, logits_after, make_engine
from tests.covering import pairwise_cover


def random_texts(seed, prompts=5, most=6):
    """Prompts that share heads, one of which goes on where another's continuation ends, and their continuations."""
    print("seed", seed)
    rng = np.random.default_rng(seed)
    head = tokens_of(rng, 21)
    texts = [np.concatenate([head, tokens_of(rng, rng.integers(1, 9))]) for _ in range(prompts - 3)]
    texts += [texts[0], head[:13], head[:1]]
    stems = [tokens_of(rng, rng.integers(1, 6)) for _ in range(3)]
    each = [[continuation(rng, stems) for _ in range(rng.integers(1, most))] for _ in texts]
    each[0].append(each[0][0])
    each[-2] += [head[13:20], np.concatenate([head[13:], texts[0][21:]])]
    texts.append(np.concatenate([texts[1], each[1][0], tokens_of(rng, 3)]))
    each.append([tokens_of(rng, 1), tokens_of(rng, 9)])
    return texts, each


def tokens_of(rng, count):
    return rng.integers(0, VOCAB, count).astype(np.int32)


def continuation(rng, stems):
    return np.concatenate([stems[rng.integers(len(stems))], tokens_of(rng, rng.integers(0, 7))])


def alone(prompt, tokens):
    """Log-probability of each token, and whether it is the likeliest, computed by themselves."""
    logits = torch.from_numpy(np.stack([logits_after([*prompt, *tokens[:i]]) for i in range(len(tokens))]))
    logprobs = torch.log_softmax(logits, -1).numpy()[np.arange(len(tokens)), tokens]
    return logprobs.tolist(), (logits.argmax(-1).numpy() == tokens).tolist()


def prefixes_of(prompts, continuations):
    """The distinct prefixes whose last token has to run, and those of them after which logits are wanted."""
    run, wanted = set(), set()
    for prompt, each in zip(prompts, continuations, strict=True):
        for tokens in each:
            whole = [*prompt.tolist(), *tokens.tolist()]
            run |= {tuple(whole[:end]) for end in range(1, len(whole))}
            wanted |= {tuple(whole[:end]) for end in range(len(prompt), len(whole))}
    return run, wanted


def assert_right(scores, prompts, continuations):
    assert [len(each) for each in scores] == [len(each) for each in continuations]
    for prompt, own, each in zip(prompts, scores, continuations, strict=True):
        for found, tokens in zip(own, each, strict=True):
            assert found.tokens.tolist() == tokens.tolist()
            assert (found.logprobs.tolist(), found.greedy.tolist()) == alone(prompt, tokens)


def told(scores):
    return [[(one.tokens.tolist(), one.logprobs.tolist(), one.greedy.tolist()) for one in each] for each in scores]


def assert_computed_once(model, prompts, continuations):
    expected, _ = prefixes_of(prompts, continuations)
    assert set(model.computed) == expected and max(model.computed.values()) == 1


CASES = product(range(6), (1, 3, 16), (1, 7, 1024), (1, 5, 1000))


@pytest.mark.drawn(3)
@pytest.mark.parametrize(("seed", "page_size", "chunk", "rows"), pairwise_cover(CASES))
def test_each_continuation_scores_as_if_alone_and_each_distinct_token_is_computed_once(seed, page_size, chunk, rows):
    prompts, continuations = random_texts(seed)
    engine, model = make_engine(page_size=page_size, prefill_chunk=chunk)
    scores = engine.score(prompts, continuations, vocab=MOST_LOGIT_BYTES // 4 // rows)
    assert_right(scores, prompts, continuations)
    assert_computed_once(model, prompts, continuations)
    assert max(model.rows_per_step) <= chunk and max(model.logits_per_step) <= rows
    assert sum(model.logits_per_step) == len(prefixes_of(prompts, continuations)[1])
    assert_all_given_back(engine)


def test_logits_of_a_gpu_take_a_quarter_of_its_free_memory_within_limits():
    assert [logit_bytes(free) for free in (0, 2**31, 2**40)] == [MOST_LOGIT_BYTES, 2**29, 2**30]


@pytest.mark.parametrize("num_pages", [13, 15, 20, 40])
@pytest.mark.parametrize("seed", range(4))
def test_contexts_that_do_not_fit_together_take_turns(seed, num_pages):
    prompts, continuations = random_texts(seed)
    engine, model = make_engine(num_pages=num_pages, page_size=4)
    assert_right(engine.score(prompts, continuations, VOCAB), prompts, continuations)
    _, wanted = prefixes_of(prompts, continuations)
    assert sum(model.logits_per_step) == len(wanted), "no logits are computed twice"
    assert_all_given_back(engine)


def test_what_follows_on_the_same_prefix_finds_it_in_a_pool_that_holds_little_more():
    rng = np.random.default_rng(0)
    prompt, continuations = tokens_of(rng, 64), [tokens_of(rng, 9) for _ in range(40)]
    engine, model = make_engine(num_pages=24, page_size=4)
    assert_right(engine.score([prompt], [continuations], VOCAB), [prompt], [continuations])
    assert_computed_once(model, [prompt], [continuations])
    assert len(model.rows_per_step) > 4


def test_the_order_of_prompts_and_continuations_does_not_matter():
    prompts, continuations = random_texts(7)
    forward = told(make_engine()[0].score(prompts, continuations, VOCAB))
    engine = make_engine(page_size=16, prefill_chunk=9)[0]
    backward = told(engine.score(prompts[::-1], [each[::-1] for each in continuations[::-1]], VOCAB))
    assert [each[::-1] for each in backward[::-1]] == forward


def sampled(engine, prompts, continuations):
    """Prompts that requests have left in the prefix cache."""
    run(engine, prompts, SamplingParams(n=2, max_new_tokens=5))


def searched(engine, prompts, continuations):
    run(engine, prompts, BeamParams(num_beams=3, max_new_tokens=5))


def scored(engine, prompts, continuations):
    engine.score(prompts, continuations, VOCAB)


def scored_in_part(engine, prompts, continuations):
    engine.score(prompts[::2], [each[:1] for each in continuations[::2]], VOCAB)


def pinned(engine, prompts, continuations):
    """Prompts and continuations with KV, some of which end within others."""
    engine.score(prompts, continuations, VOCAB)
    for prompt, each in zip(prompts, continuations, strict=True):
        engine.store.pin(np.concatenate([prompt, each[0][:2]]))


def uncomputed(engine, prompts, continuations):
    """Sequences of others whose tokens have no KV yet."""
    for prompt, each in zip(prompts, continuations, strict=True):
        engine.store.tree.insert(np.concatenate([prompt, each[-1]]))


def computed_in_part(engine, prompts, continuations):
    """Sequences whose nodes have KV of some tokens only, and which others continue on siblings of equal tokens."""
    engine.score(prompts, continuations, VOCAB)
    for prompt, each in zip(prompts, continuations, strict=True):
        base = engine.store.tree.insert(prompt)
        for fork in engine.store.tree.fork(base, 3):
            engine.store.tree.extend(fork, each[0])
    engine.store.tree.mark_computed((nodes := engine.store.tree.nodes()), [node.computed // 2 for node in nodes])
    lacking = [node for node in nodes if node.parent is not None and node.parent.computed < node.parent.length]
    engine.store.tree.mark_computed(lacking, [0] * len(lacking))


BEFORE = sampled, searched, scored, scored_in_part, pinned, uncomputed, computed_in_part


@pytest.mark.drawn(4)
@pytest.mark.parametrize(
    ("before", "seed", "page_size", "chunk", "num_pages"),
    pairwise_cover(product(BEFORE, range(4), (1, 4, 16), (3, 1024), (None, 60))),
)
def test_scores_do_not_depend_on_what_the_tree_holds(before, seed, page_size, chunk, num_pages):
    prompts, continuations = random_texts(seed)
    pages = 4096 if num_pages is None else num_pages * 16 // page_size
    engine, model = make_engine(num_pages=pages, page_size=page_size, prefill_chunk=chunk)
    before(engine, prompts, continuations)
    sequences = set(sequences_of(engine.store.tree))
    model.computed.clear()
    model.logits_per_step.clear()
    assert_right(engine.score(prompts, continuations, VOCAB), prompts, continuations)
    _, wanted = prefixes_of(prompts, continuations)
    assert sum(model.logits_per_step) == len(wanted)
    assert set(sequences_of(engine.store.tree)) == sequences
    for sequence in sequences:
        engine.store.tree.release(sequence)
    assert_all_given_back(engine)


def sequences_of(tree):
    nodes = [tree.root]
    for node in nodes:
        nodes.extend(node.children)
    return [sequence for node in nodes for sequence in node.sequences.values()]


def test_of_what_has_kv_only_tokens_run_again_whose_logits_are_wanted_and_they_write_nothing():
    prompts, continuations = random_texts(3)
    engine, model = make_engine()
    first = told(engine.score(prompts, continuations, VOCAB))
    engine.report, written = Report(), set()

    def watched(step):
        written.update(step.slots.tolist())
        return model(step)

    model.computed.clear()
    engine.runner.model = watched
    assert told(engine.score(prompts, continuations, VOCAB)) == first
    assert written == {-1}
    _, wanted = prefixes_of(prompts, continuations)
    assert set(model.computed) == wanted and max(model.computed.values()) == 1
    assert engine.report.tokens_computed == len(wanted)


def test_a_report_counts_a_call():
    prompts, continuations = random_texts(2)
    engine, model = make_engine(prefill_chunk=16)
    engine.score(prompts, continuations, VOCAB)
    report = engine.report
    assert report.prompts == len(prompts) and report.samples == report.new_tokens == 0
    assert report.steps == len(model.rows_per_step) and report.tokens_computed == sum(model.rows_per_step)
    alone = [len(prompt) + len(one) - 1 for prompt, each in zip(prompts, continuations, strict=True) for one in each]
    assert report.tokens_plain_batch == sum(alone)
    assert 0 < report.kv_bytes_read < report.kv_bytes_read_unshared
    assert 0 < report.kv_bytes_held_peak < report.kv_bytes_unshared_peak
    assert report.seconds > 0 and report.plans > 0
    engine.report = Report()
    engine.score(prompts, continuations, VOCAB)
    assert engine.report.prompt_tokens_found == engine.report.prompt_tokens > 0


def test_a_context_that_does_not_fit_alone_is_refused_before_anything_runs():
    rng = np.random.default_rng(0)
    engine, model = make_engine(num_pages=10, page_size=4)
    prompts, fits = [tokens_of(rng, 8), tokens_of(rng, 30)], tokens_of(rng, 11)
    with pytest.raises(KVBudgetTooSmall, match=r"prompt 1 of 30 tokens with its continuation 1 of 12 .* 44 tokens"):
        engine.score(prompts, [[fits], [fits, tokens_of(rng, 12)]], VOCAB)
    assert not model.rows_per_step
    assert_right(engine.score(prompts, [[fits]] * 2, VOCAB), prompts, [[fits]] * 2)
    assert_all_given_back(engine)


def test_what_sequences_hold_is_no_room_but_their_own_beginning_is_found():
    rng = np.random.default_rng(0)
    engine, model = make_engine(num_pages=10, page_size=4)
    held, other, more = tokens_of(rng, 20), tokens_of(rng, 20), [tokens_of(rng, 6)]
    engine.score([held], [more], VOCAB)
    pin = engine.store.pin(held)
    steps = len(model.rows_per_step)
    with pytest.raises(KVBudgetTooSmall, match="beside 5 pages of pinned prefixes"):
        engine.score([other], [more], VOCAB)
    assert len(model.rows_per_step) == steps
    assert_right(engine.score([held], [more], VOCAB), [held], [more])
    engine.store.tree.release(pin)
    assert_right(engine.score([other], [more], VOCAB), [other], [more])
    assert_all_given_back(engine)


def test_the_report_says_what_was_scored():
    prompts, continuations = random_texts(1)
    engine, _ = make_engine()
    engine.score(prompts, continuations, VOCAB)
    scored = sum(map(len, continuations))
    told = (
        f"{scored} continuations of {len(prompts)} prompts scored, {engine.report.tokens_computed} tokens computed in"
    )
    assert engine.report.headline.startswith(told)
    assert engine.report.scored == scored


@pytest.mark.parametrize("at", [0, 1, 5])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_step_that_fails_leaves_nothing_behind(error, at):
    prompts, continuations = random_texts(1)
    engine, model = make_engine(num_pages=60, prefill_chunk=8)

    def fails(step):
        if len(model.rows_per_step) == at:
            raise error("mine")
        return model(step)

    engine.runner.model = fails
    with pytest.raises(error, match="mine"):
        engine.score(prompts, continuations, VOCAB)
    assert_all_given_back(engine)
    engine.runner.model = model
    assert_right(engine.score(prompts, continuations, VOCAB), prompts, continuations)


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_broken_logits_are_said_by_the_token_that_they_come_before(broken):
    prompts, continuations = random_texts(4)
    engine, model = make_engine()
    prefix = (*prompts[2].tolist(), *continuations[2][0].tolist()[:1])
    continuations[2] = [prompts[0][:1], continuations[2][0]]

    def breaks(step):
        logits, seen = model(step), model.seen_by_rows(step)
        for row, at in enumerate(step.logit_rows.tolist()):
            if tuple(seen[at]) == prefix:
                logits[row, :] = broken
        return logits

    engine.runner.model = breaks
    with pytest.raises(ValueError, match="before token 1 of continuation 1 of prompt 2 hold NaN"):
        engine.score(prompts, continuations, VOCAB)
    engine.runner.model = model
    assert_right(engine.score(prompts, continuations, VOCAB), prompts, continuations)
    assert_all_given_back(engine)


def test_of_equally_likely_tokens_the_first_is_greedy_and_an_impossible_one_has_no_probability():
    engine, _ = make_engine()
    row = torch.full((VOCAB,), -1.0)
    row[[3, 8]] = 2.0
    row[9] = -torch.inf
    engine.runner.model = lambda step: row.repeat(len(step.logit_rows), 1)
    [[score]] = engine.score([np.array([1], np.int32)], [[np.array([3, 8, 9, 3], np.int32)]], VOCAB)
    assert score.greedy.tolist() == [True, False, False, True] and not score.is_greedy
    assert score.logprobs[2] == score.total == -np.inf
    assert score.logprobs[0] == score.logprobs[1] == score.logprobs[3]
