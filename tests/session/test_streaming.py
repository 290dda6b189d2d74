"""Samples of a model at positions in the cache: exact, and in memory that stays as it is however long they become."""

from __future__ import annotations

import copy
import os
from typing import Any

import numpy as np
import pytest
import torch

import prefixkit
from prefixkit import BeamParams, KVBudgetTooSmall, PrefixFileError, SamplingParams, Session, TreeCache, variants
from prefixkit.kv.held import Held
from prefixkit.models.generate.tree_cache import TreeCache as Cache
from prefixkit.testing.integrity import check_tree
from prefixkit.testing.tiny import tiny_llama
from tests.models.variants.rotating_cache import token_by_token
from tests.models.variants.test_streaming import rotary

SINKS, WINDOW = 4, 24
VARIANT = variants.streaming_llm(SINKS, WINDOW)
OPTIONS: dict[str, Any] = {"stop_token_ids": ()}
ROTATE = rotary(10000.0, 16)


@pytest.fixture(scope="module")
def plain() -> Any:
    return tiny_llama()


@pytest.fixture
def model(plain: Any) -> Any:
    return prefixkit.patch(copy.deepcopy(plain), variant=VARIANT)


@pytest.fixture(scope="module")
def thin() -> Any:
    """Of one layer, where many steps are taken for what is held."""
    return tiny_llama(num_hidden_layers=1)


@pytest.fixture
def thin_model(thin: Any) -> Any:
    return prefixkit.patch(copy.deepcopy(thin), variant=VARIANT)


@pytest.fixture
def prompts() -> list[list[int]]:
    """They share more than a window; one is shorter than the sinks."""
    seed = int.from_bytes(os.urandom(4), "little")
    print("seed", seed)
    rng = np.random.default_rng(seed)
    head = rng.integers(5, 250, 60).tolist()
    return [[*head, *rng.integers(5, 250, n).tolist()] for n in (9, 3, 17)] + [[7, 8]]


def check(plain: Any, prompts: list[list[int]], samples: Any, sinks: int = SINKS, window: int = WINDOW) -> None:
    """Log-probabilities are those of a cache whose keys are rotated anew at every token.

    The model's float32 angles at positions of the text are off by as much as rounding at these is: 3e-5 at 500.
    """
    for sample in samples:
        prompt = prompts[sample.prompt_index]
        rows = token_by_token(plain, [*prompt, *sample.tokens], sinks, window, ROTATE).log_softmax(-1)
        want = rows[len(prompt) - 1 : -1].gather(1, torch.tensor(sample.tokens)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(sample.logprobs), want, atol=1e-3), (sample.prompt_index, sample.index)


def pages_in_use(tree: Any) -> int:
    return tree.allocator.num_pages - tree.allocator.free


def test_samples_are_exact_far_beyond_the_window(plain: Any, model: Any, prompts: list[list[int]]) -> None:
    """Also where pages are given back: after 256 tokens."""
    samples = prefixkit.generate(model, None, prompts[1:], n=1, seed=1, page_size=4, max_new_tokens=270, **OPTIONS)
    assert len(samples) == 3
    check(plain, prompts[1:], [samples[0], samples[2]])


def test_pages_stay_as_they_are(thin_model: Any, prompts: list[list[int]]) -> None:
    """A store is enough that holds the prompts, and of a sample what it says; one prompt is shorter than the sinks."""
    held, most, prompts = Held(SINKS, WINDOW), list[int](), [prompts[0], prompts[3]]
    spec = prefixkit.models.kv_spec(thin_model)
    pages = sum(held.most_pages(16) + -(-len(prompt) // 16) for prompt in prompts)
    with Session(thin_model, kv_budget=pages * 16 * spec.bytes_per_token) as session:
        tree = session.store.tree

        def watch(sampled: int) -> None:
            most.append(pages_in_use(tree))

        result = session.generate(prompts, max_new_tokens=520, on_step=watch, seed=3, **OPTIONS)
        assert session.store.tree is tree
        check_tree(tree)
    assert [len(sample.tokens) for sample in result] == [520, 520] and max(most) <= pages < 2 * 520 // 16
    assert result.report.preempted_swapped == result.report.preempted_recomputed == 0


def test_samples_wait_until_what_they_will_hold_fits(thin: Any, thin_model: Any, prompts: list[list[int]]) -> None:
    spec, pages = prefixkit.models.kv_spec(thin_model), 2 * Held(SINKS, WINDOW).most_pages(16) + 9
    with Session(thin_model, kv_budget=pages * 16 * spec.bytes_per_token) as session:
        result = session.generate(prompts[2:], n=2, max_new_tokens=280, seed=2, **OPTIONS)
        assert len(result) == 4
        assert result.report.preempted_swapped == result.report.preempted_recomputed == 0
        check_tree(session.store.tree)
        check(thin, prompts[2:], [result[3]])
        with pytest.raises(KVBudgetTooSmall, match="one sequence of prompt 0"):
            session.generate([prompts[0] * 20], max_new_tokens=300, **OPTIONS)


def test_what_is_left_of_samples_is_no_prefix(thin: Any, thin_model: Any, prompts: list[list[int]]) -> None:
    """A text that goes on where a sample ended is computed anew from where tokens are gone; prompts are found."""
    with Session(thin_model) as session:
        first = session.generate(prompts[:2], max_new_tokens=270, seed=5, **OPTIONS)
        texts = [[*prompt, *sample.tokens] for prompt, sample in zip(prompts, first, strict=False)]
        check_tree(session.store.tree)
        before = session.report.prompt_tokens_found
        again = session.generate([[*text, 9] for text in texts], max_new_tokens=5, temperature=0, **OPTIONS)
        found = session.report.prompt_tokens_found - before
        assert len(prompts[0]) + len(prompts[1]) <= found + 2 <= 2 * 60 + 100
        check(thin, [[*text, 9] for text in texts], [again[0]])
        repeated = session.generate(prompts[:2], max_new_tokens=40, seed=5, **OPTIONS)
        assert [sample.tokens for sample in repeated] == [sample.tokens[:40] for sample in first]


def test_steps_one_by_one_give_pages_back_too(thin: Any, thin_model: Any, prompts: list[list[int]]) -> None:
    """Logits processors look at each token, so that the tree takes each step."""
    most = list[int]()
    with Session(thin_model, page_size=4) as session:
        store = session.store

        def watch(sampled: int) -> None:
            most.append(pages_in_use(store.tree))

        options = {"logits_processors": lambda: lambda ids, logits: logits, "max_new_tokens": 180, **OPTIONS}
        result = session.generate(prompts[:1], n=2, on_step=watch, **options)
    assert max(most) <= -(-len(prompts[0]) // 4) + 2 * Held(SINKS, WINDOW).most_pages(4)
    assert max(most[120:-4]) - min(most[120:-4]) <= 2 * (64 // 4 + 2), "flat but for what is not worth a new plan"
    check(thin, prompts, [result[0]])


def test_beams_are_refused_before_anything_runs(model: Any, prompts: list[list[int]]) -> None:
    with pytest.raises(ValueError, match=r"beam search: the model attends at positions in the cache .* sample, patch"):
        prefixkit.beam_search(model, None, prompts, num_beams=2, max_new_tokens=4)
    with Session(model) as session:
        node = session.prompt(prompts[0])
        with pytest.raises(ValueError, match="beam search"):
            session.step([node], BeamParams(num_beams=2, max_new_tokens=4))
        assert session.store.tree.num_cached == 0
        (node,) = session.step([node], SamplingParams(max_new_tokens=3, temperature=0, stop_token_ids=()))
        assert len(node.tokens) == len(prompts[0]) + 3


def test_scores_and_search_nodes(plain: Any, model: Any, prompts: list[list[int]]) -> None:
    (scores,) = prefixkit.score(model, None, prompts[:1], [[[5, 6, 7], [5, 9]]])
    for tokens, score in zip([[5, 6, 7], [5, 9]], scores, strict=True):
        rows = token_by_token(plain, [*prompts[0], *tokens], SINKS, WINDOW, ROTATE).log_softmax(-1)
        want = rows[len(prompts[0]) - 1 : -1].gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(score.logprobs), want, atol=2e-4)


@pytest.mark.parametrize("options", [{"num_beams": 1}, {"num_beams": 3}])
def test_the_model_s_own_generate_holds_all_kv_and_is_exact(
    options: dict[str, int], plain: Any, model: Any, prompts: list[list[int]]
) -> None:
    ids = torch.tensor([prompts[0][:60], prompts[1][3:63]])
    made = model.generate(
        ids,
        max_new_tokens=40,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        eos_token_id=None,
        **options,
    )
    assert isinstance(made.past_key_values, TreeCache) and TreeCache is Cache
    if options["num_beams"] > 1:
        return
    for row, text in enumerate(made.sequences.tolist()):
        want = token_by_token(plain, text, SINKS, WINDOW, ROTATE)[59:-1]
        assert torch.allclose(torch.stack(made.logits)[:, row], want, atol=1e-3)


def test_prefixes_of_other_positions_are_other_prefixes(
    plain: Any, model: Any, prompts: list[list[int]], tmp_path: Any
) -> None:
    path = tmp_path / "prefix"
    with Session(model) as session:
        session.save(path, [prompts[0]])
    other = prefixkit.patch(copy.deepcopy(plain), variant=variants.streaming_llm(SINKS, WINDOW + 1))
    with Session(other) as session, pytest.raises(PrefixFileError, match="holds KV under streaming_llm"):
        session.load(path)
    with Session(prefixkit.patch(copy.deepcopy(plain), variant=VARIANT)) as session:
        session.load(path)
        result = session.generate(prompts[:1], max_new_tokens=40, seed=8, **OPTIONS)
        assert session.report.prompt_tokens_found >= len(prompts[0]) - 1
        check(plain, prompts, result)
