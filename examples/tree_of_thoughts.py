"""A small tree of thoughts (Yao et al. 2023): lines are sampled and judged by the model, and the best are continued.

Run: python examples/tree_of_thoughts.py          (SmolLM2-135M, downloaded on first use)
     python examples/tree_of_thoughts.py --tiny   (a random model: no download, random text)
"""

from __future__ import annotations

import models

import prefixkit
from prefixkit import SearchNode

PROMPT = "How to plan a birthday party, in four short steps.\nStep 1:"
DEPTH, BREADTH, KEEP, END = 4, 4, 2, "\n"


def worth(session: prefixkit.Session, nodes: list[SearchNode]) -> list[float]:
    """How much likelier "good" is than "bad" after each node, by the model, in one batch."""
    judges = [node.fork(1)[0].extend(f"{END}This plan is") for node in nodes]
    return [good.total - bad.total for good, bad in session.score(judges, [" good", " bad"])]


def main(arguments: list[str] | None = None) -> None:
    model, tokenizer = models.from_arguments(__doc__, arguments)
    prefixkit.patch(model)
    with prefixkit.Session(model, tokenizer, kv_budget="64MiB") as session:
        level = [session.prompt(PROMPT)]
        for depth in range(1, DEPTH + 1):
            thoughts = [child for node in level for child in node.fork(BREADTH)]
            session.step(thoughts, temperature=0.8, max_new_tokens=24, until=END)
            values = worth(session, thoughts)
            ranked = sorted(range(len(thoughts)), key=lambda place: -values[place])
            for rank, place in enumerate(ranked):
                mark = "->" if rank < KEEP else "  "
                print(f"{mark} depth {depth}  {values[place]:6.2f}  {thoughts[place].text.splitlines()[-1:]}")
            for place in ranked[KEEP:]:
                thoughts[place].release()
            level = [thoughts[place] for place in ranked[:KEEP]]
            if depth < DEPTH:
                level = [node.extend(f"{'' if node.text.endswith(END) else END}Step {depth + 1}:") for node in level]
        print(f"\nStep 1:{level[0].text}\n\nthe last judging:\n{session.report}")


if __name__ == "__main__":
    main()
