"""Functions of whole rows in a patched model: after the layer's own rotary embedding, once for each row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import prefixkit
from prefixkit import UnsupportedVariant, patch, variants
from prefixkit.attention.variants import BadTransform, compose
from prefixkit.models import facts_of, kv_spec
from prefixkit.models.weights.content import kv_version
from prefixkit.models.weights.model_fingerprint import kv_origin
from tests.models.variant_oracle import whole_pass
from tests.models.variants.test_layer_variants import LATENT, check, texts_of


def norm(x: Tensor, positions: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def decay(x: Tensor, positions: Tensor) -> Tensor:
    return x * (1 / (1 + positions.to(x.dtype)))[:, None, None]


def gated(gate: Tensor) -> prefixkit.Variant:
    return prefixkit.variant(value=lambda x, positions: x * gate, output=lambda x, positions: x * gate.mean())


VARIANTS = {
    "norms": prefixkit.variant(query=norm, key=norm),
    "gates": gated(torch.linspace(0.5, 1.5, 24)),
    "all": compose(
        prefixkit.variant(query=norm, key=decay, value=decay, output=decay),
        variants.sliding_window(6),
        prefixkit.variant(query=lambda x, positions: 2 * x),
    ),
}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "cohere2"])
def test_logits_are_those_of_a_whole_pass(family: str, name: str, tiny, drive, rng) -> None:
    check(drive, tiny(family), texts_of(rng), VARIANTS[name])


def test_layers_over_latents_transform_queries_and_outputs(tiny, drive, rng) -> None:
    check(drive, tiny("deepseek_v2", **LATENT), texts_of(rng), prefixkit.variant(query=norm, output=decay))


def test_layers_may_differ(tiny, drive, rng) -> None:
    model, texts = tiny("llama"), texts_of(rng)
    run = drive(model, variant={1: VARIANTS["gates"]})
    for text in texts:
        run.tree.insert(text)
    run.run(budget=7)
    for text in texts:
        assert torch.allclose(run.logits_of(text), whole_pass(model, text, {1: VARIANTS["gates"]}), atol=1e-4)


def test_other_functions_and_other_numbers_are_other_kv(tiny) -> None:
    gate = torch.ones(24)
    model = patch(tiny("llama"), variant=gated(gate))

    def known() -> Any:
        facts = facts_of(model)
        return kv_version(model), kv_origin(facts).variants

    first = known()
    patch(model, variant=gated(gate))
    assert known()[1] == first[1], "the same functions of the same tensor"
    gate[3] = 2
    assert known()[0] != first[0] and known()[1] != first[1]
    patch(model, variant=prefixkit.variant(value=lambda x, positions: x * gate))
    assert known()[1] not in (first[1], "")
    assert kv_spec(model) == kv_spec(patch(model)), "what is cached is of the same shape"


@pytest.mark.parametrize(
    ("family", "options", "arguments", "message"),
    [
        ("deepseek_v2", LATENT, {"key": norm}, "transforms keys or values as they are cached, .* made of latents"),
        ("diffllama", {}, {"output": norm}, "transforms heads, and the layer's are attended with in another order"),
    ],
)
def test_layers_that_cannot_are_refused_by_name(family: str, options: Any, arguments: Any, message: str, tiny) -> None:
    model = tiny(family, **options)
    with pytest.raises(UnsupportedVariant, match=message):
        patch(model, variant=prefixkit.variant(**arguments))
    assert not prefixkit.models.is_patched(model)


def test_a_result_of_another_shape_names_the_transform(tiny, drive) -> None:
    run = drive(tiny("llama"), variant=prefixkit.variant(key=lambda x, positions: x[1:]))
    run.tree.insert([5, 6, 7])
    with pytest.raises(BadTransform, match=r"the key transform .* \[3, 2, 24\] .* returned \[2, 2, 24\]"):
        run.run()
    assert not any(node.computed for node in run.tree.nodes())
