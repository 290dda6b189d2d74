"""Parallel sampling by llama.cpp, one configuration in a process of its own, which ``cpu_sampling --llama`` runs.

    PYTHON-WITH-LLAMA-CPP benchmarks/llama_sampling.py < job.json

Runs under an interpreter that has ``llama-cpp-python`` and needs neither torch nor prefixkit.  The job names a GGUF,
the prompt's token ids, samples, new tokens, sampling parameters, threads, and how llama.cpp keeps and reads KV.  The
prompt is prefilled once, as sequence 0, and ``llama_memory_seq_cp`` copies it to every other sequence; each step
decodes one token of each sequence.
"""

import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

import llama_cpp as llama

# Types of files; llama-cpp-python has no name for BF16.
FORMATS = {"F32": llama.LLAMA_FTYPE_ALL_F32, "BF16": 32, "Q8_0": llama.LLAMA_FTYPE_MOSTLY_Q8_0}


@llama.llama_log_callback  # type: ignore[untyped-decorator]
def quiet(level: int, text: bytes, data: Any) -> None:
    """Says nothing."""


def requantise(source: Path, name: str) -> Path:
    """The same model in another format, which llama.cpp writes into the source's folder; made once."""
    if name not in FORMATS:
        return source
    target = source.with_name(f"{source.name.removesuffix('.gguf')}-as-{name}.gguf")
    if not target.exists():
        params = llama.llama_model_quantize_default_params()
        params.ftype, params.allow_requantize, params.nthread = FORMATS[name], True, 1
        made = target.with_suffix(".part")
        if llama.llama_model_quantize(str(source).encode(), str(made).encode(), ctypes.byref(params)):
            raise RuntimeError(f"llama.cpp did not make {name} of {source}")
        made.replace(target)
    return target


class Batch:
    """A batch of rows, each a token of one sequence at one position."""

    def __init__(self, rows: int) -> None:
        self.batch = llama.llama_batch_init(rows, 0, 1)

    def decode(self, context: Any, tokens: list[int], positions: list[int], sequences: list[int], last: bool) -> None:
        """Compute the rows; logits of the last one, or of all."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        for row, (token, position, sequence) in enumerate(zip(tokens, positions, sequences, strict=True)):
            batch.token[row], batch.pos[row], batch.n_seq_id[row] = token, position, 1
            batch.seq_id[row][0], batch.logits[row] = sequence, not last or row == len(tokens) - 1
        if llama.llama_decode(context, batch):
            raise RuntimeError(f"llama.cpp could not decode {len(tokens)} tokens")


def sampler(job: dict[str, Any], seed: int) -> Any:
    """Temperature, top-p, then a draw: the order of transformers."""
    chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
    llama.llama_sampler_chain_add(chain, llama.llama_sampler_init_temp(job["temperature"]))
    llama.llama_sampler_chain_add(chain, llama.llama_sampler_init_top_p(job["top_p"], 1))
    llama.llama_sampler_chain_add(chain, llama.llama_sampler_init_dist(seed))
    return chain


def context_of(model: Any, job: dict[str, Any]) -> Any:
    """A context for this many sequences; ``kv`` unified: one buffer that all sequences read, else one for each."""
    params, rows = llama.llama_context_default_params(), job["n"]
    length = len(job["prompt"]) + job["new"] + 8
    unified = job["kv"] == "unified"
    params.n_ctx = len(job["prompt"]) + rows * (job["new"] + 1) if unified else rows * length
    params.n_batch, params.n_seq_max, params.kv_unified = max(rows, len(job["prompt"])), rows, unified
    params.n_threads = params.n_threads_batch = job["threads"]
    params.flash_attn_type = int(job["flash"])
    params.type_k = params.type_v = {"F16": 1, "F32": 0, "BF16": 30}[job["kv_type"]]
    context = llama.llama_init_from_model(model, params)
    if not context:
        raise RuntimeError("llama.cpp made no context")
    return context


def sample(model: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Run one call: a context, the prompt, all tokens; returns the wall and CPU seconds of each part."""
    clock = (time.perf_counter, time.process_time)
    marks = [[read() for read in clock]]
    context, prompt, rows = context_of(model, job), job["prompt"], job["n"]
    chains, batch = [sampler(job, seed) for seed in range(rows)], Batch(max(rows, len(prompt)))
    batch.decode(context, prompt, list(range(len(prompt))), [0] * len(prompt), last=True)
    memory = llama.llama_get_memory(context)
    for sequence in range(1, rows):
        llama.llama_memory_seq_cp(memory, 0, sequence, -1, -1)
    tokens = [[llama.llama_sampler_sample(chain, context, -1)] for chain in chains]
    marks.append([read() for read in clock])
    for step in range(1, job["new"]):
        last = [sequence[-1] for sequence in tokens]
        batch.decode(context, last, [len(prompt) + step - 1] * rows, list(range(rows)), last=False)
        for row, chain in enumerate(chains):
            tokens[row].append(llama.llama_sampler_sample(chain, context, row))
    marks.append([read() for read in clock])
    for chain in chains:
        llama.llama_sampler_free(chain)
    llama.llama_batch_free(batch.batch)
    llama.llama_free(context)
    (began, began_cpu), (first, first_cpu), (ended, ended_cpu) = marks
    steps = job["new"] - 1
    return {
        "tokens": sum(map(len, tokens)),
        "seconds": ended - began,
        "cpu_seconds": ended_cpu - began_cpu,
        "prefill_cpu_seconds": first_cpu - began_cpu,
        "step_ms": (ended - first) / steps * 1e3,
        "step_cpu_ms": (ended_cpu - first_cpu) / steps * 1e3,
    }


def main() -> None:
    job = json.load(sys.stdin)
    llama.llama_log_set(quiet, ctypes.c_void_p(0))
    llama.llama_backend_init()
    path, began = requantise(Path(job["gguf"]), job["format"]), time.perf_counter()
    model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
    if not model:
        raise RuntimeError(f"llama.cpp could not load {path}")
    loading = time.perf_counter() - began
    sample(model, {**job, "prompt": job["prompt"][:20], "n": 2, "new": 4})
    print(json.dumps({"loading_seconds": loading, "llama_cpp_python": llama.__version__, **sample(model, job)}))


if __name__ == "__main__":
    main()
