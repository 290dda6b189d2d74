"""The cache folder, and publishing into it."""

import os

import pytest

from prefixkit.demo.cache import cache_dir, publish, workspace


def test_prefixkit_cache_overrides_the_platforms_folder(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.delenv("PREFIXKIT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "prefixkit"
    monkeypatch.setenv("PREFIXKIT_CACHE", str(tmp_path / "mine"))
    assert cache_dir() == tmp_path / "mine"


@pytest.mark.parametrize(
    ("platform", "ending"), [("darwin", "Library/Caches/prefixkit"), ("linux", ".cache/prefixkit")]
)
def test_without_it_the_platform_decides(monkeypatch, platform, ending):
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.delenv("PREFIXKIT_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir().as_posix().endswith(ending)


@pytest.mark.skipif(os.name != "posix", reason="home folders of POSIX")
def test_without_a_home_folder_the_remedy_is_named(monkeypatch):
    monkeypatch.setenv("PREFIXKIT_CACHE", "~nobody-of-this-name/cache")
    with pytest.raises(OSError, match="set PREFIXKIT_CACHE to a folder that can be written"):
        cache_dir()


def test_a_workspace_is_gone_afterwards_whatever_happened(monkeypatch, tmp_path):
    monkeypatch.setenv("PREFIXKIT_CACHE", str(tmp_path))
    with pytest.raises(RuntimeError), workspace() as folder:
        (folder / "half").write_text("done")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_made_names_the_remedy(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PREFIXKIT_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(OSError, match="set PREFIXKIT_CACHE"), workspace():
        pass


def test_the_folder_that_was_published_first_stays(tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model").write_text(name)
        publish(tmp_path / name, tmp_path / "final")
    assert (tmp_path / "final" / "model").read_text() == "first"


def test_a_file_is_replaced(tmp_path):
    (tmp_path / "final").write_text("torn")
    (tmp_path / "made").write_text("whole")
    publish(tmp_path / "made", tmp_path / "final")
    assert (tmp_path / "final").read_text() == "whole"
