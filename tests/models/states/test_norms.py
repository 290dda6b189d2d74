"""Norms in steps of models with states: which the op computes, and that nothing else of a model changes."""

from __future__ import annotations

import copy
import logging
import pickle

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm, Qwen3NextRMSNormGated

import prefixkit
from prefixkit.models.attention_class import original_class
from prefixkit.models.states.norms import Norm, norm_modules, norms_by_ops, norms_class
from prefixkit.testing.tiny import tiny_llama
from tests.models.states.hybrids import make_hybrid


class Centred(LlamaRMSNorm):
    """Not a norm by the root mean square, whatever its name."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states - hidden_states.mean(-1, keepdim=True))


class Called(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = list[str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def test_what_a_norm_computes_is_measured():
    norms = LlamaRMSNorm(8), Qwen3NextRMSNorm(8), Qwen3NextRMSNormGated(8), LlamaRMSNorm(16)
    others = Centred(8), NemotronHRMSNormGated(8, 4), nn.LayerNorm(8), nn.Linear(8, 8)
    expected = [
        Norm("variance_epsilon", 0.0, False),
        Norm("eps", 1.0, False),
        Norm("variance_epsilon", 0.0, True),
        Norm("variance_epsilon", 0.0, False),
    ]
    assert norm_modules([*norms, *others]) == dict(zip(norms, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_only_in_steps_the_op_runs_with_the_epsilon_of_the_moment(dtype):
    norm = Qwen3NextRMSNorm(32).to(dtype).requires_grad_(False)
    own = copy.deepcopy(norm)
    ((_, form),) = norm_modules([norm]).items()
    norm.__class__ = norms_class(Qwen3NextRMSNorm, form)
    x = torch.randn(3, 32).to(dtype)
    for epsilon in (1e-6, 3.0):
        norm.eps = own.eps = epsilon
        assert torch.equal(norm(x), own(x))
        with norms_by_ops(), torch.inference_mode(), Called() as called:
            made = norm(x)
            other = norm(x.double())  # a dtype that is not the weights': the class's own code
        assert called.ops[0] == "prefixkit.rms_norm.default" and called.ops.count(called.ops[0]) == 1
        assert torch.allclose(made.float(), own(x).float(), rtol=0.01, atol=1e-6) and other.dtype == torch.float64
    for again in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert original_class(again) is Qwen3NextRMSNorm and type(again) is type(norm)


def test_the_log_says_how_many_run_by_the_op(caplog):
    caplog.set_level(logging.INFO, "prefixkit")
    model = prefixkit.patch(make_hybrid("qwen3_next"))
    with prefixkit.Session(model) as session:
        session.generate([[3, 4, 5]], max_new_tokens=2)
    (said,) = [record.message for record in caplog.records if "norms" in record.message]
    assert said == f"{len(norm_modules(model.modules()))} norms run by prefixkit's rms_norm on cpu"
    assert any("states of up to 32 tokens of a row stay in their pool" in line.message for line in caplog.records)


def test_models_with_states_alone_have_such_norms_until_they_are_unpatched():
    for model, some in ((make_hybrid("qwen3_next"), True), (tiny_llama(), False)):
        before = [type(module) for module in model.modules()]
        prefixkit.patch(model)
        norms = [*norm_modules(model.modules())]
        assert norms and all((type(norm) is not original_class(norm)) == some for norm in norms)
        prefixkit.unpatch(model)
        assert [type(module) for module in model.modules()] == before
