"""Beam search by a score of your own: here the log-probability less a price for each letter e, so that few are written.

Run: python examples/scored_beams.py          (SmolLM2-135M, downloaded on first use)
     python examples/scored_beams.py --tiny   (a random model: no download, random text)
"""

from __future__ import annotations

import models

import prefixkit
from prefixkit import BeamParams, SearchNode

PROMPT = "A short story. Long ago, in a small town,"
BEAMS, STEPS, PRICE = 4, 16, 3.0
# Each beam's likeliest next tokens become its children; the end-of-text token is treated as any other.
PROPOSE = BeamParams(num_beams=8, num_return_sequences=8, max_new_tokens=1, stop_token_ids=())


def score(node: SearchNode) -> float:
    return sum(node.logprobs) - PRICE * node.text.lower().count("e")


def main(arguments: list[str] | None = None) -> None:
    model, tokenizer = models.from_arguments(__doc__, arguments)
    prefixkit.patch(model)
    with prefixkit.Session(model, tokenizer, kv_budget="64MiB") as session:
        root = session.prompt(PROMPT)
        beams, computed = [root], 0
        for _ in range(STEPS):
            proposed = sorted(session.step(beams, PROPOSE), key=score, reverse=True)
            computed += session.report.tokens_computed
            for node in [*beams, *proposed[BEAMS:]]:
                node.release()
            beams = proposed[:BEAMS]
        for node in beams:
            print(f"{score(node):7.2f}  {node.text!r}")
        (plain,) = session.step(session.prompt(PROMPT), BeamParams(num_beams=BEAMS, max_new_tokens=STEPS))
        print(f"{score(plain):7.2f}  {plain.text!r}  (beam search by log-probability alone)")
        print(f"\ntokens computed in {STEPS} steps: {computed}, the prompt's {len(session.prompt(PROMPT))} among them")


if __name__ == "__main__":
    main()
