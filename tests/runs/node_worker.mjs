// A worker in plain Node: no packages, no SDK of ours. It follows docs/worker-protocol.md and nothing else.
//
//   TGA_API_KEY=... node tests/runs/node_worker.mjs URL WORKER_ID [DIE_AT]
//
// It serves one procedure, `node-order`: a step, a tool, a question, a sleep, a step. DIE_AT names a moment at which it
// ends itself as `kill -9` would: `NAME.before` or `NAME.answered` of a request, `body.before` or `body.done` of a step.

import { createHash, createHmac } from "node:crypto";

const [url, workerId, dieAt] = process.argv.slice(2);
const PROCEDURE = { name: "node-order", version: "1", program_digest: sha256("node-order 1") };

function sha256(text) {
  return createHash("sha256").update(text).digest("hex");
}

// RFC 8785: members sorted by UTF-16 code units, which is how JavaScript compares strings; numbers as JavaScript writes
// them. So this is all of it.
function canonical(value) {
  if (Array.isArray(value)) return `[${value.map(canonical).join(",")}]`;
  if (value === null || typeof value !== "object") return JSON.stringify(value);
  const members = Object.keys(value).sort().map((key) => `${JSON.stringify(key)}:${canonical(value[key])}`);
  return `{${members.join(",")}}`;
}

function cross(moment) {
  if (moment === dieAt) process.kill(process.pid, "SIGKILL");
}

const pause = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

// A request is repeated, as it is, until it is answered: every route can be. A 4xx is a no.
async function ask(method, path, body, name) {
  cross(`${name}.before`);
  for (;;) {
    let answer;
    try {
      answer = await fetch(url + path, {
        method,
        headers: { authorization: `Bearer ${process.env.TGA_API_KEY}`, "content-type": "application/json" },
        body: body === undefined ? undefined : JSON.stringify(body),
      });
      if (answer.ok) {
        const told = await answer.json();
        cross(`${name}.answered`);
        return told;
      }
    } catch {
      answer = undefined; // the gateway is away, or its answer was lost
    }
    if (answer !== undefined && answer.status < 500 && answer.status !== 429) throw new Error(await answer.text());
    await pause(50);
  }
}

class Stop extends Error {}
class Suspended extends Error {}
class Diverged extends Error {}

class Attempt {
  constructor(run) {
    this.run = run;
    this.position = 0;
    this.seen = run.first_seq; // after_seq: up to where the journal was read
    this.ended = new Map(); // by path: {identity, outcome, value, error}
    this.begun = new Map(); // by path: identity
  }

  async read() {
    while (this.seen < this.run.sequence_number) {
      const page = await ask("GET", `/v1/runs/${this.run.run_id}/checkpoints?after_seq=${this.seen}`, undefined, "page");
      page.items.forEach((record) => this.feed(record));
    }
  }

  feed(record) {
    this.seen = Math.max(this.seen, record.sequence_number);
    const identity = `${record.kind} ${record.name} ${record.input_digest}`;
    if (record.artifact_type === "run_start" && record.forked_from) this.begun.clear();
    if (record.artifact_type === "run_intent") this.begun.set(record.path, identity);
    if (record.artifact_type === "run_checkpoint") this.ended.set(record.path, { ...record, identity });
    if (record.artifact_type === "run_answer" && this.begun.has(record.path)) {
      const value = record.joined ?? record.value; // what a tool or a child returned stands elsewhere, and is joined
      this.ended.set(record.path, { ...record, value, identity: this.begun.get(record.path) });
    }
  }

  // What stands at the next address: an end, a beginning, or nothing. Another operation there is a divergence.
  next(kind, name, input) {
    this.position += 1;
    const path = String(this.position);
    // This program does not nest: the operation around is null.
    const input_digest = createHmac("sha256", Buffer.from(this.run.salt, "hex")).update(canonical([input, null])).digest("hex");
    const identity = `${kind} ${name} ${input_digest}`;
    const found = this.ended.get(path);
    const recorded = found?.identity ?? this.begun.get(path);
    if (recorded !== undefined && recorded !== identity) {
      throw Object.assign(new Diverged(path), { path, recorded, performed: identity });
    }
    return { path, kind, name, input_digest, identity, found, isBegun: this.begun.has(path) };
  }

  async put(puts, then, name) {
    const body = { lease: this.run.lease, attempt: this.run.attempt, after_seq: Math.max(this.seen, 0), puts };
    if (then) body.then = then;
    const told = await ask("POST", `/v1/runs/${this.run.run_id}/checkpoints`, body, name);
    if (told.directive === "STOP") throw new Stop(told.reason);
    if (told.directive === "SUSPENDED") throw new Suspended();
    told.news.forEach((record) => this.feed(record));
    this.seen = Math.max(this.seen, told.sequence_number);
    return told;
  }

  returned(found) {
    if (found.outcome !== "OK") throw new Error(`${found.error.type}: ${found.error.message}`);
    return found.value.value;
  }

  async step(name, input, body) {
    const at = this.next("step", name, input);
    if (at.found) return this.returned(at.found);
    cross("body.before");
    const value = await body();
    cross("body.done");
    const { path, kind, input_digest } = at;
    const put = { type: "checkpoint", path, kind, name, input_digest, outcome: "OK", value: { tier: "inline", value } };
    await this.put([{ ...put, started_at: new Date().toISOString(), duration_ms: 0 }], undefined, "put");
    return value;
  }

  async tool(server_id, tool_name, args) {
    const at = this.next("tool", `${server_id}.${tool_name}`, args);
    while (!this.ended.has(at.path)) {
      this.begun.set(at.path, at.identity);
      const then = { type: "tool", path: at.path, input_digest: at.input_digest, server_id, tool_name, arguments: args };
      const told = await this.put([], then, "tool");
      if (told.result.status === "pending") await this.suspend(at.path);
    }
    return this.returned(this.ended.get(at.path));
  }

  async wait(kind, name, input, more) {
    const at = this.next(kind, name, input);
    if (!at.found && !at.isBegun) {
      this.begun.set(at.path, at.identity);
      await this.put([{ type: kind, path: at.path, name, input_digest: at.input_digest, ...more }], undefined, kind);
    }
    while (!this.ended.has(at.path)) await this.suspend(at.path);
    return this.returned(this.ended.get(at.path));
  }

  suspend(path) {
    return this.put([], { type: "suspend", awaits: [path] }, "suspend");
  }
}

async function nodeOrder(attempt, input) {
  const planned = await attempt.step("plan", input, async () => ({ amount: input.amount, by: "node" }));
  const paid = await attempt.tool("bank", "charge", { amount: planned.amount });
  const answer = await attempt.wait("ask", "ship?", "ship?", {
    request: { form: "approve", message: "ship?", answer_schema: { type: "boolean" } },
  });
  await attempt.wait("sleep", "rest", 10, { wakes_at: new Date(Date.now() + 10).toISOString() });
  return attempt.step("tell", null, async () => [planned.by, Object.keys(paid).sort(), answer]);
}

async function perform(run) {
  const attempt = new Attempt(run);
  await attempt.read();
  let then;
  try {
    const output = await nodeOrder(attempt, run.input.value);
    then = { type: "complete", output: { tier: "inline", value: output }, positions: attempt.position };
  } catch (error) {
    if (error instanceof Stop || error instanceof Suspended) return;
    if (error instanceof Diverged) {
      const { path, recorded, performed } = error;
      then = { type: "diverge", divergence: { path, recorded, performed, source: null } };
    } else {
      then = { type: "fail", error: { type: error.name, message: error.message, retryable: false } };
    }
  }
  await attempt.put([], then, then.type).catch((error) => {
    if (!(error instanceof Stop)) throw error;
  });
}

let held = [];
async function beatForEver() {
  for (let lease_ms = 500; ; lease_ms = held[0]?.lease_ms ?? lease_ms) {
    const runs = held.map(({ run_id, lease }) => ({ run_id, lease }));
    await ask("POST", "/v1/worker/heartbeat", { worker: workerId, name: "node", runs }, "beat");
    await pause(lease_ms / 3);
  }
}

await ask("POST", "/v1/procedures", PROCEDURE, "register");
beatForEver();
for (;;) {
  const asked = { worker: workerId, name: "node", procedures: [PROCEDURE], slots: 1, wait_ms: 2000 };
  held = (await ask("POST", "/v1/worker/lease", asked, "lease")).runs;
  for (const run of held) await perform(run);
  held = [];
}
