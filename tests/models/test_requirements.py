"""A transformers that prefixkit cannot work with is named at import, with what is needed and how to get it."""

from __future__ import annotations

import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import transformers
from packaging.requirements import Requirement

from prefixkit.models.requirements import MINIMUM, UnsupportedTransformers, check_transformers, check_version


@pytest.mark.parametrize(
    "found", ["5.17", "5.17.0", "5.17.1", "5.18.0.dev0", "5.23.0", "5.100.0", "6.0.0", "5.23.0+cpu"]
)
def test_versions_from_the_minimum_on_are_accepted(found):
    check_version(found)  # which raises where it does not accept


@pytest.mark.parametrize(
    "found", ["4.57.1", "5.0.0", "5.2.0", "5.9.0", "5.16.4", "5.17.0.dev0", "5.17.0rc1", "unknown", ""]
)
def test_others_are_refused_with_what_was_found_what_is_needed_and_the_command(found):
    message = rf"needs transformers 5\.17 or later, found {found}; run: pip install -U 'transformers>=5\.17'"
    with pytest.raises(ImportError, match=message) as caught:
        check_version(found)
    assert isinstance(caught.value, UnsupportedTransformers)


def test_the_minimum_is_that_of_the_package():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    needed = next(one for one in map(Requirement, project["dependencies"]) if one.name == "transformers")
    assert str(needed.specifier) == f">={MINIMUM}"


def test_the_installed_transformers_has_all_that_is_relied_on():
    check_transformers(transformers)  # which raises where something is missing


def stand_in(**parts):
    """A module that has what is given, and whatever else is relied on from the installed transformers."""
    names = ("AttentionInterface", "AttentionMaskInterface", "Cache", "PreTrainedConfig", "models")
    module = ModuleType("transformers")
    vars(module).update({"__version__": "9.0", **{name: getattr(transformers, name) for name in names}, **parts})
    return module


class WithoutLayers(transformers.Cache):
    def __init__(self):
        super().__init__(layers=[])


@pytest.mark.parametrize(
    ("parts", "missing"),
    [
        (
            {"AttentionInterface": SimpleNamespace(register=len)},
            "needs AttentionInterface.get_interface of transformers",
        ),
        ({"PreTrainedConfig": object}, "needs PreTrainedConfig._attn_implementation of transformers"),
        ({"Cache": WithoutLayers}, r"needs Cache\(layers=...\) of transformers"),
    ],
)
def test_what_a_later_version_lacks_is_named(parts, missing):
    with pytest.raises(UnsupportedTransformers, match=f"{missing}, which the installed 9.0 does not have"):
        check_transformers(stand_in(**parts))


def test_a_version_that_is_too_old_is_named_before_what_it_lacks():
    with pytest.raises(UnsupportedTransformers, match=r"found 4\.57\.1"):
        check_transformers(stand_in(__version__="4.57.1", Cache=object))
