"""The maps from latents to K and V: views of a weight where they are in one, and never stale."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from prefixkit.models.latents.latent_maps import LatentMaps, is_affine, maps_of
from tests.models.tiny_families import make_model

HEADS, MADE, V, LATENT, ROTARY = 4, 12, 10, 16, 8
MANY = 10**6


class Attention(nn.Module):
    """Expands as DeepSeek's does; K and V are rows of one weight, head by head."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(LATENT, HEADS * (MADE + V), bias=bias)
        self.other = nn.Linear(LATENT, HEADS * (MADE + V), bias=False)

    def expand_kv(self, latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        made = self.up(latent[0, 0]).view(-1, HEADS, MADE + V).transpose(0, 1)[None]
        k, v = made.split([MADE, V], dim=3)
        return torch.cat((k, rotary.expand(-1, HEADS, -1, -1)), dim=3), v


class RotaryFirst(Attention):
    """Two weights, and rotary keys before the others."""

    def __init__(self) -> None:
        super().__init__()
        self.k_up, self.v_up = nn.Linear(LATENT, HEADS * MADE, bias=False), nn.Linear(LATENT, HEADS * V, bias=False)

    def expand_kv(self, latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (up(latent[0, 0]).view(-1, HEADS, up.out_features // HEADS) for up in (self.k_up, self.v_up))
        k, v = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
        return torch.cat((rotary.expand(-1, HEADS, -1, -1), k), dim=3), v


class Mixing(Attention):
    """Rotary keys go into all elements of K."""

    def expand_kv(self, latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        k, v = super().expand_kv(latent, rotary)
        return k + 0.5 * k.roll(1, 3), v


class Bent(Attention):
    def expand_kv(self, latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        return super().expand_kv(latent.relu(), rotary)


class Crossed(Attention):
    """V depends on rotary keys."""

    def expand_kv(self, latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        k, v = super().expand_kv(latent, rotary)
        return k, v + rotary.sum(3, keepdim=True)


def cached(dtype: torch.dtype = torch.float32, tokens: int = 5) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    c, r = (torch.randn(1, 1, tokens, dim).to(dtype) for dim in (LATENT, ROTARY))
    return c, r


def found(module: nn.Module, dtype: torch.dtype = torch.float32, tokens: int = MANY) -> LatentMaps | None:
    return maps_of(module, LATENT, ROTARY, torch.zeros((), dtype=dtype), lambda: tokens)


def viewed(module: nn.Module) -> bool:
    """Whether the maps are memory of the module's own."""
    maps, own = found(module), {tensor.untyped_storage().data_ptr() for tensor in module.parameters()}
    assert maps is not None
    return {maps.key.untyped_storage().data_ptr(), maps.value.untyped_storage().data_ptr()} <= own


def assert_maps(module: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    """Scores and outputs by latents are those by K and V."""
    maps, (c, r) = found(module, dtype), cached(dtype)
    assert maps is not None
    k, v = (states[0].double() for states in module.expand_kv(c, r))
    q = torch.randn(3, HEADS, k.shape[2]).to(dtype)
    absorbed = maps.absorb(q).double()
    assert absorbed.shape == (3, HEADS, LATENT + ROTARY)
    scores = torch.einsum("qhd,kd->qhk", absorbed, torch.cat((c, r), 3)[0, 0].double())
    if (shift := maps.shift(q)) is not None:
        scores += shift[..., None].double()
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 3e-2}
    torch.testing.assert_close(scores, torch.einsum("qhd,hkd->qhk", q.double(), k), **close)
    weight = scores.softmax(2)
    means = torch.einsum("qhk,kd->qhd", weight, c[0, 0].double()).float()
    torch.testing.assert_close(maps.values(means).double(), torch.einsum("qhk,hkd->qhd", weight, v), **close)


@pytest.mark.parametrize("kind", [Attention, RotaryFirst, Mixing, lambda: Attention(bias=True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_latents_meet_what_k_and_v_would(kind: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    module = kind().to(dtype).requires_grad_(False)
    assert is_affine(module, *cached(dtype))
    assert_maps(module, dtype)


def test_maps_that_are_rows_of_weights_are_views_of_them() -> None:
    assert viewed(Attention())
    assert viewed(RotaryFirst())
    assert not viewed(Mixing())
    assert not viewed(Attention(bias=True))


@pytest.mark.parametrize("kind", [Bent, Crossed])
def test_what_is_not_linear_is_not_absorbed(kind: Callable[[], nn.Module]) -> None:
    assert not is_affine(kind(), *cached())


def test_a_map_that_bends_later_is_none() -> None:
    module = Attention()
    assert found(module) is not None
    module.up.register_forward_hook(lambda module, args, out: out.relu())
    assert found(module) is None


def test_maps_that_must_be_measured_are_not_for_few_tokens() -> None:
    module = Mixing()
    assert found(module, tokens=LATENT + ROTARY) is None
    assert found(module, tokens=LATENT + ROTARY + 1) is not None
    assert found(Attention(), tokens=1) is not None


def test_random_numbers_stay_those_of_the_caller() -> None:
    torch.manual_seed(0)
    want, module = torch.randn(3), Attention()
    torch.manual_seed(0)
    found(module)
    assert torch.equal(torch.randn(3), want)


def in_place(module: Any) -> None:
    module.up.weight.add_(1.0)


def through_data(module: Any) -> None:
    module.up.weight.data.mul_(2.0)


def another_parameter(module: Any) -> None:
    module.up.weight = nn.Parameter(torch.randn_like(module.up.weight))


def moved(module: Any) -> None:
    module.up.weight.data = torch.randn_like(module.up.weight)


def another_module(module: Any) -> None:
    module.up = nn.Linear(LATENT, HEADS * (MADE + V), bias=False)


def another_layer_of_its_own(module: Any) -> None:
    module.up = module.other


def biased(module: Any) -> None:
    module.up.bias = nn.Parameter(torch.randn(HEADS * (MADE + V)))


def hooked(module: Any) -> None:
    module.up.register_forward_hook(lambda module, args, out: 2 * out)


def another_forward(module: Any) -> None:
    forward = module.up.forward
    module.up.forward = lambda x: 3 * forward(x)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, weight: Tensor) -> Tensor:
        return self.scale * weight


CHANGES = [in_place, through_data, another_parameter, moved, another_module, another_layer_of_its_own, biased, hooked]
CHANGES += [another_forward]


@pytest.mark.parametrize(
    "change",
    CHANGES,
    ids=[change.__name__ for change in CHANGES],
)
@torch.no_grad()
def test_maps_follow_the_weights(change: Callable[[Any], None]) -> None:
    module = Attention()
    assert_maps(module)
    change(module)
    assert_maps(module)
    assert_maps(copy.deepcopy(module))


@torch.no_grad()
def test_what_changes_nothing_at_first_is_seen_later() -> None:
    """A scale of 1, as an adapter of zeros."""
    module = Attention()
    parametrize.register_parametrization(module.up, "weight", Scaled())
    assert_maps(module)
    module.up.parametrizations.weight[0].scale.data.fill_(3.0)
    assert_maps(module)


@torch.no_grad()
def test_maps_follow_adapters() -> None:
    """New ones, which are zeros, trained, switched, disabled and merged."""
    config = peft.LoraConfig(r=2, target_modules=["up"])
    module = peft.get_peft_model(Attention(), config, adapter_name="one").eval()
    module.add_adapter("two", peft.LoraConfig(r=2, target_modules=["up"], init_lora_weights=False, lora_bias=True))
    inner = module.base_model.model
    assert_maps(inner)
    inner.up.lora_B["one"].weight.data.normal_()
    assert_maps(inner)
    module.set_adapter("two")
    assert_maps(inner)
    assert not viewed(inner)
    with module.disable_adapter():
        assert_maps(inner)
        assert viewed(inner)
    module.set_adapter("one")
    module.merge_adapter()
    assert_maps(inner)
    module.unmerge_adapter()
    assert_maps(inner)


def test_weights_of_another_dtype_are_found_again() -> None:
    module = Attention().requires_grad_(False)
    assert viewed(module)
    module.bfloat16()
    assert_maps(module, torch.bfloat16)


@pytest.mark.parametrize("kind", ["deepseek_v3", "minicpm3"])
def test_maps_of_transformers_models_are_views(kind: str) -> None:
    sizes = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 24}
    module = make_model(kind, num_key_value_heads=4, first_k_dense_replace=2, **sizes).model.layers[0].self_attn
    maps = maps_of(module, 16, 8, torch.zeros(()), lambda: 0)
    assert maps is not None
    assert maps.key.untyped_storage().data_ptr() == module.kv_b_proj.weight.untyped_storage().data_ptr()
    assert (maps.key.shape, maps.value.shape) == ((4, 16, 16), (4, 24, 16))
