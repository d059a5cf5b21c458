"""The bytes of a tokenizer.json -> a tokenizer of the ``tokenizers`` library, or an error that says what is wrong."""

import json
from typing import Any

import tokenizers

from hlat.runtime import DataError

_MOST_IDS = 1 << 24  # sixty times the largest published vocabulary; an id above it is damage, not a token


def parse_tokenizer_json(content: bytes, where: str) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """The tokenizer of the library, and the description as parsed JSON.

    Args:
        content: of the file.
        where: what to call it in errors.

    Raises:
        DataError: not a tokenizer, one without tokens, or one with ids that none has.
    """
    try:
        description = json.loads(content)
        if not isinstance(description, dict):
            raise TypeError(f"a JSON {type(description).__name__}, not an object")
        _refuse_odd_merges(description.get("model"))
        tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        ids = tokenizer.get_vocab(with_added_tokens=True).values()
    except BaseException as error:  # the library raises plain Exception, and panics as BaseException
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{where}: not a tokenizer.json: {reason}. Give a file that `tokenizers` saved.") from error
    if not ids:
        raise DataError(f"{where}: the tokenizer has no tokens. Give a file that `tokenizers` saved after training.")
    if max(ids) >= _MOST_IDS:
        raise DataError(f"{where}: a token has the id {max(ids):,}, and ids below {_MOST_IDS:,} are read.")
    return tokenizer, description


def _refuse_odd_merges(model: Any) -> None:
    """Raise ValueError for a BPE model at which the library ends the process: its merges lack the prefix of pieces.

    It takes as many bytes off the right part of each merge as the prefix has characters, wherever these bytes end.
    """
    prefix = model.get("continuing_subword_prefix") if isinstance(model, dict) else None
    if not prefix or not isinstance(prefix, str):
        return
    for merge in model.get("merges") or []:
        right = (merge.split(" ") if isinstance(merge, str) else merge)[-1]
        if not str(right).startswith(prefix):
            raise ValueError(f"the merge {merge!r} does not go on with {prefix!r}, its continuing_subword_prefix")
