// Pipelines: list, figures, graph from the file, log, restart and stop.
import { Chart } from "../chart.js";
import { $, button, clock, empty, h, head, icon, int, legend, pill, problem, rate, s, short, text, tiles } from "../ui.js";
import { call, poll } from "../api.js";
import { act, crumbs } from "../shell.js";

const STATES = { running: ["good live", "Running"], starting: ["warn half", "Starting"], waiting: ["warn half", "Waiting"], stopping: ["warn half", "Stopping"], finished: ["ring", "Finished"], stopped: ["ring", "Stopped"], "never run": ["ring", "Never run"], failed: ["bad sq", "Failed"], lost: ["bad sq", "Lost"], invalid: ["bad sq", "Invalid"] };
const PICS = { source: "channels", dedupe: "dedupe", filter: "queries", columns: "columns", aggregate: "sum", channel: "channels", "dead letters": "skull" };
// A text that may go on in the next line after each sign in it.
const breakable = (title) => title.split(/(?<=[./&;,:=_])/).flatMap((piece) => [piece, h("wbr")]);
// Rows per second over the last micro-batches: between two of them nothing is counted. A new run counts from 0.
function measured(samples, rows) {
  if (samples.length && rows < samples.at(-1)[1]) samples.length = 0;
  samples.push([Date.now(), rows]);
  while (samples.length > 2 && samples[0][0] < Date.now() - WINDOW_MS) samples.shift();
  const [began, before] = samples[0], passed = Date.now() - began;
  return passed < 1000 ? null : ((rows - before) * 1000) / passed;
}
const EVERY = { "available-now": "reads to the end, then stops", continuous: "all the time" };
const WINDOW_MS = 30_000, ROWS = [{ name: "rows", color: "accent", fill: true }];

export default async function pipelines(root, { name }) {
  const list = h("ul", { class: "pipe-list", id: "list" }), number = h("div", { class: "right faint" }), invalid = h("div", { class: "stack" }), main = h("div", { class: "stack", id: "pipeline" });
  root.append(h("div", { class: "pipes" }, h("div", { class: "stack" }, h("nav", { class: "card", "aria-labelledby": "h-list" }, h("header", {}, h("h1", { id: "h-list" }, "Pipelines"), number), list), invalid), main));
  let all = [], shown = null, part = null;
  const order = (what, word) => act(`It could not be ${word}`, () => call(`/pipelines/${encodeURIComponent(shown)}/${what}`, { method: "POST" }), () => [`${shown} is ${word}`, what === "restart" ? "It goes on from its checkpoint; no row is repeated." : what === "stop" ? "It finishes its batch first." : "", what === "stop" ? "warn" : "good", what === "stop" ? ["Undo", () => order("start", "started")] : undefined]).then(load);
  function open(p) {
    const state = h("span", {}), facts = h("p", { class: "facts" }), graph = h("div", { class: "graph", tabindex: "0", role: "region", "aria-label": "Graph of the pipeline" }), file = h("span", { class: "tag" }), log = h("div", { class: "log", tabindex: "0", role: "log", "aria-label": "Log of the pipeline" }), follow = h("input", { type: "checkbox", class: "check", checked: true }), box = h("div", { class: "chart low" }), key = h("div", { class: "right legend" });
    const t = tiles([{ label: "Rows read", unit: "/s", color: "accent" }, { label: "Lag", unit: "records", color: "info" }, { label: "Watermark", unit: "s behind", color: "alt" }, { label: "Late rows", color: "warn" }, { label: "Dead rows", color: "bad" }]);
    main.replaceChildren(h("div", { class: "head" }, h("div", {}, h("div", { class: "row" }, h("h2", { class: "h1" }, p.pipeline), state), facts), h("div", { class: "row" }, button("Restart", "restart", () => order("restart", "restarting"), { id: "restart", "data-writes": "" }), button("Start", "play", () => order("start", "started"), { id: "begin", "data-writes": "" }), button("Stop", "stop", () => order("stop", "stopping"), { class: "danger", id: "stop", "data-writes": "" }))), t.el,
      h("section", { class: "card", "aria-labelledby": "h-graph" }, h("header", {}, h("h2", { id: "h-graph" }, "From source to sinks"), h("div", { class: "right" }, file)), graph), h("div", { class: "wide" }, h("section", { class: "card", "aria-labelledby": "h-log" }, h("header", {}, h("h2", { id: "h-log" }, "Log"), h("div", { class: "right" }, h("label", { class: "switch" }, follow, " Follow"))), log), h("section", { class: "card", "aria-labelledby": "h-chart" }, h("header", {}, h("h2", { id: "h-chart" }, "Rows per second"), key), h("div", { class: "body" }, box))));
    part?.chart.close();
    const chart = new Chart(box, { series: ROWS, step: 2000, label: "Rows read per second. Arrow keys read single values." });
    part = { name: p.pipeline, state, facts, graph, file, log, follow, t, chart, key, speeds: Array(150).fill(null), samples: [] };
    drawGraph(p.pipeline, graph, file);
  }
  async function drawGraph(wanted, box, file) {
    try {
      const found = await call(`/pipelines/${encodeURIComponent(wanted)}/graph`);
      text(file, found.file.split("/").slice(-2).join("/"));
      if (part?.name === wanted) { part.every = EVERY[found.trigger] ?? `every ${found.trigger}`; part.letters = found.steps.at(-1).find((one) => one.kind === "dead letters")?.title; }
      const ol = h("ol", {}, found.steps.map((step, i) => h("li", { class: step.length > 1 ? "fan" : "" }, step.map((one, k) => h("div", { class: `gnode ${one.kind === "dead letters" ? "dead" : ""}`, id: `n-${i}-${k}` }, h("h3", {}, icon(PICS[one.kind] ?? "db"), one.kind.replace(/^./, (c) => c.toUpperCase())), h("strong", {}, breakable(one.title)), h("span", { class: "fig" }, one.detail))))));
      ol.style.gridTemplateColumns = matchMedia("(max-width: 720px)").matches ? "" : `repeat(${found.steps.length}, minmax(min-content, 1fr))`;
      const wires = s("svg", { class: "wires", "aria-hidden": "true" });
      box.replaceChildren(wires, ol);
      const wire = () => {
        const base = box.getBoundingClientRect(), narrow = matchMedia("(max-width: 720px)").matches, parts = [];
        wires.style.width = `${box.scrollWidth}px`; wires.style.height = `${box.clientHeight}px`;
        const at = (i, k) => { const r = $(`#n-${i}-${k}`, box)?.getBoundingClientRect(); return r && { l: r.left - base.left + box.scrollLeft, r: r.right - base.left + box.scrollLeft, t: r.top - base.top, b: r.bottom - base.top, x: (r.left + r.right) / 2 - base.left, y: (r.top + r.bottom) / 2 - base.top }; };
        found.steps.slice(1).forEach((step, i) => step.forEach((one, k) => found.steps[i].forEach((_, j) => { const a = at(i, j), b = at(i + 1, k); if (!a || !b || (narrow && (k || j))) return; const mid = (b.l - a.r) / 2, d = narrow ? `M${a.x} ${a.b}V${b.t}` : Math.abs(a.y - b.y) < 2 ? `M${a.r} ${a.y}H${b.l}` : `M${a.r} ${a.y}C${a.r + mid} ${a.y} ${b.l - mid} ${b.y} ${b.l} ${b.y}`; parts.push(s("path", { d, class: one.kind === "dead letters" ? "side-path" : "" })); if (one.kind !== "dead letters" && part?.running) parts.push(s("path", { d, class: "run" })); })));
        wires.replaceChildren(...parts);
      };
      part.wire = wire; wire(); new ResizeObserver(wire).observe(ol);
    } catch (error) { box.replaceChildren(problem(error)); }
  }
  async function fill(p) {
    part.state.replaceChildren(pill(...(STATES[p.state] ?? ["", p.state])));
    part.facts.replaceChildren(...[p.description && h("span", {}, p.description), part.every && h("span", {}, part.every), h("span", {}, "started again ", h("b", {}, int(p.restarts ?? 0)), " times"), p.reason && h("span", { class: "bad" }, p.reason)].filter(Boolean));
    const running = p.state === "running"; if (part.running !== running) { part.running = running; part.wire?.(); }
    $("#stop").disabled = !["running", "starting", "waiting"].includes(p.state); $("#begin").hidden = !$("#stop").disabled;
    const speed = measured(part.samples, p.rows ?? 0); part.speeds.push(speed); part.speeds.shift();
    const mark = p.watermark && Date.parse(p.watermark) > 0 ? (Date.now() - Date.parse(p.watermark)) / 1000 : null;
    part.t.set(0, rate(speed ?? 0), `${short(p.rows ?? 0)} in this run`, speed ?? 0); part.t.set(1, p.lag === null ? "none" : int(p.lag ?? 0), p.lag ? "records not read yet" : "up to date", p.lag ?? 0); part.t.set(2, mark === null ? "none" : int(mark), mark === null ? "no windows" : `at ${clock(Date.parse(p.watermark))}`, mark ?? undefined); part.t.set(3, int(p.late ?? 0), "after their window", p.late ?? 0); part.t.set(4, int(p.dead ?? 0), part.letters ? `in ${part.letters}` : "given up", p.dead ?? 0);
    part.chart.set([part.speeds], Date.now(), 2000); legend(part.key, ROWS, [rate(speed ?? 0)]);
    try { const found = await call(`/pipelines/${encodeURIComponent(p.pipeline)}/log?lines=80`); if (part?.name === p.pipeline) { const lines = found.lines.length ? found.lines : ["Nothing was printed yet"]; if (part.log.childElementCount !== lines.length || part.log.lastChild?.textContent !== lines.at(-1)) { part.log.replaceChildren(...lines.map((line) => h("div", {}, line))); if (part.follow.checked) part.log.scrollTop = 1e9; } } } catch { /* shown by the list */ }
  }
  async function load() {
    try { all = await call("/pipelines"); } catch (error) { main.replaceChildren(h("div", { class: "card" }, problem(error, load))); return; }
    const good = all.filter((p) => p.state !== "invalid"), bad = all.filter((p) => p.state === "invalid");
    text(number, int(good.length));
    const now = good.find((p) => p.pipeline === name) ?? good[0];
    list.replaceChildren(...good.map((p) => h("li", {}, h("a", { href: `#/pipelines/${encodeURIComponent(p.pipeline)}`, "aria-current": p === now ? "true" : null }, h("strong", { class: "clip" }, p.pipeline), pill(...(STATES[p.state] ?? ["", p.state])), h("span", { class: "meta" }, h("span", {}, `${short(p.rows ?? 0)} rows`), h("span", {}, p.lag ? `lag ${short(p.lag)}` : ""))))));
    invalid.replaceChildren(...bad.map((p) => h("section", { class: "card problem", "aria-label": p.pipeline }, h("header", {}, h("h2", { class: "clip" }, p.pipeline), h("div", { class: "right" }, pill(...STATES.invalid))), h("div", { class: "body stack" }, h("ol", { class: "faults" }, (p.reason ?? "").split("; ").map((line) => h("li", {}, line)))), h("footer", {}, "Correct the file, then restart the server."))));
    if (!now) { if (!main.children.length) main.replaceChildren(h("div", { class: "card" }, empty("pipelines", "No pipelines run here", "List pipeline files when the server starts:", h("code", {}, "virta serve --pipelines 'pipelines/*.toml'")))); return; }
    if (shown !== now.pipeline) { shown = now.pipeline; crumbs("pipelines", "Pipelines", shown); open(now); }
    await fill(now);
  }
  const end = poll(load, 2000);
  return () => { end(); part?.chart.close(); };
}
