"""Published runs of different size and tokens, as observations for a law of loss.

    FOLDER with clones of public repositories --published--> {name: runs}

Nothing of these repositories is copied here: clone them next to each other, and name the folder.

    git clone https://github.com/epoch-research/analyzing-chinchilla      Hoffmann et al. 2022, read from a plot
    git clone https://github.com/Open-Athena/scaling-law-analysis         Llama 3, Marin, and Li et al. 2025, collected
    git clone https://github.com/mlfoundations/scaling                    Gadre et al. 2024
    git clone https://github.com/allenai/OLMo-ladder                      Bhagia et al. 2024
    git clone https://github.com/mcleish7/gemstone-scaling-laws           McLeish et al. 2025
"""

import csv
import json
from collections import defaultdict
from dataclasses import dataclass

LEAST_TOKENS = 2.0  # per parameter: with fewer, no one trains a language model


@dataclass(frozen=True)
class PublishedRun:
    sizes: dict[str, float]  # by kind; those that are published
    tokens: float
    loss: float
    trunk: str = ""


def _rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def chinchilla(folder):
    rows = _rows(folder / "analyzing-chinchilla/data/svg_extracted_data.csv")
    for row in rows:
        size, flops = float(row["Model Size"]), float(row["Training FLOP"])
        yield PublishedRun({"total": size}, flops / 6 / size, float(row["loss"]))


def isoflops(folder):
    found = defaultdict(list)
    for row in _rows(folder / "scaling-law-analysis/data/isoflops/transform/isoflops.csv"):
        name = {"llama_3__raw_loss": "llama 3", "misfitting__fineweb_c4__transformer": "misfitting"}.get(
            row["experiment"], row["experiment"].removeprefix("marin_202603__").removesuffix("__llama_2")
        )
        if row["source"] == "marin_202603":
            name = f"marin {name}"
        found[name].append(PublishedRun({"total": float(row["params"])}, float(row["tokens"]), float(row["loss"])))
    return {name: found[name] for name in found if not name.startswith(("epochai", "ml_", "llama_3"))}


def gadre(folder, text):
    for path in sorted((folder / "scaling/exp_data/models").glob(f"{text}-*.json")):
        run = json.loads(path.read_text())
        setting = run["hyperparameters"]
        loss = next(one["loss"] for one in run["results"] if "/c4_val/" in one["val_data"][0])
        sizes = {"total": setting["params"], "non_embedding": setting["params_no_embed"]}
        yield PublishedRun({kind: float(size) for kind, size in sizes.items()}, float(setting["tokens"]), loss)


OLMO = {"190M": (190354176, 768, 1903391232), "370M": (371262464, 1024, 3443922944),
        "760M": (758220288, 1536, 6373843968), "1B": (1279395840, 2048, 10109071360),
        "3B": (3169537280, 3328, 22970355200), "peteish7_eval_anneal": (6887575552, 4096, 49412071424),
        "peteish13_eval_final": (13202396160, 5120, 91335915520)}  # fmt: skip
"""Parameters without the embedding and with the head, width, FLOPs of training per token."""
OLMO_VOCABULARY = 100352


def olmo(folder):
    column = "eval/c4_en-validation/CrossEntropyLoss"
    for path in sorted((folder / "OLMo-ladder/src/scripts/paper/data/ladder-runs").glob("*.csv")):
        name = path.stem if path.stem in OLMO else path.stem.partition("-")[0]
        if name not in OLMO or path.stem.endswith("-1xC"):  # those were run again, with the loss written more often
            continue
        last = [row for row in _rows(path) if row[column]][-1]
        size, width, flops = OLMO[name]
        sizes = {
            "total": size + OLMO_VOCABULARY * width,
            "non_embedding": size - OLMO_VOCABULARY * width,
            "flops": flops / 6,
        }
        tokens = last.get("throughput/total_tokens") or int(last["_step"]) * int(last["batch_size_in_tokens"])
        yield PublishedRun({kind: float(value) for kind, value in sizes.items()}, float(tokens), float(last[column]))


def gemstones(folder):
    path = folder / "gemstone-scaling-laws/wandb_dfs/wandb_df_for_fitting_cool_end.jsonl"
    for row in map(json.loads, path.read_text().splitlines()):
        total = float(row["params_active_precise"])
        yield PublishedRun({"total": total}, float(row["tokens"]), row["final_loss"], row["run_name"])


def published(folder):
    """All ladders, by name: runs with enough tokens for their size."""
    found = {"chinchilla": list(chinchilla(folder)), **isoflops(folder), "olmo": list(olmo(folder)),
             "gemstones": list(gemstones(folder))}  # fmt: skip
    found |= {f"gadre {text}": list(gadre(folder, text)) for text in ("c4_original", "rpj", "rw_original")}
    return {
        name: [run for run in runs if run.tokens >= LEAST_TOKENS * next(iter(run.sizes.values()))]
        for name, runs in found.items()
    }
