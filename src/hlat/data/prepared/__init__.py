"""Prepared data on disk: token shards, opened and checked against their manifest."""

from typing import TYPE_CHECKING

from hlat.runtime import lazily

if TYPE_CHECKING:
    from hlat.data.prepared.consistency import content_problems, contradictions, size_problems, tokenizer_problems
    from hlat.data.prepared.prepared_folder import (
        Prepared,
        check_tokenizer,
        check_vocabulary,
        open_prepared,
        refuse_other_settings,
        refuse_unknown,
        setting_problems,
        settings_beside,
    )
    from hlat.data.prepared.shards import CHECKSUM, DocumentWriter, ShardWriter, TokenArray, token_dtype
    from hlat.data.prepared.summary import Lengths, Summary, TextSample, summarize

__getattr__ = lazily(
    __name__,
    {
        "consistency": (
            "content_problems",
            "contradictions",
            "size_problems",
            "tokenizer_problems",
        ),
        "prepared_folder": (
            "Prepared",
            "check_tokenizer",
            "check_vocabulary",
            "open_prepared",
            "refuse_other_settings",
            "refuse_unknown",
            "setting_problems",
            "settings_beside",
        ),
        "shards": (
            "CHECKSUM",
            "DocumentWriter",
            "ShardWriter",
            "TokenArray",
            "token_dtype",
        ),
        "summary": (
            "Lengths",
            "Summary",
            "TextSample",
            "summarize",
        ),
    },
)

__all__ = [
    "CHECKSUM",
    "DocumentWriter",
    "Lengths",
    "Prepared",
    "ShardWriter",
    "Summary",
    "TextSample",
    "TokenArray",
    "check_tokenizer",
    "check_vocabulary",
    "content_problems",
    "contradictions",
    "open_prepared",
    "refuse_other_settings",
    "refuse_unknown",
    "setting_problems",
    "settings_beside",
    "size_problems",
    "summarize",
    "token_dtype",
    "tokenizer_problems",
]
