"""What attention classes ask for maps to variants with the same meaning."""

from __future__ import annotations

import torch

from prefixkit.attention.variants import lookup
from prefixkit.attention.visible import ALL, Visible
from prefixkit.models.variants.layer_scores import register_variant


def test_nothing_asked_is_plain_causal_attention():
    assert register_variant(ALL, None, False) == "causal"


def test_equal_requests_share_a_key_and_others_do_not():
    asked = [
        (Visible(7), None, False),
        (Visible(8), None, False),
        (Visible(chunk=8), None, False),
        (ALL, 2.0, False),
        (Visible(7), 2.0, False),
        (Visible(7), 2.0, True),
        (ALL, None, True),
    ]
    keys = [register_variant(*each) for each in asked]
    assert len(set(keys)) == len(keys)
    assert [register_variant(*each) for each in asked] == keys


def test_a_window_of_w_shows_the_last_w_positions():
    variant = lookup(register_variant(Visible(3), None, False))
    q, kv = torch.tensor([[5]]), torch.arange(8)[None]
    zero = torch.zeros(1, 1, dtype=torch.long)
    visible = variant.shows(zero, zero, q, kv) & (kv <= q)
    assert visible.flatten().nonzero().flatten().tolist() == [3, 4, 5]
    assert variant.window == 3


def test_the_cap_bounds_scores_before_the_window_hides_keys():
    variant = lookup(register_variant(Visible(3), 2.0, False))
    zero = torch.zeros(1, 1, 1, dtype=torch.long)
    scores = variant.change(torch.tensor([[-100.0, 1.0, 100.0]]), zero, zero, zero, zero)
    assert torch.allclose(scores, 2.0 * torch.tanh(torch.tensor([[-50.0, 0.5, 50.0]])))
    assert variant.window == 3


def test_sinks_that_change_in_place_are_seen_by_the_next_step(tiny, drive, dense_logits, rng):
    model = tiny("gpt_oss")
    run = drive(model)
    for first in (3, 4):  # nothing is shared with the text before
        with torch.no_grad():
            for layers in (model.model.layers, run.model.model.layers):
                for layer in layers:
                    layer.self_attn.sinks.add_(1.5)
        tokens = [first, *rng.integers(3, 128, 9).tolist()]
        run.tree.insert(tokens)
        run.run()
        assert torch.allclose(run.logits_of(tokens), dense_logits(model, tokens), atol=1e-4)


def test_sinks_of_another_dtype_become_the_querys(tiny, drive, rng):
    tokens, logits = rng.integers(3, 128, 9).tolist(), []
    model = tiny("gpt_oss").bfloat16()
    for _ in range(2):
        run = drive(model)
        run.tree.insert(tokens)
        run.run()
        logits.append(run.logits_of(tokens))
        for layer in model.model.layers:
            layer.self_attn.sinks.data = layer.self_attn.sinks.data.float()
    assert torch.equal(*logits)
