"""Values chosen for recipes that name a model and tokens only, and the planned MFU beside the former fixed defaults.

Eight presets on four kinds of devices, 20 tokens per parameter; a CPU is this machine, whose steps are not planned. The
former defaults are micro-batch 8 (or the largest that divides), no recomputation, ZeRO 1, with the same global batch.

    python benchmarks/chosen_defaults.py
"""

from results import Recorder

MODELS = (
    "tiny-125m",
    "gpt2-355m",
    "qwen3-0.6b",
    "llama-3.2-1b",
    "llama-3.2-3b",
    "qwen2.5-7b",
    "llama-3-8b",
    "llama-3-70b",
)
CLUSTERS = ("cpu", "1xh100:1", "p5.48xlarge:1", "trn2.48xlarge:1")
FORMER = {"batch.micro_batch": 8, "memory.activation_checkpointing": "none", "parallel.zero": 1}


def main():
    """Print a row for each model and device, and record how many fit with both."""
    from hlat.config import parse_recipe
    from hlat.hardware import load_catalog, parse_cluster
    from hlat.model import count_parameters
    from hlat.planner import predict_recipe, recipe_fit, resolve_defaults

    record = Recorder(__file__, "first-hour.md")
    print("| model | devices | batch | micro, recompute, ZeRO | rate | warm-up, save every | MFU, step | former |")
    print("|---|---|---|---|---|---|---|---|")
    fitting, former_fitting, gains = 0, 0, []
    for model in MODELS:
        for name in CLUSTERS:
            cluster = None if name == "cpu" else parse_cluster(name, load_catalog())
            content = {"run": {"dir": "none"}, "model": {"preset": model}, "data": {"path": "none"}}
            section = parse_recipe({**content, "training": {"steps": 1}}).model
            length = min(4096, section.max_sequence_length)
            content["data"]["sequence_length"] = length
            content["training"] = {"tokens": 20 * count_parameters(section).total}
            world = cluster.devices if cluster else 1
            chosen, _ = resolve_defaults(parse_recipe(content, world=world), world, cluster)
            cells = ["-", "-"]
            if cluster is not None:
                whole = chosen.batch.global_batch
                size = next(size for size in (8, 4, 2, 1) if whole % (size * world) == 0)
                former = chosen.having({**FORMER, "batch.micro_batch": size})
                fits, former_fits = (recipe_fit(each, cluster) for each in (chosen, former))
                steps, former_steps = (predict_recipe(each, cluster) for each in (chosen, former))
                fitting, former_fitting = fitting + fits.fits, former_fitting + former_fits.fits
                if fits.fits and former_fits.fits:
                    gains.append(steps.mfu / former_steps.mfu)
                cells = [
                    f"{step.mfu:.0%}, {step.step_seconds:.3g} s" if fit.fits else f"{fit.needed / 2**30:.0f} GiB: no"
                    for step, fit in ((steps, fits), (former_steps, former_fits))
                ]
            batch, memory = chosen.batch, chosen.memory.activation_checkpointing
            print(
                f"| {model} | {name} | {batch.global_batch} x {length} | {batch.micro_batch}, {memory}, "
                f"{chosen.parallel.zero} | {chosen.optimizer.lr:g} | {chosen.schedule.warmup_steps} of "
                f"{chosen.total_steps}, {chosen.checkpoint.every_steps} | {cells[0]} | {cells[1]} |",
                flush=True,
            )
    number = len(MODELS) * (len(CLUSTERS) - 1)
    print(
        f"\nfit: chosen {fitting}, former {former_fitting} of {number}; where both do, MFU x {min(gains):.2f} to",
        end="",
    )
    print(f" {max(gains):.2f}")
    what = f"of {number} models and devices on which a recipe without a layout fits, planned"
    record.add(f"number {what}", "1", fitting, peer="former fixed defaults", peer_values=former_fitting)
    record.add("smallest planned MFU over that of the former defaults, where both fit", "1", min(gains))
    record.write()


if __name__ == "__main__":
    main()
