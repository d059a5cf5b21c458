"""Requests to score: a context, a continuation of it, and the answer: how likely the model finds the continuation.

Everything is token ids. How they were made, by lm-eval or from a file of rendered requests, is not known here.
"""

from dataclasses import dataclass

from hlat.runtime.distributed.sendable_types import sendable

Tokens = tuple[int, ...]


@sendable
@dataclass(frozen=True)
class ScoreRequest:
    """A continuation to score.

    Attributes:
        context: tokens before it, at least one; their own probability is not scored.
        continuation: tokens to score, at least one.
    """

    context: Tokens
    continuation: Tokens

    @property
    def inputs(self) -> Tokens:
        """Tokens that the model has to read: all but the last, whose successor is not scored."""
        return self.context + self.continuation[:-1]

    def truncated(self, longest: int) -> "ScoreRequest":
        """Drop tokens from the left, so that the model reads ``longest`` tokens at most.

        A continuation that is longer itself keeps all its tokens that have a context.
        """
        excess = len(self.context) + len(self.continuation) - longest - 1
        if excess <= 0:
            return self
        tokens = (self.context + self.continuation)[excess:]
        first = max(1, len(self.context) - excess)
        return ScoreRequest(tokens[:first], tokens[first:])


@sendable
@dataclass(frozen=True)
class Score:
    """Score of a continuation.

    Attributes:
        log_probability: sum over its tokens, in nats.
        is_greedy: True if every token is the most likely one after those before it.
        tokens: number of tokens that were scored.
    """

    log_probability: float
    is_greedy: bool
    tokens: int
