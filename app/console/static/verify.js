// "Verify in this browser": entries, artifacts, proof and signed head are fetched and recomputed here, with WebCrypto.
// What is hashed are the bytes as they came: the text of each entry is cut out of the answer, never written anew.
(() => {
  "use strict";
  const at = document.getElementById("verify-browser");
  if (!at || !window.crypto?.subtle) return;
  const button = at.querySelector("button"), list = at.querySelector("ul"), encode = new TextEncoder();
  const trace = at.dataset.trace, api = `/console/api/v1/traces/${encodeURIComponent(trace)}`;
  at.hidden = false;

  const joined = (...parts) => {
    const whole = new Uint8Array(parts.reduce((n, part) => n + part.length, 0));
    let n = 0;
    for (const part of parts) { whole.set(part, n); n += part.length; }
    return whole;
  };
  const sha256 = async (...parts) => new Uint8Array(await crypto.subtle.digest("SHA-256", joined(...parts)));
  const hex = (bytes) => [...bytes].map((b) => b.toString(16).padStart(2, "0")).join("");
  const base64 = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const same = (a, b) => a.length === b.length && a.every((x, i) => x === b[i]);
  const need = (is, words) => { if (!is) throw new Error(words); };
  const fetched = async (path) => {
    const answer = await fetch(path, { headers: { accept: "*/*" } });
    need(answer.ok, `${path} answered ${answer.status}`);
    return new TextDecoder("utf-8", { fatal: true }).decode(await answer.arrayBuffer());
  };

  // Where the value at i ends. The answer has been parsed before, so it is JSON.
  const end = (text, i) => {
    const c = text[i];
    if (c === '"') { for (i += 1; text[i] !== '"'; i += 1) if (text[i] === "\\") i += 1; return i + 1; }
    if (c === "{" || c === "[") {
      let depth = 0;
      for (;; i += 1) {
        if (text[i] === '"') { i = end(text, i) - 1; continue; }
        if (text[i] === "{" || text[i] === "[") depth += 1;
        if (text[i] === "}" || text[i] === "]") { depth -= 1; if (depth === 0) return i + 1; }
      }
    }
    while (i < text.length && !",}]".includes(text[i])) i += 1;
    return i;
  };
  // The members of the object that begins at i, each as the text that stands there.
  const members = (text, i) => {
    const found = {};
    for (i += 1; text[i] !== "}";) {
      if (text[i] === ",") i += 1;
      const name = end(text, i), value = name + 1, over = end(text, value);
      found[JSON.parse(text.slice(i, name))] = text.slice(value, over);
      i = over;
    }
    return found;
  };
  const items = (text, i) => {
    const found = [];
    for (i += 1; text[i] !== "]";) {
      if (text[i] === ",") i += 1;
      const over = end(text, i);
      found.push(text.slice(i, over));
      i = over;
    }
    return found;
  };

  const entries = async () => {
    const found = [];
    for (let after = null; ;) {
      const text = await fetched(`${api}/entries?limit=200${after ? `&after_seq=${after}` : ""}`);
      const page = JSON.parse(text), whole = members(text, 0);
      for (const item of items(whole.items, 0)) found.push(members(item, 0));
      if (page.next === null) return found;
      after = page.next;
    }
  };

  // Each check, in the order in which one rests on the other. It says what it has seen, or throws what is wrong.
  const seen = { entries: [], last: null, root: null, size: 0, note: "" };
  const checks = {
    "Entries and chain": async () => {
      seen.entries = await entries();
      let before = "0".repeat(64), state = null;
      for (const [n, item] of seen.entries.entries()) {
        const bytes = encode.encode(item.entry), digest = hex(await sha256(bytes)), entry = JSON.parse(item.entry);
        const where = `entry ${n + 1}`;
        need(entry.trace_id === trace, `${where} is of another call`);
        need(entry.sequence_number === n + 1, `${where} says it is entry ${entry.sequence_number}`);
        need(digest === JSON.parse(item.entry_digest), `${where} does not hash to its digest`);
        need(entry.prev_entry_digest === before, `${where} does not name the one before it`);
        need(state === null || entry.from_state === state, `${where} begins in another state than the one before it ended`);
        before = digest; state = entry.to_state; seen.last = bytes;
      }
      need(seen.last !== null, "there are no entries");
      return `${seen.entries.length} entries hash to their digests, each names the one before it.`;
    },
    Artifacts: async () => {
      let there = 0;
      for (const [n, item] of seen.entries.entries()) {
        if (item.artifact === "null") continue;
        const digest = hex(await sha256(encode.encode(item.artifact)));
        need(digest === JSON.parse(item.entry).artifact_digest, `the artifact of entry ${n + 1} is not the one that the entry commits to`);
        there += 1;
      }
      return there === seen.entries.length ? `${there} artifacts are what the entries commit to.` : `${there} of ${seen.entries.length} artifacts are there, and are what the entries commit to; the others were erased.`;
    },
    "Place in the tree": async () => {
      const text = await fetched(`${api}/receipt`), [head, ...rest] = text.split("\n\n");
      const lines = head.split("\n");
      need(lines[0] === "c2sp.org/tlog-proof@v1", "the receipt is of another kind");
      const index = Number(lines.find((line) => line.startsWith("index ")).slice(6));
      const proof = lines.slice(lines.findIndex((line) => line.startsWith("index ")) + 1).map(base64);
      seen.note = rest.join("\n\n");
      const [, size, root] = seen.note.split("\n");
      seen.size = Number(size); seen.root = base64(root);
      need(index < seen.size, "the leaf stands outside of the tree");
      let hash = await sha256(Uint8Array.of(0), seen.last), fn = index, sn = seen.size - 1;
      for (const step of proof) { // RFC 9162, 2.1.3.2
        need(sn > 0, "the proof is too long");
        if (fn % 2 === 1 || fn === sn) {
          hash = await sha256(Uint8Array.of(1), step, hash);
          while (fn % 2 === 0 && fn !== 0) { fn /= 2; sn = Math.floor(sn / 2); }
        } else hash = await sha256(Uint8Array.of(1), hash, step);
        fn = Math.floor(fn / 2); sn = Math.floor(sn / 2);
      }
      need(sn === 0 && same(hash, seen.root), "the proof does not lead to the root that was signed: this call was changed, or another entry of the log");
      return `The last entry is leaf ${index} of the ${seen.size} that the signed head covers, by a proof of ${proof.length} hashes.`;
    },
    Signature: async () => {
      const key = (await fetched("/console/api/v1/log/key")).trim(), parts = key.split("+");
      const [name, id] = parts, encoded = parts.slice(2).join("+"); // base64 may hold a +
      const cut = seen.note.indexOf("\n\n") + 1, text = seen.note.slice(0, cut);
      const origin = text.split("\n")[0];
      const line = seen.note.slice(cut + 1).split("\n").find((one) => one.startsWith("— ") && hex(base64(one.split(" ")[2]).slice(0, 4)) === id);
      need(line !== undefined, `no signature under the log's key ${name}`);
      const raw = base64(encoded);
      need(raw[0] === 1 && raw.length === 33, "the log's key is of another kind");
      const imported = await crypto.subtle.importKey("raw", raw.slice(1), { name: "Ed25519" }, false, ["verify"]);
      const fits = await crypto.subtle.verify({ name: "Ed25519" }, imported, base64(line.split(" ")[2]).slice(4), encode.encode(text));
      need(fits, "the head's signature does not fit");
      return `The head of ${origin} is signed with the log's key ${key.slice(0, 40)}… Compare that key with one from elsewhere: this gateway gave it.`;
    },
  };

  const told = (mark, title, words) => {
    const row = document.createElement("li"), text = document.createElement("span"), bold = document.createElement("b");
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg"), use = document.createElementNS("http://www.w3.org/2000/svg", "use");
    svg.setAttribute("class", "i"); svg.setAttribute("role", "img"); svg.setAttribute("aria-label", { ok: "checked", fail: "failed", no: "not checked" }[mark]);
    use.setAttribute("href", `#i-${{ ok: "check", fail: "x", no: "dash" }[mark]}`); svg.append(use);
    if (mark !== "ok") row.className = mark;
    bold.textContent = title; text.append(bold, words); row.append(svg, text); list.append(row);
  };
  button.addEventListener("click", async () => {
    button.disabled = true; list.replaceChildren(); at.dataset.result = "busy";
    let failed = false;
    for (const [title, check] of Object.entries(checks)) {
      if (failed) { told("no", title, "Not reached: what it rests on failed."); continue; }
      try { told("ok", title, await check()); } catch (error) { failed = true; told("fail", title, `${error.message}.`); }
    }
    at.dataset.result = failed ? "wrong" : "sound"; button.disabled = false;
  });
})();
