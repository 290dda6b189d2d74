"""Programs in C++: compiled in one sandbox, run in others."""

from __future__ import annotations

import shutil

import pytest

from prefixkit.evaluation.judge import NoCompiler
from tests.evaluation.judge.judging import needs_sandbox, streams, verdict

pytestmark = [needs_sandbox(), pytest.mark.skipif(not shutil.which("g++"), reason="no g++ on the PATH")]

HEAD = "#include <iostream>\n#include <vector>\n#include <cstdlib>\n#include <unistd.h>\n#include <signal.h>\n"
MAIN = HEAD + "int main() { %s }"
DOUBLE = streams(("2\n", "4\n"), ("5\n", "10\n"))


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (MAIN % "int x; std::cin >> x; std::cout << 2 * x << '\\n';", "passed"),
        (MAIN % "std::cout << 4;", "failed"),
        (MAIN % "return 3;", "error"),
        (MAIN % "std::cout << 4", "invalid"),
        (MAIN % "std::vector<long> v(1l << 40); std::cout << v[7];", "memory"),
        (MAIN % "volatile int* p = 0; *p = 1;", "crashed"),
        (MAIN % "abort();", "crashed"),
        (MAIN % "for (volatile int i = 0;; ++i);", "timeout"),
        (MAIN % "for (;;) std::cout << 1234567;", "output"),
    ],
)
def test_programs(program: str, expected: str) -> None:
    seconds = 0.3 if expected == "timeout" else 60  # those that end have the time for it on any machine
    assert verdict(program, DOUBLE, language="cpp", seconds=seconds, memory=256).outcome == expected


def test_many_threads_have_the_memory_for_their_stacks_and_a_program_a_large_one() -> None:
    program = """
        #include <thread>
        #include <vector>
        #include <fstream>
        #include <iostream>
        int deep(int n) { volatile char kept[1024]; kept[n % 1024] = 1; return n ? 1 + deep(n - 1) + kept[0] * 0 : 0; }
        int main() {
            int n;
            std::ifstream("/dev/stdin") >> n;
            std::vector<std::thread> threads;
            std::vector<int> found(32);
            for (int i = 0; i < 32; ++i) threads.emplace_back([i, n, &found] { found[i] = n * i; });
            for (auto& one : threads) one.join();
            std::ofstream("/dev/stdout") << found[31] + (deep(100000) == 100000);
        }
    """
    for memory in (256, 1024):
        assert verdict(program, streams(("2", "63")), language="cpp", memory=memory).passed


ATTACKS = {
    "fork": 'std::cout << (fork() < 0 ? "contained" : "escaped");',
    "run a shell": 'std::cout << (system("true") == 0 ? "escaped" : "contained");',
    "kill": 'std::cout << (kill(-1, 9) < 0 ? "contained" : "escaped");',
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_contained(name: str) -> None:
    assert verdict(MAIN % ATTACKS[name], streams(("", "contained")), language="cpp").passed


COMPILING = {
    "include a file of the machine": '#include "/etc/passwd"\nint main() {}',
    "include a file without end": '#include "/dev/zero"\nint main() {}',
    "make a huge program": "char a[1 << 30] = {1}; int main() {}",
    "instantiate templates without end": "template <int n> struct A { A<n + 1> a; }; int main() { A<0> a; }",
    "include itself": '#include "program.cpp"\nint main() {}',
    "compute while compiling": "constexpr long f(long n) { return n < 2 ? n : f(n - 1) + f(n - 2); }\n"
    "constexpr long x = f(90); int main() { return x; }",
}


@pytest.mark.parametrize("name", COMPILING)
def test_an_attack_on_the_compiler_makes_an_invalid_program(name: str) -> None:
    found = verdict(COMPILING[name], DOUBLE, language="cpp")
    assert found.outcome == "invalid", found
    assert "root:" not in found.detail and len(found.detail) <= 300


def test_the_first_error_is_told() -> None:
    found = verdict("int main() { return nothing; }", DOUBLE, language="cpp")
    assert found.detail == "program.cpp:1:21: error: 'nothing' was not declared in this scope"


def test_without_a_compiler_there_is_an_error_and_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(NoCompiler, match="g\\+\\+"):
        verdict("int main() { return 77; }", DOUBLE, language="cpp")
