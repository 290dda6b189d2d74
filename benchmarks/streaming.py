"""StreamingLLM on one GPU: attention at positions in the cache, against caches whose keys are rotated at each token.

    python -m benchmarks.streaming --parts attention,memory [--batches 1,32] [--tokens 100000] [--out FILE]
    python -m benchmarks.streaming --parts model --device cpu --out FILE    the demo's model, from the package index
    python -m benchmarks.streaming --parts attention,memory --tiny --device cpu    in seconds; times mean nothing

A layer of a 13B Llama: bfloat16, 40 heads of 128, 4 sinks and a window of 2,048 tokens.  ``attention``: a decode step
of each batch size, as a captured graph over more layers than the L2 holds, contenders in turns, medians.  A step
rotates its query and key, writes K and V, and attends.  Except in ``repository``, each rotation is a compiled kernel.

``ours``         keys in pages, rotated once; two queries, two calls of the op, merged
``unfused``      a ring buffer of unrotated keys: all are rotated into another buffer, then torch's attention
``repository``   as in the authors' code: the cache is cut and appended by ``cat``, all keys are rotated in eager
                 torch, scores, softmax and sum are three calls
``us``, ``layers_us``   of a layer, and of the model's 40
``TBps``         bytes of K and V in the cache over the time of the whole step; ``kernel``: those of the window over the
                 time of the op's call on it
``difference``   from ``unfused``, relative to the norm, on the same numbers

``memory``: sequences that grow to ``--tokens`` tokens, one layer, pages freed every 256 tokens; on a GPU each token is
a replay of a captured step: tokens so far, pages in use and the tokens in them (``held``), and microseconds of a step
with all work of the host, medians over the first and the last tenth of the tokens.

``model``: nats a token of SmolLM2-135M-Instruct, made for 8,192 positions, on a text of 12,288 tokens (sources
of the standard library), means over each 1,024: with ``variants.streaming_llm(4, 1020)``, with the same tokens seen
at their positions in the text (``streaming``), with a window of 1,024, and with all.
"""

from __future__ import annotations

import argparse
import inspect
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import prefixkit
from benchmarks.runner import Replay, Row, Run, arguments, failure, free_memory, in_turns, input_sets, wall_seconds
from prefixkit import variants
from prefixkit.evaluation.demo.model import load_demo
from prefixkit.functional.attend import TreeStep

PARTS = ["attention", "memory", "model"]
EVERY = 256  # tokens after which pages are freed


@dataclass(frozen=True)
class Shape:
    """The sizes to measure, and the device."""

    device: str
    heads: int = 40
    dim: int = 128
    layers: int = 40
    sinks: int = 4
    window: int = 2048
    dtype: torch.dtype = torch.bfloat16

    @property
    def cached(self) -> int:
        return self.sinks + self.window

    def bytes(self, batch: int) -> int:
        """Bytes of K and V of a layer's cache."""
        return 2 * batch * self.cached * self.heads * self.dim * self.dtype.itemsize

    def random(self, *size: int) -> Tensor:
        return torch.randn(*size, dtype=self.dtype, device=self.device)


Rotate = Callable[[Tensor, Tensor], Tensor]


def rotation(shape: Shape, compiled: bool) -> Rotate:
    """Rotary embedding of ``x [..., rows, heads, dim]`` at ``positions [rows]``."""
    frequencies = 1e4 ** -(torch.arange(0, shape.dim, 2, device=shape.device) / shape.dim)

    def rotate(x: Tensor, positions: Tensor) -> Tensor:
        angle = (positions.float()[:, None] * frequencies)[:, None]
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    return torch.compile(rotate, dynamic=False) if compiled else rotate


def of_positions(shape: Shape, compiled: bool) -> prefixkit.Variant:
    rotate = rotation(shape, compiled)
    return prefixkit.compose(
        variants.streaming_llm(shape.sinks, shape.window), prefixkit.variant(query=rotate, key=rotate)
    )


class Ours:
    """A decode step of sequences that are longer than the window, planned once."""

    def __init__(self, shape: Shape, batch: int, layers: int, keys: Tensor, values: Tensor) -> None:
        length, size = 2 * shape.window, 16
        pages = batch * (-(-length // size) + 2)
        self.pool = prefixkit.kv_pool(layers, shape.heads, shape.dim, pages, size, shape.dtype, shape.device)
        self.attention = prefixkit.TreeAttention(self.pool, shape.heads, of_positions(shape, shape.device != "cpu"))
        texts = (np.arange(length) % 1000 + 1000 * n for n in range(batch))
        self.tree, samples = prefixkit.tree_from_tokens(self.pool, texts)
        nodes = [one.node for one in samples]
        self.tree.mark_computed(nodes, [length - 1] * batch)
        prefixkit.release_unseen(self.attention, self.tree, samples)
        rotate = rotation(shape, False)
        for number, sample in enumerate(samples):
            slot = torch.zeros(length, dtype=torch.int64)
            for node in sample.path():
                slot[node.start : node.start + node.length] = torch.from_numpy(node.slots)
            at = torch.cat((torch.arange(shape.sinks), torch.arange(length - shape.window, length)))
            slot, at = slot[at].to(shape.device), at.to(shape.device)
            for layer in range(layers):
                pages_of = self.pool.pages(layer)
                for into, rows in zip(pages_of, (rotate(keys[number], at), values[number]), strict=True):
                    into[slot // size, slot % size] = rows
        self.step: TreeStep = prefixkit.plan(self.attention, self.tree, samples)

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        prefixkit.append(self.step, layer, k, v)
        return prefixkit.attend(self.step, layer, q)[0]

    def kernel(self, layer: int, q: Tensor) -> Tensor:
        """The op over the window alone."""
        plan, key = self.step.step.plan, self.attention.keys[0]
        return torch.ops.prefixkit.tree_attention(
            q, *self.pool.pages(layer), self.step.positions, plan, q.shape[2] ** -0.5, key
        )[0]


class Unfused:
    """A ring of unrotated keys; the query is the last of the cache."""

    def __init__(self, shape: Shape, keys: Tensor, values: Tensor, layers: int) -> None:
        self.rotate, self.last = rotation(shape, shape.device != "cpu"), shape.cached - 1
        self.k, self.v = (
            [rows.clone() for _ in range(layers)] for rows in (keys, values)
        )  # [batch, cached, heads, dim]
        self.rotated = torch.empty_like(keys)
        self.at = torch.arange(shape.cached, device=shape.device)

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.k[layer][:, self.last], self.v[layer][:, self.last] = k, v
        self.rotated.copy_(self.rotate(self.k[layer], self.at))
        asked = self.rotate(q[:, None], self.at[-1:])
        k, v = self.rotated.transpose(1, 2), self.v[layer].transpose(1, 2)
        return scaled_dot_product_attention(asked.transpose(1, 2), k, v)[:, :, 0]


class Repository:
    """A token as https://github.com/mit-han-lab/streaming-llm computes it."""

    def __init__(self, shape: Shape, keys: Tensor, values: Tensor, layers: int) -> None:
        """One cache, of 42 MB and more and copied at each step, in the place of all ``layers``."""
        self.rotate, self.sinks = rotation(shape, False), shape.sinks
        # One more token behind the sinks, which is evicted first, and without the token of this step.
        place = [*range(shape.sinks + 1), *range(shape.sinks, shape.cached - 1)]
        self.kv = [of[:, place] for of in (keys, values)]
        self.at = torch.arange(shape.cached, device=shape.device)

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kept = [torch.cat((of[:, : self.sinks], of[:, self.sinks + 1 :]), 1) for of in self.kv]
        keys, values = (torch.cat((of, new[:, None]), 1) for of, new in zip(kept, (k, v), strict=True))
        keys, asked = self.rotate(keys, self.at), self.rotate(q[:, None], self.at[-1:])
        keys, values, asked = (of.transpose(1, 2) for of in (keys, values, asked))
        score = asked @ keys.transpose(2, 3) * q.shape[2] ** -0.5
        return (score.float().softmax(-1).to(q.dtype) @ values)[:, :, 0]


def attention_row(shape: Shape, batch: int, turns: int) -> Row:
    """A decode step of each contender."""
    layers = input_sets(shape.bytes(batch)) if shape.device != "cpu" else 1
    keys, values = (shape.random(batch, shape.cached, shape.heads, shape.dim) for _ in "kv")
    new = [shape.random(batch, shape.heads, shape.dim) for _ in range(3)]
    new[1], new[2] = keys[:, -1].clone(), values[:, -1].clone()
    ours = Ours(shape, batch, layers, keys, values)
    runs: dict[str, Callable[[int], object]] = {
        "ours": lambda layer: ours.run(layer, *new),
        "kernel": lambda layer: ours.kernel(layer, new[0]),
    }
    row: Row = {"part": "attention", "batch": batch, "cache_bytes": shape.bytes(batch)}
    want: Tensor | None = None
    for name, rival in (("unfused", Unfused), ("repository", Repository)):
        try:
            run = rival(shape, keys, values, layers).run
            found = run(0, *new).double()
            want = found if want is None else want
            row[f"{name}_difference"] = float((found - want).norm() / want.norm())
            runs[name] = lambda layer, run=run: run(layer, *new)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            row[name] = failure(error)
    if want is not None:
        row["difference"] = float((ours.run(0, *new).double() - want).norm() / want.norm())
    if shape.device == "cpu":
        clocks = {name: partial(_host_us, run) for name, run in runs.items()}
    else:
        clocks = {name: Replay(run, layers).us for name, run in runs.items()}
    for name, times in in_turns(clocks, turns).items():
        us = statistics.median(times)
        row[name] = {"us": us, "layers_us": us * shape.layers, "TBps": shape.bytes(batch) / us / 1e6}
    for name in ("unfused", "repository"):
        if isinstance(row[name], dict):
            row[f"{name}_over_ours"] = row[name]["us"] / row["ours"]["us"]
    return row


def _host_us(run: Callable[[int], object]) -> float:
    return 1e6 * min(wall_seconds(lambda: run(0), 3, 1))


def memory_row(shape: Shape, batch: int, tokens: int) -> Row:
    """Sequences that grow, and the pages and tokens that they hold, at intervals of tokens."""
    size = 16
    if shape.device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    pages = batch * (-(-(shape.cached + 2 * EVERY) // size) + 4)
    pool = prefixkit.kv_pool(1, shape.heads, shape.dim, pages, size, shape.dtype, shape.device)
    for of in pool.pages(0):
        of.normal_()
    attention = prefixkit.TreeAttention(pool, shape.heads, of_positions(shape, shape.device != "cpu"))
    tree, prompts = prefixkit.tree_from_tokens(pool, ([n + 1] * shape.sinks for n in range(batch)))
    samples = [tree.fork(prompt)[0] for prompt in prompts]
    step = prefixkit.plan(attention, tree, samples)
    prefixkit.commit(step)
    tree.extend_each(samples, [0] * batch)
    decode = (_graphs if shape.device != "cpu" else _steps)(shape, attention, tree, samples)
    held, times = list[tuple[int, int, int]](), list[float]()
    for done in range(0, tokens, EVERY):
        began = time.perf_counter()
        decode()
        prefixkit.release_unseen(attention, tree, samples)
        times.append(1e6 * (time.perf_counter() - began) / EVERY)
        in_use = pages - tree.allocator.free
        held.append((done + EVERY, in_use, tree.snapshot().num_tokens))
    tenth = max(1, len(times) // 10)
    row: Row = {"part": "memory", "batch": batch, "tokens": samples[0].length, "pool_pages": pages, "held": held}
    row["most_pages"] = max(in_use for _, in_use, _ in held)
    row["bytes_of_all_layers"] = row["most_pages"] * size * pool.spec.bytes_per_token * shape.layers
    row["bytes_if_all_were_held"] = samples[0].length * batch * pool.spec.bytes_per_token * shape.layers
    row["first_us"], row["last_us"] = (
        statistics.median(times[1 : tenth + 1] or times),
        statistics.median(times[-tenth:]),
    )
    if shape.device != "cpu":
        row["gpu_bytes"] = torch.cuda.max_memory_allocated()
    return row


def _steps(shape: Shape, attention: prefixkit.TreeAttention, tree: prefixkit.PrefixTree, samples: list) -> Callable:
    """``EVERY`` steps one by one."""

    def decode() -> None:
        for _ in range(EVERY):
            step = prefixkit.plan(attention, tree, samples)
            new = [shape.random(step.num_rows, shape.heads, shape.dim) for _ in range(3)]
            prefixkit.append(step, 0, *new[1:])
            prefixkit.attend(step, 0, new[0])
            prefixkit.commit(step)
            tree.extend_each(samples, [0] * len(samples))

    return decode


def _graphs(shape: Shape, attention: prefixkit.TreeAttention, tree: prefixkit.PrefixTree, samples: list) -> Callable:
    """``EVERY`` replays of a captured step."""
    static = prefixkit.static_decode(attention, tree, samples, EVERY)
    new = [shape.random(len(samples), shape.heads, shape.dim) for _ in range(3)]
    tokens = np.zeros((len(samples), EVERY), np.int32)

    def step() -> None:
        static.advance()
        prefixkit.append(static.step, 0, *new[1:])
        prefixkit.attend(static.step, 0, new[0])

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def decode() -> None:
        static.upload(tree, samples, EVERY)
        for _ in range(EVERY):
            graph.replay()
        torch.cuda.synchronize()
        tree.extend_leaves(samples, tokens)

    return decode


def model_rows(device: str, tokens: int = 12_288, window: int = 1020) -> Iterator[Row]:
    """For each variant, nats a token of a text far longer than the positions that the model was made for."""
    model, tokenizer = load_demo()
    model = model.to(device, torch.float32 if device == "cpu" else torch.bfloat16)
    source = "".join(Path(str(module.__file__)).read_text() for module in (argparse, inspect))
    text = tokenizer(source)["input_ids"][:tokens]
    of = {
        "streaming_llm": variants.streaming_llm(4, window),
        "streaming": variants.streaming(4, window),
        "window": variants.sliding_window(4 + window),
        "all": None,
    }
    for name, variant in of.items():
        began = time.perf_counter()
        (score,) = prefixkit.score(prefixkit.patch(model, variant=variant), None, text[:1], [text[1:]])
        nats = -np.array(score.logprobs)
        means = [round(float(nats[at : at + 1024].mean()), 3) for at in range(0, tokens, 1024)]
        yield {"part": "model", "variant": name, "nats": means, "seconds": round(time.perf_counter() - began, 1)}


def options_of(given: list[str] | None) -> argparse.Namespace:
    return arguments(
        __doc__, given, parts=PARTS, batches=[1, 32], tokens=100_000, turns=3, tiny=False, device={"default": "cuda"}
    )


def main(given: list[str] | None = None) -> Row:
    options = options_of(given)
    shape = Shape(options.device)
    if options.tiny:
        shape = Shape(options.device, heads=2, dim=64, layers=2, window=48, dtype=torch.float32)
    run = Run(options, options.device)
    for batch in options.batches:
        if "attention" in options.parts:
            run.add("rows", attention_row(shape, batch, options.turns))
            free_memory()
        if "memory" in options.parts:
            run.add("rows", memory_row(shape, batch, options.tokens))
            free_memory()
    if "model" in options.parts:
        for row in model_rows(options.device):
            run.add("rows", row)
    run.finish()
    return run.result


if __name__ == "__main__":
    main()
