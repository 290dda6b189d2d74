"""What functions consist of: their code, and all that they read besides their arguments."""

from __future__ import annotations

import functools
import math
import types
from types import FunctionType

import pytest
import torch
from torch.nn.functional import softplus

from prefixkit.attention.variants.function_digest import captured, fingerprint

TABLE = torch.arange(4.0)
FACTOR = 3


def scaled(score):
    return helper(score) * FACTOR


def helper(score):
    return score + TABLE[0]


def endless(count):
    return endless(count - 1) if count else softplus(TABLE)


def shifted(by):
    def mod(score):
        return score + by

    return mod


def values_in(*functions):
    return [part for part in captured(*functions) if isinstance(part, int)]


def tensors_in(*functions):
    return [part for part in captured(*functions) if isinstance(part, torch.Tensor)]


def test_closures_defaults_partials_and_module_level_names_are_found():
    bias = torch.zeros(2)
    assert tensors_in(shifted(bias)) == [bias]
    assert 7 in values_in(lambda score, by=7: score + by)
    assert 9 in values_in(functools.partial(shifted, by=9))
    assert [part is TABLE for part in tensors_in(scaled)] == [True], "through another function"
    assert FACTOR in values_in(scaled)
    assert tensors_in([scaled, (shifted(bias),)])[1] is bias, "in sequences"


def test_a_function_that_calls_itself_is_read_once_and_those_of_torch_are_not_opened():
    assert [part is TABLE for part in tensors_in(endless)] == [True]
    assert softplus in captured(endless)
    assert fingerprint(endless) == fingerprint(endless)


def test_what_changes_in_place_is_the_same_part_with_another_digest():
    bias = torch.zeros(2)
    before, digest = captured(shifted(bias)), fingerprint(shifted(bias))
    bias += 1
    assert all(one is other for one, other in zip(captured(shifted(bias)), before, strict=True))
    assert fingerprint(shifted(bias)) != digest
    assert fingerprint(shifted(bias.clone())) == fingerprint(shifted(bias))


def test_module_level_values_count():
    def within(function, **values):
        """The function as of a module in which names have these values."""
        return FunctionType(function.__code__, globals() | values)

    assert fingerprint(within(helper, FACTOR=4)) == fingerprint(helper)
    assert fingerprint(within(scaled, FACTOR=4)) != fingerprint(scaled)
    assert fingerprint(within(helper, TABLE=TABLE + 1)) != fingerprint(helper)
    with pytest.raises(TypeError, match="numbers, strings, tensors and plain functions, got a object"):
        fingerprint(within(helper, TABLE=object()))


class Settings:
    scale = 2
    weights = torch.ones(4)

    class Inner:
        offset = torch.zeros(2)

    @classmethod
    def scaled(cls, x):
        return x * cls.scale


@pytest.mark.parametrize(
    "function",
    [
        lambda x, p: x * Settings.weights,
        lambda x, p: (lambda y: y * Settings.Inner.offset)(x),
        lambda x, p, settings=Settings: x * settings.weights,
    ],
)
def test_tensors_that_a_class_holds_are_parts_of_functions_that_name_them(function):
    (held,) = tensors_in(function)
    before = fingerprint(function)
    held += 1
    assert fingerprint(function) != before


def test_numbers_of_classes_and_modules_are_parts_of_functions_that_name_them(monkeypatch):
    module = types.ModuleType("settings_of_a_program")
    module.scale, module.other = 2, 3
    for function, holder in (
        (lambda x, p: x * Settings.scale, Settings),
        (lambda x, p: Settings.scaled(x), Settings),
        (lambda x, p: x * module.scale, module),
    ):
        before, parts = fingerprint(function), captured(function)
        monkeypatch.setattr(holder, "scale", holder.scale + 1)
        assert fingerprint(function) != before and captured(function) != parts
    now = fingerprint(lambda x, p: x * module.scale)
    module.other = 4
    assert fingerprint(lambda x, p: x * module.scale) == now, "which the function does not name"
    module.scale = object()
    with pytest.raises(TypeError, match="numbers, strings, tensors and plain functions, got a object"):
        fingerprint(lambda x, p: x * module.scale)


def test_installed_modules_are_named_and_not_opened():
    parts = captured(lambda x, p: torch.nn.functional.relu(x) * math.pi)
    assert parts[3:] == ["torch", torch, "math", math]
