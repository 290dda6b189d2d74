"""Search with a verifier: by nodes it finds what it finds by submitting whole texts, and computes new tokens alone."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import prefixkit
from prefixkit import KVBudgetTooSmall, Session
from prefixkit.testing.tiny import VOCAB, ByteTokenizer, tiny_llama
from tests.session.searching import assert_empty

EXAMPLES = Path(__file__).parents[2] / "examples"
QUESTION = "seven loaves and four cakes"
SIZES: dict[str, Any] = {"n": 8, "expand": 2, "depth": 4}
# About every fourth byte ends a step.
STEP: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 8, "until": [chr(code) for code in range(32, 90)]}


class PairTokenizer:
    """A token for every two characters, and one for a last character alone, which changes when another follows."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        pairs = (text[place : place + 2] for place in range(0, len(text), 2))
        return {"input_ids": [(7 * sum(map(ord, pair)) + len(pair)) % VOCAB for pair in pairs]}


class Resubmitting(Session):
    """A session that computes whole texts at each call."""

    def step(self, *given: Any, **named: Any) -> Any:
        self.weights_changed()
        return super().step(*given, **named)

    def values(self, *given: Any, **named: Any) -> Any:
        self.weights_changed()
        return super().values(*given, **named)


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(EXAMPLES))
        yield importlib.import_module("verifier_search")


@pytest.fixture(scope="module")
def reward(example: Any) -> Any:
    return prefixkit.patch(example.reward_model(tiny_llama()))


def plain_value(reward: Any, tokens: list[int]) -> float:
    """The value after the last token, by a pass over the whole text in float64."""
    with torch.no_grad():
        hidden = tiny_llama().double().model(torch.tensor([tokens])).last_hidden_state[0, -1]
        return float(hidden @ reward.score.weight.double()[0] + reward.score.bias.double()[0])


@pytest.fixture(scope="module")
def searched(example: Any, model: Any, reward: Any) -> Any:
    """Solutions, tokens that the last level's values have taken, tokens of the generator that were evicted.

    Each search runs once.
    """

    @functools.cache
    def search(kind: Any, dvts: bool, kv_budget: str = "4MiB") -> Any:
        own = {"tokenizer": ByteTokenizer(), "kv_budget": kv_budget, "page_size": 4}
        with kind(model, **own) as generator, kind(reward, PairTokenizer(), kv_budget="4MiB") as judging:
            verifier = example.Verifier(judging, reward.score)
            found = example.search(generator, verifier, QUESTION, **SIZES, dvts=dvts, **STEP)
            assert_empty(generator)
            assert_empty(judging)
            return found, judging.report.tokens_computed, generator.store.cache.tokens_evicted

    return search


@pytest.mark.parametrize("dvts", [False, True])
def test_nodes_and_whole_texts_give_the_same_solutions(searched: Any, reward: Any, dvts: bool) -> None:
    (found, tokens, _), (others, whole, _) = (searched(kind, dvts) for kind in (Session, Resubmitting))
    assert [one.node.tokens for one in found] == [one.node.tokens for one in others]
    assert tokens < whole
    for one, other in zip(found, others, strict=True):
        text = PairTokenizer()(f"{QUESTION}\n\n{one.node.text}")["input_ids"]
        assert [one.value, other.value] == pytest.approx([plain_value(reward, text)] * 2, abs=1e-4)
    assert [one.value for one in found] == sorted((one.value for one in found), reverse=True)


def test_dvts_keeps_a_beam_of_each_subtree_where_beam_search_takes_the_best_of_all(searched: Any) -> None:
    def subtrees(dvts: bool) -> list[int]:
        """Of each solution, which of the first beams it grew from."""
        found, _, _ = searched(Session, dvts)
        roots = []
        for one in found:
            path = [one.node]
            while path[-1].parent is not None:
                path.append(path[-1].parent)
            roots.append(path[-2].seed)
        return roots

    assert len(set(subtrees(dvts=True))) == SIZES["n"] // SIZES["expand"]
    assert len(set(subtrees(dvts=False))) < SIZES["n"] // SIZES["expand"]


def test_released_candidates_make_room_for_the_next_level(searched: Any) -> None:
    """The pool holds the candidates of one level, and not all that are sampled."""
    everything, _, none = searched(Session, False)
    small, _, evicted = searched(Session, False, "56KiB")
    assert evicted and not none
    assert [one.node.tokens for one in small] == [one.node.tokens for one in everything]


def test_a_token_that_a_step_changes_is_computed_again_and_what_is_before_it_is_not(model: Any, reward: Any) -> None:
    with Session(reward, PairTokenizer(), kv_budget="1MiB") as session:
        for text, computed in (("abcdefg", 4), ("abcdefghi", 2), ("abcdefghij", 1), ("abcdefghijkl", 1)):
            value = float(session.values(text, reward.score))
            assert value == pytest.approx(plain_value(reward, PairTokenizer()(text)["input_ids"]), abs=1e-4)
            assert session.report.tokens_computed == computed


def test_a_text_too_long_for_the_verifier_is_named_and_the_others_go_on(model: Any, reward: Any) -> None:
    with Session(reward, PairTokenizer(), kv_budget="24KiB", page_size=4) as session:
        texts = ["a short one", "x" * 300, "another"]
        with pytest.raises(KVBudgetTooSmall, match="prompt 1 of 150 tokens needs KV for 152 tokens"):
            session.values(texts, reward.score)
        assert session.store is not None and not session.store.tree.num_cached, "nothing was computed"
        del texts[1]
        for text, value in zip(texts, session.values(texts, reward.score), strict=True):
            assert float(value) == pytest.approx(plain_value(reward, PairTokenizer()(text)["input_ids"]), abs=1e-4)


def test_what_a_call_is_about_to_find_is_evicted_after_what_it_does_not_need(reward: Any) -> None:
    """Without that the KV of texts of one call, older than the other's, would go for its first text."""
    texts = [np.full(12, 200 + number).tolist() for number in range(3)]
    with Session(reward, kv_budget="48KiB", page_size=4) as session:
        assert session.store is not None
        pages = session.store.pool.num_pages
        session.values(texts, reward.score)
        session.values([5] * (4 * (pages - 9)), reward.score)
        assert not session.store.tree.allocator.free
        session.values([[6] * 16, *([*text, 7, 8] for text in texts)], reward.score)
        assert session.report.tokens_computed == 16 + 3 * 2
