"""The data section of a recipe. One sentence per field: this file is the manual."""

from typing import Annotated, Literal

from pydantic import Field

from hlat.config.sections.base import Amount, Bytes, Gibibytes, OwnName, Positive, PositiveLength, Section, Share, fixed
from hlat.runtime.urls import redact


class SourceConfig(Section):
    """One source of documents, where a recipe names several."""

    path: str
    """File, folder, glob or URL (s3://, gs://, https://) of parquet, arrow, jsonl, CSV, TSV or text files (the last
    four also .gz or .zst), a Hugging Face dataset saved in a folder, or Megatron-LM's .bin with its .idx."""
    text_column: str | None = None
    """Column or key that holds the text; null means data.text_column."""
    tokens_column: str | None = None
    """Column or key of lists of token ids, made with data.tokenizer.path, instead of text; null means the data's."""
    name: str | None = None
    """Name of the source in weights, manifests and reports; null means its path."""
    weight: float | None = fixed(None, ge=0)
    """Share of the training tokens, relative to the other sources' weights; null in all of them mixes by size."""
    repeat: float = fixed(1.0, gt=0)
    """Without weights, how often the source counts in an epoch: 2 for twice, 0.5 for another half of it each epoch."""
    max_tokens: Positive | None = fixed(None)
    """Only so many tokens of the source are used, the first ones; null means all."""
    max_epochs: float | None = Field(None, gt=0)
    """With weights, at most so many passes over the source: a run that needs more is refused before it starts."""

    @property
    def label(self) -> str:
        """Name of the source: its own, or else its path."""
        return self.name if self.name is not None else redact(self.path)


class PhaseConfig(Section):
    """A part of the run with weights of its own."""

    until_tokens: Amount | None = fixed(None, gt=0)
    """Training tokens, counted from the start of the run, at which the phase ends; null in the last phase."""
    weights: dict[str, Annotated[float, Field(ge=0)]] = fixed(min_length=1)
    """Share of the tokens by name of the source; sources that are not named have none."""


class TokenizerConfig(Section):
    """The tokenizer: one that exists, or one to be trained on the corpus."""

    path: str | None = None
    """tokenizer.json, SentencePiece .model, or a folder that holds one of them; or the id of a model of the Hugging
    Face Hub, as in Qwen/Qwen3-8B, with @REVISION to pin it; null trains one on the corpus."""
    train: Literal["bpe", "char"] = "bpe"
    """Kind of tokenizer to train if no path is given: byte-level BPE, or one token per character of the corpus."""
    vocab_size: PositiveLength = 8192
    """Vocabulary of a BPE tokenizer to train, special tokens included; model.vocab_size if the recipe gives none."""
    train_bytes: Bytes = 100_000_000
    """At most so many bytes of text, evenly spread over the corpus, are used to train the tokenizer."""
    eos_token: str | None = "auto"
    """Token put after each document; auto takes the tokenizer's own, null puts none."""


class ValidationSplitConfig(Section):
    """Text kept aside from training."""

    fraction: Share = Field(0.01, ge=0, lt=1)
    """Share of the corpus kept aside; 0 for none."""
    by: Literal["auto", "document", "tail"] = "auto"
    """document sets whole documents aside, chosen by hash; tail takes the last characters or tokens of every source;
    auto takes documents, and the tail of each source of which the hash would choose (nearly) none."""
    path: str | None = None
    """A source of its own for validation instead of a share of the corpus."""


class DataConfig(Section):
    """Sources of text, and their way to samples."""

    mode: Literal["prepared", "online"] = fixed("prepared")
    """prepared tokenizes everything into memory-mapped shards before training; online tokenizes while training."""
    path: str | None = None
    """The corpus: file, folder, glob or URL (s3://, gs://, https://) of parquet, arrow, jsonl, CSV, TSV or text files
    (the last four also .gz or .zst), a Hugging Face dataset saved in a folder, or Megatron-LM's .bin with its .idx."""
    sources: tuple[SourceConfig, ...] = ()
    """Several sources instead of one path, mixed by weights; without weights they are one corpus, in this order."""
    phases: tuple[PhaseConfig, ...] = ()
    """Weights that change in the course of the run, one phase after the other; instead of the sources' own weights."""
    text_column: str = "text"
    """Column or key that holds the text."""
    tokens_column: str | None = None
    """Column or key of lists of token ids, made with data.tokenizer.path, such as input_ids; null for a corpus of text,
    or of datasets of Megatron-LM."""
    formats: tuple[OwnName, ...] = ()
    """File formats of your own (package.module:Class, or an entry point of hlat.formats), each for its endings."""
    sequence_length: PositiveLength = fixed(1024)
    """Tokens per sample."""
    packing: Literal["concat", "best-fit"] = fixed("concat")
    """concat joins documents and cuts them at the sequence length; best-fit keeps those whole that fit, and pads."""
    isolate: bool = fixed(False)
    """Intra-document (block-diagonal) attention: attention and labels stay within a document, positions start at 0."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """The tokenizer."""
    validation: ValidationSplitConfig = ValidationSplitConfig()
    """Text kept aside from training."""
    shuffle: bool = fixed(True)
    """Visit samples in a seeded permutation, another one each epoch; false keeps the order of the corpus."""
    prepared_dir: str | None = None
    """Folder of the prepared token shards; null means <run.dir>/data."""
    shard_tokens: Positive = 100_000_000
    """Tokens per shard file."""
    workers: Positive | None = None
    """Processes that tokenize; null means one per core, or online one per rank. The result is always the same."""
    streams: Positive = fixed(256)
    """Online, streams that documents are assigned to; a multiple of every data-parallel degree that will be used."""
    duplicates: Literal["keep", "drop"] = "keep"
    """Exact copies of a document: kept and counted, or dropped but for the first."""
    unreadable_rows: Share = Field(0.0, ge=0, lt=1)
    """Share of the rows that may be unreadable: they are left out and listed; with more the work stops."""
    cache_dir: str | None = None
    """Folder of downloaded files; null means <prepared_dir>/cache."""
    cache_gib: Gibibytes = 64.0
    """GiB of disk that files of URLs may take; those not needed any more go first."""
