"""The cache folder, and files that are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from prefixkit.paths import SharedCache, cache_dir, put


def test_prefixkit_cache_overrides_the_platforms_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PREFIXKIT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir("linux") == tmp_path / "xdg" / "prefixkit"
    monkeypatch.setenv("PREFIXKIT_CACHE", str(tmp_path / "mine"))
    assert cache_dir() == tmp_path / "mine"


@pytest.mark.parametrize(
    ("platform", "ending"), [("darwin", "Library/Caches/prefixkit"), ("linux", ".cache/prefixkit")]
)
def test_without_it_the_platform_decides(monkeypatch: pytest.MonkeyPatch, platform: str, ending: str) -> None:
    monkeypatch.delenv("PREFIXKIT_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir(platform).as_posix().endswith(ending)


@pytest.mark.skipif(os.name != "posix", reason="home folders of POSIX")
def test_without_a_home_folder_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFIXKIT_CACHE", "~nobody-of-this-name/cache")
    with pytest.raises(OSError, match="set PREFIXKIT_CACHE to a folder that can be written"):
        cache_dir()


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
@pytest.mark.parametrize(
    ("mode", "says"), [(0o777, "every user may write there"), (0o775, "the group 60001 may write")]
)
def test_a_cache_that_others_may_write_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: int, says: str
) -> None:
    monkeypatch.setenv("PREFIXKIT_CACHE", str(tmp_path))
    if os.geteuid() == 0:
        os.chown(tmp_path, -1, 60001)
    elif mode == 0o775:
        pytest.skip("only root gives a folder to another group")
    tmp_path.chmod(mode)
    with pytest.raises(SharedCache, match=rf"{says}.*set PREFIXKIT_CACHE to a folder that only you"):
        cache_dir()
    tmp_path.chmod(0o755)
    assert cache_dir() == tmp_path, "others may read it"


def test_a_file_appears_with_its_folder_and_replaces_what_was_there(tmp_path: Path) -> None:
    place = tmp_path / "new" / "file"
    put(place, b"first")
    put(place, b"second")
    assert place.read_bytes() == b"second"
    assert list(place.parent.iterdir()) == [place]


def test_a_failure_leaves_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    """A folder with a file in it is in the way: a file cannot replace it."""
    place = tmp_path / "place"
    put(place / "file", b"first")
    with pytest.raises(OSError, match="irectory"):
        put(place, b"second")
    assert (place / "file").read_bytes() == b"first"
    assert list(place.iterdir()) == [place / "file"]
    assert list(tmp_path.iterdir()) == [place]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes of POSIX")
def test_what_is_no_regular_file_is_not_replaced(tmp_path: Path) -> None:
    """A process of root would else put a file in the place of /dev/null."""
    place = tmp_path / "pipe"
    os.mkfifo(place)
    with pytest.raises(OSError, match=r"pipe cannot be written: it is no regular file, .*; name a file"):
        put(place, b"content")
    assert place.is_fifo()
    assert list(tmp_path.iterdir()) == [place]
