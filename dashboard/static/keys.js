// The keyboard: ? help, / filter, g and a letter to go, t and a key for another time, p to the pause form. No key acts: each only leads somewhere.
// Never takes a key from somebody who types, and none that the browser or a screen reader holds a modifier for.
(() => {
  "use strict";
  const help = document.getElementById("keys"), opener = document.getElementById("keys-open");
  if (!help) return;
  const WAIT_MS = 1500;
  const FOLLOWED = { g: "go", t: "time" }; // keys that wait for a second one: the rows of the help say where both lead
  let going = -Infinity, first = "";

  const types = (element) => element instanceof HTMLElement
    && (element.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(element.tagName));
  const focusReason = (form) => {
    form.scrollIntoView({ block: "center" });
    form.querySelector("input[name=reason]").focus({ preventScroll: true });
  };
  const toPause = () => {
    const form = document.getElementById("pause-form");
    if (form) focusReason(form);
    else location.assign(help.dataset.pause);
  };

  if (opener) {
    opener.hidden = false;
    opener.addEventListener("click", () => help.showModal());
  }
  help.querySelector("button").addEventListener("click", () => help.close());
  help.addEventListener("click", (event) => { if (event.target === help) help.close(); });

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
    if (types(event.target)) {
      if (event.key === "Escape" && event.target.matches("[data-filter]")) event.target.blur();
      return;
    }
    if (help.open) {
      if (event.key === "?") help.close();
      return;
    }
    const wasGoing = performance.now() - going < WAIT_MS;
    going = -Infinity;
    if (wasGoing) {
      const link = help.querySelector(`[data-${FOLLOWED[first]}~="${CSS.escape(event.key)}"] a`);
      if (link) { event.preventDefault(); link.click(); }
      return;
    }
    switch (event.key) {
      case "?": event.preventDefault(); help.showModal(); break;
      case "/": {
        const filter = document.querySelector("[data-filter], input[type=search], form.filters input:not([type=hidden])");
        if (filter) { event.preventDefault(); filter.focus(); filter.select(); }
        break;
      }
      case "g": case "t": going = performance.now(); first = event.key; break;
      case "p": event.preventDefault(); toPause(); break;
    }
  });
  // After the browser has gone to the fragment itself, which takes the focus away.
  addEventListener("load", () => setTimeout(() => {
    const heading = /^#(pause|pin|unpin|undo|resume\d+)$/.test(location.hash) && document.getElementById(location.hash.slice(1));
    const form = heading && heading.closest("section").querySelector("form[method=post]");
    if (form) focusReason(form);
  }, 50));
})();
