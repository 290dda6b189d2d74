"""What the README promises to newcomers is what CI runs, and what the project declares."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

from prefixkit.__main__ import NEEDED, main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def ci_pattern():
    """The pattern by which .ci/run finds the commands in the README."""
    (pattern,) = re.findall(r"grep -E '(.+?)' README\.md", (ROOT / ".ci" / "run").read_text())
    return re.compile(pattern, re.MULTILINE)


def package(requirement):
    return re.match(r"[A-Za-z0-9_.-]+", requirement)[0].lower().replace("_", "-")


def pins():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.lower().replace("_", "-").split("==") for line in lines if not line.startswith("#"))


def test_ci_runs_the_two_commands_of_the_readme():
    assert ci_pattern().findall(README) == [
        'pip install -c constraints.txt ".[demo]" && prefixkit demo',
        'pip install -c constraints.txt -e ".[test]" && pytest -n auto --dist worksteal',
    ]


def test_the_extras_are_there():
    tools = {"docs", "llguidance", "lm-eval", "trl", "xgrammar"}
    assert set(PROJECT["optional-dependencies"]) == {"cuda", "campaign", "demo", "test", "bench", *tools}


def test_what_the_two_commands_install_is_pinned():
    names = ("campaign", "demo", "docs", "llguidance", "lm-eval", "trl", "xgrammar", "test")
    extras = [PROJECT["optional-dependencies"][name] for name in names]
    wanted = {package(line) for lines in (PROJECT["dependencies"], *extras) for line in lines}
    assert wanted - {"prefixkit", "pip"} <= pins().keys()
    assert pins()["torch"] == "2.13.0"  # plain: a local version would tie it to one index


def test_what_the_command_line_needs_is_an_extra():
    """Of the library's own dependencies none is of the command line; the extra lists what the script looks for."""
    campaign = {package(line) for line in PROJECT["optional-dependencies"]["campaign"]}
    assert campaign == set(NEEDED)
    assert not campaign & {package(line) for line in PROJECT["dependencies"]}


@pytest.mark.parametrize("missing", NEEDED)
def test_the_script_names_the_extra_that_is_missing(missing, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert missing in said and 'pip install "prefixkit[campaign]"' in said and said.count("\n") == 1


def test_the_readme_is_one_screen_long():
    assert len(README.splitlines()) <= 120


def test_links_and_files_named_in_the_readme_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_version_is_said_once_everywhere():
    import prefixkit

    assert prefixkit.__version__ == PROJECT["version"]
    assert f"## {PROJECT['version']}" in (ROOT / "CHANGELOG.md").read_text()
