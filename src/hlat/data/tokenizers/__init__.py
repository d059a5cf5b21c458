"""Tokenizers: text to token ids and back, from tokenizer.json files, SentencePiece models, or trained on a corpus."""

from typing import TYPE_CHECKING

from hlat.runtime import lazily

if TYPE_CHECKING:
    from hlat.data.tokenizers.base import TokenIdArray, Tokenizer
    from hlat.data.tokenizers.load import load_saved, load_tokenizer
    from hlat.data.tokenizers.round_trip import check_export, describe_tokenizer, vocabulary_texts
    from hlat.data.tokenizers.training import sample_texts, train_bpe, train_char
    from hlat.data.tokenizers.transformers_config import is_like_qwen2

__getattr__ = lazily(
    __name__,
    {
        "base": (
            "TokenIdArray",
            "Tokenizer",
        ),
        "load": (
            "load_saved",
            "load_tokenizer",
        ),
        "round_trip": ("check_export", "describe_tokenizer", "vocabulary_texts"),
        "training": (
            "sample_texts",
            "train_bpe",
            "train_char",
        ),
        "transformers_config": ("is_like_qwen2",),
    },
)

__all__ = [
    "TokenIdArray",
    "Tokenizer",
    "check_export",
    "describe_tokenizer",
    "is_like_qwen2",
    "load_saved",
    "load_tokenizer",
    "sample_texts",
    "train_bpe",
    "train_char",
    "vocabulary_texts",
]
