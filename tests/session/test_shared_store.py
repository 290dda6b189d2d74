"""One KV store for the sessions of a model and its own ``generate()``: what one computed the other finds."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import peft
import pytest
import torch
from transformers import DynamicCache

import prefixkit
from prefixkit import Session, SessionBusy
from prefixkit.models import TreeCache
from prefixkit.models.model_stores import stores_of
from prefixkit.testing.tiny import tiny_llama

GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 6, "stop_token_ids": ()}


@pytest.fixture
def model() -> Any:
    return prefixkit.patch(tiny_llama(), tree_cache="always")


@pytest.fixture
def seed() -> int:
    seed = int(np.random.default_rng().integers(2**31))
    print("seed", seed)
    return seed


@pytest.fixture
def prompt(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(5, 250, 60).tolist()


def counted(model: Any) -> list[int]:
    """Tokens that go through the model from now on, step by step; KV of before the hook is of another model."""
    counts: list[int] = []
    inner = model.get_input_embeddings()
    inner.register_forward_hook(lambda module, args, out: counts.append(args[0].numel()))
    prefixkit.generate(model, None, [[3]], **GREEDY)  # measures the layers
    return counts


def generated(model: Any, prompt: list[int], **options: Any) -> list[int]:
    out = model.generate(
        input_ids=torch.tensor([prompt]),
        max_new_tokens=6,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        **options,
    )
    tokens = out.sequences if options else out
    return tokens[0, len(prompt) :].tolist()


def assert_as_good(logits: torch.Tensor, stock: torch.Tensor, ids: torch.Tensor) -> None:
    """Logits after the last tokens of a text err from float64 by at most 1.5 times what those of the plain model do."""
    truth = tiny_llama().double()(ids).logits[:, -logits.shape[1] :]
    assert (logits - truth).norm() <= 1.5 * (stock - truth).norm()


def sampled(session: Session, prompt: list[int]) -> list[int]:
    return session.generate([prompt], **GREEDY)[0].tokens


def test_a_prompt_known_to_a_session_is_not_computed_by_generate(model: Any, prompt: list[int]) -> None:
    counts = counted(model)
    with Session(model) as session:
        expected = sampled(session, prompt)
        counts.clear()
        assert generated(model, prompt) == expected == generated(tiny_llama(), prompt)
        assert counts[0] == 1


@pytest.mark.parametrize("opened", ["before", "after"])
def test_a_prompt_known_to_generate_is_not_computed_by_a_session(model: Any, prompt: list[int], opened: str) -> None:
    session = Session(model) if opened == "before" else None
    expected = generated(model, prompt)
    with session or Session(model) as session:
        result = session.generate([prompt], **GREEDY)
        assert result[0].tokens == expected
        assert result.report.prompt_tokens_found == len(prompt)
        assert result.report.tokens_computed == 1 + 5  # its last token, and those that are sampled


def test_two_sessions_share_what_they_know(model: Any, prompt: list[int]) -> None:
    with Session(model) as one, Session(model) as other:
        assert one.store is other.store
        expected = sampled(one, prompt)
        assert sampled(other, prompt) == expected
        assert other.report.prompt_tokens_found == len(prompt)
        one.close()
        assert sampled(other, prompt) == expected


def test_a_pin_stays_while_generate_fills_the_store(model: Any, prompt: list[int], seed: int) -> None:
    """Other prompts take all other pages."""
    rng, plain = np.random.default_rng(seed), tiny_llama()
    with Session(model) as session:
        pin = session.pin(prompt)
        for _ in range(5):
            other = prompt[:30] + rng.integers(5, 250, 40).tolist()
            assert generated(model, other) == generated(plain, other)
        assert generated(model, prompt, output_logits=True, return_dict_in_generate=True) == generated(plain, prompt)
        with torch.no_grad():
            ids = torch.tensor([prompt])
            assert_as_good(model(ids, past_key_values=TreeCache(model)).logits, plain(ids).logits, ids)
        sampled(session, prompt)
        assert session.report.prompt_tokens_found == len(prompt)
        pin.release()


def test_a_session_of_an_adapter_and_generate_share_what_is_of_that_adapter(prompt: list[int]) -> None:
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = prefixkit.patch(peft.get_peft_model(tiny_llama(), config).eval(), tree_cache="always")
    counts = counted(model)
    with Session(model) as session:
        expected = sampled(session, prompt)
        counts.clear()
        assert generated(model, prompt) == expected
        assert counts[0] == 1
        counts.clear()
        with model.disable_adapter():
            assert generated(model, prompt) == generated(tiny_llama(), prompt)
        assert counts[0] == len(prompt)


def test_a_session_with_a_budget_keeps_its_store_to_itself(model: Any, prompt: list[int]) -> None:
    counts = counted(model)
    with Session(model, kv_budget="1MiB") as session:
        sampled(session, prompt)
        counts.clear()
        generated(model, prompt)
        assert counts[0] == len(prompt)


class TestAStoreInUse:
    """By a call: another one gets a store of its own, with one line in the log."""

    def test_generate_in_a_callback_of_a_session(self, model: Any, prompt: list[int], caplog: Any) -> None:
        caplog.set_level("INFO", "prefixkit")
        expected, found = generated(tiny_llama(), prompt), list[list[int]]()
        with Session(model) as session:
            one = session.generate([prompt], on_sample=lambda sample: found.append(generated(model, prompt)), **GREEDY)
            assert one[0].tokens == found[0] == expected
        assert sum("in use" in record.message for record in caplog.records) == 1

    def test_a_session_in_a_callback_of_generate(self, model: Any, prompt: list[int], caplog: Any) -> None:
        caplog.set_level("INFO", "prefixkit")
        expected, found = generated(tiny_llama(), prompt), list[list[int]]()
        with Session(model) as session:
            held = session.pin(prompt[::-1])

            def stop(ids: Any, scores: Any) -> Any:
                if not found:
                    found.append(sampled(session, prompt))
                    for change in (lambda: session.pin(prompt), held.release, session.weights_changed):
                        with pytest.raises(SessionBusy, match="kv_budget"):
                            change()
                return torch.zeros(len(ids), dtype=torch.bool)

            assert generated(model, prompt, stopping_criteria=[stop], return_dict_in_generate=True) == expected
            assert found == [expected]
            assert sum("in use" in record.message for record in caplog.records) == 1
            session.pin(prompt).release()
            held.release()
            session.weights_changed()

    def test_between_the_samples_of_a_stream(self, model: Any, prompt: list[int]) -> None:
        with Session(model) as session:
            stream = session.stream([prompt, prompt[::-1]], **GREEDY)
            first = next(stream)
            assert generated(model, prompt) == generated(tiny_llama(), prompt)
            assert len([first, *stream]) == 2


class TestACacheThatIsHeld:
    """After ``generate()``, or between calls of the model: it makes room for a session, and goes on."""

    def test_by_the_caller_of_generate(self, model: Any, prompt: list[int], caplog: Any) -> None:
        caplog.set_level("INFO", "prefixkit")
        plain, options = tiny_llama(), {"return_dict_in_generate": True, "do_sample": False, "max_new_tokens": 6}
        ids = torch.tensor([prompt, [257] * 10 + prompt[:50]])
        given: Any = {"attention_mask": (ids != 257).long(), "pad_token_id": 257, "eos_token_id": None, **options}
        with Session(model) as session:
            store = session.store
            out, expected = (one.generate(ids, **given) for one in (model, plain))
            assert torch.equal(out.sequences, expected.sequences)
            pin = session.pin(prompt)
            assert session.report.prompt_tokens_found == len(prompt) and session.store is store
            assert sum("has moved to another KV store" in record.message for record in caplog.records) == 1
            longer = torch.cat((out.sequences, ids[:, :7]), 1)
            more = given | {"attention_mask": torch.cat((given["attention_mask"], torch.ones(2, 13).long()), 1)}
            found, truth = (
                one.generate(longer, **more | {"past_key_values": kept.past_key_values})
                for one, kept in ((model, out), (plain, expected))
            )
            assert torch.equal(found.sequences, truth.sequences)
            assert sampled(session, prompt) == generated(plain, prompt)
            assert session.report.prompt_tokens_found == len(prompt)
            pin.release()

    def test_by_a_loop_over_the_model(self, model: Any, prompt: list[int], seed: int) -> None:
        plain, ids = tiny_llama(), torch.tensor([prompt])
        caches, logits = (TreeCache(model), DynamicCache()), (list[torch.Tensor](), list[torch.Tensor]())
        new = torch.from_numpy(np.random.default_rng(seed).integers(5, 250, (1, 9)))
        with Session(model) as session, torch.no_grad():
            for step in range(9):
                given = torch.cat((ids, new[:, :1]), 1) if step == 0 else new[:, step : step + 1]
                for one, cache, found in zip((model, plain), caches, logits, strict=True):
                    found.append(one(given, past_key_values=cache).logits[:, -1])
                if step % 3 == 1:
                    assert sampled(session, prompt) == generated(plain, prompt)
            assert_as_good(*(torch.stack(found, 1) for found in logits), torch.cat((ids, new), 1))


def calls_of(call: Any, prompts: list[list[int]], out: list[Any]) -> None:
    began = time.perf_counter()
    found = [call(prompt) for prompt in prompts]
    out.append((found, time.perf_counter() - began))


def test_two_threads_of_a_session_and_of_generate(model: Any, seed: int) -> None:
    rng, plain = np.random.default_rng(seed), tiny_llama()
    shared = rng.integers(5, 250, 40).tolist()
    prompts = [shared + rng.integers(5, 250, 1 + call % 7).tolist() for call in range(16)]
    expected = [generated(plain, prompt) for prompt in prompts]
    with Session(model) as session:
        found: list[Any] = []
        threads = [
            threading.Thread(target=calls_of, args=(call, prompts, found))
            for call in (lambda prompt: sampled(session, prompt), lambda prompt: generated(model, prompt))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [tokens for tokens, _ in found] == [expected, expected]


@pytest.fixture
def little_memory(free_memory: Callable[[int], None]) -> int:
    """8 MiB are free, whatever is taken: on a CPU a pool takes memory as it is written to."""
    free_memory(2**23)
    return 2**23


def test_all_stores_together_stay_within_the_limit(model: Any, seed: int, little_memory: int) -> None:
    rng, stores = np.random.default_rng(seed), stores_of(model)
    held = []
    with Session(model) as session, Session(model, page_size=4) as other:
        for call in range(11):
            prompt = rng.integers(5, 250, int(rng.integers(1, 90))).tolist()
            if call % 10 == 9:
                held = [session.stream([prompt], **GREEDY)]
                next(held[0])
            expected = sampled(other, prompt)
            assert generated(model, prompt) == expected
            if call % 10 != 9:
                assert sampled(session, prompt) == expected
            else:
                held[0].close()
            assert stores.bytes <= 0.95 * little_memory
    gc.collect()
    assert stores.bytes <= 0.1 * little_memory


def test_a_second_store_above_the_limit_is_refused(model: Any, little_memory: int) -> None:
    with (
        Session(model),
        pytest.raises(ValueError, match=r"above what the other stores of the model leave.*lower kv_budget"),
    ):
        Session(model, kv_budget="7MiB")


def test_memory_goes_with_the_last_session(model: Any, prompt: list[int]) -> None:
    stores = stores_of(model)
    one, other = Session(model), Session(model)
    sampled(one, prompt)
    one.close()
    assert stores.bytes
    other.close()
    gc.collect()
    assert not stores.bytes
