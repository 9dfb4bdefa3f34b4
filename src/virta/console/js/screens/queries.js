// Queries: the standing queries by filter, who receives them, and disconnecting a client.
import { button, bytes, empty, h, head, icon, int, kv, problem, rate, since, text } from "../ui.js";
import { call, poll } from "../api.js";
import { act, later, toast } from "../shell.js";

const SHOWN = 200;

export default async function queries(root, { params }) {
  const facts = h("p", { class: "facts" }), rows = h("tbody", { id: "queries" }), foot = h("footer", {}), panel = h("aside", { class: "card", "aria-label": "Clients of the selected query", id: "clients" }), find = h("input", { type: "text", "data-find": "", "aria-label": "Find queries", placeholder: "channel or words of the filter", value: params.get("channel") ?? "", oninput: () => draw() });
  root.append(head("Queries", facts), h("div", { class: "two" }, h("section", { class: "card", "aria-label": "Standing queries" }, h("div", { class: "filter tight" }, h("div", { class: "field" }, icon("search"), find)), h("div", { class: "scroll" }, h("table", { class: "fixed" }, h("thead", {}, h("tr", {}, h("th", {}, "Filter"), h("th", { class: "num w-num" }, "Clients"), h("th", { class: "num hide-s w-num" }, "Matched/s"), h("th", { class: "num hide-s hide-t w-num" }, "Matched"), h("th", { class: "num w-num" }, "Waiting"))), rows)), foot), panel));
  let page = null, chosen = null, before = null;
  const key = (q) => `${q.channel} ${q.filterId} ${q.dialect}`;
  const speed = (q) => { const old = before?.of.get(key(q)); return old === undefined || !before ? 0 : Math.max(0, (q.matched - old) / ((page.at - before.at) / 1000)); };
  function draw() {
    if (!page) return;
    const words = find.value.toLowerCase(), list = page.queries.filter((q) => `${q.channel} ${q.query}`.toLowerCase().includes(words)), shown = list.slice(0, SHOWN);
    if (!shown.some((q) => key(q) === chosen)) chosen = shown.length ? key(shown[0]) : null;
    if (!shown.length) rows.replaceChildren(h("tr", {}, h("td", { colspan: "5" }, page.queries.length ? empty("queries", "No query matches", "Try fewer words.") : empty("queries", "Nobody is subscribed", "Subscribe to a channel:", h("code", {}, `curl -N '${location.origin}/channels/orders?status=paid'`)))));
    else if (shown.length !== rows.children.length || shown.some((q, i) => rows.children[i].dataset.key !== key(q))) rows.replaceChildren(...shown.map((q) => h("tr", { class: "pick", tabindex: "-1", "data-key": key(q), onclick: () => { chosen = key(q); draw(); } }, h("td", {}, h("code", { class: "clip" }, q.query || "everything"), h("span", { class: "sub clip" }, q.channel)), h("td", { class: "num" }), h("td", { class: "num hide-s" }), h("td", { class: "num hide-s hide-t" }), h("td", { class: "num" }))));
    shown.forEach((q, i) => { const tr = rows.children[i]; tr.setAttribute("aria-selected", key(q) === chosen ? "true" : "false"); [int(q.subscribers), rate(speed(q)), int(q.matched), q.waitingBytes ? bytes(q.waitingBytes) : "none"].forEach((v, k) => text(tr.children[k + 1], v)); tr.children[4].className = `num ${q.waitingBytes ? "warn" : "faint"}`; });
    foot.replaceChildren(h("span", {}, `${int(shown.length)} of ${int(page.total)} shown`));
    facts.replaceChildren(h("span", {}, h("b", {}, int(page.queries.reduce((n, q) => n + q.subscribers, 0))), " subscribers"), h("span", {}, h("b", {}, int(page.total)), " distinct filters"), ...(page.streams ? [h("span", {}, h("b", {}, int(page.streams)), " stream sockets")] : []));
    if (!panel.matches(":focus-within")) clients(list.find((q) => key(q) === chosen));
  }
  function clients(q) {
    if (!q) { panel.replaceChildren(empty("queries", "No query selected")); return; }
    const drop = (c) => act("It could not be disconnected", () => call(`/subscribers/${encodeURIComponent(c.id)}`, { method: "DELETE" }), () => ["Disconnected", "A browser comes back by itself.", "good"]).then(load);
    panel.replaceChildren(h("header", {}, h("h2", { class: "clip mono" }, q.query || "everything")), h("div", { class: "body" }, kv([["Channel", h("a", { href: `#/channels/${encodeURIComponent(q.channel)}?filter=${encodeURIComponent(q.query)}` }, q.channel)], ["Dialect", q.dialect], ["Id", h("code", {}, q.filterId.slice(0, 16))], ["Matched", int(q.matched)]])),
      ...q.clients.map((c) => h("section", { class: "section" }, h("div", { class: "row" }, h("h2", { class: "mono clip" }, c.address ?? c.id), button("Disconnect", null, () => drop(c), { class: "sm danger", "data-writes": "" })), kv([["Client", h("code", {}, c.id)], ["Over", c.transport === "sse" ? "server-sent events" : "WebSocket"], ["Connected", since(c.since)], ["Sent", int(c.sent)], ["Waiting", c.waitingBytes ? h("span", { class: "warn" }, `${bytes(c.waitingBytes)}, ${c.waitingSeconds.toFixed(0)} s`) : "none"], c.lag > 0 && ["Lag", `${int(c.lag)} records`], c.dropped > 0 && ["Dropped", int(c.dropped)]]))),
      h("footer", {}, h("span", {}, `${int(q.clients.length)} of ${int(q.subscribers)} shown`), h("span", { class: "grow" }), q.clients.length > 1 && button("Disconnect all shown", null, () => later(`${q.clients.length} clients are disconnected in 10 s`, "", () => q.clients.forEach(drop)), { class: "sm danger", "data-writes": "" })));
  }
  async function load() {
    try { const found = await call("/subscribers"); before = page && { at: page.at, of: new Map(page.queries.map((q) => [key(q), q.matched])) }; page = { ...found, at: Date.now() }; draw(); } catch (error) { if (!page) rows.replaceChildren(h("tr", {}, h("td", { colspan: "5" }, problem(error, load)))); }
  }
  return poll(load, 2000);
}
