"""Which documents are exact copies of earlier ones, by 128-bit hashes of their content, in the order of the corpus.

    hashes of a unit's documents --are any among those seen?--> copies
                                 --the others, sorted-->        one more run of what has been seen

Two different texts are taken for the same with a probability of n * n / 2**129 in a corpus of n documents: 10**-19 for
ten billion of them. Memory is 16 bytes for each distinct document, and a gigabyte while runs are joined.

Worker processes import this module, so it brings neither torch nor the heavier rooms along.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]
"""Shape (documents, 2): the two halves of each hash."""
Bools = npt.NDArray[np.bool_]

LARGEST_RUN = 1 << 26
"""Hashes up to which runs are joined: a join needs the memory of its result once more."""


def hash_documents(documents: Sequence[bytes], are_tokens: bool = False) -> Hashes:
    """The hash of each document, shape (documents, 2), uint64; not the same for text and for tokens."""
    person = b"tokens" if are_tokens else b""
    digests = b"".join(hashlib.blake2b(one, digest_size=16, person=person).digest() for one in documents)
    return np.frombuffer(digests, dtype="<u8").reshape(-1, 2)


class DuplicateFinder:
    """The hashes seen so far, in a few sorted runs of growing size.

    Args:
        largest: hashes up to which runs are joined.
    """

    def __init__(self, largest: int = LARGEST_RUN) -> None:
        self._largest = largest
        self._runs: list[Hashes] = []  # each of shape (2, n), sorted by its first row

    def add(self, hashes: Hashes) -> Bools:
        """See documents, in the order of the corpus; returns which of them are copies of earlier ones, shape (n,)."""
        order = np.lexsort((hashes[:, 1], hashes[:, 0]))  # keeps the order of equal ones: the first stays first
        ordered = hashes[order]
        known = np.zeros(len(order), dtype=np.bool_)
        known[1:] = (ordered[1:] == ordered[:-1]).all(axis=1)
        for run in self._runs:
            known |= _find_in_run(run, ordered)
        if not known.all():
            self._runs.append(np.ascontiguousarray(ordered[~known].T))
            self._join()
        copies = np.empty_like(known)
        copies[order] = known
        return copies

    def _join(self) -> None:
        """Join the last runs while they are of similar size, so that there are few and each is joined seldom."""
        while len(self._runs) > 1:
            older, newer = self._runs[-2:]
            if older.shape[1] > 2 * newer.shape[1] or older.shape[1] + newer.shape[1] > self._largest:
                return
            places = np.searchsorted(older[0], newer[0])
            self._runs[-2:] = [np.insert(older, places, newer, axis=1)]


def _find_in_run(run: Hashes, hashes: Hashes) -> Bools:
    """Which hashes are in a run; those that share only the first half with one there are compared in full."""
    firsts, seconds = run
    place = np.searchsorted(firsts, hashes[:, 0])
    found = np.zeros(len(hashes), dtype=np.bool_)
    asked = np.arange(len(hashes))
    while asked.size:  # nearly always twice at most: few share a half with another
        asked = asked[place[asked] < len(firsts)]
        asked = asked[firsts[place[asked]] == hashes[asked, 0]]
        found[asked] = seconds[place[asked]] == hashes[asked, 1]
        asked = asked[~found[asked]]
        place[asked] += 1
    return found
