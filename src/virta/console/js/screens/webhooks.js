// Webhooks: state, last error, dead letters with redeliver, a test event.
import { button, empty, h, head, icon, int, kv, pill, problem, since, text, tree } from "../ui.js";
import { call, figures, poll } from "../api.js";
import { act, closeAll, copy, curl, dialog, field, later, toast } from "../shell.js";

const STATES = { active: ["good live", "Active"], pending: ["warn half", "Pending"], gone: ["bad sq", "Gone"], expired: ["bad sq", "Expired"], revoked: ["bad sq", "Revoked"] };

export default async function webhooks(root) {
  const facts = h("p", { class: "facts" }), rows = h("tbody", { id: "webhooks" }), panel = h("aside", { class: "card", "aria-label": "Selected webhook", id: "webhook" });
  root.append(head("Webhooks", facts, button("New webhook", "plus", create, { class: "primary", "data-writes": "" })), h("div", { class: "two" }, h("section", { class: "card", "aria-label": "Webhooks" }, h("div", { class: "scroll" }, h("table", { class: "fixed" }, h("thead", {}, h("tr", {}, h("th", {}, "Sink"), h("th", { class: "hide-xs w-state" }, "State"), h("th", { class: "num hide-s w-num" }, "Delivered"), h("th", { class: "num w-num" }, "Behind"), h("th", { class: "num hide-s w-num" }, "Dead"))), rows))), panel));
  let list = [], chosen = null, shownLetters = null;
  const behind = (w) => Math.max(0, (figures.last?.nextOffset ?? 0) - w.status.offset);
  function draw() {
    if (!list.some((w) => w.id === chosen)) chosen = list[0]?.id ?? null;
    if (!list.length) rows.replaceChildren(h("tr", {}, h("td", { colspan: "5" }, empty("webhooks", "No webhooks", "A webhook receives matching events by HTTP:", h("code", {}, `curl ${location.origin}/subscriptions -d '{"sink": "https://example.com/hook", "config": {"channel": "orders"}}'`)))));
    else rows.replaceChildren(...list.map((w) => h("tr", { class: "pick", tabindex: "-1", "aria-selected": w.id === chosen ? "true" : "false", onclick: () => { chosen = w.id; shownLetters = null; draw(); show(); } }, h("td", {}, h("span", { class: "mono clip" }, w.sink), h("span", { class: "sub clip" }, w.status.lastError ? `${w.config.channel}: ${w.status.lastError}` : w.config.channel)), h("td", { class: "hide-xs" }, pill(...STATES[w.status.state])), h("td", { class: "num hide-s" }, int(w.status.delivered)), h("td", { class: `num ${behind(w) > 1000 ? "warn" : ""}` }, int(behind(w))), h("td", { class: `num hide-s ${w.status.deadLetters ? "bad" : "faint"}` }, int(w.status.deadLetters)))));
    facts.replaceChildren(h("span", {}, h("b", {}, int(list.length)), ` webhook${list.length === 1 ? "" : "s"}`), h("span", {}, h("b", {}, int(list.reduce((n, w) => n + w.status.delivered, 0))), " delivered"), h("span", {}, h("b", {}, int(list.reduce((n, w) => n + w.status.deadLetters, 0))), " dead letters since the start"));
  }
  async function show() {
    const w = list.find((one) => one.id === chosen);
    if (!w) { panel.replaceChildren(empty("webhooks", "No webhook selected")); return; }
    const letters = h("div", { class: "stack" }), count = h("span", { class: "faint" });
    const path = `/subscriptions/${encodeURIComponent(w.id)}`;
    const test = () => act("The test event could not be sent", () => call(`${path}/test`, { method: "POST" }), (r) => (r.delivered ? ["The sink accepted the test event", "", "good"] : ["The sink did not accept the test event", r.reason, "bad"]));
    panel.replaceChildren(h("header", {}, h("h2", { class: "mono clip" }, w.sink), h("div", { class: "right" }, pill(...STATES[w.status.state]))),
      h("div", { class: "body" }, kv([["Channel", h("a", { href: `#/channels/${encodeURIComponent(w.config.channel)}` }, w.config.channel)], ...[["Filter", w.filters], ["Types", w.types], ["Source", w.source]].filter(([, value]) => value).map(([word, value]) => [word, h("code", {}, typeof value === "string" ? value : word === "Types" ? value.join(", ") : JSON.stringify(value))]), !w.filters && !w.types && !w.source && ["Filter", "everything"], ["Next offset", int(w.status.offset)], ["Behind", int(behind(w))], w.status.lastAnswer && ["Last answer", `${w.status.lastAnswer}, ${since(w.status.lastAnswerTime)} ago`.replace("now ago", "now")], ["Last error", w.status.lastError ? h("span", { class: "bad" }, w.status.lastError) : "none"], w.status.allowedRate && ["Allowed", `${int(w.status.allowedRate)} a minute`], w.status.expires && ["Expires", w.status.expires], ["Id", h("code", {}, w.id)]])),
      h("section", { class: "section" }, h("div", { class: "row" }, h("h2", {}, "Dead letters"), count), letters),
      h("footer", {}, button("Send a test event", "send", test, { class: "sm", id: "test-event", "data-writes": "" }), button("Delete", "cross", () => later("The webhook is deleted in 10 s", w.sink, () => act("It could not be deleted", () => call(path, { method: "DELETE" })).then(load)), { class: "sm danger", "data-writes": "" }), h("span", { class: "grow" }), button("curl", "copy", () => copy(curl(`${path}/test`, { method: "POST" }), "curl command"), { class: "sm quiet", "data-key": "y" })));
    try {
      const page = await call(`${path}/dead-letters`), found = page.deadLetters;
      shownLetters = found;
      text(count, found.length ? `${int(found.length)}${page.complete ? "" : " newest"}` : "");
      const again = async (offsets) => { const result = await act("It could not be sent", () => call(`${path}/redeliver`, { body: { offsets } })); if (!result) return; const good = result.results.filter((r) => r.delivered).length, bad = result.results.find((r) => !r.delivered); toast(`${good} of ${offsets.length} delivered`, bad ? bad.reason : "", bad ? "bad" : "good"); load(); };
      letters.replaceChildren(...(found.length ? [found.length > 1 && button(`Redeliver ${found.length}`, "restart", () => again(found.map((l) => l.offset)), { class: "sm", "data-writes": "" }), ...found.slice(0, 20).map((l) => h("details", {}, h("summary", {}, h("span", { class: "mono" }, `${int(l.offset)} `), h("span", { class: "bad" }, l.reason), h("span", { class: "faint" }, ` ${since(l.time)}, ${int(l.attempts)} attempts`)), h("div", { class: "json", tabindex: "0", role: "region", "aria-label": "Event" }, tree(l.event)), button("Redeliver", "restart", () => again([l.offset]), { class: "sm", "data-writes": "" })))] : [h("span", { class: "faint" }, "None. That is good.")]).filter(Boolean));
    } catch (error) { letters.replaceChildren(problem(error)); }
  }
  function create() {
    const sink = h("input", { type: "url", required: true, placeholder: "https://example.com/hook" }), channel = h("input", { type: "text", required: true, placeholder: "orders" }), said = h("p", { role: "status", class: "small bad" });
    dialog("New webhook", h("form", { class: "stack", onsubmit: async (e) => { e.preventDefault(); try { await call("/subscriptions", { body: { sink: sink.value, config: { channel: channel.value } } }); closeAll(); toast("The webhook is there", "", "good"); load(); } catch (error) { text(said, error.message); } } }, field("Sink", sink, "It is asked for its consent first."), field("Channel", channel), said, h("div", { class: "row" }, h("button", { class: "btn primary", type: "submit" }, "Create"))));
  }
  async function load() { try { const first = !list.length; list = await call("/subscriptions"); draw(); if (first || (!panel.matches(":focus-within, :hover") && shownLetters === null)) show(); } catch (error) { rows.replaceChildren(h("tr", {}, h("td", { colspan: "5" }, problem(error, load)))); } }
  return poll(load, 3000);
}
