"""Speed and answers of ``hlat evaluate`` beside lm-eval's own model ``hf``, on the same requests and the same weights.

    python benchmarks/lm_eval_speed.py --files FOLDER --tokenizer FILE [--rounds N]

The requests are those of lm-eval for tasks on local files: GSM8K with 8 examples, three tasks of BIG-bench Hard with
three examples (generated), three of hlat's suite (scored) and the prompts of HumanEval. Both sides answer the same list
of requests in one process, alternating; loading and the building of requests are not measured.
The model has random weights, 10 million parameters. Answers are compared one by one, also those of two processes.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from results import Recorder

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the folder of tests/

SUITE = """
name: speed
title: speed
folders: [gsm8k, bbh/fewshot]
columns:
  - name: GSM8K
    tasks:
      - {task: gsm8k, shots: 8, metric: exact_match, files: {test: gsm8k_test.jsonl, train: gsm8k_train_200.jsonl}}
  - name: generated
    tasks:
      - {task: bbh_fewshot_navigate, files: {test: bbh_navigate.json}, field: examples}
      - {task: bbh_fewshot_date_understanding, files: {test: bbh_date_understanding.json}, field: examples}
      - {task: bbh_fewshot_sports_understanding, files: {test: bbh_sports_understanding.json}, field: examples}
  - name: scored
    tasks:
      - {task: hlat_bbh_navigate, files: {test: bbh_navigate.json}, field: examples}
      - {task: hlat_bbh_causal_judgement, files: {test: bbh_causal_judgement.json}, field: examples}
      - {task: hlat_bbh_date_understanding, files: {test: bbh_date_understanding.json}, field: examples}
  - name: HumanEval
    tasks:
      - {task: hlat_humaneval, metric: "pass@1", files: {test: HumanEval.jsonl.gz}}
"""
GROUPS = {"gsm8k": "GSM8K, 8 examples, generated", "bbh_fewshot": "BIG-bench Hard, 3 examples, generated"}
GROUPS |= {"hlat_bbh": "BIG-bench Hard, scored", "hlat_humaneval": "HumanEval, generated"}


def make_model(folder: Path, tokenizer: Path, longest: int) -> Path:
    from hlat.config.sections.model import ModelConfig
    from hlat.data.tokenizers.load import load_tokenizer
    from hlat.model import build
    from hlat.model.hf.folder import write_hf
    from tests.support.model.canonical import to_canonical

    load_tokenizer(tokenizer).save(folder / "tokenizer")
    config = ModelConfig(
        vocab_size=32000,
        layers=6,
        hidden_size=128,
        intermediate_size=384,
        heads=4,
        kv_heads=2,
        init_std=0.1,  # far-apart logits, so that rounding decides nothing
        max_sequence_length=longest,
    )
    weights = to_canonical(config, dict(build(config, device="cpu", seed=1).named_parameters()))
    return write_hf(folder / "hf", config, weights, tokenizer_dir=folder / "tokenizer", eos_id=2, bos_id=1)


def build_requests(suite: Path, files: Path, limit: int, new: int) -> dict[str, list[Any]]:
    """Instances of lm-eval by group."""
    from hlat.evaluation.harness.adapter import list_tasks
    from hlat.evaluation.harness.suites import load_suite

    listed = list_tasks(load_suite(str(suite)), files, (), allow_code=True)
    groups = defaultdict(list)
    for name, task in listed.manager.load([listed.group])["tasks"].items():
        task.set_fewshot_seed(1234)
        task.build_all_requests(limit=limit, rank=0, world_size=1)
        for instance in task.instances:
            if instance.request_type == "generate_until":
                instance.arguments = (instance.args[0], {**instance.args[1], "max_gen_toks": new})
            groups[next(group for group in GROUPS if name.startswith(group))].append(instance)
    return groups


def answer(model: Any, instances: list[Any]) -> tuple[list[Any], float]:
    begin = time.perf_counter()
    answers = getattr(model, instances[0].request_type)(instances, disable_tqdm=True)
    return answers, time.perf_counter() - begin


def measure(folder: Path, groups: dict[str, list[Any]], rounds: int, sizes: list[int]) -> tuple[Any, Any]:
    """Answers and seconds by group and side; hlat gets a new folder of responses each time."""
    from lm_eval.models.huggingface import HFLM

    from hlat.evaluation.harness.adapter import HarnessModel
    from hlat.evaluation.responses import ServingOptions, serve_model
    from hlat.runtime.distributed.join import join_run

    theirs = {f"hf, batch {size}": HFLM(str(folder), device="cpu", dtype="float32", batch_size=size) for size in sizes}
    answers: dict[str, dict[str, Any]] = defaultdict(dict)
    seconds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    runtime = join_run()
    for number in range(rounds):
        for group, instances in groups.items():
            with tempfile.TemporaryDirectory() as cache:

                def ours(served: Any, instances: list[Any] = instances) -> tuple[list[Any], float]:
                    return answer(HarnessModel(served, 1234), instances)

                result = serve_model(folder, ServingOptions(), runtime, Path(cache), lambda *_: None, ours)
                answers[group]["hlat"], spent = result
                seconds[group]["hlat"].append(spent)
            for name, model in theirs.items():
                answers[group][name], spent = answer(model, instances)
                seconds[group][name].append(spent)
            print(number, group, {name: round(each[-1], 2) for name, each in seconds[group].items()}, flush=True)
    return answers, seconds


def compare(answers: dict[str, Any], other: str) -> tuple[int, int, float]:
    """Number of answers, how many texts or greedy marks differ, and the largest difference of a log-probability."""
    pairs = list(zip(answers["hlat"], answers[other], strict=True))
    if isinstance(pairs[0][0], str):
        return len(pairs), sum(one != two for one, two in pairs), 0.0
    return len(pairs), sum(one[1] != two[1] for one, two in pairs), max(abs(one[0] - two[0]) for one, two in pairs)


def layouts(folder: Path, suite: Path, files: Path, limit: int, new: int, work: Path) -> dict[str, tuple[int, float]]:
    """Differences of the answers of two processes from those of one: other texts, and log-probabilities."""
    command = [sys.executable, "-m", "hlat", "evaluate", str(folder), "--suite", str(suite), "--files", str(files)]
    command += ["--limit", str(limit), "--max-tokens", str(new), "--allow-code-execution"]
    found = {}
    ways = {"one process": [], "DP 2": ["--nproc", "2"], "TP 2": ["--nproc", "2", "--tensor", "2"]}
    for name, more in ways.items():
        out = work / name.replace(" ", "-")
        subprocess.run([*command, *more, "--to", str(out)], check=True)
        found[name] = {file.name: file.read_text() for file in (out / "samples").iterdir()}
    return {name: difference(found["one process"], samples) for name, samples in found.items() if name != "one process"}


def difference(one: dict[str, str], other: dict[str, str]) -> tuple[int, float]:
    texts, largest = 0, 0.0
    for name, lines in one.items():
        for left, right in zip(lines.splitlines(), other[name].splitlines(), strict=True):
            for a, b in zip(json.loads(left)["resps"], json.loads(right)["resps"], strict=True):
                if isinstance(a[0], str):
                    texts += a != b
                else:
                    largest = max(largest, abs(float(a[0][0]) - float(b[0][0])))
    return texts, largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=Path, required=True, help="folder of the data files of --suite offline")
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer of 32,000 tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=int, default=50, help="samples of each task")
    parser.add_argument("--new", type=int, default=64, help="tokens of each text")
    parser.add_argument("--layouts", action="store_true", help="compare two processes with one, instead of speed")
    parser.add_argument("--batch-sizes", default="8,32", help="of lm-eval")
    parser.add_argument("--max-length", type=int, default=2048, help="context of the model; longer prompts are cut")
    options = parser.parse_args()
    record = Recorder(__file__, "evaluation.md", packages=("lm_eval", "transformers", "accelerate"))
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        (work / "speed.yaml").write_text(SUITE)
        folder = make_model(work / "model", options.tokenizer, options.max_length)
        if options.layouts:
            for name, (texts, largest) in layouts(
                folder, work / "speed.yaml", options.files, options.limit, options.new, work
            ).items():
                print(f"{name}: {texts} texts differ from one process, log-probabilities by {largest:.1e} at most")
                record.add(f"texts that differ from those of one process, {name}", "1", texts)
                record.add(f"largest difference of a log-probability from that of one process, {name}", "nats", largest)
            record.write("lm_eval_layouts")
            return
        groups = build_requests(work / "speed.yaml", options.files, options.limit, options.new)
        sizes = [int(size) for size in options.batch_sizes.split(",")]
        answers, seconds = measure(folder, groups, options.rounds, sizes)
        for group, title in GROUPS.items():
            best = min((name for name in seconds[group] if name != "hlat"), key=lambda name: min(seconds[group][name]))
            count, wrong, largest = compare(answers[group], best)
            print(f"{title}: {count} requests, {wrong} differ, log-probabilities by {largest:.1e} at most; {best}")
            record.add(
                f"{title}: {count} requests",
                "s",
                seconds[group]["hlat"],
                peer=f"lm-eval {best}",
                peer_values=seconds[group][best],
            )
            ratios = [theirs / ours for ours, theirs in zip(seconds[group]["hlat"], seconds[group][best], strict=True)]
            record.add(f"{title}: times as fast as lm-eval with its best batch size", "1", ratios)
            record.add(f"{title}: answers that differ from lm-eval's", "1", wrong)
            if largest:
                record.add(f"{title}: largest difference of a log-probability from lm-eval's", "nats", largest)
        record.write()


if __name__ == "__main__":
    main()
