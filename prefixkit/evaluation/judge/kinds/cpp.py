"""Compiles C++ programs, in a sandbox that has the compiler and may run its parts."""

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
# A thread would get a stack as large as the program's; it gets what Python's threads get.
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
# The program comes out on standard output: nothing on the machine is written.
_SCRIPT = f'PATH=/usr/bin:/bin; LC_ALL=C; export PATH LC_ALL; "$1" {_FLAGS} -o /tmp/made "$2" "$3" && cat /tmp/made'


def compiled(sandbox: Sandbox, source: str, limits: Limits) -> bytes:
    """The program that a source makes, which will run within limits.

    Raises:
        Over: it makes none.
        NoCompiler: there is no g++ here.
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
