// How the rows of a live view divide over the values of one field, the most frequent first.
import { h, int, text } from "./ui.js";

const SHOWN = 7, VALUES_MAX = 20, LOOKED_AT = 500;

export class Groups {
  // `value(event, column)` reads a field as text; `onpick(column)` is called with the user's choice.
  constructor({ value, chosen = "", onpick }) {
    this.value = value;
    this.chosen = chosen;
    this.field = h("select", { class: "btn sm", "aria-label": "Field", onchange: () => { this.chosen = this.field.value; onpick(this.chosen); } });
    this.bars = h("div", { class: "body", id: "groups" });
    this.title = h("h2", { id: "h-group" }, "Rows by");
    this.el = h("section", { class: "card", "aria-labelledby": "h-group", hidden: true }, h("header", {}, this.title, h("div", { class: "right" }, this.field)), this.bars);
  }

  // The first column that repeats its values; none if each row has its own.
  usual(columns, events) {
    const some = events.slice(0, LOOKED_AT);
    return columns.find((c) => { const found = new Set(some.map((e) => this.value(e, c))); return found.size > 1 && found.size <= VALUES_MAX; });
  }

  draw(columns, rows) {
    const events = [...rows.values()].map((row) => row.event), column = columns?.includes(this.chosen) ? this.chosen : this.usual(columns ?? [], events);
    this.el.hidden = !column;
    if (!column || this.field.matches(":focus")) return;
    if ([...this.field.options].map((o) => o.value).join() !== columns.join()) this.field.replaceChildren(...columns.map((c) => h("option", { value: c }, c)));
    this.field.value = column; text(this.title, `Rows by ${column}`);
    const counts = new Map();
    for (const event of events) { const v = this.value(event, column); counts.set(v, (counts.get(v) ?? 0) + 1); }
    const all = [...counts].sort((a, b) => b[1] - a[1] || (a[0] < b[0] ? -1 : 1)), most = all.slice(0, SHOWN), rest = all.slice(SHOWN);
    if (rest.length) most.push([`${int(rest.length)} more`, rest.reduce((n, [, c]) => n + c, 0)]);
    const max = Math.max(1, ...most.map(([, n]) => n));
    while (this.bars.children.length > most.length) this.bars.lastChild.remove();
    while (this.bars.children.length < most.length) this.bars.append(h("div", { class: "hbar" }, h("span", { class: "clip" }), h("div", { class: "meter", "aria-hidden": "true" }, h("i")), h("span", { class: "num" })));
    most.forEach(([name, n], i) => { const [label, meter, number] = this.bars.children[i].children; text(label, name === "" ? "none" : name); label.title = name; meter.firstChild.style.width = `${(n / max) * 100}%`; text(number, int(n)); });
  }
}
