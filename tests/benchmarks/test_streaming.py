"""The benchmark of StreamingLLM: contenders that compute the same, and memory that stays as it is."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.streaming import EVERY, main


def test_contenders_agree_and_memory_is_flat(tmp_path: Path) -> None:
    out = tmp_path / "streaming.json"
    given = [
        "--parts",
        "attention,memory",
        "--tiny",
        "--device",
        "cpu",
        "--batches",
        "2",
        "--tokens",
        str(3 * EVERY),
        "--turns",
        "1",
    ]
    main([*given, "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [(row["part"], row["batch"]) for row in rows] == [("attention", 2), ("memory", 2)]
    for row in rows:
        if row["part"] == "attention":
            assert max(row["difference"], row["repository_difference"]) < 1e-5
            assert all(row[name]["us"] > 0 for name in ("ours", "kernel", "unfused", "repository"))
        else:
            assert row["tokens"] == 3 * EVERY + 5
            pages = [in_use for _, in_use, _ in row["held"]]
            assert len(pages) == 3 and len(set(pages[1:])) == 1 and max(pages) <= row["batch"] * (52 // 16 + 3)
            assert row["bytes_of_all_layers"] < row["bytes_if_all_were_held"] / 6
