"""Best of n by a process reward model's head: each sampled line has a value, the sample with the best lines wins.

The head of this example is random, in the place of one that was trained on the model's hidden states.

Run: python examples/process_reward.py          (SmolLM2-135M, downloaded on first use)
     python examples/process_reward.py --tiny   (a random model: no download, random text)
"""

from __future__ import annotations

import models
import torch

import prefixkit
from prefixkit import SearchNode

PROMPT = "Question: how much is 17 times 3, plus 4? Let us think in short lines.\n"
SAMPLES, LINES = 6, 3


def line_ends(node: SearchNode, counts: list[int]) -> list[int]:
    """The position of the last token of each line that was sampled."""
    prompt = len(node) - sum(counts)
    return [prompt + sum(counts[: line + 1]) - 1 for line in range(len(counts)) if counts[line]]


def main(arguments: list[str] | None = None) -> None:
    model, tokenizer = models.from_arguments(__doc__, arguments)
    prefixkit.patch(model)
    torch.manual_seed(0)
    head = torch.nn.Linear(model.config.hidden_size, 1, dtype=model.dtype, device=model.device)
    with prefixkit.Session(model, tokenizer, kv_budget="64MiB") as session:
        nodes = session.prompt(PROMPT).fork(SAMPLES)
        counts: list[list[int]] = [[] for _ in nodes]
        for _ in range(LINES):
            going = [node for node in nodes if node.finish_reason != "stop"]
            before = {id(node): len(node) for node in going}
            session.step(going, temperature=0.8, max_new_tokens=16, until="\n")
            for node, own in zip(nodes, counts, strict=True):
                own.append(len(node) - before.get(id(node), len(node)))
        values = session.values(nodes, head, at=[line_ends(*one) for one in zip(nodes, counts, strict=True)])
        print(f"{session.report.tokens_computed} tokens computed for the values of {SAMPLES} samples")
        worth = [float(own.sigmoid().prod()) for own in values]  # all lines have to be right
        for place in sorted(range(SAMPLES), key=lambda place: -worth[place]):
            print(f"{worth[place]:.3f}  {[round(float(one), 2) for one in values[place]]}  {nodes[place].text[:60]!r}")


if __name__ == "__main__":
    main()
