"""Texts through layers that keep a state: forks, calls that go on from calls, preemption, graphs."""

from __future__ import annotations

import gc
import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import prefixkit
from prefixkit import MemoryPolicy, SamplingParams, Session
from prefixkit.models import facts_of
from prefixkit.models.requirements import CACHE
from prefixkit.runners import short_steps
from prefixkit.runners.batch import Pace
from prefixkit.runners.graph import GraphRunner
from prefixkit.runners.short_steps import REPLAYS, USES, Bucket, ShortGraph
from tests.models.states.hybrids import HYBRIDS, VOCAB, assert_logprobs, make_hybrid
from tests.runners.stand_ins import Capturing, Planning


@pytest.fixture(scope="module", params=HYBRIDS)
def made(request: pytest.FixtureRequest) -> Any:
    return make_hybrid(request.param)


@pytest.fixture
def model(made: Any) -> Iterator[Any]:
    """Patched, and without what an earlier test has left in it."""
    yield prefixkit.patch(made)
    prefixkit.unpatch(made)


@pytest.fixture
def rng() -> random.Random:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print("seed", seed)
    return random.Random(seed)


def text(rng: random.Random, least: int, most: int) -> list[int]:
    return [rng.randrange(3, VOCAB) for _ in range(rng.randint(least, most))]


def fresh_tokens(rng: random.Random) -> Iterator[int]:
    """Each token once: what begins with another one than earlier texts shares nothing with them."""
    return iter(rng.sample(range(3, VOCAB), VOCAB - 3))


def calls(session: Session, model: Any, rng: random.Random, turns: int = 2) -> None:
    """Prompts that part anywhere; later ones go on from samples, repeat them, or part inside of them."""
    base, known = text(rng, 40, 40), list[list[int]]()
    for turn in range(turns):
        prompts = [base[: rng.randint(1, 40)] + text(rng, 1, 20) for _ in range(rng.randint(1, 4))]
        if known:
            whole = rng.choice(known)
            prompts += [known[-1], whole + text(rng, 1, 5), whole[: rng.randint(1, len(whole))]]
        params = SamplingParams(
            n=rng.randint(1, 4), max_new_tokens=rng.randint(4, 12), seed=turn, stop_token_ids=(5, 9)
        )
        found = session.generate(prompts, params)
        assert_logprobs(model, prompts, [*found][:: 1 + len(found) // 4])
        known += [prompts[one.prompt_index] + list(one.tokens) for one in found]


@pytest.mark.drawn(1)
def test_samples_have_the_probabilities_of_one_forward_pass(model, rng):
    with Session(model, prefill_chunk=rng.choice([None, 1, 7]), page_size=rng.choice([1, 4, 16])) as session:
        calls(session, model, rng)
        assert session.report.prompt_tokens_found > 0


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_preempted_samples_go_on_exactly(preemption, rng):
    """Few pages: runs leave the tree with their states, and come back."""
    model = prefixkit.patch(make_hybrid("lfm2"))
    token, state = facts_of(model).spec.bytes_per_token, facts_of(model).spec.bytes_per_state
    policy = MemoryPolicy(preemption=preemption, headroom=4)
    with Session(model, kv_budget=2 * max(150 * token, 24 * state), page_size=1, memory=policy) as session:
        prompts = [text(rng, 10, 20) for _ in range(4)]
        found = session.generate(prompts, SamplingParams(n=4, max_new_tokens=20, stop_token_ids=()))
        assert_logprobs(model, prompts, found)
        assert session.report.preempted_swapped + session.report.preempted_recomputed > 0


@pytest.mark.drawn(1)
def test_few_slots_let_requests_wait_and_states_be_computed_again(model, rng):
    spec = facts_of(model).spec
    budget = 2 * max(9 * spec.bytes_per_state, 2000 * spec.bytes_per_token)
    with Session(model, kv_budget=budget, prefill_chunk=16) as session:
        calls(session, model, rng)
        states = session.store.pool.states
        assert states.bytes <= budget / 2
        assert states.slots >= 9


def test_a_budget_without_room_for_one_request_is_refused(rng):
    model = prefixkit.patch(make_hybrid("qwen3_next"))
    spec = facts_of(model).spec
    with Session(model, kv_budget=4 * spec.bytes_per_state) as session:
        with pytest.raises(prefixkit.KVBudgetTooSmall, match=r"need 9 states of .* at once, .* may take"):
            session.generate([text(rng, 5, 5)], SamplingParams(max_new_tokens=4))
        assert session.store.pool.states.slots == 0


def test_scores_are_those_of_one_forward_pass(model, rng):
    prompts, options = [text(rng, 5, 30) for _ in range(3)], [text(rng, 1, 6) for _ in range(4)]
    with Session(model) as session:
        for prompt, scores in zip(prompts, session.score(prompts, [options] * 3), strict=True):
            for option, score in zip(options, scores, strict=True):
                ids = torch.tensor([prompt + option])
                with torch.no_grad():
                    of = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
                want = float(of.gather(1, torch.tensor(option)[:, None]).sum())
                assert abs(score.total - want) <= 1e-3


@pytest.fixture
def by_graphs(monkeypatch) -> dict[str, Any]:
    """Sessions whose steps run by graphs that a stand-in captures, with the settings returned.  Nothing attends, as
    these plan nothing.
    """
    make, made = prefixkit.session.assembly.engine_of, dict[Any, GraphRunner]()
    settings: dict[str, Any] = {"fewest_steps": 1, "keep_states": True, "short": 4096}

    def runner_of(eager: Any, page_size: int) -> GraphRunner:
        capturing, planning = Capturing(), [Planning(planner) for planner in eager.planners]
        pace = Pace(ahead=2, slack=2, waited_for=8)
        return GraphRunner(eager, eager.model, planning, page_size, pace=pace, capture=lambda: capturing, **settings)

    def engine_of(*args: Any, **kwargs: Any) -> Any:
        engine = make(*args, **kwargs)
        eager = engine.runner
        if eager not in made:
            made[eager] = runner_of(eager, engine.store.tree.page_size)
        engine.runner = made[eager]
        return engine

    monkeypatch.setattr("prefixkit.session.session_memory.engine_of", engine_of)
    return settings


def test_captured_steps_go_on_from_the_right_states(rng, by_graphs):
    """Rows that have ended run on for some steps; buckets have rows that are none."""
    model = prefixkit.patch(make_hybrid("mamba"))
    with Session(model, most_running=5) as session:
        calls(session, model, rng, turns=3)
        assert session.report.graph_steps > 0


@pytest.mark.parametrize("own", [1, 6, 70])
def test_prompts_of_one_length_are_captured_without_padding(own, rng, by_graphs):
    """Padding would enter states; longer prompts store another state on their way."""
    model = prefixkit.patch(make_hybrid("mamba"))
    head, fresh = text(rng, 40, 40), fresh_tokens(rng)
    with Session(model) as session:
        session.generate([head], max_new_tokens=1)
        replays = list[int]()
        for turn in range(USES + 3):
            prompts = [[*head, next(fresh), *text(rng, own - 1, own - 1)]]
            found = session.generate(prompts, max_new_tokens=3, n=2, seed=turn, stop_token_ids=())
            assert_logprobs(model, prompts, found)
            replays.append(found.report.graph_steps)
        assert replays[-1] == replays[0] + 1, "the step over the prompt"


def test_a_captured_step_advances_states_once(rng, by_graphs):
    """Steps of few samples update states in their slots: one that ran before its capture too would do so twice."""
    by_graphs["fewest_steps"] = 1000
    model = prefixkit.patch(make_hybrid("mamba"))
    with Session(model) as session:
        prompts = [text(rng, 20, 20)]
        found = session.generate(prompts, max_new_tokens=3 * USES, n=2, stop_token_ids=())
        assert found.report.captures == 1 and found.report.graph_steps > USES
        assert_logprobs(model, prompts, found)


@pytest.mark.parametrize("mid", ["the check", "the step"])
def test_a_step_that_fails_before_its_capture_is_not_run_twice_over_its_states(mid, rng, by_graphs):
    """Its first layers have advanced their states in place."""
    by_graphs["fewest_steps"] = 1000
    model = prefixkit.patch(make_hybrid("mamba"))
    runs, fails = [0], USES + (mid == "the step")
    params = {"max_new_tokens": 3 * USES, "n": 2, "stop_token_ids": ()}

    def run_out(module: Any, args: Any) -> None:
        runs[0] += args[0].shape[-2] == 2  # the rows of a step of both samples
        if runs[0] == fails:
            runs[0] += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    with Session(model) as session:
        prompts = [text(rng, 20, 20)]
        hook = model.get_output_embeddings().register_forward_pre_hook(run_out)
        if mid == "the step":
            with pytest.raises(torch.OutOfMemoryError):
                session.generate(prompts, **params)
        else:
            assert_logprobs(model, prompts, session.generate(prompts, **params))
        assert runs[0] > fails
        hook.remove()
        assert_logprobs(model, prompts, session.generate(prompts, **params))


def test_only_as_many_lengths_stay_captured_as_memory_should_hold(rng, by_graphs, monkeypatch):
    monkeypatch.setattr(short_steps, "MOST_SIZES", 2)
    model = prefixkit.patch(make_hybrid("mamba"))
    head, fresh = text(rng, 40, 40), fresh_tokens(rng)
    with Session(model) as session:
        session.generate([head], max_new_tokens=1)

        def captures(own: int, times: int = 1) -> int:
            """In calls with ``own`` tokens of their own."""
            count = 0
            for turn in range(times):
                prompts = [[*head, next(fresh), *text(rng, own - 1, own - 1)]]
                found = session.generate(prompts, max_new_tokens=1, seed=turn)
                assert_logprobs(model, prompts, found)
                count += found.report.captures
            return count

        assert [captures(3, USES), captures(5, USES), captures(5), captures(3, REPLAYS - 1)] == [1, 1, 0, 0]
        assert captures(7, USES) == 1, "in place of 5, which was used before 3"
        assert [captures(3), captures(7), captures(5)] == [0, 0, 0], "captures would take longer than graphs spare"
        assert [captures(7), captures(3, REPLAYS - 3), captures(5)] == [0, 0, 1], "in place of 7"


def test_ever_other_steps_leave_nothing_behind(rng, by_graphs, monkeypatch):
    """Each way to run some rows in batches is a kind of steps of its own."""
    monkeypatch.setattr(short_steps, "MOST_GRAPHS", 2)
    monkeypatch.setattr(short_steps, "MOST_COUNTED", 2)
    model = prefixkit.patch(make_hybrid("mamba"))
    fresh, replays = fresh_tokens(rng), 0

    def living(kind: type) -> int:
        gc.collect()
        return sum(isinstance(one, kind) for one in gc.get_objects())

    graphs, counted = living(ShortGraph), living(Bucket)  # of other tests
    with Session(model) as session:

        def replays_of(*lengths: int) -> int:
            prompts = [[next(fresh), *text(rng, own - 1, own - 1)] for own in lengths]
            found = session.generate(prompts, max_new_tokens=1)
            assert_logprobs(model, prompts, found)
            return found.report.graph_steps

        for way in [(6,), (3, 3), (2, 4), (1, 5)]:
            for _ in range(USES + REPLAYS):
                replays += replays_of(*way)
            assert living(ShortGraph) <= graphs + 2
        assert replays >= REPLAYS
        assert living(Bucket) <= counted + 2 + 2


@pytest.mark.drawn(1)
def test_tokens_are_those_without_the_patch(model):
    """A left-padded batch that shares its head: greedily, with beams, continued."""
    ids = torch.randint(3, VOCAB, (3, 20))
    mask = torch.ones_like(ids)
    for row, pad in enumerate((0, 4, 9)):
        ids[row, pad : pad + 5] = ids[0, :5]
        ids[row, :pad], mask[row, :pad] = 0, 0
    for options in ({"num_beams": 1}, {"num_beams": 3}):
        fixed = {"attention_mask": mask, "max_new_tokens": 10, "do_sample": False, **options}
        got = prefixkit.patch(model, tree_cache="always").generate(ids, **fixed)
        want = prefixkit.patch(model, tree_cache="never").generate(ids, **fixed)
        assert torch.equal(got, want)


def test_a_cache_that_is_pickled_after_the_weights_have_changed_is_computed_anew_and_says_so(caplog):
    model = prefixkit.patch(make_hybrid("lfm2"), tree_cache="always")
    fixed = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    cache = model.generate(torch.randint(3, VOCAB, (2, 20)), **fixed)[CACHE]
    pickle.dumps(cache)
    assert "computed anew" not in caplog.text
    with torch.no_grad():
        next(model.parameters()).mul_(1.1)
    pickle.dumps(cache)
    assert "the model has changed since its cache was made; the cache is computed anew" in caplog.text


def test_a_module_that_loses_its_state_is_refused():
    model = make_hybrid("lfm2")
    mixer = next(module for module in model.modules() if type(module).__name__ == "Lfm2ShortConv")
    cls = type(mixer)

    class Forgets(cls):  # type: ignore[valid-type, misc]
        def forward(self, hidden_states, **kwargs):
            if (cache := kwargs.get(CACHE)) is not None:
                cache.update_conv_state(hidden_states.mT, self.layer_idx, conv_kernel_size=3)
            return super().forward(hidden_states)

    mixer.__class__ = Forgets
    with pytest.raises(prefixkit.UnsupportedModel, match="go on from a state"):
        prefixkit.generate(prefixkit.patch(model), None, [[5, 6, 7]], max_new_tokens=2)
