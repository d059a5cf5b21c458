"""The worker plan: recipe and prepared data -> everything the tokenizing processes of a rank need."""

from pathlib import Path

from hlat.config import DataConfig
from hlat.data.manifest.manifest import SourceRecord
from hlat.data.online.stream import RowSettings
from hlat.data.online.stream_assignment import StreamAssignment
from hlat.data.online.worker_protocol import FileIdentity, SourcePlan, WorkerPlan
from hlat.data.prepared.prepared_folder import PreparedData
from hlat.data.samples.weights import is_weighted, phase_weights
from hlat.data.sources.file_list import cache_location
from hlat.runtime.errors import DataError
from hlat.runtime.randomness.rng_keys import stream_key
from hlat.runtime.urls import is_url


def build_worker_plan(
    prepared: PreparedData, config: DataConfig, seed: int, assignment: StreamAssignment
) -> WorkerPlan:
    """Return the plan for a rank's workers: everything that decides which tokens form which sample.

    Args:
        prepared: the result of ``prepare_online``.
        config: the data section.
        seed: seed of the order.
        assignment: samples and streams of the rank.

    Raises:
        DataError: a file is missing or has changed; or a phase has no sample of its own.
    """
    manifest = prepared.manifest
    assert manifest.blocks is not None, "prepared for mode online"
    weighted = is_weighted(config)
    phases: list[tuple[list[int], int | None]] = [([1], None)]
    if weighted:
        phases = [(list(phase.weights), phase.stop) for phase in phase_weights(config)]
    counts = manifest.blocks.counts
    folder, limit = cache_location(config, prepared.dir)
    return WorkerPlan(
        block_file=str(prepared.dir / manifest.blocks.file),
        files=[_current_identity(source) for source in manifest.sources],
        indexes=[None if source.index is None else _current_identity(source.index) for source in manifest.sources],
        cache=(str(folder), limit),
        tokenizer=str(prepared.tokenizer_dir),
        vocab_size=manifest.vocab_size,
        settings=RowSettings(config.sequence_length, config.packing, config.isolate, manifest.eos_id),
        shuffle=config.shuffle,
        validation_below=manifest.blocks.below,
        unreadable_share=config.unreadable_rows,
        sources=_weighted_sources(config, counts, seed) if weighted else [_joined_source(config, counts, seed)],
        phases=phases,
        assignment=assignment,
        streams=[],
        first=0,
        records=[str(folder) for folder in prepared.record_folders or [prepared.dir]],
        fingerprint=prepared.fingerprint,
    )


def _current_identity(source: SourceRecord) -> FileIdentity:
    """Return the identity of a file as the file system reports it now.

    A file may be moved or touched between runs, but must not change during training.
    """
    kind = source.format.name, source.column
    if is_url(source.path):
        return source.path, *kind, source.bytes, source.mtime_ns, source.etag
    try:
        stat = Path(source.path).stat()
    except OSError as error:
        raise DataError(f"{source.path}: cannot be read: {error.strerror}") from error
    if stat.st_size != source.bytes:
        raise DataError(
            f"{source.path}: has {stat.st_size:,} bytes, had {source.bytes:,} when this data was prepared. Restore the "
            "file, or start a new run with another run.dir."
        )
    return source.path, *kind, stat.st_size, stat.st_mtime_ns, ""


def _weighted_sources(config: DataConfig, counts: list[int], seed: int) -> list[SourcePlan]:
    """Return a plan per source, for sources mixed by weights."""
    firsts = [sum(counts[:index]) for index in range(len(counts))]
    return [
        SourcePlan(source.label, first, [count], [1.0], stream_key(seed, "source", index))
        for index, (source, first, count) in enumerate(zip(config.sources, firsts, counts, strict=True))
    ]


def _joined_source(config: DataConfig, counts: list[int], seed: int) -> SourcePlan:
    """Return the plan of all sources joined, for sources without weights."""
    repeats = [source.repeat for source in config.sources] or [1.0]
    return SourcePlan("the corpus", 0, counts, repeats, seed)
