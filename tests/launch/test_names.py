"""Names in batch scripts and manifests: quoted, so that they arrive as they are, or refused; nothing of them is run."""

import itertools
import os
import shlex
import stat
import subprocess
from pathlib import Path

import pytest
import yaml

from hlat.launch.run_request import RunRequest
from hlat.launch.schedulers.kubernetes import manifests, manifests_yaml
from hlat.launch.schedulers.kubernetes_options import KubernetesOptions
from hlat.launch.schedulers.slurm import SlurmOptions, batch_script
from hlat.runtime.errors import LaunchError

ODD = [
    "a b",
    "it's",
    'say "x"',
    "$HOME",
    "`touch pwned`",
    "$(touch pwned)",
    "a;b&c|d",
    "#x",
    "*",
    "~",
    "é東",
    "-x",
    "!a",
]
REFUSED = ["a\nb", "x\n#SBATCH --account=other", "a\rb", "a\x1b[2Jb", "a\u2028b", "a\udcffb", "a\tb", "a\0b"]
STUBS = {"srun": 'printf "%s\\0" "$@" > "$OUT"; env -0 > "$OUT.env"', "squeue": ":", "scontrol": ":"}


@pytest.fixture
def stubs(tmp_path: Path) -> Path:
    """A folder with programs in the place of Slurm's: srun writes its words and variables down."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, line in STUBS.items():
        (folder / name).write_text(f"#!/bin/bash\n{line}\n")
        (folder / name).chmod(stat.S_IRWXU)
    return folder


def written(text: str, recipe_file: Path, folder: Path) -> str:
    """Return the batch script with a text in the place of every name."""
    options = SlurmOptions(partition=text, account=text, qos=text, sbatch=(f"--comment={text}",), srun=(f"--x={text}",))
    overrides = (f"data.path={folder}", f"data.text_column={text!r}" if "'" not in text else "data.text_column=t")
    request = RunRequest(
        str(recipe_file), overrides, environment=(f"V={text}",), name=text, program=shlex.join(["hlat", text])
    )
    return batch_script(request, options, folder).script


@pytest.mark.parametrize("text", ODD)
def test_an_odd_name_arrives_as_it_is(text: str, recipe_file: Path, stubs: Path, tmp_path: Path) -> None:
    """Witnesses: bash runs the script; Python's reader of shell words reads the options of sbatch."""
    folder = tmp_path / text
    folder.mkdir()
    script = written(text, recipe_file, folder)
    lines = script.splitlines()
    assert [line for line in lines if "SBATCH" in line] == lines[1 : 1 + sum("#SBATCH" in line for line in lines)]
    options = [shlex.split(line.removeprefix("#SBATCH ")) for line in lines if line.startswith("#SBATCH ")]
    named = [f"--job-name={text}", f"--chdir={folder}", f"--partition={text}", f"--account={text}", f"--comment={text}"]
    assert all([name] in options for name in named)
    environment = {"PATH": f"{stubs}:{os.environ['PATH']}", "OUT": str(tmp_path / "out"), "SLURM_JOB_NUM_NODES": "1"}
    subprocess.run(["bash", "-c", script], cwd=folder, env=environment, check=True, capture_output=True)
    words = (tmp_path / "out").read_bytes().decode().split("\0")[:-1]
    assert f"--x={text}" in words and words[words.index("hlat") : words.index("train")] == ["hlat", text]
    assert words[words.index("train") + 1] == str(recipe_file) and f"data.path={folder}" in words
    assert f"V={text}" in (tmp_path / "out.env").read_bytes().decode().split("\0")
    assert not list(folder.iterdir()), "nothing of a name was run"


@pytest.mark.parametrize("text", REFUSED)
def test_a_name_that_no_line_can_hold_is_refused_wherever_it_is(text: str, recipe_file: Path, tmp_path: Path) -> None:
    with pytest.raises(LaunchError) as refusal:
        written(text, recipe_file, tmp_path / text)
    said = [line for line in str(refusal.value).splitlines() if "control characters and bytes that are not" in line]
    for name in ("--partition", "--account", "--qos", "--set", "--srun", "--name", "--program", "--env V", "folder"):
        assert any(line.strip().startswith((name, f"the working {name}")) for line in said), (name, said)


@pytest.mark.parametrize(("text", "kind"), list(itertools.product(ODD, ["job", "trainjob"])))
def test_manifests_hold_names_as_yaml_reads_them(text: str, kind: str, recipe_file: Path) -> None:
    request = RunRequest(
        str(recipe_file), ("data.path=/v/x", f"run.dir={f'/v/{text}'!r}"), environment=(f"V={text}",), name="x"
    )
    options = KubernetesOptions("registry:5000/x@sha256:0", kind, volumes=(f"claim:/v/{text}", "all:/v"))
    found = manifests(request, options)
    assert list(yaml.safe_load_all(manifests_yaml(found))) == found
    assert yaml.safe_load(found[0]["data"]["recipe.yaml"])["run"]["dir"] == f"/v/{text}"


@pytest.mark.parametrize("image", ["", "a b", "-rm", "x\ny", "x\t", "é", "a\udcff"])
def test_what_cannot_be_an_image_is_refused(image: str, recipe_file: Path) -> None:
    with pytest.raises(LaunchError, match="--image"):
        manifests(
            RunRequest(str(recipe_file), ("data.path=/v", "run.dir=/v/r")), KubernetesOptions(image, volumes=("c:/v",))
        )


@pytest.mark.parametrize(
    ("output", "folder", "expected"),
    [
        ("%x-%j.log", "w", "w"),
        ("logs/%x-%j.log", "w", "w/logs"),
        ("logs/%x/%j.log", "w", "w/logs/name"),
        ("100%%/%j.log", "w", "w/100%"),
        ("/elsewhere/%j.log", "w", "/elsewhere"),
        ("%x-%j.log", "90 %j", "90 %j"),
        ("/elsewhere/%j.log", "at 90%", "/elsewhere"),
        ("logs/%j/out.log", "w", None),
        ("%x.log", "back\\slash", None),
    ],
)
def test_the_folders_of_the_output_are_known_or_refused(
    output: str, folder: str, expected: str | None, recipe_file: Path, tmp_path: Path
) -> None:
    """Slurm makes none, and fails a job without a word; it replaces %j also in the name of the working folder."""
    request = RunRequest(str(recipe_file), ("data.path=x",), name="name")
    options, place = SlurmOptions(output=output), tmp_path / folder
    if expected is None:
        with pytest.raises(LaunchError, match="--output"):
            batch_script(request, options, place)
        return
    script = batch_script(request, options, place)
    assert script.missing == (tmp_path / expected,)
    assert ("90 %%j/%x-%j.log" in script.script) == (folder == "90 %j")


def test_an_option_of_sbatch_names_a_folder_too(recipe_file: Path, tmp_path: Path) -> None:
    request = RunRequest(str(recipe_file), ("data.path=x",))
    script = batch_script(request, SlurmOptions(sbatch=("--error=errors/%j.err",)), tmp_path)
    assert script.missing == (tmp_path / "errors",), "the folder of --output is there"
