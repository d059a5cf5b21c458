// The live part of a page: charts drawn by Plotly, one bar of settings for all of them, tabs, tables to sort.
"use strict";
(() => {
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const make = (tag, properties, ...children) => {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children); // texts are put in as text, never as HTML
    return element;
  };
  const number = (value) => Number.isInteger(value) ? value.toLocaleString("en")
    : String(Number(value.toPrecision(5)));
  const page = { axis: null, smoothing: 0 };
  const isTouch = matchMedia("(pointer: coarse)").matches;

  // Exponential mean of what came before, corrected for its start; and of what comes after.
  // The mean of both does not lag behind a falling curve.
  const past = (values, weight) => {
    let mean = 0, share = 0;
    return values.map((value) => {
      mean = weight * mean + (1 - weight) * value;
      share = weight * share + (1 - weight);
      return mean / share;
    });
  };
  const smoothed = (values, weight) => {
    const after = past(values.toReversed(), weight).toReversed();
    return past(values, weight).map((before, index) => (before + after[index]) / 2);
  };

  // Plotly reads a few tags in texts, such as links: names of runs and metrics are none.
  const escaped = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
  const plain = (given, fields) => Object.fromEntries(fields.filter((field) => field in given).map((field) => [field,
    Array.isArray(given[field]) ? given[field].map((each) => typeof each === "string" ? escaped(each) : each)
      : escaped(given[field])]));
  const titled = (axis, text) => ({ ...axis, title: { standoff: 8, text: escaped(text || "") } });

  class Chart {
    constructor(figure) {
      this.figure = figure;
      this.plot = figure.querySelector(".plot");
      this.content = JSON.parse(figure.querySelector("script").textContent);
      this.axes = this.content.axes || [];
      this.hidden = new Set(this.content.data.filter((trace) => trace.visible === false).map((trace) => trace.name));
      this.log = (this.content.layout.yaxis || {}).type === "log";
      this.drawn = false;
      const log = this.tool("log");
      log.hidden = !this.axes.length;
      this.tool("large").hidden = parseInt(this.plot.style.height) < 160; // a bar says no more when it is thicker
      log.setAttribute("aria-pressed", this.log);
      this.offerMore();
    }

    tool(name) { return this.figure.querySelector(`[data-do=${name}]`); }

    get axis() { return Math.max(0, this.axes.indexOf(page.axis)); }

    traces() {
      return this.content.data.flatMap((given) => {
        const trace = { ...given, visible: !this.hidden.has(given.name), ...plain(given, ["name", "text", "x", "y"]) };
        if (given.places) trace.x = given.places[Math.min(this.axis, given.places.length - 1)];
        if (!given.smooth) return [trace];
        trace.hovertemplate = "%{y:.5~g}<extra>%{fullData.name}</extra>";
        if (!page.smoothing || given.y.length < 12) return [trace];
        const raw = { ...trace, opacity: 0.25, hoverinfo: "skip", hovertemplate: null, mode: "lines" };
        return [raw, { ...trace, y: smoothed(given.y, page.smoothing), mode: "lines" }];
      });
    }

    layout() {
      const style = getComputedStyle(document.body), soft = getComputedStyle(this.figure).color;
      const line = getComputedStyle(this.figure).borderTopColor, given = this.content.layout;
      const axis = (one) => ({
        gridcolor: line, linecolor: line, zerolinecolor: line, automargin: true, exponentformat: "B",
        ...titled(one, (one.title || {}).text),
      });
      const layout = {
        font: { family: style.fontFamily, size: 12, color: soft }, paper_bgcolor: "transparent",
        plot_bgcolor: "transparent", margin: { l: 8, r: 14, t: given.annotations ? 22 : 8, b: 8 }, showlegend: false,
        hovermode: "closest", dragmode: isTouch && !this.figure.closest("dialog") ? false : "zoom", uirevision: 1,
        hoverlabel: { bgcolor: style.backgroundColor, bordercolor: line, font: { color: style.color, size: 12 } },
        ...given, xaxis: axis(given.xaxis), yaxis: axis(given.yaxis),
      };
      if (this.axes.length) {
        // Another axis has another range; a change of colours or smoothing keeps what the reader has zoomed to.
        Object.assign(layout.xaxis, { uirevision: this.axes[this.axis], hoverformat: ",.6~r",
          showspikes: true, spikemode: "across", spikesnap: "cursor", spikethickness: 1, spikedash: "solid",
          spikecolor: soft, title: titled({}, this.axes[this.axis]).title });
        Object.assign(layout.yaxis, { type: this.log ? "log" : "linear", uirevision: this.log });
      }
      return layout;
    }

    draw() {
      if (!this.drawn) return;
      Plotly.react(this.plot, this.traces(), this.layout(), { displayModeBar: false, responsive: true });
    }

    appear() {
      if (this.drawn) {
        // Its part may have been folded while the window changed its size.
        if (this.plot.offsetParent) Plotly.Plots.resize(this.plot);
        return;
      }
      this.drawn = true;
      this.draw();
      this.plot.on("plotly_hover", (event) => {
        // One that another chart has caused is not passed on.
        if (!(event.event instanceof MouseEvent) || !this.axes.length) return;
        this.link(event.xvals ? event.xvals[0] : event.points[0].x);
      });
      this.plot.on("plotly_unhover", () => this.others().forEach((chart) => Plotly.Fx.unhover(chart.plot)));
    }

    others() {
      const here = this.axes[this.axis];
      const isLinked = (chart) => chart.drawn && chart.axes[chart.axis] === here && chart.plot.offsetParent;
      return charts.filter((chart) => chart !== this && isLinked(chart));
    }

    link(x) { this.others().forEach((chart) => Plotly.Fx.hover(chart.plot, { xval: x }, "xy")); }

    curves() { return this.content.data.filter((trace) => trace.smooth && !this.hidden.has(trace.name)); }

    // The cursor of the keyboard: the points of the first curve, one after the other.
    step(by) {
      const [first, ...rest] = this.curves();
      if (!first) return;
      const places = (trace) => trace.places[Math.min(this.axis, trace.places.length - 1)], xs = places(first);
      this.at = Math.min(xs.length - 1, Math.max(0, this.at === undefined ? xs.length - 1 : this.at + by));
      const x = xs[this.at], near = (values) => values.reduce((best, value, index) =>
        Math.abs(value - x) < Math.abs(values[best] - x) ? index : best, 0);
      Plotly.Fx.hover(this.plot, { xval: x }, "xy");
      this.link(x);
      this.figure.querySelector("output").textContent = `${this.axes[this.axis]} ${number(x)}: ` +
        [first, ...rest].map((trace) => `${trace.name} ${number(trace.y[near(places(trace))])}`).join("; ");
    }

    range(change) {
      const [low, high] = this.plot._fullLayout.xaxis.range.map(Number);
      const [from, to] = change(low, high, high - low);
      Plotly.relayout(this.plot, { "xaxis.range[0]": from, "xaxis.range[1]": to });
    }

    key(event) {
      if (!this.drawn || event.target !== this.plot) return;
      const does = {
        ArrowLeft: () => event.shiftKey ? this.range((a, b, wide) => [a - wide / 8, b - wide / 8]) : this.step(-1),
        ArrowRight: () => event.shiftKey ? this.range((a, b, wide) => [a + wide / 8, b + wide / 8]) : this.step(1),
        "+": () => this.range((a, b, wide) => [a + wide / 6, b - wide / 6]),
        "-": () => this.range((a, b, wide) => [a - wide / 4, b + wide / 4]),
        0: () => this.reset(), l: () => this.axes.length && this.toggleLog(),
      }[event.key];
      if (!does || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      does();
    }

    reset() {
      const back = (name, axis = {}) => ({ [`${name}.autorange`]: axis.autorange ?? true }); // a first view may hide dots
      const { xaxis, yaxis } = this.content.layout;
      Plotly.relayout(this.plot, { ...back("xaxis", xaxis), ...back("yaxis", yaxis) });
    }

    toggleLog() {
      this.log = !this.log;
      this.tool("log").setAttribute("aria-pressed", this.log);
      this.draw();
    }

    // Curves beyond those that can be told apart: a list, from which the reader takes them into the legend.
    offerMore() {
      const more = this.content.data.filter((trace) => this.hidden.has(trace.name));
      if (!more.length) return;
      const legend = this.figure.querySelector(".legend"), choice = make("select", {},
        make("option", { value: "" }, `${more.length} more`), ...more.map((trace) => make("option", {}, trace.name)));
      choice.setAttribute("aria-label", `Show another curve of ${this.title}`);
      choice.addEventListener("change", () => {
        const name = choice.value, item = legend.querySelector("li").cloneNode(true), button = item.firstElementChild;
        button.dataset.name = name;
        button.lastChild.textContent = name;
        button.querySelector("path").setAttribute("stroke", more.find((trace) => trace.name === name).legend_colour);
        choice.selectedOptions[0].remove();
        legend.insertBefore(item, choice.parentElement);
        this.toggle(name);
      });
      legend.append(make("li", {}, choice));
    }

    toggle(name, alone) {
      const names = this.content.data.map((trace) => trace.name);
      if (alone) {
        const others = names.filter((each) => each !== name);
        const isAlone = others.every((each) => this.hidden.has(each));
        this.hidden = new Set(isAlone ? [] : others);
      } else if (!this.hidden.delete(name)) this.hidden.add(name);
      for (const button of all(".legend button", this.figure)) {
        button.setAttribute("aria-pressed", !this.hidden.has(button.dataset.name));
      }
      this.draw();
    }

    get title() { return this.figure.querySelector("figcaption").textContent; }

    get file() { return this.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 80) || "chart"; }

    png() {
      const style = getComputedStyle(document.body), layout = this.layout();
      const more = { showlegend: true, title: { text: escaped(this.title) }, paper_bgcolor: style.backgroundColor,
        margin: { l: 70, r: 30, t: 60, b: 60 } };
      Plotly.downloadImage({ data: this.traces(), layout: { ...layout, ...more } },
      { format: "png", width: 1200, height: 640, scale: 2, filename: this.file });
    }

    csv() {
      const quoted = (value) => `"${String(value ?? "").replaceAll('"', '""')}"`;
      const across = this.axes.length ? this.axes : ["x"];
      const lines = [["series", ...across, "y", "text"].map(quoted).join(",")];
      for (const trace of this.content.data) {
        const places = trace.places || [trace.x || []], texts = Array.isArray(trace.text) ? trace.text : [];
        (trace.y || []).forEach((y, index) => lines.push([trace.name, ...across.map((_, axis) =>
          (places[Math.min(axis, places.length - 1)] || [])[index]), y, texts[index]].map(quoted).join(",")));
      }
      const link = make("a", { download: `${this.file}.csv` });
      link.href = URL.createObjectURL(new Blob([lines.join("\n") + "\n"], { type: "text/csv" }));
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    }

    large() {
      if (this.figure.closest("dialog")) { this.figure.closest("dialog").close(); return; }
      const place = make("div", { className: "place" }), dialog = make("dialog", {});
      place.style.height = `${this.figure.offsetHeight}px`; // nothing below moves
      dialog.setAttribute("aria-label", this.title);
      this.figure.replaceWith(place);
      dialog.append(this.figure);
      document.body.append(dialog);
      const button = this.tool("large");
      button.textContent = "Close";
      dialog.addEventListener("close", () => {
        place.replaceWith(this.figure);
        dialog.remove();
        button.textContent = "Enlarge";
        this.fit();
        button.focus();
      });
      dialog.showModal();
      this.appear();
      this.fit();
    }

    fit() { if (this.drawn) { this.draw(); Plotly.Plots.resize(this.plot); } }
  }

  const charts = all("figure").map((figure) => new Chart(figure));
  const redraw = () => charts.forEach((chart) => chart.draw());
  const watcher = new IntersectionObserver((entries) => entries.filter((entry) => entry.isIntersecting)
    .forEach((entry) => charts.find((chart) => chart.plot === entry.target).appear()), { rootMargin: "400px" });
  const print = (isBegin) => {
    document.body.classList.toggle("printing", isBegin); // shows the parts behind other tabs
    charts.forEach((chart) => chart.appear());
  };
  for (const chart of charts) {
    chart.plot.addEventListener("keydown", (event) => chart.key(event));
    chart.figure.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (!button) return;
      const does = { log: () => chart.toggleLog(), reset: () => chart.reset(), png: () => chart.png(),
        csv: () => chart.csv(), large: () => chart.large() }[button.dataset.do];
      if (does) { chart.appear(); does(); }
      else if (button.dataset.name !== undefined) chart.toggle(button.dataset.name, event.detail > 1 || event.shiftKey);
    });
  }
  // Plotly comes after this script: what is in the page from the start must not wait for it.
  addEventListener("DOMContentLoaded", () => charts.forEach((chart) => watcher.observe(chart.plot)));
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

  // One bar of settings for all charts.
  const bar = make("div", { className: "settings" });
  const axes = [...new Set(charts.filter((chart) => chart.axes.length > 1).flatMap((chart) => chart.axes))];
  if (axes.length) {
    page.axis = axes[0];
    const choice = make("select", { onchange: () => { page.axis = choice.value; redraw(); } },
      ...axes.map((name) => make("option", { value: name }, name)));
    choice.name = "axis";
    bar.append(make("label", {}, "Axis ", choice));
  }
  if (charts.some((chart) => chart.content.data.some((trace) => trace.smooth && trace.y.length >= 12))) {
    const slider = make("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: 0, name: "smoothing" });
    const shown = make("output", {}, "0");
    slider.addEventListener("input", () => {
      page.smoothing = Number(slider.value);
      shown.textContent = slider.value;
      redraw();
    });
    bar.append(make("label", {}, "Smoothing ", slider, shown));
  }
  const themes = ["system", "light", "dark"], button = make("button", { type: "button", name: "theme" });
  const setTheme = (name) => {
    document.documentElement.dataset.theme = name;
    button.textContent = `Theme: ${name}`;
    redraw();
  };
  button.addEventListener("click", () => {
    setTheme(themes[(themes.indexOf(document.documentElement.dataset.theme) + 1) % themes.length]);
  });
  setTheme("system");
  bar.append(button);
  const nav = document.querySelector("nav");
  all("main section > h2").forEach((heading, index) => {
    heading.id = `part-${index + 1}`;
    nav.append(make("a", { href: `#part-${index + 1}` }, heading.textContent));
  });
  document.querySelector("header").append(bar);

  for (const tabs of all(".tabs")) {
    const parts = all(":scope > .tab", tabs), row = make("div", { className: "names" });
    row.setAttribute("role", "tablist");
    const names = parts.map((part, index) => {
      const name = make("button", { type: "button", id: `tab-${all("[role=tab]").length + index}` }, part.ariaLabel);
      name.setAttribute("role", "tab");
      part.setAttribute("role", "tabpanel");
      part.setAttribute("aria-labelledby", name.id);
      part.querySelector("h3").hidden = true;
      row.append(name);
      return name;
    });
    const show = (chosen) => parts.forEach((part, index) => {
      part.classList.toggle("closed", index !== chosen);
      names[index].setAttribute("aria-selected", index === chosen);
      names[index].tabIndex = index === chosen ? 0 : -1;
    });
    names.forEach((name, index) => {
      name.addEventListener("click", () => show(index));
      name.addEventListener("keydown", (event) => {
        const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
        if (!by) return;
        const next = (index + by + names.length) % names.length;
        show(next);
        names[next].focus();
      });
    });
    tabs.prepend(row);
    show(0);
  }

  const units = { s: 1, min: 60, h: 3600, days: 86400, k: 1e3, M: 1e6, B: 1e9, T: 1e12, kB: 1e3, MB: 1e6, GB: 1e9,
    TB: 1e12 };
  const worth = (text) => {
    const found = text.replace(/[,$~<]/g, "").match(/^\s*(-?[\d.]+(?:e[-+]?\d+)?)\s*([A-Za-z]*)/);
    return found ? Number(found[1]) * (units[found[2]] || 1) : NaN;
  };
  for (const sort of all("button.sort")) {
    sort.addEventListener("click", () => {
      const head = sort.closest("th"), body = sort.closest("table").tBodies[0], column = head.cellIndex;
      const order = head.ariaSort === "ascending" ? "descending" : "ascending", sign = order === "ascending" ? 1 : -1;
      for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", order);
      const cell = (row) => row.cells[column].textContent;
      const compare = (one, two) => {
        const a = worth(one), b = worth(two);
        if (Number.isNaN(a) !== Number.isNaN(b)) return Number.isNaN(a) ? 1 : -1; // texts after numbers
        return sign * (Number.isNaN(a) ? one.localeCompare(two) : a - b);
      };
      body.append(...[...body.rows].sort((one, two) => compare(cell(one), cell(two))));
    });
  }

  const version = document.body.dataset.version;
  if (version !== undefined) {
    const ask = async () => {
      try {
        const answer = await fetch("version", { cache: "no-store" });
        // Not while somebody is reading closely.
        const isBusy = document.querySelector("input:focus, dialog[open], .plot:focus");
        if (answer.ok && (await answer.text()) !== version && !isBusy) location.reload();
      } catch (error) { /* the server has ended: the page stays as it is */ }
    };
    setInterval(ask, 5000);
  }
})();
