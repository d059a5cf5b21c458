"""After ``hlat compile`` a run on a CPU finds every graph in torch's caches: counted by torch itself."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hlat.compilation import graphs
from hlat.config import Recipe
from hlat.optim import rate_at
from hlat.runtime.distributed.host_collectives import HostGroup
from hlat.runtime.errors import LaunchError
from tests.support.commands import hlat
from tests.support.training.staged import staged

COUNTERS = "HLAT_TEST_COUNTERS"


def count() -> None:
    """Let the command write torch's counters and the number of libraries that it has built, at the end of training."""
    from hlat.training import loop  # noqa: PLC0415

    plain = loop._train

    def counted(*arguments: Any) -> Any:
        result = plain(*arguments)
        from torch._dynamo.utils import counters  # noqa: PLC0415

        found = {key: dict(counters[key]) for key in ("inductor", "aot_autograd", "stats")}
        Path(os.environ[COUNTERS]).write_text(json.dumps(found))
        return result

    loop._train = counted


def trained(words: list[str], folder: Path, cache: Path, *more: str) -> tuple[int, int, int]:
    """Train and validate: graphs, hits and misses of torch's cache of compiled graphs."""
    counters = folder / "counters.json"
    done = hlat(
        *("train", *words, f"run.dir={folder}", f"run.compile_cache={cache}", *more),
        env={**os.environ, COUNTERS: str(counters)},
        prepare=count,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads(counters.read_text())
    inductor = found["inductor"]
    return (
        found["stats"]["unique_graphs"],
        inductor.get("fxgraph_cache_hit", 0),
        inductor.get("fxgraph_cache_miss", 0) + inductor.get("fxgraph_cache_bypass", 0),
    )


def libraries(cache: Path) -> set[Path]:
    return {path.relative_to(cache) for path in cache.rglob("*.so")}


@pytest.mark.slow  # inductor compiles two models in C++: three minutes of CPU
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++ on a CPU")
def test_a_run_on_a_cpu_finds_its_graphs_also_elsewhere_and_another_width_does_not(
    recipe_file: Path, corpus: Path, tmp_path: Path
) -> None:
    words = [str(recipe_file), f"data.path={corpus}", "run.compile=blocks", "run.device=cpu", "training.steps=2"]
    words += ["model.layers=1", "evaluation.every_steps=1", f"data.prepared_dir={tmp_path / 'data'}"]
    words += ["schedule.warmup_steps=0", "tracking.tensorboard=false", "memory.activation_checkpointing=full"]
    cache, elsewhere, archive = tmp_path / "cache", tmp_path / "elsewhere", tmp_path / "code.tar"
    done = hlat("compile", *words, f"run.compile_cache={cache}", "--to", archive)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (tmp_path / "run").exists()
    for name, folder in (("here", cache), ("there", elsewhere)):
        if folder is elsewhere:
            unpacked = hlat("compile", *words, f"run.compile_cache={folder}", "--unpack", archive)
            assert unpacked.returncode == 0, unpacked.stderr
        built = libraries(folder)
        assert built
        graphs, hits, misses = trained(words, tmp_path / name, folder)
        assert graphs >= 2 and hits >= 3, "a forward and a backward pass of training, and one of validation"
        assert misses == 0 and libraries(folder) == built, "nothing is compiled"
    _, _, misses = trained(words, tmp_path / "wider", elsewhere, "model.intermediate_size=128", "training.steps=1")
    assert misses >= 3


def test_each_stage_of_a_run_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its rows and its layout; what torch makes of one is counted above."""
    compiled = list[Recipe]()
    monkeypatch.setattr(graphs, "_compile", lambda recipe, runtime: compiled.append(recipe))
    runtime: Any = SimpleNamespace(ranks=HostGroup(), device=torch.device("cpu"), world=1)
    recipe = staged(world=2, run={"compile": "blocks", "device": "cpu"})
    graphs.compile_graphs(recipe, runtime)
    assert [each.data.sequence_length for each in compiled] == [32, 32, 128]
    assert all(rate_at(each, 1) > 0 for each in compiled), "any step can be computed"
    with pytest.raises(LaunchError, match="nothing to compile"):
        graphs.compile_graphs(staged(world=2, run={"compile": "none", "device": "cpu"}), runtime)
