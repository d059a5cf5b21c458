"""Scorer: log-probabilities of continuations, by forward passes of a model in this process.

    batch -> token trees -> [ KV cache of the stem, computed once ] -> hidden states of all nodes in one forward pass
        -> those before scored tokens -> head -> log-probabilities -> a sum for each request

The head runs for scored tokens only: logits of contexts, which are most of the work of a small model, are never built.

Tensor suffixes: B rows, S nodes of a row, T stem and nodes, N scored tokens, D model width.
"""

from collections.abc import Sequence

import numpy as np
import torch

from hlat.evaluation.scoring.batches import BatchLimits, ScoringBatch, plan_batches
from hlat.evaluation.scoring.requests import Score, ScoreRequest
from hlat.evaluation.scoring.stem_cache import StemCache
from hlat.evaluation.scoring.token_tree import IntArray, TokenTree, build_tree
from hlat.parallel import ForwardModel


class Scorer:
    """Scores batches on one model, or on this rank's shard of it; tensor-parallel ranks score the same batches.

    Args:
        model: the model.
    """

    def __init__(self, model: ForwardModel) -> None:
        self._model = model
        self._stems = StemCache(model)
        self._tokens = 0

    @property
    def computed_tokens(self) -> int:
        """Tokens that forward passes have computed so far, without padding."""
        return self._tokens + self._stems.computed_tokens

    def score(self, batch: ScoringBatch) -> list[Score]:
        """Score the requests of a batch, row after row."""
        trees = [build_tree([request.inputs for request in row], batch.stem) for row in batch.rows]
        hidden_BSD = self._hidden(batch, trees)
        places: list[IntArray] = []
        targets: list[int] = []
        counts: list[int] = []
        for index, (row, tree) in enumerate(zip(batch.rows, trees, strict=True)):
            for request, path in zip(row, tree.paths, strict=True):
                places.append(index * hidden_BSD.shape[1] + path[-len(request.continuation) :])
                targets += request.continuation
                counts.append(len(request.continuation))
        device = hidden_BSD.device
        hidden_ND = hidden_BSD.flatten(0, 1)[torch.from_numpy(np.concatenate(places)).to(device)]
        log_N, greedy_N = self._model.log_probabilities(hidden_ND, torch.tensor(targets, device=device))
        parts = zip(log_N.cpu().double().split(counts), greedy_N.cpu().split(counts), counts, strict=True)
        return [Score(float(log_n.sum()), bool(greedy_n.all()), count) for log_n, greedy_n, count in parts]

    def _hidden(self, batch: ScoringBatch, trees: Sequence[TokenTree]) -> torch.Tensor:
        """Hidden states of all nodes: (B, S, D); rows are padded on the right, where nothing attends to."""
        rows, width, device = len(trees), max(tree.size for tree in trees), self._model.device
        self._tokens += sum(tree.size for tree in trees)
        tokens_BS = torch.zeros((rows, width), dtype=torch.int64)
        for index, tree in enumerate(trees):
            tokens_BS[index, : tree.size] = torch.from_numpy(tree.tokens)
        tokens_BS = tokens_BS.to(device)
        chains = all(tree.is_chain for tree in trees)
        if chains and batch.stem == 0:
            return self._model.hidden(tokens_BS)
        cache = self._model.new_cache(rows, batch.stem + width)
        if batch.stem:
            cache.start_with(self._stems.get(batch.requests[0].inputs[: batch.stem]))
        if chains:
            return self._model.hidden(tokens_BS, cache)
        positions_BS = torch.zeros((rows, width), dtype=torch.int64)
        mask_BST = torch.zeros((rows, width, batch.stem + width), dtype=torch.bool)
        mask_BST.diagonal(batch.stem, 1, 2).fill_(True)  # padding attends to itself: softmax over nothing is NaN
        for index, tree in enumerate(trees):
            positions_BS[index, : tree.size] = torch.from_numpy(tree.depths)
            mask = torch.from_numpy(tree.mask(self._model.decoder.window))
            mask_BST[index, : tree.size, : batch.stem + tree.size] = mask
        cache.attend_to(mask_BST.to(device))
        return self._model.hidden(tokens_BS, cache, positions_BS.to(device))


def score_all(model: ForwardModel, requests: Sequence[ScoreRequest], limits: BatchLimits | None = None) -> list[Score]:
    """Score requests in this process, in their order; see ``Scorer``."""
    scorer = Scorer(model)
    scores: list[Score | None] = [None] * len(requests)
    for batch in plan_batches(requests, limits):
        for index, score in zip(batch.order, scorer.score(batch), strict=True):
            scores[index] = score
    return [score for score in scores if score is not None]
