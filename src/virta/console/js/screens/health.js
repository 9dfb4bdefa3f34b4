// Health: checks, worst first; verify; segments; versions.
import { button, bytes, clock, h, head, icon, int, kv, pill, plural, problem, sign, since } from "../ui.js";
import { call, figures, poll } from "../api.js";
import { act } from "../shell.js";

const WORD = { ok: ["good", "Well"], warning: ["warn half", "Warning"], wrong: ["bad sq", "Wrong"] };
const mark = (state) => { if (state === "ok") return sign("yes"); const made = sign("fail", state === "wrong" ? "fail" : "warn"); if (state === "warning") made.replaceChildren(icon("alert")); return made; };

export default async function health(root) {
  const facts = h("p", { class: "facts" }), checks = h("ul", { class: "checks", id: "checks" }), rows = h("tbody", { id: "segments" }), versions = h("div", { class: "body" }), verified = h("span", { role: "status" }, "Verifying reads the whole log and checks every checksum."), state = h("div", { class: "right" }), number = h("div", { class: "right faint" });
  const verify = button("Verify the log", "check", async () => {
    verify.disabled = true; verified.replaceChildren("Verifying");
    const found = await act("The log could not be verified", () => call("/health/verify", { method: "POST" }));
    verify.disabled = false;
    if (found) verified.replaceChildren(h("span", { class: found.ok ? "good" : "bad" }, found.ok ? `No damage: ${int(found.records)} records in ${int(found.segments)} segment${found.segments === 1 ? "" : "s"}, ${bytes(found.bytes)}, in ${found.seconds.toFixed(1)} s, at ${clock(Date.now())}` : found.problems.join("; ")));
  }, { id: "verify", "data-writes": "" });
  const tierState = h("div", { class: "right" }), tierFacts = h("div", { class: "body" }), tier = h("section", { class: "card", id: "tier", hidden: true, "aria-labelledby": "h-tier" }, h("header", {}, h("h2", { id: "h-tier" }, "Object storage"), tierState), tierFacts);
  const captured = h("tbody", { id: "captures" }), databases = h("section", { class: "card", hidden: true, "aria-labelledby": "h-captures" }, h("header", {}, h("h2", { id: "h-captures" }, "Captured databases")), h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "Name"), h("th", {}, "State"), h("th", { class: "num hide-s" }, "Records"), h("th", { class: "num" }, "Behind"), h("th", { class: "num hide-s" }, "WAL retained"), h("th", { class: "num hide-s" }, "Restarts"))), captured)));
  root.append(head("Health", facts, verify), h("div", { class: "two" }, h("section", { class: "card", "aria-labelledby": "h-checks" }, h("header", {}, h("h2", { id: "h-checks" }, "Checks"), state), checks, h("footer", {}, verified)), h("section", { class: "card", "aria-labelledby": "h-versions" }, h("header", {}, h("h2", { id: "h-versions" }, "Versions")), versions)), tier, databases,
    h("section", { class: "card", "aria-labelledby": "h-segments" }, h("header", {}, h("h2", { id: "h-segments" }, "Segments of the log"), number), h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "First offset"), h("th", { class: "num hide-xs" }, "Records"), h("th", { class: "num" }, "Size"), h("th", { class: "hide-s" }, "Begun"), h("th", { class: "hide-s" }, "Last record"), h("th", {}, "State"))), rows))));
  async function load() {
    try {
      const found = await call("/health");
      state.replaceChildren(pill(...WORD[found.state]));
      checks.replaceChildren(...found.checks.map((c) => h("li", {}, mark(c.state), h("span", {}, c.text), h("span", { class: "faint" }, c.name))));
      rows.replaceChildren(...found.segments.map((s) => h("tr", {}, h("td", {}, int(s.baseOffset)), h("td", { class: "num hide-xs" }, int(s.nextOffset - s.baseOffset)), h("td", { class: "num" }, bytes(s.bytes)), h("td", { class: "hide-s muted", title: s.created }, `${since(s.created)} ago`.replace("now ago", "now")), h("td", { class: "hide-s muted", title: s.lastTime }, s.nextOffset > s.baseOffset ? `${since(s.lastTime)} ago`.replace("now ago", "now") : "none"), h("td", {}, s.sealed ? pill("ring", s.compacted ? "Compacted" : "Sealed") : pill("good", "Active")))));
      number.textContent = found.segmentsTotal > found.segments.length ? `newest ${found.segments.length} of ${int(found.segmentsTotal)}` : int(found.segmentsTotal);
      tier.hidden = !found.tier;
      if (found.tier) tierState.replaceChildren(pill(...(found.tier.problem ? ["bad sq", "Failing"] : found.tier.pendingRecords ? ["warn half", "Behind"] : ["good", "Up to date"])));
      if (found.tier) tierFacts.replaceChildren(kv([["Store", h("code", {}, found.tier.url)], ["Shipped up to offset", int(found.tier.shippedOffset)], ["Not shipped yet", found.tier.pendingRecords ? `${plural(found.tier.pendingRecords, "record")}, about ${bytes(found.tier.pendingBytes)}` : "none"], ["Last error", found.tier.problem ?? "none"]]));
      const captures = await call("/captures");
      databases.hidden = !captures.length;
      captured.replaceChildren(...captures.map((c) => h("tr", { title: c.reason ?? "" }, h("td", {}, c.name, h("span", { class: "faint" }, ` ${c.kind}`)), h("td", {}, pill(c.state === "running" ? "good" : "bad sq", c.state)), h("td", { class: "num hide-s" }, int(c.records ?? 0)), h("td", { class: "num" }, c.lag_bytes === undefined ? plural(c.recorded ?? 0, "change") : bytes(c.lag_bytes)), h("td", { class: "num hide-s" }, c.retained_bytes === undefined ? "" : bytes(c.retained_bytes)), h("td", { class: "num hide-s" }, int(c.restarts)))));
      versions.replaceChildren(kv(Object.entries(found.versions).map(([name, value]) => [name, h("code", {}, value)])));
      const last = figures.last;
      if (last) facts.replaceChildren(h("span", {}, h("b", {}, bytes(last.logBytes)), " in the log"), h("span", {}, h("b", {}, bytes(last.diskFreeBytes)), " free"), h("span", {}, "next offset ", h("b", {}, int(last.nextOffset))));
    } catch (error) { checks.replaceChildren(h("li", {}, problem(error, load))); }
  }
  return poll(load, 3000);
}
