"""A SentencePiece .model as a Tokenizer: encoded by the sentencepiece library itself, so the ids are its ids.

The library comes with the extra ``sentencepiece`` and is imported only here.

A model that puts a space (spelled ▁) in front of a text and changes nothing else (normalizer "identity") encodes
``A B`` as it encodes ``▁A▁B``. If no piece of its vocabulary has ▁ after an ASCII letter, no piece
can reach over such a space, so the best segmentation of the whole is that of ``A`` followed by that of ``B``: a long
text is cut there, and the space itself is left to the one that the model puts in front of ``B``. With byte fallback
no unknown piece can join the two sides either. This holds for BPE, whose merges are decided where they are; a unigram
model adds up scores from the beginning of the text, in float32, so that near ties depend on how long it is: texts stay
whole.
"""

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from hlat.data.tokenizers.base import CHUNK_CHARS, Tokenizer, config_files, resolve_eos_token, sentencepiece_byte_count
from hlat.data.tokenizers.json_tokenizer import DEFAULT_CONFIG
from hlat.data.tokenizers.sentencepiece_convert import is_plain, to_tokenizer_json
from hlat.runtime import DataError

# For models that are not converted: transformers reads the .model itself. Documents are trained on without a
# beginning token, so none is added.
_LLAMA_CONFIG: dict[str, Any] = {
    **DEFAULT_CONFIG,
    "tokenizer_class": "LlamaTokenizer",
    "legacy": False,
    "add_bos_token": False,
    "add_eos_token": False,
}
_BPE = 2  # as trainer_spec.model_type has it
_CUT = re.compile(r"(?<=[A-Za-z]) (?=[A-Za-z])")
_OVER_A_SPACE = re.compile(r"[A-Za-z][▁ ]")


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model.

    Args:
        content: the bytes of the .model file.
        config: the tokenizer_config.json that came with it, if any.
        eos_token: name of the piece that ends a document; "auto" for the model's own; None for none.
        where: what to call it in errors.

    Raises:
        DataError: not a model, the library is missing, or no such piece.
    """

    def __init__(
        self, content: bytes, config: dict[str, Any] | None = None, eos_token: str | None = "auto", where: str = ""
    ) -> None:
        self._model = _load(content, where or "tokenizer.model")
        self.vocab_size = len(self._model)
        proto = _proto(self._model)
        self._cuttable = proto is not None and _survives_cuts(proto)
        self.eos_id = self._end(resolve_eos_token(eos_token, config), where)
        self.eos_token = None if self.eos_id is None else self._model.id_to_piece(self.eos_id)
        self.bos_id = self._model.bos_id() if self._model.bos_id() >= 0 else None
        special = {
            "eos_token": self.eos_token,
            "bos_token": None if self.bos_id is None else self._model.id_to_piece(self.bos_id),
            "unk_token": self._model.id_to_piece(self._model.unk_id()),
        }
        self._begins = self.bos_id is not None and bool((config or {}).get("add_bos_token", False))
        converted = None if proto is None else to_tokenizer_json(proto, self.bos_id if self._begins else None)
        base = config or (_LLAMA_CONFIG if converted is None else DEFAULT_CONFIG)
        if converted is not None:
            # for LlamaTokenizer, transformers 5 builds other splitting rules than tokenizer.json has
            base = {**base, "tokenizer_class": DEFAULT_CONFIG["tokenizer_class"]}
        self.files = {"tokenizer.model": content, **config_files(base, special)}
        if converted is not None:
            self.files["tokenizer.json"] = converted

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """See Tokenizer."""
        return [self._model.encode(text, out_type=int) for text in texts]

    def _prompt(self, text: str) -> list[int]:
        if "tokenizer.json" in self.files:
            return list(self._converted.encode(text, add_special_tokens=True).ids)
        return [*([self.bos_id] if self._begins and self.bos_id is not None else []), *self.encode(text)]

    @cached_property
    def _converted(self) -> tokenizers.Tokenizer:
        """What transformers loads of this tokenizer, which recognises special tokens and adds them."""
        return tokenizers.Tokenizer.from_str(self.files["tokenizer.json"].decode())

    def decode(self, ids: Sequence[int]) -> str:
        """See Tokenizer."""
        return str(self._model.decode([int(i) for i in ids]))

    @cached_property
    def token_bytes(self) -> npt.NDArray[np.int64]:
        """See Tokenizer."""
        model = self._model
        return np.array(
            [
                0 if model.is_control(i) or model.is_unknown(i) else sentencepiece_byte_count(model.id_to_piece(i))
                for i in range(self.vocab_size)
            ],
            dtype=np.int64,
        )

    def _end(self, asked: str | None, where: str) -> int | None:
        if asked is None:
            return None
        index = int(self._model.eos_id() if asked == "auto" else self._model.piece_to_id(asked))
        if index < 0 or (index == self._model.unk_id() and asked != "auto"):
            what = "has no end-of-sequence piece" if asked == "auto" else f"has no piece {asked!r}"
            raise DataError(
                f"{where}: the model {what}. Set data.tokenizer.eos_token to one of its pieces, or to null to put "
                "nothing between documents."
            )
        return index

    def chunks(self, text: str, min_chars: int = CHUNK_CHARS) -> Iterator[str]:
        """See Tokenizer."""
        start = 0
        while self._cuttable and len(text) - start > min_chars:
            place = _CUT.search(text, start + min_chars)
            if place is None:
                break
            yield text[start : place.start()]
            start = place.end()
        yield text[start:] if start else text


def _proto(model: Any) -> Any:
    """The parsed model; None without protobuf, which only the checks and the conversion need."""
    try:
        from sentencepiece import sentencepiece_model_pb2  # noqa: PLC0415 - an extra
    except ImportError:
        return None
    proto = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    proto.ParseFromString(model.serialized_model_proto())
    return proto


def _survives_cuts(proto: Any) -> bool:
    """Whether the argument of the module's docstring holds for this model."""
    if proto.trainer_spec.model_type != _BPE or not is_plain(proto):
        return False
    return not any(_OVER_A_SPACE.search(piece.piece) for piece in proto.pieces)


def _load(content: bytes, where: str) -> Any:
    try:
        import sentencepiece  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise DataError(
            f"{where}: SentencePiece models need the sentencepiece library: pip install 'hlat[sentencepiece]'"
        ) from error
    try:
        model = sentencepiece.SentencePieceProcessor(model_proto=content)
        named = [model.id_to_piece(index) for index in [*range(len(model)), model.unk_id()]]  # text, all of them
    except Exception as error:  # RuntimeError, OSError, IndexError or UnicodeDecodeError, depending on what is wrong
        reason = " ".join(str(error).split())
        raise DataError(f"{where}: not a SentencePiece model: {reason}. Restore the file.") from error
    if max(model.bos_id(), model.eos_id()) >= len(named) - 1:
        raise DataError(f"{where}: not a SentencePiece model: it has fewer pieces than its own ids. Restore the file.")
    return model
