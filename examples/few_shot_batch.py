"""Three levels of sharing, found automatically: few-shot examples, then each question, then its samples.

Run: python examples/few_shot_batch.py          (SmolLM2-135M, downloaded on first use)
     python examples/few_shot_batch.py --tiny   (a random model: no download, random text)
"""

from __future__ import annotations

from collections import Counter

import models

import prefixkit

EXAMPLES = {
    "apple": "fruit",
    "carrot": "vegetable",
    "salmon": "fish",
    "pear": "fruit",
    "spinach": "vegetable",
    "trout": "fish",
}
WORDS = ["banana", "broccoli", "tuna", "cherry"]


def prompt(word: str) -> str:
    """The examples, and a line for the model to finish."""
    solved = "".join(f"{name}: {kind}\n" for name, kind in EXAMPLES.items())
    return f"Is it a fruit, a vegetable or a fish?\n\n{solved}{word}:"


def main(arguments: list[str] | None = None) -> None:
    model, tokenizer = models.from_arguments(__doc__, arguments)
    prefixkit.patch(model)
    result = prefixkit.generate(
        model, tokenizer, [prompt(word) for word in WORDS], n=8, temperature=0.8, max_new_tokens=6, seed=0, stop="\n"
    )
    for index, word in enumerate(WORDS):
        votes = Counter(sample.text.strip() for sample in result.of_prompt(index))
        print(f"{word:10} {', '.join(f'{answer!r} x{count}' for answer, count in votes.most_common())}")
    print(f"\n{result.report}")


if __name__ == "__main__":
    main()
