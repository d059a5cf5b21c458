"""Exact duplicates of earlier documents, found by 128-bit hashes of their content, in the order of the corpus.

    hashes of a unit's documents --present in the hashes seen?--> duplicates
                                 --the others, sorted---------->  a new sorted run of hashes seen

Two different texts are taken for the same with a probability of n * n / 2**129 in a corpus of n documents: 10**-19 for
ten billion documents. Memory is 16 bytes per distinct document, and about 1 GB more while runs are merged.

Worker processes import this module, so it must not import torch or the heavier rooms.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]
"""Shape (documents, 2): the two 64-bit halves of each hash."""
Bools = npt.NDArray[np.bool_]

LARGEST_RUN = 1 << 26
"""Largest number of hashes in a merged run: a merge needs memory for its result in addition to its inputs."""


def hash_documents(documents: Sequence[bytes], are_tokens: bool = False) -> Hashes:
    """Return the 128-bit hash of each document, shape (documents, 2), uint64; text and tokens never share a hash."""
    person = b"tokens" if are_tokens else b""
    digests = b"".join(hashlib.blake2b(document, digest_size=16, person=person).digest() for document in documents)
    return np.frombuffer(digests, dtype="<u8").reshape(-1, 2)


class DuplicateFinder:
    """Detects duplicates among all documents added so far; keeps their hashes in a few sorted runs of growing size.

    Args:
        largest: largest number of hashes in a merged run.
    """

    def __init__(self, largest: int = LARGEST_RUN) -> None:
        self._largest = largest
        self._runs: list[Hashes] = []  # each of shape (2, n), sorted by its first row

    def add(self, hashes: Hashes) -> Bools:
        """Add documents, in the order of the corpus; return a mask of the duplicates of earlier ones, shape (n,)."""
        order = np.lexsort((hashes[:, 1], hashes[:, 0]))  # stable: of equal hashes the first stays first
        ordered = hashes[order]
        known = np.zeros(len(order), dtype=np.bool_)
        known[1:] = (ordered[1:] == ordered[:-1]).all(axis=1)
        for run in self._runs:
            known |= _find_in_run(run, ordered)
        if not known.all():
            self._runs.append(np.ascontiguousarray(ordered[~known].T))
            self._merge_runs()
        duplicates = np.empty_like(known)
        duplicates[order] = known
        return duplicates

    def _merge_runs(self) -> None:
        """Merge the last runs while they are of similar size, so that runs are few and each hash is merged rarely."""
        while len(self._runs) > 1:
            older, newer = self._runs[-2:]
            if older.shape[1] > 2 * newer.shape[1] or older.shape[1] + newer.shape[1] > self._largest:
                return
            positions = np.searchsorted(older[0], newer[0])
            self._runs[-2:] = [np.insert(older, positions, newer, axis=1)]


def _find_in_run(run: Hashes, hashes: Hashes) -> Bools:
    """Return a mask of the hashes present in a run, shape (n,); second halves are compared where first halves match."""
    firsts, seconds = run
    position = np.searchsorted(firsts, hashes[:, 0])
    found = np.zeros(len(hashes), dtype=np.bool_)
    candidates = np.arange(len(hashes))
    while candidates.size:  # nearly always at most two rounds: few hashes share their first half
        candidates = candidates[position[candidates] < len(firsts)]
        candidates = candidates[firsts[position[candidates]] == hashes[candidates, 0]]
        found[candidates] = seconds[position[candidates]] == hashes[candidates, 1]
        candidates = candidates[~found[candidates]]
        position[candidates] += 1
    return found
