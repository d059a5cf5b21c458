"""Prepared data on disk: open token shards, and check them against their manifest."""

from typing import TYPE_CHECKING

from hlat.runtime import lazily

if TYPE_CHECKING:
    from hlat.data.prepared.consistency import content_problems, manifest_problems, size_problems, tokenizer_problems
    from hlat.data.prepared.prepared_folder import (
        PreparedData,
        check_settings,
        check_token_ids,
        check_tokenizer,
        check_vocabulary,
        current_settings,
        open_prepared,
        setting_problems,
    )
    from hlat.data.prepared.shards import CHECKSUM_SUFFIX, BoundaryWriter, ShardWriter, TokenArray, token_dtype
    from hlat.data.prepared.summary import LengthStatistics, Summary, TextSample, summarize

__getattr__ = lazily(
    __name__,
    {
        "consistency": (
            "content_problems",
            "manifest_problems",
            "size_problems",
            "tokenizer_problems",
        ),
        "prepared_folder": (
            "PreparedData",
            "check_settings",
            "check_token_ids",
            "check_tokenizer",
            "check_vocabulary",
            "current_settings",
            "open_prepared",
            "setting_problems",
        ),
        "shards": (
            "BoundaryWriter",
            "CHECKSUM_SUFFIX",
            "ShardWriter",
            "TokenArray",
            "token_dtype",
        ),
        "summary": (
            "LengthStatistics",
            "Summary",
            "TextSample",
            "summarize",
        ),
    },
)

__all__ = [
    "CHECKSUM_SUFFIX",
    "BoundaryWriter",
    "LengthStatistics",
    "PreparedData",
    "ShardWriter",
    "Summary",
    "TextSample",
    "TokenArray",
    "check_settings",
    "check_token_ids",
    "check_tokenizer",
    "check_vocabulary",
    "content_problems",
    "current_settings",
    "manifest_problems",
    "open_prepared",
    "setting_problems",
    "size_problems",
    "summarize",
    "token_dtype",
    "tokenizer_problems",
]
