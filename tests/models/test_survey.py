"""``scripts/families.py`` on a few model types: what it says of each, and the page that it writes."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "families.py"
MODEL_TYPES = "gpt2,jetmoe,llama4_text,mamba,gemma4_assistant,exaone4_5,qwen2_vl"


@pytest.mark.skipif(not SCRIPT.exists(), reason="scripts are not part of this distribution")
def test_the_survey_tells_what_runs_and_what_is_in_the_way(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)  # as where the script is run
    page = tmp_path / "families.md"
    importlib.import_module("scripts.families").main(["--only", MODEL_TYPES, "--write", str(page)])
    text = page.read_text()
    assert "`MODEL_FOR_CAUSAL_LM_MAPPING_NAMES`: 1 tree, 1 partly, 2 refused, 0 wrong, 0 error, 1 untried." in text
    images = "`MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES`"
    assert f"{images}: 1 tree, 1 partly, 0 refused, 0 wrong, 0 error, 0 untried." in text
    assert "On the tree: gpt2." in text
    assert "On the tree: qwen2_vl." in text
    assert (
        "| jetmoe | refused | model.layers.0.self_attention (JetMoeAttention) attends over other keys or values" in text
    )
    assert "| llama4_text | partly | with windows: a row comes to 26 tokens, and attention in chunks is causal" in text
    assert "| exaone4_5 | partly | with padding on the left: rows are padded, but there are no position_ids" in text
    assert "| mamba | refused | MambaForCausalLM (model_type 'mamba'): no layer both fills a KV cache" in text
    assert "| gemma4_assistant | untried | needs the KV of the model that it drafts for |" in text
