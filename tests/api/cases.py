"""Prompts that share a head, and what is compared of results."""

from prefixkit.testing.tiny import ByteTokenizer

TOKENIZER = ByteTokenizer()
HEAD = "def solve(numbers):\n    '''Return the answer.'''\n"
PROMPTS = [HEAD + "    total = 0", HEAD + "    best = None", "while True:", HEAD, HEAD + "    total = 0"]


def tokens_of(result):
    return [(sample.prompt_index, sample.index, sample.tokens) for sample in result]
