"""Measure which features work with each model_type of transformers' causal language models, on a CPU; write the table.

    python scripts/compatibility.py --processes 2 --out benchmarks/results/cpu_compatibility.json
    python scripts/compatibility.py --write      # docs/reference/compatibility.md, from the measurements

Each model_type is tried as a tiny random model in a process of its own: calls of ``generate()`` before and after the
patch, a session, its prefix cache, LoRA adapters of PEFT, and linear layers of 4 bits by bitsandbytes if that is
installed.  Tokens are compared with those of the model without the patch.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import time
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from compatibility_page import COLUMNS, RESULTS, write
from families import FIRST_WORD, NEEDS, SECONDS, VOCAB, quietly
from tiny_models import tiny_config, tiny_model
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

import prefixkit
from prefixkit.models import UnsupportedModel
from prefixkit.models.generate.tree_cache import TreeCache
from prefixkit.models.requirements import CACHE

LENGTH, NEW = 40, 8
CALLS: dict[str, dict[str, Any]] = {
    "samples": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3, "do_sample": False},
}


class Impossible(Exception):
    """The model itself, or its adapter, does not support the tested feature."""


def made(model_type: str) -> PreTrainedModel:
    """The tiny model of a model_type, always with the same weights; it has no end token."""
    torch.manual_seed(0)
    names = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    model = tiny_model(tiny_config(model_type), names[model_type])
    model.generation_config.eos_token_id = None
    for name in ("encoder_no_repeat_ngram_size", "begin_suppress_tokens"):  # which sessions refuse by name
        setattr(model.generation_config, name, None)
    return model


def ids(length: int = LENGTH) -> Tensor:
    return torch.randint(FIRST_WORD, VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(1))[:, :length]


def generate(model: nn.Module, **options: Any) -> Any:
    torch.manual_seed(2)
    one = {"input_ids": ids(), "attention_mask": torch.ones_like(ids())}
    given = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0, "return_dict_in_generate": True, **options}
    return model.generate(**one, **given)  # type: ignore[operator]


def stock(model: nn.Module, **options: Any) -> Tensor:
    """The tokens of the second of two calls without the patch, since BigBird changes its attention in the first."""
    try:
        generate(model, **options)
        tokens: Tensor = generate(model, **options).sequences
    except Exception as error:
        raise Impossible(str(error)) from error
    return tokens


def patched_call(change: Callable[[PreTrainedModel], nn.Module], model_type: str, **options: Any) -> str:
    """Compare a call of ``generate()`` before and after the patch; ``change`` adapts the model before both."""
    model = made(model_type)
    try:
        adapted = change(model)
    except Exception as error:
        raise Impossible(str(error)) from error
    want = stock(adapted, **options)
    prefixkit.patch(model, tree_cache="always")
    got = generate(adapted, **options)
    cache = got.get(CACHE)
    if not torch.equal(want, got.sequences):
        alone = stock(adapted, **options, use_cache=False)
        return "without a cache" if torch.equal(alone, got.sequences) else "differs"
    return "yes" if isinstance(cache, TreeCache) and not cache.fell_back else "refused"


def session_call(model_type: str, known: int) -> str:
    """Compare a greedy call of a session that has computed ``known`` tokens of its prompt in an earlier call."""
    model = made(model_type)
    want, alone = (stock(model, **how)[0, LENGTH:].tolist() for how in ({}, {"use_cache": False}))
    prefixkit.patch(model)
    params = prefixkit.SamplingParams(temperature=0, max_new_tokens=NEW, stop_token_ids=())
    with prefixkit.Session(model, None, kv_budget="16MiB") as session:
        if known:
            session.generate(ids(known).tolist(), params)
        result = session.generate(ids().tolist(), params)
    if result[0].tokens != want:
        return "without a cache" if result[0].tokens == alone else "differs"
    return "yes" if result.report.prompt_tokens_found >= known - 1 else "not found"


def with_lora(model: PreTrainedModel) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    return get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)).eval()


def with_four_bits(model: PreTrainedModel) -> nn.Module:
    """Every linear layer but the last one, in the 4 bits of bitsandbytes' NF4."""
    import bitsandbytes

    linear = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    linear = {name: module for name, module in linear.items() if module is not model.get_output_embeddings()}
    if not linear:
        raise Impossible("it has no linear layers")
    for name, module in linear.items():
        sizes = module.in_features, module.out_features, module.bias is not None
        packed = bitsandbytes.nn.Linear4bit(*sizes, compute_dtype=torch.float32, quant_type="nf4")
        packed.load_state_dict(module.state_dict())
        model.set_submodule(name, packed.to("cpu"))
    return model


TRIED: dict[str, Callable[[str], str]] = {
    "samples": lambda of: patched_call(lambda model: model, of, **CALLS["samples"]),
    "beams": lambda of: patched_call(lambda model: model, of, **CALLS["beams"]),
    "session": lambda of: session_call(of, 0),
    "prefix cache": lambda of: session_call(of, LENGTH // 2),
    "LoRA": lambda of: patched_call(with_lora, of),
    "4 bits": lambda of: patched_call(with_four_bits, of),
}


def measure(model_type: str) -> dict[str, str]:
    """A word for each column; "impossible" if transformers itself, or the adapter, does not support the feature."""
    if model_type in NEEDS:
        return {}
    found = {}
    for column, attempt in TRIED.items():
        if column == "4 bits" and find_spec("bitsandbytes") is None:
            continue
        try:
            found[column] = attempt(model_type)
        except Impossible:
            found[column] = "impossible"
        except UnsupportedModel:
            found[column] = "refused"
        except Exception as error:
            found[column] = f"error: {type(error).__name__}"
    return found


def child(model_type: str, to: Connection) -> None:
    quietly()
    to.send(measure(model_type))


def measure_all(waiting: list[str], processes: int, take: Callable[[str, dict[str, str]], None]) -> None:
    """Measure each model_type in a process of its own, which has its time and memory."""
    context, running = multiprocessing.get_context("fork"), dict[Any, Any]()
    while waiting or running:
        while waiting and len(running) < processes:
            model_type, (here, there) = waiting.pop(0), context.Pipe(duplex=False)
            process = context.Process(target=child, args=(model_type, there))
            process.start()
            there.close()
            running[here] = model_type, process, time.monotonic() + SECONDS
        ready = wait(list(running), timeout=1)
        for here, (model_type, process, until) in list(running.items()):
            if here in ready or time.monotonic() > until:
                try:
                    found = here.recv() if here in ready else {"samples": "error: too slow"}
                except EOFError:
                    found = {"samples": "error: the process ended"}
                process.kill()
                process.join()
                del running[here]
                take(model_type, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="model_types, separated by commas, which are measured anew in --out")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--write", action="store_true", help="write the page of what was measured, and measure nothing")
    options = parser.parse_args()
    if options.write:
        write(json.loads(RESULTS.read_text()))
        return
    names = options.only.split(",") if options.only else sorted(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
    packages = [name for name in ("transformers", "torch", "peft", "bitsandbytes") if find_spec(name)]
    result: dict[str, Any] = {"commit": commit.strip(), "command": "python scripts/compatibility.py --processes 2"}
    result |= {"date": time.strftime("%Y-%m-%d"), "versions": {name: version(name) for name in packages}}
    result["found"] = json.loads(options.out.read_text())["found"] if options.only and options.out.exists() else {}

    def take(model_type: str, found: dict[str, str]) -> None:
        result["found"][model_type] = found
        result["found"] = dict(sorted(result["found"].items()))
        options.out.write_text(json.dumps(result, indent=1) + "\n")
        print(model_type, *(f"{column}: {found.get(column, '-')}" for column in COLUMNS), sep=" | ", flush=True)

    measure_all(list(names), options.processes, take)


if __name__ == "__main__":
    main()
