"""What is published: wheel and sdist have what they should, and say the version that everything else says."""

import importlib.util
import re
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

import prefixkit

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def script():
    """scripts/check_distributions.py"""
    spec = importlib.util.spec_from_file_location("distributions", ROOT / "scripts" / "check_distributions.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def built(script, tmp_path_factory):
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("what should be published is what git has, and this is no checkout")
    pytest.importorskip("hatchling")
    return script.build(tmp_path_factory.mktemp("dist"))


def test_both_have_what_they_should(script, built):
    assert script.faults(*built) == []


def test_cuda_sources_templates_and_types_travel_in_the_wheel(built):
    with zipfile.ZipFile(built[0]) as wheel:
        names = set(wheel.namelist())
    for pattern in ("csrc/**/*.cu", "csrc/**/*.cuh", "evaluation/report/templates/*", "py.typed"):
        files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "prefixkit").glob(pattern)]
        assert files and set(files) <= names


def test_what_is_missing_or_too_much_is_named(script, built, tmp_path):
    wheel = tmp_path / built[0].name
    with zipfile.ZipFile(built[0]) as whole, zipfile.ZipFile(wheel, "w") as other:
        for name in whole.namelist():
            if not name.endswith("plan_tree.cu"):
                other.writestr(name, whole.read(name))
        other.writestr("prefixkit/secret.txt", "")
    sdist = tmp_path / "empty.tar.gz"
    tarfile.open(sdist, "w:gz").close()
    found = script.faults(wheel, sdist)
    assert "the wheel lacks prefixkit/csrc/planner/plan_tree.cu" in found
    assert "the wheel holds prefixkit/secret.txt" in found
    assert "the sdist lacks CONTRIBUTING.md" in found


def test_the_citation_has_the_version_and_the_license():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == prefixkit.__version__ and citation["license"] == "Apache-2.0"
    assert citation["authors"] and citation["title"].startswith("prefixkit: ")


def test_the_job_of_the_newest_versions_cannot_fail_and_pins_nothing():
    (job,) = yaml.safe_load((ROOT / ".github/workflows/latest.yml").read_text())["jobs"].values()
    assert job["continue-on-error"] is True
    commands = "\n".join(step.get("run", "") for step in job["steps"])
    assert "constraints" not in commands and "pytest" in commands and "GITHUB_STEP_SUMMARY" in commands


def test_ci_runs_what_the_project_says_it_runs():
    jobs = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert ".ci/run" in commands
    assert any("ruff check ." in one and "ruff format --check ." in one and "mypy" in one for one in commands)
    assert any("scripts/check_distributions.py" in one and "--environment" in one for one in commands)


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])
def test_files_that_a_page_names_exist(name):
    text = (ROOT / name).read_text()
    linked = [target.partition("#")[0] for target in re.findall(r"\]\(([^)]+)\)", text)]
    told = re.findall(r"`((?:prefixkit|docs|tests|scripts|benchmarks|\.ci)/[\w./-]+)`", text)
    for path in (*(one for one in linked if one and ":" not in one), *told):
        assert (ROOT / path).exists(), path
