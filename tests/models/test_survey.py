"""``scripts/families.py`` on a few model types: what it says of each, and the page that it writes."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

SCRIPT = Path(__file__).parents[2] / "scripts" / "families.py"
MODEL_TYPES = "gpt2,llama4_text,xlstm,gemma4_assistant,exaone4_5"


needs_script = pytest.mark.skipif(not SCRIPT.exists(), reason="scripts are not part of this distribution")


@needs_script
def test_the_survey_tells_what_runs_and_what_is_in_the_way(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)  # as where the script is run
    page = tmp_path / "families.md"
    older = tmp_path / "older"
    (older / "models" / "auto").mkdir(parents=True)
    (older / "__init__.py").write_text('__version__ = "5.0.1"\n')
    lists = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"
    known = "OrderedDict([('gpt2', 'A'), ('xlstm', ('B', 'C'))])"
    (older / "models" / "auto" / "modeling_auto.py").write_text("\n".join(f"{name} = {known}" for name in lists))
    arguments = ["--only", MODEL_TYPES, "--older", str(older), "--write", str(page)]
    importlib.import_module("scripts.families").main(arguments)
    text = page.read_text()
    assert "`MODEL_FOR_CAUSAL_LM_MAPPING_NAMES`: 1 tree, 1 partly, 1 refused, 0 wrong, 0 error, 1 untried." in text
    images = "`MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES`"
    assert f"{images}: 1 tree, 0 partly, 0 refused, 0 wrong, 0 error, 0 untried." in text
    assert "On the tree: gpt2." in text
    assert "On the tree: exaone4_5." in text
    assert "Transformers 5.0.1 lacks 2 of all: gemma4_assistant, llama4_text." in text
    assert "Transformers 5.0.1 lacks 1 of all: exaone4_5." in text
    assert "| no attention at all | 1 | xlstm |" in text
    assert max(map(len, text.splitlines())) <= 120
    assert "| llama4_text | partly | with queries scaled by position: with padding on the left: the model" in text
    assert "| xlstm | refused | xLSTMForCausalLM (model_type 'xlstm'): no layer both fills a KV cache" in text
    assert "| gemma4_assistant | untried | needs the KV of the model that it drafts for |" in text


@needs_script
def test_a_model_type_that_is_not_listed_is_named(monkeypatch, capsys):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    with pytest.raises(SystemExit):
        importlib.import_module("scripts.families").main(["--only", "gpt2,GPT-3"])
    assert "lists no text decoder of type 'GPT-3'" in capsys.readouterr().err


@needs_script
@pytest.mark.parametrize(
    ("model_type", "shown"),
    [
        ("deepseek_v3", {"v_head_dim": {8, 16, 24}}),
        ("mimo_v2_flash", {"v_head_dim": {8, 16}}),
        ("gemma3n_text", {"num_kv_shared_layers": {0, 2}}),
        ("gemma4_text", {"num_kv_shared_layers": {0, 2}, "attention_k_eq_v": {False, True}}),
        ("llama4_text", {"attention_chunk_size": {7, 64, 8192}, "floor_scale": {4, 8192}}),
        ("musicgen_melody", {"num_codebooks": {1}, "model_type": {"musicgen_melody_decoder"}}),
    ],
)
def test_tiny_configs_show_what_a_model_type_can_do(model_type, shown):
    from scripts.tiny_models import tiny_config, variants

    if model_type not in CONFIG_MAPPING:
        pytest.skip("a later transformers has it")
    configs = [tiny_config(model_type, **options) for options in variants(model_type).values()]
    for field, values in shown.items():
        assert {getattr(config, field) for config in configs} == values


@needs_script
def test_global_heads_of_gemma_4_are_larger_than_local_ones_and_as_large():
    from scripts.tiny_models import tiny_config, variants

    if "gemma4_text" not in CONFIG_MAPPING:
        pytest.skip("a later transformers has it")
    configs = [tiny_config("gemma4_text", **options) for options in variants("gemma4_text").values()]
    sizes = {tuple(config.per_layer_config[layer].head_dim for layer in (0, 1)) for config in configs}
    assert sizes >= {(16, 32), (16, 16)}
