"""The pages docs/clusters/*.md: hlat's parser reads their commands, the cheap ones run, predictions are the planner's.

A page's recipes, YAML blocks that begin with their name in a comment, are written to a folder with the shipped recipes,
in which its commands are given. Nothing here needs a network, a scheduler or a device.
"""

import json
import re
from pathlib import Path

import pytest
import yaml

from hlat.config import load_recipe
from hlat.hardware import load_catalog, parse_cluster
from hlat.launch.preflight.judgement import CHECKS
from tests.support.commands import hlat
from tests.support.pages import ROOT, command_lines, is_message, parse, spans, without_blocks
from website.planned_numbers import prediction_rows
from website.reference.run_files import events

PAGES = sorted((ROOT / "docs/clusters").glob("*.md"))
TEXTS = {page.stem: page.read_text(encoding="utf-8") for page in PAGES}
COMMANDS = [(page, words) for page, text in TEXTS.items() for words in command_lines(text)]
CHEAP = {"check", "launch slurm", "launch kubernetes", "launch local"}
STEPS = ["install", "data", "plan", "rehearse", "doctor", "launch", "watch", "failure drill", "end", "bill", "export"]


def cheap(words: list[str]) -> bool:
    """True for a command that takes about a second, and starts or submits nothing."""
    verb, arguments = parse(words)
    return verb in CHEAP and arguments.get("dry_run", True)


def of_verb(*verbs: str) -> list[tuple[str, list[str]]]:
    """Commands of these verbs, except those about machines that a page measures before."""
    return [(page, words) for page, words in COMMANDS if parse(words)[0] in verbs and "--hardware" not in words]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the shipped recipes."""
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    return tmp_path


def write_files(page: str, folder: Path) -> dict[str, str]:
    """Write the named YAML blocks of a page; return them by name."""
    blocks = re.findall(r"^```yaml\n# (\S+)\n(.*?)^```", TEXTS[page], re.DOTALL | re.MULTILINE)
    for name, content in blocks:
        (folder / name).write_text(content, encoding="utf-8")
    return dict(blocks)


def described(page: str, words: list[str]) -> str:
    return f"{page}: {' '.join(words)}"


def ids(cases: list[tuple[str, list[str]]]) -> list[str]:
    return [described(*case)[:100] for case in cases]


def test_there_is_a_page_for_each_kind_of_cluster() -> None:
    assert set(TEXTS) == {"slurm", "eks", "gpu-box", "workstations", "trn2"}


@pytest.mark.parametrize("page", sorted(TEXTS))
def test_a_page_leads_from_installation_to_export(page: str) -> None:
    headings = re.findall(r"^## \d+\. (.+)$", TEXTS[page], re.MULTILINE)
    assert [step for step in STEPS if not any(step in heading.lower() for heading in headings)] == []
    assert "**What is verified.**" in TEXTS[page]


@pytest.mark.parametrize("page", sorted(TEXTS))
def test_recipes_of_commands_are_accepted_with_their_overrides_and_processes(
    page: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(page, folder)
    monkeypatch.chdir(folder)
    loaded = 0
    for words in (words for of, words in COMMANDS if of == page):
        verb, arguments = parse(words)
        if arguments.get("recipe") is None:
            continue
        hosts = len(arguments["hosts"].split(",")) if arguments.get("hosts") else arguments.get("nodes") or 1
        processes = int(str(hosts).partition(":")[0]) * int(arguments.get("nproc") or 1)
        has_world = not verb.startswith("data ") and not arguments.get("instance")
        world = arguments.get("world") or (processes if has_world else None)
        load_recipe(arguments["recipe"], arguments.get("overrides") or [], world=world)
        if arguments.get("least"):
            cluster = parse_cluster(f"{arguments.get('instance') or 'p5.48xlarge'}:1", load_catalog())
            each = cluster.devices if arguments.get("instance") else arguments.get("nproc") or 1
            load_recipe(arguments["recipe"], arguments["overrides"] or [], world=arguments["least"] * each)
        loaded += 1
    assert loaded


@pytest.mark.parametrize(("page", "words"), cases := [case for case in COMMANDS if cheap(case[1])], ids=ids(cases))
def test_a_cheap_command_succeeds(page: str, words: list[str], folder: Path) -> None:
    write_files(page, folder)
    elsewhere = ["--no-files"] if words[1] == "check" else []  # the text is on the cluster
    done = hlat(*words[1:], *elsewhere, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert not [path for path in folder.iterdir() if path.suffix != ".yaml" and path.name != "recipes"]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "words"), of_verb("rehearse"), ids=ids(of_verb("rehearse")))
def test_a_rehearsal_succeeds(page: str, words: list[str], folder: Path) -> None:
    write_files(page, folder)
    done = hlat(*words[1:], cwd=folder)
    assert done.returncode == 0, done.stderr
    quoted = re.search(r"([\d.]+) GiB at\s+the\s+peak", TEXTS[page])
    peaks = re.findall(r"([\d.]+) GiB at the peak", done.stdout)
    assert peaks and (quoted is None or f"{float(peaks[0]):.1f}" == quoted[1])


PLANS = [pytest.param(*case, marks=[] if "--layout" in case[1] else pytest.mark.slow) for case in of_verb("plan")]


@pytest.mark.parametrize(("page", "words"), PLANS, ids=ids(of_verb("plan")))
def test_a_plan_succeeds_and_its_predictions_are_those_of_the_page(page: str, words: list[str], folder: Path) -> None:
    write_files(page, folder)
    done = hlat(*words[1:], "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    command = re.escape(f"`{' '.join(words)}`")
    table = re.search(rf"^\| {command} \| prediction \|\n\|---\|---\|\n((?:\|.*\n)+)", TEXTS[page], re.MULTILINE)
    if table is not None:
        assert table[1].splitlines() == prediction_rows(plan)


def test_layouts_of_recipes_are_those_of_the_plans(folder: Path) -> None:
    """The recipe of a page has the layout of the page's predictions."""
    for page, text in TEXTS.items():
        table = re.search(r"^\| layout \| tensor (\d+), pipeline (\d+), data \d+, zero (\d+)", text, re.MULTILINE)
        if table is None:
            continue
        names = write_files(page, folder)
        layout = load_recipe(str(folder / next(iter(name for name in names if "include" in names[name])))).parallel
        assert (layout.tensor, layout.pipeline, layout.zero) == tuple(map(int, table.groups())), page


@pytest.mark.parametrize("page", sorted(TEXTS))
def test_messages_events_and_checks_named_exist(page: str) -> None:
    prose = without_blocks(TEXTS[page])
    messages = [span for span in spans(prose) if "..." in span]
    assert messages and [message for message in messages if not is_message(message)] == []
    listed = re.findall(r"\bevents? ((?:`\w+`(?:, )?)+)", prose)
    named = {name for names in listed for name in re.findall(r"\w+", names)}
    assert named and named <= events().keys()
    assert set(re.findall(r"\bHD\d\d\b", TEXTS[page])) <= {check.id for check in CHECKS}


def test_manifests_of_the_pages_are_valid(folder: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate (extra clusters)")
    files = write_files("eks", folder)
    manifests = [yaml.safe_load(text) for name, text in files.items() if "apiVersion" in text]
    assert {manifest["kind"] for manifest in manifests} == {"PersistentVolumeClaim", "Pod"}
    for manifest in manifests:
        validate.validate(manifest, "1.34", strict=True)
        for container in manifest["spec"].get("containers", ()):
            parse(container["command"])


def test_the_manifests_of_a_run_are_those_of_an_examination_with_one_word_changed(folder: Path) -> None:
    """As eks.md does with sed."""
    write_files("eks", folder)
    words = next(words for page, words in COMMANDS if page == "eks" and "doctor" in words)
    done = hlat(*words[1:], cwd=folder)
    assert "sed -i 's/- train$/- doctor/' doctor.yaml" in TEXTS["eks"]
    text = re.sub(r"- train$", "- doctor", done.stdout, flags=re.MULTILINE)
    job = next(each for each in yaml.safe_load_all(text) if each["kind"] == "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    verb, arguments = parse(container["command"])
    assert verb == "doctor" and arguments["nodes"] == "16" and arguments["nproc"] == 8
    assert not {"livenessProbe", "startupProbe", "readinessProbe"} & container.keys()
