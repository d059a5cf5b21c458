"""The Dockerfile: its rules by reading it, and, where a builder is installed, the image built and used."""

import contextlib
import fnmatch
import hashlib
import json
import os
import re
import shutil
import subprocess
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ("cpu", "cuda")


def instructions() -> list[tuple[str, str]]:
    """(Keyword, rest) of each instruction, with continued lines joined."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = re.sub(r"(?m)^#.*\n", "", text).replace("\\\n", "").splitlines()
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines) if word]


def stages() -> dict[str, list[tuple[str, str]]]:
    """Instructions of each stage, by its name; the first is its FROM."""
    found: dict[str, list[tuple[str, str]]] = {}
    for keyword, rest in instructions():
        if keyword == "FROM":
            found[rest.split(" AS ")[1]] = []
        if found:
            list(found.values())[-1].append((keyword, rest))
    return found


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_runs_hlat_as_a_user_who_is_not_root(name):
    of_stage = dict(stages()[name])
    user, group = of_stage["USER"].split(":")
    assert int(user) > 0 and int(group) > 0, "a number, which runAsNonRoot of Kubernetes can check"
    assert json.loads(of_stage["ENTRYPOINT"]) == ["hlat"]
    names = [keyword for keyword, _ in stages()[name]]
    assert names.index("USER") > max(index for index, word in enumerate(names) if word in ("RUN", "COPY", "WORKDIR"))


def test_versions_are_pinned():
    words = dict(instructions())
    base = next(rest.removeprefix("BASE=") for keyword, rest in instructions() if rest.startswith("BASE="))
    assert re.fullmatch(r"python:3\.\d+-slim-[a-z]+@sha256:[0-9a-f]{64}", base)
    known = ["${BASE}", *stages()]
    assert all(of_stage[0][1].split()[0] in known for of_stage in stages().values()), "no other image"
    commands = [one for keyword, rest in instructions() if keyword == "RUN" for one in rest.split("&&")]
    installs = [one.strip() for one in commands if "pip install" in one]
    ours, others = ([one for one in installs if one.endswith(" /build") == mine] for mine in (True, False))
    assert len(ours) == 2 and all("--no-deps --no-build-isolation" in one for one in ours), "nothing is loaded for them"
    assert len(others) == 3 and all("--require-hashes" in one for one in others)
    assert "ADD" not in words and "curl" not in str(instructions()), "nothing is loaded but packages"


def test_the_lock_of_the_images_is_complete_and_has_nothing_for_work_on_hlat():
    """Witness: the requirements that installed packages state, followed from those of the project."""
    image, _, work = (ROOT / "requirements.lock").read_text().partition("# For work on hlat itself.")
    names, others = (set(re.findall(r"(?m)^([a-z0-9][^ =]*)==", text)) for text in (image, work))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], "hatchling"]
    wanted += [
        text for extra in ("hf", "http", "s3", "sentencepiece") for text in project["optional-dependencies"][extra]
    ]
    seen: set[str] = set()
    while wanted:
        one = Requirement(wanted.pop())
        name = canonicalize_name(one.name)
        if name in seen or (one.marker is not None and not one.marker.evaluate({"extra": ""})):
            continue
        seen.add(name)
        with contextlib.suppress(PackageNotFoundError):  # hatchling's, where no image is built
            wanted += requires(name) or []
    assert seen <= names and not names & others
    assert {"pytest", "mypy", "ruff", "moto"} <= others


def test_the_image_for_cpus_leaves_torch_and_cuda_out_of_the_lock(tmp_path):
    """Witness: sed, with the expressions of the Dockerfile."""
    runs = " ".join(rest for keyword, rest in instructions() if keyword == "RUN")
    lock = tmp_path / "requirements.lock"
    shutil.copy(ROOT / "requirements.lock", lock)
    before = re.findall(r"(?m)^([a-z0-9][^ =]*)==", lock.read_text().partition("# For work")[0])
    for expression in re.findall(r"sed -i ('[^']*')", runs):
        subprocess.run(["sh", "-c", f"sed -i {expression} {lock}"], check=True)
    after = re.findall(r"(?m)^([a-z0-9][^ =]*)==", lock.read_text())
    gone = sorted(set(before) - set(after))
    assert after == [name for name in before if name not in gone]
    assert {"torch", "triton", "nvidia-nccl-cu13"} <= set(gone)
    assert all(re.match("torch$|triton$|nvidia-|cuda-", name) for name in gone)
    hashes = re.findall(r"(?m)^    --hash=sha256:[0-9a-f]{64}( \\)?$", lock.read_text())
    assert len(hashes) + len(after) == len(lock.read_text().splitlines()) - 1, "whole entries, and the comment"


def test_the_build_sees_what_an_installation_needs_and_no_more():
    """By the rules of .dockerignore: the last line that fits decides."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]

    def is_sent(path: str) -> bool:
        sent = True
        parts = path.split("/")
        for line in lines:
            pattern = line.removeprefix("!").removeprefix("**/")
            places = parts if "**/" in line else ["/".join(parts[: pattern.count("/") + 1])]
            if any(fnmatch.fnmatch(part, pattern) for part in places):
                sent = line.startswith("!")
        return sent

    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = settings["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = [settings["project"]["readme"], *settings["project"]["license-files"], *wheel["force-include"]]
    needed += [
        *wheel["packages"],
        "requirements.lock",
        "pyproject.toml",
        "src/hlat/__init__.py",
        "recipes/quickstart.yaml",
    ]
    assert all((ROOT / path).exists() and is_sent(path) for path in needed)
    rest = (
        "tests",
        ".git/config",
        "runs/mine",
        "benchmarks/results.py",
        ".venv/bin/python",
        "src/hlat/__pycache__/x.pyc",
    )
    assert not any(is_sent(path) for path in rest)


class Builder:
    """buildah without a daemon, with its images in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._storage = ["--root", str(folder / "root"), "--runroot", str(folder / "run"), "--storage-driver", "vfs"]

    def __call__(self, *words: str, seconds: float = 1200) -> str:
        done = subprocess.run(
            ["buildah", *self._storage, *words], capture_output=True, text=True, timeout=seconds, check=False
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout.strip()


@pytest.fixture(scope="module")
def builder(tmp_path_factory):
    """A builder that has a base image: a Debian with Python."""
    if os.geteuid() or not (shutil.which("buildah") and shutil.which("mmdebstrap")):
        pytest.skip("needs root, buildah and mmdebstrap: apt-get install buildah mmdebstrap")
    folder = tmp_path_factory.mktemp("image")
    packages = "python3,python3-venv,python3-dev,ca-certificates"
    words = ["mmdebstrap", "--variant=apt", f"--include={packages}", "bookworm", str(folder / "rootfs.tar")]
    made = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)
    if made.returncode:
        pytest.skip(f"no packages from Debian: {made.stderr[-300:]}")
    (folder / "Dockerfile").write_text("FROM scratch\nADD rootfs.tar /\n")
    found = Builder(folder)
    found("bud", "--isolation", "chroot", "--tag", "base", str(folder))
    yield found
    shutil.rmtree(folder, ignore_errors=True)


def pip_settings() -> list[str]:
    """Options that give a build the pip settings of this machine, which may have an index of its own."""
    settings = [f"--env={name}={value}" for name, value in os.environ.items() if name.startswith("PIP_")]
    places = ["/etc/pip.conf", "/etc/xdg/pip", *os.environ.get("PIP_FIND_LINKS", "").split(), *_local_indexes()]
    mounts = [f"--volume={place}:{place}:ro" for place in dict.fromkeys(places) if Path(place).exists()]
    return [*settings, *mounts, "--volume=/etc/ssl/certs:/etc/ssl/certs:ro"]


def _local_indexes() -> list[str]:
    words = ["pip", "config", "get", "global.extra-index-url"]
    found = subprocess.run(words, capture_output=True, text=True, check=False).stdout.split()
    return [word.removeprefix("file://").removesuffix("/simple") for word in found if word.startswith("file://")]


def torch_hash(index: str, folder: Path) -> str:
    """Sha256 of this machine's build of torch, for the Python of the base image, Debian's 3.11."""
    version = re.search(r"(?m)^torch==([^ ]*)", (ROOT / "requirements.lock").read_text())[1]
    words = ["pip", "download", "--no-deps", "--python-version=3.11", "--only-binary=:all:", f"--dest={folder}"]
    subprocess.run([*words, "--index-url", index, f"torch=={version}"], check=True, timeout=600)
    (wheel,) = folder.glob("torch-*.whl")
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


@pytest.mark.slow
def test_the_image_for_cpus_is_built_and_trains(builder, tmp_path):
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple")  # has a build of torch for this machine
    arguments = [
        "--build-arg",
        "BASE=localhost/base",
        "--build-arg",
        f"TORCH_INDEX={index}",
        "--build-arg",
        f"TORCH_HASHES={torch_hash(index, tmp_path)}",
    ]
    options = ["--isolation", "chroot", "--layers", *pip_settings(), *arguments, "--target", "cpu", "--tag", "hlat"]
    builder("bud", *options, str(ROOT))
    container = builder("from", "localhost/hlat")

    def run(*words: str) -> str:
        return builder("run", "--isolation", "chroot", container, "--", *words)

    assert run("id", "-u") == "1000"
    assert run("python", "-c", "import torch; print(torch.__version__)").startswith("2.13.")
    assert "report" in run("hlat", "quickstart", "--to", "/data/q", "--steps", "5")
    loaded = (
        "from transformers import AutoModelForCausalLM as A; print(A.from_pretrained('/data/q/hf').num_parameters())"
    )
    assert int(run("python", "-c", loaded).splitlines()[-1]) > 1e5
    assert not run("sh", "-c", "ls /build /root 2>/dev/null || true"), "the sources are not in the image"
