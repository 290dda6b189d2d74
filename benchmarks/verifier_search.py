"""Search with a verifier by search nodes, and by submitting the text of every beam again: tokens computed, and time.

    OMP_NUM_THREADS=1 python -m benchmarks.verifier_search --out benchmarks/results/cpu_verifier_search.json

The search is that of ``examples/verifier_search.py``, by SmolLM2-135M and a verifier of the same size with a random
head, which improves no solution but takes as long as a trained one.  *nodes*: two sessions, unchanged; *calls*: the
same, with their prefix caches emptied before each step and each call of values, so that texts share tokens within one
call but none with earlier calls; *transformers*: the unpatched model computes all texts of a level as a padded batch,
by ``generate`` for the step, and in batches of ``--rows`` for the values.  With equal seeds the first two sample the
same tokens; ``generate`` is given these tokens, so that it needs no time for sampling, and its own values decide which
beams are continued.  Solutions are asserted to be equal.  Tokens are those of the texts alone, without padding and
without tokens of ended rows.  Seconds are wall time, and the process's CPU time; the first two ways run in turns, and
*transformers* follows.
"""

import statistics
import sys
import time
from argparse import Namespace
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import prefixkit
from benchmarks.runner import ROOT, Row, Run, arguments, in_turns
from prefixkit import SearchNode, Session

sys.path.insert(0, str(ROOT / "examples"))
from verifier_search import QUESTION, Candidate, Verifier, reward_model, search

WAYS = ["nodes", "calls", "transformers"]
# Samples of nodes, by a node's tokens and seed: new tokens, and why they ended.
Sampled = dict[tuple[tuple[int, ...], int], tuple[list[int], Any]]


def main() -> None:
    sizes: Row = {"n": 64, "expand": 4, "depth": 3, "new": 24, "temperature": 0.8, "rows": 16}
    model = {"choices": ("demo", "tiny"), "default": "demo"}
    options = arguments(__doc__, model=model, dvts=False, turns=3, plain_turns=1, **sizes)
    run, models = Run(options, "cpu"), Models(options)
    found: dict[str, list[Row]] = {way: [] for way in WAYS}
    solutions: list[list[Candidate]] = []

    def searched(way: str) -> float:
        row, candidates = models.searched(way)
        found[way].append(row)
        solutions.append(candidates)
        run.add("searches", {"way": way, **row})
        return float(row["cpu_s"])

    in_turns({way: partial(searched, way) for way in WAYS[:2]}, options.turns)
    in_turns({way: partial(searched, way) for way in WAYS[2:]}, options.plain_turns)
    for other in solutions[1:]:
        assert [one.node.text for one in other] == [one.node.text for one in solutions[0]], "other solutions"
    values = torch.tensor([[one.value for one in each] for each in solutions])
    run.result |= {
        "solutions": len(solutions[0]),
        "worst_difference_of_values": float((values - values[0]).abs().max()),
    }
    medians = {
        way: {name: round(statistics.median(row[name] for row in rows), 2) for name in rows[0]}
        for way, rows in found.items()
        if rows
    }
    run.result["medians"] = medians
    run.result["over_nodes"] = {
        way: {name: round(of[name] / medians["nodes"][name], 2) for name in of} for way, of in medians.items()
    }
    run.finish("medians", "over_nodes")


class Models:
    """The models of all ways, their tokenizer, and the recorded samples."""

    def __init__(self, options: Namespace) -> None:
        import models

        self._options = options
        self._plain, self._tokenizer = models.load(options_of(options.model))
        self._generator = prefixkit.patch(models.load(options_of(options.model))[0])
        self._reward = prefixkit.patch(reward_model(self._plain))
        self._sampled: Sampled = {}

    def searched(self, way: str) -> tuple[Row, list[Candidate]]:
        """A search: seconds and tokens, and its solutions."""
        options = self._options
        if way == "transformers":
            by = Plain(self._plain, self._tokenizer, self._sampled, options.rows)
            return self._timed(by, by)
        budget: Row = {"tokenizer": self._tokenizer, "kv_budget": "2GiB"}
        kinds = {"nodes": Counted, "calls": Resubmitting}
        with kinds[way](self._generator, **budget) as generator, kinds[way](self._reward, **budget) as judging:
            generator.sampled = self._sampled
            return self._timed(generator, judging)

    def _timed(self, generator: Any, judging: Any) -> tuple[Row, list[Candidate]]:
        options, clocks = self._options, (time.perf_counter, time.process_time)
        how: Row = {"n": options.n, "expand": options.expand, "depth": options.depth, "dvts": options.dvts}
        step = {"temperature": options.temperature, "max_new_tokens": options.new, "until": "\n"}
        began = [clock() for clock in clocks]
        found = search(generator, Verifier(judging, self._reward.score), QUESTION, **how, **step)
        wall, cpu = (clock() - before for clock, before in zip(clocks, began, strict=True))
        tokens = {"generator_tokens": generator.steps_computed, "verifier_tokens": judging.values_computed}
        return {"s": round(wall, 2), "cpu_s": round(cpu, 2), **tokens}, found


def options_of(model: str) -> Namespace:
    return Namespace(tiny=model == "tiny")


class Counted(Session):
    """A session that counts the tokens that its calls compute, and records the samples of nodes."""

    steps_computed = values_computed = 0
    sampled: Sampled

    def step(self, nodes: Any, *given: Any, **named: Any) -> list[SearchNode]:
        before = [(tuple(node.tokens), node.seed) for node in nodes]
        found = super().step(nodes, *given, **named)
        for key, node in zip(before, found, strict=True):
            self.sampled[key] = node.tokens[len(key[0]) :], node.finish_reason
        self.steps_computed += self.report.tokens_computed
        return found

    def values(self, *given: Any, **named: Any) -> Any:
        found = super().values(*given, **named)
        self.values_computed += self.report.tokens_computed
        return found


class Resubmitting(Counted):
    """A session that has no KV of earlier calls."""

    def step(self, *given: Any, **named: Any) -> list[SearchNode]:
        self.weights_changed()
        return super().step(*given, **named)

    def values(self, *given: Any, **named: Any) -> Any:
        self.weights_changed()
        return super().values(*given, **named)


class Plain:
    """The unpatched model instead of both sessions: each call computes whole texts, in padded batches."""

    def __init__(self, model: Any, tokenizer: Any, sampled: Sampled, rows: int) -> None:
        self.model, self.tokenizer, self._sampled, self._rows = model, tokenizer, sampled, rows
        self.steps_computed = self.values_computed = 0

    def prompt(self, messages: Any) -> SearchNode:
        ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        return SearchNode(self, np.asarray(ids, np.int32), 0)

    def step(self, nodes: list[SearchNode], **named: Any) -> None:
        chosen = [self._sampled[tuple(node.tokens), node.seed] for node in nodes]
        longest = max(len(tokens) for tokens, _ in chosen)
        batch = padded([node.tokens for node in nodes], "left")
        wanted = padded([tokens for tokens, _ in chosen], "right")["input_ids"]
        choose = LogitsProcessorList([Chosen(wanted, batch["input_ids"].shape[1])])
        lengths = {"min_new_tokens": longest, "max_new_tokens": longest, "pad_token_id": 0}
        out = self.model.generate(**batch, **lengths, do_sample=False, logits_processor=choose)
        assert torch.equal(out[:, -longest:], wanted)
        self.steps_computed += sum(len(node) for node in nodes)
        for node, (tokens, reason) in zip(nodes, chosen, strict=True):
            self.steps_computed += len(tokens) - 1
            node.append(np.asarray(tokens, np.int32), None, reason)

    def values(self, texts: list[str], head: Any) -> list[torch.Tensor]:
        """Values of texts; equal texts get the value of the first, since other rows of a batch change its rounding."""
        ids, found = [self.tokenizer(text)["input_ids"] for text in texts], list[torch.Tensor]()
        for begin in range(0, len(ids), self._rows):
            rows = ids[begin : begin + self._rows]
            with torch.no_grad():
                hidden = self.model.model(**padded(rows, "right"), use_cache=False).last_hidden_state
                found += list(head(hidden[torch.arange(len(rows)), [len(row) - 1 for row in rows]]))
            self.values_computed += sum(map(len, rows))
        return [found[texts.index(text)] for text in texts]


class Chosen(LogitsProcessor):  # type: ignore[misc]
    """Makes ``generate`` choose given tokens, ``[rows, steps]``, after a prompt of ``length`` columns."""

    def __init__(self, tokens: torch.Tensor, length: int) -> None:
        self._tokens, self._length = tokens, length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        column = self._tokens[:, input_ids.shape[1] - self._length, None]
        return scores.scatter_(1, column, torch.finfo(scores.dtype).max)


def padded(rows: list[list[int]], side: str) -> Row:
    longest = max(map(len, rows))
    ids, mask = (torch.zeros(len(rows), longest, dtype=torch.int64) for _ in range(2))
    for row, tokens in enumerate(rows):
        place = slice(longest - len(tokens), None) if side == "left" else slice(len(tokens))
        ids[row, place], mask[row, place] = torch.tensor(tokens), 1
    return {"input_ids": ids, "attention_mask": mask}


if __name__ == "__main__":
    main()
