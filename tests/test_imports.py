"""Who may import whom (docs/design.md), read from the sources themselves."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "prefixkit"

# What the files of a room may import of prefixkit, and must not import of others.
ROOMS = {
    "tree": ({"tree"}, {"torch", "transformers", "accelerate", "safetensors", "einops"}),
    "attention": ({"attention", "tree", "paths"}, {"transformers", "accelerate", "safetensors"}),
    "models": ({"models", "attention", "tree"}, set()),
    "generation": ({"generation", "attention", "tree"}, {"transformers", "accelerate", "safetensors"}),
    "demo": ({"demo", "paths"}, set()),
}
COMMAND_LINE = {"cli", "commands"}


def sources(folder):
    return sorted(folder.rglob("*.py"))


def imports(path):
    """Every module that a file imports anywhere, as absolute dotted names."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute here"
            # `from prefixkit import tree` names the module in its second half.
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def rooms_of(names):
    return {name.split(".")[1] for name in names if name.startswith("prefixkit.")}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_the_rooms_below_it(room):
    allowed, forbidden = ROOMS[room]
    assert sources(PACKAGE / room), f"{room} is empty"
    for path in sources(PACKAGE / room):
        names = imports(path)
        assert rooms_of(names) <= allowed, path
        assert not {name.split(".")[0] for name in names} & forbidden, path


def test_nobody_imports_the_command_line():
    for path in sources(PACKAGE):
        if path.relative_to(PACKAGE).parts[0].removesuffix(".py") not in COMMAND_LINE:
            assert not rooms_of(imports(path)) & COMMAND_LINE, path


def test_only_models_and_what_the_user_touches_import_transformers():
    for path in sources(PACKAGE):
        if any(name.split(".")[0] == "transformers" for name in imports(path)):
            assert path.relative_to(PACKAGE).parts[0] in {"models", "demo", "commands", "api.py"}, path


def test_no_file_is_called_utils():
    assert not [path for path in sources(PACKAGE) if "util" in path.stem]
