"""Random histories against a plain-Python model: a dictionary of token lists, and a pool that remembers its writes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from prefixkit.testing.integrity import check_tree
from prefixkit.tree import Node, OutOfPages, PrefixTree, Sequence
from prefixkit.tree.eviction import POLICIES, PrefixCache
from prefixkit.tree.pages import pages_for
from prefixkit.tree.snapshot import TreeSnapshot
from tests.tree.model import RememberingPool, assert_snapshot_is_fresh, fingerprint

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=12)
PICK = st.integers(0, 10**6)


class TreeMachine(RuleBasedStateMachine):
    """Every public method, in any order, on a pool small enough to run dry."""

    page_size: ClassVar[int]

    @initialize(num_pages=st.integers(1, 60), policy=st.sampled_from(sorted(POLICIES)))
    def begin(self, num_pages: int, policy: str) -> None:
        self.tree = PrefixTree(num_pages, self.page_size)
        self.pool = RememberingPool(self.tree)
        self.cache = PrefixCache(self.tree, POLICIES[policy])
        self.handles: list[Sequence] = []
        self.excluded: list[Sequence] = []
        self.model: dict[int, list[int]] = {}
        self.last: TreeSnapshot | None = None

    def pick(self, number: int) -> Sequence:
        return self.handles[number % len(self.handles)]

    def attempt(self, most: int, change: Any) -> bool:
        """Whether ``change`` was made.  It may take ``most`` pages, refused without a trace only if those lack."""
        free, before = self.tree.allocator.free, fingerprint(self.tree)
        try:
            change()
        except OutOfPages:
            assert most > free
            assert fingerprint(self.tree) == before
            return False
        assert free - self.tree.allocator.free <= most
        return True

    def add(self, sequence: Sequence, tokens: list[int]) -> None:
        self.handles.append(sequence)
        self.model[sequence.id] = tokens

    # -- rules -----------------------------------------------------------------------------------------------------

    @rule(tokens=TOKENS)
    def insert(self, tokens: list[int]) -> None:
        need = pages_for(len(tokens) - self.tree.match(tokens).length, self.tree.page_size)
        self.attempt(need, lambda: self.add(self.tree.insert(tokens), tokens))

    @precondition(lambda self: self.handles)
    @rule(number=PICK, keep=st.integers(0, 20), tokens=TOKENS)
    def insert_relative(self, number: int, keep: int, tokens: list[int]) -> None:
        self.insert(self.model[self.pick(number).id][:keep] + tokens)

    @precondition(lambda self: self.handles)
    @rule(number=PICK, count=st.integers(1, 5))
    def fork(self, number: int, count: int) -> None:
        sequence = self.pick(number)
        for fork in self.tree.fork(sequence, count):
            self.add(fork, self.model[sequence.id])

    @precondition(lambda self: self.handles)
    @rule(number=PICK, tokens=TOKENS)
    def extend(self, number: int, tokens: list[int]) -> None:
        sequence = self.pick(number)
        needed = self.tree.pages_to_extend(sequence, len(tokens))
        if self.attempt(needed, lambda: self.tree.extend(sequence, tokens)):
            self.model[sequence.id] = self.model[sequence.id] + tokens

    @precondition(lambda self: self.handles)
    @rule(data=st.data(), tokens=st.integers(0, 40))
    def reserve(self, data: st.DataObject, tokens: int) -> None:
        leaves = [sequence for sequence in self.handles if sequence.node.grows_in_place]
        if not leaves:
            return
        chosen = data.draw(st.lists(st.sampled_from(leaves), unique=True))
        most = sum(self.tree.pages_to_extend(sequence, tokens) for sequence in chosen)
        if self.attempt(most, lambda: self.tree.reserve(chosen, [tokens] * len(chosen))):
            assert all(self.tree.pages_to_extend(sequence, tokens) == 0 for sequence in chosen)

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def extend_each(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.handles), unique=True))
        tokens = data.draw(st.lists(st.integers(0, 2), min_size=len(chosen), max_size=len(chosen)))
        needed = sum(self.tree.pages_to_extend(sequence, 1) for sequence in chosen)
        if self.attempt(needed, lambda: self.tree.extend_each(chosen, tokens)):
            for sequence, token in zip(chosen, tokens, strict=True):
                self.model[sequence.id] = [*self.model[sequence.id], token]

    @precondition(lambda self: self.handles)
    @rule(number=PICK, forks=st.integers(0, 5))
    def go_on_together(self, number: int, forks: int) -> None:
        """All sequences that end at a node get a token, as beams do."""
        self.fork(number, forks) if forks else None
        chosen = [one for one in self.handles if one.node is self.pick(number).node]
        needed = sum(self.tree.pages_to_extend(sequence, 1) for sequence in chosen)
        if self.attempt(needed, lambda: self.tree.extend_each(chosen, [forks] * len(chosen))):
            for sequence in chosen:
                self.model[sequence.id] = [*self.model[sequence.id], forks]

    @precondition(lambda self: self.handles)
    @rule(number=PICK, data=st.data())
    def trim(self, number: int, data: st.DataObject) -> None:
        sequence = self.pick(number)
        length = data.draw(st.integers(0, sequence.length))
        self.tree.trim(sequence, length)
        self.model[sequence.id] = self.model[sequence.id][:length]

    @precondition(lambda self: self.handles)
    @rule(number=PICK)
    def release(self, number: int) -> None:
        sequence = self.pick(number)
        self.handles.remove(sequence)
        self.tree.release(sequence)
        del self.model[sequence.id]

    @precondition(lambda self: self.handles)
    @rule(number=PICK)
    def keep(self, number: int) -> None:
        sequence = self.pick(number)
        self.handles.remove(sequence)
        tokens = self.model.pop(sequence.id)
        above, alone = sequence.node.parent, True
        while above is not None:
            above, alone = above.parent, alone and all(len(group) == 1 for group in above.branches.values())
        had = self.pool.assert_keeps(tokens) if tokens and sequence.node.computed == sequence.node.length else 0
        self.cache.retain(sequence)
        found = self.pool.assert_keeps(tokens) if tokens else 0
        assert found >= had or not alone  # of siblings that begin alike the first is found, computed or not

    @precondition(lambda self: self.handles)
    @rule(number=PICK)
    def exclude(self, number: int) -> None:
        sequence = self.pick(number)
        self.handles.remove(sequence)
        self.tree.exclude_from_snapshot(sequence)
        self.excluded.append(sequence)

    @precondition(lambda self: self.excluded)
    @rule(number=PICK, goes_on=st.booleans())
    def wake(self, number: int, goes_on: bool) -> None:
        sequence = self.excluded.pop(number % len(self.excluded))
        tokens = self.model.pop(sequence.id)
        if goes_on:
            self.add(self.tree.fork(sequence)[0], tokens)
        self.tree.release(sequence)

    @rule(pages=st.integers(0, 60))
    def free_pages(self, pages: int) -> None:
        free = self.tree.allocator.free
        made = self.cache.free_pages(pages)
        assert made == (self.tree.allocator.free >= pages) and self.tree.allocator.free >= free
        if not made:
            assert not any(one.evictable for one in everything(self.tree))

    @rule(budget=st.one_of(st.none(), st.integers(1, 20)))
    def compute(self, budget: int | None) -> None:
        self.pool.compute(budget)

    @rule(most_pages=st.integers(0, 60))
    def compact(self, most_pages: int) -> None:
        free, tokens = self.tree.allocator.free, self.tree.snapshot().num_tokens
        source, target = self.tree.compact(min(most_pages, free))
        self.pool.copy(source, target)
        assert free - self.tree.allocator.free <= most_pages
        assert self.tree.snapshot().num_tokens == tokens

    @rule(tokens=TOKENS)
    def match(self, tokens: list[int]) -> None:
        before = fingerprint(self.tree)
        found = self.tree.match(tokens)
        assert fingerprint(self.tree) == before
        assert found.node.start + found.offset == found.length
        prefixes = [held[: found.length] for held in self.model.values()]
        cached = found.node.cached or found.node.branches
        assert found.length == 0 or cached or tokens[: found.length] in prefixes
        self.pool.assert_keeps(tokens)

    # -- what must hold after each ---------------------------------------------------------------------------------

    @invariant()
    def bookkeeping_is_consistent(self) -> None:
        check_tree(self.tree)

    @invariant()
    def sequences_hold_their_tokens(self) -> None:
        for sequence in self.handles + self.excluded:
            assert sequence.tokens().tolist() == self.model[sequence.id]
            assert sequence.length == len(self.model[sequence.id])

    @invariant()
    def no_slot_was_overwritten_while_needed(self) -> None:
        for sequence in self.handles:
            self.pool.assert_holds(sequence.id, self.model[sequence.id])

    @invariant()
    def stored_once(self) -> None:
        snapshot = self.tree.snapshot()
        assert len(snapshot.sequence_id) == len(self.handles)
        assert snapshot.num_tokens_unshared == sum(len(self.model[one.id]) for one in self.handles)
        assert snapshot.num_tokens <= snapshot.num_tokens_unshared

    @invariant()
    def snapshots_of_one_version_only_grow(self) -> None:
        now, last = self.tree.snapshot(), self.last
        if last is not None and last.version == now.version:
            for name in ("parent", "subtree_end", "start", "first_slot"):
                assert (getattr(last, name) == getattr(now, name)).all()
            assert (last.length <= now.length).all()
            for old, new in zip(pages_of(last), pages_of(now), strict=True):
                assert new[: len(old)] == old
        self.last = now
        assert_snapshot_is_fresh(self.tree)

    def teardown(self) -> None:
        for sequence in getattr(self, "handles", []) + getattr(self, "excluded", []):
            self.tree.release(sequence)
            check_tree(self.tree)
        if hasattr(self, "tree"):
            self.cache.clear()
            check_tree(self.tree)
            assert self.tree.allocator.free == self.tree.allocator.num_pages
            assert self.tree.nodes() == []


def everything(tree: PrefixTree) -> list[Node]:
    nodes = [tree.root]
    for node in nodes:
        nodes.extend(node.children)
    return nodes


def pages_of(snapshot: TreeSnapshot) -> list[list[int]]:
    bounds = snapshot.page_indptr.tolist()
    return [snapshot.pages[begin:end].tolist() for begin, end in pairwise(bounds)]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("page_size", [1, 2, 16, 128])
def test_random_histories(page_size: int) -> None:
    machine = type(f"TreeMachine{page_size}", (TreeMachine,), {"page_size": page_size})
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            max_examples=16,
            phases=[Phase.generate, Phase.shrink],
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
            print_blob=True,
        ),
    )
