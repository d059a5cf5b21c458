"""Folder that travels to the device machine, which has no network: wheels and prepared tokens; git ignores it.

pins --pip--> FOLDER/wheels;  source --pip wheel--> hlat's own;  docs/ --hlat--> FOLDER/data
--> sizes, checked against what may travel, and the command for the device machine

python benchmarks/gpu/carry.py                           make the folder, print the command
python benchmarks/gpu/carry.py --again RESULTS.json      the command that runs again what failed
"""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ".first_contact"
MIB = 1 << 20
MOST = 64 * MIB  # of the tree and all that is carried
MOST_CARRIED = 32 * MIB
LONGEST_COMMAND = 2000  # characters
# Packages that the image of the device machine lacks, and that hlat needs; torchao for fp8. Versions belong together.
WHEELS = (
    "pydantic==2.14.3",
    "pydantic-core==2.50.4",
    "typing-inspection==0.4.5",
    "typing-extensions==4.16.0",
    "annotated-types==0.8.0",
    "torchao==0.18.0",
)
_PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_24", "manylinux_2_17", "manylinux2014", "manylinux1")


def command(again: bool = False) -> str:
    """Return the command for the device machine, which runs in the root of a copy of this repository."""
    words = f"python3 benchmarks/gpu/first_contact.py --carried {FOLDER}"
    return f"{words} --again {FOLDER}/results.json --budget 230" if again else f"{words} --budget 540"


def travelling_bytes(root: Path) -> int:
    """Return the size of what travels with each call: tracked files, and others that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        check=True,
    ).stdout.split(b"\0")
    files = {root / name.decode() for name in listed if name} | set((root / "shared").rglob("*"))
    return sum(path.stat().st_size for path in files if path.is_file() and not path.is_symlink())


def folder_bytes(folder: Path) -> int:
    """Return the size of all files of a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def check(root: Path, folder: Path) -> str:
    """Return the sizes as a line.

    Raises:
        SystemExit: more would travel than may.
    """
    tree, carried = travelling_bytes(root), folder_bytes(folder)
    line = f"tree {tree / MIB:.1f} MiB + {FOLDER} {carried / MIB:.1f} MiB of {MOST / MIB:.0f} MiB"
    if tree + carried > MOST or carried > MOST_CARRIED:
        raise SystemExit(f"{line}: too large. Remove untracked files, or carry fewer wheels.")
    return line


def pip() -> list[str]:
    """Return the command of a pip that works: an environment may have none of its own."""
    for words in ([sys.executable, "-m", "pip"], ["python3", "-m", "pip"], ["pip3"], ["pip"]):
        found = shutil.which(words[0])
        if found and not subprocess.run([*words, "--version"], capture_output=True, check=False).returncode:
            return words
    raise SystemExit("there is no pip: carry the wheels by hand")


def make(folder: Path, python: str) -> None:
    """Fill the folder: wheels for that Python on Linux x86-64, hlat's own, and prepared tokens."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "wheels").mkdir(parents=True)
    where = [word for name in _PLATFORMS for word in ("--platform", f"{name}_x86_64")]
    options = ["--no-deps", "--only-binary=:all:", "--python-version", python, "--implementation", "cp", *where]
    _run([*pip(), "download", "-q", *options, "-d", str(folder / "wheels"), *WHEELS])
    _run([*pip(), "wheel", "-q", "--no-deps", "-w", str(folder / "wheels"), str(ROOT)])
    _run(
        [
            sys.executable,
            "-c",
            f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); {_TOKENS}",
            str(folder),
        ]
    )


_TOKENS = (
    "import pathlib; from kit.recovery import prepare, recipe_text; folder = pathlib.Path(sys.argv[1]); "
    "recipe = folder / 'recipe.yaml'; recipe.write_text(recipe_text(False, 'auto', folder)); "
    "prepare(recipe, folder / 'data')"
)


def _run(words: Sequence[str]) -> None:
    done = subprocess.run(words, cwd=ROOT, check=False)
    if done.returncode:
        raise SystemExit(f"failed with {done.returncode}: {' '.join(words)[:300]}")


def main() -> None:
    """Make the folder, or add the results of the first call, and print the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="3.12", help="Python of the device machine")
    parser.add_argument("--again", type=Path, metavar="RESULTS", help="results.json of the first call")
    options = parser.parse_args()
    folder = ROOT / FOLDER
    if options.again is None or not (folder / "wheels").is_dir():
        make(folder, options.python)
    if options.again is not None:
        shutil.copyfile(options.again, folder / "results.json")
    print(check(ROOT, folder))
    for wheel in sorted((folder / "wheels").iterdir()):
        print(f"  {wheel.stat().st_size / MIB:6.2f} MiB  {wheel.name}")
    print(f"carry: {FOLDER}\ntimeout_s: {300 if options.again else 600}\ncommand: {command(options.again is not None)}")


if __name__ == "__main__":
    main()
