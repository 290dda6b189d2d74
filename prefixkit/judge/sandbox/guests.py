"""The programs that run inside sandboxes, compiled here, so that nothing of prefixkit needs to be readable there."""

from __future__ import annotations

import marshal
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

_JUDGE = Path(__file__).parents[1]
_PARTS = ("wire", "guest.start", "guest.answering", "guest.testing", "guest.program", "guest.zygote")
FILES = {"answering": "candidate.py", "testing": "tests.py", "program": "program.py"}  # of each guest's program

# Runs `python -c BOOT descriptor`: makes the modules in a file, then becomes the process of each program.
BOOT = """
import marshal, sys
with open(int(sys.argv[1]), "rb") as file:
    modules, spec = marshal.load(file)
for name, code in modules:
    module = sys.modules[name] = type(sys)(name)
    exec(code, module.__dict__)
del file, name, code, modules
spec = module.serve(spec)
sys.modules["prefixkit.judge.guest." + spec["guest"]].main(spec)
"""


def zygote(spec: Mapping[str, Any]) -> bytes:
    """The guests and what :func:`prefixkit.judge.guest.zygote.serve` is told, as the file that ``BOOT`` reads."""
    return marshal.dumps((_modules(), dict(spec)))


@cache
def _modules() -> tuple[tuple[str, Any], ...]:
    found = []
    for part in _PARTS:
        path = _JUDGE.joinpath(*part.split(".")).with_suffix(".py")
        found.append((f"prefixkit.judge.{part}", compile(path.read_text(), f"{part}.py", "exec", dont_inherit=True)))
    return tuple(found)
