"""Byte-level BPE: its settings, and its training in this process."""

from collections.abc import Iterable, Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from hlat.data.tokenizers.safe_cuts import OWN_PATTERN

BYTES = 256


def build_bpe(texts: Iterable[str], vocab_size: int, special: Sequence[str], *, report: bool = False) -> bytes:
    """Train byte-level BPE and return its tokenizer.json. Nothing can interrupt it (``train_bpe_in_process``).

    Args:
        texts: texts to train on.
        vocab_size: total number of tokens.
        special: special tokens, which come first.
        report: print the progress to standard error, a JSON object per line, if this release of tokenizers can.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(OWN_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    if report and hasattr(trainer, "progress_format"):  # since tokenizers 0.23
        trainer.progress_format, trainer.show_progress = "json", True
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str(pretty=True).encode()
