"""Graphs of the later cases, compiled into the cache while the first steps run: one layer has the graph of all."""

from hlat.compilation import compile_graphs
from hlat.runtime.distributed.join import joined_run
from kit.child import Context, free_memory
from kit.shapes import case_recipe
from kit.training import quick_compiler

_WORDS = 1024  # the head would take 17 GB, and blocks do not depend on it


def run(context: Context, *cases: str) -> None:
    """Compile cases, in their order."""
    import torch

    for case in cases:
        with context.part(case), quick_compiler(context.device):
            changes = {} if context.tiny else {"overrides": {"model.vocab_size": _WORDS}}
            recipe = case_recipe(case, context.tiny, context.device, context.work, layers=1, **changes)
            run = recipe.run
            with joined_run(run.device, run.deterministic, None, run.compile_cache) as runtime:
                compile_graphs(recipe, runtime)
            torch.compiler.reset()
            free_memory()
            context.found({case: "compiled"})
