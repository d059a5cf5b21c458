"""SentencePiece models as tokenizers, encoded by the sentencepiece library, so that the ids are the library's ids.

The library is installed with the extra ``sentencepiece`` and is imported only here.

Long texts are cut at spaces where this does not change the tokens. A model that puts a space (spelled ▁) in front of a
text and changes nothing else (normalizer "identity") encodes ``A B`` as ``▁A▁B``. If no piece of its vocabulary has ▁
after an ASCII letter, no piece crosses such a space, so the best segmentation of ``A B`` is that of ``A`` followed by
that of ``B``. The text is cut there, and the space is dropped, because the model puts one in front of ``B``. With byte
fallback no unknown piece can join the two sides. All of this holds for BPE, whose merges are local. A unigram model
sums scores from the beginning of the text in float32, so near ties depend on the length of the text: its texts are not
cut.
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

# For models that are not converted to a tokenizer.json: transformers reads the .model. Training documents have no
# begin-of-sequence token, so none is added.
_LLAMA_CONFIG: dict[str, Any] = {
    **DEFAULT_CONFIG,
    "tokenizer_class": "LlamaTokenizer",
    "legacy": False,
    "add_bos_token": False,
    "add_eos_token": False,
}
_BPE = 2  # value of trainer_spec.model_type
_CUT = re.compile(r"(?<=[A-Za-z]) (?=[A-Za-z])")
_CROSSES_SPACE = re.compile(r"[A-Za-z][▁ ]")


class SentencePieceTokenizer(Tokenizer):
    """A tokenizer that runs a SentencePiece model.

    Args:
        content: the bytes of the .model file.
        config: the tokenizer_config.json that came with it, if any.
        eos_token: name of the piece that ends a document; "auto" for the model's own; None for none.
        where: name of the file in errors.

    Raises:
        DataError: the content is not a model, the library is missing, or the model has no such piece.
    """

    def __init__(
        self, content: bytes, config: dict[str, Any] | None = None, eos_token: str | None = "auto", where: str = ""
    ) -> None:
        self._model = _load(content, where or "tokenizer.model")
        self.vocab_size = len(self._model)
        proto = _proto(self._model)
        self._can_cut = proto is not None and _cuts_preserve_tokens(proto)
        self.eos_id = self._find_eos(resolve_eos_token(eos_token, config), where)
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
            # not LlamaTokenizer: transformers 5 gives that class other splitting rules than those of tokenizer.json
            base = {**base, "tokenizer_class": DEFAULT_CONFIG["tokenizer_class"]}
        self.files = {"tokenizer.model": content, **config_files(base, special)}
        if converted is not None:
            self.files["tokenizer.json"] = converted

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode each text; see ``Tokenizer.encode_batch``."""
        return [self._model.encode(text, out_type=int) for text in texts]

    def _encode_prompt(self, text: str) -> list[int]:
        if "tokenizer.json" in self.files:
            return list(self._converted.encode(text, add_special_tokens=True).ids)
        return [*([self.bos_id] if self._begins and self.bos_id is not None else []), *self.encode(text)]

    @cached_property
    def _converted(self) -> tokenizers.Tokenizer:
        """The tokenizer that transformers loads, which recognises special tokens and adds them."""
        return tokenizers.Tokenizer.from_str(self.files["tokenizer.json"].decode())

    def decode(self, ids: Sequence[int]) -> str:
        """Decode tokens to text; see ``Tokenizer.decode``."""
        return str(self._model.decode([int(i) for i in ids]))

    def token_name(self, index: int) -> str:
        """Return the name of a token; see ``Tokenizer.token_name``."""
        return str(self._model.id_to_piece(index))

    @cached_property
    def token_bytes(self) -> npt.NDArray[np.int64]:
        """UTF-8 bytes of text per token; see ``Tokenizer.token_bytes``."""
        model = self._model
        return np.array(
            [
                0 if model.is_control(i) or model.is_unknown(i) else sentencepiece_byte_count(model.id_to_piece(i))
                for i in range(self.vocab_size)
            ],
            dtype=np.int64,
        )

    def _find_eos(self, requested: str | None, where: str) -> int | None:
        if requested is None:
            return None
        index = int(self._model.eos_id() if requested == "auto" else self._model.piece_to_id(requested))
        if index < 0 or (index == self._model.unk_id() and requested != "auto"):
            problem = "has no end-of-sequence piece" if requested == "auto" else f"has no piece {requested!r}"
            raise DataError(
                f"{where}: the model {problem}. Set data.tokenizer.eos_token to one of its pieces, or to null for no "
                "token between documents."
            )
        return index

    def chunks(self, text: str, min_chars: int = CHUNK_CHARS) -> Iterator[str]:
        """Cut a text into chunks without changing its tokens; see ``Tokenizer.chunks``."""
        start = 0
        while self._can_cut and len(text) - start > min_chars:
            cut = _CUT.search(text, start + min_chars)
            if cut is None:
                break
            yield text[start : cut.start()]
            start = cut.end()
        yield text[start:] if start else text


def _proto(model: Any) -> Any:
    """Return the parsed model; None if protobuf is not installed, which only the cuts and the conversion need."""
    try:
        from sentencepiece import sentencepiece_model_pb2  # noqa: PLC0415 - an extra
    except ImportError:
        return None
    proto = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    proto.ParseFromString(model.serialized_model_proto())
    return proto


def _cuts_preserve_tokens(proto: Any) -> bool:
    """Return True if the argument in the module's docstring holds for this model."""
    if proto.trainer_spec.model_type != _BPE or not is_plain(proto):
        return False
    return not any(_CROSSES_SPACE.search(piece.piece) for piece in proto.pieces)


def _load(content: bytes, where: str) -> Any:
    """Load a model and read all its pieces; raise DataError if that fails."""
    try:
        import sentencepiece  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise DataError(
            f"{where}: SentencePiece models need the sentencepiece library: pip install 'hlat[sentencepiece]'"
        ) from error
    try:
        model = sentencepiece.SentencePieceProcessor(model_proto=content)
        pieces = [model.id_to_piece(index) for index in [*range(len(model)), model.unk_id()]]
    except Exception as error:  # RuntimeError, OSError, IndexError or UnicodeDecodeError, depending on the damage
        reason = " ".join(str(error).split())
        raise DataError(f"{where}: not a SentencePiece model: {reason}. Restore the file.") from error
    if max(model.bos_id(), model.eos_id()) >= len(pieces) - 1:
        raise DataError(
            f"{where}: not a SentencePiece model: the id of its begin or end piece is not among its pieces. Restore "
            "the file."
        )
    return model
