// The filter box: a switch of dialects, a text that grows, one line below; checked while typing.
import { $, bytes, h, icon, int, plural, radios, segment, text } from "./ui.js";
import { call, draft } from "./api.js";

export const DIALECTS = [["query-string", "Query string"], ["cesql", "CESQL"], ["koncorde", "Koncorde"], ["cloudevents", "CloudEvents"]];
const HINTS = { "query-string": "status=paid&total=>120;status=refunded", cesql: "type = 'order.paid' AND source LIKE '/shop/%'", koncorde: '{"equals": {"status": "paid"}}', cloudevents: '{"prefix": {"type": "order."}}' };
const CHECK_MS = 150, SLOW_MS = 300;
const isJson = (dialect) => dialect === "koncorde" || dialect === "cloudevents";

// A filter as the members of a request's body, as text, so that numbers stay as they were typed.
export const members = ({ source, dialect }) => (source.trim() ? `"filter":${isJson(dialect) ? source : JSON.stringify(source)},"dialect":${JSON.stringify(dialect)}` : '"filter":"","dialect":"query-string"');

export class FilterBox {
  // `onvalid` gets {source, dialect, id, conditions} each time there is a new valid filter.
  constructor({ dialect = "query-string", source = "", name = "filter", onvalid, extra }) {
    Object.assign(this, { dialect, name, onvalid, drafts: {}, valid: { source: "", dialect: "query-string" }, turn: 0 });
    for (const [one] of DIALECTS) this.drafts[one] = draft(`${name}.${one}`) ?? "";
    if (source) this.drafts[dialect] = source;
    this.area = h("textarea", { id: "filter", rows: "1", spellcheck: "false", autocapitalize: "off", autocomplete: "off", "aria-label": "Filter", "aria-describedby": "verdict", "data-find": "", oninput: () => this.typed() });
    this.box = h("div", { class: "field" }, icon("queries"), this.area);
    this.verdict = h("div", { class: "verdict", id: "verdict", role: "status" });
    const dialects = radios("Language of the filter", "dialect", DIALECTS, dialect);
    this.el = h("div", { class: "filter" }, h("div", { class: "bar" }, dialects, h("span", { class: "grow" }), extra), this.box, this.verdict);
    segment(dialects, (value) => { this.dialect = value; this.area.value = this.drafts[value]; this.area.placeholder = HINTS[value]; this.check(); });
    this.area.value = this.drafts[dialect]; this.area.placeholder = HINTS[dialect];
  }
  typed() { this.drafts[this.dialect] = this.area.value; draft(`${this.name}.${this.dialect}`, this.area.value); clearTimeout(this.timer); this.timer = setTimeout(() => this.check(), CHECK_MS); }
  set(source, dialect = this.dialect) { this.drafts[dialect] = source; $(`#dialect button[value="${dialect}"]`, this.el).click(); }
  wrong(message, near) {
    this.box.classList.add("bad"); this.area.setAttribute("aria-invalid", "true");
    this.verdict.replaceChildren(h("span", { class: "bad" }, icon("alert"), message), ...(near ? [h("span", {}, "at ", h("mark", {}, near))] : []), h("span", { class: "faint" }, "The filter before it still runs."));
  }
  async check() {
    const mine = ++this.turn, source = this.area.value.trim(), { dialect } = this;
    if (source && isJson(dialect)) { try { JSON.parse(source); } catch (error) { this.wrong(`This is not JSON yet: ${error.message.replace(/^.*?JSON\.?(parse: )?/i, "").replace(/^[ :]+/, "") || "it ends too early"}`); return; } }
    const slow = setTimeout(() => { if (mine === this.turn) this.verdict.replaceChildren(h("span", { class: "faint" }, "Checking")); }, SLOW_MS);
    try {
      const found = await call("/filters/validate", { text: `{${members({ source, dialect })}}` });
      if (mine !== this.turn) return;
      this.box.classList.remove("bad"); this.area.removeAttribute("aria-invalid");
      this.valid = { source, dialect: source ? dialect : "query-string", id: found.id, conditions: found.conditions };
      this.verdict.replaceChildren(...(source ? [h("span", { class: "good" }, icon("check"), "Valid"), h("span", {}, plural(found.conditions, "condition")), h("span", { class: "hide-s" }, "id ", h("code", {}, found.id.slice(0, 8)))] : [h("span", { class: "good" }, icon("check"), "No filter: everything matches")]), ...(source && found.subscribers ? [h("span", { class: "hide-s" }, "the same filter as ", h("a", { href: "#/queries" }, plural(found.subscribers, "subscriber")))] : []));
      this.onvalid(this.valid);
    } catch (error) { if (mine === this.turn) this.wrong(error.message, error.body?.keyword ?? error.body?.path ?? error.body?.key ?? ""); } finally { clearTimeout(slow); }
  }
}

const BARS_LABEL = "Matches per half hour in the last day";

// How often the filter would have matched in the last day, 48 bars.
export class LastDay {
  constructor() {
    this.turn = 0;
    this.share = h("span", { id: "dayshare" });
    this.bars = h("div", { class: "bars", id: "day", role: "img" });
    this.el = h("footer", { class: "lastday" }, this.share, this.bars);
    this.clear();
  }
  // A screen reader needs a label before the first answer, too.
  clear() { this.bars.replaceChildren(); this.bars.setAttribute("aria-label", `${BARS_LABEL}: not counted yet`); }
  async show(channel, filter) {
    const mine = ++this.turn;
    try {
      const found = await call("/filters/count", { text: `{"channel":${JSON.stringify(channel)},${members(filter)}}` });
      if (mine !== this.turn) return;
      const most = Math.max(1, ...found.bins), part = found.events ? (found.matched / found.events) * 100 : 0;
      this.bars.replaceChildren(...found.bins.map((n) => h("i", {}, n ? h("b", { css: { height: `${Math.max(4, (n / most) * 100).toFixed(0)}%` } }) : null)));
      this.bars.setAttribute("aria-label", `${BARS_LABEL}, at most ${int(most)}`);
      text(this.share, found.events ? `Last day: ${found.exact ? "" : "about "}${int(found.matched)} of ${int(found.events)} events would have matched (${part.toFixed(1)} %${found.exact ? "" : `, ± ${int(found.error)}`})` : "No events in the last day");
    } catch (error) { if (mine === this.turn) { text(this.share, `Last day: ${error.message}`); this.clear(); } }
  }
}
