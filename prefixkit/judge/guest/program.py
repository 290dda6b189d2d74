"""A whole program between standard input and standard output: its limits are set, then it runs."""

import os
import sys

from prefixkit.judge.guest.start import begin

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def main(spec: "dict[str, Any]") -> None:
    """Become the command, or run the Python program as ``__main__``."""
    path = begin(spec)
    if spec["command"]:
        os.execv(spec["command"][0], spec["command"])
    sys.argv += spec["arguments"]
    module = type(sys)("__main__")
    module.__file__ = path
    sys.modules["__main__"] = module
    exec(compile(spec["program"], path, "exec"), module.__dict__)
