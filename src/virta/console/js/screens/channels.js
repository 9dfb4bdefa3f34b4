// Channels: all of them, with a search field.
import { bytes, h, head, icon, int, problem, rate, since, text } from "../ui.js";
import { allChannels, figures, poll } from "../api.js";
import { countChannels } from "../shell.js";
import { firstStep } from "./overview.js";

const SHOWN = 200;

export default async function channels(root) {
  const facts = h("p", { class: "facts" }), rows = h("tbody", { id: "channels" }), foot = h("footer", {}), find = h("input", { type: "text", "data-find": "", "aria-label": "Find channels", placeholder: "part of the name", oninput: () => draw() });
  root.append(head("Channels", facts), h("section", { class: "card", "aria-label": "Channels" }, h("div", { class: "filter tight" }, h("div", { class: "field" }, icon("search"), find)), h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "Channel"), h("th", { class: "num" }, "Events/s"), h("th", { class: "num hide-s" }, "Events"), h("th", { class: "num" }, "Size"), h("th", { class: "num hide-s" }, "Subscribers"), h("th", { class: "num hide-s hide-t" }, "First offset"), h("th", { class: "num hide-s hide-t" }, "Last offset"), h("th", { class: "hide-s hide-n" }, "First event"), h("th", { class: "hide-s hide-t" }, "Last event"), h("th", { class: "hide-s hide-m" }, "Kept"))), rows)), foot));
  let known = [];
  const ago = (time) => (time === null ? "none" : since(time));
  const cells = (c) => [rate(c.eventsPerSecond), int(c.records), bytes(c.bytes), int(c.subscribers), c.firstOffset === null ? "none" : int(c.firstOffset), c.lastOffset === null ? "none" : int(c.lastOffset), ago(c.firstTime), ago(c.lastTime), c.kept ?? "for ever"];
  const CLASSES = ["num", "num hide-s", "num", "num hide-s", "num hide-s hide-t", "num hide-s hide-t", "hide-s hide-n muted", "hide-s hide-t muted", "hide-s hide-m muted nowrap"];
  function draw() {
    const words = find.value.toLowerCase(), list = known.filter((c) => c.name.toLowerCase().includes(words)), shown = list.slice(0, SHOWN);
    if (!known.length) { rows.replaceChildren(h("tr", {}, h("td", { colspan: "10" }, firstStep()))); foot.hidden = true; return; }
    const same = shown.length === rows.children.length && shown.every((c, i) => rows.children[i].dataset.name === c.name);
    if (!same) rows.replaceChildren(...shown.map((c) => h("tr", { class: "pick", tabindex: "-1", "data-name": c.name, onclick: (e) => { if (!e.target.closest("a")) location.hash = `/channels/${encodeURIComponent(c.name)}`; } }, h("td", { class: "clip" }, h("a", { href: `#/channels/${encodeURIComponent(c.name)}` }, c.name)), CLASSES.map((cls) => h("td", { class: cls })))));
    shown.forEach((c, i) => cells(c).forEach((value, k) => text(rows.children[i].children[k + 1], value)));
    foot.hidden = false; foot.replaceChildren(h("span", {}, `${int(shown.length)} of ${int(list.length)} shown`), ...(list.length < known.length ? [h("span", {}, `${int(known.length)} in all`)] : []));
    facts.replaceChildren(h("span", {}, h("b", {}, int(known.length)), ` channel${known.length === 1 ? "" : "s"}`), h("span", {}, h("b", {}, int(known.reduce((n, c) => n + c.records, 0))), " events"), h("span", {}, h("b", {}, bytes(figures.last?.logBytes ?? 0)), " in the log"));
  }
  const load = async () => { try { known = await allChannels(); countChannels(known.length); draw(); } catch (error) { if (!known.length) rows.replaceChildren(h("tr", {}, h("td", { colspan: "10" }, problem(error, load)))); } };
  return poll(load, 2000);
}
