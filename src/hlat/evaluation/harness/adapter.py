"""The adapter between lm-eval and a model of hlat: strings to tokens, requests to responses.

lm-eval: (context, continuation), (text), (context, settings) -> tokens -> responder -> log-probabilities, texts

It follows lm-eval's own model ``hf`` in everything that decides about results: how context and continuation are
tokenized, what is cut off if they are too long, which token precedes a text, and where a generated text ends.
"""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from hlat.evaluation.batch_generation.requests import GenerationRequest
from hlat.evaluation.responses.served_model import ServedModel
from hlat.evaluation.sampling import Sampling
from hlat.evaluation.scoring.requests import ScoreRequest
from hlat.runtime.errors import DataError

_DEFAULT_LENGTH = 2048  # tokens, for a model without a maximum: the default of lm-eval
_DEFAULT_NEW_TOKENS = 256  # the default of lm-eval
_KNOWN_SETTINGS = {"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k"}


class HarnessModel(TemplateLM):  # type: ignore[misc]  # lm-eval has no types
    """A served model with the interface of lm-eval.

    Args:
        served: the model.
        seed: seed of sampled texts.
        max_length: most tokens of context and continuation; None for the model's maximum.
        max_new_tokens: most tokens of a generated text, whatever the task asks for; None for no such limit.
    """

    def __init__(
        self, served: ServedModel, seed: int, max_length: int | None = None, max_new_tokens: int | None = None
    ) -> None:
        super().__init__()
        self._served, self._seed, self._max_new_tokens = served, seed, max_new_tokens
        self.max_length = max_length or served.config.max_sequence_length or _DEFAULT_LENGTH
        self._encode = lru_cache(maxsize=64)(self._encode_text)
        self._start = tuple(served.tokenizer.encode_prompt(""))  # tokens that the tokenizer puts in front of a text

    @property
    def eot_token_id(self) -> int:
        """Id of the token that ends a text."""
        if not self._served.end_ids:
            raise DataError(f"{self._served.path}: neither the model nor its tokenizer says which token ends a text.")
        return min(self._served.end_ids)

    @property
    def prefix_token_id(self) -> int:
        """Token that precedes a text without context: that of the beginning, or else that of the end."""
        begin = self._served.tokenizer.bos_id
        return self.eot_token_id if begin is None else begin

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Encode a text; see ``TemplateLM.tok_encode``."""
        return list(self._encode(string, add_special_tokens))

    def _encode_text(self, text: str, add_special_tokens: bool | None) -> tuple[int, ...]:
        tokens, start = tuple(self._served.tokenizer.encode_prompt(text)), len(self._start)
        if add_special_tokens is None:
            add_special_tokens = not text.startswith(self._served.tokenizer.token_name(self.prefix_token_id))
        return tokens[start:] if not add_special_tokens and tokens[:start] == self._start else tokens

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Score continuations; see ``LM.loglikelihood``."""
        scores: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        return scores

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        asked = [ScoreRequest(tuple(before), tuple(after)).truncated(self.max_length) for _, before, after in requests]
        scores = self._served.responder.respond(self._served.scoring, asked)
        return [(score.log_probability, score.is_greedy) for score in scores]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """Score complete texts, in windows of the maximum length; see ``LM.loglikelihood_rolling``."""
        windows: list[tuple[Any, list[int], list[int]]] = []
        counts = []
        for request in requests:
            rolling = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            own = [(None, *make_disjoint_window(window)) for window in rolling]
            windows += own
            counts.append(len(own))
        scores = iter(self._loglikelihood_tokens(windows))
        return [sum(next(scores)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Generate texts; see ``LM.generate_until``."""
        seen: Counter[GenerationRequest] = Counter()
        asked, stops = [], []
        for request in requests:
            text, settings = request.args
            stop, plain = self._generation_request(text, settings)
            asked.append(self._repeated(plain, seen[plain]))
            stops.append(stop)
            seen[plain] += 1
        texts = self._served.responder.respond(self._served.generation, asked)
        decode = self._served.tokenizer.decode
        return [
            str(postprocess_generated_text(decode(text), stop, None)) for text, stop in zip(texts, stops, strict=True)
        ]

    def _generation_request(self, text: str, settings: dict[str, Any]) -> tuple[list[str], GenerationRequest]:
        """Return the texts at which a generated text ends, and the request."""
        normal = normalize_gen_kwargs(settings, _DEFAULT_NEW_TOKENS)
        if unknown := sorted(set(normal) - _KNOWN_SETTINGS):
            raise DataError(f"a task asks for generation with {', '.join(unknown)}, which hlat does not have.")
        new = min(normal["max_gen_toks"], self._max_new_tokens or normal["max_gen_toks"])
        if new >= self.max_length:
            raise DataError(
                f"a task asks for {new:,} new tokens, but context and text together have {self.max_length:,} at most "
                f"in this model. Limit the texts with --max-new-tokens {self.max_length // 2}."
            )
        end = self._served.tokenizer.token_name(self.eot_token_id)
        stop = [each for each in handle_stop_sequences(list(normal["until"]), eos=end) if each]
        temperature = float(normal.get("temperature") or 0.0) if normal["do_sample"] else 0.0
        top_k, top_p = (normal.get("top_k"), normal.get("top_p")) if temperature > 0 else (None, None)
        sampling = Sampling(temperature, top_k, top_p, self._seed)
        context = self.tok_encode(text)[-(self.max_length - new) :]
        return stop, GenerationRequest(tuple(context), new, tuple(stop), sampling)

    def _repeated(self, request: GenerationRequest, number: int) -> GenerationRequest:
        """Number the repeats of a sampled request; those of a greedy one have the same text."""
        repeat = number if request.sampling.temperature > 0 else 0
        return GenerationRequest(request.context, request.max_tokens, request.stop, request.sampling, repeat)
