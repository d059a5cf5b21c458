"use strict";
(() => {
  const show = (value) => Number.isInteger(value) && Math.abs(value) < 1e15
    ? value.toLocaleString("en") : String(Number(value.toPrecision(5)));
  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) { const middle = (low + high) >> 1; if (xs[middle] <= x) low = middle; else high = middle; }
    return x - xs[low] <= xs[high] - x ? low : high;
  };
  for (const figure of document.querySelectorAll("figure.chart")) {
    const holder = figure.querySelector("script"), slider = figure.querySelector("input");
    if (!holder || !slider) continue;
    let data = null;
    const svg = figure.querySelector("svg"), output = figure.querySelector("output");
    const cursor = figure.querySelector(".cursor");
    figure.classList.add("live");
    const read = () => {
      data = data || JSON.parse(holder.textContent);
      const share = slider.value / slider.max;
      const x = data.log ? data.from * Math.pow(data.to / data.from, share) : data.from + share * (data.to - data.from);
      const words = data.series.filter((series) => series.x.length).map((series) => {
        const index = nearest(series.x, x);
        return series.name + " " + show(series.y[index]) + " at " + show(series.x[index]);
      });
      cursor.setAttribute("transform", "translate(" + (data.left + share * data.width) + " 0)");
      cursor.style.visibility = "visible";
      output.textContent = words.join("; ") + " " + data.unit;
      slider.setAttribute("aria-valuetext", output.textContent);
    };
    slider.addEventListener("input", read);
    svg.addEventListener("pointermove", (event) => {
      data = data || JSON.parse(holder.textContent);
      const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
      const share = ((event.clientX - box.left) * scale - data.left) / data.width;
      slider.value = Math.round(Math.min(1, Math.max(0, share)) * slider.max);
      read();
    });
  }
  const version = document.body.dataset.version;
  if (version !== undefined) {
    const ask = async () => {
      try {
        const answer = await fetch("version", {cache: "no-store"});
        if (answer.ok && (await answer.text()) !== version && !document.querySelector("input:focus")) location.reload();
      } catch (error) { /* the server has ended: the page stays as it is */ }
    };
    setInterval(ask, 5000);
  }
})();
