"""Only ``runtime/backend`` knows device types: everything else asks a backend for a capability.

The rule, read from the syntax trees of all other files:

- No name of an accelerator's type ("cuda", "neuron", ...) as a text, and no module of torch for one (``torch.cuda``).
- No comparison with the type of a device, and no look-up by it. Two exceptions: "meta" tensors have no memory on any
  device, so "meta" names no backend; and code that ``torch.compile`` traces may ask if a type is in a constant made by
  ``types_with``, because it could not call ``backend_of``.
- "cpu" may name the host's memory, as an argument (``tensor.to("cpu")``, ``torch.device("cpu")``) or as the device of
  something; it may not be compared or be an entry of a table.
- A type may be passed on to torch or to a message.

Docstrings may say anything.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import hlat
from hlat.runtime.backend.table import BACKENDS

ROOT = Path(hlat.__file__).parent
HOST, NO_DEVICE = "cpu", "meta"
ACCELERATORS = (set(BACKENDS) | {"xpu", "mps", "hpu", "mtia", "xla", "privateuseone"}) - {HOST}
TYPES = ACCELERATORS | {HOST}
FLAGS = {f"is_{kind}" for kind in TYPES} & set(dir(torch.Tensor))
TABLES = (ast.Dict, ast.Set, ast.Tuple, ast.List, ast.Subscript)


def outside() -> list[Path]:
    """Source files outside of the backends."""
    return [file for file in sorted(ROOT.rglob("*.py")) if file.parent != ROOT / "runtime" / "backend"]


def is_docstring(node: ast.AST) -> bool:
    """True for a text that is a statement of its own: of a module, class, function or attribute."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def is_type(node: ast.AST) -> bool:
    """True for ``device.type``, and for names such as ``device_type``."""
    if isinstance(node, ast.Attribute):
        return node.attr == "type" or node.attr.endswith("device_type")
    return isinstance(node, ast.Name) and node.id.endswith("device_type")


def is_host(node: ast.AST) -> bool:
    """True for the text "cpu"."""
    return isinstance(node, ast.Constant) and node.value == HOST


def constants_of_types(tree: ast.AST) -> set[str]:
    """Names of constants that are made by ``types_with``."""
    made = [
        node for node in ast.walk(tree) if isinstance(node, ast.Assign) and "types_with(" in ast.unparse(node.value)
    ]
    return {target.id for node in made for target in node.targets if isinstance(target, ast.Name)}


def compares(node: ast.Compare, constants: set[str]) -> bool:
    """True for a comparison with the type of a device, but for the two exceptions."""
    if not any(is_type(part) or is_host(part) for part in (node.left, *node.comparators)):
        return False
    values = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
    names = {part.id for part in ast.walk(node.comparators[0]) if isinstance(part, ast.Name)}
    return values != {NO_DEVICE} and not (isinstance(node.ops[0], ast.In | ast.NotIn) and names & constants)


def uses_module(node: ast.AST) -> bool:
    """True for torch's module or settings of one device type, and for a flag of tensors such as ``is_cuda``."""
    if isinstance(node, ast.Attribute):
        owner = ast.unparse(node.value)
        return node.attr in FLAGS or (node.attr in TYPES and owner in ("torch", "torch.backends", "torch._C"))
    if isinstance(node, ast.Import | ast.ImportFrom):
        imported = [f"{getattr(node, 'module', '')}.{name.name}" for name in node.names]
        return any(f"torch.{kind}" in name for name in imported for kind in TYPES)
    return False


def looks_up(node: ast.AST) -> bool:
    """True for a table with "cpu" in it, a look-up by the type of a device, and a match on one."""
    if isinstance(node, ast.Match):
        return is_type(node.subject)
    if isinstance(node, ast.match_case):
        return any(map(is_host, ast.walk(node.pattern)))
    if isinstance(node, ast.Subscript) and is_type(node.slice):
        return True
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
        return any(map(is_type, node.args))
    return isinstance(node, TABLES) and any(map(is_host, ast.iter_child_nodes(node)))


def questions(source: str) -> Iterator[tuple[int, str]]:
    """(Line, text) of everything in a file that asks for the type of a device."""
    tree = ast.parse(source)
    texts = {node.value for node in ast.walk(tree) if is_docstring(node)}
    constants = constants_of_types(tree)
    for node in ast.walk(tree):
        named = isinstance(node, ast.Constant) and node.value in ACCELERATORS and node not in texts
        compared = isinstance(node, ast.Compare) and compares(node, constants)
        if named or compared or uses_module(node) or looks_up(node):
            yield getattr(node, "lineno", 0), ast.unparse(node)


def test_no_other_code_asks_for_the_type_of_a_device() -> None:
    wrong = [
        f"{file.relative_to(ROOT)}:{line}: {text}"
        for file in outside()
        for line, text in questions(file.read_text(encoding="utf-8"))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "source",
    [
        'fused = parameter.device.type in ("cpu", "cuda")',
        'if device.type != "cpu": pass',
        'if "cpu" == device.type: pass',
        'slow = self.device_type == "cpu"',
        'if recipe.run.device != "cpu": pass',
        "name = BACKENDS.get(device.type)",
        "name = BACKENDS[device.type]",
        'BACKENDS = {"cpu": "gloo"}',
        "torch.cuda.synchronize()",
        "torch.backends.cuda.matmul.allow_tf32 = True",
        "from torch.cuda import synchronize",
        "from torch import cuda",
        "import torch.xpu",
        'kernel = "cuda"',
        "if tensor.is_cuda: pass",
        "if tensor.is_cpu: pass",
        'match device.type:\n    case "cpu": pass',
        'match value:\n    case torch.Tensor() if value.device.type == "cpu": pass',
        'KINDS = ("cpu",)\nif x.device.type in KINDS: pass',
    ],
)
def test_a_question_is_found(source: str) -> None:
    assert list(questions(source))


@pytest.mark.parametrize(
    "source",
    [
        '"""On "cuda" and ``device.type == "neuron"``."""',
        'tensor.to("cpu"); tensor.to(device="cpu")',
        'device = parameter.device if fused else "cpu"',
        "DeviceMesh.from_group(axes, device.type, mesh=grid)",
        'if tensor.device.type == "meta": pass',
        "KINDS = types_with(fused)\nif x.device.type in KINDS: pass",
        'KINDS = " ".join(types_with(fused))\nif x.device.type not in KINDS.split(): pass',
        "backend_of(device).fused_adamw",
    ],
)
def test_other_code_is_not(source: str) -> None:
    assert not list(questions(source))
