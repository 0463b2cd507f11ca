
"use strict";
// Everything that comes from outside is set as text, never as markup.
const REFRESH_MS = 2000; // Between two looks while nothing happens; token rates need some distance.
const SETTLE_MS = 150; // A sync makes many events at once; they are answered with one look.
const MAX_EVENTS = 200; // Kept in the list.
const MAX_SYNCS = 8; // Drawn; /fleet/syncs has more.
const PHASES = ["pause", "init", "start", "update", "finish", "label", "resume", "other"];
const STATE_MARKS = { ready: "●", draining: "◐", fenced: "▲", starting: "○", down: "✕" };
const STATE_CLASSES = { ready: "ok", draining: "warn", fenced: "bad", starting: "calm", down: "bad" };
const SVG = "http://www.w3.org/2000/svg";

const $ = (id) => document.getElementById(id);
function make(tag, text, className) {
  const element = document.createElement(tag);
  if (text !== undefined && text !== null) element.textContent = text;
  if (className) element.className = className;
  return element;
}
function setText(id, text) {
  const element = $(id);
  if (element.textContent !== text) element.textContent = text;
}
const number = (value, digits = 0) =>
  value === null || value === undefined ? "–" : value.toLocaleString("en", { maximumFractionDigits: digits });
function span(seconds) {
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
}
const clock = (unix) => new Date(unix * 1000).toLocaleTimeString("en-GB");

// The head and the gate

const PHASE_CLASSES = { open: "ok", paused: "warn", pausing: "warn", resuming: "calm", updating: "calm", finishing: "calm" };
function showFleet(fleet) {
  const phase = $("phase");
  setText("phase", fleet.phase);
  phase.className = `badge ${PHASE_CLASSES[fleet.phase] || "calm"}`;
  setText("version", fleet.weight_version === null ? "unknown" : fleet.weight_version);
  setText("ready", `${fleet.ready} of ${fleet.engines.length}`);
  const problem = $("problem");
  problem.hidden = !fleet.problem;
  problem.className = fleet.gate.closed ? "during-pause" : "";
  if (fleet.problem) setText("problem", fleet.problem);
  const gate = fleet.gate;
  setText("gate", gate.closed ? `closed for ${span(gate.seconds)} by ${gate.by}` : "open");
  setText("held", gate.held_requests ? `${number(gate.held_requests)} (${number(gate.held_bytes / 1024, 1)} KiB)` : "0");
  const holder = fleet.lifecycle;
  setText("holder", holder ? `${holder.call} by ${holder.client}${holder.request_id ? `, ${holder.request_id}` : ""}` : "free");
  setText("round", fleet.round ? fleet.round.state + (fleet.round.why ? `: ${fleet.round.why}` : "") : "none");
  setText("inflight", number(fleet.engines.reduce((sum, engine) => sum + engine.inflight, 0)));
  document.title = `${fleet.phase} · ${fleet.ready}/${fleet.engines.length} · fleetgate`;
  showEngines(fleet.engines);
}

// The engines: rows are kept and only changed cells written, so that a reader's place is not lost.

const rows = new Map();
const COLUMNS = ["State", "Weights", "In flight", "Tokens/s", "Running + waiting", "KV cache", "Why"];
let load = {};
function engineRow(id) {
  let row = rows.get(id);
  if (!row) {
    row = make("tr");
    const head = make("th", id);
    head.scope = "row";
    row.append(head);
    for (const name of COLUMNS) {
      const cell = make("td", "", ["In flight", "Tokens/s", "Running + waiting", "KV cache"].includes(name) ? "number" : "");
      cell.dataset.name = name;
      row.append(cell);
    }
    row.cells[1].append(make("span", "", "badge"));
    rows.set(id, row);
  }
  return row;
}
function conditions(engine) {
  const words = [];
  if (engine.paused) words.push("paused");
  if (engine.updating) words.push("updating");
  if (engine.suspect && engine.state !== "down") words.push("being checked");
  if (engine.asleep.length) words.push(`asleep (${engine.asleep.join(", ")})`);
  if (engine.plain) words.push("plain server");
  return words;
}
function showEngines(engines) {
  const body = $("engine-rows");
  for (const [id, row] of rows) {
    if (!engines.some((engine) => engine.id === id)) {
      row.remove();
      rows.delete(id);
    }
  }
  engines.forEach((engine, index) => {
    const row = engineRow(engine.id);
    if (body.children[index] !== row) body.insertBefore(row, body.children[index] || null);
    const badge = row.cells[1].firstChild;
    badge.className = `badge ${STATE_CLASSES[engine.state] || "calm"}`;
    const work = load[engine.id] || {};
    const why = [
      ...conditions(engine),
      engine.state === "ready" ? "" : engine.reason,
      engine.state === "down" ? engine.last_error : "",
    ];
    const values = [
      engine.weight_version === null ? "unknown" : engine.weight_version,
      number(engine.inflight),
      number(work.tokens_per_second, 1),
      work.running === undefined || work.running === null ? "–" : `${number(work.running)} + ${number(work.waiting)}`,
      work.kv_cache === undefined || work.kv_cache === null ? "–" : `${number(work.kv_cache * 100, 1)} %`,
      why.filter(Boolean).join("; "),
    ];
    const state = `${STATE_MARKS[engine.state] || ""} ${engine.state}`;
    if (badge.textContent !== state) badge.textContent = state;
    values.forEach((value, at) => {
      const cell = row.cells[at + 2];
      if (cell.textContent !== value) cell.textContent = value;
    });
  });
}
function showLoad(data) {
  load = data.engines;
  const rates = Object.values(load).map((work) => work.tokens_per_second).filter((rate) => rate !== null);
  setText("rate", rates.length ? number(rates.reduce((sum, rate) => sum + rate, 0), 0) : "–");
}

// The time line

function box(phase) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 10 10");
  svg.setAttribute("aria-hidden", "true");
  const rect = document.createElementNS(SVG, "rect");
  rect.setAttribute("width", "10");
  rect.setAttribute("height", "10");
  rect.setAttribute("class", phase);
  svg.append(rect);
  return svg;
}
for (const phase of PHASES) {
  const item = make("li");
  item.append(box(phase), make("span", phase));
  $("legend").append(item);
}
const callName = (call) => (call.count > 1 ? `${call.call} ×${call.count}` : call.call);
function bar(from, width, className, text) {
  const rect = document.createElementNS(SVG, "rect");
  rect.setAttribute("x", String(from));
  rect.setAttribute("width", String(Math.max(3, width)));
  rect.setAttribute("y", "1");
  rect.setAttribute("height", "8");
  rect.setAttribute("class", className);
  const title = document.createElementNS(SVG, "title");
  title.textContent = text;
  rect.append(title);
  return rect;
}
function lane(sync, engine) {
  const row = make("div", undefined, "lane");
  row.append(make("span", engine));
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 1000 10");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  const told = [];
  for (const call of sync.calls) {
    const leg = call.legs[engine];
    if (!leg) continue;
    const failed = leg.outcome !== "answered";
    told.push(`${call.phase} ${span(leg.seconds)}${failed ? ` ${leg.outcome}` : ""}`);
    const total = Math.max(sync.seconds, 1e-6);
    const from = (1000 * (call.started - sync.started)) / total;
    const length = call.count > 1 ? call.ended - call.started : leg.seconds;
    const className = call.phase + (failed ? " failed-leg" : "");
    svg.append(bar(from, (1000 * length) / total, className, `${callName(call)}: ${span(leg.seconds)} ${leg.outcome}`));
  }
  if (sync.running) {
    told.push(`${sync.running.phase} runs`);
    const from = (1000 * (sync.running.started - sync.started)) / Math.max(sync.seconds, 1e-6);
    svg.append(bar(from, 1000 - from, `${sync.running.phase} now`, `${sync.running.call} runs`));
  }
  svg.setAttribute("aria-label", `${engine}: ${told.join(", ")}`);
  row.append(svg);
  return row;
}
function callTable(sync, engines) {
  const scroll = make("div", undefined, "scroll");
  scroll.tabIndex = 0;
  scroll.setAttribute("role", "region");
  scroll.setAttribute("aria-label", `Calls of sync ${sync.number}`);
  const table = make("table");
  const head = table.createTHead().insertRow();
  for (const name of ["Call", "Status", "Whole", "Overhead", ...engines]) {
    const cell = make("th", name);
    cell.scope = "col";
    head.append(cell);
  }
  const body = table.createTBody();
  for (const call of sync.calls) {
    const row = body.insertRow();
    const name = make("th", callName(call));
    name.scope = "row";
    row.append(name, make("td", String(call.status)), make("td", span(call.seconds)), make("td", span(call.overhead_seconds)));
    for (const engine of engines) {
      const leg = call.legs[engine];
      const text = leg ? span(leg.seconds) + (leg.outcome === "answered" ? "" : ` ${leg.outcome}`) : "–";
      row.append(make("td", text));
    }
  }
  scroll.append(table);
  return scroll;
}
const opened = new Set();
let drawn = "";
function showSyncs(data) {
  const syncs = data.syncs;
  const state = JSON.stringify(syncs);
  if (state === drawn || !syncs.length) return;
  // A reader who works inside the list keeps it until he leaves it.
  if (drawn && $("syncs").contains(document.activeElement)) return;
  drawn = state;
  const list = document.createDocumentFragment();
  for (const sync of syncs) {
    const article = make("article", undefined, "sync");
    const mark = { ok: "✓", failed: "✕", running: "…" }[sync.outcome];
    const version = sync.version === null ? "" : ` → ${sync.version}`;
    const title = make("h3", `${mark} Sync ${sync.number}${version}, ${clock(sync.started)}, ${span(sync.seconds)}, ${sync.outcome}`);
    title.classList.add({ ok: "ok", failed: "bad", running: "calm" }[sync.outcome]);
    article.append(title);
    for (const line of sync.trouble) article.append(make("p", line, "problem"));
    const called = [...new Set(sync.calls.flatMap((call) => Object.keys(call.legs)))];
    const engines = called.length ? called : [...rows.keys()];
    for (const engine of engines) article.append(lane(sync, engine));
    const details = make("details");
    details.open = opened.has(sync.number);
    details.addEventListener("toggle", () => (details.open ? opened.add(sync.number) : opened.delete(sync.number)));
    const count = sync.calls.reduce((sum, call) => sum + call.count, sync.dropped_calls);
    details.append(make("summary", count === 1 ? "1 call" : `${count} calls`), callTable(sync, engines));
    article.append(details);
    list.append(article);
  }
  $("syncs").replaceChildren(list);
}

// Events

const TELL = {
  engine_state: (e) => `${e.engine}: ${e.before} → ${e.state} (${e.reason})`,
  engine_added: (e) => `${e.engine} added`,
  engine_removed: (e) => `${e.engine} removed`,
  engine_version: (e) => `${e.engine} now shows ${e.version}`,
  engine_tainted: (e) => `${e.engine} holds weights that are nobody's until a whole update`,
  engine_restarted: (e) => `${e.engine} restarted: ${e.why}`,
  engine_suspect: (e) => `${e.engine} is being checked: ${e.why}`,
  engine_left_out: (e) => `${e.engine} gets nothing for ${span(e.seconds)}: ${e.why}`,
  engine_paused: (e) => `${e.engine} ${e.paused ? "was paused by somebody else" : "goes on"}`,
  control_call: (e) => `${e.call} answered ${e.status} in ${span(e.seconds)}`,
  control_refused: (e) => `${e.call} refused with ${e.status} (${e.code})`,
  control_replayed: (e) => `${e.call} came again and got the same answer`,
  gate_closed: (e) => `gate closed by ${e.by}`,
  gate_opened: (e) => `gate opened after ${span(e.seconds)}`,
  pause_overdue: (e) => `paused for ${span(e.seconds)} by ${e.by}`,
  pause_lease_ended: (e) => `the pause of ${e.by} ended by itself after ${span(e.seconds)}`,
  weight_version: (e) => `fleet version ${e.before} → ${e.version} (${e.by})`,
  round_broken: (e) => `update round broken: ${e.why}`,
  group: (e) => `transfer group of ${e.world_size} ranks`,
  leg_late: (e) => `${e.call}: ${e.engine} answered late`,
};
let held = false;
let waiting = [];
function showEvent(kind, data) {
  const tell = TELL[kind];
  if (!tell) return;
  const item = make("li");
  const time = make("time", clock(data.time));
  time.dateTime = new Date(data.time * 1000).toISOString();
  item.append(time, make("span", tell(data)));
  if (held) {
    waiting.push(item);
    waiting = waiting.slice(-MAX_EVENTS);
    setText("hold", `Go on (${waiting.length} waiting)`);
  } else {
    addEvent(item);
  }
}
function addEvent(item) {
  const list = $("events");
  list.prepend(item);
  while (list.children.length > MAX_EVENTS) list.lastChild.remove();
}
$("hold").addEventListener("click", () => {
  held = !held;
  $("hold").setAttribute("aria-pressed", String(held));
  if (!held) {
    waiting.forEach(addEvent);
    waiting = [];
  }
  setText("hold", held ? "Go on" : "Hold the list");
});

// Where it all comes from

async function get(path) {
  const response = await fetch(path, { cache: "no-store", headers: { Accept: "application/json" } });
  if (!response.ok) throw new Error(`${path} answers ${response.status}`);
  return response.json();
}
let looking = false;
let again = false;
async function look() {
  if (looking) {
    again = true;
    return;
  }
  looking = true;
  try {
    const [fleet, work, syncs] = await Promise.allSettled([get("/fleet"), get("/fleet/load"), get(`/fleet/syncs?last=${MAX_SYNCS}`)]);
    if (work.status === "fulfilled") showLoad(work.value);
    if (fleet.status === "fulfilled") showFleet(fleet.value);
    if (syncs.status === "fulfilled") showSyncs(syncs.value);
  } finally {
    looking = false;
    if (again) {
      again = false;
      soon();
    }
  }
}
let timer = 0;
function soon() {
  if (!timer) {
    timer = setTimeout(() => {
      timer = 0;
      look();
    }, SETTLE_MS);
  }
}
function link(text, className) {
  setText("link", text);
  $("link").className = className;
}
function listen() {
  const source = new EventSource("/fleet/events");
  source.addEventListener("open", () => {
    link("live", "ok");
    soon();
  });
  source.addEventListener("error", () => {
    link("lost, trying again", "bad");
    // A refusal ends an EventSource for good; a break it mends itself.
    if (source.readyState === EventSource.CLOSED) setTimeout(listen, REFRESH_MS);
  });
  source.addEventListener("snapshot", (event) => showFleet(JSON.parse(event.data)));
  for (const kind of [...Object.keys(TELL), "lifecycle", "sync_phase"]) {
    source.addEventListener(kind, (event) => {
      showEvent(kind, JSON.parse(event.data));
      soon();
    });
  }
}
setInterval(() => {
  if (!document.hidden) look();
}, REFRESH_MS);
document.addEventListener("visibilitychange", soon);
listen();
look();
