"""Take the pictures of pages in docs/pictures again: ``python -m website.pictures FOLDER``, with the extra `browser`.

quickstart, training with faults, plans: all real --+
a run of 64 GPUs: made up                         --+--> a page each --Chromium--> 1366 and 390 pixels wide,
                                                           light above dark, put together as one sheet for each page

Runs and pages stay in FOLDER, and what is there is not made again: delete a page to see a change of its code. The runs
take some ten minutes on two cores.
"""

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

from PIL import Image

from hlat.reporting import Machines, write_report
from tests.support.browser import visit
from tests.support.reporting import event, line, resolved_recipe, write_run

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
_WIDTHS = (1366, 390)
_GAP = 24  # pixels between the parts of a sheet
_COLOURS = 192  # of a sheet: curves and letters need no more, and the file has half of the bytes
_DRAWN = """
    scrollTo(0, 0);
    await new Promise((done) => setTimeout(done, 1200));  // charts of this width
"""


def _hlat(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "hlat", *words], check=True)


def _quickstart(folder: Path) -> list[Path]:
    _hlat("quickstart", "--to", str(folder / "quickstart"))
    return [folder / "quickstart"]


def _tiny(folder: Path, name: str, *words: str) -> Path:
    """Train the recipe tiny-shakespeare on a text that every Python has."""
    text = folder / "input.txt"
    text.write_text("\n".join(topics.values()), encoding="utf-8")
    given = (f"data.path={text}", "model.vocab_size=128", f"run.name={name}", f"run.dir={folder / name}")
    often = ("training.steps=1200", "training.log_every=5", "evaluation.every_steps=100", "evaluation.sequences=64")
    _hlat("train", "tiny-shakespeare", *given, *often, "checkpoint.every_steps=100", *words)
    return folder / name


def _restarts(folder: Path) -> list[Path]:
    kills = ", ".join(f"{{kind: kill, at_step: {step}, rank: {step % 2}}}" for step in (230, 545, 920))
    faults = f"faults=[{kills}, {{kind: spike, at_step: 720}}, {{kind: nan, at_step: 1050}}]"
    back = ("anomalies.spike=rollback",)
    return [_tiny(folder, "three-restarts", "--nproc", "2", "--allow-faults", "batch.micro_batch=6", faults, *back)]


def _comparison(folder: Path) -> list[Path]:
    rates = {"adamw": (), "high-rate": ("optimizer.lr=2e-2",), "muon": ("optimizer.kind=muon", "optimizer.lr=5e-3")}
    short = ("training.steps=300", "evaluation.every_steps=30", "schedule.warmup_steps=30")
    return [_tiny(folder, name, *short, *words) for name, words in rates.items()]


def _sources(folder: Path) -> list[Path]:
    """Write a run of 64 GPUs with forty sources and as many validation sets."""
    kinds = ("web", "code", "books", "papers", "forums", "news", "law", "talks")
    names = [f"{kind}-{number}" for kind in kinds for number in range(1, 6)]
    sources = [{"name": name, "path": "none", "weight": 50 - place} for place, name in enumerate(names)]
    given = ("run.name=forty-sources", "training.steps=20000", "data.path=null", f"data.sources={sources}")
    recipe = resolved_recipe(*given)
    lines = []
    for step in range(20, 20_001, 20):
        loss = 2.2 + 7 * math.exp(-step / 2500) + 0.06 * math.sin(step * 0.37) + 0.04 * math.sin(step * 1.9)
        more = {"loss": loss, "tokens": step << 22, "samples": step << 10, "tokens_per_second": 8.2e5}
        if step % 1000 == 0:
            more |= {"val_loss": loss + 0.05, "val_bits_per_byte": loss / 3.1}
            more |= {f"val/{name}/loss": loss + 0.012 * place for place, name in enumerate(names)}
        lines.append(line(step, **more, lr=1e-3 * (1 - step / 20_000), seconds={"forward": 30.0, "backward": 72.0}))
    begun = event("start", 0, step=0, parameters=1_100_000_000, processes=64, device="cuda:h100", recipe=recipe)
    ended = event("end", 102_500, step=20_000, reason="finished")
    spent = {"productive": 101_000.0, "saving": 600.0, "starting": 900.0}
    saves = [event("checkpoint", 5.1 * step, step=step, seconds=21.0) for step in range(2000, 20_001, 2000)]
    account = event("goodput", 102_500, final=True, seconds=spent)
    return [write_run(folder / "forty", lines, [begun, *saves, ended, account])]


_RUNS: dict[str, tuple[Callable[[Path], list[Path]], Machines | None]] = {
    "report-quickstart": (_quickstart, None),
    "report-restarts": (_restarts, None),
    "report-comparison": (_comparison, None),
    "report-sources": (_sources, Machines("p5.48xlarge:8")),
}
_PLANS = {
    "plan-page": ("--model", "llama-3.1-8b", "--tokens", "300B", "--cluster", "p5.48xlarge:4"),
    "plan-grid": ("--grid", "1b,8b,70b", "--cluster", "p5.48xlarge:1,8,64"),
}
_HEIGHTS = {"plan-grid": 1000}  # of a picture; others have 1,300 pixels


def pages(folder: Path) -> dict[str, Path]:
    """Make the pages that the folder lacks; return all of them by the name of their picture."""
    found = {name: folder / f"{name}.html" for name in (*_RUNS, *_PLANS)}
    for name, (train, machines) in _RUNS.items():
        if not found[name].exists():
            write_report(train(folder), found[name], machines)
    for name, words in _PLANS.items():
        if not found[name].exists():
            _hlat("plan", *words, "--to", str(found[name]))
    return found


def sheet(page: Path, name: str) -> None:
    """Take a page at both widths, light and dark, and put the four side by side."""
    height = _HEIGHTS.get(name, 1300)
    views = [{"width": width, "height": height} for width in _WIDTHS]
    whole = Image.new("RGB", (sum(_WIDTHS) + _GAP, 2 * height + _GAP), "#808080")
    for row, dark in enumerate((False, True)):
        shots = [page.with_name(f"{name}-{width}{'-dark' * dark}.png") for width in _WIDTHS]
        visit(page.as_uri(), _DRAWN, views, dark=dark, screenshots=shots)
        whole.paste(Image.open(shots[0]), (0, row * (height + _GAP)))
        whole.paste(Image.open(shots[1]), (_WIDTHS[0] + _GAP, row * (height + _GAP)))
    _save(whole, name)


def _save(picture: Image.Image, name: str) -> None:
    few = picture.quantize(_COLOURS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(PICTURES / f"{name}.png", optimize=True)


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    FOLDER = Path(sys.argv[1]).resolve()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for picture, page in pages(FOLDER).items():
        sheet(page, picture)
    for short, long in {"report": "report-quickstart", "plan": "plan-page"}.items():
        _save(Image.open(FOLDER / f"{long}-{_WIDTHS[0]}.png").convert("RGB").crop((0, 0, _WIDTHS[0], 900)), short)
