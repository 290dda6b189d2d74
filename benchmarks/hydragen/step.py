"""A decode step of a whole model with one of the attention cores, as a replayed CUDA graph, at several lengths."""

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.hydragen.cases import Case, TreeState, mean
from benchmarks.hydragen.methods import METHODS, Arena, Core, DoesNotFit, Parts, Tree
from benchmarks.kernels import rotated
from benchmarks.runner import Row, captured, failure, free_memory, replayed_ms, wall_seconds
from benchmarks.shapes import Shape
from benchmarks.tree_attention.inputs import planner_for
from benchmarks.tree_attention.rivals import MOST_DIFFERENCE
from prefixkit.models import ModelRunner, patch
from prefixkit.models.compile.packed_weights import pack, packed_view
from prefixkit.ops.kv_pool import KVSpec

CHECKED, CHECKED_AT = Case(((1, 200), (4, 37)), batch=16, new=24, private=5), 11


class Rig:
    """One model on one device, memory for KV (``capacity`` bytes or what is free), and what holds for several cases."""

    def __init__(self, shape: Shape, device: torch.device, capacity: int | None = None) -> None:
        self.shape, self.device, self._capacity = shape, device, capacity
        self.on_gpu = device.type == "cuda"
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32
        self._ceilings: dict[tuple[int, bool], Row] = {}
        self.wrong: dict[str, str] = {}  # methods that are not measured, and why: their answers differ from ours
        self.smaller: dict[Case, Row] = {}  # flash without sharing at batches that fit, in place of larger ones

    @cached_property
    def model(self) -> Any:
        return patch(self.shape.build(self.device, self.dtype), tree_cache="never")  # `generate` is stock here

    @cached_property
    def _compiled(self) -> "CompiledStep":
        return CompiledStep(self.model, compile=self.on_gpu)

    @cached_property
    def arena(self) -> Arena:
        _ = self.model  # before the arena, which takes what memory it leaves
        return Arena(self.device, self.dtype, self._capacity)

    def drop(self, *names: str) -> None:
        """Give the memory of ``arena``, ``model`` or ``_compiled`` back."""
        for name in names:
            self.__dict__.pop(name, None)
        free_memory()

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def state(self, case: Case, share: bool = True) -> TreeState:
        heads = self.shape.heads, self.shape.kv_heads, self.shape.head_dim
        return TreeState(case, planner_for(*heads, self.device, self.dtype), self.device, share)

    def spec(self, layers: int | None = None) -> KVSpec:
        return KVSpec(layers or self.shape.layers, self.shape.kv_heads, self.shape.head_dim, self.dtype, self.device)

    def fits(self, method: str, case: Case) -> bool:
        return METHODS[method].kv_bytes(case, self.spec().bytes_per_token) <= self.arena.flat.nbytes

    def core(self, method: str, state: TreeState, layers: int | None = None) -> Core:
        """A method's core over a fresh arena; DoesNotFit, or ValueError for one of ``wrong``."""
        if method in self.wrong:
            raise ValueError(self.wrong[method])
        kind, spec = METHODS[method], self.spec(layers)
        self.arena.check(kind.kv_bytes(state.case, spec.bytes_per_token))
        self.arena.reset()
        return kind(state, spec, self.shape.heads, self.arena)

    def ceiling(self, state: TreeState, compiled: bool) -> Row:
        """The step without attention; measured once for each batch."""
        if (key := (state.case.batch, compiled)) not in self._ceilings:
            self._ceilings[key] = self.measure("none", state, compiled)
        return self._ceilings[key]

    def attempt(self, run: Callable[[], Row]) -> Row:
        """What a run without gradients returns, or why it does not."""
        try:
            with torch.no_grad():
                return run()
        except DoesNotFit as error:
            return {"skipped": str(error)}
        except Exception as error:
            return {"skipped": failure(error)}
        finally:
            self.wait()
            torch.cuda.empty_cache()

    def measure(self, method: str, state: TreeState, compiled: bool = False) -> Row:
        """Milliseconds of a step at the case's lengths and tokens per second; or why there are none."""
        return self.attempt(partial(self._measure, method, state, compiled))

    def _measure(self, method: str, state: TreeState, compiled: bool) -> Row:
        core = self.core(method, state)
        step = self.step(core, compiled)
        core.at(1)
        with core.installed():
            graph = captured(step) if self.on_gpu else None

        def ms(count: int) -> list[float]:
            return replayed_ms(graph, count) if graph else [1e3 * seconds for seconds in wall_seconds(step, count)]

        at: dict[int, float] = {}
        for new in (1,) if type(core) is Core else dict.fromkeys(state.case.lengths):
            core.at(new)
            with core.installed():
                count = max(5, min(10, int(400.0 / max(ms(1)[0], 1e-3))))  # about 400 ms at most
                at[new] = float(np.median(ms(count)))
        step_ms = mean(at) if len(at) == 3 else float(np.mean(list(at.values())))
        row: Row = {"ms": {str(new): round(took, 4) for new, took in at.items()}, "step_ms": round(step_ms, 4)}
        row["tokens_per_s"] = round(state.case.batch / step_ms * 1e3, 1)
        return row | ({"chosen": core.chosen} if core.chosen else {})

    def step(self, core: Core, compiled: bool = False) -> Callable[[], Tensor]:
        """The step through the model's own modules, as they are or compiled."""
        runner, state = ModelRunner(self.model, core.pool), core.state

        def run() -> Tensor:
            now = state.step
            chosen = self._compiled(now.tokens, now.positions, core) if compiled else runner.compute(now).argmax(-1)
            return now.tokens.copy_(chosen)

        return run


def differences(rig: Rig) -> dict[str, float | str]:
    """For each method but none: the norm of its difference from ours over the norm of ours; or why it has no answer."""
    print("seed 7")
    torch.manual_seed(7)
    state, spec, heads = rig.state(CHECKED), rig.spec(layers=1), rig.shape.heads
    rig.arena.reset()
    tree = Tree(state, spec, heads, rig.arena)
    random = (torch.randn(CHECKED.batch, n, spec.head_dim, device=rig.device) for n in (heads, *[spec.kv_heads] * 2))
    q, key, value = (x.to(rig.dtype) for x in random)

    def answer(core: Core) -> Tensor:
        core.at(CHECKED_AT)
        core.append(0, key, value)
        return core.attend(0, q, spec.head_dim**-0.5).float()

    found: dict[str, float | str] = {}
    with torch.no_grad():
        ours = answer(tree)
        for name, kind in ((name, kind) for name, kind in METHODS.items() if issubclass(kind, Parts)):
            try:
                core = kind(state, spec, heads, rig.arena)
                _copy(tree, core)
                found[name] = round(float((answer(core) - ours).norm() / ours.norm()), 6)
            except Exception as error:
                found[name] = failure(error)
    return found


def complaints(found: dict[str, float | str]) -> dict[str, str]:
    """Methods that do not compute what ours does, and why."""
    wrong = {name: by for name, by in found.items() if isinstance(by, str) or not by < MOST_DIFFERENCE}
    return {name: by if isinstance(by, str) else f"differs from ours by {by} of the norm" for name, by in wrong.items()}


def _copy(tree: Tree, core: Parts) -> None:
    """The tree's KV into the layout of ``core``."""
    snapshot, case, first = tree.state.snapshot, tree.state.case, 0
    # The slots of each sequence's tokens, level after level.
    each = [np.repeat(nodes, case.batch // len(nodes)) for nodes in tree.state.nodes]
    levels = [snapshot.slots(nodes[:, None], np.arange(snapshot.length[nodes[0]])[None]) for nodes in each]
    slots = torch.from_numpy(np.concatenate(levels, axis=1)).to(core.spec.device)
    kv = [pages.flatten(0, 1)[slots] for pages in (tree.pool.k(0), tree.pool.v(0))]
    for (nodes, tokens), level in zip(case.levels, core.level_kv[0], strict=False):
        for dense, every in zip(level, kv, strict=True):
            dense.copy_(every[:: case.batch // nodes, first : first + tokens].transpose(1, 2))
        first += tokens
    for dense, every in zip(core.own_kv[0], kv, strict=True):
        dense.copy_(every[:, first:])


_Weights = list[tuple[Tensor, list[int]]]  # of one input: as they are multiplied, and the rows of each part


def _before(
    h: Tensor, layer: Any, weights: _Weights, angles: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values; not rotated without ``angles``."""
    x = layer.input_layernorm(h)
    parts = (part for weight, widths in weights for part in linear(x, weight).split(widths, -1))
    q, k, v = (part.unflatten(-1, (-1, layer.self_attn.head_dim)) for part in parts)
    return (q, k, v) if angles is None else (rotated(q, *angles), rotated(k, *angles), v)


def _after(h: Tensor, out: Tensor, layer: Any) -> Tensor:
    h = h + layer.self_attn.o_proj(out.flatten(1))
    return h + layer.mlp(layer.post_attention_layernorm(h))


def _between(h: Tensor, out: Tensor, layer: Any, *following: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    h = _after(h, out, layer)
    return h, *_before(h, *following)


def _last(h: Tensor, out: Tensor, layer: Any, norm: Any, head: Any) -> Tensor:
    return head(norm(_after(h, out, layer))).argmax(-1)


class CompiledStep:
    """``tokens, positions [batch]`` to the next tokens, a Llama's modules through torch.compile, attention by a core.

    Layers come as arguments, so that all share three compiled functions.  With attention, q, k and v are packed, and
    rotated and appended, as in prefixkit's compiled layers.  ``compile=False`` runs the same functions as they are.
    """

    def __init__(self, model: Any, compile: bool) -> None:
        self._model, self._compile = model, compile
        if compile:
            torch._dynamo.reset()
        made: Callable[[Any], Any] = torch.compile(fullgraph=True) if compile else (lambda f: f)
        self._before, self._between, self._last = (made(function) for function in (_before, _between, _last))

    def __call__(self, tokens: Tensor, positions: Tensor, core: Core) -> Tensor:
        inner, scale = self._model.model, self._model.config.head_dim**-0.5
        h = inner.embed_tokens(tokens)
        cos, sin = (part[0] for part in inner.rotary_emb(h[None], positions[None]))
        self._any_batch(h, cos, sin)
        layers, packed = list(inner.layers), type(core) is not Core
        angles = None if core.rotates else (cos, sin)
        q, k, v = self._before(h, layers[0], _packed(layers[0], packed), angles)
        for index, layer in enumerate(layers):
            out = core.attend(index, core.rotary_append(index, q, k, v, cos, sin), scale)
            self._any_batch(h, out)
            if index + 1 < len(layers):
                following = layers[index + 1]
                h, q, k, v = self._between(h, out, layer, following, _packed(following, packed), angles)
        return self._last(h, out, layers[-1], inner.norm, self._model.lm_head)

    def _any_batch(self, *tensors: Tensor) -> None:
        """Compile for any batch at once: the first dimension."""
        for tensor in tensors if self._compile else ():
            torch._dynamo.maybe_mark_dynamic(tensor, 0)


def _packed(layer: Any, packed: bool) -> _Weights:
    """The weights of q, k and v as one, or apart."""
    weights = [getattr(layer.self_attn, f"{name}_proj").weight for name in "qkv"]
    if not packed:
        return [(weight, [len(weight)]) for weight in weights]
    whole = packed_view(weights)
    return [(pack(weights) if whole is None else whole, [len(weight) for weight in weights])]
