"""What attention classes ask for maps to variants with the same meaning."""

from __future__ import annotations

import gc

import pytest
import torch

from prefixkit.attention.variants import UnknownVariant, lookup
from prefixkit.models.layer import register_variant


def test_nothing_asked_is_plain_causal_attention():
    assert register_variant(None, None, None) == "causal"


def test_equal_requests_share_a_key_and_others_do_not():
    asked = [(7, None, None), (8, None, None), (None, 2.0, None), (7, 2.0, None), (None, None, torch.zeros(4))]
    keys = [register_variant(*each) for each in asked]
    assert len(set(keys)) == len(keys)
    assert [register_variant(*each) for each in asked] == keys


def test_a_window_of_w_shows_the_last_w_positions():
    variant = lookup(register_variant(3, None, None))
    q, kv = torch.tensor([[5]]), torch.arange(8)[None]
    visible = variant.mask_mod(q, kv, torch.zeros(1, 1, 1, dtype=torch.long)) & (kv <= q)
    assert visible.flatten().nonzero().flatten().tolist() == [3, 4, 5]
    assert variant.window == 3


def test_the_cap_bounds_scores_before_the_window_hides_keys():
    variant = lookup(register_variant(3, 2.0, None))
    zero = torch.zeros(1, 1, 1, dtype=torch.long)
    scores = variant.score_mod(torch.tensor([[-100.0, 1.0, 100.0]]), zero, zero, zero)
    assert torch.allclose(scores, 2.0 * torch.tanh(torch.tensor([[-50.0, 0.5, 50.0]])))
    assert variant.window == 3


def test_sinks_are_kept_as_they_were():
    logits = torch.tensor([0.5, -1.0])
    variant = lookup(register_variant(None, None, logits))
    logits += 1
    assert variant.sinks.tolist() == [0.5, -1.0]


def test_variants_of_weights_that_are_updated_go_with_their_cache(tiny, drive, rng):
    """A training loop that samples after each update makes new sinks each time; only those in use stay registered."""
    model = tiny("gpt_oss")
    earlier: set[str] = set()
    for _ in range(3):
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.sinks.add_(0.5)
        run = drive(model)
        run.tree.insert(rng.integers(3, 128, 9))
        run.run()
        keys = set(run.runner.cache.variants.values())
        assert len(keys) == 2 and not keys & earlier
        for key in keys:
            assert lookup(key).sinks is not None
        for key in earlier:
            with pytest.raises(UnknownVariant):
                lookup(key)
        earlier = keys
        del run
        gc.collect()


def test_windows_and_caps_stay_registered():
    """Compiled layers hold their keys as constants."""
    owner = Owner()
    key = register_variant(11, 3.5, None, owner)
    del owner
    gc.collect()
    assert lookup(key).window == 11


class Owner:
    """Anything that takes a weak reference."""
