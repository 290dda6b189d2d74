"""Tokens of Mamba 2 and of gated delta nets from states in a pool: the modules' own code, some functions of it ops."""

from __future__ import annotations

import copy
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.integrations.accelerate import force_accelerate_hooks
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
from transformers.models.mamba2 import modeling_mamba2 as mamba2

import prefixkit.backends  # registers them
from prefixkit.attention.state_batches import StateBatch
from prefixkit.kv.state_pool import StatePool
from prefixkit.models.states.fused_step import fused_step, log_fused
from prefixkit.models.states.mixer_class import mixers, run_texts
from prefixkit.models.states.step_states import run_step
from tests.models.states.hybrids import make_hybrid

pytestmark = pytest.mark.skipif(not Path("scripts/tiny_models.py").exists(), reason="needs the repository's scripts")
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ("bamba", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2")},
    "falcon_h1": ("falcon_h1", {"mamba_rms_norm": True}),
    "falcon_h1 with gates in the step": ("falcon_h1", {"mamba_rms_norm": False}),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BOTH = {"causal_conv1d_update", "mamba2_selective_state_update"}
RULES = {"causal_conv1d_update", "torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"}
# Rows go on in their slot, begin in one that several read, write nothing, and are none.
SOURCE, TARGET = [1, 5, 5, 2, 0], [1, 3, 4, -1, 0]
CPU = torch.device("cpu")
CACHE = SimpleNamespace(run_state=None)  # stands for one of ours


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def generator() -> torch.Generator:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print("seed", seed)
    return torch.Generator().manual_seed(seed)


def mixer_of(family: str, dtype: torch.dtype) -> nn.Module:
    from scripts.tiny_models import tiny_config, tiny_model

    name, changes = FAMILIES.get(family, (family, {}))
    torch.manual_seed(0)
    found = mixers(tiny_model(tiny_config(name, **changes), ""))
    return next(iter(found.values())).to(dtype)


def width_of(mixer: Any) -> int:
    out = mixer.o_proj if hasattr(mixer, "o_proj") else mixer.out_proj
    width: int = out.out_features
    return width


def states_of(mixer: Any, slots: int, generator: torch.Generator) -> StatePool:
    """A pool of states after texts of seven random tokens."""
    texts = torch.randn(slots + 1, 7, width_of(mixer), generator=generator).to(next(mixer.parameters()).dtype)
    _, cache = run_texts(mixer, (texts.flatten(0, 1)[None], CACHE), {}, texts.shape[0] * 7, lambda _: texts)
    states = cache.found()
    pool = StatePool((tuple(states),), [torch.device("cpu")])
    pool.grow(slots)
    for mine, made in zip(pool.tensors[0], cache.values(states), strict=True):
        mine.copy_(made)
    return pool


def by_step(mixer: nn.Module, tokens: Tensor, pool: StatePool, writes: bool, length: int = 1) -> Tensor:
    """``[rows * length, width]`` that a step of a tree makes, whose rows write all, or as :data:`TARGET` says."""
    target = torch.tensor(TARGET)
    written = None if writes else (target >= 0).nonzero()[:, 0]
    if written is not None:
        target = target[written]
    batch = StateBatch(length, None, torch.tensor(SOURCE), target, written)
    step: Any = SimpleNamespace(states=(batch,), num_rows=len(tokens))
    out: Tensor = run_step(mixer, (tokens[None], CACHE), {}, step, pool, 0)[0]
    return out


def by_itself(mixer: nn.Module, tokens: Tensor, pool: StatePool, length: int = 1) -> tuple[Tensor, list[Tensor]]:
    """The same by the module's own code, and the states of all rows after it."""
    states = pool.states[0]
    before = [tensor[SOURCE] for tensor in pool.tensors[0]]
    dtype = tokens.dtype
    before = [
        of if state.recurrent and dtype != torch.float64 else of.to(dtype)
        for state, of in zip(states, before, strict=True)
    ]
    texts = tokens.unflatten(0, (-1, length))
    out, cache = run_texts(mixer, (tokens[None], CACHE), {}, len(tokens), lambda _: texts, states, before)
    if out.shape != texts.shape:  # Falcon-H1 with a norm in 5.17
        pytest.skip(f"transformers {transformers.__version__} returns {list(out.shape)} for {len(texts)} texts")
    return out.flatten(0, 1), cache.values(states)


def assert_errs_no_more(
    mixer: nn.Module, dtype: torch.dtype, generator: torch.Generator, writes: bool, length: int = 1
) -> None:
    """Compare a step with the module's own code: what is returned, both states, and the slots that no row writes."""
    double = copy.deepcopy(mixer).double()
    # Of what is returned and of both states: our errors, theirs, and the numbers themselves.
    sums = torch.zeros(3, 3, dtype=torch.float64)
    for _ in range(8):  # norms magnify some rows of small numbers
        pool = states_of(mixer, 5, generator)
        tokens = torch.randn(len(SOURCE) * length, width_of(mixer), generator=generator).to(dtype)
        own, own_states = by_itself(mixer, tokens, pool, length)
        exact, exact_states = by_itself(double, tokens.double(), pool, length)
        before = copy.deepcopy(pool.tensors[0])
        out = by_step(mixer, tokens, pool, writes, length)
        assert out.dtype == dtype
        judged = [(out[: 4 * length], own[: 4 * length], exact[: 4 * length])]
        for mine, was, theirs, right in zip(pool.tensors[0], before, own_states, exact_states, strict=True):
            assert torch.equal(mine[[2, 5]], was[[2, 5]]), "slots that no row writes stay as they are"
            judged.append((mine[[1, 3, 4]], theirs[:3], right[:3]))
        sums += torch.tensor([[float(of.abs().sum()) for of in (m - r, t - r, r)] for m, t, r in judged])
    # The module's code computes some in float32 whatever it is given, so of float32 it is no oracle.
    slack = 1e-6 if dtype == torch.float32 else 0
    assert (sums[:, 0] <= 1.5 * sums[:, 1] + slack * sums[:, 2]).all(), sums


@pytest.mark.drawn(4)
@pytest.mark.parametrize(("dtype", "writes"), [*((dtype, True) for dtype in DTYPES), (DTYPES[0], False)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_in_the_pool_errs_no_more_than_the_modules_own_code(family, writes, dtype, generator):
    mixer = mixer_of(family, dtype)
    fused = fused_step(mixer, 1, CPU)
    assert fused is not None and fused.replaced.keys() == BOTH
    assert_errs_no_more(mixer, dtype, generator, writes)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*(("qwen3_next", dtype) for dtype in DTYPES), ("qwen3_5_text", DTYPES[1]), ("olmo_hybrid", DTYPES[0])],
    ids=str,
)
def test_tokens_of_a_delta_net_err_no_more_than_by_its_own_code(family, dtype, generator):
    mixer = mixer_of(family, dtype)
    fused = fused_step(mixer, 5, CPU)
    assert fused is not None and fused.replaced.keys() == RULES
    for length, writes in ((1, True), (5, False)):
        assert_errs_no_more(mixer, dtype, generator, writes, length)


def test_a_delta_net_runs_many_tokens_by_its_own_code_and_mamba_2_more_than_one():
    assert fused_step(mixer_of("qwen3_next", torch.float32), 33, CPU) is None
    assert fused_step(mixer_of("mamba2", torch.float32), 2, CPU) is None


@pytest.mark.parametrize("weights", [torch.float64, torch.float32], ids=str)
def test_what_the_ops_do_not_take_runs_by_the_modules_functions(weights, generator):
    """Numbers of float64, and weights of a convolution that are more exact than its inputs."""
    mixer: Any = mixer_of("mamba2", torch.float64 if weights == torch.float64 else torch.bfloat16)
    mixer.conv1d.to(weights)
    pool = states_of(mixer, 5, generator)
    tokens = torch.randn(len(SOURCE), width_of(mixer), generator=generator).to(next(mixer.parameters()).dtype)
    before = [tensor[SOURCE] for tensor in pool.tensors[0]]
    wanted, cache = run_texts(mixer, (tokens[None], CACHE), {}, 5, lambda _: tokens[:, None], pool.states[0], before)
    out = by_step(mixer, tokens, pool, writes=True)
    # The recurrence is the op's where the convolution alone differs, and so errs by less than the module's own.
    near = 1e-12 if weights == torch.float64 else 0.05
    assert torch.allclose(out[:4], wanted[:4, 0], rtol=near, atol=near)
    for mine, theirs in zip(pool.tensors[0], cache.values(pool.states[0]), strict=True):
        assert torch.allclose(mine[[1, 3, 4]], theirs[:3], rtol=near, atol=near)


def test_no_other_class_has_such_a_step():
    from scripts.tiny_models import tiny_config, tiny_model

    for family in ("mamba", "lfm2"):
        for mixer in mixers(tiny_model(tiny_config(family), "")).values():
            assert fused_step(mixer, 1, CPU) is None


def test_where_gradients_may_be_wanted_the_module_runs_by_itself():
    mixer = mixer_of("mamba2", torch.float32)
    assert fused_step(mixer, 1, CPU) is not None
    with torch.enable_grad():
        assert fused_step(mixer, 1, CPU) is None


def test_the_log_says_once_what_runs(caplog):
    caplog.set_level(logging.INFO, "prefixkit")
    model = make_hybrid("nemotron_h")
    with prefixkit.Session(prefixkit.patch(model)) as session:
        session.generate([[3, 4, 5]], max_new_tokens=2)
    said = [record.message for record in caplog.records if "single tokens" in record.message]
    assert said == ["NemotronHMamba2Mixer: states of single tokens stay in their pool on cpu, by ops"]


def changed(**functions: Any) -> nn.Module:
    """A Mamba 2 mixer of a file that has other functions."""
    theirs: Any = mamba2.Mamba2Mixer.forward
    own = inspect.unwrap(theirs)
    forward = FunctionType(own.__code__, own.__globals__ | functions, own.__name__, own.__defaults__, own.__closure__)
    cls = type("ChangedMixer", (mamba2.Mamba2Mixer,), {"forward": force_accelerate_hooks("conv1d")(forward)})
    mixer = mixer_of("mamba2", torch.float32)
    mixer.__class__ = cls
    return mixer


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    """As transformers decorates its own."""
    name, package = {
        "mamba2_selective_state_update": ("selective_state_update", "mamba_ssm"),
        "causal_conv1d_update": ("causal_conv1d_update", "causal_conv1d"),
    }[function.__name__]
    made: Callable[..., Any] = use_kernel_func_from_hub_with_fallback(name, package)(function)
    return made


def torchs(name: str) -> Callable[..., Any]:
    """transformers' torch code of a function."""
    found: Callable[..., Any] = getattr(mamba2, name).__wrapped__
    return found


def test_a_function_that_computes_something_else_is_left_to_the_module(generator, caplog):
    caplog.set_level(logging.INFO, "prefixkit")

    def mamba2_selective_state_update(*args: Any, **kwargs: Any) -> Tensor:
        made: Tensor = 2 * torchs("mamba2_selective_state_update")(*args, **kwargs)
        return made

    mixer = changed(mamba2_selective_state_update=decorated(mamba2_selective_state_update))
    assert fused_step(mixer, 1, CPU) is None
    log_fused([mixer, mixer], torch.device("cpu"))
    assert [record.message for record in caplog.records] == [
        "ChangedMixer: single tokens run by transformers' code: mamba2_selective_state_update returns other numbers "
        "than the op"
    ]
    pool, tokens = states_of(mixer, 5, generator), torch.randn(len(SOURCE), width_of(mixer), generator=generator)
    wanted, _ = by_itself(mixer, tokens, pool)
    assert torch.equal(by_step(mixer, tokens, pool, False), wanted)


def test_a_function_that_takes_something_else_is_left_to_the_module(caplog):
    caplog.set_level(logging.INFO, "prefixkit")

    def causal_conv1d_update(hidden_states: Tensor, conv_state: Tensor) -> Tensor:
        return hidden_states

    mixer = changed(causal_conv1d_update=decorated(causal_conv1d_update))
    assert fused_step(mixer, 1, CPU) is None
    log_fused([mixer], torch.device("cpu"))
    (said,) = [record.message for record in caplog.records]
    assert "transformers' code: causal_conv1d_update takes other arguments than it did" in said


def test_a_forward_that_is_wrapped_otherwise_is_left_to_the_module():
    mixer = changed()
    inner: Any = type(mixer).forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return inner(self, *args, **kwargs)

    forward.__wrapped__ = inner.__wrapped__  # type: ignore[attr-defined]
    mixer.__class__ = type("WrappedMixer", (mamba2.Mamba2Mixer,), {"forward": forward})
    assert fused_step(mixer, 1, CPU) is None


def test_a_kernel_that_is_installed_stays(generator, monkeypatch):
    """Then the states that it takes are gathered, and the others stay in their pool."""
    calls = list[Any]()

    def kernel(state: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(type(state))
        return torchs("mamba2_selective_state_update")(state, *args, **kwargs)

    package, module = ModuleType("mamba_ssm"), "mamba_ssm.ops.triton.selective_state_update"
    for name in ("ops", "ops.triton", "ops.triton.selective_state_update"):
        monkeypatch.setitem(sys.modules, f"mamba_ssm.{name}", ModuleType(f"mamba_ssm.{name}"))
    monkeypatch.setitem(sys.modules, "mamba_ssm", package)
    package.selective_state_update = sys.modules[module].selective_state_update = kernel  # type: ignore[attr-defined]
    package.ops = SimpleNamespace(triton=SimpleNamespace(selective_state_update=sys.modules[module]))  # type: ignore[attr-defined]
    mixer = changed(mamba2_selective_state_update=decorated(torchs("mamba2_selective_state_update")))
    fused = fused_step(mixer, 1, CPU)
    assert fused is not None and fused.replaced.keys() == {"causal_conv1d_update"}
    pool, tokens = states_of(mixer, 5, generator), torch.randn(len(SOURCE), width_of(mixer), generator=generator)
    wanted, states = by_itself(mixer, tokens, pool)
    calls.clear()
    out = by_step(mixer, tokens, pool, False)
    assert calls == [Tensor] and torch.allclose(out[:4], wanted[:4], rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(pool.tensors[0], states, strict=True):
        assert torch.allclose(mine[[1, 3, 4]], theirs[:3], rtol=1e-4, atol=1e-5)


def test_a_kernel_of_the_hub_stays():
    """The package ``kernels`` makes a module of a function, and sets a kernel as its ``forward``."""

    def as_module(func: Callable[..., Any]) -> nn.Module:
        class Func(nn.Module):
            def forward(self, *args: Any, **kwargs: Any) -> Any:
                return func(*args, **kwargs)

        return Func()

    functions = {name: as_module(decorated(torchs(name))) for name in BOTH}
    mixer = changed(**functions)
    fused = fused_step(mixer, 1, CPU)
    assert fused is not None and fused.replaced == functions
    functions["causal_conv1d_update"].forward = lambda *args, **kwargs: None
    assert fused_step(mixer, 1, CPU) is None
