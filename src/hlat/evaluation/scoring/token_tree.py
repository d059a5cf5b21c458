"""Sequences as a tree of tokens, in which shared prefixes exist once.

    the cat sat    -->  the -+- cat -+- sat      preorder: the cat sat ran dog
    the cat ran              |       +- ran
    the dog                  +- dog

A model computes a tree in one row: a node attends to its ancestors and itself, and has the position of its depth. In
preorder the descendants of a node follow it, so ``j`` is an ancestor of ``i`` (or ``i`` itself) if ``j <= i < end[j]``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class TokenTree:
    """A tree of tokens in preorder. Trees of a batch may share a stem: tokens before the first node of each.

    Attributes:
        tokens: token of each node.
        depths: position of each node, counted from the first token of the stem.
        ends: index after the last descendant of each node.
        paths: nodes of each sequence that the tree was built from, in the order given.
        stem: number of tokens before the tree.
    """

    tokens: IntArray
    depths: IntArray
    ends: IntArray
    paths: list[IntArray]
    stem: int

    @property
    def size(self) -> int:
        """Number of nodes."""
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """True if every node has one child at most, so that plain causal attention computes it."""
        return bool((self.ends == self.size).all()) and self.size == int(self.depths[-1]) + 1 - self.stem

    def mask(self, window: int | None) -> BoolArray:
        """Nodes and tokens of the stem that each node attends to: (nodes, stem + nodes).

        Args:
            window: number of tokens that a node attends to at most, itself included; None for all before it.
        """
        node = np.arange(self.size)
        below = (node[None, :] <= node[:, None]) & (node[:, None] < self.ends[None, :])
        mask = np.concatenate((np.ones((self.size, self.stem), dtype=np.bool_), below), axis=1)
        if window is not None:
            depths = np.concatenate((np.arange(self.stem), self.depths))
            mask &= self.depths[:, None] - depths[None, :] < window
        return mask


def build_tree(sequences: Sequence[Sequence[int]], stem: int = 0) -> TokenTree:
    """Build the tree of some sequences, each longer than the stem, in which their first ``stem`` tokens are equal."""
    tokens: list[int] = []
    depths: list[int] = []
    ends: list[int] = []
    paths: list[IntArray] = [np.empty(0, dtype=np.int64)] * len(sequences)
    path: list[int] = []
    before: Sequence[int] = ()
    for index in sorted(range(len(sequences)), key=lambda i: tuple(sequences[i])):
        sequence = sequences[index][stem:]
        shared = common_prefix(before, sequence)
        for node in path[shared:]:
            ends[node] = len(tokens)
        del path[shared:]
        new = len(sequence) - shared
        path.extend(range(len(tokens), len(tokens) + new))
        tokens.extend(sequence[shared:])
        depths.extend(range(stem + shared, stem + len(sequence)))
        ends.extend([0] * new)
        paths[index] = np.array(path, dtype=np.int64)
        before = sequence
    for node in path:
        ends[node] = len(tokens)
    return TokenTree(np.array(tokens), np.array(depths), np.array(ends), paths, stem)


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of tokens at the beginning that two sequences have in common."""
    length = min(len(one), len(other))
    low, high = 0, length  # one[:low] is equal; comparing slices is faster than a loop over tokens
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
