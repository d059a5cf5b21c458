"""SentencePiece models as tokenizers: an exported model has the ids of training.

    tokenizer.model --sentencepiece_convert.py--> tokenizer.json, which encodes here and in other libraries

It gives the ids of the sentencepiece library, proven for plain BPE models (Llama's), and compared on a few texts for
the others. These change texts by rules (nmt_nfkc), which the two libraries apply differently to rare characters, such
as half-width kana with a voicing mark. The library is installed with the extra ``sentencepiece`` and is imported only
here.

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
from collections.abc import Iterator
from typing import Any

import tokenizers

from hlat.data.tokenizers.base import CHUNK_CHARS, Tokenizer
from hlat.data.tokenizers.cutting import cut_text
from hlat.data.tokenizers.sentencepiece_convert import is_plain, parse_model, to_tokenizer_json
from hlat.data.tokenizers.tokenizer_files import DEFAULT_CONFIG
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
    """A SentencePiece model, run as the tokenizer.json that it is converted to.

    ``eos_token`` is the piece that ends a document; "auto" for the model's own; None for none. ``where`` names the file
    in errors. DataError if the content is no model, the library is missing, there is no such piece, or no conversion.
    """

    def __init__(
        self, content: bytes, config: dict[str, Any] | None = None, eos_token: str | None = "auto", where: str = ""
    ) -> None:
        where = where or "tokenizer.model"
        self._model = _load(content, where)
        parsed = parse_model(self._model.serialized_model_proto())
        bos_id = self._model.bos_id()
        begins = bool((config or {}).get("add_bos_token", False)) and bos_id >= 0
        try:
            converted = to_tokenizer_json(parsed, bos_id if begins else None)
            self._compare(converted)
        except ValueError as error:
            raise DataError(
                f"{where}: this SentencePiece model cannot be exported with the ids of training, because {error}. "
                "Train one with spm_train --model_type=bpe or unigram, its other defaults, give a tokenizer.json, or "
                "set data.tokenizer.path to null to train a tokenizer."
            ) from error
        names = {
            "bos_token": self._model.id_to_piece(bos_id) if bos_id >= 0 else None,
            "unk_token": self._model.id_to_piece(self._model.unk_id()),
        }
        super().__init__(converted, {**(config or DEFAULT_CONFIG), **names}, eos_token, where)
        is_bpe = parsed.model_type == _BPE and is_plain(parsed)
        self._can_cut = is_bpe and not any(_CROSSES_SPACE.search(each.piece) for each in parsed.pieces)
        self.files = {"tokenizer.model": content, **self.files}
        if not is_bpe:  # ids of other models are not those of the library alone
            self._more_identity = json.dumps(json.loads(converted) | {"post_processor": None}).encode()

    def _compare(self, converted: bytes) -> None:
        """Raise ValueError if a conversion has other ids than the model."""
        library = tokenizers.Tokenizer.from_str(converted.decode())
        library.encode_special_tokens = True
        encoded = library.encode_batch_fast(list(_COMPARED), add_special_tokens=False)
        for text, found in zip(_COMPARED, encoded, strict=True):
            if found.ids != self.encode_by_origin(text):
                raise ValueError(f"{text!r} gets other ids from its conversion")

    def encode_by_origin(self, text: str) -> list[int]:
        return list(self._model.encode(text, out_type=int))

    def _find_eos(self, chosen: str | None, vocabulary: dict[str, int]) -> str | None:
        if chosen == "auto" and self._model.eos_id() >= 0:
            chosen = self._model.id_to_piece(self._model.eos_id())
        return super()._find_eos(chosen, vocabulary)

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
