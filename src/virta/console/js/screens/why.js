// Why: an event and a filter, and the reasons; then who else would get the event, and how often the filter matched.
import { bytes, button, empty, h, head, icon, int, parse, problem, text } from "../ui.js";
import { Stream, allChannels, draft } from "../api.js";
import { act, copy, curl } from "../shell.js";
import { FilterBox, LastDay } from "../filterbox.js";
import { drawn, explain, marked, standing, verdict } from "../explanation.js";
import { remember } from "../main.js";

const EXAMPLE = { specversion: "1.0", type: "shop.order.paid", source: "/shop/eu", id: "1", data: { status: "paid", total: 69.08 } };

// The record of a channel at an offset, or the next one after it.
export function fetchEvent(channel, offset) {
  return new Promise((done, refuse) => {
    const stream = new Stream(`/channels/${encodeURIComponent(channel)}/from/${encodeURIComponent(offset)}?$positions=1`, { onframe: (f) => { if (f.event === "data") { stream.close(); done({ source: f.data, offset: JSON.parse(f.comment).offset }); } }, onstate: (s, error) => { if (s === "refused") { stream.close(); refuse(error); } } });
    setTimeout(() => { stream.close(); refuse(new Error("There is no event at or after this offset")); }, 5000);
  });
}

export default async function why(root, { params }) {
  const area = h("textarea", { rows: "12", spellcheck: "false", "aria-label": "Event as JSON", id: "event" }), channelIn = h("input", { type: "text", value: params.get("channel") ?? "", list: "known", "aria-label": "Channel", placeholder: "channel" }), offsetIn = h("input", { type: "number", min: "0", value: params.get("offset") ?? "", "aria-label": "Offset", placeholder: "offset" }), known = h("datalist", { id: "known" }), fault = h("p", { class: "small bad", role: "status" });
  const answer = h("div", { id: "answer" }), tree = h("div", { class: "why-tree", id: "why" }), list = h("ul", { class: "list", id: "standing" }), number = h("span", { class: "faint" }), json = h("div", { class: "json", tabindex: "0", role: "region", "aria-label": "Event as JSON, marked" });
  let filter = { source: "", dialect: "query-string" }, timer;
  area.value = draft("why.event") || JSON.stringify(EXAMPLE, null, 2);
  const day = new LastDay(), box = new FilterBox({ dialect: params.get("dialect") ?? "query-string", source: params.get("filter") ?? "", name: "why", onvalid: (valid) => { filter = valid; show(); } });
  root.append(head("Why", h("p", { class: "facts" }, h("span", {}, "Does this event satisfy this filter, and why")), button("Copy as curl", "copy", () => { try { copy(curl("/filters/explain", { body: { filter: filter.source, dialect: filter.dialect, event: JSON.parse(area.value) } }), "curl command"); } catch { text(fault, "The event is not JSON yet"); } }, { "data-key": "y" })), known,
    h("div", { class: "wide" }, h("section", { class: "card", "aria-labelledby": "h-event" }, h("header", {}, h("h2", { id: "h-event" }, "Event")), h("div", { class: "body stack" }, h("form", { class: "row wrap", onsubmit: load }, h("span", { class: "field grow" }, channelIn), h("span", { class: "field grow" }, offsetIn), h("button", { class: "btn", type: "submit" }, "Load")), h("div", { class: "field" }, area), fault)),
      h("section", { class: "card", "aria-labelledby": "h-filter" }, h("header", {}, h("h2", { id: "h-filter" }, "Filter")), box.el, h("div", { class: "result" }, answer, tree), day.el)),
    h("div", { class: "wide" }, h("section", { class: "card", "aria-label": "Standing filters" }, h("header", {}, h("h2", {}, "Standing filters it satisfies"), h("div", { class: "right" }, number)), h("div", { class: "body" }, list)), h("section", { class: "card", "aria-label": "Event, marked" }, h("header", {}, h("h2", {}, "What the filter looks at"), h("div", { class: "right faint" }, "marked")), h("div", { class: "body" }, json))));
  async function show() {
    let event; try { event = parse(area.value); if (event === null || typeof event !== "object" || Array.isArray(event)) throw new Error("an event is a JSON object"); } catch (error) { text(fault, `This is not an event yet: ${error.message}`); return; }
    text(fault, "");
    remember({ channel: channelIn.value, offset: offsetIn.value, filter: filter.source, dialect: filter.source ? filter.dialect : "" });
    try { const found = await explain(filter, [area.value]), [one] = found.explanations; answer.replaceChildren(verdict(one, { filtered: Boolean(filter.source) })); tree.replaceChildren(drawn(one)); json.replaceChildren(marked(event, one, found.root)); } catch (error) { answer.replaceChildren(problem(error)); tree.replaceChildren(); }
    if (channelIn.value) { standing(list, number, channelIn.value, area.value); day.show(channelIn.value, filter); day.el.hidden = false; } else { list.replaceChildren(h("li", { class: "faint" }, "Name a channel to see which standing filters hold")); text(number, ""); day.el.hidden = true; }
  }
  async function load(e) { e?.preventDefault(); const found = await act("The event could not be loaded", () => fetchEvent(channelIn.value, offsetIn.value || "earliest")); if (found) { offsetIn.value = found.offset; area.value = JSON.stringify(JSON.parse(found.source), null, 2); show(); } }
  area.addEventListener("input", () => { draft("why.event", area.value); clearTimeout(timer); timer = setTimeout(show, 200); });
  channelIn.addEventListener("change", show);
  allChannels().then((all) => known.append(...all.slice(0, 200).map((c) => h("option", { value: c.name })))).catch(() => {});
  if (params.get("channel") && params.get("offset")) load();
  await box.check();
  return () => clearTimeout(timer);
}
