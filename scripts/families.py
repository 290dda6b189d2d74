"""Try prefixkit with a tiny random model of every model_type that transformers generates text with.

    python scripts/families.py --processes 2 --older ../transformers-5.17/transformers \\
        --write docs/reference/families.md
    python scripts/families.py --only llama,gemma2

Each model generates before and after ``patch(model, tree_cache="always")``: greedily from a padded batch, with beams,
with samples, and with its processor's arguments for text; with short windows or chunks of attention and without, and
with other features that its config can turn on (tiny_models.py).
"""

from __future__ import annotations

import argparse
import inspect
import logging
import multiprocessing
import os
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import transformers
from families_page import VERDICTS, Found, counts, document, types_of
from tiny_models import FIRST_WORD, VOCAB, tiny_config, tiny_model, variants
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

import prefixkit
from prefixkit.models import UnsupportedModel
from prefixkit.models.generate.tree_cache import TreeCache
from prefixkit.models.requirements import CACHE

LISTS = {
    "Text": ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", AutoModelForCausalLM),
    "Images and text": ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", AutoModelForImageTextToText),
}
# Models that cannot generate from text, if the exception would not say so.
NEEDS = {
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), "the KV of the model that it drafts for"),
    **dict.fromkeys(("blip", "blip-2", "instructblip", "instructblipvideo", "idefics", "kosmos-2"), "an image"),
    **dict.fromkeys(("pix2struct", "pp_formulanet", "vision-encoder-decoder"), "an image"),
    "diffusion_gemma": "a canvas of tokens that it denoises together",
    "evolla": "a protein",
    "pi0": "the state of a robot; it has no generate()",
    "musicgen": "the states of a text encoder",
    "udop": "the boxes of its words",
}
LENGTH, NEW, TOLERANCE = 26, 8, 1e-4
SECONDS, GIBIBYTES = 180, 12  # limits for one model_type
PADDED, KINDS = "with padding on the left", "as its processor passes text"
SAMPLES: dict[str, Any] = {"do_sample": True, "num_return_sequences": 3}
# Each call, its special feature, and its options.
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (PADDED, {}),
    "beams": (PADDED, {"num_beams": 3}),
    "samples": ("without padding", SAMPLES),
    "samples of a processor's text": (KINDS, SAMPLES),
}
# Arguments that say which tokens are text: 0 for text.
KIND_NAMES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


@dataclass
class Output:
    """The output of a call of ``generate``: tokens, and logits [new tokens, rows, vocabulary]."""

    tokens: Tensor
    logits: Tensor
    cache: Any


def texts() -> dict[str, Tensor]:
    """Three rows of different length, left-padded, that share most of their head."""
    ids = torch.randint(FIRST_WORD, VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    for row, pad in enumerate((0, 2, 6)):
        ids[row, pad : LENGTH - 5] = ids[0, : LENGTH - 5 - pad].clone()
        ids[row, :pad], mask[row, :pad] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def kinds(model: PreTrainedModel) -> list[str]:
    """The arguments by which a model's processor, or its tokenizer, says that tokens are text."""
    takes = inspect.signature(type(model).forward).parameters
    names = [name for name in KIND_NAMES if name in takes]
    if not names or "image" in model.input_modalities:
        return names
    tokenizer = getattr(transformers, TOKENIZER_MAPPING_NAMES.get(model.config.model_type) or "", None)
    return [name for name in names if name in getattr(tokenizer, "model_input_names", ())]


def inputs_of(model: PreTrainedModel, case: str) -> dict[str, Tensor]:
    """The arguments of a model's call in one of the cases."""
    if case == PADDED:
        return texts()
    one = {name: value[:1] for name, value in texts().items()}
    return one | {name: torch.zeros_like(one["input_ids"]) for name in (kinds(model) if case == KINDS else ())}


def generate(model: PreTrainedModel, inputs: dict[str, Tensor], **options: Any) -> Output:
    """Call ``model.generate`` under a seed, without special tokens in the output."""
    torch.manual_seed(1)
    defaults = {"do_sample": False, "pad_token_id": 0, "suppress_tokens": list(range(FIRST_WORD))}
    asked = {"max_new_tokens": NEW, "output_logits": True, "return_dict_in_generate": True}
    out: Any = model.generate(**inputs, **defaults | asked | options)  # type: ignore[operator]
    cache = out.get(CACHE)
    return Output(out.sequences, torch.stack(out.logits).float(), cache)


def difference(want: Output, got: Output) -> str:
    """How two outputs differ, or nothing."""
    if want.tokens.shape != got.tokens.shape or want.logits.shape != got.logits.shape:
        return f"other shapes: {tuple(got.tokens.shape)} instead of {tuple(want.tokens.shape)}"
    real = want.logits.abs() < 1e30  # some models mask tokens with the least number
    spread = want.logits[real].std()
    first = (want.logits - got.logits)[0][real[0]].abs().max() / spread
    if not torch.equal(want.tokens, got.tokens):
        return f"other tokens, and logits after the prompt off by {first:.1e} of their spread"
    error = (want.logits - got.logits)[real].abs().max() / spread
    return "" if error <= TOLERANCE else f"logits off by {error:.1e} of their spread"


def doubts(model: PreTrainedModel, greedy: Output, inputs: dict[str, Tensor]) -> Iterator[str]:
    """Cases in which transformers disagrees with itself, so that a comparison with it proves little."""
    try:
        if changed := difference(greedy, generate(model, inputs, use_cache=False)):
            yield f"without a cache {changed}"
    except Exception as error:
        yield f"without a cache {line(error)}"
    for row, ids in enumerate(inputs["input_ids"]):
        own = ids[inputs["attention_mask"][row].bool()][None]
        alone = generate(model, {"input_ids": own, "attention_mask": torch.ones_like(own)})
        same = Output(greedy.tokens[row : row + 1, -NEW:], greedy.logits[:, row : row + 1], None)
        if changed := difference(same, Output(alone.tokens[:, -NEW:], alone.logits, None)):
            yield f"with {LENGTH - own.shape[1]} of padding {changed}"
            return


def check(model: PreTrainedModel) -> Found:
    """Compare a model's calls before and after the patch; exceptions of the unpatched model are raised."""
    inputs = texts()
    calls = {call: options for call, (case, options) in CALLS.items() if case != KINDS or kinds(model)}
    given = {call: inputs_of(model, CALLS[call][0]) for call in calls}
    want, notes = {"greedy": generate(model, inputs)}, []
    for call in list(calls)[1:]:
        try:
            want[call] = generate(model, given[call], **calls[call])
        except Exception as error:
            notes.append(f"cannot do {call}: {line(error)}")
    if not all(output.logits.isfinite().any() and not output.logits.isnan().any() for output in want.values()):
        raise ValueError("logits are not finite")
    found = Found("tree", notes=[*notes, *doubts(model, want["greedy"], inputs)])
    said = Said()
    logging.getLogger("prefixkit").addHandler(said)
    try:
        prefixkit.patch(model, tree_cache="always")
    except UnsupportedModel as error:
        found.verdict, found.reason = "refused", line(error)
        return found
    except Exception as error:
        found.verdict, found.reason = "error", f"patch: {line(error)}"
        return found
    results = {call: attempt(model, call, given[call], want[call], said) for call in want}
    verdicts = [verdict for verdict, _ in results.values()]
    found.verdict = max(verdicts, key=VERDICTS.index)
    reasons = {call: reason for call, (verdict, reason) in results.items() if verdict == found.verdict}
    if found.verdict == "refused" and "tree" in verdicts:
        found.verdict = "partly"
        reasons = {call: f"{CALLS[call][0]}: {reason}" for call, reason in reasons.items()}
    found.reason = "; ".join(dict.fromkeys(reasons.values()))
    return found


def attempt(model: PreTrainedModel, call: str, inputs: dict[str, Tensor], want: Output, said: Said) -> tuple[str, str]:
    """The verdict on one call of the patched model, and why."""
    said.lines.clear()
    options = CALLS[call][1]
    try:
        got = generate(model, inputs, **options)
    except Exception as error:
        return "error", f"{call}: {line(error)}"
    on_tree = isinstance(got.cache, TreeCache) and not got.cache.fell_back
    if changed := difference(want, got):
        if not difference(generate(model, inputs, **options, use_cache=False), got):
            return ("tree" if on_tree else "refused"), f"{call}: as transformers without a cache, not as with one"
        return "wrong", f"{call}{'' if on_tree else ', not on the tree'}: {changed}"
    if on_tree:
        return "tree", ""
    kept = [one.split("own cache: ")[-1] for one in said.lines]
    return "refused", kept[0] if kept else f"generate() made a {type(got.cache).__name__}"


class Said(logging.Handler):
    """Keeps prefixkit's log lines about caches."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        logging.getLogger("prefixkit").setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        if "own cache" in record.getMessage():
            self.lines.append(line(record.getMessage()))


def line(thing: object) -> str:
    """A text or an exception as one short line."""
    text = " ".join(str(thing).split())
    named = isinstance(thing, Exception) and not isinstance(thing, UnsupportedModel)
    text = f"{type(thing).__name__}: {text}" if named else text
    return text if len(text) <= 300 else f"{text[:180]} ... {text[-100:]}"


def survey(kind: str, model_type: str) -> Found:
    """The worst of the results over the variants of a model_type's tiny config."""
    if model_type in NEEDS:
        return Found("untried", f"needs {NEEDS[model_type]}")
    names, auto = LISTS[kind]
    found: dict[str, Found] = {}
    tried: list[dict[str, Any]] = []
    for name, overrides in variants(model_type).items():
        try:
            config = tiny_config(model_type, **overrides)
            if config.to_dict() in tried:
                continue
            tried.append(config.to_dict())
            torch.manual_seed(0)
            found[name] = check(tiny_model(config, getattr(modeling_auto, names)[model_type], auto))
        except Exception as error:
            found[name] = Found("untried", line(error))
    result = max(found.values(), key=lambda one: VERDICTS.index(one.verdict))
    reasons: dict[str, str] = {}
    for name, one in found.items():
        if one.verdict == result.verdict:
            reasons.setdefault(one.reason, name)
    if len({(one.verdict, one.reason) for one in found.values()}) > 1:
        result.reason = "; ".join(f"with {name}: {reason}" for reason, name in reasons.items() if reason)
    if result.verdict == "refused" and any(one.verdict == "tree" for one in found.values()):
        result.verdict = "partly"
    result.notes = list(dict.fromkeys(note for one in found.values() for note in one.notes))
    return result


def quietly() -> None:
    """Make this forked process silent, and limit the memory that it takes beside what it has of its parent."""
    for descriptor in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    torch.set_num_threads(1)
    has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (has + (GIBIBYTES << 30),) * 2)


def child(kind: str, model_type: str, to: Connection) -> None:
    """Survey a model_type in a process of its own, silently."""
    quietly()
    to.send(survey(kind, model_type))


def survey_all(entries: list[tuple[str, str]], processes: int) -> dict[tuple[str, str], Found]:
    """Survey each entry of the lists in a process of its own, which has its time and memory."""
    context = multiprocessing.get_context("fork")
    waiting, found = list(entries), {}
    running: dict[Any, Any] = {}
    while waiting or running:
        while waiting and len(running) < processes:
            entry, (here, there) = waiting.pop(0), context.Pipe(duplex=False)
            process = context.Process(target=child, args=(*entry, there))
            process.start()
            there.close()
            running[here] = entry, process, time.monotonic() + SECONDS
        ready = wait(list(running), timeout=1)
        for here, (entry, process, until) in list(running.items()):
            if here in ready or time.monotonic() > until:
                try:
                    found[entry] = here.recv() if here in ready else Found("error", f"took over {SECONDS} s")
                except EOFError:
                    found[entry] = Found("error", "the process ended")
                process.kill()
                process.join()
                del running[here]
                print(*entry, found[entry].verdict, found[entry].reason, *found[entry].notes, sep=" | ", flush=True)
    return {entry: found[entry] for entry in entries}


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line: ``arguments``, or those of the process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="model_types, separated by commas")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--write", type=Path, help="the Markdown document to write")
    parser.add_argument("--older", type=Path, help="the sources of an older transformers, to name what it lacks")
    options = parser.parse_args(arguments)
    only = options.only.split(",") if options.only else None
    entries = [
        (kind, model_type)
        for kind, (names, _) in LISTS.items()
        for model_type in sorted(getattr(modeling_auto, names))
        if only is None or model_type in only
    ]
    if unknown := sorted({*(only or ())} - {model_type for _, model_type in entries}):
        parser.error(f"--only: transformers {transformers.__version__} lists no text decoder of type {unknown[0]!r}")
    found = survey_all(entries, options.processes)
    for kind in LISTS:
        print(f"{kind}: {counts(found, kind)}")
    if options.write:
        names = {kind: names for kind, (names, _) in LISTS.items()}
        options.write.write_text(document(found, names, types_of(options.older, names) if options.older else None))


if __name__ == "__main__":
    main()
