"""Results of the API, read by others: transformers, pandas, polars, mypy, the command line, a Jupyter kernel."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
import torch

import hlat
from hlat.hardware import load_catalog
from hlat.runtime.terminal import escape_controls
from tests.support.commands import hlat as command
from tests.support.reporting import line, write_run

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def trained(corpus: Path, tiny_recipe: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of ten steps."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "recipe.yaml").write_text(tiny_recipe)
    overrides = {
        "data.path": str(corpus),
        "run.dir": str(folder / "run"),
        "training.steps": 10,
        "training.log_every": 5,
    }
    hlat.train(folder / "recipe.yaml", overrides)
    return folder / "run"


@pytest.fixture(scope="module")
def exported(trained: Path) -> Path:
    return hlat.export(trained, trained / "hf")


# --- recipes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"optimizer.lr": 1e-5}, lambda recipe: recipe.optimizer.lr, 1e-5),
        ({"optimizer.lr": 2.5e-05}, lambda recipe: recipe.optimizer.lr, 2.5e-5),
        ({"optimizer.betas": [0.8, 0.9]}, lambda recipe: recipe.optimizer.betas, (0.8, 0.9)),
        ({"run.name": "1e3"}, lambda recipe: recipe.run.name, "1e3"),
        ({"checkpoint.background": False}, lambda recipe: recipe.checkpoint.background, False),
        ({"training.stop_after": None}, lambda recipe: recipe.training.stop_after, None),
        ({"data.path": Path("a b/c.txt")}, lambda recipe: recipe.data.path, "a b/c.txt"),
        (["optimizer.lr=0.5"], lambda recipe: recipe.optimizer.lr, 0.5),
    ],
)
def test_overrides_have_the_values_of_python(recipe_file: Path, corpus: Path, changes, field, value):
    base = {"data.path": str(corpus)} if isinstance(changes, dict) else [f"data.path={corpus}"]
    found = field(hlat.load_recipe(recipe_file, base | changes if isinstance(changes, dict) else base + changes))
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("name", ["quickstart", "tiny-shakespeare", "hlat-7b", "hlat-70b"])
def test_a_recipe_object_is_the_recipe_of_its_file(name: str, tmp_path: Path):
    """Processes of ``train(nproc=...)`` get a recipe object as a file."""
    recipe = hlat.load_recipe(name, {} if name == "hlat-70b" else {"data.path": str(tmp_path)})
    (tmp_path / "again.yaml").write_text(json.dumps(recipe.model_dump(mode="json")))
    assert hlat.load_recipe(tmp_path / "again.yaml") == recipe


# --- models -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["run", "checkpoint", "export"])
def test_a_loaded_model_has_the_logits_of_transformers(trained: Path, exported: Path, place: str):
    transformers = pytest.importorskip("transformers")
    source = {"run": trained, "checkpoint": trained / "checkpoints/step-00000010", "export": exported}[place]
    tokens = torch.arange(64).reshape(2, 32) * 3 % 300
    model = hlat.load_model(source, dtype=torch.float64)
    assert isinstance(model, torch.nn.Module) and not model.training
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float64)
    with torch.no_grad():
        difference = (model(tokens) - theirs(tokens).logits).abs().max()
    # Both compute in float64 from the same weights, in other orders; transformers rounds RoPE angles to fp32: positions
    # below 32 times 2^-24 are 2e-6 rad at most. Logits are of the order of 1, through two layers: 1e-5.
    assert difference < 1e-5


def test_a_loaded_model_keeps_the_stored_dtype_unless_told(trained: Path, exported: Path):
    for source in (trained, exported):
        assert {p.dtype for p in hlat.load_model(source).parameters()} == {torch.float32}
        assert {p.dtype for p in hlat.load_model(source, dtype=torch.bfloat16).parameters()} == {torch.bfloat16}
    left, right = (hlat.load_model(source).state_dict() for source in (trained, exported))
    assert all(torch.equal(left[name], right[name]) for name in left) and left.keys() == right.keys()


def test_weights_that_are_not_there_are_refused(trained: Path, exported: Path, tmp_path: Path):
    for source in (trained, exported):
        with pytest.raises(hlat.CheckpointError, match="ema"):
            hlat.load_model(source, weights="ema")
    with pytest.raises(hlat.CheckpointError, match="does not exist"):
        hlat.load_model(tmp_path / "nothing")


# --- numbers ------------------------------------------------------------------------------------------------


def test_evaluation_and_generation_are_those_of_the_command(trained: Path, capfd: pytest.CaptureFixture[str]):
    result = hlat.evaluate(trained)
    assert (
        f"validation loss {result.loss:.4f}, perplexity {result.perplexity:.2f}" in command("evaluate", trained).stdout
    )
    assert result.perplexity == math.exp(result.loss)
    text = hlat.generate(trained, "the cat", max_tokens=8, temperature=0.8, seed=3)
    words = ("--max-tokens", "8", "--temperature", "0.8", "--seed", "3")
    assert command("generate", trained, "--prompt", "the cat", *words).stdout == escape_controls(f"the cat{text}\n")
    assert capfd.readouterr() == ("", "")


def test_a_plan_is_that_of_the_command(capfd: pytest.CaptureFixture[str]):
    plan = hlat.plan("llama-2-7b", "p5.48xlarge:1", tokens=10**9)
    words = ("--model", "llama-2-7b", "--cluster", "p5.48xlarge:1", "--tokens", "1e9", "--json")
    theirs = json.loads(command("plan", *words).stdout)
    ours = plan.to_dict()
    assert ours["chosen"].items() <= theirs["chosen"].items()  # the command also tells which layouts are on the front
    assert plan.chosen.days == ours["chosen"]["days"] > 0
    assert plan.chosen.candidate.tensor == ours["chosen"]["tensor"]
    both = hlat.compare_plans("llama-2-7b", ["p5.48xlarge:1", "p5.48xlarge:2"], tokens=10**9, rank_by="time")
    assert [each.request.cluster.name for each in both.plans] == ["p5.48xlarge:2", "p5.48xlarge:1"]
    assert capfd.readouterr() == ("", "")
    with pytest.raises(hlat.HardwareError):
        hlat.plan("llama-2-7b", "no-such-chip:4")
    with pytest.raises(hlat.PlanError, match="price"):
        hlat.plan("llama-2-7b", "trn1.32xlarge:4", price="free")
    assert load_catalog(None).instances, "the catalog is that of the package"


def test_a_rehearsal_is_that_of_the_command(recipe_file: Path, corpus: Path, capfd: pytest.CaptureFixture[str]):
    ours = hlat.rehearse(recipe_file, {"data.path": str(corpus)}, world=2, ranks=[0])
    theirs = command("rehearse", recipe_file, f"data.path={corpus}", "--world", "2", "--rank", "0", "--json")
    assert ours.to_dict() == json.loads(theirs.stdout)
    assert ours.ranks[0].peak_bytes > 0 and capfd.readouterr() == ("", "")
    with pytest.raises(hlat.RecipeError):
        hlat.rehearse(hlat.load_recipe(recipe_file, {"data.path": str(corpus)}), world=3)


# --- metrics ------------------------------------------------------------------------------------------------


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """metrics.jsonl of a run that went back to step 2 and is just writing a line."""
    records = [
        {"step": 1, "loss": 4.0, "seconds": {"data": 0.5}},
        {"step": 2, "loss": 3.0, "seconds": {"data": 0.25}, "val_loss": 3.5},
        {"step": 3, "loss": 99.0},
        {"step": 4, "loss": 98.0},
        {"step": 3, "loss": "NaN", "seconds": {"data": 1}},
        {"step": 5, "loss": 1.0, "note": "text"},
    ]
    text = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 6, "lo')
    return tmp_path


def test_metrics_have_each_step_once_and_no_torn_line(lines: Path):
    table = hlat.metrics(lines)
    assert isinstance(table, pa.Table) and str(table) == str(hlat.metrics(lines / "metrics.jsonl"))
    assert table["step"].to_pylist() == [1, 2, 3, 5], "step 4 was of weights that the run no longer has"
    assert table.schema.names == ["step", "loss", "seconds.data", "val_loss", "note"]
    assert [str(kind) for kind in table.schema.types] == ["int64", "double", "double", "double", "string"]
    assert table["seconds.data"].to_pylist() == [0.5, 0.25, 1.0, None]
    loss = table["loss"].to_pylist()
    assert loss[:2] == [4.0, 3.0] and math.isnan(loss[2]) and table["loss"].null_count == 0


def test_pandas_reads_metrics(lines: Path):
    pytest.importorskip("pandas")
    frame = hlat.metrics(lines).to_pandas().set_index("step")
    assert frame.loc[5, "loss"] == 1.0 and frame["val_loss"].dropna().tolist() == [3.5]


def test_polars_reads_metrics(lines: Path):
    polars = pytest.importorskip("polars")
    frame = polars.from_arrow(hlat.metrics(lines))
    assert frame["step"].to_list() == [1, 2, 3, 5] and frame["val_loss"].null_count() == 3
    assert frame["loss"].is_nan().sum() == 1


def test_a_run_without_metrics_is_refused(tmp_path: Path):
    with pytest.raises(hlat.DataError, match="has no metrics"):
        hlat.metrics(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"loss": 1.0}\n')
    with pytest.raises(hlat.DataError, match="record 1 has no step"):
        hlat.metrics(tmp_path)


def test_a_report_is_written_where_it_is_asked_for(tmp_path: Path):
    run = write_run(tmp_path / "run", [line(step) for step in range(1, 6)])
    assert hlat.report(run) == run / "report.html"
    asked = hlat.report([run], tmp_path / "else where.html")
    assert asked == tmp_path / "else where.html" and asked.stat().st_size > 1000


# --- types, documentation, notebook ---------------------------------------------------------------------------

USER_SCRIPT = """
import torch
import hlat

recipe = hlat.load_recipe("quickstart", {"training.steps": 3})
reveal_type(recipe.training.steps)
result = hlat.train(recipe, nproc="1:2")
reveal_type(result.checkpoint)
model: torch.nn.Module = hlat.load_model("run", dtype=torch.float32)
reveal_type(hlat.plan("llama-2-7b", "trn1.32xlarge:4").chosen.days)
reveal_type(hlat.evaluate("run").loss)
reveal_type(hlat.generate("run", "text"))
reveal_type(hlat.rehearse(recipe).ranks[0].peak_bytes)
try:
    hlat.train("x", overrides=3)
except hlat.HlatError as error:
    reveal_type(error.exit_code)
"""


@pytest.mark.slow
def test_mypy_knows_the_types(tmp_path: Path):
    (tmp_path / "user.py").write_text(USER_SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file", "", "user.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "MYPYPATH": str(ROOT / "src")},
    )  # fmt: skip
    lines = [line.partition(": ")[2] for line in done.stdout.splitlines() if line.startswith("user.py")]
    revealed = [line.split('"')[1] for line in lines if line.startswith("note: Revealed")]
    assert revealed == ["int | None", "pathlib.Path | None", "float", "float", "str", "int", "int"], done.stdout
    errors = [line for line in lines if line.startswith("error")]
    assert len(errors) == 1 and "overrides" in errors[0], "only the wrong argument"


def test_the_pages_have_every_function_and_argument():
    """docs/python.md has each function, field of the result and error; the reference each argument, with its line."""
    import dataclasses  # noqa: PLC0415
    import inspect  # noqa: PLC0415

    from website.reference.python import python_page  # noqa: PLC0415

    page, reference = (ROOT / "docs" / "python.md").read_text(), python_page()
    for name in (name for name in hlat._API["api"] if name != "TrainingResult"):
        assert f"`{name}`" in page, name
        section = reference.partition(f"\n### `{name}` ")[2].partition("\n### ")[0]
        for argument in inspect.signature(getattr(hlat, name)).parameters:
            # A line explains one argument, or says where several are explained.
            line = rf"^- (`\w+`, )*`{argument}`(, `\w+`)*: "
            assert re.search(line, section, re.MULTILINE), f"{name}: {argument} is not in its docstring"
    for field in dataclasses.fields(hlat.TrainingResult):
        assert f"`{field.name}`" in page, field.name
    for error in (*hlat._API["runtime.errors"], "RecipeError"):
        assert f"`{error}`" in page, error


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Its code cells run one after another in one process, as in a kernel; the slow test has a real kernel."""
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((ROOT / "examples" / "tiny_model.ipynb").read_text())
    names: dict[str, object] = {"__name__": "__main__"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None, "saved without outputs"
            exec(compile("".join(cell["source"]), "tiny_model.ipynb", "exec"), names)
    assert names["result"].finished and len(names["text"]) > 10  # type: ignore[attr-defined,arg-type]


@pytest.mark.slow
def test_the_notebook_runs_in_a_jupyter_kernel(tmp_path: Path):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(ROOT / "examples" / "tiny_model.ipynb", as_version=4)
    nbformat.validate(notebook)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert outputs and not [
        output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"
    ]
