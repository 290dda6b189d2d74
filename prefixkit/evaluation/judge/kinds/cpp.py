"""Compiles C++ programs, in a sandbox that contains the compiler and may run its parts."""

from __future__ import annotations

import shutil
from dataclasses import replace

from prefixkit.evaluation.judge.ends import Judged, Over, ended, line
from prefixkit.evaluation.judge.judge_errors import NoCompiler
from prefixkit.evaluation.judge.sandbox.rlimits import thread_stack
from prefixkit.evaluation.judge.sandbox.sandbox import Sandbox
from prefixkit.evaluation.judge.verdict import Verdict
from prefixkit.evaluation.tasks.problem import Limits

COMPILING = Limits(seconds=30.0, memory=2048, output=32 * 1024)
# By default a thread would get a stack as large as the program's; this gives it one of the size of Python's threads.
_STACKS = """
#include <pthread.h>
__attribute__((constructor)) static void stacks(void) {
    pthread_attr_t made;
    pthread_attr_init(&made);
    pthread_attr_setstacksize(&made, %d);
    pthread_setattr_default_np(&made);
}
"""
_FLAGS = "-std=c++17 -O2 -w -fmax-errors=1"
# The script writes the program to standard output, and no file on the machine.
_SCRIPT = f'PATH=/usr/bin:/bin; LC_ALL=C; export PATH LC_ALL; "$1" {_FLAGS} -o /tmp/made "$2" "$3" && cat /tmp/made'


def compiled(sandbox: Sandbox, source: str, limits: Limits) -> bytes:
    """The compiled program of a source, to be run within ``limits``.

    Raises:
        Over: the source does not compile.
        NoCompiler: this machine has no g++.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        raise NoCompiler("C++ programs cannot be judged without g++ on the PATH; `apt-get install g++`")
    spec = {"command": ["/bin/sh", "-c", _SCRIPT, "sh", compiler, "program.cpp", "stacks.cpp"]}
    stacks = _STACKS % thread_stack(limits)
    files = {"program.cpp": source.encode("utf-8", "replace"), "stacks.cpp": stacks.encode()}
    with sandbox.start("program", spec, COMPILING, files, tools=True) as process:
        process.run()
        if process.excess == "timeout":
            late = Verdict("timeout", None, f"compiling took more than {COMPILING.seconds:g} s")
            raise Over(replace(ended(process, COMPILING), verdict=late))
        if process.excess or process.status != 0:
            *_, last = "it does not compile", *process.errors.splitlines()
            found = next((entry for entry in process.errors.splitlines() if "error" in entry), last)
            raise Over(Judged(Verdict("invalid", None, line(found.rpartition("/judge/")[2]))))
        return bytes(process.heard)
