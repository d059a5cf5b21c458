"""Credentials in URLs are found and redacted, however they are written; all other text is kept."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hlat.runtime.errors import DataError
from hlat.runtime.urls import find_secret, redact, redact_json, redact_value

WITH_SECRET = [
    ("https://me:S3CR3T@host/a.jsonl", "https://...@host/a.jsonl", "a password"),
    ("https://S3CR3T@host/a.jsonl", "https://...@host/a.jsonl", "a user name or a token"),
    ("https://u%3AS3CR3T@host/a", "https://...@host/a", "a password"),
    ("https://u%3AS3CR3T%40host/a", "https://...@host/a", "a password"),
    ("https://u%253AS3CR3T%2540host/a", "https://...@host/a", "a password"),
    ("https://u:pa/S3CR3T@host/a", "https://...@", "a password"),
    ("https://host/a?k=S3CR3T", "https://host/a?...", "a query"),
    ("https://host/a?S3CR3T", "https://host/a?...", "a query"),
    ("https://host/a?X-Amz-Signature=S3CR3T&x=1", "https://host/a?...", "X-Amz-Signature"),
    ("https://host/a?a=1;Signature=S3CR3T", "https://host/a?...", "Signature"),
    ("https://host/a;jsessionid=S3CR3T", "https://host/a;...", "jsessionid"),
    ("https://host/a?download=true&k=S3CR3T", "https://host/a?...", "a query"),
    ("https://host/a?download=S3CR3T", "https://host/a?...", "a query"),
    ("https://host/a#access_token=S3CR3T", "https://host/a#...", "a fragment"),
    ("HTTPS://S3CR3T@host/a", "HTTPS://...@host/a", "a user name or a token"),
    ("s3://key:S3CR3T@bucket/a", "s3://...@bucket/a", "a password"),
    ("s3://bucket/a?AWSAccessKeyId=S3CR3T", "s3://bucket/a?...", "AWSAccessKeyId"),
    ("s3://bucket/a#token=S3CR3T", "s3://bucket/a#...", "a fragment"),
    ("abfs://container:S3CR3T@account.net/a", "abfs://...@account.net/a", "a password"),
    ("simplecache::https://S3CR3T@host/a", "simplecache::https://...@host/a", "a user name"),
    ("zip://a.csv::https://S3CR3T@host/a", "zip://a.csv::https://...@host/a", "a user name"),
    ("runs/https://S3CR3T@host/a", "runs/https://...@host/a", "a user name"),
]  # fmt: skip

WITHOUT_SECRET = [
    "corpus.txt",
    "/data/a@b/c?.txt",
    "https://host/npm/pkg@1.0/x.jsonl",
    "https://host:8080/x",
    "https://[::1]:80/x",
    "https://host/x?download=true",
    "https://host/x?dl=1&raw",
    "https://bucket.s3.amazonaws.com/x?versionId=3HL4kqtJlcpXroDTDmJ",
    "s3://bucket/part-?.jsonl",
    "s3://bucket/year=202?/month=*/x.parquet",
    "s3://bucket/C#/x.jsonl",
    "s3://bucket/x?versionId=abc",
    "gs://bucket/x#1712345678901234",
    "hf://datasets/user/set@main/x.parquet",
    "abfs://container@account.dfs.core.windows.net/x",
    "memory://corpus",
]


@pytest.mark.parametrize(("url", "shown", "secret"), WITH_SECRET)
def test_credentials_are_found_and_redacted(url: str, shown: str, secret: str) -> None:
    found = find_secret(url)
    assert found is not None and secret in found and "S3CR3T" not in found
    assert redact_value(url) == shown
    assert redact(f"reading {url}, again: ('{url}')") == f"reading {shown}, again: ('{shown}')"
    assert str(DataError(f"{url}: gone")) == f"{shown}: gone"
    assert redact_json({"a": [url, 1, None]}) == {"a": [shown, 1, None]}


@pytest.mark.parametrize("url", WITHOUT_SECRET)
def test_urls_without_credentials_are_kept(url: str) -> None:
    assert find_secret(url) is None
    assert redact_value(url) == url
    assert redact(f"reading {url}, again: ({url})") == f"reading {url}, again: ({url})"


def test_the_sentence_after_a_url_is_kept() -> None:
    text = "https://host/a?...: permission denied. Grant the right to read it."
    assert redact_json(text) == redact(text) == text


def test_a_url_extends_to_the_end_of_a_value() -> None:
    """A blank or a quote ends a URL in a sentence, but not in a value."""
    assert redact_value("https://host/a?k='S3 CR3T") == "https://host/a?..."


@given(st.text("ab:/?#@%40;=&.' \n", max_size=60))
def test_values_without_a_secret_are_unchanged_and_redaction_is_stable(text: str) -> None:
    """``find_secret`` and ``redact`` agree: a value without a secret is unchanged, and redacted text has no secret."""
    url = f"https://{text}"
    shown = redact_value(url)
    if find_secret(url) is None and ":/" not in text:  # a path collapsed to one slash is redacted too
        assert shown == url
    assert redact(redact(url)) == redact(url)
