"""Nodes of a search share their tokens: a fork computes and copies nothing, and a node outlives memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from prefixkit import Session
from prefixkit.session.session import MemoryReleased
from prefixkit.testing.tiny import ByteTokenizer
from tests.session.searching import GREEDY, PROMPT


@pytest.fixture
def session(model: Any) -> Iterator[Session]:
    with Session(model, ByteTokenizer(), kv_budget="4MiB") as session:
        yield session


def test_a_node_is_made_of_text_of_token_ids_or_of_messages(model: Any) -> None:
    tokenizer = ByteTokenizer()
    with Session(model, tokenizer, kv_budget="1MiB") as session:
        node = session.prompt(PROMPT, seed=5)
        assert node.tokens == list(PROMPT.encode()) and len(node) == len(PROMPT)
        assert (node.logprobs, node.text, node.seed, node.parent, node.finish_reason) == ([], "", 5, None, None)
        assert session.prompt(np.array(node.tokens)).tokens == node.tokens
        chat = [{"role": "user", "content": "hello"}]
        assert session.prompt(chat).tokens == list(b"<user>hello<assistant>")


def test_forks_share_their_tokens_and_part_from_then_on(session: Session) -> None:
    root = session.prompt(PROMPT)
    first, second = root.fork(2)
    first.extend(" jumps")
    (grandchild,) = first.fork(1)
    first.extend(" high")
    root.extend("!")
    assert [node.text for node in (root, first, second, grandchild)] == ["!", " jumps high", "", " jumps"]
    assert grandchild.parent is first and first.parent is root
    assert grandchild.tokens == list((PROMPT + " jumps").encode())


def test_a_fork_copies_no_tokens_at_any_length_or_depth(session: Session) -> None:
    node = session.prompt([1] * 1_000_000)
    tracemalloc.start()
    nodes = node.fork(1_000)
    for _ in range(2_000):
        (node,) = node.extend([2]).fork(1)
    nodes += node.fork(1_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4_000_000, "less than the tokens of one node"
    assert len(nodes[-1]) == 1_002_000 and nodes[-1].tokens[-2_001:] == [1] + [2] * 2_000


def test_a_deep_tree_is_read_and_goes_without_recursion(session: Session) -> None:
    node = session.prompt(PROMPT)
    for _ in range(20_000):
        (node,) = node.extend([65]).fork(1)
    assert len(node.tokens) == len(node) and node.text == "A" * 20_000
    del node


def test_a_released_node_leaves_its_children_alone(session: Session) -> None:
    root = session.prompt(PROMPT)
    child = root.fork(1)[0]
    assert not root.released
    root.release()
    assert root.released and not child.released and "released" in repr(root)
    assert session.step(child, GREEDY) == [child]
    assert repr(child) == f"SearchNode({len(PROMPT) + 8} tokens, seed={child.seed}, finish_reason='length')"


def test_seeds_of_forks_are_distinct_and_the_same_in_the_same_program(session: Session) -> None:
    def seeds(seed: int) -> list[int]:
        root = session.prompt(PROMPT, seed=seed)
        children = [*root.fork(3), *root.fork(2)]
        return [seed, *(node.seed for child in children for node in [child, *child.fork(3)])]

    assert seeds(0) == seeds(0)
    assert len({*seeds(0), *seeds(1), *seeds(2**64 - 1)}) == 3 * 21
    root = session.prompt(PROMPT)
    assert [node.seed for node in root.fork(3, seeds=range(5, 8))] == [5, 6, 7]
    assert [node.seed for node in session.prompt(PROMPT).fork(5)] == seeds(0)[1::4]


def test_nodes_outlive_the_memory_of_their_session(model: Any) -> None:
    session = Session(model, ByteTokenizer(), kv_budget="1MiB")
    node = session.step(session.prompt(PROMPT), GREEDY, max_new_tokens=4)[0]
    session.release_memory()
    child, text = node.fork(1)[0].extend("!"), node.text
    for call in (lambda: session.step(child), lambda: child.logprobs, lambda: session.score(child, ["x"])):
        with pytest.raises(MemoryReleased, match="resume"):
            call()
    assert child.text == text + "!" and child.finish_reason is None
    session.resume()
    assert len(child.logprobs) == 5
    session.step(node, GREEDY, max_new_tokens=4)
    assert node.tokens == session.step(session.prompt(PROMPT), GREEDY)[0].tokens
    session.close()
    with pytest.raises(MemoryReleased):
        session.step(node)


def test_a_session_without_a_tokenizer_has_nodes_of_token_ids(model: Any) -> None:
    with Session(model, kv_budget="1MiB") as session:
        node = session.prompt([1, 2, 3]).extend([4])
        session.step(node, GREEDY)
        assert node.tokens[:4] == [1, 2, 3, 4] and len(node) == 12 and node.text == ""
        for call, what in (
            (lambda: session.prompt("text"), "prompt 0 is text, but tokenizer is None"),
            (lambda: node.extend("text"), "tokens: 'text' is text, but tokenizer is None"),
            (lambda: session.step(node, until="x"), "stop strings .* tokenizer is None"),
        ):
            with pytest.raises(ValueError, match=what):
                call()


def test_nodes_are_scored_as_their_tokens_are(session: Session) -> None:
    root, other = session.prompt(PROMPT).fork(2)
    other.extend("!")
    each = session.score([root, other.tokens, PROMPT], [" yes", " no"])
    one = session.score(other, [" yes", " no"])
    assert [score.total for score in one] == pytest.approx([score.total for score in each[1]], abs=1e-5)
    assert [score.total for score in each[0]] == pytest.approx([score.total for score in each[2]], abs=1e-5)
    (greedy,) = session.step(root, GREEDY)
    assert session.score(PROMPT, [greedy.new_tokens])[0].is_greedy
