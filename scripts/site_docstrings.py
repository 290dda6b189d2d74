"""An extension of griffe for the site: roles of docstrings, such as ``:func:`name```, become links or code."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:func|class|meth|attr|data|mod):`~?([\w.]+)`")
# A module has the same name as this function, and griffe would find the module instead.
ELSEWHERE = {"variant": "attention.variants.variant.variant"}


class Roles(griffe.Extension):
    """Rewrites docstrings as they are loaded."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """A public name links to its place on the page; any other name is code."""
        if obj.docstring is not None:
            obj.docstring.value = ROLE.sub(lambda role: link(role[1], obj.package), obj.docstring.value)


def link(name: str, package: griffe.Module) -> str:
    """``name`` as Markdown, a link if the package exports it, with ``prefixkit.`` or without."""
    short = name.removeprefix("prefixkit.")
    exported = package.members.get(short.split(".")[0])
    if exported is None or not exported.is_alias:
        return f"`{short}`"
    return f"[`{short}`][prefixkit.{ELSEWHERE.get(short, short)}]"
