// Keeps an open page up to date: one event stream tells when to look again, htmx fetches the parts.
// Never holds records of its own, and never hides that it has lost touch.
(() => {
  "use strict";
  const PARTS = [...document.querySelectorAll("[data-part]")];
  const live = document.getElementById("live");
  const lost = document.getElementById("unreachable");
  const MAX_FAILURES = 3, POLL_MS = 2000, REOPEN_MS = 5000, LOST_MS = 5000;
  let source = null, failures = 0, polling = null, reopening = null, heard = performance.now();

  const say = (text, tone, title) => {
    live.textContent = text;
    live.className = `chip plain live ${tone}`;
    live.title = title;
  };
  const refresh = () => {
    for (const part of PARTS) htmx.trigger(part, "refresh");
    document.dispatchEvent(new Event("fluid:refresh"));
  };

  // ---- the stream, and what replaces it
  const close = () => {
    if (source) source.close();
    source = null;
    clearTimeout(reopening);
  };
  const open = () => {
    close();
    source = new EventSource(document.body.dataset.stream);
    source.addEventListener("open", () => {
      failures = 0;
      clearInterval(polling);
      polling = null;
    });
    source.addEventListener("nudge", (event) => {
      heard = performance.now();
      const told = JSON.parse(event.data);
      if (told.source === "controller") say("live", "on", "Events come from the controller");
      else say("live, from records", "", "The controller's event stream is away; the database is read once a second");
      refresh();
    });
    source.addEventListener("error", () => {
      failures += 1;
      say("reconnecting", "off", "The live connection broke");
      if (failures >= MAX_FAILURES && !polling) {
        polling = setInterval(() => { say("polling", "", "No live connection; the page asks every two seconds"); refresh(); }, POLL_MS);
      }
      // A refused stream stays closed by itself; a broken one reconnects.
      if (source && source.readyState === EventSource.CLOSED) reopening = setTimeout(open, REOPEN_MS);
    });
  };
  // A hidden tab lets its connection go: a browser has few for one server.
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) {
      close();
      clearInterval(polling);
      polling = null;
      say("paused while hidden", "", "");
    } else {
      heard = performance.now();
      refresh();
      open();
    }
  });
  setInterval(() => {
    const silent = performance.now() - heard;
    lost.hidden = document.hidden || silent < LOST_MS;
    if (!lost.hidden) {
      lost.textContent = `This dashboard has not answered for ${Math.round(silent / 1000)} s: what you see is old. Is \`fluidpd dashboard\` running?`;
      document.body.classList.add("is-stale");
    }
  }, 1000);

  // ---- swapping parts without disturbing the reader
  const last = new Map();
  const opened = new Map();
  document.body.addEventListener("htmx:afterRequest", (event) => {
    if (event.detail.successful) heard = performance.now();
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
    if (part.dataset.part === "header") {
      const answer = part.querySelector(".answer");
      document.body.classList.toggle("is-stale", answer.dataset.stale === "yes");
      // The forms are not swapped (somebody may be typing); only which of them make sense follows.
      const paused = answer.dataset.paused === "yes", resume = document.getElementById("act-resume");
      if (resume && !resume.open) resume.hidden = !paused;
      const pause = document.querySelector("#act-pause > summary");
      if (pause) pause.textContent = paused ? "Extend pause…" : "Pause…";
      document.title = `${answer.querySelector("h1").textContent.trim()} · FluidPD`;
    }
  });

  // ---- small comforts
  document.addEventListener("click", (event) => {
    const pin = event.target.closest("a[data-pin]");
    if (pin && !event.ctrlKey && !event.metaKey && !event.shiftKey) {
      const form = document.getElementById("act-pin"), worker = document.getElementById("pin-worker");
      if (!worker) return;
      const option = [...worker.options].find((o) => o.text === pin.dataset.pin);
      if (!option) return; // registered after this page was loaded: the link loads it anew
      worker.value = option.value;
      document.getElementById("pin-role").value = pin.dataset.role;
      form.open = true;
      form.scrollIntoView({ block: "center" });
      form.querySelector("input[name=reason]").focus({ preventScroll: true });
      event.preventDefault();
      return;
    }
    // A click elsewhere closes an open form, as long as nothing was typed into it.
    for (const act of document.querySelectorAll(".act[open]")) {
      if (!act.contains(event.target) && !(act.querySelector("input[name=reason]") || {}).value) act.open = false;
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    for (const act of document.querySelectorAll(".act[open]")) { act.open = false; act.querySelector("summary").focus(); }
  });
  const theme = document.getElementById("theme");
  theme.hidden = false;
  theme.addEventListener("click", () => {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    document.cookie = `fluidpd_theme=${root.dataset.theme}; path=/; max-age=31536000; samesite=strict`;
    document.dispatchEvent(new Event("fluid:theme"));
  });
  if (!document.hidden) open();
})();
