"""Texts and files that are not valid recipes: hostile YAML, binary files, odd names and overrides."""

import os
import random
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.fuzz.commanding import broken_law, command

SEED = 15
MUTATIONS = 60
MANY_MUTATIONS = 5_000

GOOD = """
# a recipe
run: {name: tiny}
model: {vocab_size: 320, layers: 2, hidden_size: 32, intermediate_size: 96, heads: 4, kv_heads: 2}
data:
  path: "corpus.txt"
  sequence_length: 32
  tokenizer: {vocab_size: 320}
  sources: &none []
training: {steps: 40, log_every: 5, seed: 3}
optimizer: {lr: 3.0e-3, betas: [0.9, 0.95]}
"""

HOSTILE = {
    "empty": "",
    "only a comment": "# nothing\n",
    "a date": "training: {steps: 2001-99-99}",
    "tags": "training: {steps: !!int abc}\nrun: {name: !!timestamp abc}\n",
    "python tag": "!!python/object/apply:os.system ['echo owned']",
    "unknown tag": "a: !nothing {b: 1}",
    "3,000 brackets": "a: " + "[" * 3_000,
    "closed brackets": "a: " + "[" * 400 + "]" * 400,
    "3,000 braces": "{a: " * 3_000,
    "300,000 brackets": "[" * 300_000,
    "300,000 dashes": "- " * 300_000,
    "3,000 levels": "\n".join(" " * depth + "a:" for depth in range(3_000)),
    "ten lists of ten lists": "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
    + "".join(f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in pairwise("abcdefghijklmnop")),
    "a list in itself": "a: &a [*a]",
    "a mapping in itself": "model: &m {rope: *m}",
    "an alias of nothing": "a: *b",
    "merge key": "a: &a {b: 1}\nc: {<<: *a}",
    "merge of itself": "a: &a {<<: *a}",
    "keys of other kinds": "1: 2\n? [a]\n: 3\n",
    "a key twice": "model: {heads: 1, heads: 2}",
    "two documents": "a: 1\n---\nb: 2\n",
    "a tab": "a:\n\tb: 1\n",
    "include with a zero character": 'include: "a\\0b"',
    "include of itself": "include: recipe.yaml",
    "include of a folder": "include: .",
    "include of a device": "include: /dev/zero",
    "include of a pipe": "include: pipe",
    "include of a surrogate": 'include: "\\ud800"',
    "include of a long name": f"include: {'a' * 5_000}",
    "includes that double": "include: [1.yaml, 1.yaml]",
    "control characters": 'run: {name: "\\e]0;owned\\a\\x9b2J"}\n"\\e[31mkey": 1\n',
    "order of writing": '"\\u202egnihtyreve": 1\nrun: {dir: "\\u2066x"}',
    "a key of 20,000 characters": f"{'k' * 900}: 1\n? {'l' * 20_000}\n: 1\n",
    "1,000 unknown keys": "\n".join(f"key{n}: {n}" for n in range(1_000)),
    "20,000 unknown fields": "run: {" + ", ".join(f"key{n}: {n}" for n in range(20_000)) + "}",
    "20,000 sources": "data: {sources: [" + ", ".join("1" for _ in range(20_000)) + "]}",
    "long numbers": f"training: {{steps: {'9' * 5_000}}}\noptimizer: {{lr: 1e{'9' * 400}}}",
    "a long hexadecimal number": f"training: {{steps: 0x{'f' * 20_000}}}",
    "a bracket of JSON": '{"model": {"preset": "tiny-1m"}, "data": {"path": "x"}, "training": {"steps": 1}',
    "a secret in a line that is wrong": "data: {path: https://S3CR3T@host/x?k=S3CR3T#S3CR3T, ]",
    "a secret as a key": "https://S3CR3T@host/x: 1\n",
    "faults of numbers": "faults: [1, 2, null, {kind: 1}]",
    "a preset that is a list": "model: {preset: [a]}",
    "a list": "- a\n- b\n",
    "a number": "5",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for index in range(1, 40):
        (tmp_path / f"{index}.yaml").write_text(f"include: [{index + 1}.yaml, {index + 1}.yaml]\n")
    (tmp_path / "good.yaml").write_text(GOOD)
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def assert_law(*arguments: str) -> str:
    outcome = command(arguments)
    assert broken_law(outcome) is None, (
        broken_law(outcome),
        [argument[:100] for argument in arguments],
        outcome.printed[:2_000],
    )
    return outcome.printed


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_yaml_obeys_the_law(folder: Path, text: str) -> None:
    Path("recipe.yaml").write_text(text, encoding="utf-8")
    assert_law("check", "recipe.yaml")


@pytest.mark.parametrize(
    "content",
    [
        b"\x00\x01\x02",
        b"\xff\xfe" + "run: {}".encode("utf-16-le"),
        b"\xef\xbb\xbfrun: {}\n",
        random.Random(SEED).randbytes(3_000),
        b"\x7fELF" * 9,
        b"a: \xc3(",
        b"\x1f\x8b\x08gzip",
        b"a" * 3_000_000,
        b"\n" * 1_000_000,
        b"\r\r\r\x0c\x0b",
    ],
)
def test_binary_files_obey_the_law(folder: Path, content: bytes) -> None:
    Path("recipe.yaml").write_bytes(content)
    assert_law("check", "recipe.yaml")


@pytest.mark.parametrize(
    "name",
    [
        ".",
        "/",
        "/dev/zero",
        "/dev/null",
        "pipe",
        "n" * 5_000,
        "a/" * 3_000,
        "\x1b[2J",
        "\ud800",
        "",
        "-",
        "good.yaml/x",
    ],
)
def test_odd_file_names_obey_the_law(folder: Path, name: str) -> None:
    assert_law("check", name)


@pytest.mark.parametrize(
    "override",
    [
        ".".join("abc" for _ in range(10_000)) + "=1",
        "=",
        "=1",
        "a=",
        ".=1",
        "a..b=1",
        "data.path",
        "data.path=",
        "include=5",
        "data.sources=[{path: a}]",
        "data.sources.0.path=x",
        "data.sources.٣.path=x",
        "data.sources.99999999999999999999.path=x",
        "optimizer.betas.0=x",
        "optimizer.betas.-1=0.5",
        "training.steps.x=1",
        "run.dir.a.b=1",
        "model=*.txt",
        "model=[",
        "\x1b]0;t\x07=1",
        "run.name=\x9b1m",
        "a\nb=1",
        "run.dir=\udcff",
        "data.path=https://S3CR3T@h",
        "https://S3CR3T@h=1",
        "x" * 100_000,
        "run.name=" + "x" * 100_000,
        "data.path=&a [*a]",
        "run.name=!!int abc",
        "--training.steps=4",
        "--a\x1b.b",
    ],
)
def test_odd_overrides_obey_the_law(folder: Path, override: str) -> None:
    assert_law("check", "good.yaml", override)


HF_CONFIGS = {
    "100,000 brackets": "[" * 100_000,
    "a list": "[]",
    "nothing": "",
    "numbers of 5,000 digits": '{"model_type": "llama", "hidden_size": ' + "9" * 5_000 + "}",
    "10**30 layers": '{"model_type": "llama", "num_hidden_layers": 1' + "0" * 30 + ', "hidden_size": 1e400}',
    "types": '{"model_type": ["llama"], "hidden_size": {}, "rope_parameters": [1], "layer_types": 5, "dtype": []}',
    "control characters": '{"model_type": "\\u001b[2J\\u009b", "hidden_act": "\\u202e", "torch_dtype": "\\ud800"}',
    "a large one": '{"a": "' + "x" * 3_000_000 + '"}',
}


@pytest.mark.parametrize("text", HF_CONFIGS.values(), ids=HF_CONFIGS)
def test_hostile_model_configurations_obey_the_law(folder: Path, text: str) -> None:
    Path("config.json").write_text(text, encoding="utf-8")
    Path("recipe.yaml").write_text("model: {hf_config: config.json}\ndata: {path: x}\ntraining: {steps: 1}\n")
    assert_law("check", "recipe.yaml")
    assert_law("plan", "--model", "config.json", "--cluster", "p5.48xlarge:1")


@pytest.mark.parametrize("name", ["/dev/zero", "pipe", ".", "n" * 5_000, "none", "\udcff"])
def test_odd_names_of_model_configurations_obey_the_law(folder: Path, name: str) -> None:
    Path("recipe.yaml").write_text("data: {path: x}\ntraining: {steps: 1}\n")
    assert_law("check", "recipe.yaml", f"model.hf_config={name}")


def mutated(text: str, rng: random.Random) -> str:
    """Change, delete, duplicate or swap a few characters of a text, or insert special characters of YAML."""
    characters = list(text)
    for _ in range(rng.randint(1, 4)):
        position = rng.randrange(len(characters))
        match rng.randrange(4):
            case 0:
                characters[position] = rng.choice("{}[]:,-#&*!|>'\"%@`?\t\n ~\\<=.0e\x00\x85\u2028é")
            case 1:
                del characters[position]
            case 2:
                characters[position:position] = characters[position : position + rng.randint(1, 40)]
            case _:
                other = rng.randrange(len(characters))
                characters[position], characters[other] = characters[other], characters[position]
    return "".join(characters)


def _assert_law_of_mutations(count: int) -> None:
    rng = random.Random(SEED)
    for _ in range(count):
        Path("recipe.yaml").write_text(mutated(GOOD, rng), encoding="utf-8")
        assert_law("check", "recipe.yaml")


def test_a_few_mutations_of_a_good_recipe(folder: Path) -> None:
    _assert_law_of_mutations(MUTATIONS)


@pytest.mark.slow
def test_many_mutations_of_a_good_recipe(folder: Path) -> None:
    _assert_law_of_mutations(MANY_MUTATIONS)
