"""Search with a verifier: a process reward model values samples of one step each, and the best of them are continued.

Beam search takes the best of all candidates; diverse verifier tree search (DVTS) takes the best candidate of each beam,
so that its subtrees stay separate.  Each of the two models has its own session and tokenizer.  A step computes only its
own tokens in both, and no text of earlier steps.

The verifier of this example has the generator's weights and a random head instead of a trained one: load your own
verifier by ``AutoModelForTokenClassification.from_pretrained(...)``.

Run: python examples/verifier_search.py [--dvts]   (SmolLM2-135M, downloaded on first use)
     python examples/verifier_search.py --tiny     (a random model: no download, random text)
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import models
import torch
from transformers import LlamaForTokenClassification

import prefixkit
from prefixkit import SearchNode, Session

QUESTION = """Solve the problem in short steps, one on each line, and give the answer on the last line.

A baker sells 17 loaves at 3 coins each and 4 cakes at 5 coins each. How many coins does he earn?"""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A partial solution, and the verifier's value after its last step."""

    node: SearchNode
    value: float


@dataclass(frozen=True)
class Verifier:
    """A session over a reward model, and the head that computes a value from its hidden states.

    The model reads the whole text, tokenized by its own tokenizer: a token may span two steps, and is then computed
    again.  The longest prefix of tokens that was computed before is found in the cache, not recomputed.
    """

    session: Session
    head: Callable[[torch.Tensor], torch.Tensor]

    def judge(self, question: str, nodes: list[SearchNode]) -> list[Candidate]:
        values = self.session.values([f"{question}\n\n{node.text}" for node in nodes], self.head)
        return [Candidate(node, float(value)) for node, value in zip(nodes, values, strict=True)]


def search(
    generator: Session, verifier: Verifier, question: str, *, n: int, expand: int, depth: int, dvts: bool, **step: Any
) -> list[Candidate]:
    """``n`` candidates a level, ``expand`` of each of ``n / expand`` beams; the solutions, best first.

    Fields of ``SamplingParams`` say how a step is sampled, and ``until`` what ends it.
    """
    root = generator.prompt([{"role": "user", "content": question}])
    beams, solved = root.fork(n // expand), list[Candidate]()
    for level in range(1, depth + 1):
        nodes = [child for beam in beams for child in beam.fork(expand)]
        generator.step(nodes, **step)
        candidates = verifier.judge(question, nodes)
        ended = [one for one in candidates if level == depth or one.node.finish_reason == "stop"]
        take, size = (1, expand) if dvts else (len(beams), len(nodes))
        best = list[Candidate]()
        for begin in range(0, len(nodes), size):
            going = [one for one in candidates[begin : begin + size] if one not in ended]
            best += sorted(going, key=lambda one: -one.value)[:take]
        for pruned in {*candidates} - {*best, *ended}:
            pruned.node.release()
        solved += ended
        beams = [one.node for one in best]
        if not beams:
            break
    return sorted(solved, key=lambda one: -one.value)


def reward_model(model: Any) -> Any:
    """A classifier of tokens with the weights of ``model`` and a random head."""
    config = copy.deepcopy(model.config)
    config.num_labels = 1
    torch.manual_seed(0)
    made = LlamaForTokenClassification(config)
    made.model.load_state_dict(model.model.state_dict())
    return made.eval()


def main(arguments: list[str] | None = None) -> None:
    options = models.parse(__doc__, arguments, dvts="diverse verifier tree search in place of beam search")
    model, tokenizer = models.load(options)
    reward = prefixkit.patch(reward_model(model))
    prefixkit.patch(model)
    step = {"temperature": 0.8, "max_new_tokens": 24, "until": "\n"}
    with (
        Session(model, tokenizer, kv_budget="128MiB") as generator,
        Session(reward, tokenizer, kv_budget="128MiB") as judging,
    ):
        verifier = Verifier(judging, reward.score)
        for one in search(generator, verifier, QUESTION, n=16, expand=4, depth=4, dvts=options.dvts, **step)[:4]:
            print(f"{one.value:6.2f}  {one.node.text!r}")
        last = judging.report
        print(f"the last level's values took {last.tokens_computed} tokens; its texts have {last.tokens_plain_batch}")


if __name__ == "__main__":
    main()
