"""Diverse beam search (Vijayakumar et al. 2016): groups of beams, each discouraged from the tokens of those before it.

Every beam proposes its likeliest tokens as children, all in one batch.  The groups then choose in turn, and a token
costs STRENGTH for each time that an earlier group has chosen it at this step: the Hamming penalty.

Run: python examples/diverse_beams.py          (SmolLM2-135M, downloaded on first use)
     python examples/diverse_beams.py --tiny   (a random model: no download, random text)
"""

from __future__ import annotations

from collections import Counter

import models

import prefixkit
from prefixkit import BeamParams, SearchNode

PROMPT = "The best thing about living by the sea is"
GROUPS, BEAMS, STEPS, STRENGTH = 3, 2, 12, 1.5
# Earlier groups choose at most GROUPS * BEAMS - BEAMS tokens, so GROUPS * BEAMS likeliest ones hold the best BEAMS.
PROPOSE = BeamParams(num_beams=GROUPS * BEAMS, num_return_sequences=GROUPS * BEAMS, max_new_tokens=1)


def choose(proposed: list[SearchNode], taken: Counter[int]) -> list[SearchNode]:
    """The best of a group's beams, given how often earlier groups took each token; the others are released."""
    proposed.sort(key=lambda node: STRENGTH * taken[node.tokens[-1]] - sum(node.logprobs))
    for node in proposed[BEAMS:]:
        node.release()
    taken.update(node.tokens[-1] for node in proposed[:BEAMS])
    return proposed[:BEAMS]


def main(arguments: list[str] | None = None) -> None:
    model, tokenizer = models.from_arguments(__doc__, arguments)
    prefixkit.patch(model)
    with prefixkit.Session(model, tokenizer, kv_budget="64MiB") as session:
        groups = [[session.prompt(PROMPT)] for _ in range(GROUPS)]
        for _ in range(STEPS):
            taken: Counter[int] = Counter()
            children = session.step([node for group in groups for node in group], PROPOSE, stop_token_ids=())
            groups = [choose([one for one in children if one.parent in group], taken) for group in groups]
        for number, group in enumerate(groups):
            for node in group:
                print(f"group {number}  {sum(node.logprobs):7.2f}  {node.text!r}")
        print(f"\nthe last step:\n{session.report}")


if __name__ == "__main__":
    main()
