"""What the benchmark of variants compares: the same functions, counts of blocks, and rows with every column."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.tree_attention.variant_cases import OTHER, PAPER, Numbers, causal, documents_of, mods_of, visible_blocks
from benchmarks.tree_attention.variant_cases import natten as natten_mask
from benchmarks.tree_attention.variant_cases import window as window_mask
from benchmarks.tree_attention.variant_limits import above_errors, above_limits, limits_of
from benchmarks.variants import NAMES, PARTS, TINY, main
from prefixkit.backends.cuda.variants import variant_header

ZERO = torch.zeros((), dtype=torch.int64)


def shown(mask, positions: int) -> torch.Tensor:
    """``[positions, positions]`` what a mask shows to each query."""
    at = torch.arange(positions)
    return mask(ZERO, ZERO, at[:, None], at).expand(positions, positions)


@pytest.mark.parametrize("name", NAMES)
def test_other_numbers_are_the_same_kernel(name: str) -> None:
    """Ours must compile nothing for them, and so its text must not change."""
    headers = [
        variant_header.header(mods_of(numbers, 32, 2048, "cpu")[name].variant(name)) for numbers in (Numbers(), OTHER)
    ]
    assert headers[0] == headers[1]


def test_only_masks_that_show_later_keys_look_ahead() -> None:
    made = {name: mods.variant(name) for name, mods in mods_of(Numbers(), 4, 1024, "cpu").items()}
    assert {name for name, of in made.items() if of.looks_ahead} == {"noop", "prefix-lm", "natten 13", "natten 33"}
    assert {name for name, of in made.items() if of.window} == {"window", "soft-cap + window"}
    assert set(PAPER) <= set(made)


def test_neighborhoods_are_squares_of_the_grid() -> None:
    grid, size, tile = 16, 5, 4
    seen = shown(natten_mask(grid, size, tile), grid * grid)
    assert (seen.sum(1) == size * size).all()
    point = {}  # row and column of each position: tiles in rows, points in rows within a tile
    for position in range(grid * grid):
        block, within = divmod(position, tile * tile)
        point[position] = block // 4 * tile + within // tile, block % 4 * tile + within % tile
    assert len(set(point.values())) == grid * grid
    for query in (0, 5, 37, 255):
        centre = [min(max(at, size // 2), grid - 1 - size // 2) for at in point[query]]
        near = {p for p, at in point.items() if max(abs(a - c) for a, c in zip(at, centre, strict=True)) <= size // 2}
        assert near == set(torch.nonzero(seen[query])[:, 0].tolist())


def test_documents_are_numbered_in_order() -> None:
    numbers = documents_of(500, 16, "cpu")
    assert numbers[0] == 0 and numbers[-1] == 15 and set(torch.diff(numbers).tolist()) == {0, 1}


@pytest.mark.parametrize("block", [(32, 64), (48, 100), (128, 128)])
def test_blocks_are_visible_if_anything_in_them_is(block: tuple[int, int]) -> None:
    queries, first, keys = 150, 50, 200
    for mask in (causal, window_mask(30), window_mask(1)):
        found = visible_blocks(mask, queries, first, keys, block, "cpu")
        seen = shown(mask, keys)[first:]
        parts = [part.any() for rows in seen.split(block[0]) for part in rows.split(block[1], dim=1)]
        assert found == pytest.approx(float(torch.stack(parts).float().mean()))


def test_figures_above_their_limits_are_named() -> None:
    """Windows are held against the tokens that they read, NATTEN against visible blocks; a row lacks some figures."""
    row = {"over_base": 1.9, "over_kv": 1.1, "over_blocks": 1.4, "over_flex": 0.9}
    row |= {"first_use_s": {"ours": 11.0}, "compilations": {"ours": 1, "ours, new numbers": 1}}
    once = {"first_use_s": [11.0, 10.0], "ours, new numbers": [1, 0]}
    assert above_limits(row, limits_of("window", False, True)) == {"over_blocks": [1.4, 1.15], **once}
    assert above_limits(row, limits_of("natten 13", True, False)) == {"over_blocks": [1.4, 1.3], **once}
    assert above_limits(row, limits_of("soft-cap", True, False)) == {"over_base": [1.9, 1.7], **once}
    assert above_limits(row, limits_of("soft-cap", False, False)) == {"over_base": [1.9, 1.15], **once}
    assert above_errors({"over_best": 1.06, "lse_over_best": 1.0}) == {"over_best": [1.06, 1.05]}


def test_unknown_parts_and_variants_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for option, known in (("--parts", PARTS), ("--variants", NAMES)):
        with pytest.raises(SystemExit):
            main([option, "nothing"])
        assert known[0] in capsys.readouterr().err


def test_out_of_time_is_a_row(tmp_path: Path) -> None:
    out = tmp_path / "variants.json"
    given = ["--tiny", "--device", "cpu", "--parts", "trees,errors", "--variants", "causal,window"]
    main([*given, "--seconds", "0.000001", "--out", str(out)])
    found = json.loads(out.read_text())
    assert {row["skipped"] for row in found["times"] + found["errors"]} == {"out of time"}


def test_everything_end_to_end(tmp_path: Path) -> None:
    """On a CPU, in float32, where all contenders agree and nothing of ours is compiled."""
    out, names = tmp_path / "variants.json", "window,document"
    main(["--tiny", "--device", "cpu", "--variants", names, "--out", str(out)])
    found = json.loads(out.read_text())
    rows = {(row["workload"], row["variant"]): row for row in found["times"]}
    assert len(rows) == 2 * (len(TINY.plain) + len(TINY.trees) + 1)
    assert not [row for row in found["times"] + found["errors"] if "skipped" in row or "failed" in row]
    for (workload, name), row in rows.items():
        counts, us = row["compilations"], row["us"]
        assert counts["ours"] == counts["ours, new numbers"] == counts.get("ours, new shape", 0) == 0
        assert ("ours, new shape" in counts) == (workload in TINY.plain)
        limits = {**limits_of(name, "prompt" in workload or workload[0].isdigit(), name == "window"), "first_use_s": 10}
        assert all(row["above"].get(figure, [limit])[-1] == limit for figure, limit in limits.items())
        assert row["over_base"] == pytest.approx(us["ours"] / us["base"], abs=1e-3)
        assert ("kv_tokens" in row) == (name == "window")
        assert ("flex" in us) == (workload in TINY.plain)
        if "flex" in us:
            assert row["difference"] < 1e-5 and counts["flex"] == 1
    decode = rows["decode 4 x 64", "window"]["compilations"], rows["decode 4 x 64", "document"]["compilations"]
    assert [of["flex, new numbers"] for of in decode] == [1, 0], "numbers are compiled in, tensors are not"
    assert [of["flex, new shape"] for of in decode] == [1, 1]
    blocks = rows["prompt of 256", "window"]["blocks"]
    assert blocks["ours"] < blocks["base"] < 1
    assert {row["variant"] for row in found["errors"]} == {"window", "document"}
    for row in found["errors"]:
        assert max(*row["rmse"].values(), *row["lse_rmse"].values()) < 1e-6
        assert row["over_best"] == pytest.approx(row["rmse"]["ours"] / row["rmse"]["flex"], rel=1e-2)
