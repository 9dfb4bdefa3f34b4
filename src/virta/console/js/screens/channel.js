// One channel: live tail with a filter, why an event matches, publish.
import { $, $$, Exact, bytes, button, clock, empty, h, head, icon, int, parse, plural, rate, sign, text } from "../ui.js";
import { Stream, allChannels, call, draft, figures, poll, publish } from "../api.js";
import { act, closeAll, copy, curl, dialog, field, quote, toast } from "../shell.js";
import { FieldChart } from "../fieldchart.js";
import { FilterBox, LastDay } from "../filterbox.js";
import { drawn, explain, leaves, marked, standing, verdict } from "../explanation.js";
import { remember } from "../main.js";

const MAX = 200, JUDGE_MAX = 200, JUDGE_MS = 80, HIDDEN_MS = 60_000;
const STARTS = [["", "From now"], ["hour", "From an hour ago"], ["earliest", "From the earliest"], ["offset", "From offset"], ["time", "From time"]];
const uuid = () => crypto.randomUUID?.() ?? `${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}`;
const plain = (value) => (value instanceof Exact ? value.source : typeof value === "string" ? value : JSON.stringify(value));
const scalar = (value) => value instanceof Exact || value === null || typeof value !== "object";
const at = (event, path) => path.replaceAll("[", ".").replaceAll("]", "").split(".").reduce((v, k) => (v !== null && typeof v === "object" ? v[k] : undefined), event);

// The event as JSON with another id, numbers as they were sent.
const renamed = (source, id) => source.replace(/("id"\s*:\s*)("(?:[^"\\]|\\.)*"|[0-9.eE+-]+)/, (_, name) => `${name}${JSON.stringify(id)}`);

export function publishForm(channel, template) {
  const area = h("textarea", { rows: "14", spellcheck: "false", "aria-label": "Event as JSON" });
  const name = h("input", { type: "text", value: channel, required: true, "aria-label": "Channel" }), said = h("p", { role: "status", class: "small" });
  area.value = draft(`publish.${channel}`) ?? template ?? JSON.stringify({ specversion: "1.0", type: "example", source: "/console", id: uuid(), datacontenttype: "application/json", data: { status: "paid", total: 12.5 } }, null, 2);
  area.addEventListener("input", () => draft(`publish.${channel}`, area.value));
  const send = async (e) => {
    e.preventDefault();
    try { JSON.parse(area.value); } catch (error) { said.className = "small bad"; text(said, `This is not JSON yet: ${error.message}`); return; }
    try { const { offset, duplicate } = await publish(name.value, area.value); closeAll(); draft(`publish.${channel}`, ""); toast(duplicate ? "The log has this event already" : "Published", offset === null ? "" : `Offset ${int(offset)}`, "good"); } catch (error) { said.className = "small bad"; text(said, `${error.message} ${error.code}`); }
  };
  dialog("Publish an event", h("form", { class: "stack", onsubmit: send }, field("Channel", name), field("Event", area), said, h("div", { class: "row" }, h("button", { class: "btn primary", type: "submit", "data-writes": "" }, icon("send"), "Publish"), button("New id", null, () => { area.value = renamed(area.value, uuid()); area.dispatchEvent(new Event("input")); }), h("span", { class: "grow" }), button("curl", "copy", () => copy(`curl ${quote(`${location.origin}/channels/${encodeURIComponent(name.value)}`)} -H 'Content-Type: application/cloudevents+json' -d ${quote(area.value)}`, "curl command"), { class: "quiet" }))));
}

export default async function channel(root, { name, params }) {
  const path = `/channels/${encodeURIComponent(name)}`;
  let events = [], filter = { source: "", dialect: "query-string" }, stream = null, paused = false, chosen = null, seen = 0, judged = 0, skipped = 0, hits = 0, began = Date.now(), unjudged = [], fresh = [], rootOf = "event", fields = [], info = null, atPause = null, awaited = params.get("at"), painting = false, filterTurn = 0, lostAt = 0, only = false, refusal = null;
  const picked = new Set();
  let notes = [], back = null; // notes stand below the next event that comes; `back` counts what came after a lost connection

  // ---- markup ----
  const facts = h("p", { class: "facts" }, h("span", {}, h("b", { id: "rate" }, "0"), " events/s"));
  const start = h("select", { class: "btn", id: "start" }, STARTS.map(([value, word]) => h("option", { value }, word)));
  const seenBox = h("span", { class: "faint", id: "seen" }), onlyBox = h("input", { class: "check", type: "checkbox", id: "only" }), state = h("button", { class: "pill good live", id: "tailstate", type: "button", onclick: () => { tailbox.scrollTop = 0; } }, "Connecting"), pause = h("button", { type: "button", class: "btn sm", id: "pause", "data-pause": "", onclick: () => setPause(!paused) });
  const held = h("div", { class: "held", id: "held", hidden: true, role: "status" }), rows = h("tbody", { id: "rows" }), tailbox = h("div", { class: "tailbox", tabindex: "0", role: "region", "aria-label": "Events as they come" }, h("table", { class: "tail" }, h("colgroup", {}, ["c-sign", "c-off hide-s", "c-time", "c-type hide-s", "c-key hide-s hide-m", ""].map((cls) => h("col", { class: cls }))), h("thead", {}, h("tr", {}, h("th", {}, h("span", { class: "vh" }, "Matches")), h("th", { class: "hide-s num" }, "Offset"), h("th", {}, "Time"), h("th", { class: "hide-s" }, "Type"), h("th", { class: "hide-s hide-m" }, "Subject"), h("th", {}, "Data"))), rows));
  const title = h("h2", { id: "p-title", class: "mono" }, "No event selected"), answer = h("div", { id: "answer" }), tree = h("div", { class: "why-tree", id: "why" }), standingList = h("ul", { class: "list", id: "standing" }), standingNumber = h("span", { class: "faint" }), json = h("div", { class: "json", id: "json", tabindex: "0", role: "region", "aria-label": "Event as JSON" });
  const again = button("Publish again", null, () => republish(), { class: "quiet sm", id: "republish", "data-writes": "" }), copyEvent = button("Copy", null, () => chosen && copy(JSON.stringify(JSON.parse(chosen.source), null, 2), "Event"), { class: "quiet sm" });
  const panel = h("aside", { class: "card", "aria-label": "Selected event", id: "panel" }, h("header", {}, title, h("div", { class: "right row" }, again, copyEvent)), h("div", { id: "panel-body", hidden: true }, answer, tree, h("section", { class: "section" }, h("div", { class: "row" }, h("h2", {}, "Standing filters it satisfies"), standingNumber), standingList), h("section", { class: "section" }, h("div", { class: "row" }, h("h2", {}, "Event"), h("span", { class: "faint" }, "marked: what the filter looks at")), json), h("section", { class: "section" }, h("div", { class: "row" }, h("a", { id: "to-why", href: "#/why" }, "Open in Why")))), h("div", { class: "empty", id: "panel-empty" }, icon("why"), h("strong", {}, "Why did it match?"), "Choose an event to see which conditions held."));
  const box = new FilterBox({ dialect: params.get("dialect") ?? "query-string", source: params.get("filter") ?? "", name: `tail.${name}`, onvalid: applied, extra: h("label", {}, h("span", { class: "vh" }, "Start at"), start) }), day = new LastDay();
  const subscribers = h("span", { class: "n" }), viewTab = h("a", {}, "Live view");
  const chart = new FieldChart({ chosen: params.get("chart"), onpick: (picked) => { params.set("chart", picked); address(); drawChart(); } });
  const address = () => remember({ filter: filter.source, dialect: filter.source ? filter.dialect : "", from: params.get("from"), at: chosen ? String(chosen.offset) : "", chart: params.get("chart") });
  const drawChart = () => chart.draw(events.filter(visible).reverse());
  root.append(head(name, facts, button(h("span", { class: "hide-s" }, "Copy as curl"), "copy", () => copy(filter.dialect === "query-string" ? curl(`${path}${from() ? `/from/${encodeURIComponent(from())}` : ""}${filter.source ? `?${filter.source}` : ""}`) : curl("/filters/count", { body: { channel: name, filter: filter.source, dialect: filter.dialect } }), "curl command"), { id: "curl", "aria-label": "Copy as curl", "data-key": "y" }), button("Link", "link", () => copy(location.href, "Link"), { id: "link" }), button("Publish", "send", () => publishForm(name, template()), { class: "primary", id: "publish", "data-writes": "" })),
    h("nav", { class: "tabs", "aria-label": "Parts of this channel" }, h("a", { href: location.hash, "aria-current": "page", onclick: (e) => e.preventDefault() }, "Live tail"), viewTab, h("a", { href: `#/queries?channel=${encodeURIComponent(name)}` }, "Subscribers ", subscribers), h("a", { href: location.hash, onclick: (e) => { e.preventDefault(); publishForm(name, template()); } }, "Publish")),
    h("div", { class: "two fit" }, h("div", { class: "stack" }, h("section", { class: "card", "aria-label": "Filter" }, box.el, day.el), h("section", { class: "card", "aria-labelledby": "h-tail" }, h("header", {}, h("h2", { id: "h-tail" }, "Events"), seenBox, h("div", { class: "right" }, h("label", { class: "switch" }, onlyBox, " Matches only"), state, pause)), held, tailbox), chart.el), panel),
    h("button", { hidden: true, type: "button", "data-key": "w", onclick: () => panel.scrollIntoView({ block: "nearest" }) }), h("button", { hidden: true, type: "button", "data-key": "x", onclick: () => { if (!chosen) return; if (picked.has(chosen)) picked.delete(chosen); else picked.add(chosen); marks(); } }));
  const template = () => { const last = chosen ?? events[0]; return last ? JSON.stringify(JSON.parse(renamed(last.source, uuid())), null, 2) : undefined; };

  // ---- rows ----
  function line(one, isNew) {
    const { event } = one, yes = one.why?.matches ?? null, data = event.data;
    const cells = [...fields.map((f) => [f.split(".").at(-1), at(rootOf === "document" ? data ?? {} : event, f)]), ...(data && typeof data === "object" && !(data instanceof Exact) ? Object.entries(data) : data === undefined ? [] : [["data", data]])].filter(([, v]) => v !== undefined && scalar(v)).filter(([k], i, list) => list.findIndex((o) => o[0] === k) === i).slice(0, 6);
    return h("tr", { class: `pick ${yes ? "yes" : yes === null ? "" : "no"}${isNew ? " new" : ""}`, tabindex: "-1", "aria-selected": one === chosen ? "true" : "false", "data-offset": String(one.offset), onclick: () => { choose(one); if (matchMedia("(max-width: 1180px)").matches) panel.scrollIntoView({ block: "start", behavior: "smooth" }); } },
      h("td", {}, yes === null ? null : yes ? sign("yes") : sign("idle", "no"), h("span", { class: "vh" }, yes === null ? "" : yes ? "matches" : "does not match")), h("td", { class: "num hide-s" }, int(one.offset)), h("td", {}, clock(one.time), h("span", { class: "faint hide-s" }, `.${String(one.time % 1000).padStart(3, "0")}`)), h("td", { class: "hide-s" }, plain(event.type ?? "")), h("td", { class: "hide-s hide-m" }, plain(event.subject ?? "")), h("td", {}, cells.map(([k, v]) => [h("span", { class: "k" }, `${k} `), h("span", { class: "v" }, plain(v).slice(0, 80)), h("span", { class: "sp" })])));
  }
  const visible = (one) => !only || one.why?.matches;
  const notesOf = (one) => (one.notes ?? []).map((note) => note.row ??= h("tr", { class: "note" }, h("td", { colspan: "6", role: "status" }, note.text)));
  // The newest of a list; the notes of the others move to the oldest that is left.
  const newest = (list, max) => { const kept = list.slice(-max), lost = list.slice(0, -max).flatMap((one) => one.notes ?? []); if (lost.length && kept.length) kept[0].notes = [...lost, ...(kept[0].notes ?? [])]; return kept; };
  function redraw() {
    rows.replaceChildren(...events.flatMap((e) => [...(visible(e) ? [line(e)] : []), ...notesOf(e)]));
    if (!rows.children.length) rows.append(h("tr", {}, h("td", { colspan: "6" }, refusal ? empty("alert", refusal.title ?? "The channel cannot be read", refusal.message, h("code", {}, refusal.code)) : events.length ? empty("queries", "Nothing matched yet", "Events come, but none satisfies the filter. Untick “Matches only” to see why.") : empty("channels", "No event yet", "New events appear here as they are published."))));
    counts(); marks();
  }
  const marks = () => { for (const r of $$("tr.pick", rows)) r.setAttribute("aria-selected", r.dataset.offset === String(chosen?.offset) ? "true" : "false"); text(again, picked.size > 1 ? `Publish ${picked.size} again` : "Publish again"); };
  const passed = () => (skipped ? `, ${int(skipped)} skipped` : "");
  function counts() { text(seenBox, filter.source ? `${int(hits)} of ${int(judged)} matched since ${clock(began).slice(0, 5)}${passed()}` : `${int(seen)} since ${clock(began).slice(0, 5)}${passed()}`); }
  const following = () => tailbox.scrollTop < 8;
  function tailstate() {
    if (paused) { state.className = "pill warn ring"; text(state, "Paused"); } else if (lostAt) { state.className = "pill warn half"; text(state, "Reconnecting"); } else if (fresh.length) { state.className = "pill info"; text(state, `${int(fresh.length)} new`); } else { state.className = "pill good live"; text(state, "Following"); }
  }
  function flush() { // at most one paint a frame
    painting = false;
    if (!following()) { tailstate(); return; }
    const list = fresh.splice(0);
    if (!list.length) return;
    if (!events.length) rows.replaceChildren();
    for (const one of list) { events.unshift(one); if (one.notes || visible(one)) { if ($(".empty", rows)) rows.replaceChildren(); rows.prepend(...(visible(one) ? [line(one, list.length < 20)] : []), ...notesOf(one)); } }
    while (events.length > MAX) { const old = events.pop(); picked.delete(old); if (old !== chosen) $(`tr[data-offset="${old.offset}"]`, rows)?.remove(); }
    while (rows.children.length > MAX) rows.lastChild.remove();
    if (!rows.children.length) redraw();
    counts(); tailstate();
    if (awaited !== null) { const wanted = events.find((e) => String(e.offset) === awaited); if (wanted) { awaited = null; choose(wanted); } }
  }
  const paint = () => { if (!painting) { painting = true; requestAnimationFrame(flush); } };
  tailbox.addEventListener("scroll", () => { if (following() && fresh.length) paint(); }, { passive: true });

  // ---- judging: the server explains, many events in one request ----
  let judging = false;
  async function judge() {
    if (judging) return;
    judging = true;
    try {
      while (unjudged.length) {
        const turn = filterTurn, list = newest(unjudged.splice(0), JUDGE_MAX);
        const found = await explain(filter, list.map((one) => one.source));
        if (turn !== filterTurn) { unjudged.unshift(...list); continue; } // the filter changed: judge them by the new one
        rootOf = found.root;
        if (found.explanations.length) fields = [...new Set(leaves(found.explanations[0]).map((c) => c.path))];
        list.forEach((one, i) => { one.why = found.explanations[i]; judged++; if (one.why.matches) hits++; });
        fresh.push(...list); if (fresh.length > MAX) fresh = newest(fresh, MAX);
        paint();
        await new Promise((go) => setTimeout(go, JUDGE_MS));
      }
    } catch (error) { if (error.status === 0) { /* shown by the connection */ } else toast("Events could not be explained", error.message, "bad"); } finally { judging = false; }
  }
  async function rejudge() {
    const turn = ++filterTurn, list = [...events, ...fresh];
    hits = judged = 0; began = Date.now();
    if (list.length) {
      const found = await explain(filter, list.slice(0, JUDGE_MAX).map((one) => one.source));
      if (turn !== filterTurn) return;
      rootOf = found.root;
      list.forEach((one, i) => { one.why = found.explanations[i] ?? null; if (one.why) { judged++; if (one.why.matches) hits++; } });
      fields = found.explanations.length ? [...new Set(leaves(found.explanations[0]).map((c) => c.path))] : [];
    }
    redraw(); if (chosen) choose(chosen);
  }
  async function applied(valid) {
    filter = valid;
    address();
    viewTab.href = `#/views/${encodeURIComponent(name)}?${new URLSearchParams({ filter: valid.source, dialect: valid.dialect })}`;
    day.show(name, valid);
    try { await rejudge(); } catch (error) { toast("Events could not be explained", error.message, "bad"); }
    if (only) reopen();
  }

  // ---- stream ----
  const from = () => { const kind = start.value; if (kind === "hour") return new Date(Date.now() - 3_600_000).toISOString(); if (kind === "earliest") return "earliest"; if (kind === "offset" || kind === "time") return params.get("from") ?? ""; return ""; };
  // Only matches of a query are asked for at the server, so that none is missed however many events there are.
  const query = () => (only && filter.dialect === "query-string" && filter.source ? `${filter.source.replaceAll("#", "%23")}&$positions=1` : "$positions=1");
  function open(lastId = "", place = "") {
    stream?.close();
    stream = new Stream(`${path}${place ? `/from/${encodeURIComponent(place)}` : ""}?${query()}`, { lastId, headers: { "Virta-Slow-Consumer": "drop-oldest" }, onframe: arrived, onstate: (s, detail) => {
      if (s === "live") { if (refusal) { refusal = null; redraw(); } if (lostAt) { lostAt = 0; cameBack(); } text(state, "Following"); } else if (s === "lost") lostAt ||= Date.now(); else if (s === "refused") { refusal = detail; redraw(); }
      tailstate();
    } });
  }
  const reopen = () => { if (!paused) open(stream?.lastId ?? ""); };
  const gapText = ({ reason, from, resumedAt }) => { const lost = from !== undefined && resumedAt > from ? `offsets ${int(from)} to ${int(resumedAt - 1)}` : ""; return reason === "trimmed" && lost ? `Not in the log any more: ${lost}` : reason === "damaged" && lost ? `Damaged in the log: ${lost}` : `Some events may be missing here (${reason}); continued at offset ${int(resumedAt ?? 0)}`; };
  const say = (note, words) => { note.text = words; if (note.row) text(note.row.firstChild, words); };
  const caughtUp = () => { if (back.count) say(back, `Back. ${plural(back.count, "event")} came meanwhile.`); back = null; };
  // The stream has resumed: what the channel has by now, and was not here before, came meanwhile.
  async function cameBack() {
    const mine = back = { text: "Back.", count: 0, until: Infinity };
    try {
      const last = (await allChannels()).find((c) => c.name === name)?.lastOffset ?? -1;
      if (back !== mine) return;
      mine.until = last;
      if ([...events, ...fresh, ...unjudged].some((e) => e.offset >= last)) caughtUp();
    } catch { if (back === mine) back = null; }
  }
  function arrived(frame) {
    if (frame.event === "gap") { notes.push({ text: gapText(JSON.parse(frame.data)) }); return; }
    if (frame.event === "overflow") { toast("The tail skipped events", `${int(JSON.parse(frame.data).dropped)} came faster than this page can read.`, "warn"); return; }
    if (frame.event !== "data") return;
    seen++;
    const about = frame.comment ? JSON.parse(frame.comment) : {};
    let event; try { event = parse(frame.data); } catch { return; }
    const one = { offset: about.offset ?? 0, time: Date.parse(about.timestamp ?? "") || Date.now(), source: frame.data, event, why: null };
    if (back && one.offset > back.until) caughtUp();
    if (back) { if (!back.count++) notes.push(back); if (one.offset === back.until) caughtUp(); }
    if (notes.length) one.notes = notes.splice(0);
    unjudged.push(one);
    if (unjudged.length > 4 * JUDGE_MAX) { skipped += unjudged.length - JUDGE_MAX; unjudged = newest(unjudged, JUDGE_MAX); }
    judge();
  }
  async function recount() {
    try {
      info = (await allChannels()).find((c) => c.name === name) ?? null;
      const missing = "none";
      facts.replaceChildren(h("span", {}, h("b", { id: "rate" }, rate(info?.eventsPerSecond ?? 0)), " events/s"), info?.firstOffset === null || !info ? h("span", {}, "no event yet") : h("span", {}, "offsets ", h("b", {}, int(info.firstOffset)), " to ", h("b", { id: "last" }, int(info.lastOffset))), h("span", {}, h("b", {}, info ? bytes(info.bytes) : missing)), h("span", {}, h("b", {}, int(info?.subscribers ?? 0)), ` subscriber${info?.subscribers === 1 ? "" : "s"}`), h("span", { class: "hide-s" }, "kept ", h("b", {}, info?.kept ?? "for ever")));
      text(subscribers, int(info?.subscribers ?? 0));
      if (paused && atPause !== null) heldLine(Math.max(0, (info?.records ?? 0) - atPause));
    } catch { /* the pill says it */ }
  }
  const heldLine = (n) => { held.hidden = false; text(held, `Paused at offset ${int(events[0]?.offset ?? Math.max(0, (figures.last?.nextOffset ?? 1) - 1))}. ${int(n)} new, none is lost.`); };
  async function setPause(on) {
    paused = on;
    pause.replaceChildren(icon(on ? "play" : "pause"), on ? "Go on" : "Pause"); pause.setAttribute("aria-pressed", String(on));
    if (on) { const id = stream.lastId; stream.close(); stream.lastId = id; atPause = null; heldLine(0); await recount(); atPause = (info?.records ?? 0); } else { held.hidden = true; open(stream.lastId); }
    tailstate();
  }

  // ---- the selected event ----
  function choose(one) {
    chosen = one; marks();
    $("#panel-body").hidden = false; $("#panel-empty").hidden = true;
    text(title, `Offset ${int(one.offset)}`);
    if (one.why) { answer.replaceChildren(verdict(one.why, { filtered: Boolean(filter.source) })); tree.replaceChildren(drawn(one.why)); json.replaceChildren(marked(one.event, one.why, rootOf)); }
    standing(standingList, standingNumber, name, one.source);
    $("#to-why").href = `#/why?${new URLSearchParams({ channel: name, offset: String(one.offset), filter: filter.source, dialect: filter.dialect })}`;
    address();
  }
  async function republish() {
    const list = picked.size ? [...picked] : chosen ? [chosen] : [];
    let last = null;
    for (const one of list) { last = await act("It could not be published", () => publish(name, renamed(one.source, uuid()))); if (!last) return; }
    picked.clear(); marks();
    if (last) toast(list.length === 1 ? "Published again as a new event" : `${list.length} events published again`, `Offset ${int(last.offset)}, with a new id`, "good");
  }

  onlyBox.addEventListener("change", () => { only = onlyBox.checked; redraw(); reopen(); });
  start.addEventListener("change", () => {
    const restart = (place) => { params.set("from", place); events = []; fresh = []; unjudged = []; chosen = null; seen = hits = judged = skipped = 0; redraw(); if (paused) setPause(false); open("", place); address(); };
    if (start.value === "offset" || start.value === "time") {
      const offset = start.value === "offset", input = h("input", { type: offset ? "number" : "datetime-local", min: "0", step: "1", required: true, "aria-label": offset ? "Offset" : "Time" });
      dialog(offset ? "From offset" : "From time", h("form", { class: "stack", onsubmit: (e) => { e.preventDefault(); closeAll(); restart(offset ? input.value : new Date(input.value).toISOString()); } }, field(offset ? "First offset to show" : "First time to show", input), h("div", { class: "row" }, h("button", { class: "btn primary", type: "submit" }, "Show"))));
    } else restart(from());
  });
  let hiddenTimer = null, resumeId = null;
  const hidden = () => { clearTimeout(hiddenTimer); if (document.hidden) hiddenTimer = setTimeout(() => { if (!paused) { resumeId = stream.lastId; stream.close(); } }, HIDDEN_MS); else if (resumeId !== null) { const id = resumeId; resumeId = null; open(id); } };
  document.addEventListener("visibilitychange", hidden);
  pause.append(icon("pause"), "Pause"); pause.setAttribute("aria-pressed", "false");
  redraw();
  const wanted = params.get("from") ?? (awaited === null ? "" : String(Math.max(0, Number(awaited) - 20)));
  if (wanted === "earliest") start.value = wanted; else if (/^[0-9]+$/.test(wanted)) start.value = "offset"; else if (wanted) start.value = "time";
  open("", wanted);
  await box.check();
  const ends = [poll(recount, 2000), poll(async () => drawChart(), 1000), () => chart.close()];
  return () => { for (const end of ends) end(); stream.close(); clearTimeout(hiddenTimer); document.removeEventListener("visibilitychange", hidden); };
}
