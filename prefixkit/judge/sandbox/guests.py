"""The programs that run inside sandboxes, compiled here, so that nothing of prefixkit needs to be readable there."""

from __future__ import annotations

import marshal
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

_JUDGE = Path(__file__).parents[1]
_PARTS = {
    "answering": ("wire", "guest.start", "guest.answering"),
    "testing": ("wire", "guest.start", "guest.testing"),
    "program": ("wire", "guest.start", "guest.program"),
}

# Runs `python -c BOOT path`: makes the modules in a file, and calls the last one's `main`.
BOOT = """
import marshal, sys
with open(sys.argv[1], "rb") as file:
    modules, spec = marshal.load(file)
for name, code in modules:
    module = sys.modules[name] = type(sys)(name)
    exec(code, module.__dict__)
del file, name, code, modules
module.main(spec)
"""


def guest(name: str, spec: Mapping[str, Any]) -> bytes:
    """A program and what it is told, as the file that ``BOOT`` reads.

    Args:
        name: ``answering``, ``testing`` or ``program``.
        spec: Of values that ``marshal`` takes.
    """
    return marshal.dumps((_modules(name), dict(spec)))


@cache
def _modules(name: str) -> tuple[tuple[str, Any], ...]:
    found = []
    for part in _PARTS[name]:
        path = _JUDGE.joinpath(*part.split(".")).with_suffix(".py")
        found.append((f"prefixkit.judge.{part}", compile(path.read_text(), f"{part}.py", "exec", dont_inherit=True)))
    return tuple(found)
