"""Steps over all that is uncomputed, and over tokens after which something is wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from prefixkit.attention.queries import StepTree
from prefixkit.attention.uncomputed import choose_queries, tokens_of
from prefixkit.runners.batch import Batch, Outputs, Runner, launch_step
from prefixkit.tree.arrays import Longs
from prefixkit.tree.radix import PrefixTree

# From the query rows of some wanted tokens, and the numbers of these, to what the rows give.
OutputsOf = Callable[[Longs, Longs], Outputs]


def compute_wanted(
    runner: Runner, tree: PrefixTree, node: Longs, offset: Longs, outputs: OutputsOf, chunk: int, most_wanted: int
) -> Iterator[tuple[Batch, Longs]]:
    """Compute what is uncomputed, and run tokens after which something is wanted: once more where they are computed.

    Args:
        runner, tree: Run the steps, over the present snapshot of the tree.
        node, offset: ``[wanted]`` where these tokens are: indices of nodes, and places in them.  Equal ones run once.
        outputs: What rows give; asked for each step, of no rows too.
        chunk: Tokens of a step at most.
        most_wanted: Different wanted tokens of a step at most.

    Yields:
        Each step once it is launched, and the numbers of the wanted tokens that it runs, in the order of their rows.
    """
    keys, token = np.unique((node << 32) + offset, return_inverse=True)  # in the order of rows
    node, offset, done = keys >> 32, keys & (1 << 32) - 1, 0
    numbers = np.argsort(token, kind="stable")
    token = token[numbers]
    while (step := _next_step(tree, node[done:], offset[done:], chunk)) is not None:
        rows = _rows(step, node[done:], offset[done:])
        if len(rows) > most_wanted:
            step = _next_step(tree, node[done:], offset[done:], int(rows[most_wanted]))
            assert step is not None, "of the first rows of the other"
            rows = _rows(step, node[done:], offset[done:])[:most_wanted]  # those of whole spans may be more, or fewer
        part = slice(*np.searchsorted(token, (done, done + len(rows))).tolist())
        which, nodes = numbers[part], tree.nodes()
        given = outputs(rows[token[part] - done], which)
        batch = Batch(step, tokens_of(step.queries, nodes, tree.spelling), given)
        launch_step(runner, tree, batch, [nodes[index] for index in step.queries.node.tolist()])
        done += len(rows)
        yield batch, which


def _next_step(tree: PrefixTree, node: Longs, offset: Longs, chunk: int) -> StepTree | None:
    """The next ``chunk`` tokens, where something is wanted after these, ascending."""
    wanted, first = np.unique(node, return_index=True)
    states = None if tree.states is None else tree.nodes()
    texts = None if tree.spelling is None else (tree.spelling, tree.nodes())
    return choose_queries(tree.snapshot(), (), wanted, chunk, offset[first], states, texts)


def _rows(step: StepTree, node: Longs, offset: Longs) -> Longs:
    """The query rows of the first of these tokens, ascending, as far as they are in a step."""
    begin = np.zeros(step.snapshot.num_nodes, np.int64)
    begin[step.queries.node] = step.queries.begin
    within = offset - begin[node]
    rows: Longs = (step.first_row[node] + within)[(within >= 0) & (within < step.own_rows[node])]
    return rows
