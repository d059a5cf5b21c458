"""SentencePiece models as tokenizers: an exported model has the ids of training.

    tokenizer.model --sentencepiece_convert.py--> tokenizer.json, which other libraries read
                    `--plain BPE model: the sentencepiece library encodes; else the tokenizer.json does

Both give the same ids, proven for plain BPE models (Llama's), and compared on a few texts for the others. These
change texts by rules (nmt_nfkc), which the two libraries apply differently to rare characters, such as half-width kana
with a voicing mark. So they are encoded by the file that is exported. The library is installed with the extra
``sentencepiece`` and is imported only here.

Long texts are cut at spaces where this does not change the tokens. A model that puts a space (spelled ▁) in front of a
text and changes nothing else (normalizer "identity") encodes ``A B`` as ``▁A▁B``. If no piece of its vocabulary has ▁
after an ASCII letter, no piece crosses such a space, so the best segmentation of ``A B`` is that of ``A`` followed by
that of ``B``. The text is cut there, and the space is dropped, because the model puts one in front of ``B``. With byte
fallback no unknown piece can join the two sides. All of this holds for BPE, whose merges are local. A unigram model
sums scores from the beginning of the text in float32, so near ties depend on the length of the text: its texts are not
cut.
"""

import json
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import tokenizers

from hlat.data.tokenizers.base import CHUNK_CHARS, TokenBytes, TokenIds, Tokenizer, cut_text, sentencepiece_byte_count
from hlat.data.tokenizers.sentencepiece_convert import is_plain, parse_model, to_tokenizer_json
from hlat.data.tokenizers.tokenizer_files import config_files, names_without_id, resolve_eos_token
from hlat.runtime.errors import DataError
from hlat.runtime.version import install_command

_BPE = 2  # value of trainer_spec.model_type
_CUT = re.compile(r"(?<=[A-Za-z]) (?=[A-Za-z])")
_TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")  # its lines: a token in base64, its rank
_CROSSES_SPACE = re.compile(r"[A-Za-z][▁ ]")
# Texts on which a conversion is compared with the library: letters, spaces of all kinds, wide forms, scripts.
_COMPARED = (
    "Hello world, it's 12345 words.",
    "  indented\n\tand  spaced \r\n",
    "ｆｕｌｌ ﬁ ½ ™ “quotes” …",
    "naïve ÉCOLE Straße Ждёт Ωmega",
    "東京は日本の首都です。한국어 中文",
    "def f(x):\n    return x**2  # \U0001f600",
    "",
    " ",
)


class SentencePieceTokenizer(Tokenizer):
    """A tokenizer that runs a SentencePiece model.

    ``eos_token`` is the piece that ends a document; "auto" for the model's own; None for none. ``where`` names the file
    in errors. The tokenizer of a run (``is_saved``) goes on although its model cannot be converted. DataError if the
    content is not a model, the library is missing, there is no such piece, or no conversion.
    """

    def __init__(
        self,
        content: bytes,
        config: dict[str, Any] | None = None,
        eos_token: str | None = "auto",
        where: str = "",
        is_saved: bool = False,
    ) -> None:
        where = where or "tokenizer.model"
        self._model = _load(content, where)
        self.vocab_size = len(self._model)
        parsed = parse_model(self._model.serialized_model_proto())
        self._is_plain = parsed.model_type == _BPE and is_plain(parsed)
        self._can_cut = self._is_plain and not any(_CROSSES_SPACE.search(each.piece) for each in parsed.pieces)
        self.eos_id = self._find_eos(resolve_eos_token(eos_token, config), where)
        self.eos_token = None if self.eos_id is None else self._model.id_to_piece(self.eos_id)
        self.bos_id = self._model.bos_id() if self._model.bos_id() >= 0 else None
        special = {
            "eos_token": self.eos_token,
            "bos_token": None if self.bos_id is None else self._model.id_to_piece(self.bos_id),
            "unk_token": self._model.id_to_piece(self._model.unk_id()),
        }
        self.unknown_id = self._model.unk_id()
        begins = bool((config or {}).get("add_bos_token", False))
        known = {each.piece for each in parsed.pieces}
        if names_without_id(config, known):
            self.left_out = ("tokens of its configuration that the model does not have",)
        self.files = {"tokenizer.model": content, **config_files(config, special, known)}
        try:
            self._use_conversion(to_tokenizer_json(parsed, self.bos_id if begins else None))
        except ValueError as error:
            self.not_exported = (
                f"{where}: this SentencePiece model cannot be exported with the ids of training, because {error}. "
                "Train one with spm_train --model_type=bpe or unigram, its other defaults, give a tokenizer.json, or "
                "set data.tokenizer.path to null to train a tokenizer."
            )
            if not is_saved:
                raise DataError(self.not_exported) from error

    def _use_conversion(self, converted: bytes) -> None:
        """Encode as the conversion does; ValueError if it has other ids than the model."""
        documents = tokenizers.Tokenizer.from_str(converted.decode())
        documents.encode_special_tokens = True
        encoded = documents.encode_batch_fast(list(_COMPARED), add_special_tokens=False)
        for text, found in zip(_COMPARED, encoded, strict=True):
            if found.ids != self._model.encode(text, out_type=int):
                raise ValueError(f"{text!r} gets other ids from its conversion")
        self.files["tokenizer.json"] = converted
        if not self._is_plain:
            reason = "SentencePiece itself encoded the text, now the tokenizer.json of the export does"
            self.ids_changed = reason, self.files["tokenizer.model"]
            self._more_identity = json.dumps(json.loads(converted) | {"post_processor": None}).encode()
        self._converted, self._documents = tokenizers.Tokenizer.from_str(converted.decode()), documents

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if self._is_plain or self._documents is None:
            return [self._model.encode(text, out_type=int) for text in texts]
        return [found.ids for found in self._documents.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode(self, text: str) -> list[int]:
        ids = super().encode(text)
        if self._documents is None:
            return ids
        found = self._documents.encode(text, add_special_tokens=False)
        return TokenIds(ids, text, [end for _, end in found.offsets])

    def encode_by_origin(self, text: str) -> list[int]:
        return list(self._model.encode(text, out_type=int))

    def _encode_prompt(self, text: str) -> list[int]:
        if self._converted is None:
            return self.encode(text)
        return list(self._converted.encode(text, add_special_tokens=True).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._model.decode([int(i) for i in ids]))

    def token_name(self, index: int) -> str:
        return str(self._model.id_to_piece(index))

    _converted: tokenizers.Tokenizer | None = None  # encodes prompts
    _documents: tokenizers.Tokenizer | None = None
    keeps_text = False  # even a plain model adds a space

    @cached_property
    def token_bytes(self) -> TokenBytes:
        model = self._model
        spelled = [
            0 if model.is_control(i) or model.is_unknown(i) else sentencepiece_byte_count(model.id_to_piece(i))
            for i in range(self.vocab_size)
        ]
        return np.array(spelled, dtype=np.int64).view(TokenBytes)

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
        # Without the space, which the model puts in front of the next chunk.
        return cut_text(text, min_chars, _CUT, dropped=1) if self._can_cut else iter((text,))


def _load(content: bytes, where: str) -> Any:
    """Load a model and read all its pieces; DataError if that fails."""
    try:
        import sentencepiece  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise DataError(
            f"{where}: SentencePiece models need the sentencepiece library: {install_command('sentencepiece')}"
        ) from error
    if _TIKTOKEN.match(content):
        raise DataError(
            f"{where}: this is the list of tokens of tiktoken (as in the folder `original` of Llama 3), not a "
            "SentencePiece model; how it splits a text is not in it. Give the tokenizer.json of the same model."
        )
    try:
        model = sentencepiece.SentencePieceProcessor(model_proto=content)
        # All of them: a damaged model may load and fail at a piece.
        pieces = [model.id_to_piece(index) for index in [*range(len(model)), model.unk_id()]]
    except Exception as error:  # RuntimeError, OSError, IndexError or UnicodeDecodeError, depending on the damage
        reason = " ".join(str(error).split())
        raise DataError(f"{where}: not a SentencePiece model: {reason}. Give a file that spm_train wrote.") from error
    if max(model.bos_id(), model.eos_id()) >= len(pieces) - 1:
        raise DataError(
            f"{where}: not a SentencePiece model: the id of its begin or end piece is not among its pieces. Restore "
            "the file."
        )
    return model
