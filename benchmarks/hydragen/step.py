"""A decode step of a whole model with one of the attention cores, as a replayed CUDA graph: its time at several lengths."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from benchmarks.hydragen.arena import Arena, DoesNotFit
from benchmarks.hydragen.cases import Case, mean
from benchmarks.hydragen.compiled import CompiledStep
from benchmarks.hydragen.methods import METHODS, Core
from benchmarks.hydragen.shapes import Shape
from benchmarks.hydragen.tree_state import TreeState
from prefixkit.models import patch
from prefixkit.models.tree_cache import TreeCache

REPLAYS, FEWEST_REPLAYS = 10, 5
# Replays of one length take about so long at most.
REPLAY_MS = 400.0
Row = dict[str, Any]


class Rig:
    """One model on one device, memory for KV, and what was measured so far that does not depend on the case.

    ``model`` and ``arena`` are made when first asked for.

    Args:
        shape: The model.
        device: A GPU, or the CPU for tests.
        room: Bytes of KV to hold at most; None takes what is free.

    Attributes:
        wrong: Methods that are not measured, for their answers differ from ours; with the reason.
        smaller: Flash without sharing at batches that fit, in place of larger ones.
    """

    def __init__(self, shape: Shape, device: torch.device, room: int | None = None) -> None:
        self.shape, self.device, self._room = shape, device, room
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._ceilings: dict[tuple[int, bool], Row] = {}
        self._arena: Arena | None = None
        self.wrong: dict[str, str] = {}
        self.smaller: dict[Case, Row] = {}

    @cached_property
    def model(self) -> Any:
        self.drop_arena()
        return patch(self.shape.build(self.device, self.dtype))

    @cached_property
    def _compiled(self) -> CompiledStep:
        return CompiledStep(self.model, compile=self.device.type == "cuda")

    @property
    def arena(self) -> Arena:
        if self._arena is None:
            self._arena = Arena.of_free_memory(self.device, self.dtype, self._room)
        return self._arena

    def drop_arena(self) -> None:
        """Give its memory back, for what brings a pool of its own."""
        self._arena = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Give the model's memory back too."""
        self.__dict__.pop("model", None)
        self.__dict__.pop("_compiled", None)
        self.drop_arena()

    def state(self, case: Case, share: bool = True) -> TreeState:
        return TreeState(case, self.shape.head_shape(self.dtype), self.device, self.dtype, share)

    def fits(self, method: str, case: Case) -> bool:
        """Whether a method's KV of a case has room."""
        _ = self.model
        spec = self.shape.kv_spec(self.device, self.dtype)
        try:
            self.arena.check(METHODS[method].kv_bytes(case, spec.bytes_per_token))
        except DoesNotFit:
            return False
        return True

    def core(self, method: str, state: TreeState, layers: int | None = None) -> Core:
        """A method's core over a fresh arena.

        Raises:
            DoesNotFit: its KV is larger than the arena.
            ValueError: it is one of ``wrong``.
        """
        if method in self.wrong:
            raise ValueError(self.wrong[method])
        kind, spec = METHODS[method], self.shape.kv_spec(self.device, self.dtype, layers)
        self.arena.check(kind.kv_bytes(state.case, spec.bytes_per_token))
        self.arena.reset()
        return kind(state, spec, self.shape.heads, self.arena)

    def ceiling(self, state: TreeState, compiled: bool) -> Row:
        """The step without attention; measured once for each batch."""
        key = state.case.batch, compiled
        if key not in self._ceilings:
            self._ceilings[key] = self.measure("none", state, compiled)
        return self._ceilings[key]

    def measure(self, method: str, state: TreeState, compiled: bool = False) -> Row:
        """Milliseconds of a step at the case's lengths and tokens per second; or why there are none."""
        try:
            _ = self.model  # before the arena, which takes what memory it leaves
            with torch.no_grad():
                return self._measure(self.core(method, state), compiled)
        except DoesNotFit as error:
            return {"skipped": str(error)}
        except torch.OutOfMemoryError:
            return {"skipped": "out of memory"}
        except Exception as error:  # a method's failure is a result
            return {"skipped": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"}
        finally:
            if self.device.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda.empty_cache()

    def _measure(self, core: Core, compiled: bool) -> Row:
        state = core.state
        step = self._compiled_step(core) if compiled else self._eager_step(core)
        lengths = (1, 1, 1) if type(core) is Core else state.case.lengths
        core.at(lengths[0])
        with core.installed():
            run = replayed(captured(step)) if self.device.type == "cuda" else partial(_wall_ms, step)
        at: dict[int, float] = {}
        for drawn in dict.fromkeys(lengths):
            core.at(drawn)
            with core.installed():
                at[drawn] = _median(run)
        step_ms = mean(at) if len(at) == 3 else float(np.mean(list(at.values())))
        row: Row = {
            "ms": {str(drawn): round(ms, 4) for drawn, ms in at.items()},
            "step_ms": round(step_ms, 4),
            "tokens_per_s": round(state.case.batch / step_ms * 1e3, 1),
        }
        return row | ({"chosen": core.chosen} if core.chosen else {})

    def _eager_step(self, core: Core) -> Callable[[], None]:
        cache = TreeCache(core.pool)

        def step() -> None:
            now = core.state.step
            cache.begin(now)
            try:
                logits = self.model(**cache.inputs(), logits_to_keep=now.logit_rows).logits
            except BaseException:
                cache.abandon()
                raise
            cache.end()
            now.tokens.copy_(logits[0].argmax(-1))

        return step

    def _compiled_step(self, core: Core) -> Callable[[], None]:
        def step() -> None:
            now = core.state.step
            now.tokens.copy_(self._compiled(now.tokens, now.positions, core))

        return step


def captured(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A step as a graph, after two steps that set up what is made once."""
    for _ in range(2):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def replayed(graph: torch.cuda.CUDAGraph) -> Callable[[int], list[float]]:
    """A function that replays a graph so many times, and says how many milliseconds each took.

    One more goes ahead of them; after it none waits for the host.
    """

    def run(count: int) -> list[float]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        graph.replay()
        for event in events[:-1]:
            event.record()
            graph.replay()
        events[-1].record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in pairwise(events)]

    return run


def _wall_ms(step: Callable[[], None], count: int) -> list[float]:
    took = []
    for _ in range(count):
        began = time.perf_counter()
        step()
        took.append((time.perf_counter() - began) * 1e3)
    return took


def _median(run: Callable[[int], list[float]]) -> float:
    """Over replays: fewer where they take long."""
    about = run(1)[0]
    count = max(FEWEST_REPLAYS, min(REPLAYS, int(REPLAY_MS / max(about, 1e-3))))
    return float(np.median(run(count)))
