// The numbers of one field over time: one line, or one for each value of another field.
import { Chart } from "./chart.js";
import { Exact, h, legend, short, text } from "./ui.js";

const COLORS = ["accent", "alt", "info", "good", "warn"], FIELDS_MAX = 20, VALUES_MAX = 20, TIMES_MAX = 300;
const LONG = 100_000; // from here on short: 1.2M
const decimal = new Intl.NumberFormat("en", { maximumFractionDigits: 2 });
const format = (v) => (Math.abs(v) < LONG ? decimal.format(v) : short(v));
const DATE = /^\d{4}-\d\d-\d\dT\d\d:\d\d/;
const numberOf = (v) => (typeof v === "number" ? v : v instanceof Exact ? Number(v.source) : null);
const isTime = (v) => typeof v === "string" && DATE.test(v) && !Number.isNaN(Date.parse(v));
const isName = (v) => typeof v === "string" && !isTime(v);
const membersOf = ({ event: { data } }) => (data && typeof data === "object" && !Array.isArray(data) && !(data instanceof Exact) ? data : {});
const distinct = (list) => [...new Set(list)];
const fieldsOf = (events, wanted) => distinct(events.flatMap((one) => Object.entries(membersOf(one)).filter(([, v]) => wanted(v)).map(([k]) => k))).slice(0, FIELDS_MAX);

export class FieldChart {
  // `onpick(field)` is called with the user's choice.
  constructor({ chosen = null, onpick }) {
    Object.assign(this, { chosen, chart: null, drawn: "" });
    this.field = h("select", { class: "btn sm", "aria-label": "Field to chart", onchange: () => { this.chosen = this.field.value; onpick(this.chosen); } });
    this.title = h("h2", { id: "h-values" }, "Values over time");
    this.legend = h("div", { class: "legend" });
    this.body = h("div", { class: "body", hidden: true });
    this.el = h("section", { class: "card", "aria-labelledby": "h-values", id: "values", hidden: true }, h("header", {}, this.title, h("div", { class: "right row" }, this.legend, this.field)), this.body);
  }

  // `events`: the oldest first, each `{ event, time }`.
  draw(events) {
    const numbers = fieldsOf(events, (v) => numberOf(v) !== null);
    this.el.hidden = !numbers.length;
    if (!numbers.length || document.hidden) return;
    this.offer(numbers);
    const field = numbers.includes(this.chosen) ? this.chosen : this.chosen === null ? this.usual(events, numbers) : "";
    if (!this.field.matches(":focus")) this.field.value = field;
    this.body.hidden = this.legend.hidden = !field;
    if (!field) { text(this.title, "Values over time"); return; }
    const by = this.usualName(events), all = this.lines(events, field, by), lines = all.slice(0, COLORS.length).sort((a, b) => (a.name < b.name ? -1 : 1));
    const times = distinct(lines.flatMap((line) => [...line.values.keys()])).sort((a, b) => a - b).slice(-TIMES_MAX);
    text(this.title, `${field}${by ? ` by ${by}` : ""}${all.length > lines.length ? `, the ${lines.length} largest of ${all.length}` : ""}`);
    this.make(field, lines);
    this.chart.setAt(times.map((t) => t / 1000), lines.map((line) => times.map((t) => line.values.get(t) ?? null)));
    legend(this.legend, this.chart.series, lines.map((line) => format([...line.values.values()].at(-1))));
  }

  offer(numbers) {
    const names = ["", ...numbers];
    if (this.field.matches(":focus") || [...this.field.options].map((o) => o.value).join("\0") === names.join("\0")) return;
    this.field.replaceChildren(...names.map((name) => h("option", { value: name }, name || "No chart")));
  }

  // The last number of rows that were computed for windows of time; otherwise the user chooses.
  usual(events, numbers) {
    const newest = membersOf(events.at(-1));
    return isTime(newest.start) && isTime(newest.end) ? numbers.at(-1) : "";
  }

  // The first field that tells rows of one time apart.
  usualName(events) {
    return fieldsOf(events, isName).find((name) => { const found = distinct(events.map((one) => membersOf(one)[name])); return found.length > 1 && found.length <= VALUES_MAX; });
  }

  // A line has the newest number of each time; those with the largest sums come first.
  lines(events, field, by) {
    const found = new Map();
    for (const one of events) {
      const data = membersOf(one), number = numberOf(data[field]), name = by ? String(data[by] ?? "none") : field;
      if (number === null) continue;
      if (!found.has(name)) found.set(name, { name, values: new Map() });
      found.get(name).values.set(Date.parse(Object.values(data).find(isTime) ?? "") || one.time, number);
    }
    const sum = (line) => [...line.values.values()].reduce((n, v) => n + v, 0);
    return [...found.values()].sort((a, b) => sum(b) - sum(a));
  }

  // A chart has the lines that it was made with.
  make(field, lines) {
    const wanted = [field, ...lines.map((line) => line.name)].join("\0");
    if (wanted === this.drawn) return;
    this.close();
    this.drawn = wanted;
    const box = h("div", { class: "chart low" });
    this.body.replaceChildren(box);
    this.chart = new Chart(box, { series: lines.map((line, i) => ({ name: line.name, color: COLORS[i] })), sparse: true, format, label: `${field} over time. Arrow keys read single values.` });
  }

  close() { this.chart?.close(); this.chart = null; this.drawn = ""; }
}
