"""Who may import whom (docs/developer/design.md), read from the sources, imports inside functions and for types too."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "prefixkit"
LEAVES = {
    "agreement",
    "paths",
    "checking",
    "extras",
    "threads",
    "torch_private",
}  # modules that import nothing of prefixkit

# What each package may import of prefixkit, besides itself and the leaves.
MAY_IMPORT = {
    "tree": set(),
    "sampling": set(),
    "cuda": set(),
    "attention": {"tree"},  # the core, which knows no device
    "attention/gpu": {"attention", "tree"},
    "ops": {"attention", "attention/gpu", "sampling", "tree"},
    "runners": {"attention", "attention/gpu", "ops", "sampling", "tree"},
    "kv": {"attention", "attention/gpu", "ops", "tree"},
    "backends": {"attention", "attention/gpu", "cuda", "ops", "sampling", "tree"},
    "functional": {"attention", "attention/gpu", "kv", "ops", "runners", "tree"},
    "engine": {"attention", "attention/gpu", "kv", "ops", "runners", "sampling", "tree"},
    "models": {"attention", "kv", "ops", "runners", "tree"},
    "session": {"attention", "backends", "engine", "kv", "models", "ops", "sampling", "tree"},
    "integrations": {"engine", "models", "sampling", "session"},
    "evaluation/demo": set(),
    "evaluation/tasks": {"sampling"},
    "evaluation/judge": {"evaluation/tasks"},
    "evaluation/campaign": {"engine", "evaluation/judge", "evaluation/tasks", "sampling"},
    "evaluation/report": set(),
}
# Libraries that only some may import.
ONLY_IN = {
    "transformers": {"models", "evaluation/demo", "cli", "api", "testing"},
    "accelerate": {"models"},
    "llguidance": {"integrations"},
    "lm_eval": {"integrations"},
    "trl": {"integrations"},
    "xgrammar": {"integrations"},
    "cuda": {"cuda", "backends"},
    "typer": {"cli", "testing"},
    "rich": {"cli"},
    "jinja2": {"evaluation/report", "evaluation/tasks"},
    "markupsafe": {"evaluation/report"},
}


def sources():
    return sorted(PACKAGE.rglob("*.py"))


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
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
    return frozenset(names)


def package_of(parts):
    """The package that a module of prefixkit lies in, by the parts of its name after ``prefixkit``."""
    inner = "/".join(parts[:2])
    return inner if inner in MAY_IMPORT else parts[0]


def packages_of(names):
    return {package_of(name.split(".")[1:]) for name in names if name.startswith("prefixkit.")}


def home_of(path):
    return package_of(path.relative_to(PACKAGE).with_suffix("").parts)


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_packages_below_it(package):
    files = [path for path in sources() if home_of(path) == package]
    assert files, f"{package} is empty"
    for path in files:
        found = packages_of(imports(path)) - {package} - LEAVES
        assert found <= MAY_IMPORT[package], f"{path.relative_to(ROOT)} imports {found - MAY_IMPORT[package]}"


def test_leaves_import_nothing_of_ours():
    for leaf in LEAVES:
        assert not packages_of(imports(PACKAGE / f"{leaf}.py")), leaf


def test_only_the_public_interface_and_the_command_line_import_backends():
    for path in sources():
        if home_of(path) not in {"session", "backends", "cli", "testing"}:
            assert "backends" not in packages_of(imports(path)), path


def test_nothing_imports_the_command_line():
    for path in sources():
        if home_of(path) not in {"cli", "__main__", "testing"}:
            assert "cli" not in packages_of(imports(path)), path


def test_the_library_does_not_import_the_application():
    for path in sources():
        if path.relative_to(PACKAGE).parts[0] not in {"evaluation", "cli", "testing"}:
            assert not [name for name in imports(path) if name.startswith("prefixkit.evaluation")], path


def test_only_tests_benchmarks_and_scripts_import_what_is_for_testing():
    for path in sources():
        if home_of(path) != "testing":
            assert "testing" not in packages_of(imports(path)), path


def test_benchmarks_scripts_and_examples_import_no_tests():
    for folder in ("benchmarks", "scripts", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            assert not [name for name in imports(path) if name.split(".")[0] == "tests"], path


@pytest.mark.parametrize("library", ONLY_IN)
def test_a_library_is_imported_only_where_it_belongs(library):
    for path in sources():
        if any(name.split(".")[0] == library for name in imports(path)):
            assert home_of(path) in ONLY_IN[library], path


def test_modules_import_each_other_in_no_cycle():
    modules = {module_of(path) for path in sources()}
    graph = {
        module_of(path): {
            next(n for n in (name, name.rpartition(".")[0]) if n in modules)
            for name in imports(path)
            if name in modules or name.rpartition(".")[0] in modules
        }
        for path in sources()
    }
    done, path = set(), []

    def visit(module):
        assert module not in path, f"a cycle: {' -> '.join([*path[path.index(module) :], module])}"
        if module in done:
            return
        path.append(module)
        for other in sorted(graph[module] - {module}):
            visit(other)
        path.pop()
        done.add(module)

    for module in sorted(graph):
        visit(module)


def test_a_file_name_stands_once_in_the_package():
    """A name says which file is meant; packages' own files and the commands, named as users type them, apart."""
    files = Counter(path.name for path in sources() if path.parent != PACKAGE / "cli" / "commands")
    del files["__init__.py"]
    assert not [name for name, count in files.items() if count > 1]


def test_no_file_is_called_utils():
    assert not [path for path in sources() if "util" in path.stem]


def test_the_design_names_these_packages_and_these_imports():
    """The table in docs/developer/design.md: a row for each package, with what it imports."""
    design = (ROOT / "docs" / "developer" / "design.md").read_text()
    rows = re.findall(r"^\| `prefixkit/([\w/]+)/` \|([^|]*)\|", design, re.MULTILINE)
    said = {package: set(re.findall(r"`([\w/]+)`", imported)) for package, imported in rows}
    assert {package: said.get(package) for package in MAY_IMPORT} == MAY_IMPORT
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert {package.split("/")[0] for package in said} == folders
