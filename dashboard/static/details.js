// Draws a page's small charts, and copies what has a copy button. Never joins a gap: null is a time without a record.
(() => {
  "use strict";
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const COLOURS = ["--p", "--d", "--dr"], DASHES = [[], [6, 4], [2, 3]], STYLES = ["solid", "dashed", "dotted"];
  const two = (n) => String(n).padStart(2, "0");
  const clock = (s) => { const d = new Date(s * 1000); return `${two(d.getUTCHours())}:${two(d.getUTCMinutes())}:${two(d.getUTCSeconds())}Z`; };
  const WORDS = {
    s: (v) => (Math.abs(v) < 1 ? `${(v * 1000).toFixed(Math.abs(v) < 0.1 ? 1 : 0)} ms` : `${v.toFixed(1)} s`),
    share: (v) => `${(v * 100).toFixed(0)}%`,
    requests: (v) => v.toFixed(0),
    tokens: (v) => (v >= 1e4 ? `${(v / 1e3).toFixed(0)} k` : v.toFixed(0)),
  };

  const COUNTED = new Set(["requests", "tokens"]), WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6, 1e7];

  // ---- charts
  const drawn = [];
  const draw = (figure, told, range) => {
    const plot = figure.querySelector(".plot"), words = WORDS[told.unit] || String;
    plot.replaceChildren();
    if (!told.t.length || told.lines.every((l) => l.values.every((v) => v === null))) {
      const empty = document.createElement("p");
      empty.className = "empty";
      empty.textContent = "Nothing is known of it in this time.";
      plot.append(empty);
      return;
    }
    const axis = { stroke: colour("--mut"), grid: { stroke: colour("--grid") }, ticks: { stroke: colour("--grid") }, font: "11px system-ui, sans-serif" };
    // Without a pointer the newest known values are told, not dashes.
    const newest = told.t.findLastIndex((_t, i) => told.lines.some((l) => l.values[i] !== null));
    const rest = (u) => { if (!(u.cursor.left >= 0)) u.setLegend({ idx: newest }, false); };
    const say = (_u, v, _s, at) => (at === null ? "" : v === null || v === undefined ? "unknown" : words(v));
    const chart = new uPlot({
      width: plot.clientWidth, height: 170, tzDate: (s) => uPlot.tzDate(new Date(s * 1000), "Etc/UTC"),
      scales: { x: { range: () => range } }, cursor: { drag: { x: true, y: false, setScale: false } },
      legend: { markers: { width: 2, dash: (_u, i) => STYLES[i - 1] || "solid" } },
      axes: [{ ...axis, space: 86, values: (_u, ticks, _i, _s, step) => ticks.map((t) => new Date(t * 1000).toISOString().slice(step < 86400 ? 11 : 5, step < 60 ? 19 : step < 86400 ? 16 : 10) + (step < 86400 ? "Z" : "")) },
        { ...axis, size: 58, incrs: COUNTED.has(told.unit) ? WHOLE : undefined, values: (_u, ticks) => ticks.map(words) }],
      series: [{ label: "At", value: (_u, v) => (v === null || v === undefined ? "" : clock(v)) },
        ...told.lines.map((l, i) => ({ label: l.name, stroke: colour(COLOURS[i]), dash: DASHES[i], width: 1.5, spanGaps: false, points: { show: told.t.length < 120, size: 4, fill: colour(COLOURS[i]) }, value: say }))],
      hooks: { ready: [rest], setLegend: [rest], setSelect: [(u) => zoom(u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x"))] },
    }, [told.t, ...told.lines.map((l) => l.values)], plot);
    drawn.push({ chart, plot });
  };
  // A drag becomes the address: what is seen is what a reload shows.
  const zoom = (from, to) => {
    if (to - from < 10) return;
    const url = new URL(location.href);
    url.searchParams.set("from", new Date(from * 1000).toISOString().slice(0, 19) + "Z");
    url.searchParams.set("to", new Date(to * 1000).toISOString().slice(0, 19) + "Z");
    location.assign(url);
  };
  const charts = [...document.querySelectorAll("[data-charts]")], known = new Map();
  const paint = (box) => {
    const told = known.get(box.dataset.charts);
    for (const figure of box.querySelectorAll("[data-chart]")) draw(figure, told.charts[figure.dataset.chart], [told.since_s, told.until_s]);
  };
  const read = async () => {
    for (const box of charts) {
      const src = box.dataset.charts;
      try {
        if (!known.has(src)) known.set(src, await (await fetch(src, { headers: { Accept: "application/json" } })).json());
        paint(box);
      } catch {
        for (const plot of box.querySelectorAll(".plot")) plot.textContent = "The chart could not be read. The table has what there was when this page was made.";
      }
    }
  };
  if (charts.length && window.uPlot) {
    read();
    addEventListener("resize", () => { for (const d of drawn) d.chart.setSize({ width: d.plot.clientWidth, height: 170 }); });
    // At once, from what was read: paper does not wait.
    const again = () => { drawn.length = 0; for (const box of charts) if (known.has(box.dataset.charts)) paint(box); };
    document.addEventListener("fluid:theme", again);
    for (const media of ["(prefers-color-scheme: dark)", "print"]) matchMedia(media).addEventListener("change", again);
  }

  // ---- copying and printing: the buttons are there only with JavaScript
  for (const button of document.querySelectorAll("[data-copy]")) {
    button.hidden = !navigator.clipboard;
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(document.getElementById(button.dataset.copy).textContent);
      const was = button.textContent;
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = was; }, 1500);
    });
  }
  const paper = document.getElementById("print");
  if (paper) { paper.hidden = false; paper.addEventListener("click", () => print()); }
})();
