"""Tokenizers: text to token ids and back, from tokenizer.json files, SentencePiece models, or trained on a corpus."""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.data.tokenizers.load import load_tokenizer as load_tokenizer

__getattr__ = lazily(__name__, {"load": "load_tokenizer"})  # scripts of users import it from here
