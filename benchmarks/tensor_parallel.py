"""A model split over processes by transformers' tensor parallelism, against the same model in one process.

    python -m benchmarks.tensor_parallel --out one.json
    torchrun --nproc-per-node 2 -m -- benchmarks.tensor_parallel --beside one.json --out two.json
    ... --shape Llama-3.1-70B --layers 24         as many layers as fit one GPU, for both
    ... --compiled                                layers through torch.compile, if they can be compiled
    ... --shape tiny --rows 4,8 --prompt 64 --new 16 --steps 40      two processes on a CPU, through gloo

Weights are random, and equal for any number of processes.  Each process checks that all have the same tokens.
``steps`` are decode steps of one batch, with its prompt shared; ``calls`` whole calls of a session; ``texts`` what
``closeness.py`` scores and continues, whose results go to an ``.npz`` beside the JSON.  ``--beside`` compares all three
with those of one process with the same options: ratios of times, and how far log-probabilities and greedy tokens are
from that process's, where its own batches of other shapes are so far from each other.
"""

import gc
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import prefixkit
from benchmarks.closeness import Texts, closeness, run_texts
from benchmarks.runner import Row, Run, arguments
from benchmarks.shapes import CALLS, SHAPES, Shape
from prefixkit.agreement import Agreement
from prefixkit.models.tensor_parallel import agreement_of

MEASURES = ["equal", "texts", "steps", "calls", "generate", "preempted"]
WHOLE_CALLS = ["2K x 64", "few-shot, 32 x 16", "rollouts, 64 x 8"]


def load(shape: Shape, layers: int | None, dtype: torch.dtype) -> Any:
    """The model of a shape, patched, over all processes that torchrun has started, with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.utils import logging

    logging.set_verbosity_error()  # about weights that no file holds
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=layers or shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=131072,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    )
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    how: dict[str, Any] = {"distributed_config": DistributedConfig(tp_plan="auto")} if processes > 1 else {}
    if processes == 1 and torch.cuda.is_available():
        how = {"device_map": "cuda:0"}
    model = LlamaForCausalLM.from_pretrained(None, config=config, state_dict={}, dtype=dtype, **how)
    fill(model.eval().requires_grad_(False))
    return prefixkit.patch(model)


def fill(model: torch.nn.Module) -> None:
    """Write weights that depend only on the order of their names; each process writes its part of them."""
    with torch.no_grad():
        for seed, (_, weight) in enumerate(sorted(model.named_parameters())):
            if weight.ndim == 1:  # a norm's weight
                continue
            generator = torch.Generator(weight.device).manual_seed(seed)
            whole = torch.randn(weight.shape, generator=generator, device=weight.device).to(weight.dtype)
            whole *= 0.02
            local(weight).copy_(part_of(whole, weight))


def local(weight: Any) -> Tensor:
    """The tensor of a weight, or of this process's part of it."""
    return weight.to_local() if hasattr(weight, "to_local") else weight


def part_of(whole: Tensor, weight: Any) -> Tensor:
    """This process's part of a whole weight."""
    if not hasattr(weight, "to_local"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, weight.device_mesh, weight.placements, src_data_rank=None).to_local()


def steps(session: Any, agreement: Agreement, rows: int, prompt: int, new: int, shape: Shape) -> Row:
    """Decode steps of ``rows`` samples of one prompt: milliseconds of one, the host included."""
    tokens = np.random.default_rng(rows).integers(5, shape.vocab, prompt).tolist()
    options: Any = {"n": rows, "max_new_tokens": new, "seed": rows}
    session.generate([tokens], **{**options, "max_new_tokens": min(new, 8)})  # captures
    each = []
    for _ in range(3):
        report = session.generate([tokens], **options).report
        each.append(1e3 * report.seconds_in_decode / max(1, report.decode_steps))
    row: Row = {"rows": rows, "prompt": prompt, "new": new, "step_ms": round(statistics.median(each), 3)}
    return row | {
        "processes": agreement.processes,
        "graph_steps": report.graph_steps,
        "unpipelined": report.unpipelined,
    }


def equal_tokens(session: Any, agreement: Agreement, count: int, prompt: int, shape: Shape) -> Row:
    """Sample for ``count`` steps, and compare all tokens and log-probabilities of the processes."""
    tokens = np.random.default_rng(0).integers(5, shape.vocab, prompt).tolist()
    sampled = session.generate([tokens], n=64, max_new_tokens=count, top_p=0.95, seed=1)
    beams = session.beam_search([tokens], num_beams=8, max_new_tokens=min(count, 64))
    scores = session.score([tokens], [[tokens[:16], tokens[16:40]]])
    agreement.check("samples", lambda: [(one.tokens, np.array(one.logprobs)) for one in sampled])
    agreement.check("beams", lambda: [(one.tokens, one.score) for one in beams])
    agreement.check("scores", lambda: [one.logprobs for one in scores[0]])
    return {"steps": count, "samples": 64, "equal": True}


def texts(session: Any, agreement: Agreement, count: int, shape: Shape, out: Path | None, one: Path | None) -> Row:
    """Texts in batches of several shapes, compared with those of one process; ``out`` and ``one`` are JSON files."""
    found = run_texts(session, shape.vocab, count)
    agreement.check("scores and tokens of texts", lambda: [found.logprobs, found.greedy])
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        found.save(out.with_suffix(".npz"))
    known = one.with_suffix(".npz") if one else None
    return closeness(Texts.load(known), found) if known and known.exists() else closeness(found)


def preempted(model: Any, agreement: Agreement, prompt: int, new: int, shape: Shape) -> Row:
    """Samples that outgrow the KV of their session, so that some are preempted and resumed."""
    tokens, spec = np.random.default_rng(2).integers(5, shape.vocab, prompt).tolist(), prefixkit.models.kv_spec(model)
    budget = (prompt + 48 * new // 3) * spec.bytes_per_token
    with prefixkit.Session(model, kv_budget=budget, memory=prefixkit.MemoryPolicy(headroom=8)) as session:
        result = session.generate([tokens], n=48, max_new_tokens=new, seed=3)
    agreement.check("samples of preempted requests", lambda: [one.tokens for one in result])
    names = "preempted_swapped", "preempted_recomputed"
    return {"equal": True, **{name: getattr(result.report, name) for name in names}}


def generated(model: Any, agreement: Agreement, prompt: int, new: int, shape: Shape) -> Row:
    """The model's own ``generate()``, which samples by torch's generator from the logits of process 0."""
    ids = torch.from_numpy(np.random.default_rng(4).integers(5, shape.vocab, (1, prompt))).to(model.device)
    torch.manual_seed(0)
    model.generate(ids, do_sample=True, num_return_sequences=8, max_new_tokens=8)
    began = time.perf_counter()
    out = model.generate(ids, do_sample=True, num_return_sequences=64, max_new_tokens=new)
    agreement.check("rows of generate()", lambda: out)
    return {"rows": 64, "prompt": prompt, "new": new, "seconds": round(time.perf_counter() - began, 3), "equal": True}


def call(session: Any, agreement: Agreement, name: str, vocab: int) -> Row:
    """One whole call, after another one of the same kind."""
    asked = CALLS[name]
    took = []
    for seed in (0, 1):
        began = time.perf_counter()
        result = session.generate(asked.random_prompts(seed, vocab), n=asked.samples, max_new_tokens=asked.new)
        took.append(time.perf_counter() - began)
    agreement.check("samples of a call", lambda: [one.tokens for one in result])
    return {"call": name, "seconds": round(took[-1], 3), "tokens_per_second": round(asked.sampled / took[-1])}


def beside(row: Row, key: str, names: tuple[str, ...], one: Row) -> Row:
    """The ratio of a row's time to that of one process, if both have it."""
    same = [other for other in one.get(key, []) if all(other[name] == row[name] for name in names)]
    time_of = next((name for name in ("step_ms", "seconds") if name in row), None)
    if not same or not names or time_of is None:
        return {}
    return {"of_one_process": round(row[time_of] / same[0][time_of], 3)}


def main(given: list[str] | None = None) -> None:
    options = arguments(
        __doc__,
        given,
        shape={"choices": [*SHAPES], "default": "Llama-3.1-8B"},
        layers={"type": int, "help": "of the shape's; its own by default"},
        rows=[64, 1024],
        prompt=2048,
        new=128,
        steps={"type": int, "default": 1000, "help": "after which the tokens of all processes must be equal"},
        calls=WHOLE_CALLS,
        measures=MEASURES,
        texts=64,
        compiled=False,
        beside={"type": Path, "metavar": "FILE", "help": "the results of one process"},
    )
    shape, gpu = SHAPES[options.shape], torch.cuda.is_available()
    model = load(shape, options.layers, torch.bfloat16 if gpu else torch.float32)
    agreement = agreement_of(model)
    if agreement.rank:
        options.out = None
    run, one = Run(options), json.loads(options.beside.read_text()) if options.beside else {}
    spec = prefixkit.models.kv_spec(model)
    run.result |= {"processes": agreement.processes, "kv_bytes_per_token": spec.bytes_per_token}

    def add(key: str, row: Row, *names: str) -> None:
        if not agreement.rank:
            row |= beside(row, key, names, one)
            run.add(key, row, json.dumps({key: row}))

    chosen, sizes = options.measures, (options.prompt, options.new, shape)
    with prefixkit.Session(model, compiled=options.compiled) as session:
        if "equal" in chosen:
            add("equal", equal_tokens(session, agreement, options.steps, options.prompt, shape), "steps")
        if "texts" in chosen:
            add("texts", texts(session, agreement, options.texts, shape, options.out, options.beside))
        for rows in options.rows if "steps" in chosen else ():
            add("steps", steps(session, agreement, rows, *sizes), "rows", "prompt", "new")
        for name in options.calls if gpu and "calls" in chosen else ():
            add("calls", call(session, agreement, name, shape.vocab), "call")
    if "generate" in chosen:
        add("generate", generated(model, agreement, *sizes), "rows", "prompt", "new")
    if "preempted" in chosen:
        add("preempted", preempted(model, agreement, *sizes))
    if gpu:
        run.result["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    if not agreement.rank:
        run.finish()
    if agreement.processes > 1:
        # Or NCCL would wait for the CUDA graphs that hold its collectives.
        prefixkit.unpatch(model)
        del model, session, add
        gc.collect()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
