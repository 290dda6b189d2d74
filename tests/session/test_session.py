"""A session: the same samples in any call, one call at a time, and nothing left behind by a call that fails."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import prefixkit
from prefixkit import BeamParams, SamplingParams, Session, SessionBusy
from prefixkit.kv.budget import KVBudgetTooSmall
from prefixkit.models import NotPatched
from prefixkit.session.session import MemoryReleased
from prefixkit.testing.integrity import check_tree
from prefixkit.testing.tiny import ByteTokenizer, tiny_llama

PROMPTS = ["the quick brown fox", "the quick brown dog", "another", "the quick brown fox"]
OPTIONS: dict[str, Any] = {"n": 3, "max_new_tokens": 6, "temperature": 0.9, "seed": 7}


@pytest.fixture(scope="module")
def model() -> Any:
    return prefixkit.patch(tiny_llama())


@pytest.fixture
def session(model: Any) -> Iterator[Session]:
    with Session(model, ByteTokenizer(), kv_budget="4MiB") as session:
        yield session


@pytest.fixture(scope="module")
def expected(model: Any) -> list[tuple[int, int, list[int], str]]:
    """What ``generate`` samples of the prompts."""
    return told(prefixkit.generate(model, ByteTokenizer(), PROMPTS, **OPTIONS))


def told(result: Any) -> list[tuple[int, int, list[int], str]]:
    return sorted((one.prompt_index, one.index, one.tokens, one.text) for one in result)


def assert_empty(session: Session) -> None:
    """Every page is free again, but for those of the prefix cache."""
    store = session.store
    assert store is not None
    tree = store.tree
    check_tree(tree)
    assert not tree.nodes() and not tree.pages_held()
    store.cache.clear()
    check_tree(tree)
    assert tree.allocator.free == tree.allocator.num_pages and not tree.nodes()


def test_every_call_gives_what_a_call_of_its_own_gives(model: Any, session: Session) -> None:
    alone = prefixkit.generate(model, ByteTokenizer(), PROMPTS, **OPTIONS)
    expected, plans = told(alone), alone.report.plans
    for _ in range(3):
        result = session.generate(PROMPTS, **OPTIONS)
        assert told(result) == expected
        assert result.report.samples == 12 and result.report.prompts == 4, "a report is of one call"
        assert result.report.plans == plans, "what earlier calls planned does not count"
        session.generate("something else", n=5, max_new_tokens=4)
        assert_empty(session)


@pytest.mark.parametrize("page_size", [1, 16])
def test_beams_and_samples_take_turns_in_one_pool(model: Any, page_size: int) -> None:
    options: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 8}
    expected = prefixkit.beam_search(model, ByteTokenizer(), PROMPTS, **options)
    with Session(model, ByteTokenizer(), kv_budget="4MiB", page_size=page_size) as session:
        for _ in range(2):
            session.generate(PROMPTS, **OPTIONS)
            found = session.beam_search(PROMPTS, BeamParams(**options))
            assert told(found) == told(expected)
            assert [one.score for one in found] == pytest.approx([one.score for one in expected], abs=1e-5)
            assert_empty(session)


def test_a_stream_gives_each_sample_as_it_finishes(session: Session, expected: Any) -> None:
    assert told(session.stream(PROMPTS, **OPTIONS)) == expected
    lengths = [SamplingParams(max_new_tokens=count, stop_token_ids=()) for count in (30, 2, 5, 12)]
    steps: list[int] = []
    for sample in session.stream(PROMPTS, lengths, on_token=lambda event: steps.append(event.prompt_index)):
        assert max(map(steps.count, range(4))) <= len(sample.tokens) + 1, "given before longer ones go on"
    assert_empty(session)


def test_a_stream_that_is_not_read_to_its_end_leaves_nothing(model: Any, session: Session) -> None:
    stream = session.stream(PROMPTS, **OPTIONS)
    next(stream)
    with pytest.raises(SessionBusy, match="close its stream"):
        session.generate(PROMPTS, **OPTIONS)
    stream.close()
    assert_empty(session)
    assert len(session.generate(PROMPTS, **OPTIONS)) == 12


@pytest.mark.parametrize("later", [0, 1])
def test_an_error_beside_a_stream_is_not_hidden_by_the_end_of_the_session(model: Any, later: int) -> None:
    with pytest.raises(KeyError, match="mine"), Session(model, ByteTokenizer(), kv_budget="1MiB") as session:
        stream = session.stream(PROMPTS, **OPTIONS)
        others = [session.stream(PROMPTS) for _ in range(later)]
        for _ in stream:
            raise KeyError("mine")
    with pytest.raises(ValueError, match="cut short by the end of its session"):
        list(stream)
    for one in others:
        with pytest.raises(MemoryReleased):
            list(one)


def test_a_stream_that_finds_the_session_busy_or_without_memory_begins_when_it_is_asked_again(
    model: Any, session: Session
) -> None:
    expected = told(session.generate(PROMPTS, **OPTIONS))
    first, second = session.stream(PROMPTS, **OPTIONS), session.stream(PROMPTS, **OPTIONS)
    found = [next(first)]
    for _ in range(2):
        with pytest.raises(SessionBusy):
            next(second)
    assert told([*found, *first]) == expected, "which is as it would be without the other"
    session.release_memory()
    for _ in range(2):
        with pytest.raises(MemoryReleased):
            list(second)
    session.resume()
    assert told(second) == expected
    assert list(second) == [], "it has given all"


def test_a_stream_that_an_error_cut_short_says_so_when_it_is_asked_again(session: Session) -> None:
    def fail(event: Any) -> None:
        if event.finish_reason:
            raise KeyError("mine")

    stream = session.stream(PROMPTS, **OPTIONS, on_token=fail)
    with pytest.raises(KeyError, match="mine"):
        list(stream)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"cut short by KeyError: 'mine'; call session\.stream\(\) again"):
            list(stream)
    assert_empty(session)


def test_a_stream_that_is_asked_by_its_own_callback_goes_on(session: Session) -> None:
    def ask(_: object) -> None:
        with pytest.raises(ValueError, match="already executing"):
            next(stream)

    stream = session.stream(PROMPTS, **OPTIONS, on_token=ask)
    assert told(stream) == told(session.generate(PROMPTS, **OPTIONS))


@pytest.mark.parametrize("given", [0, 1])
def test_a_stream_that_was_closed_has_ended(session: Session, given: int) -> None:
    stream = session.stream(PROMPTS, **OPTIONS)
    for _ in range(given):
        next(stream)
    stream.close()
    stream.close()
    assert list(stream) == []
    assert len(session.generate(PROMPTS, **OPTIONS)) == 12


def test_a_stream_checks_everything_at_once(session: Session) -> None:
    with pytest.raises(ValueError, match="top_p"):
        session.stream(PROMPTS, top_p=2.0)
    with pytest.raises(KVBudgetTooSmall):
        session.stream(PROMPTS, max_new_tokens=10**6)
    assert len(session.generate(PROMPTS, **OPTIONS)) == 12


@pytest.mark.drawn(2)
@pytest.mark.parametrize("callback", ["on_sample", "on_token", "on_step"])
@pytest.mark.parametrize("at", [0, 1, 7, 11])
def test_a_callback_that_raises_at_any_step_leaves_the_session_usable(
    session: Session, callback: str, at: int, expected: Any
) -> None:
    calls = []

    def fail(_: object) -> None:
        calls.append(0)
        if len(calls) > at:
            raise KeyError("mine")

    if callback == "on_step":
        at = min(at, OPTIONS["max_new_tokens"] - 1)
    with pytest.raises(KeyError, match="mine"):
        session.generate(PROMPTS, **OPTIONS, **{callback: fail})
    assert_empty(session)
    assert told(session.generate(PROMPTS, **OPTIONS)) == expected


def test_a_call_from_a_callback_or_another_thread_is_refused(session: Session) -> None:
    refused: list[BaseException] = []

    def again() -> None:
        try:
            session.generate("x")
        except SessionBusy as error:
            refused.append(error)

    def on_sample(_: object) -> None:
        again()
        thread = threading.Thread(target=again)
        thread.start()
        thread.join()

    assert len(session.generate(PROMPTS, **OPTIONS, on_sample=on_sample)) == 12
    assert len(refused) == 24


@pytest.mark.parametrize("models", [1, 2])
def test_two_sessions_run_in_two_threads(models: int) -> None:
    made = [prefixkit.patch(tiny_llama()) for _ in range(models)]
    expected = [told(prefixkit.generate(model, ByteTokenizer(), PROMPTS, **OPTIONS)) for model in made]
    found: list[list[Any]] = [[], []]

    def work(number: int) -> None:
        with Session(made[number % models], ByteTokenizer(), kv_budget="4MiB") as session:
            for _ in range(3):
                found[number].append(told(session.generate(PROMPTS, **OPTIONS)))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[expected[number % models]] * 3 for number in range(2)]


def test_two_sessions_on_one_model_take_turns(model: Any, session: Session) -> None:
    expected = told(session.generate(PROMPTS, **OPTIONS))
    with Session(model, ByteTokenizer(), kv_budget="1MiB", page_size=4) as other:
        streams = [one.stream(PROMPTS, **OPTIONS) for one in (session, other)]
        found: list[list[Any]] = [[], []]
        for _ in range(12):
            for samples, stream in zip(found, streams, strict=True):
                samples.append(next(stream))
        assert [list(stream) for stream in streams] == [[], []]
        assert [told(samples) for samples in found] == [expected] * 2


def test_memory_is_given_back_and_taken_again(model: Any) -> None:
    session = Session(model, ByteTokenizer(), kv_budget="1MiB")
    expected = told(session.generate(PROMPTS, **OPTIONS))
    session.release_memory()
    for call in (session.generate, session.stream, lambda prompts: session.beam_search(prompts, num_beams=2)):
        with pytest.raises(MemoryReleased, match="resume"):
            call(PROMPTS)  # type: ignore[operator]
    session.resume()
    session.resume()
    assert told(session.generate(PROMPTS, **OPTIONS)) == expected
    session.close()
    with pytest.raises(MemoryReleased):
        session.generate(PROMPTS)


def test_a_pool_is_freed_with_its_session_and_waits_for_no_garbage_collector(model: Any) -> None:
    gc.collect()
    gc.disable()
    try:
        with Session(model, ByteTokenizer(), kv_budget="1MiB") as session:
            session.generate(PROMPTS, **OPTIONS)
            session.beam_search(PROMPTS, num_beams=2, max_new_tokens=4)
            session.score(PROMPTS[:1], [["abc"]])
            next(session.stream(PROMPTS, **OPTIONS))
            store = session.store
            assert store is not None
            pool = weakref.ref(store.pool)
            del store
            assert pool() is not None
        assert pool() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("through_data", [False, True])
def test_weights_that_change_in_place_are_used_from_the_next_call_on(through_data: bool) -> None:
    model, other = (prefixkit.patch(tiny_llama(seed)) for seed in (0, 1))
    with Session(model, kv_budget="1MiB") as session, torch.no_grad():
        before = told(session.generate([[1, 2, 3]], **OPTIONS))
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            (mine.data if through_data else mine).copy_(theirs)
        if through_data:
            session.weights_changed()
        after = told(session.generate([[1, 2, 3]], **OPTIONS))
    assert before != after == told(prefixkit.generate(other, None, [[1, 2, 3]], **OPTIONS))


def test_weights_cannot_be_said_to_have_changed_in_the_midst_of_a_call(session: Session) -> None:
    def change(_: int) -> None:
        session.weights_changed()

    with pytest.raises(SessionBusy):
        session.generate(PROMPTS, on_step=change, **OPTIONS)
    session.weights_changed()
    assert_empty(session)


def test_parameters_come_as_one_value_as_fields_or_one_for_each_prompt(session: Session) -> None:
    common = told(session.generate(PROMPTS, **OPTIONS))
    assert told(session.generate(PROMPTS, SamplingParams(**OPTIONS))) == common
    assert told(session.generate(PROMPTS, SamplingParams(**OPTIONS | {"n": 1}), n=3)) == common
    assert told(session.generate(PROMPTS, [SamplingParams(**OPTIONS)] * 4)) == common
    assert told(session.generate(PROMPTS, **OPTIONS | {"n": [3] * 4, "seed": [7] * 4})) == common
    counts = session.generate(PROMPTS, n=[1, 2, 3, 4], max_new_tokens=2)
    assert [len(counts.of_prompt(index)) for index in range(4)] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"params": [SamplingParams()]}, ValueError, r"one for all or one per prompt, got 1 \(SamplingParams\) for 4"),
        ({"params": [BeamParams(2)] * 4}, ValueError, r"got 4 \(BeamParams\) for 4 prompts; call beam_search$"),
        ({"n": [1, 2]}, ValueError, "n must be one integer or one per prompt, got 2 for 4 prompts"),
        ({"temprature": 1.0}, TypeError, "no parameter is named 'temprature'; the fields of SamplingParams are n, "),
        ({"num_return_sequences": 2}, TypeError, "in place of num_return_sequences give n$"),
        ({"max_tokens": 2}, TypeError, "in place of max_tokens give max_new_tokens$"),
        ({"num_beams": 2}, TypeError, "no parameter is named 'num_beams'.*; for num_beams call beam_search$"),
        ({"return_samples": False}, ValueError, "return_samples=False drops every sample"),
    ],
)
def test_parameters_that_do_not_fit_are_named(
    session: Session, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        session.generate(PROMPTS, **options)
    assert_empty(session)


def test_what_a_session_is_made_of_is_checked(model: Any) -> None:
    with pytest.raises(NotPatched, match=r"call model = prefixkit\.patch"):
        Session(tiny_llama())
    with pytest.raises(ValueError, match=r"holds no page; .*raise kv_budget"):
        Session(model, kv_budget=1)
    with pytest.raises(ValueError, match="page_size must be an integer from 1 to 128"):
        Session(model, page_size=0)
    with pytest.raises(NotPatched, match=r"model must be a model that prefixkit\.patch returned, got str"):
        Session("gpt2")
    with pytest.raises(TypeError, match=r"tokenizer must be .* got str 'gpt2'; load one: AutoTokenizer"):
        Session(model, "gpt2", kv_budget="1MiB")
    with pytest.raises(
        TypeError, match=r"memory must be a MemoryPolicy, got dict .*; make one: prefixkit\.MemoryPolicy"
    ):
        Session(model, memory={"eviction": "lru"}, kv_budget="1MiB")  # type: ignore[arg-type]
    with Session(model, kv_budget="1MiB") as session, pytest.raises(ValueError, match="tokenizer is None"):
        session.generate([[1, 2]], stop="x")


def test_an_interrupted_save_is_an_interrupt(model: Any, tmp_path: Any) -> None:
    """It comes while the second prompt is computed; the first one is pinned already."""

    class Interrupting(ByteTokenizer):
        texts = 0

        def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
            self.texts += 1
            if self.texts == 2:
                raise KeyboardInterrupt
            return super().decode(tokens)

    with Session(model, Interrupting(), kv_budget="4MiB") as session:
        with pytest.raises(KeyboardInterrupt):
            session.save(tmp_path / "two.safetensors", ["first", "second"])
        assert not list(tmp_path.iterdir())
        assert len(session.generate("third", max_new_tokens=2)) == 1
        assert_empty(session)


@pytest.mark.parametrize("memory", ["lru", {"eviction": "lru"}, 4])
def test_a_memory_policy_of_another_type_is_refused(model: Any, memory: Any) -> None:
    with pytest.raises(TypeError, match="memory must be a MemoryPolicy, got"):
        Session(model, ByteTokenizer(), kv_budget="4MiB", memory=memory)
