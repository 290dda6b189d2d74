"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from prefixkit.paths import put


def test_a_file_appears_with_its_folder_and_replaces_what_was_there(tmp_path: Path) -> None:
    place = tmp_path / "new" / "file"
    put(place, b"first")
    put(place, b"second")
    assert place.read_bytes() == b"second"
    assert list(place.parent.iterdir()) == [place]


def test_a_failure_leaves_what_was_there_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "file"
    put(place, b"first")

    def refuse(*_: object) -> None:
        raise OSError("full")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="full"):
        put(place, b"second")
    assert place.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [place]
