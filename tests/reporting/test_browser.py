"""The report in headless Chromium: data in every chart, no request, no error, texts are texts, axe-core is content."""

import json
import threading
from pathlib import Path

import pytest

from hlat.reporting import Machines, ReportServer, write_report
from tests.support.browser import DESKTOP, PHONE, serious_problems, visit
from tests.support.reporting import event, line, resolved_recipe, write_lines, write_run

pytestmark = pytest.mark.browser

NAME = "<script>alert(1)</script>"
_OBSERVE = """
    dispatchEvent(new Event("beforeprint"));  // shows the parts behind other tabs and draws every chart
    for (const part of document.querySelectorAll("details")) part.open = true;
    const figures = [...document.querySelectorAll("figure")];
    for (let n = 0; n < 100 && figures.some((figure) => !figure.querySelector(".plot .main-svg")); n++) {
        await new Promise((done) => setTimeout(done, 100));
    }
    const result = {
        width: document.documentElement.scrollWidth, room: innerWidth,
        charts: figures.map((figure) => ({
            title: figure.querySelector("figcaption").textContent,
            shapes: figure.querySelectorAll(".plot path.js-line, .plot .points path, .plot .bars path").length,
            table: figure.querySelectorAll("tbody tr").length,
            box: figure.querySelector(".plot .main-svg").getBoundingClientRect().width,
        })),
        letters: Math.min(...[...document.querySelectorAll(".plot svg text")]
            .map((each) => each.getBoundingClientRect().height).filter((height) => height > 0)),
        top: document.querySelector(".headline").getBoundingClientRect().top + scrollY,
        scripts: document.scripts.length, text: document.body.innerText,
    };
    dispatchEvent(new Event("afterprint"));
    return result;
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with a metric, a task, recipe values, an event and a sample whose names are elements."""
    lines = [line(step, **{NAME: step / 3, f"task/{NAME}/accuracy": 0.5}) for step in range(10, 101, 10)]
    lines[3]["loss"] = "Infinity"
    lines[9] |= {"val_loss": 6.5, "val_bits_per_byte": 2.1}
    recipe = resolved_recipe()
    recipe["data"]["path"] = NAME
    events = [
        event("start", 0, step=0, parameters=10, processes=1, device=NAME, recipe=recipe),
        event("anomaly", 60, step=30, kind=NAME, action="skip", loss=9.0, grad_norm=2.0, reason=NAME),
        event("resume", 100, step=50, recipe=recipe, changes=[{"path": NAME, "old": NAME, "new": 1}]),
        event("goodput", 300, final=True, seconds={"productive": 200.0, NAME: 20.0}),
    ]
    folder = write_run(tmp_path / "run", lines, events)
    write_lines(folder / "samples.jsonl", [{"step": 50, "prompt": NAME, "text": f"\n{NAME} </pre>"}])
    return folder


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_at_the_widths_of_a_phone_and_of_a_desktop(run, tmp_path, dark):
    file = write_report([run], tmp_path / "report.html", Machines("p5.48xlarge:1"))
    seen = visit(file.as_uri(), _OBSERVE, dark=dark, pdf=True)
    assert seen.requests == [file.as_uri()] and seen.console == [] and seen.pdf_bytes > 10_000
    for result, view in zip(seen.results, (PHONE, DESKTOP), strict=True):
        assert result["room"] == view["width"] and result["width"] <= view["width"], "nothing sticks out"
        assert len(result["charts"]) >= 10 and result["top"] < 300, "numbers on the first screen"
        for chart in result["charts"]:
            assert chart["shapes"], f"{chart['title']} has data"
            assert chart["table"] > 0 and chart["box"] > 300
        assert result["letters"] >= 10, "pixels of the smallest text"
        assert result["scripts"] == 2 + len(result["charts"]), "data of each chart, Plotly, and the page's own"
        assert result["text"].count(NAME) >= 10


def test_axe_core_finds_nothing_serious(run, tmp_path):
    assert serious_problems(write_report([run], tmp_path / "report.html").as_uri()) == []


def test_axe_core_itself_works(tmp_path):
    file = tmp_path / "bad.html"
    file.write_text('<html lang="en"><title>bad</title><input type="text"><img src="data:,">')
    assert any("image-alt" in problem for problem in serious_problems(file.as_uri()))


def test_a_request_an_error_and_a_foreign_script_are_noticed(tmp_path):
    file = tmp_path / "bad.html"
    file.write_text('<title>bad</title><img src="http://127.0.0.1:9/x.png"><script>nobody()</script>')
    seen = visit(file.as_uri(), "return 1", [PHONE])
    assert "http://127.0.0.1:9/x.png" in seen.requests
    assert any("nobody is not defined" in line for line in seen.console)


def test_the_policy_of_the_page_blocks_what_escaping_would_have_let_through(run, tmp_path):
    """A script and an image put into the finished page neither run nor load."""
    file = write_report([run], tmp_path / "report.html")
    injected = '<script>document.title = "taken"</script><img src="http://127.0.0.1:9/x.png">'
    file.write_text(file.read_text().replace("</main>", f"{injected}</main>"))
    seen = visit(file.as_uri(), "return document.title", [PHONE])
    assert seen.results != ["taken"] and len(seen.console) == 2, "one refusal each"


def test_the_served_page_follows_the_run(run):
    server = ReportServer([run])
    thread = threading.Thread(target=server.serve)
    thread.start()
    append = json.dumps(line(110)) + "\n"
    timer = threading.Timer(4, lambda: (run / "metrics.jsonl").open("a").write(append))
    timer.start()
    script = """
        for (let tries = 0; tries < 200; tries++) {
            if (document.querySelector(".headline").textContent.includes("step 110 of")) return true;
            await new Promise((done) => setTimeout(done, 200));
        }
        return false;
    """
    try:
        seen = visit(server.url, script, [PHONE])
    finally:
        timer.join()
        server.close()
        thread.join()
    assert seen.results == [True], "the page has loaded itself again; the script then ran again in the new one"
    assert all(url.startswith(server.url) for url in seen.requests)
