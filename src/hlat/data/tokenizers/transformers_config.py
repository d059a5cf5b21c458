"""Configuration files next to a tokenizer.json, with which ``transformers.AutoTokenizer`` gives the ids of training.

    tokenizer_config.json of the user --portable fields, names that are in the vocabulary--> of the saved tokenizer

Many fields of published configurations make transformers rebuild the tokenizer, or add tokens to it, so that its ids
differ from those of its tokenizer.json, which are the ids of training. They are left out.
"""

import json
from collections.abc import Container, Iterator
from typing import Any

from hlat.data.tokenizers.safe_cuts import QWEN2_PATTERN
from hlat.runtime.errors import DataError

DEFAULT_CONFIG: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "clean_up_tokenization_spaces": False,
    "model_max_length": 10**30,  # value that transformers writes for "no limit"; the model's limit is in its own config
}
# Classes of models build a tokenizer of their own from the vocabulary; this one loads tokenizer.json as it is. Cleaning
# up removes spaces of the decoded text that training had. Decoder-only models take no token_type_ids.
_REQUIRED = {
    "tokenizer_class": DEFAULT_CONFIG["tokenizer_class"],
    "clean_up_tokenization_spaces": False,
    "model_input_names": ["input_ids", "attention_mask"],
}
_CHANGE_IDS = frozenset(
    (
        *("add_eos_token", "add_prefix_space", "added_tokens_decoder", "auto_map", "backend", "fix_mistral_regex"),
        *("from_slow", "legacy", "merges_file", "sp_model_kwargs", "split_special_tokens", "tokenizer_file"),
        *("use_fast", "vocab_file"),
    )
)
_LISTS = ("additional_special_tokens", "extra_special_tokens")


def config_files(
    config: dict[str, Any] | None, special: dict[str, str | None], vocabulary: Container[str]
) -> dict[str, bytes]:
    """Build tokenizer_config.json and special_tokens_map.json for ``transformers``; return their content by name.

    Args:
        config: the tokenizer_config.json that came with the tokenizer, if any.
        special: names of special tokens in use, by field; None for one that there is not.
        vocabulary: the names of all tokens. Others are left out: transformers gives them ids beyond the embedding.
    """
    kept = {key: value for key, value in (config or DEFAULT_CONFIG).items() if key not in _CHANGE_IDS}
    for key in [key for key, value in kept.items() if any(name not in vocabulary for name in _names(key, value))]:
        if isinstance(kept[key], dict) and key in _LISTS:  # transformers 4 calls each token by its field
            fields = kept[key].items()
            kept[key] = {field: name for field, name in fields if any(n in vocabulary for n in _names("_token", name))}
        elif key in _LISTS:
            kept[key] = [name for name in _names(key, kept[key]) if name in vocabulary]
        else:
            del kept[key]
    named = {key: name for key, name in special.items() if name is not None}
    return {
        "tokenizer_config.json": _json({**kept, **_REQUIRED, **special}),
        "special_tokens_map.json": _json(named),
    }


def is_like_qwen2(content: bytes) -> bool:
    """Return True if transformers loads a tokenizer.json as it is for a model of type qwen2.

    For these models alone transformers 5 ignores ``tokenizer_class`` and makes a tokenizer of Qwen2 of the vocabulary
    and merges, which splits text in its own way.
    """
    description = json.loads(content)
    match description.get("pre_tokenizer"):
        case {
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ]
        }:
            return bool(pattern == QWEN2_PATTERN and description.get("normalizer") == {"type": "NFC"})
    return False


def special_names(config: dict[str, Any] | None) -> list[str]:
    """List the names of all special tokens that a tokenizer_config.json gives."""
    return list(dict.fromkeys(name for key, value in (config or {}).items() for name in _names(key, value)))


def names_without_id(config: dict[str, Any] | None, vocabulary: Container[str]) -> list[str]:
    """List the tokens that a tokenizer_config.json names and the vocabulary does not have."""
    decoder = (config or {}).get("added_tokens_decoder")
    added = _names(_LISTS[0], decoder) if isinstance(decoder, dict) else ()
    return [name for name in dict.fromkeys([*special_names(config), *added]) if name not in vocabulary]


def resolve_eos_token(requested: str | None, config: dict[str, Any] | None) -> str | None:
    """Return the requested end-of-sequence token; replace "auto" by the one that tokenizer_config.json names, if any.

    Raises:
        DataError: tokenizer_config.json does not give the token as text.
    """
    if requested == "auto" and config is not None and "eos_token" in config:
        return special_token_name(config, "eos_token")
    return requested


def special_token_name(config: dict[str, Any] | None, key: str) -> str | None:
    """Return the name of a special token of tokenizer_config.json, given there as a string or as an object.

    Raises:
        DataError: it is not text.
    """
    value = (config or {}).get(key)
    name = value.get("content", value) if isinstance(value, dict) else value
    if name is not None and not isinstance(name, str):
        raise DataError(f"tokenizer_config.json: {key} is {value!r}, expected the text of a token.")
    return name


def _names(key: str, value: Any) -> Iterator[str]:
    """Yield the names of tokens in a field of the configuration; of other fields none."""
    if key in _LISTS and isinstance(value, list | dict):
        each_of = value.values() if isinstance(value, dict) else value
        values = list(each_of)
    else:
        values = [value] if key.endswith("_token") else []
    for each in values:
        name = each.get("content") if isinstance(each, dict) else each
        if isinstance(name, str):
            yield name


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
