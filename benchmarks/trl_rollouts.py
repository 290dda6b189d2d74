"""A step of TRL's GRPO on one GPU: rollouts from a session on the trained model, against TRL's own ways.

    python -m benchmarks.trl_rollouts --out benchmarks/results/h200_trl.json
    python -m benchmarks.trl_rollouts --shape SmolLM2-135M --device cpu --prompts 2 --samples 4 --length 64 --new 8

*generate*: TRL unchanged; *patched*: TRL unchanged, on a patched model; *session*: ``SessionGRPOTrainer``; *held*: the
same, with pool and graphs kept over the update; *compiled*: as *held*, with compiled layers; *batching*: TRL with
``use_transformers_continuous_batching``; *tuned*: the same, with ``--continuous`` as its configuration.  Each trains a
model of the same random weights in bfloat16 on prompts of ``--length`` random letters (a token each), with
``--samples`` completions of up to ``--new`` tokens for each prompt, at ``--temperature`` (default 1) and ``--top-p``.
Seconds are medians of the steps after the first: of the rollout, and of the whole step, with rewards, gradient
checkpointing and AdamW.  ``peak_gib`` is the peak of torch's GPU memory.  A system that takes longer than ``--limit``
seconds ends the run: the thread in which transformers generates cannot be stopped, and fails with an error of its mask
when the model gets its own attention back.
"""

import json
import os
import random
import signal
import statistics
import string
import sys
import tempfile
import time
from typing import Any

import torch

import prefixkit
from benchmarks.runner import OUT_OF_TIME, Row, Run, arguments, failure, free_memory
from benchmarks.shapes import SHAPES

SYSTEMS = ["generate", "patched", "session", "held", "compiled", "batching", "tuned"]
CONTINUOUS = {"use_cuda_graph": True, "max_batch_tokens": 2048, "num_blocks": 1024}


class OutOfTime(BaseException):
    """A system has reached its time limit; ``generate_batch`` goes on after an Exception."""


def main() -> None:
    sizes = {"prompts": 32, "samples": 8, "length": 512, "new": 256, "rows": 16, "steps": 4}
    how = {"temperature": 1.0, "top_p": 1.0, "limit": 0, "continuous": json.dumps(CONTINUOUS)}
    options = arguments(__doc__, shape="Llama-3.2-1B", device="cuda", systems=SYSTEMS, **sizes, **how)
    run = Run(options, options.device)
    signal.signal(signal.SIGALRM, out_of_time)
    for name in options.systems:
        signal.alarm(options.limit)
        found = measured(name, options)
        signal.alarm(0)
        run.add("systems", {"system": name, "shape": options.shape, **found})
        if found.get("failed") == OUT_OF_TIME:
            run.finish()
            sys.stdout.flush()
            os._exit(0)
        free_memory()
    run.finish()


def out_of_time(*_: object) -> None:
    raise OutOfTime


def measured(name: str, options: Any) -> Row:
    """Seconds of a system's rollouts and steps, with the first step separately, and the peak of memory."""
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    try:
        with tempfile.TemporaryDirectory() as folder:
            trainer = trainer_of(name, options, folder)
            rollouts, steps = Clock(options.device), Clock(options.device)
            trainer._generate_single_turn = rollouts.around(trainer._generate_single_turn)
            trainer.add_callback(steps_of(steps))
            trainer.train()
        lengths = [entry["completions/mean_length"] for entry in trainer.state.log_history if "reward" in entry]
        row: Row = {"mean_length": statistics.mean(lengths)}
        for what, clock in (("rollout", rollouts), ("step", steps)):
            row |= {f"first_{what}_s": round(clock.times[0], 3), f"{what}_s": round(clock.later, 3)}
        if options.device == "cuda":
            row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        return row
    except (RuntimeError, ValueError, TypeError, ImportError, MemoryError) as error:
        return {"failed": failure(error)}
    except OutOfTime:
        return {"failed": OUT_OF_TIME}


class Clock:
    """Seconds of each of several turns, with all of the device's work for them."""

    def __init__(self, device: str) -> None:
        self.times, self._began, self._wait = list[float](), 0.0, device == "cuda"

    def start(self) -> None:
        self._began = self._now()

    def stop(self) -> None:
        self.times.append(self._now() - self._began)

    def around(self, verb: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            self.start()
            found = verb(*given, **named)
            self.stop()
            return found

        return call

    @property
    def later(self) -> float:
        return statistics.median(self.times[1:] or self.times)

    def _now(self) -> float:
        if self._wait:
            torch.cuda.synchronize()
        return time.perf_counter()


def trainer_of(name: str, options: Any, folder: str) -> Any:
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from trl import GRPOConfig, GRPOTrainer

    from prefixkit.integrations.trl import Rollouts, SessionGRPOTrainer
    from prefixkit.testing.tiny import byte_tokenizer

    drawn, completions = random.Random(0), options.prompts * options.samples
    letters = [
        "".join(drawn.choices(string.ascii_letters, k=options.length)) for _ in range(options.steps * options.prompts)
    ]
    rows = min(options.rows, completions)
    config = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=completions // rows,
        steps_per_generation=completions // rows,
        num_generations=options.samples,
        max_completion_length=options.new,
        max_steps=options.steps,
        temperature=options.temperature,
        top_p=options.top_p,
        beta=0.0,
        learning_rate=1e-6,
        bf16=options.device == "cuda",
        use_cpu=options.device == "cpu",
        gradient_checkpointing=True,
        use_transformers_continuous_batching=name in ("batching", "tuned"),
        transformers_continuous_batching_config=json.loads(options.continuous) if name == "tuned" else None,
        save_strategy="no",
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
    )
    model = SHAPES[options.shape].build(options.device, torch.float32 if options.device == "cpu" else torch.bfloat16)
    model.train()
    if name == "patched":
        prefixkit.patch(model)
    ours = name in ("session", "held", "compiled")
    own = {"rollouts": Rollouts(release_memory=name == "session", compiled=name == "compiled")} if ours else {}
    return (SessionGRPOTrainer if ours else GRPOTrainer)(
        model=model,
        reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
        args=config,
        # With a given fingerprint: the default, a hash of the table's types, fails on some versions.
        train_dataset=Dataset(InMemoryTable.from_pydict({"prompt": letters}), fingerprint="letters"),
        processing_class=byte_tokenizer(),
        **own,
    )


def steps_of(clock: Clock) -> Any:
    """A callback that times whole steps."""
    from transformers import TrainerCallback

    class Steps(TrainerCallback):
        def on_step_begin(self, *given: Any, **named: Any) -> None:
            clock.start()

        def on_step_end(self, *given: Any, **named: Any) -> None:
            clock.stop()

    return Steps()


if __name__ == "__main__":
    main()
