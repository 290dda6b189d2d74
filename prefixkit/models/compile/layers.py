"""Decoder layers through torch.compile, with prefixkit's ops as opaque calls in their graphs.

Norms, rotary embedding, residual adds and activations become a few kernels.  The original decoder layer is compiled,
on a shallow copy as in ``attention_class.py`` with a :class:`TracedLayer` as its cache.  All tensors of the step and
the layer's pages are inputs of the graph, whose numbers of rows and pages are dynamic: layers of a kind share one
graph for all steps and pools.  Compiled functions belong to the model (see ``made.py``).  The q, k and v projections
become one product over packed weights, and so do gate and up if rows are few (see ``packing.py``); rotary embedding and
appending become one op (see ``rotary.py``), and residual adds are part of the sums of tensor parallelism (see
``residuals.py``).
"""

from __future__ import annotations

import functools
import inspect
import logging
import time
import weakref
from collections.abc import Container, Sequence
from hashlib import sha256
from itertools import chain
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config as shapes_config
from torch.utils._pytree import tree_leaves

from prefixkit.attention.step import Step
from prefixkit.kv.kv_pool import KVSpec
from prefixkit.models.attention_class import cache_among, layer_number, original_class
from prefixkit.models.bound_forwards import subclass
from prefixkit.models.compile.layer_copy import LayerCopy
from prefixkit.models.compile.local_parts import LocalParts
from prefixkit.models.compile.made import Made, made_of
from prefixkit.models.compile.packing import Compiler, Function, capturing, compile_packed
from prefixkit.models.compile.residuals import with_residuals
from prefixkit.models.compile.rotary import with_rotary_append
from prefixkit.models.compile.traced import TracedLayer
from prefixkit.models.families import attention_layers, pretrained_model
from prefixkit.models.own_attention.known import own_code
from prefixkit.models.steps.step_cache import StepCache
from prefixkit.models.steps.traced_step import TracedStep
from prefixkit.ops import library
from prefixkit.torch_private import compile_graph, compiler_errors, mark_dynamic

log = logging.getLogger("prefixkit")

_Key = tuple[int, bool, bool, KVSpec, tuple[Function, ...]]


def inductor(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Function:
    """Inductor without CUDA graphs of its own: callers may capture the function that it returns.

    The compiled code stays in torch's cache on disk, for other processes.
    """
    # Starting worker processes takes longer than they save: a layer has few kernels.
    patches = {"triton.cudagraphs": False, "compile_threads": 1}
    # torch's cache key contains our ops' names, but neither their results' strides nor the arguments that they write.
    tag = f"{torch.compiler.config.cache_key_tag} prefixkit {_contracts()}"
    with torch.compiler.config.patch(cache_key_tag=tag):  # type: ignore[attr-defined]
        compiled: Any = compile_graph(graph, inputs, patches)
    return compiled  # type: ignore[no-any-return]


@functools.cache
def _contracts() -> str:
    """A digest of the ops' schemas and fakes."""
    return sha256(inspect.getsource(library).encode()).hexdigest()[:16]


def compile_layer(graph: torch.fx.GraphModule, inputs: Sequence[Any], compiler: Compiler = inductor) -> Function:
    """``compiler(graph, inputs)`` for a layer's graph, rewritten as this module's docstring says."""
    return compile_packed(with_residuals(with_rotary_append(graph)), inputs, compiler)


class NotCompilable(TypeError):
    """A property of a model prevents compiling its layers; they run as they are."""


class CompiledLayers:
    """The decoder layers of a patched model, compiled for the steps of one cache.

    Layers are compiled at the model's first step, which takes seconds, and not during the capture of a CUDA graph.
    Compiled layers serve any number of rows, but a single row has a graph of its own, and so have steps whose experts
    run by our op.  All caches of the model share them, with pools of any size, one step at a time; ``unpatch`` drops
    them.  A layer that cannot be compiled runs as it is, after one warning that says why.

    A layer's first compiled step packs the weights of q, k and v, and those of gate and up: it moves each group into
    one block of memory, and they stay the same Parameter objects with the same values.  ``unpatch`` gives each weight
    its own memory back.  CUDA graphs of this model that were captured before must be captured again; engines do so.

    Attributes:
        rows: The numbers of rows to compile for; None for any.
        made: The functions that ``compiler`` has made for the model, shared by all caches; a step holds their lock.
        reason: Why layers run as they are, or None.
        active: Whether the step in progress runs through compiled layers.

    Args:
        model: The patched model.
        cache: The cache.
        rows: As above.
        compiler: Compiles a layer's graph for its inputs to a function, as a backend of torch.compile does.
        experts: The most rows of a step in which our op runs the experts.
    """

    def __init__(
        self,
        model: nn.Module,
        cache: StepCache,
        rows: Container[int] | None = None,
        compiler: Compiler = compile_layer,
        experts: float = 0,
    ) -> None:
        self.rows = rows
        self.reason: str | None = None
        self.active = False
        self._classes: tuple[type[nn.Module], ...] = ()
        self._step = TracedStep()
        self._copies: dict[nn.Module, list[LayerCopy]] = {}  # one for each layer of KV that a decoder layer computes
        self._spec = cache.pool.spec
        # One graph serves all numbers of rows and pages, and all page sizes, except 1.
        self._small = min(cache.pool.num_pages, 2) << 2 | min(cache.pool.page_size, 2)
        self._rows, self._experts = 0, experts
        self._key: _Key = (0, False, False, self._spec, ())
        try:
            parts = LocalParts(pretrained_model(model))
            layers = decoder_layers(model, parts)
            if any(own.kind.plain or own.kind.reads is not None for own in cache.layer_pages):
                raise NotCompilable("layers attend over latents, selected tokens, or what another layer caches")
        except NotCompilable as error:
            self.made = Made(compiler)
            self._fall_back(str(error))
            return
        classes = [layer_class(original_class(layer)) for layer, _ in layers]  # type: ignore[arg-type]
        self._classes = tuple({original_class(part): None for layer, _ in layers for part in layer.modules()})
        self.made = made_of(layers[0][0], compiler)
        for (layer, child), cls in zip(layers, classes, strict=True):
            places = cache.places[layer_number(layer.get_submodule(child))]
            traced = [TracedLayer(cache.layer_pages[place], self._step) for place in places]
            self._copies[layer] = [LayerCopy(layer, child, one, parts, run) for run, one in enumerate(traced)]
            layer.__class__ = cls
        cache.compiled = self

    @property
    def graphs(self) -> int:
        """Number of graphs compiled for the model."""
        return self.made.graphs

    @property
    def seconds(self) -> float:
        """Time that compiling them took."""
        return self.made.seconds

    def serves(self, step: Step, compiling: bool) -> bool:
        """Whether a step should run here: its layers are compiled, or may be compiled now.

        Args:
            step: A step; False if it has one row, which would need a graph of its own.
            compiling: Whether the step may take the seconds that compiling takes.
        """
        return self.reason is None and step.num_rows > 1 and (compiling or self._key_of(step) in self.made.ready)

    def start_step(self, step: Step) -> None:
        """Make the step's tensors the inputs of the graphs, if layers are compiled for its number of rows.

        Raises:
            ValueError: a CUDA graph is being captured, and no such step has run before.
        """
        self.active = self.reason is None and (self.rows is None or step.num_rows in self.rows)
        if self.active and self.made.dropped:
            self._fall_back("the model was unpatched in the meantime; make a new ModelRunner")
        if self.active:
            self._rows, self._key = step.num_rows, self._key_of(step)
            if self._key not in self.made.ready and capturing():
                raise ValueError(
                    "layers cannot be compiled while a CUDA graph is captured; run such a step once before"
                )
            self._step.load(step)

    def run(self, cache: StepCache, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of ``layer``, called with ``cache``, in the step in progress.

        Raises:
            IncompleteStep: the layer has already run in this step.
            ValueError: the model was called with other positions or another mask than ``StepCache.inputs()``; or a
                CUDA graph is being captured, and weights have moved since the last such step.
        """
        if (copies := self._copies.get(layer)) is None:  # the layer belongs to another model, or was inserted later
            return original_class(layer).forward(layer, *args, **kwargs)
        copy = copies[0] if len(copies) == 1 else copies[sum(cache.attended[one.index] for one in copies[:-1])]
        copy.check(cache, kwargs)
        given = (
            tuple(copy.traced if value is cache else value for value in args),
            {name: copy.traced if value is cache else value for name, value in kwargs.items()},
        )
        made, before, began = self.made, self.graphs, time.perf_counter()
        try:
            result = self._call(cache, copy, *given)
        except compiler_errors() as error:
            # No part of the step has run yet: these errors come from the compiler.
            if capturing():
                raise
            self._fall_back(_said(error))
            return original_class(layer).forward(layer, *args, **kwargs)
        cache.attended[copy.index] += 1
        if made.graphs > before:
            taken = time.perf_counter() - began
            made.seconds += taken
            log.info("compiled layer %d in %.1f s, graph %d", copy.index, taken, made.graphs)
        return result

    def _call(self, cache: StepCache, copy: LayerCopy, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        made, key = self.made, self._key
        of_run = key, copy.run
        if key in made.ready:
            return made.functions[of_run](copy.current(), args, kwargs)
        if of_run not in made.functions:
            made.functions[of_run] = _function(made)
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):
                rows = [dim for dim, size in enumerate(tensor.shape) if size == self._rows > 1]
                mark_dynamic(tensor, rows)
        # Sizes that are equal by chance when a graph is made may differ later.
        with shapes_config.patch(use_duck_shape=False):  # type: ignore[attr-defined]
            result = made.functions[of_run](copy.current(), args, kwargs)
        if cache.attended.count(0) == 1:
            made.ready.add(key)  # this layer is the last of the step
        return result

    def _key_of(self, step: Step) -> _Key:
        """The key of a graph: which sizes are 0 or 1, because torch specialises graphs for these; what runs experts;
        the pool's dtype and device; and the classes' ``forward``, because torch does not notice when a submodule's
        class gets another.
        """
        small = self._small
        for tensor in (step.slots, *chain(*(plan.tensors for plan in step.plans))):
            small = small << 2 | min(len(tensor), 2)
        forwards = tuple([cls.forward for cls in self._classes])
        return small, step.slots.is_inference(), step.num_rows <= self._experts, self._spec, forwards

    def _fall_back(self, reason: str) -> None:
        self.reason, self.active = reason, False
        log.warning("layers run without torch.compile: %s", reason)


def _function(made: Made) -> Function:
    # Code of its own, because torch limits how many graphs belong to one code object.
    code = _run_layer.__code__.replace(co_name="compiled_layer")
    made.codes.append(code)
    function = FunctionType(code, globals())
    backend = functools.partial(_backend, weakref.ref(made))  # torch never frees a backend
    compiled: Function = torch.compile(function, backend=backend, fullgraph=True, dynamic=False)
    return compiled


def _run_layer(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return layer.forward(*args, **kwargs)


@functools.cache
def layer_class(original: type[nn.Module]) -> type[nn.Module]:
    """The subclass of a decoder layer's class that runs compiled if its cache says so; one per original class."""

    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        cache = cache_among(args, kwargs)
        if cache is None or cache.compiled is None or not cache.compiled.active:
            return original.forward(self, *args, **kwargs)  # looked up at each call, as in attention_class.py
        return cache.compiled.run(cache, self, args, kwargs)

    # Python's copies of a layer get the original class: they belong to no cache.
    return subclass(original, None, {"forward": forward})


def decoder_layers(model: nn.Module, parts: LocalParts) -> list[tuple[nn.Module, str]]:
    """The decoder layer of each attention module, in order, and the module's name in it; ``parts`` has stand-ins."""
    found: list[tuple[nn.Module, str]] = []
    pretrained = pretrained_model(model)
    for name in attention_layers(model):
        above, _, child = name.rpartition(".")
        layer = pretrained.get_submodule(above)
        if not above.rpartition(".")[2].isdigit() or any(layer is other for other, _ in found):
            raise NotCompilable(f"{name} is not the only attention of a layer of its own")
        if own_code(original_class(layer._modules[child])) is not None:  # type: ignore[arg-type]
            raise NotCompilable(f"the attention of {above} has code of its own")
        for module in layer.modules():
            if "forward" in module.__dict__ and module not in parts:
                raise NotCompilable(
                    f"a {type(module).__name__} of {above} has a forward of its own, {module.forward!r}"
                )
        found.append((layer, child))
    return found


def _backend(of: weakref.ref[Made], graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Function:
    """Compile one layer's graph, after a check that it calls each op once."""
    made = of()
    assert made is not None, "its function is on the call stack"
    # A layer that attends at positions in the cache attends twice.
    for op, most in ((torch.ops.prefixkit.kv_append, 1), (torch.ops.prefixkit.tree_attention, 2)):
        if not 1 <= (count := len(graph.graph.find_nodes(op="call_function", target=op))) <= most:
            raise RuntimeError(f"a layer calls {op} {count} times, not once")
    log.info("compiling a layer, which takes seconds")
    compiled: Function = made.compiler(graph, inputs)
    made.graphs += 1
    return compiled


def _said(error: BaseException) -> str:
    """The error in one line, without the compiler's general advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines[1:] if line.startswith(("Explanation:", "Developer debug context:"))]
    return f"{type(error).__name__}: {'; '.join([*lines[:1], *told])}"
