"""Working and publishing in the cache folder."""

import pytest

from prefixkit.demo.cache import publish, workspace


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
