// Keeps an open page up to date: one event stream tells when to look again, htmx fetches the parts.
// Never holds records of its own, and never hides that it has lost touch.
(() => {
  "use strict";
  const live = document.getElementById("live");
  const lost = document.getElementById("unreachable");
  const MAX_FAILURES = 3, POLL_MS = 2000, LOST_MS = 5000;
  let polling = null, trouble = "", heard = performance.now();

  const say = (text, tone, title) => {
    live.textContent = text;
    live.className = `badge plain live ${tone}`;
    live.title = title;
  };
  const refresh = () => {
    // A window that ended in the past does not change: what shows it is marked data-window, and is left alone.
    const past = document.body.dataset.live === "no" ? ":not([data-window])" : "";
    for (const part of document.querySelectorAll(`[data-part]${past}`)) htmx.trigger(part, "refresh");
    if (!past) document.dispatchEvent(new Event("fluid:refresh"));
  };

  // ---- the stream, and what replaces it
  const poll = (on) => {
    if (on === (polling !== null)) return;
    if (!on) { clearInterval(polling); polling = null; return; }
    const ask = () => { say("polling", "", "No live connection; the page asks every two seconds"); refresh(); };
    polling = setInterval(ask, POLL_MS);
    ask();
  };
  const told = (message) => {
    if (document.hidden) return;
    if (message.kind === "open") { poll(false); return; }
    if (message.kind === "reset") { heard = performance.now(); refresh(); return; }
    if (message.kind === "broken") {
      if (!polling) say("reconnecting", "off", "The live connection broke");
      if (message.failures >= MAX_FAILURES || message.refused) poll(true);
      return;
    }
    heard = performance.now();
    poll(false);
    if (JSON.parse(message.data).source === "controller") say("live", "on", "Events come from the controller");
    else say("live, from records", "", "The controller's event stream is away; the database is read once a second");
    refresh();
  };
  const shown = window.fluidStream(document.body.dataset.stream, document.body.dataset.worker, told);
  document.addEventListener("visibilitychange", () => {
    shown(!document.hidden);
    if (document.hidden) { poll(false); say("paused while hidden", "", ""); return; }
    heard = performance.now();
    refresh();
  });
  // Grey is what is old, whoever fell silent: the controller (the badges say so) or this dashboard.
  const grey = () => {
    const state = document.getElementById("state");
    document.body.classList.toggle("is-stale", !lost.hidden || (state !== null && state.dataset.stale === "yes"));
  };
  // A screen reader is told the state once, when it has changed, and not what counts up beside it.
  const announced = document.getElementById("announce");
  let before = null;
  const announce = () => {
    const sentence = document.querySelector("#part-header h1");
    const said = [...document.querySelectorAll("#badges [data-state]")].map((b) => b.dataset.state);
    if (!lost.hidden) said.push("This dashboard does not answer");
    if (sentence) said.push(sentence.textContent.trim().replace(/ for [\d.]+ (ms|s|min|h|d)\b/g, ""));
    const now = said.join(". ");
    if (before !== null && now !== before) announced.textContent = now;
    before = now;
  };
  announce(); // what the page came with is read with it
  setInterval(() => {
    const silent = performance.now() - heard;
    lost.hidden = document.hidden || (silent < LOST_MS && !trouble);
    grey();
    announce();
    if (lost.hidden) return;
    lost.textContent = silent < LOST_MS ? `${trouble} What you see is old.`
      : `This dashboard has not answered for ${Math.round(silent / 1000)} s: what you see is old. Is \`fluidpd dashboard\` running?`;
  }, 1000);

  // ---- swapping parts without disturbing the reader
  const last = new Map();
  const opened = new Map();
  document.body.addEventListener("htmx:afterRequest", (event) => {
    const status = event.detail.xhr.status;
    if (status) heard = performance.now(); // it answered, be it with trouble
    trouble = event.detail.successful ? "" : status === 503 ? event.detail.xhr.responseText : trouble;
  });
  document.body.addEventListener("htmx:beforeSwap", (event) => {
    const part = event.detail.target;
    if (!part.dataset.part) return;
    const html = event.detail.serverResponse;
    const selection = getSelection();
    const reading = selection && !selection.isCollapsed && part.contains(selection.anchorNode);
    if (last.get(part.id) === html || reading) { event.detail.shouldSwap = false; return; }
    last.set(part.id, html);
    opened.set(part.id, [...part.querySelectorAll("details[open][id]")].map((d) => d.id));
    const focused = part.contains(document.activeElement) ? document.activeElement.closest("details[id]") : null;
    opened.set(`${part.id}.focus`, focused ? focused.id : "");
  });
  document.body.addEventListener("htmx:afterSwap", (event) => {
    const part = event.detail.target;
    if (!part.dataset || !part.dataset.part) return;
    for (const id of opened.get(part.id) || []) {
      const details = document.getElementById(id);
      if (details) details.open = true;
    }
    const focused = document.getElementById(opened.get(`${part.id}.focus`));
    if (focused) focused.querySelector("summary").focus({ preventScroll: true });
    if (part.dataset.part === "header") document.title = `${part.querySelector("h1").textContent.trim()} · FluidPD`;
    if (part.dataset.part === "badges") {
      grey();
      document.dispatchEvent(new CustomEvent("fluid:state", { detail: { paused: document.getElementById("state").dataset.paused === "yes" } }));
    }
  });

  // The links beside the answer follow the state; they are not swapped, so that none goes away under a finger.
  document.addEventListener("fluid:state", (event) => {
    const { paused } = event.detail, resume = document.getElementById("go-resume");
    if (!resume) return;
    resume.hidden = !paused;
    document.getElementById("go-pause").textContent = paused ? "Extend pause…" : "Pause…";
  });
  shown(!document.hidden);
})();
