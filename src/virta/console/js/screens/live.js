// Live view: the rows that match now, changed in place as events come.
import { ago, button, clock, empty, Exact, h, head, icon, int, parse, text, tiles } from "../ui.js";
import { Stream, allChannels } from "../api.js";
import { copy, curl, field } from "../shell.js";
import { DIALECTS, FilterBox, members } from "../filterbox.js";
import { Groups } from "../groups.js";
import { remember } from "../main.js";

const FIRST = 25, MORE = 50, SHOWN = 200, FEED = 12, FLASHES_MAX = 20, COLUMNS = 6, SAY_MS = 10_000;
const plain = (v) => (v === undefined || v === null ? "" : v instanceof Exact ? v.source : typeof v === "object" ? JSON.stringify(v) : String(v));
const isNumber = (v) => typeof v === "number" || v instanceof Exact;
const fieldsOf = (event) => { const data = event?.data; return data && typeof data === "object" && !Array.isArray(data) ? Object.entries(data).filter(([, v]) => v === null || typeof v !== "object") : [["data", data]]; };

async function choose(root) {
  const name = h("input", { type: "text", required: true, list: "known", "aria-label": "Channel", "data-find": "" }), known = h("datalist", { id: "known" });
  root.append(head("Live views", h("p", { class: "facts" }, h("span", {}, "A table of what is true now: rows enter, change and leave"))), known, h("section", { class: "card", "aria-label": "Open a live view" }, h("form", { class: "body stack", onsubmit: (e) => { e.preventDefault(); location.hash = `/views/${encodeURIComponent(name.value)}`; } }, field("Channel", name, "The newest event of each key is a row; the key is the record's key, else the event's subject."), h("div", { class: "row" }, h("button", { class: "btn primary", type: "submit" }, "Open")))));
  try { const all = await allChannels(); known.append(...all.slice(0, 200).map((c) => h("option", { value: c.name }))); root.append(h("section", { class: "card", "aria-label": "Channels" }, h("header", {}, h("h2", {}, "Channels")), all.length ? h("ul", { class: "pipe-list" }, all.slice(0, 50).map((c) => h("li", {}, h("a", { href: `#/views/${encodeURIComponent(c.name)}` }, h("strong", { class: "clip" }, c.name), h("span", { class: "faint" }, `${int(c.records)} events`))))) : empty("channels", "No channels yet"))); } catch { /* the field is enough */ }
}

export default async function live(root, { name, params }) {
  if (!name) return choose(root);
  const table = new Map(), counts = { enter: 0, update: 0, leave: 0 }, rates = { enter: 0, update: 0, leave: 0 }, said = { enter: 0, leave: 0 };
  let columns = null, kinds = [], stream = null, paused = false, filter = { source: params.get("filter") ?? "", dialect: params.get("dialect") ?? "query-string" }, key = params.get("key") ?? "", offset = null, total = 0, changes = 0, begun = false, limit = FIRST;
  const t = tiles([{ label: "Rows now", color: "accent" }, { label: "Enter", unit: "/s", color: "good" }, { label: "Change", unit: "/s", color: "info" }, { label: "Leave", unit: "/s", color: "bad" }]);
  const headRow = h("tr", {}, h("th", {}, "Key")), rows = h("tbody", { id: "rows" }), feed = h("ul", { class: "feed", id: "feed" }), pos = h("span", { class: "faint", id: "pos" }), foot = h("span", {}), more = button("Show more", null, () => showMore(), { class: "sm", id: "more-rows", hidden: true }), feedRate = h("span", { class: "faint" }), status = h("p", { class: "vh", role: "status" }), note = h("div", {}), pause = button("Pause", "pause", () => setPause(!paused), { "data-pause": "", "aria-pressed": "false" });
  const keyIn = h("input", { type: "text", value: key, placeholder: "subject, or /data/id", onchange: () => { key = keyIn.value.trim(); open(); } });
  const box = new FilterBox({ dialect: filter.dialect, source: filter.source, name: `view.${name}`, onvalid: (valid) => { filter = valid; open(); }, extra: h("label", { class: "keyrule" }, "Key", h("span", { class: "field" }, keyIn)) });
  const groups = new Groups({ value: (event, c) => plain(value(event, c)), chosen: params.get("group") ?? "", onpick: () => address() });
  const address = () => remember({ filter: filter.source, dialect: filter.source ? filter.dialect : "", key, group: groups.chosen });
  const query = () => [filter.source && filter.dialect === "query-string" ? filter.source : "", filter.source && filter.dialect !== "query-string" ? `$filter=${encodeURIComponent(filter.source)}&$dialect=${filter.dialect}` : "", key ? `$key=${encodeURIComponent(key)}` : ""].filter(Boolean).join("&");
  const path = () => `/channels/${encodeURIComponent(name)}/live${query() ? `?${query()}` : ""}`;
  root.append(head(name, h("p", { class: "facts" }, h("span", {}, "channel ", h("a", { href: `#/channels/${encodeURIComponent(name)}` }, h("b", {}, name)))), button(h("span", { class: "hide-s" }, "Copy as curl"), "copy", () => copy(curl(path()), "curl command"), { "aria-label": "Copy as curl", "data-key": "y" }), pause), h("section", { class: "card", "aria-label": "Filter" }, box.el), note, t.el,
    h("div", { class: "two" }, h("section", { class: "card", "aria-labelledby": "h-rows" }, h("header", {}, h("h2", { id: "h-rows" }, "Rows that match now"), pos, h("div", { class: "right legend" }, [["good", "enters"], ["info", "changes"], ["bad", "leaves"]].map(([c, word]) => h("span", { class: c }, h("i", { class: `key c-${c}` }), word)))), h("div", { class: "scroll" }, h("table", { class: "live" }, h("thead", {}, headRow), rows)), h("footer", {}, foot, more, h("span", { class: "grow" }), h("span", { class: "hide-s" }, "Sorted by key, so rows keep their place while they change."))), h("div", { class: "stack" }, h("section", { class: "card", "aria-labelledby": "h-feed" }, h("header", {}, h("h2", { id: "h-feed" }, "Changes"), h("div", { class: "right" }, feedRate)), feed), groups.el)), status);
  const showMore = () => { limit = Math.min(SHOWN, limit + MORE); refill(); };
  const tell = (kind, k, why) => { const [color, pic] = { enter: ["good", "plus"], update: ["info", "change"], leave: ["bad", "dash"] }[kind]; feed.prepend(h("li", {}, h("span", { class: `kind ${color}` }, icon(pic), kind), h("span", { class: "mono clip" }, k), h("time", {}, clock(Date.now())), h("p", {}, why))); while (feed.children.length > FEED) feed.lastChild.remove(); };
  function learn(event) { if (columns) return; columns = fieldsOf(event).map(([k]) => k).slice(0, COLUMNS); kinds = columns.map((c, i) => [isNumber(value(event, c)) && "num", i > 1 && "hide-s"].filter(Boolean).join(" ")); headRow.replaceChildren(h("th", {}, "Key"), ...columns.map((c, i) => h("th", { class: kinds[i] }, c)), h("th", { class: "num hide-s" }, "Changes"), h("th", { class: "num hide-xs" }, "Changed")); }
  const value = (event, column) => (column === "data" && (typeof event.data !== "object" || event.data === null) ? event.data : event.data?.[column]);
  function set(frame, kind) {
    const { key: k, event } = frame; learn(event);
    let row = table.get(k); const flash = changes < FLASHES_MAX;
    if (!row) {
      row = { event, changes: 0, time: Date.now(), cells: columns.map((c, i) => h("td", { class: kinds[i] }, plain(value(event, c)))), count: h("td", { class: "num hide-s muted" }, "1"), when: h("td", { class: "num muted hide-xs" }) };
      row.el = h("tr", { "data-row": k }, h("td", { class: "mono nowrap" }, k), row.cells, row.count, row.when);
      table.set(k, row);
      if (rows.children.length < limit) place(k, row); else if (kind === "row" && k < rows.lastChild.dataset.row) { rows.lastChild.remove(); place(k, row); }
      if (kind !== "row" && flash) { row.el.classList.add("enter"); setTimeout(() => row.el.classList.remove("enter"), 2500); }
      if (kind !== "row") tell("enter", k, fieldsOf(event).slice(0, 2).map(([f, v]) => `${f} is ${plain(v)}`).join(", "));
    } else {
      if (row.el.classList.contains("leave")) { row.el.classList.remove("leave"); if (!row.el.isConnected && rows.children.length < limit) place(k, row); }
      const changed = [];
      columns.forEach((c, i) => { const old = plain(value(row.event, c)), now = plain(value(event, c)); if (old !== now) { text(row.cells[i], now); changed.push(`${c} was ${old}, is ${now}`); if (flash) { row.cells[i].classList.remove("flash"); void row.cells[i].offsetWidth; row.cells[i].classList.add("flash"); setTimeout(() => row.cells[i].classList.remove("flash"), 900); } } });
      tell("update", k, changed.join("; ") || "the same values again");
    }
    row.event = event; row.changes++; row.time = Date.now(); text(row.count, String(row.changes));
  }
  function remove({ key: k, reason }) { const row = table.get(k); if (!row) return; table.delete(k); row.el.classList.add("leave"); tell("leave", k, { changed: "matches no longer", deleted: "was deleted", expired: "is not in the log any more" }[reason] ?? reason ?? ""); setTimeout(() => { if (row.el.classList.contains("leave")) { row.el.remove(); refill(); } }, 1000); }
  function place(k, row) { const after = [...rows.children].find((r) => r.dataset.row > k && !r.classList.contains("leave")); rows.insertBefore(row.el, after ?? null); }
  // Rows that are not shown take the places of those that left, in the order of their keys.
  function refill() {
    const free = Math.min(limit, table.size) - rows.children.length;
    if (free <= 0) return;
    const hidden = [...table].filter(([, row]) => !row.el.isConnected).sort(([a], [b]) => (a < b ? -1 : 1));
    for (const [k, row] of hidden.slice(0, free)) place(k, row);
  }
  function forget(why) { table.clear(); rows.replaceChildren(); columns = null; if (why) note.replaceChildren(h("div", { class: "held card" }, why)); }
  function arrived(f) {
    const data = f.data ? parse(f.data) : {};
    if (f.event === "snapshot") forget(); else if (f.event === "reset") forget(`Starting again: ${data.reason}`); else if (f.event === "live") { offset = data.offset; total = data.rows; if (!note.querySelector(".problem")) note.replaceChildren(); } else if (f.event === "row") set(data, "row"); else if (f.event === "enter" || f.event === "update") { counts[f.event]++; changes++; if (f.event === "enter") said.enter++; set(data, f.event); } else if (f.event === "leave") { counts.leave++; changes++; said.leave++; remove(data); }
    if (data.offset !== undefined) offset = data.offset;
  }
  function open(lastId = "") {
    address();
    stream?.close(); if (!lastId) forget();
    if (paused) return;
    note.replaceChildren();
    stream = new Stream(path(), { lastId, onframe: arrived, onstate: (s, error) => { if (s === "refused") note.replaceChildren(h("div", { class: "card problem" }, empty("live", error.status === 404 || error.code === "invalid-channel" || error.code === "unknown-option" ? "This server has no live views" : error.title ?? "The view was refused", error.message, h("code", {}, error.code), h("a", { class: "btn", href: `#/channels/${encodeURIComponent(name)}` }, "Open the live tail instead")))); } });
  }
  function setPause(on) { paused = on; pause.replaceChildren(icon(on ? "play" : "pause"), on ? "Go on" : "Pause"); pause.setAttribute("aria-pressed", String(on)); if (on) stream?.close(); else open(stream?.lastId ?? ""); }
  const second = setInterval(() => {
    for (const k of Object.keys(rates)) { rates[k] = counts[k]; counts[k] = 0; }
    t.set(0, int(table.size), offset === null ? "no snapshot yet" : "match now", table.size); t.set(1, String(rates.enter), "start to match", rates.enter); t.set(2, String(rates.update), "match before and after", rates.update); t.set(3, String(rates.leave), "match no longer", rates.leave);
    text(pos, offset === null ? "" : `at offset ${int(offset)}`); more.hidden = limit >= SHOWN || table.size <= rows.children.length; text(foot, `${int(rows.children.length)} of ${int(Math.max(table.size, 0))} rows shown`); text(feedRate, changes > FLASHES_MAX ? `${changes}/s, sampled` : `${changes}/s`); changes = 0;
    groups.draw(columns, table);
    for (const row of table.values()) if (row.el.isConnected) text(row.when, ago((Date.now() - row.time) / 1000));
  }, 1000);
  const saying = setInterval(() => { if (said.enter || said.leave) text(status, `${said.enter} entered, ${said.leave} left`); said.enter = said.leave = 0; }, SAY_MS);
  await box.check(); begun = true;
  return () => { clearInterval(second); clearInterval(saying); stream?.close(); };
}
