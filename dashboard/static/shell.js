// What every page's top bar does: theme, the zone that times are told in, menus, and drag to zoom on anything that shows time.
// Never stores a preference the server does not know: the theme is a cookie, the rest is the address.
(() => {
  "use strict";
  const root = document.documentElement;

  // ---- theme: the server sets data-theme from the cookie, so that no page flashes
  const theme = document.getElementById("theme");
  theme.hidden = false;
  theme.addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    document.cookie = `fluidpd_theme=${root.dataset.theme}; path=/; max-age=31536000; samesite=strict`;
    document.dispatchEvent(new Event("fluid:theme"));
  });

  // ---- times: the server writes UTC; here they are told in this browser's zone, or as how long ago
  const zone = root.dataset.tz;
  const pad = (n) => String(n).padStart(2, "0");
  const TOLD = /(\d\d-\d\d )?\d\d:\d\d(:\d\d)?Z/; // as the server writes it
  const local = (text, at) => text.replace(TOLD, (_, day, seconds) => {
    const told = day || at.toDateString() !== new Date().toDateString() ? `${pad(at.getMonth() + 1)}-${pad(at.getDate())} ` : "";
    return `${told}${pad(at.getHours())}:${pad(at.getMinutes())}${seconds ? `:${pad(at.getSeconds())}` : ""}`;
  });
  const ago = (s) => {
    const size = Math.abs(s), ends = s < 0 ? ["in ", ""] : ["", " ago"];
    const told = size < 1 ? "now" : size < 120 ? `${Math.floor(size)} s` : size < 7200 ? `${Math.floor(size / 60)} min`
      : size < 172800 ? `${(size / 3600).toFixed(1)} h` : `${Math.floor(size / 86400)} d`;
    return told === "now" ? told : ends[0] + told + ends[1];
  };
  const retell = (within) => {
    if (zone === "utc") return;
    for (const time of within.querySelectorAll("time[datetime]")) {
      const at = new Date(time.dateTime);
      if (time.dataset.utc === undefined) time.dataset.utc = time.textContent;
      const text = zone === "relative" ? ago((Date.now() - at) / 1000) : local(time.dataset.utc, at);
      if (time.textContent !== text) time.textContent = text;
    }
    for (const text of within.querySelectorAll("text[data-time]")) {
      const at = new Date(text.dataset.time);
      text.dataset.utc ??= text.textContent;
      text.textContent = zone === "relative" ? ago((Date.now() - at) / 1000) : local(text.dataset.utc, at);
    }
  };
  retell(document);
  document.addEventListener("htmx:afterSwap", (event) => retell(event.target));
  if (zone === "relative") setInterval(() => document.hidden || retell(document), 1000);

  // ---- menus: a click elsewhere or Escape closes one, unless something was typed into it
  const typed = (menu) => [...menu.querySelectorAll("input:not([type=hidden]), textarea")].some((i) => i.value !== i.defaultValue);
  document.addEventListener("click", (event) => {
    for (const menu of document.querySelectorAll("details.menu[open]")) {
      if (!menu.contains(event.target) && !typed(menu)) menu.open = false;
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    for (const menu of document.querySelectorAll("details.menu[open]")) { menu.open = false; menu.querySelector("summary").focus(); }
  });

  // ---- the table that is open stands in the address, so that a reload and a colleague see it too
  const shown = root.dataset.tab && document.getElementById(root.dataset.tab);
  if (shown instanceof HTMLDetailsElement) shown.open = true;
  document.addEventListener("toggle", ({ target }) => {
    if (!target.matches("details.as-table[id]")) return;
    const url = new URL(location.href);
    if (target.open) url.searchParams.set("tab", target.id);
    else if (url.searchParams.get("tab") === target.id) url.searchParams.delete("tab");
    else return;
    if (url.href !== location.href) history.replaceState(history.state, "", url);
  }, true);

  // ---- zoom: the address takes the new window, so that every panel and every reload follows
  const show = (since, until) => {
    if (!(until - since >= 10)) return;
    const url = new URL(location.href);
    url.searchParams.set("from", String(Math.round(since * 1000)));
    url.searchParams.set("to", String(Math.round(until * 1000)));
    location.assign(url);
  };
  document.addEventListener("fluid:zoom", (event) => show(event.detail.since, event.detail.until));
  let drag = null;
  document.addEventListener("pointerdown", (event) => {
    const lane = event.target.closest("svg.lane"), lanes = lane && lane.closest("[data-since]");
    if (!lanes || event.button !== 0) return;
    drag = { lanes, box: lane.getBoundingClientRect(), from: event.clientX, area: null };
  });
  document.addEventListener("pointermove", (event) => {
    if (!drag || Math.abs(event.clientX - drag.from) < 6) return;
    event.preventDefault();
    if (!drag.area) { drag.area = document.createElement("i"); drag.area.className = "zoom-area"; drag.lanes.append(drag.area); }
    const outer = drag.lanes.getBoundingClientRect(), clip = (x) => Math.min(Math.max(x, drag.box.left), drag.box.right);
    const [a, b] = [clip(drag.from), clip(event.clientX)].sort((x, y) => x - y);
    Object.assign(drag.area.style, { left: `${a - outer.left}px`, width: `${b - a}px`, top: "0", bottom: "0" });
    drag.picked = [(a - drag.box.left) / drag.box.width, (b - drag.box.left) / drag.box.width];
  });
  document.addEventListener("pointerup", () => {
    if (!drag) return;
    const { lanes, area, picked } = drag;
    drag = null;
    if (!area) return;
    area.remove();
    const since = Number(lanes.dataset.since), length = Number(lanes.dataset.until) - since;
    show(since + picked[0] * length, since + picked[1] * length);
  });
  // ---- a table that goes on beyond its right edge says so there
  const edges = () => {
    for (const box of document.querySelectorAll(".scroll")) {
      box.classList.toggle("has-more", box.scrollWidth - box.clientWidth - box.scrollLeft > 2);
    }
  };
  edges();
  addEventListener("resize", edges);
  document.addEventListener("scroll", (event) => event.target.classList?.contains("scroll") && edges(), true);
  document.addEventListener("toggle", edges, true);
  document.addEventListener("htmx:afterSettle", edges);

  // On a narrow screen the pages are a strip that scrolls: the one that is open is in sight.
  const here = document.querySelector(".pages [aria-current]");
  if (here) here.parentElement.scrollLeft = here.offsetLeft - here.parentElement.clientWidth / 3;
})();
