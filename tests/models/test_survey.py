"""``scripts/families.py`` on a few model types: what it says of each, and the page that it writes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "families.py"


@pytest.mark.skipif(not SCRIPT.exists(), reason="scripts are not part of this distribution")
def test_the_survey_tells_what_runs_and_what_is_in_the_way(tmp_path):
    page = tmp_path / "families.md"
    command = [
        sys.executable,
        SCRIPT,
        "--only",
        "gpt2,jetmoe,llama4_text,mamba,gemma4_assistant,exaone4_5,qwen2_vl",
        "--write",
        page,
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=300)
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
