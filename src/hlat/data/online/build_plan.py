"""The data section and what has been set up -> the plan of a rank's tokenizing processes."""

from pathlib import Path

from hlat.config.sections import DataConfig
from hlat.data.manifest import SourceRecord
from hlat.data.online.stream import RowSettings
from hlat.data.online.stream_assignment import StreamAssignment
from hlat.data.online.worker_protocol import FileIdentity, SourcePlan, WorkerPlan
from hlat.data.prepared import PreparedData
from hlat.data.samples import is_weighted, phase_weights
from hlat.data.sources import cache_location
from hlat.runtime import DataError, is_url
from hlat.runtime.randomness import stream_key


def build_worker_plan(
    prepared: PreparedData, config: DataConfig, seed: int, assignment: StreamAssignment
) -> WorkerPlan:
    """Everything that decides which tokens form which sample, and what of it a rank takes.

    Raises:
        DataError: a file is gone, or another one; or a phase has no sample of its own.
    """
    manifest = prepared.manifest
    assert manifest.blocks is not None, "set up for mode online"
    weighted = is_weighted(config)
    phases: list[tuple[list[int], int | None]] = [([1], None)]
    if weighted:
        phases = [(list(one.weights), one.stop) for one in phase_weights(config)]
    counts = manifest.blocks.counts
    folder, limit = cache_location(config, prepared.dir)
    return WorkerPlan(
        block_file=str(prepared.dir / manifest.blocks.file),
        files=[_now(source) for source in manifest.sources],
        indexes=[None if source.index is None else _now(source.index) for source in manifest.sources],
        cache=(str(folder), limit),
        tokenizer=str(prepared.tokenizer_dir),
        vocab_size=manifest.vocab_size,
        settings=RowSettings(config.sequence_length, config.packing, config.isolate, manifest.eos_id),
        shuffle=config.shuffle,
        validation_below=manifest.blocks.below,
        unreadable_share=config.unreadable_rows,
        sources=_weighted(config, counts, seed) if weighted else [_one(config, counts, seed)],
        phases=phases,
        assignment=assignment,
        streams=[],
        first=0,
    )


def _now(source: SourceRecord) -> FileIdentity:
    """A file as the file system says it is now: while training nobody may change it, between runs it may be moved."""
    column = str(source.content[1])
    if is_url(source.path):
        return source.path, column, source.bytes, source.mtime_ns, source.etag
    try:
        stat = Path(source.path).stat()
    except OSError as error:
        raise DataError(f"{source.path}: cannot be read: {error.strerror}") from error
    if stat.st_size != source.bytes:
        raise DataError(
            f"{source.path}: has {stat.st_size:,} bytes, had {source.bytes:,} when this data was set up. Restore the "
            "file, or begin a new run with another run.dir."
        )
    return source.path, column, stat.st_size, stat.st_mtime_ns, ""


def _weighted(config: DataConfig, counts: list[int], seed: int) -> list[SourcePlan]:
    firsts = [sum(counts[:index]) for index in range(len(counts))]
    return [
        SourcePlan(source.label, first, [count], [1.0], stream_key(seed, "source", index))
        for index, (source, first, count) in enumerate(zip(config.sources, firsts, counts, strict=True))
    ]


def _one(config: DataConfig, counts: list[int], seed: int) -> SourcePlan:
    repeats = [source.repeat for source in config.sources] or [1.0]
    return SourcePlan("the corpus", 0, counts, repeats, seed)
