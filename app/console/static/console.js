// Small comforts. Every page can be read, and every form sent, without this file.
(() => {
  "use strict";
  const $ = (q, at = document) => at.querySelector(q), $$ = (q, at = document) => [...at.querySelectorAll(q)];
  const say = (words) => { const at = $("#said"); if (at) at.textContent = words; };
  // The one place where text becomes a document: pages of this very site, which was asked for them.
  const policy = window.trustedTypes ? trustedTypes.createPolicy("console", { createHTML: (page) => page }) : null;
  const parsed = (page) => new DOMParser().parseFromString(policy ? policy.createHTML(page) : page, "text/html");

  // copy
  document.addEventListener("click", async (e) => {
    const b = e.target.closest("[data-copy]");
    if (!b) return;
    try { await navigator.clipboard.writeText(b.dataset.copy); } catch { return say("Copying is not allowed here"); }
    b.classList.add("is-done"); say("Copied"); setTimeout(() => b.classList.remove("is-done"), 1200);
  });

  // theme: the server remembers it in a cookie; here it only learns which one the system shows now
  $$("[data-theme-toggle]").forEach((b) => {
    const kept = document.documentElement.dataset.theme;
    const dark = kept ? kept === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    b.value = dark ? "light" : "dark";
  });

  // times: pages are sent in UTC and say so. Who chose local time gets them in the zone of this browser, named by its
  // distance from UTC on that day; the title keeps the UTC that is on the record. Switching changes the page in place, so
  // that what is being typed stays; the server remembers the choice in a cookie.
  const two = (n) => String(n).padStart(2, "0");
  const MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
  const zone = (d) => { const m = -d.getTimezoneOffset(), w = Math.abs(m); return m ? `UTC${m < 0 ? "-" : "+"}${two(Math.floor(w / 60))}:${two(w % 60)}` : "UTC"; };
  const clock = (d) => `${two(d.getHours())}:${two(d.getMinutes())}:${two(d.getSeconds())}`;
  const millis = (d) => `${clock(d)}.${String(d.getMilliseconds()).padStart(3, "0")}`;
  const written = {
    axis: clock,
    clock: millis,
    "clock-zone": (d) => `${millis(d)} ${zone(d)}`,
    full: (d) => `${d.getDate()} ${MONTHS[d.getMonth()]} ${d.getFullYear()}, ${clock(d)} ${zone(d)}`,
  };
  const areLocal = () => document.documentElement.dataset.times === "local";
  const inZone = (at) => {
    const local = areLocal();
    $$("time[datetime], [data-at][data-time]", at).forEach((t) => {
      const d = new Date(t.getAttribute("datetime") || t.dataset.time), form = written[t.dataset.at], was = t.dataset;
      if (Number.isNaN(d.getTime()) || local === "utcTitle" in was) return;
      if (local) {
        was.utcTitle = t.getAttribute("title") || "";
        if (t.title) t.title = `${d.getFullYear()}-${two(d.getMonth() + 1)}-${two(d.getDate())} ${millis(d)} ${zone(d)}, on the record ${t.title}`;
        if (form) { was.utc = t.textContent; t.textContent = form(d); }
      } else {
        if (was.utcTitle) t.title = was.utcTitle;
        if (form) t.textContent = was.utc;
        delete was.utcTitle; delete was.utc;
      }
    });
    $$("[data-times-form]", at).forEach((f) => {
      $$("button", f).forEach((b) => b.setAttribute("aria-pressed", String((b.value === "local") === local)));
      $("[data-times-note]", f).textContent = local ? `${zone(new Date())} now` : "";
    });
  };
  inZone(document);
  $$("[data-times-form]").forEach((f) => f.addEventListener("submit", async (e) => {
    e.preventDefault(); e.stopPropagation();
    const choice = e.submitter?.value === "local" ? "local" : "utc";
    document.documentElement.dataset.times = choice;
    inZone(document);
    say(choice === "local" ? `Times are local, ${zone(new Date())} now` : "Times are in UTC");
    try { await fetch(f.action, { method: "POST", body: new URLSearchParams({ times: choice }), redirect: "manual" }); } catch { /* then it holds for this page */ }
  }));

  // on a narrow screen the navigation scrolls: bring where one is into view
  const here = $(".nav [aria-current]");
  if (here && here.parentElement.scrollWidth > here.parentElement.clientWidth) here.parentElement.scrollLeft = here.offsetLeft - 60;

  // show or hide a key that is being typed
  $$("[data-reveal]").forEach((b) => b.addEventListener("click", () => {
    const i = document.getElementById(b.dataset.reveal), on = i.type === "password";
    i.type = on ? "text" : "password"; b.setAttribute("aria-pressed", on);
  }));

  // what an operator is about to record
  document.addEventListener("change", (e) => { if (e.target.dataset?.say) { const b = $("#resolve-btn"); if (b) b.textContent = e.target.dataset.say; } });

  // the text of a chosen file goes where it could have been pasted: it is sent with the form
  $$("[data-file]").forEach((at) => { at.hidden = false; });
  document.addEventListener("change", async (e) => {
    const to = e.target.dataset?.into && document.getElementById(e.target.dataset.into), file = e.target.files?.[0];
    if (to && file) { to.value = file.size > 65536 ? "" : await file.text(); say(to.value ? `${file.name} is read` : "The file is too large for a head"); }
  });

  // somebody is writing here
  document.addEventListener("input", (e) => { if (e.target.form) e.target.form.dataset.touched = "1"; });

  // a form is sent once
  document.addEventListener("submit", (e) => {
    if (e.target.method !== "post") return;
    if (e.target.dataset.sent) { e.preventDefault(); return; }
    e.target.dataset.sent = "1";
  });
  addEventListener("pageshow", () => $$("form[data-sent]").forEach((f) => delete f.dataset.sent));

  // relative times move on
  const ago = (at) => {
    const s = (Date.now() - Date.parse(at)) / 1000, d = Math.abs(s);
    const w = d < 60 ? `${Math.floor(d)} s` : d < 3600 ? `${Math.floor(d / 60)} min`
      : d < 86400 ? (d < 21600 && d % 3600 >= 60 ? `${Math.floor(d / 3600)} h ${Math.floor(d % 3600 / 60)} min` : `${Math.floor(d / 3600)} h`) : `${Math.floor(d / 86400)} d`;
    return s < 0 ? `in ${w}` : `${w} ago`;
  };
  setInterval(() => $$("time[data-rel]").forEach((t) => { const w = ago(t.dateTime); if (t.textContent !== w) t.textContent = w; }), 10000);

  // live: the page asks for itself again when something has changed, and only the parts marked data-live are replaced.
  // A list marked data-rows keeps its rows; newer ones announce themselves and come when asked for.
  const pill = $("[data-live-pill]"), banner = $("#lost");
  if (pill && window.EventSource) {
    let paused = false, over = false, lost = null, heard = Date.now(), source = null, due = null, asking = false, again = false;
    const only = document.body.querySelector("[data-live-stream]")?.dataset.liveStream;
    const show = () => {
      pill.hidden = false;
      pill.classList.toggle("is-lost", !!lost && !paused);
      pill.setAttribute("aria-pressed", String(!paused));
      const word = paused ? "Paused" : over ? "Signed out" : lost ? "Reconnecting" : "Live";
      if (pill.textContent !== word) { pill.textContent = word; say(word); }
      if (banner) { banner.hidden = !lost || paused; if (lost) $("[data-lost-since]", banner).textContent = areLocal() ? `${clock(lost)} ${zone(lost)}` : lost.toISOString().slice(11, 19) + " UTC"; }
    };
    const swap = (page) => {
      const fresh = parsed(page);
      inZone(fresh);
      if (!$("#main", fresh)) { location.reload(); return; }
      const rows = $("[data-rows]"), freshRows = $("[data-rows]", fresh);
      $$("[data-live]").forEach((old) => {
        const next = old.id && fresh.getElementById(old.id);
        if (!next) { if (old.dataset.live === "gone") location.reload(); return; }
        if (old.outerHTML === next.outerHTML) return;
        const touched = $("form[data-touched]", old); // what is being typed stays, as long as it can still be sent
        if (touched && $$("form", next).some((f) => f.getAttribute("action") === touched.getAttribute("action"))) return;
        const focused = old.contains(document.activeElement) ? document.activeElement.id || document.activeElement.getAttribute("href") : null;
        const open = $$("details[open][id]", old).map((d) => d.id);
        old.replaceWith(document.adoptNode(next));
        open.forEach((id) => document.getElementById(id)?.setAttribute("open", ""));
        if (focused) (document.getElementById(focused) || $(`[href="${CSS.escape(focused)}"]`, next))?.focus({ preventScroll: true });
        if (next.dataset.say) say(next.dataset.say);
      });
      if (rows && freshRows) announce(rows, freshRows);
      document.title = fresh.title;
      later();
    };
    // what is under way without an entry of its own is asked for again as long as it stands there
    const later = () => { if ($("[data-again]")) setTimeout(soon, 750); };
    const announce = (rows, freshRows) => {
      const known = new Set($$("[data-id]", rows).map((r) => r.dataset.id));
      const news = $$("[data-id]", freshRows).filter((r) => !known.has(r.dataset.id));
      $$("[data-id]", freshRows).forEach((r) => { // rows that are shown may change where they stand; they do not move
        const old = $(`[data-id="${r.dataset.id}"]`, rows);
        if (old && old.outerHTML !== r.outerHTML && !old.contains(document.activeElement)) old.replaceWith(document.adoptNode(r.cloneNode(true)));
      });
      const b = $("[data-fresh]");
      if (!b) return;
      b.hidden = news.length === 0;
      if (news.length) { $("[data-fresh-n]", b).textContent = news.length === 1 ? "1 newer call" : `${news.length} newer calls`; }
    };
    // Whoever is writing keeps the page and what they wrote; everybody else goes to the door.
    const ended = (door) => {
      if ($("form[data-sent]")) return; // it leaves already, perhaps because of signing out
      if (!$("form[data-touched]")) { location.href = door; return; }
      over = true; lost = lost || new Date(); source?.close();
      const why = $("[data-lost-why]");
      if (why) why.textContent = "Your session has ended, and nothing of what you wrote was sent. Copy it, then sign in again.";
      show();
    };
    const refresh = async () => {
      if (paused || over) return;
      if (asking) { again = true; return; }
      asking = true;
      try {
        const answer = await fetch(location.href, { headers: { accept: "text/html" }, redirect: "follow" });
        if (answer.redirected && new URL(answer.url).pathname.endsWith("/sign-in")) { ended(answer.url); return; }
        if (answer.ok) swap(await answer.text());
      } catch { /* the stream says when it is back */ } finally {
        asking = false;
        if (again) { again = false; soon(); }
      }
    };
    const soon = () => { if (!due) due = setTimeout(() => { due = null; refresh(); }, 250); };
    const open = () => {
      source?.close();
      source = new EventSource("/console/live");
      const beat = () => { heard = Date.now(); if (lost) { lost = null; show(); refresh(); } };
      source.addEventListener("here", () => { beat(); soon(); });
      source.addEventListener("beat", beat);
      source.addEventListener("changed", (e) => { beat(); if (!only || JSON.parse(e.data).streams.includes(only)) soon(); });
      source.onerror = () => { if (!lost) { lost = new Date(); show(); } };
    };
    setInterval(() => {
      if (paused || over) return;
      if (!lost && Date.now() - heard > 4500) { lost = new Date(heard); show(); }
      if (lost && source?.readyState === EventSource.CLOSED) { open(); refresh(); }
    }, 1000);
    pill.addEventListener("click", () => {
      paused = !paused;
      if (paused) { source?.close(); } else { lost = null; over = false; heard = Date.now(); open(); }
      show();
    });
    $("[data-fresh]")?.addEventListener("click", () => location.reload());
    addEventListener("pagehide", () => source?.close());
    addEventListener("pageshow", (e) => { if (e.persisted && !paused) open(); });
    open(); show(); later();
  }

  // keyboard: single keys only move focus or pages; nothing is decided by one. They can be switched off (WCAG 2.1.4):
  // this browser remembers it, and the list has a button of its own.
  let g = 0;
  const keys = $("#keys"), SINGLE = "single-keys";
  const areOff = () => { try { return localStorage.getItem(SINGLE) === "off"; } catch { return false; } };
  $$("[data-show-keys]").forEach((b) => { b.hidden = false; b.addEventListener("click", () => keys?.showModal()); });
  $$("[data-single-keys]").forEach((box) => {
    box.checked = !areOff();
    box.addEventListener("change", () => { try { if (box.checked) localStorage.removeItem(SINGLE); else localStorage.setItem(SINGLE, "off"); } catch { /* then they stay on */ } });
  });
  const go = { o: "/console/", a: "/console/approvals", c: "/console/calls", r: "/console/runs", l: "/console/ledger", s: "/console/servers", p: "/console/policy" };
  document.addEventListener("keydown", (e) => {
    if (e.ctrlKey || e.metaKey || e.altKey || e.target.closest("input:not([type=range]):not([type=radio]):not([type=checkbox]), textarea, select")) return;
    const k = e.key;
    if (areOff()) return;
    if (g && Date.now() - g < 900 && go[k]) { $(`.nav [href="${go[k]}"]`)?.click(); g = 0; return; }
    g = k === "g" ? Date.now() : 0;
    if (k === "/") { const f = $("[data-find]"); if (f) { e.preventDefault(); f.focus(); } }
    else if (k === "?") keys?.showModal();
    else if (k === "j" || k === "k") {
      const rows = $$("[data-row]"), i = rows.indexOf(document.activeElement);
      rows[Math.max(0, Math.min(rows.length - 1, i + (k === "j" ? 1 : -1)))]?.focus();
    } else if (k === "a" || k === "d") $(k === "a" ? "[data-approve]" : "[data-deny]")?.focus();
  });
})();
