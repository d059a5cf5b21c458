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
    from hlat.data.corpus_files import *
    from hlat.data.formats.base import *
    from hlat.data.formats.registry import *
    from hlat.data.formats.rows import *
    from hlat.data.input_check import *
    from hlat.data.online.loader import *
    from hlat.data.online.prepare import *
    from hlat.data.prepare.corpus import *
    from hlat.data.prepare.partitions import *
    from hlat.data.prepare.verification import *
    from hlat.data.prepared.manifest import *
    from hlat.data.prepared.prepared_folder import *
    from hlat.data.prepared.summary import *
    from hlat.data.samples.order import *
    from hlat.data.samples.stages import *
    from hlat.data.samples.training_data import *
    from hlat.data.source_file import *
    from hlat.data.source_listing import *
    from hlat.data.tokenizers.base import *
    from hlat.data.tokenizers.load import *
    from hlat.data.tokenizers.tokenizer_files import *
    from hlat.data.tokenizers.training import *

__getattr__ = lazily(
    __name__,
    {
        "corpus_files": "file_ending is_read list_files",
        "source_listing": "find_files",
        "formats.base": "WHOLE_FILE",
        "formats.registry": "own_format",
        "formats.rows": "InputFile Row",
        "input_check": "InputReport check_inputs with_first_tokenizer",
        "online.loader": "OnlineData OnlineLoader StreamProgress",
        "online.prepare": "check_first_stage open_validation_sets prepare_recipe_data prepare_validation_sets",
        "prepare.corpus": "ProgressCallback",
        "prepare.partitions": (
            "find_partition_folders merge_partition_folders partition_folder prepare_partition train_tokenizer"
        ),
        "prepare.verification": "verify_data",
        "prepared.manifest": "MANIFEST_FILE read_data_manifest",
        "prepared.prepared_folder": "PreparedData check_tokenizer check_vocabulary open_prepared",
        "prepared.summary": "LengthStatistics Summary TextSample summarize",
        "samples.order": "Mixture is_weighted phase_weights",
        "samples.stages": "readings same_texts text_problem",
        "samples.training_data": "Batch TrainingData ValidationData",
        "source_file": "SourceFile",
        "tokenizers.base": "Tokenizer",
        "tokenizers.load": "check_export load_tokenizer vocabulary_texts",
        "tokenizers.tokenizer_files": "is_like_qwen2",
        "tokenizers.training": "train_bpe",
    },
)
