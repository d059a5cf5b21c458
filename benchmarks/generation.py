"""Tokens per second of generation and scoring on a CPU beside transformers, the same weights and the same prompts.

    python benchmarks/generation.py [--rounds N] [--models 34M,125M] [--dtypes fp32,bf16] [--batches 1,8] [--new N]

Both sides run in one process and alternate. A measurement is a complete call, with the prompt of 128 tokens:
``BatchGenerator``, as ``hlat evaluate`` uses it, on a model that was prepared when it was loaded, against ``generate``
of transformers with its defaults (sdpa, dynamic cache), greedy, on models with random weights. Texts are compared; in
bf16 they differ, because each side rounds at other places. Scoring: log-probabilities of 8 continuations
of 512 tokens each, against the forward pass of training on as many tokens (loss without gradient, one process).

With ``--one-thread`` seconds are processor time of a single thread: where other programs keep the machine busy, threads
wait for each other most of the time, and the clock says how busy the machine is.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hlat.runtime.backend.openmp import ProcessorTime, set_spin_count

now = ProcessorTime.read()
set_spin_count(now, now)  # as the command does, before torch is imported

import torch  # noqa: E402

from hlat.config.sections.model import ModelConfig  # noqa: E402
from hlat.evaluation.generation import (  # noqa: E402
    BatchGenerator,
    GenerationRequest,
    plan_generation,
)
from hlat.evaluation.next_token import prepare_to_generate  # noqa: E402
from hlat.evaluation.scoring import (  # noqa: E402
    ScoreRequest,
    score_all,
)
from hlat.model import Decoder, build  # noqa: E402
from hlat.model.hf.folder import write_hf  # noqa: E402
from hlat.parallel import ForwardModel  # noqa: E402
from results import Recorder  # noqa: E402

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the folder of tests/

MODELS: dict[str, dict[str, int]] = {
    "34M": {"vocab_size": 8192, "layers": 8, "hidden_size": 512, "intermediate_size": 1536, "heads": 8, "kv_heads": 4},
    "125M": {
        "vocab_size": 32000,
        "layers": 12,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "heads": 12,
        "kv_heads": 4,
    },
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PROMPT, SCORED, ROWS = 128, 512, 8


def make_models(name: str, dtype: torch.dtype) -> tuple[Decoder, ForwardModel, Any]:
    """The model of training, the prepared one of evaluation, and that of transformers."""
    import transformers

    from tests.support.model.canonical import to_canonical

    config = ModelConfig(**MODELS[name], max_sequence_length=2048, init_std=0.05)
    plain, prepared = (build(config, device="cpu", seed=1, dtype=dtype).eval() for _ in range(2))
    with tempfile.TemporaryDirectory() as folder:
        weights = to_canonical(config, dict(plain.named_parameters()))
        written = write_hf(Path(folder) / "hf", config, weights)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(written, dtype=dtype).eval()
    prepare_to_generate(prepared)
    return plain, ForwardModel(prepared, torch.device("cpu")), theirs


def generate_ours(model: ForwardModel, prompts: list[list[int]], new: int) -> list[list[int]]:
    generator = BatchGenerator(model, frozenset(), lambda tokens: "")
    texts: list[list[int]] = [[] for _ in prompts]
    for batch in plan_generation([GenerationRequest(tuple(prompt), new) for prompt in prompts]):
        for index, text in zip(batch.order, generator.generate(batch), strict=True):
            texts[index] = text
    return texts


@torch.no_grad()
def generate_theirs(model: Any, prompts: list[list[int]], new: int) -> list[list[int]]:
    ids = torch.tensor(prompts)
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return [list(row) for row in out[:, PROMPT:].tolist()]


def clock() -> float:
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def alternate(sides: dict[str, Callable[[], Any]], rounds: int) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Seconds of each side in each round, after one that does not count, and their last results."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    results = {}
    for number in range(rounds + 1):
        for name, call in sides.items():
            begin = clock()
            results[name] = call()
            if number:
                seconds[name].append(clock() - begin)
    return seconds, results


def ratios(seconds: dict[str, list[float]]) -> list[float]:
    ours, theirs = seconds.values()
    return [their / our for our, their in zip(ours, theirs, strict=True)]


def measure_generation(record: Recorder, title: str, models: Any, batch: int, new: int, rounds: int) -> None:
    plain, prepared, theirs = models
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, plain.config.vocab_size, (batch, PROMPT), generator=generator).tolist()
    sides = {
        "hlat": lambda: generate_ours(prepared, prompts, new),
        "transformers": lambda: generate_theirs(theirs, prompts, new),
    }
    seconds, texts = alternate(sides, rounds)
    same = sum(ours == theirs for ours, theirs in zip(texts["hlat"], texts["transformers"], strict=True))
    ours, others = ([batch * new / spent for spent in seconds[side]] for side in sides)
    times = ratios(seconds)
    print(
        f"{title}, batch {batch}: hlat {statistics.median(ours):.0f} token/s, transformers "
        f"{statistics.median(others):.0f}, {statistics.median(times):.2f} times; {same} of {batch} texts are the same",
        flush=True,
    )
    claim = f"{title}, batch {batch}: {new} tokens generated after {PROMPT}"
    record.add(claim, "token/s", ours, peer="transformers", peer_values=others)
    note = f"goal: 2; {same} of {batch} texts are the same"
    record.add(f"{title}, batch {batch}: times as fast as transformers", "1", times, note=note)


def measure_scoring(record: Recorder, title: str, models: Any, rounds: int) -> None:
    plain, prepared, _ = models
    generator = torch.Generator().manual_seed(1)
    tokens_BS = torch.randint(0, plain.config.vocab_size, (ROWS, SCORED + 1), generator=generator)
    requests = [ScoreRequest((row[0],), tuple(row[1:])) for row in tokens_BS.tolist()]

    def train() -> float:
        with torch.no_grad():
            return sum(float(plain(x[:, :-1], x[:, 1:])) for x in tokens_BS.split(4))

    sides = {"scoring": lambda: score_all(prepared, requests), "training": train}
    seconds, results = alternate(sides, rounds)
    total, loss = -sum(score.log_probability for score in results["scoring"]), results["training"]
    ours, others = ([ROWS * SCORED / spent for spent in seconds[side]] for side in sides)
    times = ratios(seconds)
    print(
        f"{title}, scoring: {statistics.median(ours):.0f} token/s, forward pass of training "
        f"{statistics.median(others):.0f}, {statistics.median(times):.2f} times; losses differ by "
        f"{abs(total / loss - 1):.1e}",
        flush=True,
    )
    claim = f"{title}: {ROWS} continuations of {SCORED} tokens scored"
    record.add(claim, "token/s", ours, peer="forward pass of training", peer_values=others)
    record.add(f"{title}: speed of scoring by that of training's forward pass", "1", times, note="goal: 1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new", type=int, default=64, help="tokens of each text")
    parser.add_argument("--models", default="34M,125M")
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--one-thread", action="store_true", help="measure the processor time of a single thread")
    options = parser.parse_args()
    if options.one_thread:
        torch.set_num_threads(1)
    record = Recorder(__file__, "evaluation.md", packages=("transformers",))
    for model in options.models.split(","):
        for dtype in options.dtypes.split(","):
            models = make_models(model, DTYPES[dtype])
            title = f"{model} {dtype}{', processor time of one thread' if options.one_thread else ''}"
            for batch in map(int, options.batches.split(",")):
                measure_generation(record, title, models, batch, options.new, options.rounds)
            measure_scoring(record, title, models, options.rounds)
    record.write(f"generation{'' if options.one_thread else '_clock'}-{options.models}")


if __name__ == "__main__":
    main()
