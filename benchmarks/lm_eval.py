"""lm-eval's own evaluation with the model types ``prefixkit`` and ``hf``: seconds of the same requests.

    OMP_NUM_THREADS=1 python -m benchmarks.lm_eval --out benchmarks/results/cpu_lm_eval.json
    python -m benchmarks.lm_eval --shape Llama-3.2-1B --device cuda --questions 128 --batch-sizes 1,8,32

*common*: options of several tokens behind the same few-shot examples (``first_n``); *sampled*: other examples for
each question, lm-eval's default; *letters*: options of one token behind the same examples, which ``hf`` scores in one
pass a question; *texts*: short generated texts behind the same examples.  ``--shape demo`` is SmolLM2-135M with its
weights and tokenizer; the others have random weights, and a token is a byte.  Seconds are those of the model's answers
and their tokenization, after a warm-up with other text; on a CPU they are CPU time.  ``hf`` runs with each of the batch
sizes, and the fastest counts; ``hf_worst_difference`` is the difference between its answers at these sizes.  In 16 bits
``hf`` rounds each log-probability and their sum, unless ``--softmax float32`` is given.
"""

import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.runner import Row, Run, arguments, failure, free_memory
from benchmarks.shapes import SHAPES

HEAD = """task: {name}
dataset_path: json
dataset_kwargs:
  cache_dir: "{folder}/cache"
  data_files: {{test: "{folder}/test.jsonl", train: "{folder}/train.jsonl"}}
test_split: test
fewshot_config: {{sampler: {sampler}, split: train}}
num_fewshot: {shots}
"""
CHOICE = """output_type: multiple_choice
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_choice: "{{options}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
LETTERS = """output_type: multiple_choice
doc_to_text: "Question: {{question}} {{listed}}\\nAnswer: ("
doc_to_choice: "{{['A', 'B', 'C', 'D']}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
TEXTS = """output_type: generate_until
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: " {{options[answer]}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 16, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
TASKS = {
    "common": ("first_n", CHOICE),
    "sampled": ("default", CHOICE),
    "letters": ("first_n", LETTERS),
    "texts": ("first_n", TEXTS),
}
THINGS = ["a harbour", "the old mill", "a paper lantern", "the night train", "a green bottle", "the upper field"]
DEEDS = ["is painted blue", "stands by the river", "belongs to nobody", "was sold last autumn", "has two doors"]


def main() -> None:
    sizes = {"questions": 6, "shots": 25, "batch-sizes": [1, 4], "tasks": list(TASKS)}
    how = {"shape": "demo", "device": "cpu", "softmax": {"choices": ["float32"], "help": "the dtype of hf's softmax"}}
    options = arguments(__doc__, **how, **{k.replace("-", "_"): v for k, v in sizes.items()})
    run = Run(options, options.device)
    with tempfile.TemporaryDirectory() as folder:
        write_tasks(Path(folder), options.questions, options.shots)
        model, tokenizer = load(options.shape, options.device)
        for task in options.tasks:
            row: Row = {"shape": options.shape, "task": task}
            given = [("prefixkit", 1), *(("hf", size) for size in options.batch_sizes)]
            softmax = {"prefixkit": None, "hf": options.softmax}
            found = {
                f"{kind} {size}": answers(kind, size, model, tokenizer, task, folder, softmax[kind])
                for kind, size in given
            }
            ours = found.pop("prefixkit 1")
            times = {name: one["s"] for name, one in found.items() if "s" in one}
            row |= {"prefixkit_s": ours["s"], "hf_s": times}
            row["hf_over_prefixkit"] = round(min(times.values()) / ours["s"], 2)
            theirs = found[min(times, key=lambda name: times[name])]["answers"]
            row["worst_difference"] = worst(ours["answers"], theirs)
            if len(times) > 1:
                row["hf_worst_difference"] = max(worst(theirs, found[name]["answers"]) for name in times)
            row["failed"] = {name: one["failed"] for name, one in found.items() if "failed" in one}
            run.add("tasks", row)
    run.finish()


def load(shape: str, device: str) -> tuple[Any, Any]:
    if shape == "demo":
        from prefixkit.evaluation.demo.model import load_demo

        model, tokenizer = load_demo()
        return model.to(device), tokenizer
    from prefixkit.testing.tiny import byte_tokenizer

    return SHAPES[shape].build(device, torch.float32 if device == "cpu" else torch.bfloat16), byte_tokenizer()


def write_tasks(folder: Path, questions: int, shots: int) -> None:
    """Questions and examples of some 60 tokens, four options of 3 to 12 tokens each, and a task of each kind."""
    drawn = random.Random(0)

    def document(number: int) -> Row:
        thing, other = drawn.sample(THINGS, 2)
        options = [f"{thing} {deed}" for deed in drawn.sample(DEEDS, 4)]
        page = drawn.randrange(900)
        question = f"In story {number}, {other} is near {thing}. Which of these is said of it, on page {page}?"
        listed = " ".join(f"({letter}) {option}" for letter, option in zip("ABCD", options, strict=True))
        return {"question": question, "options": options, "listed": listed, "answer": drawn.randrange(4)}

    for name, count in (("test", questions), ("train", 2 * shots)):
        lines = [json.dumps(document(number)) + "\n" for number in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    for name, (sampler, body) in TASKS.items():
        text = HEAD.format(name=name, folder=folder, sampler=sampler, shots=shots) + body
        (folder / f"{name}.yaml").write_text(text)


def answers(kind: str, batch_size: int, model: Any, tokenizer: Any, task: str, folder: str, softmax: str | None) -> Row:
    """Seconds of a model type's answers to a task's requests, and the answers."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    import prefixkit
    from prefixkit.integrations.lm_eval import PrefixLM

    lm = (PrefixLM if kind == "prefixkit" else HFLM)(
        model, tokenizer=tokenizer, batch_size=batch_size, softmax_dtype=softmax
    )
    taken = Row()
    for verb in ("loglikelihood", "generate_until"):
        clock = time.process_time if model.device.type == "cpu" else time.perf_counter
        setattr(lm, verb, timed(getattr(lm, verb), taken, clock))
    try:
        warm_up(lm)
        found = simple_evaluate(
            lm, tasks=[task], task_manager=TaskManager(include_path=folder, include_defaults=False), bootstrap_iters=0
        )
        samples = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
        return {"s": round(taken["s"], 3), "answers": [sample["resps"] for sample in samples]}
    except RuntimeError as error:  # out of memory
        return {"failed": failure(error)}
    finally:
        if kind == "prefixkit":
            lm.session.close()
        prefixkit.unpatch(model)
        del lm
        free_memory()


def warm_up(lm: Any) -> None:
    """Make the first call of each kind, with text of no task; on a GPU as long as a task's, for the same kernels."""
    length, texts = (1500, 64) if lm.device.type == "cuda" else (30, 3)
    ids = [40 + place * place % 150 for place in range(length + texts + 40)]
    asked = [(None, ids[: length + cut], ids[length + cut : length + cut + 20]) for cut in range(texts)]
    lm._loglikelihood_tokens(asked, disable_tqdm=True)


def timed(verb: Any, taken: Row, clock: Callable[[], float]) -> Any:
    def call(*given: Any, **options: Any) -> Any:
        began = clock()
        found = verb(*given, **options)
        taken["s"] = clock() - began
        return found

    return call


def worst(ours: Any, theirs: Any) -> float | int:
    """The largest difference of two log-probabilities, or how many texts differ."""
    one, other = ([answer for sample in given for request in sample for answer in request] for given in (ours, theirs))
    if isinstance(one[0], str):
        return sum(text != other_text for text, other_text in zip(one, other, strict=True))
    return max(abs(mine[0] - their[0]) for mine, their in zip(one, other, strict=True))


if __name__ == "__main__":
    main()
