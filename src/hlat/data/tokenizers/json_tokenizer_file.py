"""The bytes of a tokenizer.json: parsed into a tokenizer of the ``tokenizers`` library, and read for what they say."""

import json
from collections.abc import Container
from typing import Any

import tokenizers

from hlat.runtime.errors import DataError

_MAX_IDS = 1 << 24  # sixty times the largest published vocabulary; a higher id means a damaged file


def parse_tokenizer_json(content: bytes, where: str) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """Parse a tokenizer.json.

    Args:
        content: bytes of the file.
        where: name of the file in errors.

    Returns:
        The library's tokenizer, and the parsed JSON.

    Raises:
        DataError: the content is not a tokenizer, has no tokens, or has ids above 2**24.
    """
    try:
        description = json.loads(content)
        if not isinstance(description, dict):
            raise TypeError(f"a JSON {type(description).__name__}, not an object")
        _check_merges(description.get("model"))
        tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        ids = tokenizer.get_vocab(with_added_tokens=True).values()
    except BaseException as error:  # the library raises plain Exception, and panics as BaseException
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, UnicodeDecodeError):
            reason = f"it is not text in UTF-8 at byte {error.start}, or cut off there"
        raise DataError(f"{where}: not a tokenizer.json: {reason}. Give a file that `tokenizers` saved.") from error
    if not ids:
        raise DataError(f"{where}: the tokenizer has no tokens. Give a file that `tokenizers` saved after training.")
    if max(ids) >= _MAX_IDS:
        raise DataError(
            f"{where}: a token has the id {max(ids):,}, and the highest id that hlat reads is {_MAX_IDS - 1:,}."
        )
    return tokenizer, description


def without_dropout(description: dict[str, Any]) -> dict[str, Any]:
    """Return a parsed tokenizer.json without the dropout of merges, by which training data is random."""
    model = description.get("model") or {}
    return description | {"model": model | {"dropout": None}} if model.get("dropout") else description


def with_special(description: dict[str, Any], names: Container[str]) -> dict[str, Any]:
    """Return a parsed tokenizer.json in which its added tokens of these names are special."""
    tokens = description.get("added_tokens") or []
    if all(token["special"] or token["content"] not in names for token in tokens):
        return description
    marked = [token | {"special": token["special"] or token["content"] in names} for token in tokens]
    return description | {"added_tokens": marked}


def keeps_text(description: dict[str, Any]) -> bool:
    """Return True if the tokens of any text spell its bytes: byte-level BPE with all bytes, which changes nothing."""
    model, decoder = description.get("model") or {}, json.dumps(description.get("decoder"))
    return bool(
        description.get("normalizer") is None
        and model.get("type") == "BPE"
        and not model.get("continuing_subword_prefix")
        and not model.get("end_of_word_suffix")
        and '"ByteLevel"' in decoder
        and '"Strip"' not in decoder
        and '"Replace"' not in decoder
        and set(tokenizers.pre_tokenizers.ByteLevel.alphabet()) <= set(model.get("vocab") or ())
        and not any(each["lstrip"] or each["rstrip"] for each in description.get("added_tokens") or ())
        and _only_splits(description.get("pre_tokenizer"))
    )


def _only_splits(pre_tokenizer: dict[str, Any] | None) -> bool:
    """Return True if a pre-tokenizer spells bytes, and neither adds nor removes any."""
    match pre_tokenizer:
        case {"type": "ByteLevel", "add_prefix_space": adds}:
            return not adds
        case {"type": "Sequence", "pretokenizers": steps}:
            return all(map(_only_splits, steps)) and any(step["type"] == "ByteLevel" for step in steps)
        case {"behavior": "Removed"}:
            return False
        case {"type": "Split" | "Punctuation" | "Digits" | "UnicodeScripts"}:
            return True
    return False


def _check_merges(model: Any) -> None:
    """Raise ValueError for a BPE model with merges that lack its ``continuing_subword_prefix``.

    For such a model the library ends the process: it removes the length of the prefix from the right half of each
    merge, in bytes, even where this cuts a character.
    """
    prefix = model.get("continuing_subword_prefix") if isinstance(model, dict) else None
    if not prefix or not isinstance(prefix, str):
        return
    for merge in model.get("merges") or []:
        right = (merge.split(" ") if isinstance(merge, str) else merge)[-1]
        if not str(right).startswith(prefix):
            raise ValueError(
                f"the right half of the merge {merge!r} does not begin with {prefix!r}, the continuing_subword_prefix"
            )
