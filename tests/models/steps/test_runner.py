"""A runner computes the logits that a step asks for, and no others."""

from __future__ import annotations

import logging

import peft
import pytest
import torch
from torch import nn

from prefixkit.kv.kv_pool import KVPool
from prefixkit.models import IncompleteStep, ModelRunner, NotPatched, UnsupportedModel, kv_spec, patch
from prefixkit.testing.kv_specs import spec_of_alike


@pytest.fixture
def run(tiny, drive, rng):
    driver = drive(tiny("gemma2", final_logit_softcapping=3.0))
    # With first tokens of their own, for a shared one would be one row of a step instead of two.
    driver.texts = [[first, *rng.integers(3, 128, n - 1).tolist()] for first, n in ((3, 9), (4, 5))]
    for text in driver.texts:
        driver.tree.insert(text)
    return driver


def test_only_the_rows_asked_for_come_back(run, tiny):
    step = run.step(logit_rows=[0, 4, 13])
    everything = run.runner(run.step())
    rows = run.runner(step)
    assert rows.shape == (3, run.runner.vocab_size)
    assert rows.dtype == torch.float32
    assert torch.allclose(rows, everything[[0, 4, 13]], atol=1e-6)
    assert everything.abs().max() <= 3.0, "the model's own cap on final logits stays"


def test_a_step_without_logits_skips_the_head(run):
    sizes = []
    run.model.lm_head.register_forward_hook(lambda module, args, out: sizes.append(args[0].numel()))
    assert run.runner(run.step(logit_rows=[])).shape == (0, 128)
    assert sizes == [0]
    run.tree.mark_computed([node for node, _, _ in run.runs], [end for _, _, end in run.runs])
    assert run.step() is None, "its KV is complete all the same"


def test_half_precision_models_give_float32_logits(tiny, drive, rng):
    driver = drive(tiny().bfloat16())
    driver.tree.insert(rng.integers(3, 128, 5))
    assert driver.runner(driver.step()).dtype == torch.float32
    assert driver.pool.pages(0)[0].dtype == torch.bfloat16


def test_no_mask_of_tokens_times_kv_is_built(run):
    shapes = []
    run.model.model.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(kwargs["attention_mask"].numel()), with_kwargs=True
    )
    run.runner(run.step())
    assert shapes == [0]


def test_dropout_is_refused_and_training_mode_without_any_is_not(run):
    want = run.runner(run.step())
    run.model.train()
    assert torch.equal(run.runner(run.step()), want)
    run.model.model.layers[1].self_attn.attention_dropout = 0.1
    with pytest.raises(ValueError, match=r"training mode, where model.layers.1.self_attn.attention_dropout is random"):
        run.runner(run.step())


def test_an_unpatched_model_is_refused(tiny):
    model = tiny()
    with pytest.raises(NotPatched, match=r"LlamaForCausalLM is not patched; call model = prefixkit.patch\(model\)"):
        ModelRunner(model, KVPool(kv_spec(model), 4, 4))


def test_a_pool_of_another_shape_is_refused(tiny):
    with pytest.raises(
        ValueError, match=r"needs a pool of 2 layers of 2 x 24 and 2 x 24.*got one of 3 layers of 2 x 24"
    ):
        ModelRunner(patch(tiny()), KVPool(spec_of_alike(3, 2, 24, torch.float32, torch.device("cpu")), 4, 4))


def test_a_model_without_a_language_head_gives_hidden_states_alone(run):
    step = run.step()
    want, runner = run.runner.hidden(step), ModelRunner(run.model.model, run.pool)
    assert torch.equal(runner.hidden(step), want)
    with pytest.raises(TypeError, match=r"Gemma2Model has no language-model head.*session.values"):
        runner(step)


def test_a_wrapper_that_passes_keywords_on_is_run_as_a_whole(run):
    class Wrapper(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.base = model
            self.calls = 0

        def forward(self, **kwargs):
            self.calls += 1
            return self.base(**kwargs)

    wrapper = Wrapper(run.model).eval()
    expected = run.runner(run.step())
    assert torch.equal(ModelRunner(wrapper, run.pool)(run.step()), expected)
    assert wrapper.calls == 1


def test_after_an_error_the_next_step_runs(run):
    hook = run.model.model.norm.register_forward_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.runner(run.step())
    hook.remove()
    assert run.runner(run.step()).shape == (14, 128)


def test_a_layer_that_is_skipped_is_an_error(run):
    class Skip(nn.Module):
        def forward(self, hidden, **kwargs):
            return hidden

    run.model.model.layers[1] = Skip()
    with pytest.raises(IncompleteStep, match=r"layers \[1\] of 2"):
        run.runner(run.step())


def test_rotary_embeddings_that_move_with_the_batch_are_reported(tiny, caplog):
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with caplog.at_level(logging.WARNING, "prefixkit"):
        model = patch(tiny(rope_parameters=rope))
        ModelRunner(model, KVPool(kv_spec(model), 4, 4))
    assert "rotary embedding dynamic depends on the longest position" in caplog.text


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_adapters_that_put_tokens_before_a_prompt_are_refused(kind, tiny):
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = patch(peft.get_peft_model(tiny(), config))
    with pytest.raises(UnsupportedModel, match=rf"puts learned tokens before every prompt \({kind}\)"):
        ModelRunner(model, KVPool(kv_spec(model), 4, 4))


def test_a_wrapper_that_returns_tuples_is_run(run):
    class Wrapper(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.base = model

        def forward(self, **kwargs):
            return self.base(**kwargs).to_tuple()

    expected = run.runner(run.step())
    assert torch.equal(ModelRunner(Wrapper(run.model).eval(), run.pool)(run.step()), expected)


def test_a_model_whose_forward_cannot_be_asked_for_some_logits_gives_them_too(tiny, drive, dense_logits, rng):
    model, tokens = tiny(), rng.integers(3, 128, 9).tolist()
    original = type(model)

    class AllLogits(original):
        def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None):
            return super().forward(input_ids, attention_mask, position_ids, past_key_values, use_cache=use_cache)

    model.__class__ = AllLogits
    run = drive(model)
    run.tree.insert(tokens)
    step = run.step(logit_rows=[2, 8])
    torch.testing.assert_close(run.runner(step), dense_logits(model, tokens)[[2, 8]], rtol=0, atol=1e-4)
