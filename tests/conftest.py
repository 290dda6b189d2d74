"""Options of the whole suite."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import random
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

pytest.register_assert_rewrite("prefixkit.testing")

DRAWN_BY = "PREFIXKIT_DRAWN_BY"  # the environment variable that says by which number cases are drawn
# The tests that take more than a second, and how long they took when ``--write-slow`` wrote the file.  Of these a run
# draws as many as take so many seconds, added up over all workers.
SLOW, SECONDS_OF_SLOW = Path(__file__).with_name("slow.txt"), 300.0

# Imports and collection leave no garbage to speak of, and looking for it takes a second of each worker.
gc.disable()
# torch's memory of what ops make of fake tensors: where sizes are open, keeping it takes longer than it saves.
os.environ.setdefault("TORCH_FAKE_TENSOR_DISPATCH_CACHE", "0")
# The compiler would collect garbage after every graph; thresholds below say when that is worth it.
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")
# Inductor would compile torch's vector headers for each of the CPU's instruction sets, to see whether that works.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
if mallopt := getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None:
    # glibc would give tensors of a megabyte back to the kernel, which clears their pages anew for the next ones.
    mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD: smaller ones come from the heap,
    mallopt(-1, 256 << 20)  # M_TRIM_THRESHOLD: which keeps so much
if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers that each use all cores starve each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forests", type=int, default=160, help="random forests in tests/attention/test_forests.py")
    parser.addoption("--all-cases", action="store_true", help="run all tests and cases of which some are drawn")
    parser.addoption("--write-slow", action="store_true", help=f"run all, and write the slow ones to {SLOW.name}")


def pytest_configure(config: pytest.Config) -> None:
    """All workers draw the same cases: they inherit the variable."""
    os.environ.setdefault(DRAWN_BY, str(secrets.randbelow(10**6)))
    if config.getoption("--write-slow"):
        config.option.all_cases = True  # the file would lose those that are left out
        if "PYTEST_XDIST_WORKER" not in os.environ:
            config.pluginmanager.register(SlowTests())


class SlowTests:
    """Writes how long tests take that take more than a second."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        lines = [f"{seconds:.1f} {test}\n" for test, seconds in sorted(self.seconds.items()) if seconds > 1]
        SLOW.write_text("".join(lines))


def pytest_report_header(config: pytest.Config) -> str:
    how = "all" if config.getoption("--all-cases") else f"drawn by {DRAWN_BY}={os.environ[DRAWN_BY]}"
    return f"slow tests, and cases of tests that are marked drawn: {how}"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Of ``-n auto``: one more than cores, for some tests wait for processes that they start."""
    mine = getattr(os, "sched_getaffinity", None)
    return (len(mine(0)) if mine else os.cpu_count() or 1) + 1


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests and cases that are not drawn are left out.  The longest come first: or one worker would end with them, and
    the others wait.
    """
    seconds = {test: float(took) for took, test in (line.split(" ", 1) for line in SLOW.read_text().splitlines())}
    if not config.getoption("--all-cases"):
        left_out = not_drawn(items)
        left_out |= slow_ones_not_drawn([item for item in items if item not in left_out], seconds)
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: (item.get_closest_marker("first") is None, item.nodeid not in seconds))


def not_drawn(items: list[pytest.Item]) -> set[pytest.Item]:
    """All but ``count`` cases of each test marked ``drawn(count)``: those of a matrix that others are much like.

    Which these are differs from run to run, so that over many runs all of them run.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("drawn") is not None:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out = set[pytest.Item]()
    for name, own in cases.items():
        (count,) = own[0].get_closest_marker("drawn").args
        left_out.update(random.Random(os.environ[DRAWN_BY] + name).sample(own, max(0, len(own) - count)))
    return left_out


def slow_ones_not_drawn(items: list[pytest.Item], seconds: Mapping[str, float]) -> set[pytest.Item]:
    """All but a drawn selection of the slow tests, which takes ``SECONDS_OF_SLOW``; none where all take less."""
    slow = [item for item in items if item.nodeid in seconds]
    random.Random(os.environ[DRAWN_BY]).shuffle(slow)
    left, left_out = SECONDS_OF_SLOW, set[pytest.Item]()
    for item in slow:
        if seconds[item.nodeid] <= left:
            left -= seconds[item.nodeid]
        else:
            left_out.add(item)
    return left_out


@pytest.fixture
def draw(request: pytest.FixtureRequest) -> Callable[[Sequence[Any], int], list[Any]]:
    """Draws so many of some things that are much alike, as ``drawn`` draws cases; all with ``--all-cases``."""
    every = request.config.getoption("--all-cases")
    rng = random.Random(os.environ[DRAWN_BY] + request.node.nodeid)
    return lambda things, count: list(things) if every else rng.sample(things, min(count, len(things)))


def pytest_collection_finish() -> None:
    """What is imported by now stays: garbage collections need not visit a million objects of libraries.

    They are also fewer: tracing a model for the compiler makes many objects, few of which are garbage in cycles.
    """
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)
    gc.enable()
    # The compiler would measure how long guards take, for a log, and for that empty the CPU's caches at each graph.
    if guards := sys.modules.get("torch._dynamo.guards"):
        guards.profile_guard_manager = lambda *given: 0.0
    # pytest adds handlers to every logger that does not propagate, six times a test: torch has 60 such loggers.
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and name.split(".")[0] == "torch":
            logger.propagate = True
    # To whom handles it the compiler would write out all its graphs and guards.
    logging.getLogger("torch.__trace").handlers.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """What a module's tests leave stays too, such as what they import: later collections visit what is new alone."""
    done = yield
    if nextitem is not None and nextitem.path != item.path:
        gc.collect(1)
        gc.freeze()
    return done


def pytest_sessionfinish() -> None:
    """What is left goes with the process: pytest would look for garbage in it five times."""
    gc.freeze()


@pytest.fixture
def num_forests(request: pytest.FixtureRequest) -> int:
    """How many random forests to try."""
    count: int = request.config.getoption("--forests")
    return count


@pytest.fixture
def free_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | Mapping[torch.device, int]], None]:
    """Sets how many bytes stores find free from now on: on every device, or on each."""

    def change(free: int | Mapping[torch.device, int]) -> None:
        found = free.__getitem__ if isinstance(free, Mapping) else lambda device: free
        monkeypatch.setattr("prefixkit.kv.device_memory.free_memory", found)

    return change


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Read-only folders of one tiny model: with a chat template ("chat"), without ("plain"), and without weights."""
    from prefixkit.testing.application.command_line import save_model

    found = {name: tmp_path_factory.mktemp(name) for name in ("chat", "plain")}
    for name, folder in found.items():
        save_model(folder, chat=name == "chat")
    no_weights = shutil.ignore_patterns("*.safetensors")
    found["weightless"] = shutil.copytree(
        found["plain"], tmp_path_factory.mktemp("weightless") / "model", ignore=no_weights
    )
    return found


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Three prompts as JSONL; two of them share four tokens."""
    from prefixkit.testing.application.command_line import write_prompts

    return write_prompts(tmp_path / "prompts.jsonl")


@pytest.fixture(scope="session")
def smol() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """SmolLM2-135M-Instruct in float32 and its tokenizer, loaded once; leave it unpatched and unchanged."""
    from prefixkit.evaluation.demo.model import load_demo

    return load_demo()
