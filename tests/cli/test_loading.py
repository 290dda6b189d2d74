"""Loading models: nothing of a folder is run, and devices are checked before anything is read."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from prefixkit.cli.loading import check_device

PACKAGE = Path(__file__).parents[2] / "prefixkit"
LOADS = {"from_pretrained", "from_config"}


def test_every_load_says_that_remote_code_is_not_trusted() -> None:
    """Left out, transformers asks the terminal, and takes the answer from whatever standard input is."""
    loads = [
        (f"{path}:{node.lineno}", {option.arg: ast.unparse(option.value) for option in node.keywords})
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOADS
    ]
    assert loads
    assert not [where for where, options in loads if options.get("trust_remote_code") != "False"]


@pytest.mark.parametrize("device", ["mps", "meta", "toaster", "", "cuda:-1", "cpu:200", "cuda:x"])
def test_a_device_that_attention_does_not_run_on_is_refused(device: str) -> None:
    with pytest.raises(ValueError, match="--device must be a torch device of type cpu or cuda") as caught:
        check_device(device)
    assert str(caught.value).endswith(f"got {device}")


def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--device cuda:127: torch .*sees "):
        check_device("cuda:127")


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_without_a_gpu_the_cpu_is_the_remedy(device: str) -> None:
    with pytest.raises(ValueError, match=f"--device {device}: torch .* sees no CUDA device; leave it out for the CPU"):
        check_device(device, gpus=0)


def test_a_gpu_beyond_those_there_is_refused_with_their_names() -> None:
    check_device("cuda:1", gpus=2)
    with pytest.raises(ValueError, match="--device cuda:2: torch sees 2 CUDA devices, cuda:0 to cuda:1"):
        check_device("cuda:2", gpus=2)
    with pytest.raises(ValueError, match="--devices cuda:2: torch sees 2 CUDA devices"):
        check_device("cuda:2", gpus=2, option="--devices")


def test_the_cpu_is_there() -> None:
    check_device("cpu")  # which raises for what is not there
