"""Self-consistency (Wang et al. 2022): many chains of reasoning are sampled, and their answers vote.

Run: python examples/self_consistency.py          (SmolLM2-135M, downloaded on first use)
     python examples/self_consistency.py --tiny   (a random model: no download, random text)
"""

from __future__ import annotations

import re
from collections import Counter

import models

import prefixkit

PROMPT = """\
Q: There are 3 cars in the lot and 2 more arrive. How many cars are there?
A: There were 3 cars. 2 more arrived, so there are 3 + 2 = 5. The answer is 5.

Q: Ann had 7 pens and gave 4 away. How many pens has she left?
A: Ann had 7 pens. She gave 4 away, so she has 7 - 4 = 3. The answer is 3.

Q: Tom had 6 apples and ate 2. How many apples has he left?
A:"""


def main(arguments: list[str] | None = None) -> None:
    model, tokenizer = models.from_arguments(__doc__, arguments)
    prefixkit.patch(model)
    votes: Counter[str] = Counter()
    with prefixkit.Session(model, tokenizer, kv_budget="64MiB") as session:
        chains = session.step(session.prompt(PROMPT).fork(24), temperature=0.5, max_new_tokens=48, until="\n\n")
        for chain in chains:
            found = re.findall(r"answer is (\d+)", chain.text)
            votes[found[-1] if found else "none"] += 1
        for answer, count in votes.most_common():
            print(f"{answer:>6}  {count:2} of {len(chains)} chains")
        print(f"\none of them:{chains[0].text.rstrip()}\n\n{session.report}")


if __name__ == "__main__":
    main()
