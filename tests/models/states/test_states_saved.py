"""Prefixes of models that keep states, in files: what is loaded does not run again."""

from __future__ import annotations

import copy
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import prefixkit
from prefixkit import SamplingParams, Session
from prefixkit.kv.prefixes.file import PrefixFileError
from prefixkit.models import facts_of
from prefixkit.testing.integrity import check_tree
from prefixkit.testing.tiny import tiny_llama
from tests.models.states.hybrids import VOCAB, assert_logprobs, make_hybrid
from tests.tree.model import fingerprint

OPTIONS = {"max_new_tokens": 5, "stop_token_ids": ()}


def text(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(3, VOCAB) for _ in range(tokens)]


@pytest.fixture
def rng() -> random.Random:
    return random.Random(0)


@pytest.fixture
def prefixes(rng: random.Random) -> list[list[int]]:
    """Three that part after 60 tokens, and one with which two of them begin."""
    head = text(rng, 60)
    return [[*head, *text(rng, tokens)] for tokens in (20, 70, 7)] + [head[:30]]


@pytest.fixture
def model() -> Any:
    return prefixkit.patch(make_hybrid("lfm2"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "prefixes.safetensors"


def saved(model: Any, path: Path, prefixes: list[list[int]]) -> None:
    with Session(model, kv_budget="16MiB") as session:
        assert session.save(path, prefixes) == 60 + 20 + 70 + 7


def computed(session: Session, prompt: list[int], n: int = 2) -> int:
    """Tokens of a prompt that ran; those of its samples are as many in any call."""
    session.generate([prompt], n=n, **OPTIONS)
    return session.report.tokens_computed - n * (OPTIONS["max_new_tokens"] - 1)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, torch.float32) for kind in ("qwen3_next", "nemotron_h", "lfm2", "jamba", "mamba")),
        ("mamba2", torch.bfloat16),
    ],
    ids=str,
)
def test_only_new_tokens_run(kind: str, dtype: torch.dtype, prefixes: Any, rng: random.Random, path: Path) -> None:
    exact = make_hybrid(kind).to(dtype).float()
    model = prefixkit.patch(copy.deepcopy(exact).to(dtype))
    saved(model, path, prefixes)
    with Session(model, kv_budget="16MiB") as session:
        assert session.load(path) == 157
        assert session.load(path) == 0
        check_tree(session.store.tree)
        prompts = [[*prefix, *text(rng, 3)] for prefix in prefixes]
        prompts.append([*prefixes[0][:60], *text(rng, 3)])  # where prefixes part
        for prompt in prompts:
            assert computed(session, prompt) == 3, prompts.index(prompt)
            assert session.report.prompt_tokens_found == len(prompt) - 3
        found = session.generate(prompts, SamplingParams(**OPTIONS))
        assert_logprobs(model, prompts, [*found][1:4], None if dtype == torch.float32 else exact)


def test_a_long_prompt_that_is_asked_again_runs_its_last_token_alone(model: Any, prefixes: Any, path: Path) -> None:
    saved(model, path, prefixes)
    with Session(model, kv_budget="16MiB") as session:
        session.load(path)
        assert computed(session, prefixes[1]) == 1


def test_checkpoints_of_long_texts_are_saved_within_a_bound(model: Any, rng: random.Random, path: Path) -> None:
    prompt = text(rng, 700)
    with Session(model, kv_budget="16MiB") as session:
        every = session.store.tokens_per_checkpoint
        assert every == 256
        session.save(path, prompt)
        for position in range(10, 690, 10):  # calls that part there leave states
            session.generate([[*prompt[:position], 5, 6]], max_new_tokens=1)
        assert session.store.tree.states.used > 60
        session.save(path, prompt)
    with Session(model, kv_budget="16MiB") as session:
        session.load(path)
        assert 4 <= session.store.tree.states.used <= 3 + 700 // every
        assert computed(session, [*prompt, 5]) == 1


def test_where_slots_are_few_the_rest_is_computed_again(
    model: Any, prefixes: Any, rng: random.Random, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "prefixkit")
    several = [[first, *text(rng, 39)] for first in range(3, 17)]
    with Session(model, kv_budget="16MiB") as session:
        session.save(path, several)
    spec = facts_of(model).spec
    with Session(model, kv_budget="16MiB") as session:
        session.store.most_state_bytes = 9 * spec.bytes_per_state
        assert session.load(path) == 14 * 40
        assert session.store.tree.states.used == session.store.pool.states.slots == 9
        (line,) = [line for line in caplog.messages if "no slot" in line]
        assert "no slot for 5 of 14 states" in line
        found = session.generate([[*one, 7] for one in several], SamplingParams(n=2, **OPTIONS))
        assert session.report.prompt_tokens_found == 14 * 40
        assert_logprobs(model, [[*one, 7] for one in several], [*found][::5])
        assert session.store.pool.states.slots == 9
    with Session(model, kv_budget="16MiB") as session:
        session.store.most_state_bytes = 9 * spec.bytes_per_state
        session.load(path)
        assert computed(session, [*several[-1], 7]) == 41, "the last one had no slot"


def test_what_was_loaded_outlives_calls_while_there_is_memory(
    model: Any, prefixes: Any, rng: random.Random, path: Path
) -> None:
    saved(model, path, prefixes)
    with Session(model, kv_budget="16MiB") as session:
        session.load(path)
        for _ in range(6):
            session.generate([text(rng, 20)], n=8, **OPTIONS)
        for prefix in prefixes:
            assert computed(session, [*prefix, 5]) == 1


def test_states_that_were_dropped_are_restored_though_all_kv_is_there(
    model: Any, prefixes: Any, rng: random.Random, path: Path
) -> None:
    saved(model, path, prefixes)
    with Session(model, kv_budget="16MiB") as session:
        session.load(path)
        states = session.store.tree.states
        while states.used:
            states.spare(states.count)
        assert computed(session, [*prefixes[1], 5]) == 131
        assert session.load(path) == 0
        for prefix in prefixes:
            assert computed(session, [*prefix, 5]) == 1


def test_a_state_that_is_not_as_it_was_written_changes_nothing(
    model: Any, prefixes: Any, rng: random.Random, path: Path
) -> None:
    saved(model, path, prefixes)
    content = bytearray(path.read_bytes())
    content[-32 * 7 - 200] ^= 1  # before the checksums of its states and KV: of the last state
    path.write_bytes(content)
    with Session(model, kv_budget="16MiB") as session:
        session.generate([text(rng, 20), prefixes[0][:10]], n=2, **OPTIONS)
        tree, slots = session.store.tree, session.store.pool.states.slots
        before, used = fingerprint(tree), tree.states.used
        with pytest.raises(PrefixFileError, match=r"the state after .* has another checksum"):
            session.load(path)
        assert fingerprint(session.store.tree) == before
        assert (session.store.tree.states.used, session.store.pool.states.slots) == (used, slots)


def test_a_file_of_a_model_with_states_of_other_shapes_changes_nothing(path: Path, prefixes: Any) -> None:
    saved(prefixkit.patch(make_hybrid("jamba")), path, prefixes)
    other = make_hybrid("jamba", mamba_d_state=16)
    with Session(prefixkit.patch(other), kv_budget="16MiB") as session:
        with pytest.raises(PrefixFileError, match=r"recurrent 128 x 8 torch.float32 .*keep 1 modules .*128 x 16"):
            session.load(path)
        assert session.store.tree.states.used == session.store.pool.states.slots == 0


def test_kv_that_is_torn_leaves_no_state(model: Any, prefixes: Any, path: Path) -> None:
    saved(model, path, prefixes)
    content = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    content[header + 4096] ^= 1
    path.write_bytes(content)
    with Session(model, kv_budget="16MiB") as session:
        with pytest.raises(PrefixFileError, match=r"the KV of tokens .* has another checksum"):
            session.load(path)
        assert not session.store.tree.nodes() and not session.store.tree.root.branches
        assert session.store.tree.states.used == 0


def test_slots_are_free_again_once_what_was_loaded_is_evicted(model: Any, prefixes: Any, path: Path) -> None:
    saved(model, path, prefixes)
    with Session(model, kv_budget="16MiB") as session:
        for _ in range(3):
            session.load(path)
            states = session.store.tree.states
            assert states.used == states.count == 7
            session.store.cache.clear()
            assert states.used == 0
        assert len(states.spare(99)) == 7


def test_more_pins_than_slots(model: Any, rng: random.Random) -> None:
    """The states at their ends are the last to be dropped, and run once more where they were."""
    prompts = [text(rng, 12) for _ in range(20)]
    with Session(model, kv_budget="16MiB") as session:
        session.store.most_state_bytes = 9 * facts_of(model).spec.bytes_per_state
        pins = [session.pin(prompt) for prompt in prompts]
        assert session.store.pool.states.slots == 9
        longer = [[*prompt, 7] for prompt in prompts]
        assert_logprobs(model, longer, [*session.generate(longer, SamplingParams(n=2, **OPTIONS))][::5])
        for pin in pins:
            pin.release()


def test_prompts_without_a_state_at_their_ends_are_saved(
    model: Any, rng: random.Random, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "prefixkit")
    several = [[first, *text(rng, 39)] for first in range(3, 17)]
    with Session(model, kv_budget="16MiB") as session:
        session.store.most_state_bytes = 9 * facts_of(model).spec.bytes_per_state
        session.save(path, several)
        assert [line for line in caplog.messages if "of 14 prefixes have no state at their ends" in line]
    with Session(model, kv_budget="16MiB") as session:
        assert session.load(path) == 14 * 40
        longer = [[*prompt, 7] for prompt in several]
        assert_logprobs(model, longer, [*session.generate(longer, SamplingParams(n=2, **OPTIONS))][::5])


def test_a_file_of_a_model_without_states_says_nothing_of_states(
    path: Path, prefixes: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    with Session(prefixkit.patch(tiny_llama()), kv_budget="1MiB") as session, caplog.at_level(logging.INFO):
        session.save(path, prefixes)
    assert "state" not in caplog.text
