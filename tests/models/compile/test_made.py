"""What torch.compile has made belongs to the model: runners share it, and it goes with the model or its patch."""

from __future__ import annotations

import functools
import gc
import threading
import uuid
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._dynamo.utils import counters

from prefixkit.models import patch, unpatch
from prefixkit.models.compile.layers import compile_layer
from tests.models.compile.decode import Decode, traced
from tests.models.driver import TreeDriver


class GraphRefs:
    """A compiler, and weak references to the graphs that it was given."""

    def __init__(self):
        self.refs = []

    def __call__(self, graph, inputs):
        self.refs.append(weakref.ref(graph))
        return graph.forward


def of_pool(pages=64, page_size=4):
    """A driver of the very model that it is given, with a pool of this size."""
    return functools.partial(TreeDriver, num_pages=pages, page_size=page_size, copied=False)


def test_runners_of_one_model_share_graphs_whatever_their_pools(dynamo, tiny, rng):
    model = patch(tiny())
    decodes = [Decode(of_pool(*size), model, rng) for size in ((64, 4), (90, 4), (30, 16))]
    runners = [decode.runner() for decode in decodes]
    for turn in range(3):
        for decode, runner in zip(decodes, runners, strict=True):
            if turn == 1:
                decode.sequences += decode.driver.tree.fork(decode.sequences[0], 3)
            step = decode.step()
            assert torch.equal(runner(step), decode.driver.runner(step))
            decode.done()
    assert [runner.compiled.graphs for runner in runners] == [1] * 3
    single = Decode(of_pool(256, 1), model, rng)
    step = single.step()
    assert torch.equal(single.runner()(step), single.driver.runner(step))
    assert runners[0].compiled.graphs == 2, "pages of one token are another layout"


def test_a_later_runner_finds_what_was_compiled_before(dynamo, tiny, rng):
    model = patch(tiny())
    graphs = []
    for pages in (64, 80):
        decode = Decode(of_pool(pages, 4), model, rng)
        runner, step = decode.runner(), decode.step()
        assert torch.equal(runner(step), decode.driver.runner(step))
        graphs.append(runner.compiled.graphs)
        pool = weakref.ref(decode.driver.pool)
        del decode, runner, step
        gc.collect()
        assert pool() is None, "compiled layers keep no pool"
    assert graphs == [1, 1]


def test_two_threads_may_run_steps_of_one_model(dynamo, tiny, rng):
    model = patch(tiny(num_hidden_layers=4))
    decodes = [Decode(of_pool(pages, 4), model, rng) for pages in (64, 90)]
    runners = [decode.runner() for decode in decodes]
    begin = threading.Barrier(2)

    def run(decode, runner):
        begin.wait()
        equal = []
        for _ in range(5):
            step = decode.step()
            equal.append((runner(step), step))
            decode.done()
        return equal

    with ThreadPoolExecutor(2) as threads:
        made = list(threads.map(run, decodes, runners))
    for decode, steps in zip(decodes, made, strict=True):
        assert all(torch.equal(logits, decode.driver.runner(step)) for logits, step in steps)
    assert runners[0].compiled.graphs == 1


def test_weights_of_another_dtype_have_a_graph_of_their_own(dynamo, tiny, rng):
    model, graphs = patch(tiny()), []
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        decode = Decode(of_pool(), model.to(dtype), rng)
        runner, step = decode.runner(), decode.step()
        assert torch.allclose(runner(step), decode.driver.runner(step), atol=0.1 if dtype == torch.bfloat16 else 1e-5)
        graphs.append(runner.compiled.graphs)
    assert graphs == [1, 2, 2]


def test_unpatch_gives_back_what_was_compiled(dynamo, tiny, rng):
    model, graphs = patch(tiny()), GraphRefs()
    decode = Decode(of_pool(), model, rng)
    runner = decode.runner(compiler=graphs)
    runner(decode.step())
    assert [ref() is None for ref in graphs.refs] == [False]
    unpatch(model)
    gc.collect()
    assert [ref() is None for ref in graphs.refs] == [True]
    assert runner.compiled is not None, "whoever still holds a runner"


def test_a_model_that_is_gone_is_not_kept_by_what_was_compiled(dynamo, tiny, rng):
    model = patch(tiny())
    decode = Decode(of_pool(), model, rng)
    decode.runner()(decode.step())
    gone = [weakref.ref(module) for module in model.modules()]
    del decode, model
    gc.collect()
    assert [ref() is None for ref in gone] == [True] * len(gone)


def test_torch_keeps_what_was_compiled_on_disk(dynamo, tiny, rng):
    """A second model of the same shape, as in another process, finds it by its key, which is a new one here."""
    before = Counter(counters["aot_autograd"])
    with torch.compiler.config.patch(cache_key_tag=str(uuid.uuid4())):
        for model in (tiny(), tiny()):
            torch._dynamo.reset()
            decode = Decode(TreeDriver, model, rng)
            decode.runner(compiler=compile_layer)(decode.step())
    found = Counter(counters["aot_autograd"]) - before
    assert (found["autograd_cache_miss"], found["autograd_cache_hit"], found["autograd_cache_bypass"]) == (1, 1, 0)


@pytest.mark.parametrize("compiler", [traced, compile_layer])
def test_a_runner_that_is_gone_holds_no_pages(compiler, dynamo, tiny, drive, rng):
    """The compiler keeps what it made; it must not keep the runner."""
    model = tiny()
    decode = Decode(drive, model, rng)
    runner = decode.runner(compiler=compiler)
    runner(decode.step())
    assert runner.compiled is not None and runner.compiled.graphs == 1
    gone = [
        weakref.ref(thing)
        for thing in (runner.compiled, runner.cache, decode.driver.pool, decode.driver.pool.pages(0)[0])
    ]
    del runner, decode
    gc.collect()
    assert [ref() is None for ref in gone] == [True] * len(gone)
    assert model is not None, "the model stays"
