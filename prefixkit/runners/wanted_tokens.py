"""Steps over all uncomputed tokens, and over tokens whose outputs are wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from prefixkit.attention.queries import StepTree
from prefixkit.attention.uncomputed import choose_queries, tokens_of
from prefixkit.runners.batch import Batch, Outputs, Runner, launch_step
from prefixkit.tree.arrays import Longs
from prefixkit.tree.radix import PrefixTree

# Maps the query rows of some wanted tokens, and the numbers of these tokens, to the outputs wanted of the rows.
OutputsOf = Callable[[Longs, Longs], Outputs]


def compute_wanted(
    runner: Runner, tree: PrefixTree, node: Longs, offset: Longs, outputs: OutputsOf, chunk: int, most_wanted: int
) -> Iterator[tuple[Batch, Longs]]:
    """Compute all uncomputed tokens, and run the wanted tokens, again if they have KV already.

    Args:
        runner, tree: Runs the steps; the tree, as of its present snapshot.
        node, offset: ``[wanted]`` node index of each wanted token, and offset in the node.  Equal ones run once.
        outputs: Returns the outputs wanted of rows; called for each step, even if it runs no wanted token.
        chunk: Most tokens of a step.
        most_wanted: Most distinct wanted tokens of a step.

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
            rows = _rows(step, node[done:], offset[done:])[:most_wanted]  # steps of whole spans may run more, or fewer
        part = slice(*np.searchsorted(token, (done, done + len(rows))).tolist())
        which, nodes = numbers[part], tree.nodes()
        given = outputs(rows[token[part] - done], which)
        batch = Batch(step, tokens_of(step.queries, nodes, tree.spelling), given)
        launch_step(runner, tree, batch, [nodes[index] for index in step.queries.node.tolist()])
        done += len(rows)
        yield batch, which


def _next_step(tree: PrefixTree, node: Longs, offset: Longs, chunk: int) -> StepTree | None:
    """The step over the next ``chunk`` tokens, for wanted tokens in ascending order."""
    wanted, first = np.unique(node, return_index=True)
    states = None if tree.states is None else tree.nodes()
    texts = None if tree.spelling is None else (tree.spelling, tree.nodes())
    return choose_queries(tree.snapshot(), (), wanted, chunk, offset[first], states, texts)


def _rows(step: StepTree, node: Longs, offset: Longs) -> Longs:
    """The query rows of those of these tokens, ascending, that a step runs; they are the first ones."""
    begin = np.zeros(step.snapshot.num_nodes, np.int64)
    begin[step.queries.node] = step.queries.begin
    within = offset - begin[node]
    rows: Longs = (step.first_row[node] + within)[(within >= 0) & (within < step.own_rows[node])]
    return rows
