"""A reader works with a page in headless Chromium: zoom, log axis, legend, smoothing, export, cursors, keys."""

from pathlib import Path

import numpy as np
import pytest

from hlat.page import Mark, Series, line_chart, page, paragraph, section, table, tabs
from tests.support.browser import DESKTOP, visit

pytestmark = pytest.mark.browser

_TOOLS = """
    const wait = (time) => new Promise((done) => setTimeout(done, time));
    const until = async (holds) => {
        for (let n = 0; n < 100 && !holds(); n++) await wait(50);
        return Boolean(holds());
    };
    const [one, two] = document.querySelectorAll("figure");
    const plot = (figure) => figure.querySelector(".plot");
    const press = (figure, name) => figure.querySelector(`[data-do=${name}]`).click();
    const key = (element, name, more = {}) =>
        element.dispatchEvent(new KeyboardEvent("keydown", {key: name, bubbles: true, cancelable: true, ...more}));
    const mouse = (element, name, x, y, more = {}) =>
        element.dispatchEvent(new MouseEvent(name, {clientX: x, clientY: y, bubbles: true, view: window, ...more}));
    const range = (figure) => plot(figure)._fullLayout.xaxis.range.map(Number);
    const wide = (figure) => range(figure)[1] - range(figure)[0];
    dispatchEvent(new Event("beforeprint"));  // draws every chart
    dispatchEvent(new Event("afterprint"));
    await until(() => two.querySelector(".nsewdrag"));
    const found = {};
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with two charts of the same axes, tabs and a table."""
    steps = np.arange(1.0, 501.0)
    axes, across = ("tokens", "step"), [steps * 1000, steps]
    noise = np.random.default_rng(1).normal(0, 0.3, len(steps))
    loss = [
        Series(name, across, 2 + shift + 6 / np.sqrt(steps) + noise) for shift, name in enumerate(("a", "<b>b</b>"))
    ]
    charts = [
        line_chart("Loss", loss, axes, "nats", marks=[Mark([2e5, 200.0], "save", "save, step 200", True)]),
        line_chart("Rate", [Series("rate", across, steps / 500)], axes, "rate"),
    ]
    rows = [("x", "90 s", "$2k"), ("y", "2 min", "$1.5M"), ("z", "1 h", "$300")]
    parts = [("One", paragraph("first")), ("Two", table(("name", "time", "price"), rows, caption="Rows"))]
    target = tmp_path_factory.mktemp("page") / "page.html"
    target.write_text(page("A page", [section("Charts", charts), section("Parts", [tabs(parts)])]), encoding="utf-8")
    return target


def observe(file: Path, script: str) -> dict[str, object]:
    seen = visit(file.as_uri(), _TOOLS + script + "return found;", [DESKTOP])
    assert seen.requests == [url for url in seen.requests if url == file.as_uri() or url.startswith("blob:")]
    assert seen.console == []
    return dict(seen.results[0])


def test_zoom_log_axis_legend_smoothing_and_the_switch_of_axes(file):
    found = observe(
        file,
        """
        const whole = wide(one), drag = one.querySelector(".nsewdrag"), box = drag.getBoundingClientRect();
        const [x, y] = [box.left + box.width / 4, box.top + box.height / 2];
        mouse(drag, "mousedown", x, y);
        mouse(document, "mousemove", x + box.width / 4, y);
        mouse(document, "mouseup", x + box.width / 4, y);
        found.zoomed = await until(() => wide(one) < 0.5 * whole);
        press(one, "reset");
        found.reset = await until(() => wide(one) > 0.9 * whole);
        press(one, "log");
        found.log = [plot(one)._fullLayout.yaxis.type, one.querySelector("[data-do=log]").getAttribute("aria-pressed")];
        const entry = one.querySelector(".legend button");
        const drawn = () => plot(one)._fullData.filter((trace) => trace.visible === true).length;
        const all = drawn();
        entry.click();
        found.hidden = [all - drawn(), entry.getAttribute("aria-pressed")];
        entry.click();
        const slider = document.querySelector("input[name=smoothing]");
        const jumps = (values) => Math.max(...values.slice(1).map((value, index) => Math.abs(value - values[index])));
        const rough = jumps([...plot(one)._fullData[0].y]);
        slider.value = 0.95;
        slider.dispatchEvent(new Event("input"));
        found.raw_is_faint = plot(one)._fullData[0].opacity < 0.5;
        found.smoother = jumps([...plot(one)._fullData[1].y]) < 0.5 * rough;
        const axis = document.querySelector("select[name=axis]");
        axis.value = "step";
        axis.dispatchEvent(new Event("change"));
        found.axes = [one, two].map((figure) => [plot(figure).layout.xaxis.title.text, Math.round(wide(figure) / 100)]);
        found.names = plot(one)._fullData.map((trace) => trace.name);
        """,
    )
    assert found["zoomed"] and found["reset"] and found["raw_is_faint"] and found["smoother"]
    assert found["log"] == ["log", "true"] and found["hidden"] == [1, "false"]
    assert found["axes"] == [["step", 5], ["step", 5]]
    assert "&lt;b&gt;b&lt;/b&gt;" in found["names"], "Plotly reads tags, and shows these as they are"


def test_export_cursors_keys_tabs_and_nothing_that_moves(file):
    found = observe(
        file,
        """
        const blobs = [];
        const create = URL.createObjectURL;
        URL.createObjectURL = (blob) => { blobs.push(blob); return create(blob); };
        HTMLAnchorElement.prototype.click = () => {};  // no file is written
        press(one, "csv");
        found.csv = (await blobs[0].text()).split("\\n").slice(0, 2);
        press(one, "png");
        found.png = await until(() => blobs.some((blob) => blob.type === "image/png" && blob.size > 10000));

        const places = () => JSON.stringify([...document.querySelectorAll("figure, h2")]
            .map((each) => each.getBoundingClientRect().top));
        const before = places(), drag = one.querySelector(".nsewdrag"), box = drag.getBoundingClientRect();
        for (const share of [0.4, 0.5]) {
            mouse(drag, "mousemove", box.left + box.width * share, box.top + box.height / 2);
            await wait(200);
        }
        found.linked = await until(() => two.querySelector(".hoverlayer").childElementCount > 0);
        found.still = places() === before;

        plot(two).focus();
        found.focused = document.activeElement === plot(two);
        key(plot(two), "ArrowLeft");
        key(plot(two), "ArrowLeft");
        found.read = two.querySelector("output").textContent;
        const whole = wide(two);
        key(plot(two), "+");
        found.nearer = await until(() => wide(two) < 0.8 * whole);
        key(plot(two), "0");
        found.whole = await until(() => wide(two) > 0.9 * whole);
        const reached = [...document.querySelectorAll(".tools button, .legend button, .settings *, summary, .plot")];
        found.all_reached = reached.every((each) => each.tabIndex >= 0 || each.matches("label, output, option"));

        press(two, "large");
        found.large = Boolean(document.querySelector("dialog[open] figure"));
        document.querySelector("dialog").close();
        found.back = await until(() => !document.querySelector("dialog") && two.closest("main"));

        const [first, second] = document.querySelectorAll("[role=tab]");
        key(first, "ArrowRight");
        found.tab = [second.ariaSelected, document.querySelector(".tab:not(.closed) caption").textContent];
        const column = (index) => [...document.querySelectorAll(".tab tbody tr")]
            .map((row) => row.cells[index].textContent);
        const sort = [...document.querySelectorAll(".tab .sort")];
        sort[2].click();
        found.by_price = column(2);
        sort[1].click();
        sort[1].click();
        found.by_time = column(1);
        found.order = sort[1].closest("th").ariaSort;
        """,
    )
    assert found["csv"] == ['"series","tokens","step","y","text"', found["csv"][1]]
    assert found["csv"][1].startswith('"a","1000","1",') and found["png"]
    assert found["linked"] and found["still"] and found["focused"] and found["all_reached"]
    assert found["read"] == "tokens 499,000: rate 0.998" and found["nearer"] and found["whole"]
    assert found["large"] and found["back"] and found["tab"] == ["true", "Rows"]
    assert found["by_price"] == ["$300", "$2k", "$1.5M"] and found["by_time"] == ["1 h", "2 min", "90 s"]
    assert found["order"] == "descending"
