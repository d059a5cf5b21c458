"""The files of a tokenizer: tokenizer.json, and the configuration files beside it that ``transformers`` reads.

    bytes of tokenizer.json --parse--> tokenizer of the ``tokenizers`` library, and what the file says of it
    tokenizer_config.json of the user --portable fields, names that are in the vocabulary--> of the saved tokenizer

With the saved files ``transformers.AutoTokenizer`` gives the ids of training. Many fields of published configurations
make transformers rebuild the tokenizer, or add tokens to it, so that its ids differ from those of its tokenizer.json.
They are left out.
"""

import json
from collections.abc import Collection, Container, Iterator
from typing import Any

import tokenizers

from hlat.data.tokenizers.cutting import QWEN2_PATTERN, split_pattern
from hlat.runtime.errors import DataError

_MAX_IDS = 1 << 24  # sixty times the largest published vocabulary; a higher id means a damaged file


def parse_tokenizer_json(content: bytes, where: str) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """Return the library's tokenizer and the parsed JSON; DataError if it is none, or has no or too high ids."""
    try:
        description = json.loads(content)
        if not isinstance(description, dict):
            raise TypeError(f"a JSON {type(description).__name__}, not an object")
        _check_merges(description.get("model"))  # before the library reads it, which would end the process
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


def keeps_text(tokenizer: tokenizers.Tokenizer, description: dict[str, Any], special: Collection[str]) -> bool:
    """Return True if the tokens of any text spell its bytes: byte-level BPE with all bytes, which changes nothing.

    Args:
        tokenizer: the library's tokenizer.
        description: its parsed tokenizer.json.
        special: names of its special tokens, which spell nothing; none of them may stand for text.
    """
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
        and not any(name in special for name in _made_of_text(model))
        and not (
            model.get("ignore_merges") and any(name in model["vocab"] and _is_word(name, tokenizer) for name in special)
        )
    )


# What is put around a name: a splitter may leave it whole beside some kinds of characters only.
_BESIDE = ("", " ", "a", "1", ".", "\n")


def _is_word(name: str, tokenizer: tokenizers.Tokenizer) -> bool:
    """Return True if the pre-tokenizer leaves a name whole, so that it is a token where merges are ignored."""
    text = tokenizers.decoders.ByteLevel().decode([name])
    texts = (f"{before}{text}{after}" for before in _BESIDE for after in _BESIDE)
    return any(word == name for each in texts for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(each))


def _made_of_text(model: dict[str, Any]) -> Iterator[str]:
    """Yield the entries of a BPE vocabulary that stand for text: single characters, and what merges give.

    Special tokens are often entries, too, that no merge gives.
    """
    yield from (entry for entry in model["vocab"] if len(entry) == 1)
    for merge in model.get("merges") or ():
        yield merge.replace(" ", "", 1) if isinstance(merge, str) else "".join(merge)


def _only_splits(pre_tokenizer: dict[str, Any] | None) -> bool:
    """Return True if a pre-tokenizer spells bytes, and neither adds nor removes any."""
    match pre_tokenizer:
        case {"type": "ByteLevel", "add_prefix_space": adds}:
            return not adds
        case {"type": "Sequence", "pretokenizers": steps}:
            return all(map(_only_splits, steps)) and any(step["type"] == "ByteLevel" for step in steps)
        case {"behavior": "Removed"}:
            return False
        case {"type": "Split" | "Punctuation" | "Digits"}:  # not UnicodeScripts, which loses spaces at the beginning
            return True
    return False


def _check_merges(model: Any) -> None:
    """Raise ValueError for a BPE model with merges that lack its ``continuing_subword_prefix``."""
    # The library removes the length of the prefix from the right half of each merge, in bytes. Where this cuts a
    # character, it ends the process.
    prefix = model.get("continuing_subword_prefix") if isinstance(model, dict) else None
    if not prefix or not isinstance(prefix, str):
        return
    for merge in model.get("merges") or []:
        right = (merge.split(" ") if isinstance(merge, str) else merge)[-1]
        if not str(right).startswith(prefix):
            raise ValueError(
                f"the right half of the merge {merge!r} does not begin with {prefix!r}, the continuing_subword_prefix"
            )


DEFAULT_CONFIG: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "clean_up_tokenization_spaces": False,
    "model_max_length": 10**30,  # value that transformers writes for "no limit"; the model's limit is in its own config
}
# Classes of models build a tokenizer of their own from the vocabulary; this one loads tokenizer.json as it is. Cleaning
# up removes spaces of the decoded text that training had. Decoder-only models take no token_type_ids.
_REQUIRED_FIELDS = {
    "tokenizer_class": DEFAULT_CONFIG["tokenizer_class"],
    "clean_up_tokenization_spaces": False,
    "model_input_names": ["input_ids", "attention_mask"],
}
_FIELDS_THAT_CHANGE_IDS = frozenset(
    (
        *("add_eos_token", "add_prefix_space", "added_tokens_decoder", "auto_map", "backend", "fix_mistral_regex"),
        *("from_slow", "legacy", "merges_file", "sp_model_kwargs", "split_special_tokens", "tokenizer_file"),
        *("use_fast", "vocab_file"),
    )
)
_TOKEN_LISTS = ("additional_special_tokens", "extra_special_tokens")


def config_files(
    config: dict[str, Any] | None, special: dict[str, str | None], vocabulary: Container[str]
) -> dict[str, bytes]:
    """Build tokenizer_config.json and special_tokens_map.json for ``transformers``; return content by name.

    ``special`` are the special tokens in use, by field. Tokens outside ``vocabulary`` are left out: transformers gives
    them ids beyond the embedding.
    """
    kept = {key: value for key, value in (config or DEFAULT_CONFIG).items() if key not in _FIELDS_THAT_CHANGE_IDS}
    for key in [key for key, value in kept.items() if any(name not in vocabulary for name in _token_names(key, value))]:
        if isinstance(kept[key], dict) and key in _TOKEN_LISTS:  # transformers 4 calls each token by its field
            fields = kept[key].items()
            kept[key] = {
                field: name for field, name in fields if any(n in vocabulary for n in _token_names("_token", name))
            }
        elif key in _TOKEN_LISTS:
            kept[key] = [name for name in _token_names(key, kept[key]) if name in vocabulary]
        else:
            del kept[key]
    named = {key: name for key, name in special.items() if name is not None}
    return {
        "tokenizer_config.json": _json({**kept, **_REQUIRED_FIELDS, **special}),
        "special_tokens_map.json": _json(named),
    }


def is_like_qwen2(content: bytes) -> bool:
    """Return True if transformers loads a tokenizer.json as it is for a model of type qwen2."""
    description = json.loads(content)
    # For models of type qwen2 alone transformers 5 ignores ``tokenizer_class`` and makes a tokenizer of Qwen2 of the
    # vocabulary and merges, which splits text in its own way.
    splits_alike = split_pattern(description.get("pre_tokenizer")) == QWEN2_PATTERN
    return splits_alike and bool(description.get("normalizer") == {"type": "NFC"})


def special_names(config: dict[str, Any] | None) -> list[str]:
    """List the names of all special tokens that a tokenizer_config.json gives."""
    return list(dict.fromkeys(name for key, value in (config or {}).items() for name in _token_names(key, value)))


def names_without_id(config: dict[str, Any] | None, vocabulary: Container[str]) -> list[str]:
    """List the tokens that a tokenizer_config.json names and the vocabulary does not have."""
    decoder = (config or {}).get("added_tokens_decoder")
    added = _token_names(_TOKEN_LISTS[0], decoder) if isinstance(decoder, dict) else ()
    return [name for name in dict.fromkeys([*special_names(config), *added]) if name not in vocabulary]


def resolve_eos_token(requested: str | None, config: dict[str, Any] | None) -> str | None:
    """Return the end-of-sequence token; for "auto", the one that tokenizer_config.json names, if any."""
    if requested == "auto" and config is not None and "eos_token" in config:
        return special_token_name(config, "eos_token")
    return requested


def special_token_name(config: dict[str, Any] | None, key: str) -> str | None:
    """Return the name of a special token of tokenizer_config.json; DataError if it is not text."""
    value = (config or {}).get(key)
    name = value.get("content", value) if isinstance(value, dict) else value  # given as a string or as an object
    if name is not None and not isinstance(name, str):
        raise DataError(f"tokenizer_config.json: {key} is {value!r}, expected the text of a token.")
    return name


def _token_names(key: str, value: Any) -> Iterator[str]:
    """Yield the names of tokens in a field of the configuration; of other fields none."""
    if key in _TOKEN_LISTS and isinstance(value, list | dict):
        values = list(value.values() if isinstance(value, dict) else value)
    else:
        values = [value] if key.endswith("_token") else []
    for each in values:
        name = each.get("content") if isinstance(each, dict) else each
        if isinstance(name, str):
            yield name


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
