"""What search nodes cannot do is named, and changes no node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from prefixkit import BeamParams, ForeignNode, NodeReleased, SearchNode, Session
from prefixkit.kv.budget import KVBudgetTooSmall
from prefixkit.testing.tiny import VOCAB, ByteTokenizer
from tests.session.searching import GREEDY, PROMPT, SAMPLED, assert_empty, told


@pytest.fixture
def session(model: Any) -> Iterator[Session]:
    with Session(model, ByteTokenizer(), kv_budget="4MiB") as session:
        yield session


NODE_CALLS: dict[str, Callable[[Session, SearchNode], object]] = {
    "step": lambda session, node: session.step([*session.prompt(PROMPT).fork(1), node], GREEDY),
    "fork": lambda session, node: node.fork(2),
    "extend": lambda session, node: node.extend([1]),
    "release": lambda session, node: node.release(),
    "tokens": lambda session, node: node.tokens,
    "logprobs": lambda session, node: node.logprobs,
    "text": lambda session, node: node.text,
    "len": lambda session, node: len(node),
    "score": lambda session, node: session.score(node, ["x"]),
}


@pytest.mark.parametrize("call", NODE_CALLS)
def test_a_released_node_is_refused(session: Session, call: str) -> None:
    node = session.prompt(PROMPT)
    node.release()
    with pytest.raises(
        NodeReleased, match=r"SearchNode\(released, seed=0\) was released; fork the node that it came from"
    ):
        NODE_CALLS[call](session, node)
    assert_empty(session)


def test_a_node_of_another_session_is_refused(model: Any, session: Session) -> None:
    with Session(model, ByteTokenizer(), kv_budget="1MiB") as other:
        mine, theirs = session.prompt(PROMPT), other.prompt(PROMPT)
        with pytest.raises(ForeignNode, match=r"belongs to another session; .*session\.prompt\(node\.tokens\)"):
            session.step([mine, theirs], GREEDY)
        with pytest.raises(ForeignNode):
            session.score([mine, theirs], ["x"])
        assert len(mine) == len(theirs) == len(PROMPT)
        assert session.step(session.prompt(theirs.tokens), GREEDY)


STEPS: dict[str, tuple[Callable[[list[SearchNode]], Any], dict[str, Any], type[Exception], str]] = {
    "no nodes": (lambda nodes: [], {}, ValueError, "nodes is empty"),
    "a string": (lambda nodes: "text", {}, TypeError, "nodes must be a list of search nodes, got str 'text'"),
    "None": (lambda nodes: None, {}, TypeError, "nodes must be a list of search nodes, got NoneType None; put"),
    "other things": (lambda nodes: [3], {}, TypeError, "nodes must be search nodes, got int; make them by session"),
    "a number as params": (
        list,
        {"params": 3},
        TypeError,
        "params must be a list of SamplingParams or BeamP.* got int 3",
    ),
    "twice the same": (lambda nodes: [*nodes, nodes[0]], {}, ValueError, "listed twice; fork it"),
    "too few params": (list, {"params": [GREEDY]}, ValueError, r"one for each, got 1 \(SamplingParams\) for 2 nodes"),
    "no params": (list, {"params": [1, 2]}, ValueError, r"got 2 \(int\) for 2 nodes"),
    "an unknown field": (list, {"temprature": 1}, TypeError, "no parameter is named 'temprature'; the fields of Sampl"),
    "a field of others": (
        list,
        {"params": [GREEDY, BeamParams(2)], "top_k": 1},
        TypeError,
        "no parameter is named 'top_k'; the fields of BeamParams are num_beams",
    ),
    "a wrong value": (list, {"top_p": 2.0}, ValueError, "top_p must be in"),
    "several samples": (list, {"n": 4}, ValueError, r"got n=4; fork it 4 times"),
    "a seed": (list, {"seed": 4}, ValueError, r"its own seed, got seed=4; fork\(count, seeds"),
    "until of beams": (
        list,
        {"params": BeamParams(2), "until": "x"},
        ValueError,
        "until ends samples, and a beam search has none",
    ),
    "until of another kind": (list, {"until": 3}, TypeError, "until must be a list of strings or functions, got int 3"),
    "an empty until": (list, {"until": ["x", ""]}, ValueError, "until must not hold an empty string"),
    "too many tokens": (list, {"max_new_tokens": 10**6}, KVBudgetTooSmall, "prompt 0"),
}


@pytest.mark.parametrize("case", STEPS)
def test_a_step_that_cannot_be_taken_is_named_and_changes_no_node(session: Session, case: str) -> None:
    given, options, error, message = STEPS[case]
    nodes = session.prompt(PROMPT).fork(2)
    before = told(nodes)
    with pytest.raises(error, match=message):
        session.step(given(nodes), **options)
    assert told(nodes) == before
    assert_empty(session)


def test_a_step_that_fails_midway_changes_no_node(session: Session) -> None:
    def fail(tokens: list[int], text: str) -> bool:
        if len(tokens) == 3:
            raise KeyError("mine")
        return False

    nodes = session.prompt(PROMPT).fork(2)
    with pytest.raises(KeyError, match="mine"):
        session.step(nodes, SAMPLED, until=fail)
    assert [len(node) for node in nodes] == [len(PROMPT)] * 2
    assert_empty(session)


@pytest.mark.parametrize("change", ["extend", "release"])
def test_a_callback_cannot_change_a_node_of_its_own_step(session: Session, change: str) -> None:
    first, second = session.prompt(PROMPT).fork(2)

    def until(tokens: list[int], text: str) -> bool:
        second.extend([5, 6]) if change == "extend" else second.release()
        return False

    with pytest.raises(ValueError, match=f"cannot {change} SearchNode.* while it is in a step; do so once"):
        session.step([first, second], SAMPLED, until=until)
    assert [len(node) for node in (first, second)] == [len(PROMPT)] * 2
    session.step(second.extend([5, 6]), SAMPLED)
    second.release()


CALLS: dict[str, tuple[Callable[[Session, SearchNode], object], type[Exception], str]] = {
    "no prompt": (lambda session, node: session.prompt(""), ValueError, "empty string"),
    "two prompts": (lambda session, node: session.prompt(["a", "b"]), TypeError, "must be a string"),
    "a prompt's token": (lambda session, node: session.prompt([VOCAB]), ValueError, "outside the model's vocabulary"),
    "a prompt's seed": (
        lambda session, node: session.prompt("a", seed=2**64),
        ValueError,
        "seed must be at most 18446744073709551615",
    ),
    "no forks": (lambda session, node: node.fork(0), ValueError, "count must be at least 1, got 0"),
    "2**40 forks": (lambda session, node: node.fork(2**40), ValueError, "count must be at most 2147483647"),
    "too few seeds": (
        lambda session, node: node.fork(3, [1, 2]),
        ValueError,
        "a seed for each node, got 2; pass range",
    ),
    "too many seeds": (lambda session, node: node.fork(3, range(4)), ValueError, "for each node, got 4"),
    "a seed below 0": (lambda session, node: node.fork(1, [-1]), ValueError, "seed must be at least 0"),
    "seeds of letters": (
        lambda session, node: node.fork(1, "1"),
        TypeError,
        "seeds must be a list of integers, got str",
    ),
    "a number as seeds": (
        lambda session, node: node.fork(2, 3),
        TypeError,
        "seeds must be a list of integers, got int 3",
    ),
    "extending by nothing": (
        lambda session, node: node.extend([]),
        ValueError,
        "tokens: pass at least one token, got none",
    ),
    "extending by a table": (
        lambda session, node: node.extend([[1, 2]]),
        ValueError,
        r"tokens: pass token ids of one dimension, got shape \[1, 2\]",
    ),
    "a node as a prompt": (
        lambda session, node: session.generate([node]),
        TypeError,
        "prompt 0 is a SearchNode; pass its token ids: node.tokens",
    ),
    "extending by numbers": (
        lambda session, node: node.extend([0.5]),
        TypeError,
        "tokens: token ids must be integers",
    ),
    "extending by a token": (
        lambda session, node: node.extend([VOCAB]),
        ValueError,
        "tokens: token 260 is out",
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_what_a_node_cannot_take_is_named_and_leaves_it_as_it_was(session: Session, case: str) -> None:
    call, error, message = CALLS[case]
    node = session.prompt(PROMPT)
    with pytest.raises(error, match=message):
        call(session, node)
    assert node.tokens == list(PROMPT.encode()) and node.fork(1)[0].seed == session.prompt(PROMPT).fork(1)[0].seed
