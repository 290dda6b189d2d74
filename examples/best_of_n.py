"""Best of n: slogans are sampled, and the model itself judges each; their shared tokens are not computed again.

Run: python examples/best_of_n.py          (SmolLM2-135M, downloaded on first use)
     python examples/best_of_n.py --tiny   (a random model: no download, random text)
"""

from __future__ import annotations

import models

import prefixkit

PROMPT = "Request: Write a slogan for a small bakery by the sea.\nSlogan:"
JUDGE = "\nQuestion: Is this a good slogan for the bakery, yes or no?\nAnswer:"


def main(arguments: list[str] | None = None) -> None:
    model, tokenizer = models.from_arguments(__doc__, arguments)
    prefixkit.patch(model)
    with prefixkit.Session(model, tokenizer, kv_budget="64MiB") as session:
        root = session.prompt(PROMPT)
        slogans = session.step(root.fork(8, seeds=range(8)), temperature=0.8, max_new_tokens=32, until="\n")
        # A judge is a fork of its slogan, so that the slogan itself stays as it is.
        judges = [slogan.fork(1)[0].extend(JUDGE) for slogan in slogans]
        verdicts = session.score(judges, [" yes", " no"])
        report = session.report
        rewards = [yes.total - no.total for yes, no in verdicts]
        for reward, slogan in sorted(zip(rewards, slogans, strict=True), key=lambda pair: -pair[0]):
            mean = sum(slogan.logprobs) / len(slogan.logprobs)
            print(f"{reward:7.3f}  log-probability a token {mean:6.2f}  {slogan.text.strip()!r}")
    print(f"\njudging:\n{report}")


if __name__ == "__main__":
    main()
