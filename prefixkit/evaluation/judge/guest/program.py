"""Runs a whole program that reads standard input and writes standard output, after setting its limits."""

import atexit
import builtins
import gc
import os
import sys
from contextlib import suppress
from typing import Any

from prefixkit.evaluation.judge.guest.start import begin, without_mark


def main(spec: dict[str, Any]) -> None:
    """Become the command, or run the Python program as ``__main__``."""
    begin(spec)
    if command := spec.get("command"):
        os.execv(command[0], command)
    sys.argv += spec.get("arguments", [])
    status = _run(spec["program"], spec["path"])
    # End as the interpreter does, but without the teardown of its modules, which takes longer than all the rest.
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    atexit._run_exitfuncs()
    del sys.modules["__main__"]
    gc.collect()
    for file in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):
            file.flush()
    os._exit(status)


def _run(program: str, path: str) -> int:
    """Run the program; returns its exit status."""
    module = sys.modules["__main__"] = type(sys)("__main__")
    module.__dict__.update(__file__=path, __builtins__=builtins)
    try:
        exec(compile(without_mark(program), path, "exec"), module.__dict__)
        return 0
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    return 1
