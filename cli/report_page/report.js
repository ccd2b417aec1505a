// Draws every chart of a simulated report from the JSON inside the page. Asks nothing of anybody.
(() => {
  "use strict";
  const charts = JSON.parse(document.getElementById("data").textContent);
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const palette = ["--p", "--d", "--ok", "--bad", "--dr", "--t", "--lent", "--mut"];
  const made = [];
  for (const box of document.querySelectorAll("[data-chart]")) {
    const chart = charts[box.dataset.chart];
    if (!chart || !chart.x.length) { box.textContent = "nothing to draw"; continue; }
    const axis = { stroke: css("--mut"), grid: { stroke: css("--grid") }, ticks: { stroke: css("--grid") }, font: "11px system-ui" };
    const options = {
      width: Math.max(240, box.clientWidth), height: 190, cursor: { y: false },
      scales: { x: { time: false, distr: chart.log ? 3 : 1 } },
      axes: [{ ...axis, values: (_, all) => all.map((v) => (v === null ? "" : v + chart.unit)) }, { ...axis, size: 44 }],
      series: [{ label: chart.xname, value: (_, v) => (v === null ? "-" : Number(v.toPrecision(4)) + chart.unit) },
        ...chart.series.map((s, i) => ({ label: s.name, stroke: css(palette[i % palette.length]), width: 1.5, points: { show: false },
          dash: i >= palette.length ? [6, 4] : undefined, value: (_, v) => (v === null ? "-" : Number(v.toPrecision(3))) }))],
    };
    made.push([box, new uPlot(options, [chart.x, ...chart.series.map((s) => s.y)], box)]);
  }
  addEventListener("resize", () => { for (const [box, u] of made) u.setSize({ width: Math.max(240, box.clientWidth), height: 190 }); });
})();
