"""Steps of search nodes: one batch, in which each node goes on as it would alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import prefixkit
from prefixkit import BeamParams, NodeFinished, SamplingParams, SearchNode, Session
from prefixkit.testing.tiny import EOS, ByteTokenizer, tiny_llama
from tests.session.searching import GREEDY, PROMPT, SAMPLED, assert_empty, dense_logprobs, told


@pytest.fixture
def session(model: Any) -> Iterator[Session]:
    with Session(model, ByteTokenizer(), kv_budget="4MiB") as session:
        yield session


def test_a_node_samples_the_same_alone_or_among_others(model: Any, session: Session) -> None:
    def nodes() -> list[SearchNode]:
        root = session.prompt(PROMPT)
        others = [session.prompt("another", seed=3), *root.fork(1, seeds=[1])[0].extend(" jumps").fork(2)]
        return [*root.fork(4, seeds=range(4)), *others]

    together = session.step(nodes(), SAMPLED)
    backwards = session.step(nodes()[::-1], SAMPLED)[::-1]
    alone = [session.step(node, SAMPLED)[0] for node in nodes()]
    assert told(together) == told(backwards) == told(alone)
    assert len({tuple(node.tokens) for node in together}) == 7
    for node in together:
        generated = prefixkit.generate(model, None, [node.tokens[:-8]], SAMPLED, seed=node.seed)
        assert generated[0].tokens == node.tokens[-8:], "what generate() gives for its tokens and seed"
    assert_empty(session)


def test_equal_tokens_and_seeds_give_equal_samples(session: Session) -> None:
    one, other, third = session.prompt(PROMPT).fork(3, seeds=[7, 7, 8])
    session.step([one, other, third], SAMPLED)
    assert one.tokens == other.tokens != third.tokens


def test_eight_greedy_steps_of_a_token_are_one_step_of_eight(session: Session) -> None:
    once, slowly = session.prompt(PROMPT).fork(2)
    session.step(once, GREEDY)
    for _ in range(8):
        session.step(slowly, GREEDY, max_new_tokens=1)
    assert once.tokens == slowly.tokens
    assert once.logprobs == pytest.approx(slowly.logprobs, abs=1e-5)


def test_steps_divided_in_one_way_give_the_same_samples_each_time(session: Session) -> None:
    one, other = session.prompt(PROMPT).fork(2, seeds=[4, 4])
    for count in (3, 1, 4):
        session.step(one, SAMPLED, max_new_tokens=count)
    for count in (3, 1, 4):
        session.step([other, *session.prompt(PROMPT).fork(2)], SAMPLED, max_new_tokens=count)
    assert one.tokens == other.tokens


def test_log_probabilities_are_those_of_the_model_across_steps(session: Session) -> None:
    node = session.prompt(PROMPT)
    for count in (3, 1, 4):
        session.step(node, SAMPLED, max_new_tokens=count)
    assert node.logprobs == pytest.approx(dense_logprobs(node.tokens, len(PROMPT)).tolist(), abs=1e-5)


def test_log_probabilities_of_given_tokens_are_the_models_too(session: Session) -> None:
    root = session.prompt(PROMPT)
    root.extend("!")
    node, other = root.fork(2)
    session.step(node.extend(" jumps"), GREEDY, max_new_tokens=2)
    other.extend(node.new_tokens[1:])
    expected = pytest.approx(dense_logprobs(node.tokens, len(PROMPT)).tolist(), abs=1e-5)
    assert node.logprobs == expected
    assert other.logprobs == expected


def only(*tokens: int) -> Callable[[], Any]:
    """A processor of logits that leaves one token, by how many of the tokens are behind the prompt."""

    def processor(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        at = min(ids.shape[1] - len(PROMPT), len(tokens) - 1)
        return torch.full_like(logits, -torch.inf).index_fill(1, torch.tensor([tokens[at]]), 0.0)

    return lambda: processor


WRITES = only(*b"one\n\ntwo\n\n", EOS)


@pytest.mark.parametrize("until", ["\n\n", ["nowhere", "\n\n"], lambda tokens, text: text.endswith("\n\n")])
def test_what_ends_a_step_stays_in_the_node_which_may_go_on(session: Session, until: Any) -> None:
    node = session.prompt(PROMPT)
    texts = []
    for _ in range(3):
        session.step(node, SamplingParams(max_new_tokens=20, logits_processors=WRITES), until=until)
        texts.append((node.text, node.finish_reason))
    assert texts == [("one\n\n", "until"), ("one\n\ntwo\n\n", "until"), ("one\n\ntwo\n\n", "stop")]
    assert node.tokens == [*f"{PROMPT}one\n\ntwo\n\n".encode(), EOS]


def test_stop_strings_of_the_parameters_end_a_step_as_until_does(session: Session) -> None:
    params = SamplingParams(max_new_tokens=20, logits_processors=WRITES, stop="e")
    nodes = session.prompt(PROMPT).fork(2)
    session.step(nodes, [params, SamplingParams(max_new_tokens=2, logits_processors=WRITES)], until="tw")
    assert [(node.text, node.finish_reason) for node in nodes] == [("one", "until"), ("on", "length")]


def test_a_finished_node_is_not_stepped_but_extended_or_left_for_its_parent(session: Session) -> None:
    root = session.prompt(PROMPT)
    done, going = root.fork(2)
    params = SamplingParams(max_new_tokens=1, logits_processors=only(EOS))
    session.step(done, params)
    assert (done.finish_reason, done.text) == ("stop", "")
    for node in (done, *done.fork(1)):
        before = told([node, going])
        with pytest.raises(
            NodeFinished, match=rf"SearchNode\(.* ended with the stop token {EOS}; extend it, fork its parent"
        ):
            session.step([going, node], GREEDY)
        assert told([node, going]) == before
    done.extend("\nuser:")
    session.step([done, *root.fork(1)], GREEDY)
    assert done.finish_reason == "length" and done.text.startswith("\nuser:")


def test_greedy_sampled_and_beam_searched_nodes_share_a_batch(model: Any, session: Session) -> None:
    beams = BeamParams(num_beams=3, max_new_tokens=6)
    nodes = session.prompt(PROMPT).fork(3, seeds=[1, 2, 3])
    assert session.step(nodes, [GREEDY, SAMPLED, beams]) == nodes
    assert session.report.prompts == 3
    searched = prefixkit.beam_search(model, None, [list(PROMPT.encode())], beams)[0]
    assert nodes[2].tokens[len(PROMPT) :] == searched.tokens
    assert nodes[2].logprobs == pytest.approx(searched.logprobs, abs=1e-5)
    assert told(nodes)[:2] == [
        told(session.step(session.prompt(PROMPT, seed=s), p))[0] for s, p in ((1, GREEDY), (2, SAMPLED))
    ]


def test_several_beams_of_a_node_become_its_children(model: Any, session: Session) -> None:
    root, other = session.prompt(PROMPT).fork(2)
    *children, last = session.step([root, other], [BeamParams(4, num_return_sequences=3, max_new_tokens=5), GREEDY])
    assert last is other and len(root) == len(PROMPT)
    found = prefixkit.beam_search(model, None, [root.tokens], num_beams=4, num_return_sequences=3, max_new_tokens=5)
    assert [node.tokens[len(PROMPT) :] for node in children] == [sample.tokens for sample in found]
    assert all(node.parent is root for node in children) and len({node.seed for node in children}) == 3


def test_beams_of_one_token_are_the_likeliest_tokens(session: Session) -> None:
    children = session.step(session.prompt(PROMPT), BeamParams(10, num_return_sequences=10, max_new_tokens=1))
    with torch.no_grad():
        logits = tiny_llama().double()(torch.tensor([list(PROMPT.encode())])).logits[0, -1]
    best = logits.log_softmax(-1).topk(10)
    assert [node.tokens[-1] for node in children] == best.indices.tolist()
    assert [node.logprobs[0] for node in children] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_a_step_takes_parameters_as_generate_does(session: Session) -> None:
    def stepped(*given: Any, **fields: Any) -> list[Any]:
        return told(session.step(session.prompt(PROMPT).fork(2), *given, **fields))

    fields = {"temperature": 0.9, "max_new_tokens": 8, "stop_token_ids": ()}
    assert stepped(SAMPLED) == stepped([SAMPLED] * 2) == stepped(**fields)
    assert stepped(SAMPLED) == stepped(SamplingParams(temperature=0.9), max_new_tokens=8, stop_token_ids=())
    assert [len(tokens) for tokens, _ in stepped([GREEDY, BeamParams(2)], max_new_tokens=3)] == [len(PROMPT) + 3] * 2


def test_the_repetition_penalty_of_the_model_acts_as_in_generate() -> None:
    model = prefixkit.patch(tiny_llama())
    model.generation_config.repetition_penalty = 3.0
    with Session(model, kv_budget="1MiB") as session:
        (node,) = session.step(session.prompt([1, 2, 3]), temperature=0, max_new_tokens=9)
        expected = session.generate([[1, 2, 3]], temperature=0, max_new_tokens=9)
        assert node.tokens[3:] == expected[0].tokens


def test_a_step_computes_only_the_tokens_that_are_new(session: Session) -> None:
    root = session.prompt(PROMPT * 10)
    children = session.step(root.fork(4), SAMPLED)
    assert session.report.tokens_computed == len(root) + 4 * 7, (
        "the prompt once; a last token is computed by what follows"
    )
    grandchildren = [node for child in children for node in child.fork(3)]
    session.step(grandchildren, SAMPLED)
    assert session.report.tokens_computed == 4 * 1 + 12 * 7
    session.step(root, BeamParams(2, max_new_tokens=1))
    assert session.report.tokens_computed == 1, "the last one again, for its logits"


def test_a_search_that_does_not_fit_gives_the_same_samples(model: Any, session: Session) -> None:
    def search(session: Session) -> list[Any]:
        nodes = session.prompt(PROMPT * 10).fork(12)
        for _ in range(3):
            nodes = [child for node in session.step(nodes, SAMPLED)[::3] for child in node.fork(3)]
        return told(nodes)

    page = 2 * 2 * 2 * 16 * 16 * 4  # bytes: keys and values, layers, heads, their size, tokens, float32
    with Session(model, ByteTokenizer(), kv_budget=16 * page) as small:
        assert search(small) == search(session)
        assert small.report.tokens_computed > session.report.tokens_computed, "what was evicted is computed again"
        assert_empty(small)
