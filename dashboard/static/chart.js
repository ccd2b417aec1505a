// Draws prefill and decode pressure with their limits, and a mark for each decision. Asks only for what it lacks or has just got.
// Never joins a gap: a second without a record is null, and the line breaks there.
(() => {
  "use strict";
  const box = document.getElementById("pressure");
  const readout = document.getElementById("pressure-readout");
  if (!box) return;
  const COLUMNS = ["t", "ppi_mean", "ppi_high", "dpi_mean", "dpi_high", "ppi_before", "dpi_before"];
  const HEIGHT = 224, FOOT = 0.17; // the strip below zero that holds the decision marks
  let data = null, chart = null, busy = false;

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const local = document.documentElement.dataset.tz === "local", pad = (n) => String(n).padStart(2, "0");
  const parts = (s) => {
    const d = new Date(s * 1000);
    return local ? [`${pad(d.getMonth() + 1)}-${pad(d.getDate())}`, `${pad(d.getHours())}:${pad(d.getMinutes())}:${pad(d.getSeconds())}`, ""]
      : [d.toISOString().slice(5, 10), d.toISOString().slice(11, 19), "Z"];
  };
  const clock = (s) => { const [day, time, zone] = parts(s); return `${data.now_s - data.since_s > 86400 ? `${day} ` : ""}${time}${zone}`; };
  const minute = (s, step) => {
    if (document.documentElement.dataset.tz === "relative") {
      const back = Math.max(0, data.now_s - s);
      return back < 1 ? "now" : back < 120 ? `−${Math.round(back)} s` : back < 7200 ? `−${Math.round(back / 60)} min` : back < 172800 ? `−${(back / 3600).toFixed(1)} h` : `−${Math.round(back / 86400)} d`;
    }
    const [day, time, zone] = parts(s); return step >= 86400 ? day : time.slice(0, step < 60 ? 8 : 5) + zone;
  };
  const number = (v) => (v === null || v === undefined ? "unknown" : v.toFixed(2));
  const faint = (c, alpha) => c + alpha;

  const merge = (fresh) => {
    if (!data) { data = fresh; return; }
    const from = fresh.t.length ? fresh.t[0] : Infinity;
    const keep = data.t.findIndex((t) => t >= from);
    const end = keep < 0 ? data.t.length : keep;
    const start = Math.max(0, data.t.findIndex((t) => t >= fresh.since_s - fresh.step_s));
    for (const name of COLUMNS) fresh[name] = data[name].slice(start, end).concat(fresh[name]);
    data = fresh;
  };
  const ghost = (label, name) => ({ label, stroke: colour(name), width: 1.5, dash: [2, 3], spanGaps: false, points: { show: false } });
  const series = () => COLUMNS.map((name) => data[name]);
  const top = () => {
    let high = Math.max(1.3, data.limits.prefill_high || 0, data.limits.decode_high || 0);
    for (const name of ["ppi_high", "dpi_high"]) for (const v of data[name]) if (v !== null && v > high) high = v;
    return high * 1.06;
  };

  // ---- limits behind the lines, decisions under them
  const band = (u, low, high, line, name) => {
    const { ctx, bbox } = u;
    const y = (v) => Math.round(u.valToPos(v, "y", true));
    if (low !== undefined && low < high) {
      ctx.fillStyle = faint(colour(name), "1f");
      ctx.fillRect(bbox.left, y(high), bbox.width, y(low) - y(high));
    }
    if (line === undefined) return;
    ctx.strokeStyle = faint(colour(name), "b0");
    ctx.setLineDash([5 * devicePixelRatio, 4 * devicePixelRatio]);
    ctx.beginPath();
    ctx.moveTo(bbox.left, y(line));
    ctx.lineTo(bbox.left + bbox.width, y(line));
    ctx.stroke();
    ctx.setLineDash([]);
  };
  const limits = (u) => {
    const l = data.limits;
    u.ctx.save();
    u.ctx.lineWidth = devicePixelRatio;
    // Bands are hysteresis: lending starts above the prefill band and stops below it; a lender starts below the decode band.
    band(u, l.prefill_stop ?? l.prefill_over, l.prefill_stop === undefined ? l.prefill_high : l.prefill_over, l.prefill_high, "--p");
    band(u, l.decode_low, l.decode_high, l.decode_high, "--d");
    u.ctx.restore();
  };
  const caption = (u, value, text, taken) => {
    if (value === undefined) return;
    const { ctx, bbox } = u, dpr = devicePixelRatio;
    let y = u.valToPos(value, "y", true) - 4 * dpr;
    for (const other of taken) if (Math.abs(other - y) < 13 * dpr) y = other + 14 * dpr + 5 * dpr;
    taken.push(y);
    ctx.fillStyle = colour("--mut");
    ctx.textAlign = "right";
    // A halo keeps the words readable where a line runs through them.
    ctx.lineWidth = 4 * dpr;
    ctx.lineJoin = "round";
    ctx.strokeStyle = colour("--panel");
    ctx.strokeText(text, bbox.left + bbox.width - 4 * dpr, y);
    ctx.fillText(text, bbox.left + bbox.width - 4 * dpr, y);
  };
  const marks = (u) => {
    const { ctx, bbox } = u, dpr = devicePixelRatio;
    ctx.save();
    ctx.setLineDash([]); // the ghost line's
    ctx.font = `${11 * dpr}px system-ui, sans-serif`;
    const taken = [];
    caption(u, data.limits.prefill_high, `prefill: high above ${data.limits.prefill_high}`, taken);
    caption(u, data.limits.decode_high, `decode: high above ${data.limits.decode_high}`, taken);
    const zero = u.valToPos(0, "y", true), foot = bbox.top + bbox.height;
    const dotY = zero + (foot - zero) * 0.34, textY = foot - 3 * dpr;
    ctx.textAlign = "center";
    const seen = [];
    for (const m of data.marks) {
      const x = u.valToPos(m.t, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      seen.push({ x, m });
    }
    // Staying put is drawn first, so that a deed beside it is not hidden.
    for (const { x, m } of [...seen].sort((a, b) => a.m.deed - b.m.deed)) {
      ctx.beginPath();
      ctx.arc(x, dotY, 4 * dpr, 0, 2 * Math.PI);
      ctx.lineWidth = 1.6 * dpr;
      ctx.strokeStyle = colour(m.deed ? "--fg" : "--mut");
      ctx.fillStyle = colour(m.deed ? "--fg" : "--panel");
      ctx.fill();
      ctx.stroke();
    }
    ctx.fillStyle = colour("--mut");
    for (const { at, text } of worded(seen, (text) => ctx.measureText(text).width, bbox, dpr)) ctx.fillText(text, at, textY);
    ctx.restore();
  };
  // Which line is which, without its colour: letters on the lines, in turn, so that neither covers the other.
  const letters = (u) => {
    const { ctx, bbox } = u, dpr = devicePixelRatio, every = 420, half = 6.5 * dpr;
    ctx.save();
    ctx.font = `700 ${10 * dpr}px system-ui, sans-serif`;
    ctx.textAlign = "center";
    ctx.textBaseline = "middle";
    for (const [name, letter, ground, ink, from] of [["ppi_mean", "P", "--p", "--on-p", 14], ["dpi_mean", "D", "--d", "--on-d", 14 + every / 2]]) {
      for (let left = from; left * dpr < bbox.width; left += every) {
        const first = u.posToIdx(left), end = u.posToIdx(left + every / 2);
        const at = data[name].findIndex((v, i) => i >= first && i <= end && v !== null); // a gap carries no letter
        if (at < 0) continue;
        const x = u.valToPos(data.t[at], "x", true), y = u.valToPos(data[name][at], "y", true);
        ctx.fillStyle = colour(ground);
        ctx.fillRect(x - half, y - half, 2 * half, 2 * half);
        ctx.fillStyle = colour(ink);
        ctx.fillText(letter, x, y + 0.5 * dpr);
      }
    }
    ctx.restore();
  };
  // Words that would touch become one: the first deed among them, and how many more. None is lost: the pointer tells each.
  const worded = (seen, width, bbox, dpr) => {
    const label = (group) => {
      const named = group.find(({ m }) => m.deed) || group[0];
      return named.m.label + (group.length > 1 ? ` +${group.length - 1}` : "");
    };
    const place = (group) => {
      const text = label(group), half = width(text) / 2 + 4 * dpr;
      const middle = (group[0].x + group[group.length - 1].x) / 2;
      return { group, text, half, at: Math.min(Math.max(middle, bbox.left + half), bbox.left + bbox.width - half) };
    };
    const placed = [];
    for (const one of seen) {
      let next = place([one]);
      while (placed.length && placed[placed.length - 1].at + placed[placed.length - 1].half > next.at - next.half) {
        next = place([...placed.pop().group, ...next.group]);
      }
      placed.push(next);
    }
    return placed;
  };

  // ---- what the pointer is on
  const tell = (u) => {
    const i = u.cursor.idx;
    if (i === null || i === undefined || u.cursor.left < 0) { readout.textContent = summary(); return; }
    const t = data.t[i], reach = Math.max(data.step_s, (u.scales.x.max - u.scales.x.min) / 120);
    const near = data.marks.filter((m) => Math.abs(m.t - t) <= reach);
    const before = (n) => (box.dataset.compare ? `, before ${number(data[`${n}_before`][i])}` : "");
    const value = (n) => `${number(data[`${n}_mean`][i])} (max ${number(data[`${n}_high`][i])}${before(n)})`;
    readout.textContent = `${clock(t)}  prefill ${value("ppi")}, decode ${value("dpi")}` + (near.length ? `.  ${near[near.length - 1].text}` : "");
  };
  const summary = () => {
    const m = data.marks[data.marks.length - 1];
    return m ? `Last decision ${clock(m.t)}: ${m.text}` : "No decision in this window.";
  };

  // The time axes of lanes and chart stand above each other: an event is read straight down.
  const gutter = () => {
    const lane = document.querySelector("svg.lane");
    return lane ? Math.max(30, lane.getBoundingClientRect().left - box.getBoundingClientRect().left) : 40;
  };
  const build = () => {
    if (chart) chart.destroy();
    box.classList.remove("skeleton");
    const grid = { stroke: colour("--grid"), width: 1 };
    const line = (label, name, wide) => ({
      label, stroke: wide ? colour(name) : faint(colour(name), "66"), width: wide ? 2 : 1, spanGaps: false, points: { show: false },
    });
    const axis = { stroke: colour("--mut"), font: "11px system-ui, sans-serif", grid, ticks: { show: false } };
    chart = new uPlot({
      width: box.clientWidth, height: HEIGHT, tzDate: (s) => (local ? new Date(s * 1000) : uPlot.tzDate(new Date(s * 1000), "Etc/UTC")), legend: { show: false }, padding: [8, 0, 0, 0],
      cursor: { y: false, points: { size: 7 }, drag: { x: true, y: false, setScale: false } },
      scales: {
        x: { time: true, range: () => [data.since_s, data.now_s] },
        y: { range: () => [-top() * FOOT, top()] },
      },
      axes: [
        { ...axis, size: 26, space: 100, incrs: [1, 5, 10, 60, 180, 300, 600, 1800, 3600, 7200, 14400, 21600, 86400, 172800, 432000], values: (u, splits, a, s, incr) => splits.map((v) => (u.valToPos(v, "x") > u.bbox.width / devicePixelRatio - 28 ? "" : minute(v, incr))) },
        { ...axis, size: gutter, splits: (u) => { const step = top() > 12 ? 5 : top() > 5 ? 2 : top() > 2.4 ? 1 : 0.5, out = []; for (let v = 0; v <= top(); v += step) out.push(v); return out; }, values: (u, splits) => splits.map(String) },
      ],
      series: [{}, line("prefill", "--p", true), line("prefill max", "--p", false), line("decode", "--d", true), line("decode max", "--d", false), ghost("prefill before", "--p"), ghost("decode before", "--d")],
      hooks: {
        drawClear: [limits], draw: [letters, marks], setCursor: [tell],
        setSelect: [zoom],
      },
    }, series(), box);
    tell(chart);
  };
  // A stretch that was dragged over becomes the page's window: all panels show it, and so does a reload.
  const zoom = (u) => {
    if (u.select.width < 6) return;
    const detail = { since: u.posToVal(u.select.left, "x"), until: u.posToVal(u.select.left + u.select.width, "x") };
    document.dispatchEvent(new CustomEvent("fluid:zoom", { detail }));
  };
  const load = async () => {
    if (busy || document.hidden) return;
    busy = true;
    try {
      const asked = new URL(box.dataset.src, location.href);
      asked.searchParams.set("px", String(box.clientWidth));
      if (data && data.t.length) asked.searchParams.set("since", data.t[data.t.length - 1]);
      const answer = await fetch(asked, { headers: { Accept: "application/json" } });
      if (!answer.ok) { box.classList.remove("skeleton"); readout.textContent = await answer.text(); return; }
      const fresh = await answer.json();
      if (data && fresh.step_s !== data.step_s) { data = null; busy = false; load(); return; } // another width: buckets of another length
      merge(fresh);
      if (chart) { chart.setData(series()); tell(chart); } else build();
    } catch { /* the page's own banner says that the dashboard is away */ } finally { busy = false; }
  };
  document.addEventListener("fluid:refresh", load);
  document.addEventListener("fluid:theme", () => data && build());
  for (const media of ["(prefers-color-scheme: dark)", "print"]) matchMedia(media).addEventListener("change", () => data && build());
  new ResizeObserver(() => chart && chart.setSize({ width: box.clientWidth, height: HEIGHT })).observe(box);
  load();
})();
