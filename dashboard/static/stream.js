// The live connection: one for all tabs of a browser, held by a shared worker; a browser without shared workers has one per visible tab.
// Never interprets a nudge: the pages do.
(() => {
  "use strict";
  const REOPEN_MS = 5000, FORGET_MS = 180000;

  // Opens, watches and reopens one EventSource; `tell` gets {kind: open | nudge | reset | broken, ...}.
  const connection = (url, tell) => {
    let source = null, failures = 0, reopening = null, lastId = "";
    const close = () => {
      if (source) source.close();
      source = null;
      clearTimeout(reopening);
    };
    const open = () => {
      close();
      // A reconnect of the browser's own sends Last-Event-ID; a new EventSource cannot, so the address carries it.
      source = new EventSource(lastId ? `${url}?last=${encodeURIComponent(lastId)}` : url);
      source.addEventListener("open", () => { failures = 0; tell({ kind: "open" }); });
      source.addEventListener("nudge", (event) => { lastId = event.lastEventId; tell({ kind: "nudge", data: event.data }); });
      source.addEventListener("reset", () => tell({ kind: "reset" }));
      source.addEventListener("error", () => {
        failures += 1;
        // A refused stream stays closed by itself; a broken one reconnects.
        const refused = source !== null && source.readyState === EventSource.CLOSED;
        tell({ kind: "broken", failures, refused });
        if (refused) reopening = setTimeout(open, REOPEN_MS);
      });
    };
    return { open, close, get isOpen() { return source !== null; } };
  };

  if (typeof SharedWorkerGlobalScope !== "undefined" && self instanceof SharedWorkerGlobalScope) {
    const tabs = new Map(); // port: when it was last heard, and whether anybody can see it
    let line = null;
    const follow = () => {
      for (const [port, tab] of tabs) if (Date.now() - tab.heard > FORGET_MS) tabs.delete(port);
      const seen = [...tabs.values()].some((tab) => tab.visible);
      if (line && seen && !line.isOpen) line.open();
      if (line && !seen && line.isOpen) line.close();
    };
    self.onconnect = (event) => {
      const port = event.ports[0];
      port.onmessage = ({ data }) => {
        if (data.kind === "bye") { tabs.delete(port); follow(); return; }
        tabs.set(port, { heard: Date.now(), visible: data.visible });
        if (!line) line = connection(data.url, (told) => { for (const [tab, { visible }] of tabs) if (visible) tab.postMessage(told); });
        follow();
      };
    };
    return;
  }

  // ---- on a page: follow(url, script, tell) gives a function to call when the page is shown or hidden
  self.fluidStream = (url, script, tell) => {
    let worker = null, line = null;
    try {
      worker = new SharedWorker(script, { name: "fluidpd" });
    } catch { /* none in this browser */ }
    if (!worker) {
      line = connection(url, tell);
      return (visible) => { if (visible && !line.isOpen) line.open(); if (!visible) line.close(); };
    }
    let visible = false;
    const say = () => worker.port.postMessage({ kind: "here", url, visible });
    worker.port.onmessage = ({ data }) => tell(data);
    worker.port.start();
    setInterval(say, 30000); // so that a tab that died without a word is forgotten
    addEventListener("pagehide", () => worker.port.postMessage({ kind: "bye" }));
    addEventListener("pageshow", (event) => { if (event.persisted) say(); });
    return (now) => { visible = now; say(); };
  };
})();
