"""The cache answers what a forward pass asks, and refuses what only the tree may decide."""

from __future__ import annotations

import pytest
import torch

from prefixkit.kv.kv_pool import KVPool
from prefixkit.kv.layer_kinds import LayerKind
from prefixkit.models import IncompleteStep, NotPatched, StepCache, patch
from prefixkit.models.steps.layer_pages import layer_pages
from prefixkit.testing.kv_specs import spec_of_alike


def layers_of(pool):
    """Layers that cache their own K and V."""
    spec = pool.spec
    kinds = [LayerKind(4, k.heads, k.head_dim, v.head_dim, (k, v), spec.dtype, spec.device) for k, v in spec.layers]
    return layer_pages(kinds, [kinds[0].plan_kinds[0]], pool)


@pytest.fixture
def pool():
    return KVPool(spec_of_alike(2, 2, 16, torch.float32, torch.device("cpu")), num_pages=4, page_size=4)


@pytest.fixture
def run(tiny, drive, rng):
    driver = drive(tiny())
    driver.tree.insert(rng.integers(3, 128, 9))
    driver.cache = driver.runner.cache
    return driver


def test_between_steps_it_has_no_step(pool):
    cache = StepCache(pool, layers_of(pool))
    for ask in (lambda: cache.step, cache.inputs):
        with pytest.raises(ValueError, match=r"no step in progress; call cache.begin\(step\)"):
            ask()
    with pytest.raises(ValueError, match="end: no step in progress"):
        cache.end()


def test_a_model_called_between_steps_is_told_so(run):
    with pytest.raises(ValueError, match="no step in progress"):
        run.model(torch.tensor([[3, 4]]), past_key_values=run.cache)


def test_a_step_must_end_before_the_next_begins(run):
    step = run.step()
    run.cache.begin(step)
    with pytest.raises(ValueError, match="still open"):
        run.cache.begin(step)
    run.cache.abandon()
    run.cache.begin(step)
    run.model(**run.cache.inputs())
    run.cache.end()


def test_end_names_the_layers_that_were_not_reached(run):
    run.cache.begin(run.step())
    first = run.model.model.layers[0]
    run.model.model.layers[0] = torch.nn.Identity()
    run.model.model.layers[0].forward = lambda hidden, **kwargs: hidden
    run.model(**run.cache.inputs())
    with pytest.raises(IncompleteStep, match=r"layers \[0\] of 2 did not run"):
        run.cache.end()
    run.model.model.layers[0] = first
    run.cache.begin(run.step())  # the failed step is over
    run.model(**run.cache.inputs())
    run.cache.end()


def test_a_layer_that_runs_twice_is_stopped_before_it_writes(run):
    run.cache.begin(run.step())
    run.model(**run.cache.inputs())
    with pytest.raises(IncompleteStep, match="layer 0 wrote KV twice"):
        run.model(**run.cache.inputs())


def test_update_outside_a_patched_layer_says_what_to_do(pool):
    with pytest.raises(NotPatched, match=r"layer 1 was given a StepCache.*prefixkit.patch\(model\)"):
        StepCache(pool, layers_of(pool)).update(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 16), 1)


@pytest.mark.parametrize(
    "call",
    [
        lambda cache: cache.reorder_cache(torch.tensor([0])),
        lambda cache: cache.crop(1),
        lambda cache: cache.crop(-1),
        lambda cache: cache.reset(),
        lambda cache: cache.batch_repeat_interleave(2),
        lambda cache: cache.batch_select_indices(torch.tensor([0])),
    ],
)
def test_what_only_the_tree_may_decide_is_refused(call, pool):
    with pytest.raises(TypeError, match="the tree decides whose KV is kept"):
        call(StepCache(pool, layers_of(pool)))


def test_it_answers_what_models_and_generate_ask(pool):
    cache = StepCache(pool, layers_of(pool))
    assert len(cache) == 2
    assert bool(cache)
    assert cache.get_seq_length() == 0
    assert cache.get_seq_length(1) == 0
    assert cache.get_max_length() == -1
    assert cache.get_mask_sizes(5, 0) == (5, 0)
    assert cache.get_query_offset(1) == 0
    assert not cache.is_compileable
    assert cache.is_initialized
    assert cache.is_sliding == cache.is_linear == cache.is_dummy == [False, False]
    assert "2 layers of 2 x 16 and 2 x 16, torch.float32 on cpu, between steps" in repr(cache)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (spec_of_alike(1, 2, 24, torch.float32, torch.device("cpu")), "layer 1 .* made for 1 layers"),
        (spec_of_alike(2, 4, 24, torch.float32, torch.device("cpu")), r"\(1, 2, 9, 24\).*take \(1, 4, 9, 24\)"),
        (spec_of_alike(2, 2, 16, torch.float32, torch.device("cpu")), r"\(1, 2, 9, 24\).*take \(1, 2, 9, 16\)"),
        (spec_of_alike(2, 2, 24, torch.bfloat16, torch.device("cpu")), r"torch.float32, but .* torch.bfloat16"),
    ],
    ids=["layers", "heads", "head_dim", "dtype"],
)
def test_a_pool_of_another_shape_is_refused(spec, message, run):
    pool = KVPool(spec, num_pages=8, page_size=4)
    cache = StepCache(pool, layers_of(pool))
    cache.begin(run.step())
    with pytest.raises(ValueError, match=message):
        run.model(**cache.inputs())


def test_tokens_other_than_the_steps_are_refused(run):
    run.cache.begin(run.step())
    with pytest.raises(ValueError, match="position_ids other than the step's"):
        run.model(**{**run.cache.inputs(), "input_ids": torch.tensor([[3, 4, 5, 6]]), "position_ids": None})


def test_a_batch_of_rows_is_refused(run):
    run.cache.begin(run.step())
    inputs = run.cache.inputs()
    with pytest.raises(ValueError, match=r"\(2, 2, 9, 24\).*take \(1, 2, 9, 24\)"):
        run.model(**{**inputs, "input_ids": inputs["input_ids"].repeat(2, 1)})


def test_generate_is_refused(tiny, run):
    with pytest.raises(ValueError, match="no step in progress"):
        patch(tiny()).generate(torch.tensor([[3, 4, 5]]), past_key_values=run.cache, max_new_tokens=2)
