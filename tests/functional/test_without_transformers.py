"""Tree, plan and attention where transformers and all that comes with it are not installed."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# None in sys.modules makes an import raise ModuleNotFoundError, as for what is not installed.
BLOCKED = ("transformers", "tokenizers", "accelerate", "safetensors", "huggingface_hub", "peft")
NAMES = """
import sys
sys.modules.update(dict.fromkeys({blocked!r}))
import prefixkit
for module, names in prefixkit._NAMES.items():
    if module.startswith(("prefixkit.functional", "prefixkit.kv.kv_pool", "prefixkit.tree")):
        for name in names:
            assert getattr(prefixkit, name).__name__ == name
"""


def run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_public_names_load_and_the_example_runs() -> None:
    example = "\nsys.path[:0] = ['examples']\nimport own_model\nown_model.main()"
    assert "equal to dense attention: True" in run("-c", NAMES.format(blocked=BLOCKED) + example)


def test_the_example_is_short_and_imports_torch_alone() -> None:
    text = (ROOT / "examples" / "own_model.py").read_text()
    assert text.count("\n") < 60
    imported = {line.split()[1].split(".")[0] for line in text.splitlines() if line.startswith(("import ", "from "))}
    assert imported == {"torch", "prefixkit"}
