"""Many samples of one prompt: it is computed and stored once, and read once per step, whatever their number.

Run: python examples/parallel_sampling.py          (SmolLM2-135M, downloaded on first use)
     python examples/parallel_sampling.py --tiny   (a random model: no download, random text)
"""

from __future__ import annotations

import models

import prefixkit

PROMPT = "Write one sentence about a lighthouse."


def main(arguments: list[str] | None = None) -> None:
    model, tokenizer = models.from_arguments(__doc__, arguments)
    prefixkit.patch(model)
    # A prompt may be a string, token ids, or messages for the model's chat template.
    conversation = [{"role": "user", "content": PROMPT}]
    result = prefixkit.generate(
        model, tokenizer, [conversation], n=16, temperature=0.9, top_p=0.95, max_new_tokens=40, seed=1, stop="\n"
    )
    for sample in result:
        print(f"{sample.index:3}  {sample.finish_reason:6}  {sample.text}")
    print(f"\n{result.report}")


if __name__ == "__main__":
    main()
