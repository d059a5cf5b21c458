"""``hlat compile`` on the stand-in: a run that starts afterwards finds every graph and every operator's shape compiled.

The compiler of the stand-in keeps a file per graph, so that hits are counted by files and not by time.
"""

import re
from pathlib import Path
from typing import Any

from hlat.config import load_recipe
from tests.accelerators.conftest import Runs
from tests.support.neuron.running import hlat_on_neuron, on_neuron

COMPILED = ("run.compile=auto", "run.device=neuron", "training.steps=2", "schedule.warmup_steps=0")


def compiles(runs: Runs, cache: Path, *more: str) -> Any:
    """``hlat compile`` of the recipe that the runs have."""
    words = ["compile", *runs.words("never", *COMPILED, f"run.compile_cache={cache}")[1:], *more]
    return hlat_on_neuron(*words)


def not_cached(runs: Runs, name: str, cache: Path, *more: str, ranks: int = 1) -> list[tuple[int, int]]:
    """Train with a cache: graphs of each rank, and those that were not in the cache."""
    options = ("--nproc", str(ranks)) if ranks > 1 else ()
    runs.on_neuron(name, *options, *COMPILED, f"run.compile_cache={cache}", "evaluation.every_steps=1", *more)
    last = [runs.counts(name, rank)[-1] for rank in range(ranks)]
    assert all(len(runs.counts(name, rank)) == 2 for rank in range(ranks))
    return [(step["graphs"], step["not cached"]) for step in last]


def test_a_run_finds_its_graphs_also_elsewhere_and_another_width_does_not(runs: Runs, tmp_path: Path) -> None:
    cache, elsewhere, archive = tmp_path / "cache", tmp_path / "elsewhere", tmp_path / "code.tar"
    done = compiles(runs, cache, "--nproc", "2", "--to", str(archive))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "for each of 2 processes on neuron" in done.stdout
    assert {folder.name for folder in cache.iterdir()} == {"rank-0", "rank-1"}, "a folder of its own for each rank"
    assert {folder.name for folder in (cache / "rank-1").iterdir()} >= {"neff"}
    for rank, (graphs, missed) in enumerate(not_cached(runs, "warm", cache, ranks=2)):
        assert graphs >= 2 and missed == 0, ("training and validation", rank, graphs, missed)
    done = compiles(runs, elsewhere, "--unpack", str(archive))
    assert done.returncode == 0 and f"unpacked {archive}" in done.stdout, done.stderr
    assert [missed for _, missed in not_cached(runs, "elsewhere", elsewhere, ranks=2)] == [0, 0]
    wider = not_cached(runs, "wider", elsewhere, "model.intermediate_size=192", ranks=2)
    assert all(missed == graphs for graphs, missed in wider), wider


def test_a_step_after_compiling_meets_no_new_shape(runs: Runs, tmp_path: Path) -> None:
    """On a device that compiles single operators, the first step computes nothing that was not computed before."""
    words = runs.words("shapes", *COMPILED, "precision.mode=fp32")[1:]
    shapes, graphs = on_neuron(count_shapes, words, str(tmp_path), str(tmp_path))[0]
    assert shapes == 0 and graphs == 0


def count_shapes(words: list[str], cache: str, folder: str) -> tuple[int, int]:
    """Compile, then train in this process: new shapes of the steps, and graphs that were not cached."""
    from hlat.compilation import compile_graphs  # noqa: PLC0415
    from hlat.runtime.distributed.join import joined_run  # noqa: PLC0415
    from hlat.training import loop, run  # noqa: PLC0415
    from tests.support.neuron import compiling, device_module  # noqa: PLC0415

    recipe = load_recipe(words[0], [*words[1:], f"run.compile_cache={cache}", f"run.dir={folder}/run"], world=1)
    with joined_run("neuron", True, None, cache) as runtime:
        compile_graphs(recipe, runtime)
    missed, found = compiling.NOT_CACHED[0], []
    plain = loop._training_step

    def counted(state: Any, prefetcher: Any) -> Any:
        device_module.counts()
        result = plain(state, prefetcher)
        found.append(device_module.counts()["shapes"])
        return result

    loop._training_step = counted
    run(recipe)
    assert len(found) == 2
    return sum(found), compiling.NOT_CACHED[0] - missed


def test_a_recipe_that_compiles_nothing_is_refused(runs: Runs, tmp_path: Path) -> None:
    words = runs.words("never", "run.compile=none", f"run.compile_cache={tmp_path / 'cache'}")[1:]
    done = hlat_on_neuron("compile", *words, "--to", str(tmp_path / "code.tar"))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert re.search(r"nothing to compile.*run\.compile=none.*set run\.compile=blocks", done.stderr, re.S), done.stderr
    assert not (tmp_path / "code.tar").exists()
