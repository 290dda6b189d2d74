"""KV outlives a call: what a session has seen is not computed again, and what it is of old weights is never used."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch

import prefixkit
from prefixkit import MemoryPolicy, Session
from prefixkit.kv.budget import KVBudgetTooSmall
from prefixkit.kv.prefixes.file import PrefixFileError
from prefixkit.kv.prefixes.front_coding import front_coded
from prefixkit.models import kv_spec
from prefixkit.testing.integrity import check_tree
from prefixkit.testing.tiny import ByteTokenizer, tiny_llama
from prefixkit.tree.pages import pages_for

FEW_SHOT = "question: how many legs has a spider? answer: eight. " * 3
OPTIONS: dict[str, Any] = {"n": 2, "max_new_tokens": 7, "temperature": 0.9, "seed": 7, "stop_token_ids": ()}


@pytest.fixture(scope="module")
def model() -> Any:
    return prefixkit.patch(tiny_llama())


@pytest.fixture
def session(model: Any) -> Any:
    with Session(model, ByteTokenizer(), kv_budget="1MiB") as session:
        yield session


def told(result: Any) -> list[tuple[int, int, list[int], str]]:
    return sorted((one.prompt_index, one.index, one.tokens, one.text) for one in result)


def alone(model: Any, prompts: Any, **options: Any) -> list[Any]:
    return told(prefixkit.generate(model, ByteTokenizer(), prompts, **OPTIONS | options))


class TestSecondCalls:
    def test_compute_only_what_is_new(self, model: Any, session: Session) -> None:
        session.generate([FEW_SHOT + "one"], **OPTIONS)
        result = session.generate([FEW_SHOT + "2nd"], **OPTIONS)
        assert told(result) == alone(model, [FEW_SHOT + "2nd"])
        sampled = 2 * 6  # the last of each is never computed
        assert result.report.tokens_computed == len("2nd") + sampled
        assert result.report.prompt_tokens_found == len(FEW_SHOT)
        assert "had KV already" in str(result.report)

    def test_of_an_equal_prompt_compute_its_last_token(self, model: Any, session: Session) -> None:
        session.generate([FEW_SHOT], **OPTIONS)
        report = session.generate([FEW_SHOT], **OPTIONS | {"max_new_tokens": 1}).report
        assert report.tokens_computed == 1

    @pytest.mark.parametrize("page_size", [1, 4, 16])
    def test_go_on_where_any_sample_ended(self, model: Any, page_size: int) -> None:
        """Also where samples begin alike."""
        with Session(model, ByteTokenizer(), kv_budget="1MiB", page_size=page_size) as session:
            first = session.generate([FEW_SHOT], **OPTIONS | {"n": 8, "temperature": 0.3})
            turns = [list(FEW_SHOT.encode()) + one.tokens + list(b"and?") for one in first]
            result = session.generate(turns, **OPTIONS)
            assert told(result) == alone(model, turns)
            assert result.report.prompt_tokens_found >= 8 * (len(FEW_SHOT) + 6)
            store = session.store
            assert store is not None
            check_tree(store.tree)

    def test_after_many_calls_memory_is_what_it_was(self, model: Any) -> None:
        with Session(model, ByteTokenizer(), kv_budget="64KiB", page_size=4) as session:
            for call in range(20):
                session.generate([f"{call} {FEW_SHOT[: 2 * call]}"], n=2, max_new_tokens=4)
            store = session.store
            assert store is not None
            assert store.tree.allocator.free + len(store.tree.root.children) > 0
            check_tree(store.tree)
            assert store.tree.num_cached <= store.tree.allocator.num_pages
            assert session.report.tokens_evicted >= 0
            assert told(session.generate(["the last"], **OPTIONS)) == alone(model, ["the last"])

    def test_an_error_leaves_what_was_there(self, model: Any, session: Session) -> None:
        session.generate([FEW_SHOT], **OPTIONS)

        def fail(_: Any) -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            session.generate([FEW_SHOT + "x"], on_sample=fail, **OPTIONS)
        result = session.generate([FEW_SHOT + "y"], **OPTIONS)
        assert result.report.prompt_tokens_found >= len(FEW_SHOT)
        assert told(result) == alone(model, [FEW_SHOT + "y"])

    def test_a_report_that_is_kept_keeps_no_pool(self, model: Any) -> None:
        session = Session(model, ByteTokenizer(), kv_budget="64KiB")
        report = session.generate(["x"], max_new_tokens=2).report
        assert session.store is not None
        pool = weakref.ref(session.store.pool)
        session.close()
        gc.collect()
        assert pool() is None and report.samples == 1


class TestOtherWeights:
    @pytest.mark.parametrize("how", ["in place", "optimizer", "load_state_dict"])
    def test_kv_of_old_ones_is_not_used(self, how: str) -> None:
        model, other = prefixkit.patch(tiny_llama(0)), prefixkit.patch(tiny_llama(1))
        with Session(model, ByteTokenizer(), kv_budget="1MiB") as session:
            session.generate([FEW_SHOT], **OPTIONS)
            if how == "load_state_dict":
                model.load_state_dict(other.state_dict())
            elif how == "in place":
                with torch.no_grad():
                    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
                        mine.copy_(theirs)
            else:
                optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
                for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
                    mine.grad = (mine - theirs).detach()
                optimizer.step()
                other = model
            result = session.generate([FEW_SHOT], **OPTIONS)
            assert result.report.prompt_tokens_found == 0
            assert told(result) == alone(other, [FEW_SHOT])

    def test_an_adapter_that_is_switched_off_is_noticed(self) -> None:
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        torch.manual_seed(3)
        model = prefixkit.patch(peft.get_peft_model(tiny_llama(), config).eval())
        with Session(model, ByteTokenizer(), kv_budget="1MiB") as session:
            on = told(session.generate([FEW_SHOT], **OPTIONS))
            with model.disable_adapter():
                result = session.generate([FEW_SHOT], **OPTIONS)
                assert told(result) == alone(model, [FEW_SHOT]) != on
            assert told(session.generate([FEW_SHOT], **OPTIONS)) == on

    def test_pinned_prompts_are_computed_again(self) -> None:
        model, other = prefixkit.patch(tiny_llama(0)), prefixkit.patch(tiny_llama(1))
        with Session(model, ByteTokenizer(), kv_budget="1MiB") as session:
            pin = session.pin(FEW_SHOT)
            model.load_state_dict(other.state_dict())
            result = session.generate([FEW_SHOT + "x"], **OPTIONS)
            assert told(result) == alone(other, [FEW_SHOT + "x"])
            report = session.generate([FEW_SHOT + "y"], **OPTIONS).report
            assert report.prompt_tokens_found == len(FEW_SHOT)
            pin.release()


class TestPins:
    def test_a_pinned_prompt_outlives_pressure(self, model: Any) -> None:
        with Session(model, ByteTokenizer(), kv_budget="64KiB", page_size=4) as session:
            pin = session.pin(FEW_SHOT[:40])
            for call in range(4):
                session.generate([f"{call} something else that takes pages"], n=3, max_new_tokens=20)
            assert session.generate([FEW_SHOT[:40] + "x"], max_new_tokens=2).report.prompt_tokens_found == 40
            pin.release()
            for call in range(4):
                session.generate([f"{call} something else that takes pages"], n=3, max_new_tokens=20)
            assert session.generate([FEW_SHOT[:40] + "x"], max_new_tokens=2).report.prompt_tokens_found == 0
            with pytest.raises(ValueError, match="pin of 40 tokens was released before"):
                pin.release()

    def test_what_does_not_fit_beside_pins_is_refused(self, model: Any) -> None:
        with Session(model, ByteTokenizer(), kv_budget="64KiB", page_size=4) as session:
            pin = session.pin("p" * 60)
            with pytest.raises(KVBudgetTooSmall, match=r"beside 15 pages of pinned prefixes; .* shorten the prompt$"):
                session.pin("q" * 100)
            with pytest.raises(KVBudgetTooSmall, match=r"beside 15 pages of pinned prefixes; .* lower max_new_tokens$"):
                session.generate(["x" * 20], max_new_tokens=100)
            pin.release()
            session.generate(["x" * 20], max_new_tokens=100)

    @pytest.mark.parametrize("shared", ["p" * 80, "p" * 70, "p" * 90], ids=["all", "a part", "all, and more"])
    def test_a_prompt_that_begins_as_a_pinned_one_needs_room_for_the_rest_alone(self, model: Any, shared: str) -> None:
        """The pool holds 32 pages, of which the pin takes 20."""
        with Session(model, ByteTokenizer(), kv_budget="64KiB", page_size=4) as session:
            session.pin("p" * 80)
            result = session.generate([shared + "q" * 8], **OPTIONS)
            assert told(result) == alone(model, [shared + "q" * 8])
            assert result.report.prompt_tokens_found == min(len(shared), 80)
            with pytest.raises(KVBudgetTooSmall, match="beside 20 pages of pinned prefixes"):
                session.generate([shared + "q" * 8], max_new_tokens=100)

    def test_prompts_that_share_a_prefix_are_saved_together_though_each_takes_half_of_the_pool(
        self, model: Any, tmp_path: Path
    ) -> None:
        with Session(model, ByteTokenizer(), kv_budget="64KiB", page_size=4) as session:
            assert session.save(tmp_path / "turns.safetensors", ["p" * 80 + letter for letter in "abcd"]) == 84


class TestFiles:
    def test_another_process_finds_what_was_saved(self, model: Any, session: Session, tmp_path: Path) -> None:
        path = tmp_path / "few-shot.safetensors"
        node = session.prompt(FEW_SHOT)
        session.step(node, max_new_tokens=5)
        assert session.save(path, [FEW_SHOT + "a", node, "other"]) == len(FEW_SHOT) + 1 + 5 + len("other")
        again = prefixkit.patch(tiny_llama())
        with Session(again, ByteTokenizer(), kv_budget="1MiB", page_size=4) as later:
            assert later.load(path) == len(FEW_SHOT) + 1 + 5 + len("other")
            assert later.load(path) == 0
            result = later.generate([FEW_SHOT + "ab", "other"], **OPTIONS)
            assert told(result) == alone(model, [FEW_SHOT + "ab", "other"])
            assert result.report.prompt_tokens_found >= len(FEW_SHOT) + 1

    @pytest.mark.parametrize("as_given", [str, lambda text: list(text.encode())], ids=["text", "token ids"])
    def test_a_single_prompt_need_not_be_in_a_list(
        self, model: Any, session: Session, tmp_path: Path, as_given: Any
    ) -> None:
        """A string is not taken for a list of letters."""
        path = tmp_path / "prompt.safetensors"
        assert session.save(path, as_given("hello, llama")) == 12
        assert session.save(path, session.prompt("hello, llama")) == 12
        with Session(model, ByteTokenizer(), kv_budget="1MiB") as later:
            later.load(path)
            assert later.generate(["hello, llama"], max_new_tokens=1).report.prompt_tokens_found == 12

    @pytest.mark.parametrize("wrong", [None, 3, {"a": 1}])
    def test_what_is_no_list_of_prompts_is_named(self, session: Session, tmp_path: Path, wrong: Any) -> None:
        with pytest.raises(TypeError, match=r"must be a list of prompts.* got (NoneType|int|a dict)"):
            session.save(tmp_path / "none.safetensors", wrong)
        assert not list(tmp_path.iterdir())

    def test_a_path_and_prefixes_that_are_none_are_named(self, session: Session, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="prefixes is empty; pass at least one prompt or search node"):
            session.save(tmp_path / "none.safetensors", [])
        for call in (lambda: session.save(5, ["a"]), lambda: session.load(5)):  # type: ignore[arg-type]
            with pytest.raises(TypeError, match="path must be a string or a path, got int 5"):
                call()

    def test_a_place_where_no_file_can_be_is_refused_before_anything_is_computed(
        self, session: Session, tmp_path: Path
    ) -> None:
        with pytest.raises(IsADirectoryError, match="it is a folder; name a file in it"):
            session.save(tmp_path, [FEW_SHOT])
        with pytest.raises(FileNotFoundError, match=r"there is no folder .*/runs; make it first"):
            session.save(tmp_path / "runs" / "few-shot.safetensors", [FEW_SHOT])
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(OSError, match=r"pipe cannot be written: it is no regular file, .*; name a file"):
            session.save(tmp_path / "pipe", [FEW_SHOT])
        assert (tmp_path / "pipe").is_fifo()
        assert not session.report.steps

    @pytest.mark.parametrize("eviction", ["lru", "lfu", "cost"])
    def test_all_that_was_read_is_there_though_others_were_found_more_often(
        self, model: Any, session: Session, tmp_path: Path, eviction: Any
    ) -> None:
        path = tmp_path / "prefixes.safetensors"
        prompts = [f"{letter} is a letter of the alphabet" for letter in "abcd"]
        count = session.save(path, prompts)
        policy = MemoryPolicy(eviction=eviction)
        with Session(model, ByteTokenizer(), kv_budget="96KiB", page_size=4, memory=policy) as later:
            for _ in range(5):
                later.generate([f"{number}: what is asked often" * 2 for number in range(3)], max_new_tokens=4)
            assert later.load(path) == count
            assert later.load(path) == 0
            assert later.generate(prompts, max_new_tokens=1).report.prompt_tokens_found == count

    @pytest.mark.parametrize("seed", range(6))
    def test_a_pool_of_just_the_pages_that_prefixes_take_is_enough(
        self, model: Any, session: Session, tmp_path: Path, seed: int
    ) -> None:
        """Whatever was in the cache before; where some of them are pinned, what follows may begin a page of its own."""
        path, rng, page_size = tmp_path / "prefixes.safetensors", np.random.default_rng(seed), 4
        letters = rng.choice(list("abcdefgh"), (6, 70))
        prompts = ["".join(letters[0, :30]) + "".join(own[: rng.integers(1, 40)]) for own in letters]
        count = session.save(path, prompts)
        coded, _ = front_coded([np.frombuffer(prompt.encode(), np.uint8).astype(np.int32) for prompt in prompts])
        pages = sum(pages_for(own, page_size) for own in (coded.lengths - coded.shared).tolist())
        size = kv_spec(model).bytes_per_token * page_size
        with Session(model, ByteTokenizer(), kv_budget=(pages + seed % 2) * size, page_size=page_size) as exact:
            exact.generate([prompts[0][:17] + "x", prompts[2][:33] + "yy", "z" * 9], n=2, max_new_tokens=6)
            if seed % 2:
                exact.pin(prompts[1][: rng.integers(1, 30)])
            exact.load(path)
            assert exact.load(path) == 0
            assert exact.generate(prompts, max_new_tokens=1).report.prompt_tokens_found == sum(map(len, prompts))
        with (
            Session(model, ByteTokenizer(), kv_budget=(pages - 1) * size, page_size=page_size) as small,
            pytest.raises(KVBudgetTooSmall, match=f"needs KV for {pages * 4} tokens .* holds {pages * 4 - 4} tokens"),
        ):
            small.load(path)
        assert count == len(coded.tokens)

    def test_a_search_node_may_end_with_the_padding_token(self, session: Session, tmp_path: Path) -> None:
        """Which it has sampled: no tokenizer has padded it."""
        pad = session.tokenizer.pad_token_id
        one, other = session.prompt("abc").fork(2)
        one.extend([7, pad]), other.extend([8, 9])
        assert session.save(tmp_path / "nodes.safetensors", [one, other]) == 7
        assert len(session.score([one, other], ["!"])) == 2

    def test_a_file_of_another_model_is_refused(self, session: Session, tmp_path: Path) -> None:
        path = tmp_path / "prefixes.safetensors"
        session.save(path, [FEW_SHOT])
        with Session(prefixkit.patch(tiny_llama(1)), kv_budget="1MiB") as other:
            with pytest.raises(PrefixFileError, match=r"another model|fingerprint|weights"):
                other.load(path)
            other.generate([[1, 2, 3]], max_new_tokens=2)

    def test_a_torn_file_leaves_the_tree_as_it_is(self, model: Any, session: Session, tmp_path: Path) -> None:
        path = tmp_path / "prefixes.safetensors"
        session.save(path, ["a short one", FEW_SHOT])
        content = bytearray(path.read_bytes())
        content[-100] ^= 1  # of the last block
        path.write_bytes(content)
        with Session(model, ByteTokenizer(), kv_budget="1MiB") as other:
            other.generate([FEW_SHOT[:20]], max_new_tokens=1)
            with pytest.raises(PrefixFileError):
                other.load(path)
            store = other.store
            assert store is not None
            check_tree(store.tree)
            assert store.tree.pages_held() == 0
            result = other.generate(["a short one", FEW_SHOT], **OPTIONS)
            assert result.report.prompt_tokens_found == 20
            assert told(result) == alone(model, ["a short one", FEW_SHOT])

    def test_what_does_not_fit_is_refused_before_anything_is_written_or_read(
        self, model: Any, session: Session, tmp_path: Path
    ) -> None:
        path = tmp_path / "prefixes.safetensors"
        session.save(path, [FEW_SHOT])
        before = path.read_bytes()
        with Session(model, ByteTokenizer(), kv_budget="32KiB", page_size=4) as small:
            with pytest.raises(KVBudgetTooSmall, match="raise kv_budget, or save fewer prefixes"):
                small.load(path)
            with pytest.raises(KVBudgetTooSmall):
                small.save(path, [f"{i}" * 30 for i in range(6)])
            assert path.read_bytes() == before
            store = small.store
            assert store is not None and store.budget().pinned_pages == 0


@pytest.fixture(scope="module")
def calls(model: Any) -> list[tuple[list[str], list[Any]]]:
    """Prompts of calls that take more pages than a small pool has, and what each call samples alone."""
    prompts = [[FEW_SHOT[: 10 + 7 * (call % 3)] + str(call), "x" * (call % 5 + 1)] for call in range(12)]
    return [(both, alone(model, both)) for both in prompts]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("eviction", ["lru", "lfu", "cost"])
def test_every_policy_gives_the_same_samples(model: Any, eviction: Any, calls: Any) -> None:
    with Session(
        model, ByteTokenizer(), kv_budget="64KiB", page_size=4, memory=MemoryPolicy(eviction=eviction)
    ) as session:
        for prompts, expected in calls:
            assert told(session.generate(prompts, **OPTIONS)) == expected
