// Overview: what the server does now and in the last minutes, and what needs attention.
import { Chart } from "../chart.js";
import { bytes, empty, h, icon, int, legend, radios, rate, segment, short, since, spark, text, tiles } from "../ui.js";
import { allChannels, call, figures, poll } from "../api.js";
import { copy, countChannels } from "../shell.js";

const POINTS = 300;
const FLOW = [{ name: "events in", color: "accent", fill: true }, { name: "deliveries out", color: "alt" }], LAT = [{ name: "p50", color: "info", fill: true }, { name: "p99", color: "warn" }];
const ms = (v) => (v === null || v === undefined ? "none" : `${v > 0 && v < 10 ? v.toFixed(1) : int(v)} ms`);
export const days = (seconds) => (seconds === null ? "does not grow" : seconds > 3650 * 86400 ? "full in over 10 years" : seconds > 2 * 86400 ? `full in ${int(seconds / 86400)} days` : seconds > 7200 ? `full in ${int(seconds / 3600)} hours` : `full in ${int(seconds / 60)} min`);
const FIRST = `curl ${location.origin}/channels/orders -H 'Content-Type: application/cloudevents+json' -d '{"specversion":"1.0","type":"order","source":"/shop","id":"1","data":{"status":"paid"}}'`;
export const firstStep = () => empty("channels", "No events yet", "Publish the first one:", h("code", {}, FIRST), h("button", { class: "btn", type: "button", onclick: () => copy(FIRST, "Command") }, "Copy"));

export default async function overview(root) {
  const facts = h("p", { class: "facts" }), range = radios("Time shown", "range", [["1", "5 min"], ["12", "1 h"], ["288", "24 h"]], "1");
  const t = tiles([{ label: "Events in", unit: "/s", color: "accent" }, { label: "Deliveries out", unit: "/s", color: "alt" }, { label: "Publish to deliver", unit: "ms p50", color: "info" }, { label: "Subscribers", color: "good" }, { label: "Disk", unit: "% used", meter: true }]);
  const flowBox = h("div", { class: "chart", id: "c-flow" }), latBox = h("div", { class: "chart low", id: "c-lat" }), flowLegend = h("div", { class: "right legend" }), latLegend = h("div", { class: "right legend" });
  const todo = h("ul", { class: "todo", id: "todo" }), todoCount = h("div", { class: "right faint" }), rows = h("tbody", { id: "channels" }), all = h("a", { href: "#/channels" }, "All channels"), slow = h("footer", {}, h("span", { id: "slowest" }, "No consumer is behind"));
  root.append(h("div", { class: "head" }, h("div", {}, h("h1", {}, "Overview"), facts), range), t.el,
    h("div", { class: "two even" }, h("section", { class: "card", "aria-labelledby": "h-flow" }, h("header", {}, h("h2", { id: "h-flow" }, "Events and deliveries, per second"), flowLegend), h("div", { class: "body" }, flowBox)), h("section", { class: "card", "aria-labelledby": "h-todo" }, h("header", {}, h("h2", { id: "h-todo" }, "Needs attention"), todoCount), todo)),
    h("div", { class: "two even" }, h("section", { class: "card", "aria-labelledby": "h-ch" }, h("header", {}, h("h2", { id: "h-ch" }, "Busiest channels"), h("div", { class: "right" }, all)), h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "Channel"), h("th", { class: "num" }, "Events/s"), h("th", { class: "hide-s" }, h("span", { class: "vh" }, "Last minute")), h("th", { class: "num hide-s" }, "Subscribers"), h("th", { class: "num" }, "Size"), h("th", { class: "hide-s" }, "Kept"), h("th", { class: "hide-s hide-m" }, "Last event"))), rows))),
      h("section", { class: "card", "aria-labelledby": "h-lat" }, h("header", {}, h("h2", { id: "h-lat" }, "Publish to deliver"), latLegend), h("div", { class: "body" }, latBox), slow)));
  // The selected time on the busiest channel; others are one click away.
  const show = (from) => { const name = rows.firstChild?.dataset?.name; location.hash = name === undefined ? "/channels" : `/channels/${encodeURIComponent(name)}?from=${encodeURIComponent(new Date(from).toISOString())}`; };
  const flow = new Chart(flowBox, { series: FLOW, label: "Events in and deliveries out per second. Arrow keys read single values.", onselect: show }), lat = new Chart(latBox, { series: LAT, format: ms, label: "Time from publish to deliver, p50 and p99, in milliseconds. Arrow keys read single values." });

  let step = 1, series = { events: [], deliveries: [], p50: [], p99: [], subs: [] }, known = [], history = {}, asked = 0;
  const pad = (list) => [...Array(Math.max(0, POINTS - list.length)).fill(null), ...list.slice(-POINTS)];
  async function load() {
    const mine = ++asked;
    try { const found = await call(`/stats/history?step=${step}`); if (mine === asked) { series = { ...series, events: found.eventsPerSecond, deliveries: found.deliveriesPerSecond, p50: found.p50Ms, p99: found.p99Ms }; if (step === 1) { seed(0, series.events); seed(1, series.deliveries); seed(2, series.p50); } draw(); } } catch { /* the pill says it */ }
  }
  const seed = (index, list) => t.set(index, null, "", list.slice(-60).filter((v) => v !== null));
  function draw() {
    if (document.hidden) return;
    flow.set([pad(series.events), pad(series.deliveries)], Date.now(), step * 1000); lat.set([pad(series.p50), pad(series.p99)], Date.now(), step * 1000);
    legend(flowLegend, FLOW, [short(series.events.at(-1) ?? 0), short(series.deliveries.at(-1) ?? 0)]); legend(latLegend, LAT, [ms(series.p50.at(-1)), ms(series.p99.at(-1))]);
  }
  function sample(now) {
    if (step === 1) { series.events.push(now.eventsPerSecond); series.deliveries.push(now.deliveriesPerSecond); series.p50.push(now.p50Ms); series.p99.push(now.p99Ms); for (const one of Object.values(series)) if (one.length > POINTS) one.shift(); draw(); }
    t.set(0, short(now.eventsPerSecond), `${bytes(now.bytesPerSecond)}/s`, now.eventsPerSecond);
    t.set(1, short(now.deliveriesPerSecond), now.eventsPerSecond ? `${(now.deliveriesPerSecond / now.eventsPerSecond).toFixed(1)} for each event` : "no event now", now.deliveriesPerSecond);
    t.set(2, now.p50Ms === null ? "none" : now.p50Ms.toFixed(2), now.p99Ms === null ? "no publication now" : `p99 ${ms(now.p99Ms)}`, now.p50Ms ?? undefined);
    t.set(3, short(now.subscribers), `${int(now.filters)} distinct filter${now.filters === 1 ? "" : "s"}`, now.subscribers);
    const used = (1 - now.diskFreeBytes / now.diskBytes) * 100;
    t.set(4, used.toFixed(0), days(now.fullInSeconds), used);
    const busy = new Map(now.channels.map((c) => [c.name, c.eventsPerSecond]));
    for (const c of known) (history[c.name] ??= []).push(busy.get(c.name) ?? 0);
    for (const list of Object.values(history)) if (list.length > 60) list.shift();
    for (const tr of rows.children) { const name = tr.dataset.name; if (name === undefined) continue; text(tr.children[1], rate(busy.get(name) ?? 0)); spark(tr.children[2].firstChild, history[name] ?? [], { area: false }); }
    text(facts.lastChild, "renewed every second");
  }
  function table() {
    const busy = [...known].sort((a, b) => (history[b.name]?.at(-1) ?? b.eventsPerSecond) - (history[a.name]?.at(-1) ?? a.eventsPerSecond) || b.records - a.records).slice(0, 7);
    const same = busy.length === rows.children.length && busy.every((c, i) => rows.children[i].dataset.name === c.name);
    if (!known.length) { rows.replaceChildren(h("tr", {}, h("td", { colspan: "7" }, firstStep()))); return; }
    if (!same && !rows.matches(":hover, :focus-within")) rows.replaceChildren(...busy.map((c) => h("tr", { "data-name": c.name }, h("td", { class: "clip rest", title: c.name }, h("a", { href: `#/channels/${encodeURIComponent(c.name)}` }, c.name)), h("td", { class: "num" }, rate(c.eventsPerSecond)), h("td", { class: "hide-s" }, h("div", { class: "spark mini c-accent" })), h("td", { class: "num hide-s" }), h("td", { class: "num" }), h("td", { class: "hide-s muted nowrap" }), h("td", { class: "hide-s hide-m muted nowrap" }))));
    const of = new Map(known.map((c) => [c.name, c]));
    for (const tr of rows.children) { const c = of.get(tr.dataset.name); if (!c) continue; text(tr.children[3], int(c.subscribers)); text(tr.children[4], bytes(c.bytes)); text(tr.children[5], c.kept ?? "for ever"); text(tr.children[6], c.lastTime === null ? "none" : since(c.lastTime)); }
  }
  const item = (kind, pic, title, body, href) => h("li", {}, icon(pic, kind), h("strong", {}, title), h("a", { href, "aria-label": `Look at: ${title}` }, "Look"), h("p", {}, body));
  async function slower() {
    try {
      const [list, health, subs] = await Promise.all([allChannels(), call("/health"), call("/subscribers")]);
      known = list; table(); countChannels(list.length);
      facts.replaceChildren(h("span", {}, h("b", {}, int(list.length)), ` channel${list.length === 1 ? "" : "s"}`), h("span", {}, h("b", {}, bytes(figures.last?.logBytes ?? 0)), " in the log"), h("span", {}, "renewed every second"));
      text(all, list.length > 7 ? `All ${int(list.length)} channels` : "All channels");
      const worst = subs.queries.find((q) => q.waitingBytes > 0);
      slow.replaceChildren(worst ? h("span", {}, "Slowest consumer: ", h("a", { href: `#/queries?channel=${encodeURIComponent(worst.channel)}` }, worst.query || worst.channel), `, ${bytes(worst.waitingBytes)} waiting`) : h("span", {}, "No consumer is behind"));
      const open = health.checks.filter((c) => c.state !== "ok"), where = { jobs: ["skull", "#/jobs"], pipelines: ["pipelines", "#/pipelines"], webhooks: ["webhooks", "#/webhooks"], disk: ["db", "#/health"] };
      todo.replaceChildren(...open.map((c) => { const [pic, href] = where[c.name] ?? ["alert", "#/health"]; return item(c.state === "wrong" || c.name === "jobs" ? "bad" : "warn", pic, c.text.split(":")[0], c.text.includes(":") ? c.text.slice(c.text.indexOf(":") + 1).trim() : "", href); }));
      if (!open.length) todo.replaceChildren(h("li", {}, icon("check", "good"), h("strong", {}, "Nothing"), h("span"), h("p", {}, "All checks are well.")));
      text(todoCount, open.length ? String(open.length) : "");
    } catch (error) { if (error.status) todo.replaceChildren(h("li", {}, icon("alert", "bad"), h("strong", {}, error.title ?? "This could not be loaded"), h("span"), h("p", {}, error.message))); }
  }
  segment(range, (value) => { step = Number(value); load(); });
  await load();
  const ends = [figures.listen(sample), poll(slower, 4000), poll(() => step !== 1 && load(), 12_000)];
  return () => { for (const end of ends) end(); flow.close(); lat.close(); };
}
