"""Data: sources -> documents -> tokens -> shards -> samples addressed by a global index.

    stores      local files and object stores: atomic writes, a cache, retries
    tokenizers  text <-> token ids
    documents   content of a document, and the split that it belongs to
    formats     files -> rows -> documents
    source_file, source_listing, corpus_files   paths, globs and URLs -> a sorted list of files with fingerprints
    prepared    a folder of token shards and its manifest: open it and check it
    prepare     documents -> token shards and a manifest, by worker processes, resumable, on one machine or several
    samples     global sample index -> source -> row -> tokens, a pure function
    online      documents -> samples while training, by separate processes

The names of a door (an ``__init__.py``) are resolved on first use. So a worker process that only tokenizes
(data/prepare/worker.py) starts without importing torch, which would take longer than tokenizing a small corpus.
"""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.data.corpus_files import list_files as list_files
    from hlat.data.formats.base import WHOLE_FILE as WHOLE_FILE
    from hlat.data.formats.rows import InputFile as InputFile
    from hlat.data.formats.rows import Row as Row
    from hlat.data.input_check import InputReport as InputReport
    from hlat.data.input_check import check_inputs as check_inputs
    from hlat.data.online.loader import OnlineData as OnlineData
    from hlat.data.online.loader import OnlineLoader as OnlineLoader
    from hlat.data.online.loader import StreamProgress as StreamProgress
    from hlat.data.prepare.corpus import ProgressCallback as ProgressCallback
    from hlat.data.prepare.partitions import find_partition_folders as find_partition_folders
    from hlat.data.prepare.partitions import merge_partition_folders as merge_partition_folders
    from hlat.data.prepare.partitions import partition_folder as partition_folder
    from hlat.data.prepare.partitions import prepare_partition as prepare_partition
    from hlat.data.prepare.partitions import train_tokenizer as train_tokenizer
    from hlat.data.prepare.verification import verify_and_seal as verify_and_seal
    from hlat.data.prepare.verification import verify_data as verify_data
    from hlat.data.prepare_for import open_validation_sets as open_validation_sets
    from hlat.data.prepare_for import prepare_recipe_data as prepare_recipe_data
    from hlat.data.prepare_for import prepare_validation_sets as prepare_validation_sets
    from hlat.data.prepared.manifest import MANIFEST_FILE as MANIFEST_FILE
    from hlat.data.prepared.manifest import read_data_manifest as read_data_manifest
    from hlat.data.prepared.prepared_folder import PreparedData as PreparedData
    from hlat.data.prepared.prepared_folder import check_tokenizer as check_tokenizer
    from hlat.data.prepared.prepared_folder import check_vocabulary as check_vocabulary
    from hlat.data.prepared.prepared_folder import open_prepared as open_prepared
    from hlat.data.prepared.summary import LengthStatistics as LengthStatistics
    from hlat.data.prepared.summary import Summary as Summary
    from hlat.data.prepared.summary import TextSample as TextSample
    from hlat.data.prepared.summary import summarize as summarize
    from hlat.data.samples.order import Mixture as Mixture
    from hlat.data.samples.order import is_weighted as is_weighted
    from hlat.data.samples.order import phase_weights as phase_weights
    from hlat.data.samples.training_data import Batch as Batch
    from hlat.data.samples.training_data import TrainingData as TrainingData
    from hlat.data.samples.training_data import ValidationData as ValidationData
    from hlat.data.source_file import SourceFile as SourceFile
    from hlat.data.tokenizers.base import Tokenizer as Tokenizer
    from hlat.data.tokenizers.load import check_export as check_export
    from hlat.data.tokenizers.load import load_tokenizer as load_tokenizer
    from hlat.data.tokenizers.load import vocabulary_texts as vocabulary_texts
    from hlat.data.tokenizers.tokenizer_files import is_like_qwen2 as is_like_qwen2
    from hlat.data.tokenizers.training import train_bpe as train_bpe

__getattr__ = lazily(
    __name__,
    {
        "corpus_files": "list_files",
        "formats.base": "WHOLE_FILE",
        "formats.rows": "InputFile Row",
        "input_check": "InputReport check_inputs",
        "online.loader": "OnlineData OnlineLoader StreamProgress",
        "prepare.corpus": "ProgressCallback",
        "prepare.partitions": (
            "find_partition_folders merge_partition_folders partition_folder prepare_partition train_tokenizer"
        ),
        "prepare.verification": "verify_and_seal verify_data",
        "prepare_for": "open_validation_sets prepare_recipe_data prepare_validation_sets",
        "prepared.manifest": "MANIFEST_FILE read_data_manifest",
        "prepared.prepared_folder": "PreparedData check_tokenizer check_vocabulary open_prepared",
        "prepared.summary": "LengthStatistics Summary TextSample summarize",
        "samples.order": "Mixture is_weighted phase_weights",
        "samples.training_data": "Batch TrainingData ValidationData",
        "source_file": "SourceFile",
        "tokenizers.base": "Tokenizer",
        "tokenizers.load": "check_export load_tokenizer vocabulary_texts",
        "tokenizers.tokenizer_files": "is_like_qwen2",
        "tokenizers.training": "train_bpe",
    },
)
