"""The command starts fast because it imports little: which packages, not how long, so that no machine is too slow."""

import subprocess
import sys

import pytest

from tests.support.reporting import line, write_run

HEAVY = ("torch", "numpy", "pyarrow", "tokenizers", "tensorboard")
PROGRAM = """
import sys
from hlat.cli import app
try:
    app(sys.argv[1:])
finally:
    print("IMPORTED", *sorted(set(sys.modules) & set({packages})))
"""


def imported_by(*arguments: str, packages: tuple[str, ...]) -> list[str]:
    """Return those of the packages that a command imports."""
    program = PROGRAM.format(packages=packages)
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()[1:]


@pytest.mark.parametrize(
    "arguments", [["--help"], ["train", "--help"], ["plan", "--help"], ["data", "prepare", "--help"]]
)
def test_help_imports_neither_torch_nor_the_recipe(arguments):
    assert not imported_by(*arguments, packages=(*HEAVY, "yaml", "hlat.config", "hlat.launch"))


@pytest.mark.parametrize("arguments", [["runs"], ["show", "run"], ["compare", "run", "run"], ["show", "run", "--json"]])
def test_looking_at_runs_imports_neither_torch_nor_numpy(arguments, tmp_path, monkeypatch):
    write_run(tmp_path / "run", [line(10), line(20)])
    monkeypatch.chdir(tmp_path)
    arguments = ["runs", str(tmp_path)] if arguments == ["runs"] else arguments
    assert not imported_by(*arguments, packages=HEAVY)


@pytest.mark.parametrize("family", ["llama", "olmo2"])
def test_check_of_a_good_recipe_does_not_import_torch(recipe_file, tiny, family):
    """It counts parameters by the description of the architecture, which knows no modules."""
    arguments = ["check", str(recipe_file), *tiny, f"model.architecture={family}"]
    assert not imported_by(*arguments, "--no-files", packages=(*HEAVY, "hlat.launch"))
    assert not imported_by(*arguments, packages=("torch", "tensorboard"))  # files are read by pyarrow and tokenizers


def test_this_test_would_see_torch(recipe_file, tiny):
    assert imported_by("data", "prepare", str(recipe_file), *tiny, packages=("tokenizers", "numpy"))


@pytest.mark.parametrize("mode", ["fp32", "bf16-sr"])
def test_a_model_is_built_and_updated_without_torchs_compiler_and_checkpoint_format(mode):
    """Initialisation on the meta device and torch's optimizers import its compiler, 1 s.

    ``empty_like`` on the meta device imports sympy, and DCP DTensor and sympy: 0.5 s each. From torch 2.14, attention
    with block masks imports sympy itself.
    """
    program = (
        "import sys, torch, torch.nn.attention.flex_attention\n"
        "before = set(sys.modules) & {'sympy'}\n"
        "import hlat.training\n"
        "from hlat.config.sections.model import ModelConfig\n"
        "from hlat.config.sections.training import AdamWConfig\n"
        "from hlat.model import build, collect_local_parameters\n"
        "from hlat.optim import build_optimizer\n"
        "from hlat.precision import MODES\n"
        "config = ModelConfig(vocab_size=64, layers=1, hidden_size=16, intermediate_size=32, heads=2)\n"
        f"weights = MODES['{mode}'].weights\n"
        "parameters = collect_local_parameters(build(config, device='cpu', seed=1, dtype=weights))\n"
        f"optimizer = build_optimizer(parameters, AdamWConfig(), '{mode}')\n"
        "for each in parameters:\n"
        "    each.parameter.grad = torch.ones_like(each.parameter)\n"
        "optimizer.clip_gradients(torch.tensor(3.0), 1.0)\n"
        "optimizer.step()\n"
        "optimizer.zero_grad()\n"
        "heavy = {'torch._dynamo', 'torch._inductor.utils', 'torch.distributed.checkpoint', 'sympy'}\n"
        "print(*sorted(set(sys.modules) & heavy - before))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"
