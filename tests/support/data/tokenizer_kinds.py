"""Small tokenizers of many kinds, as tests of their ids, losses and files need them."""

import io
import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from hlat.data.tokenizers.base import Tokenizer
from hlat.data.tokenizers.load import load_tokenizer

EOS = "<|endoftext|>"
TEXTS = (
    *(
        "Hello world",
        "  indented",
        "two  spaces",
        "a\n\tb",
        "line\r\nend",
        "The quick fox .",
        "don't 'say' so",
        "",
        " ",
    ),
    *("trailing  ", "ｆｕｌｌ ﬁ", "naïve É Straße", "東京 12345", "e\u0301 한국", "x<|endoftext|>y", "<s>a</s> <mask>"),
    *("<0x0A>", "a <sep>b<sep>", "\U0001f600", "def f(x):\n    return x ** 2", "(word) I'M 2024", "foo @ bar"),
)
_CORPUS = ["The quick brown fox jumps over the lazy dog. Some words are longer, some are 12345 numbers.\n"] * 40 + [
    f"Document {i}: some words, é 東京 {i * 13} (word) def f(x)." for i in range(60)
]
_TRAINER = {"show_progress": False}
_BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def spm(**options: Any) -> bytes:
    """Train a SentencePiece model with options of spm_train, and return it."""
    import sentencepiece  # noqa: PLC0415 - an extra

    model = io.BytesIO()
    given = {"vocab_size": 450 if options.get("byte_fallback") else 170, "minloglevel": 2, "num_threads": 1} | options
    if given.get("model_type") not in ("bpe", "char"):
        given["hard_vocab_limit"] = False
    lines = iter([text.strip() for text in _CORPUS])
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines, model_writer=model, **given)
    return model.getvalue()


def trained(model: Any, trainer: Any, **parts: Any) -> tokenizers.Tokenizer:
    """Train a tokenizer of these parts: normalizer, pre_tokenizer, decoder, post_processor."""
    tokenizer = tokenizers.Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


def byte_bpe(
    special: tuple[str, ...] = (EOS,),
    alphabet: bool = True,
    vocab: int = 400,
    dropout: float | None = None,
    **parts: Any,
) -> tokenizers.Tokenizer:
    """Train a byte-level BPE tokenizer."""
    defaults = {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=False), "decoder": decoders.ByteLevel()}
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=list(special), initial_alphabet=_BYTES if alphabet else [], **_TRAINER
    )
    tokenizer = trained(models.BPE(), trainer, **{**defaults, **parts})
    tokenizer.model.dropout = dropout
    return tokenizer


def word_pieces(**parts: Any) -> tokenizers.Tokenizer:
    """Train a WordPiece tokenizer as BERT's."""
    defaults = {
        "normalizer": normalizers.BertNormalizer(),
        "pre_tokenizer": pre_tokenizers.BertPreTokenizer(),
        "decoder": decoders.WordPiece(),
    }
    trainer = trainers.WordPieceTrainer(vocab_size=150, special_tokens=[EOS, "[UNK]"], **_TRAINER)
    return trained(models.WordPiece(unk_token="[UNK]"), trainer, **{**defaults, **parts})


def words(**parts: Any) -> tokenizers.Tokenizer:
    """Train a tokenizer of whole words."""
    trainer = trainers.WordLevelTrainer(vocab_size=40, special_tokens=[EOS, "[UNK]"], **_TRAINER)
    defaults = {"pre_tokenizer": pre_tokenizers.Whitespace()}
    return trained(models.WordLevel(unk_token="[UNK]"), trainer, **{**defaults, **parts})


def char_bpe(unk: str | None = "[UNK]", **parts: Any) -> tokenizers.Tokenizer:
    """Train a BPE tokenizer of characters with a suffix at the end of each word."""
    trainer = trainers.BpeTrainer(
        vocab_size=150, special_tokens=[EOS, *([unk] if unk else [])], end_of_word_suffix="</w>", **_TRAINER
    )
    defaults = {"pre_tokenizer": pre_tokenizers.BertPreTokenizer(), "decoder": decoders.BPEDecoder()}
    model = models.BPE(unk_token=unk, end_of_word_suffix="</w>")
    return trained(model, trainer, **{**defaults, **parts})


def unigram(**parts: Any) -> tokenizers.Tokenizer:
    """Train a unigram tokenizer of the ``tokenizers`` library."""
    trainer = trainers.UnigramTrainer(vocab_size=170, special_tokens=[EOS, "<unk>"], unk_token="<unk>", **_TRAINER)
    defaults = {"pre_tokenizer": pre_tokenizers.Metaspace(), "decoder": decoders.Metaspace()}
    return trained(models.Unigram(), trainer, **{**defaults, **parts})


def template(single: str) -> Any:
    """Build a post-processor such as ``<s> $A``; the begin token has id 1, the end token id 0."""
    return processors.TemplateProcessing(single=single, special_tokens=[("<s>", 1), (EOS, 0)])


def write_tokenizer(folder: Path, made: Any, config: dict[str, Any] | None = None) -> Path:
    """Write the files of a tokenizer as its user has them; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(made, bytes):
        (folder / "tokenizer.model").write_bytes(made)
    else:
        made.save(str(folder / "tokenizer.json"))
    named = {} if isinstance(made, bytes) else {"eos_token": EOS, "tokenizer_class": "PreTrainedTokenizerFast"}
    if config is not None or named:
        (folder / "tokenizer_config.json").write_text(json.dumps({**named, **(config or {})}))
    return folder


def load_made(folder: Path, made: Any, config: dict[str, Any] | None = None) -> Tokenizer:
    """Write the files of a tokenizer, and load it."""
    return load_tokenizer(write_tokenizer(folder, made, config))
