"""Hostile Hugging Face folders and tokenizers: an import is refused with a message, or gives the folder's own weights.

    a small model folder, one thing changed --import_model, generate_text--> HlatError, or the weights of the files

Changes affect numbers and types in config.json, headers of safetensors, the shard index, the tokenizer, and raw bytes.
"""

import json
import os
import random
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from hlat.checkpoint import import_model
from hlat.checkpoint.protocol.reader import open_checkpoint
from hlat.config.sections.model import ModelConfig
from hlat.evaluation import generate_text
from hlat.model import build
from hlat.model.hf.folder import write_hf
from hlat.runtime.errors import HlatError
from tests.support.fuzz.mutations import ODD_VALUES, mutate
from tests.support.model.canonical import to_canonical

SLOW = int(os.environ.get("HLAT_FUZZ_FOLDERS", "3000"))
SECONDS = 600  # only a hang takes so long, on any machine

CONFIG = ModelConfig(
    vocab_size=300, layers=2, hidden_size=16, intermediate_size=32, heads=2, kv_heads=1, max_sequence_length=64
)
ABSURD = [0, -1, 1, 3, 2**20, 10**6, 10**9, 2**31, 2**63, 10**30, 10**400, 1e308, 0.5, True]
SIZES = [
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hf")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(["the cat sees the river and the tree"] * 9, trainer)
    (root / "tokenizer").mkdir()
    tokenizer.save(str(root / "tokenizer" / "tokenizer.json"))
    weights = to_canonical(CONFIG, dict(build(CONFIG, device="cpu", seed=0).named_parameters()))
    detached = {name: tensor.detach() for name, tensor in weights.items()}
    return write_hf(
        root / "model", CONFIG, detached, tokenizer_dir=root / "tokenizer", eos_id=0, max_shard_bytes=20_000
    )


@contextmanager
def time_limit() -> Iterator[None]:
    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"no end in {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def edit(path: Path, change: Callable[[Any], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def change_size(folder: Path, rng: random.Random) -> str:
    name, odd = rng.choice(SIZES), rng.choice(ABSURD)
    edit(folder / "config.json", lambda content: content.update({name: odd}))
    return f"config.json: {name} = {odd!r:.40}"


def change_field(folder: Path, rng: random.Random) -> str:
    file = folder / rng.choice(["config.json", "generation_config.json", "model.safetensors.index.json"])
    content = json.loads(file.read_text())
    values = list(_values(content))
    holder, key = rng.choice(values)
    holder[key] = odd = rng.choice(ODD_VALUES)
    file.write_text(json.dumps(content))
    return f"{file.name}: {key} = {odd!r:.40}"


def change_header(folder: Path, rng: random.Random) -> str:
    """Change shape, dtype or offsets of a tensor, or the length of the header itself."""
    file = rng.choice(sorted(folder.glob("*.safetensors")))
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    name = rng.choice([key for key in header if key != "__metadata__"])
    odd = rng.choice([*ODD_VALUES, [2**40, 2**40], [-1, 4], [0], "F64", "I8", [0, 2**60], [8, 0]])
    key = rng.choice(["shape", "dtype", "data_offsets", "length"])
    if key == "length":
        length = rng.choice([0, 1, 2**20, 2**40, 2**63])
        file.write_bytes(struct.pack("<Q", length) + data[8:])
        return f"{file.name}: a header of {length} bytes"
    header[name][key] = odd
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    return f"{file.name}: {key} of {name} = {odd!r:.40}"


def change_tokenizer(folder: Path, rng: random.Random) -> str:
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    values = list(_values(content))
    shallow = [root for root in values if root[0] is not content["model"]["vocab"]]
    holder, key = rng.choice(rng.choice([values, shallow]))
    odd = rng.choice(ODD_VALUES)
    if rng.randrange(5) == 0:
        del holder[key]
        odd = "nothing"
    else:
        holder[key] = odd
    file.write_text(json.dumps(content))
    return f"tokenizer.json: {key!r:.30} = {odd!r:.40}"


def _values(content: Any) -> Iterator[tuple[Any, Any]]:
    for key, value in content.items() if isinstance(content, dict) else enumerate(content):
        yield content, key
        if isinstance(value, dict | list):
            yield from _values(value)


CHANGES: list[Callable[[Path, random.Random], str]] = [
    change_size,
    change_field,
    change_header,
    change_tokenizer,
    mutate,
]


def try_one(folder: Path, scratch: Path, seed: int) -> str:
    """Change a copy of the folder, import it, and generate text; describe a violation, or return an empty text."""
    rng = random.Random(seed)
    changed = scratch / "model"
    shutil.copytree(folder, changed)
    change = f"seed {seed}: {rng.choice(CHANGES)(changed, rng)}"
    stored = weights_in(changed)
    try:
        with time_limit():
            checkpoint = open_checkpoint(import_model(changed, scratch / "out"))
            loaded = checkpoint.load("model.")
            if any(tensor.numpy().tobytes() not in stored for tensor in loaded.values()):
                return f"{change}: weights that are not in the files"
            generate_text(scratch / "out", "the", 2)
    except HlatError as error:
        return "" if 0 < len(str(error)) < 30_000 else f"{change}: a message of {len(str(error))} characters"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return f"{change}: {type(error).__name__}: {str(error)[:300]}"
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return ""


def weights_in(folder: Path) -> bytes:
    """Bytes of all weight files."""
    return b"".join(file.read_bytes() for file in sorted(folder.glob("*.safetensors")) if file.is_file())


@pytest.mark.parametrize("seed", range(60))
def test_a_few_hostile_folders(folder: Path, tmp_path: Path, seed: int) -> None:
    torch.set_num_threads(1)
    assert try_one(folder, tmp_path / "scratch", seed) == ""


@pytest.mark.slow
def test_many_hostile_folders(folder: Path, tmp_path: Path) -> None:
    found = [try_one(folder, tmp_path / "scratch", 1_000_000 + number) for number in range(SLOW)]
    broken = [problem for problem in found if problem]
    assert not broken, f"{len(broken)} of {SLOW}\n" + "\n".join(broken)
