"""Values of a head at wanted tokens: the hidden states of the plain model, each shared token computed once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import prefixkit
from prefixkit import KVBudgetTooSmall, Session
from prefixkit.testing.tiny import ByteTokenizer, tiny_llama
from scripts.tiny_models import tiny_config, tiny_model

GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 5, "stop_token_ids": ()}


@pytest.fixture(scope="module")
def model() -> Any:
    return prefixkit.patch(tiny_llama())


@pytest.fixture
def rng() -> np.random.Generator:
    seed = int(np.random.default_rng().integers(2**31))
    print("seed", seed)
    return np.random.default_rng(seed)


@pytest.fixture
def head(rng: np.random.Generator) -> Any:
    torch.manual_seed(int(rng.integers(2**31)))
    return torch.nn.Linear(64, 3)


def expected(head: Any, tokens: list[int]) -> torch.Tensor:
    """``[length, 3]`` in float64, by the plain model below its head."""
    with torch.no_grad():
        states = tiny_llama().double().model(torch.tensor([tokens])).last_hidden_state[0]
        return states @ head.weight.double().T + head.bias.double()


def assert_close(found: torch.Tensor, truth: torch.Tensor) -> None:
    assert not found.requires_grad and not found.is_inference() and found.device.type == "cpu"
    torch.testing.assert_close(found.double(), truth, rtol=1e-4, atol=1e-4)


def texts(rng: np.random.Generator) -> list[list[int]]:
    """Two that share their beginning, one that is the beginning of another, an equal one, and another."""
    shared = rng.integers(5, 250, 40).tolist()
    first, second = ([*shared, *rng.integers(5, 250, n).tolist()] for n in (7, 12))
    return [first, second, shared, list(first), rng.integers(5, 250, 9).tolist()]


@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("page_size", [1, 16])
def test_values_are_those_of_the_plain_model(
    model: Any, rng: Any, head: Any, chunk: int | None, page_size: int
) -> None:
    prompts = texts(rng)
    with Session(model, kv_budget="1MiB", page_size=page_size, prefill_chunk=chunk) as session:
        for found, tokens in zip(session.values(prompts, head), prompts, strict=True):
            assert_close(found, expected(head, tokens)[-1:])
        for found, tokens in zip(session.values(prompts, head, at="all"), prompts, strict=True):
            assert_close(found, expected(head, tokens))
        at = [[0, 3, -1], [-2], [5, 39], [0], [8]]
        for found, tokens, own in zip(session.values(prompts, head, at=at), prompts, at, strict=True):
            assert_close(found, expected(head, tokens)[own])


@pytest.mark.parametrize("family", ["llama4_text", "mllama"])
def test_a_family_that_names_a_body_that_it_lacks(family: str) -> None:
    torch.manual_seed(0)
    plain = tiny_model(tiny_config(family), "", AutoModelForCausalLM)
    tokens, seen = [101, 102, 103, 104, 105], list[torch.Tensor]()
    watch = plain.get_output_embeddings().register_forward_pre_hook(lambda module, given: seen.append(given[0][0]))
    with torch.no_grad():
        plain(torch.tensor([tokens]), use_cache=False)
    watch.remove()
    with Session(prefixkit.patch(plain), kv_budget="1MiB") as session:
        torch.testing.assert_close(session.values(tokens, lambda hidden: hidden, at="all"), seen[0])


def test_each_shared_token_is_computed_once_and_what_is_known_is_not_again(model: Any, rng: Any, head: Any) -> None:
    prompts = texts(rng)
    with Session(model, kv_budget="1MiB") as session:
        session.values(prompts, head)
        assert session.report.tokens_computed == 40 + 7 + 12 + 9
        session.values(prompts, head)
        assert session.report.tokens_computed == 4, "the last token of each distinct prompt"
        session.generate([prompts[0]], **GREEDY)
        assert session.report.prompt_tokens_found == len(prompts[0])
        score = session.score(prompts[0], [[7, 8]])
        assert len(score[0].logprobs) == 2


def test_a_single_prompt_a_text_and_search_nodes(model: Any, head: Any) -> None:
    with Session(model, ByteTokenizer(), kv_budget="1MiB") as session:
        one = session.values("a question", head)
        assert_close(one, expected(head, session.prompt("a question").tokens)[-1:])
        nodes = session.step(session.prompt("a question").fork(3), temperature=1.0, max_new_tokens=4, stop_token_ids=())
        found = session.values(
            nodes,
            head,
            at=[
                [
                    -1,
                ],
                [-4, -1],
                [0],
            ],
        )
        for node, values, own in zip(nodes, found, ([-1], [-4, -1], [0]), strict=True):
            assert_close(values, expected(head, node.tokens)[own])
        assert_close(session.values(nodes[0], head, at="all"), expected(head, nodes[0].tokens))


@pytest.mark.parametrize("size", ["24KiB", "1MiB"])
def test_prompts_that_do_not_fit_together_are_computed_one_after_the_other(
    model: Any, rng: Any, head: Any, size: str
) -> None:
    prompts = [rng.integers(5, 250, 30).tolist() for _ in range(6)]
    with Session(model, kv_budget=size, page_size=4) as session:
        for found, tokens in zip(session.values(prompts, head), prompts, strict=True):
            assert_close(found, expected(head, tokens)[-1:])


def test_what_is_refused(model: Any, head: Any) -> None:
    with Session(model, kv_budget="24KiB", page_size=4) as session:
        for at, error, message in (
            ("first", ValueError, "at must be 'last', 'all' or positions"),
            ([3], ValueError, "prompt 0 has 3 tokens, and at=.3. names others; positions are -3 to 2"),
            ([1, 1], ValueError, "ascending and different"),
            ([-1, 0], ValueError, r"different, got \[-1, 0\] of 3 tokens; give at=\[0, 2\]"),
            ([], TypeError, "at least one"),
            ([0.5], TypeError, "integers"),
        ):
            with pytest.raises(error, match=message):
                session.values([5, 6, 7], head, at=at)
        with pytest.raises(ValueError, match="one list of positions for each prompt, got 1 for 2; for example"):
            session.values([[5, 6], [7, 8]], head, at=[[0]])
        with pytest.raises(KVBudgetTooSmall, match="prompt 0 of 300 tokens needs KV for 300 tokens"):
            session.values([5] * 300, head)
        with pytest.raises(TypeError, match="head must be a function of hidden states, got str 'score'"):
            session.values([5, 6], "score")
        with pytest.raises(TypeError, match="a head must return a tensor, got list"):
            session.values([5, 6, 7], lambda hidden: [0.5])
        with pytest.raises(ValueError, match="a row for each of the 3 hidden states"):
            session.values([5, 6, 7], lambda hidden: hidden.sum(), at="all")
        with pytest.raises(ValueError, match=r"the head failed on hidden states \[1, 64\] in torch.float32"):
            session.values([5, 6, 7], torch.nn.Linear(32, 1))
        assert session.values([5, 6, 7], head).shape == (1, 3)
