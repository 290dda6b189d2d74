"""Costs from measured times: what went in comes out, what makes no sense is refused."""

import numpy as np
import pytest

from prefixkit.attention.gpu.gpu_cost import H200
from prefixkit.attention.sharing import CostModel
from prefixkit.backends.cuda.costs.calibrate import DECODE_POINTS, SHAPES, TILE_POINTS, Fit, cost_from, fit, fit_sharing
from prefixkit.backends.cuda.costs.measure import Point, Shared


def points(role, shapes, base, tile, start, state, noise=0.0):
    rng = np.random.default_rng(0)
    for rounds, tokens, parts in shapes:
        tiles, states = rounds * -(-tokens // role.kv_tile), rounds * (parts > 1)
        us = base + tile * (tiles + start * rounds + state * states)
        yield Point(tiles, rounds, states, us * (1 + noise * rng.standard_normal()))


@pytest.mark.parametrize(("role", "shapes"), [(H200.decode, DECODE_POINTS), (H200.tile, TILE_POINTS)])
def test_a_fit_finds_the_costs_behind_the_times(role, shapes):
    found = fit(list(points(role, shapes, base=6.0, tile=1.3, start=1.5, state=2.0)))
    assert [found.base, found.tile, found.start, found.state] == pytest.approx([6.0, 1.3, 1.5, 2.0])
    assert found.error < 1e-9
    noisy = fit(list(points(role, shapes, base=6.0, tile=1.3, start=1.5, state=2.0, noise=0.02)))
    assert noisy.tile == pytest.approx(1.3, rel=0.1)
    assert 0 < noisy.error < 0.04


def test_no_part_costs_less_than_nothing():
    found = fit(list(points(H200.decode, DECODE_POINTS, base=20.0, tile=1.0, start=-0.5, state=0.0)))
    assert min(found.base, found.start, found.state) >= 0
    assert found.tile > 0


def test_times_that_do_not_grow_with_the_work_are_refused():
    with pytest.raises(ValueError, match="do not grow with the work"):
        fit([Point(tiles, 1, 0, 100.0 - tiles) for tiles in (1, 5, 20, 60)])


def forests(sharing):
    for kind, ((heads, kv_heads), those) in enumerate(SHAPES):
        for roots, leaves, tokens in those:
            thin = leaves * heads <= 8 * kv_heads
            tile, decode = (0, roots * kv_heads) if thin else (roots * kv_heads, 0)
            states, spared = roots * leaves * heads * 1032, roots * leaves * tokens * 512 * kv_heads
            unshared = 30.0 + spared * sharing.kv_byte
            priced = tile * sharing.tile_item + decode * sharing.decode_item + states * sharing.partial_byte
            yield Shared(kind, tile, decode, states, spared, 34.0 + 2 * kind + priced, unshared)


def test_what_sharing_costs_is_found_behind_forests_measured_with_and_without():
    behind = CostModel(0.0, 2.2e-7, 3.5e-7, 0.0145, 0.003)
    found = fit_sharing(list(forests(behind)), behind.kv_byte)
    for name in ("item", "kv_byte", "partial_byte", "tile_item", "decode_item"):
        assert getattr(found, name) == pytest.approx(getattr(behind, name)), name


def test_costs_have_the_tiles_of_the_kernels_and_the_rates_that_were_measured():
    measured = list(forests(H200.sharing))
    cost = cost_from(Fit(5, 1.1, 1.0, 0.8, 0), Fit(5, 1.85, 1.5, 2.0, 0), measured, 132)
    assert cost.decode.kv_tile == H200.decode.kv_tile
    assert cost.decode.tokens_per_us == pytest.approx(4 * 16 / 1.1)
    assert cost.tile.write + cost.tile.merge == pytest.approx(2.0)
    assert 1 / cost.sharing.kv_byte == pytest.approx(528 * 16 * 512 / 1.1)  # bytes of K and V in a microsecond
