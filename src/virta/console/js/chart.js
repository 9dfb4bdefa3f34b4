// Charts: uPlot with the console's tokens, a tooltip, keys, one crosshair for the page, and the same values as a table.
import { clock, h, short } from "./ui.js";

const ROWS_MAX = 60, SELECT_PX_MIN = 8, GAP = 8, EDGE = 8, AXIS_PX_MIN = 52, STEPS_MAX = 5, STEP_MIN = 0.1, FONT = "11px system-ui, sans-serif";
const pen = document.createElement("canvas").getContext("2d");
// Wide enough for the longest value, such as "1,000 ms".
export function axisSize(values) { pen.font = FONT; return Math.max(AXIS_PX_MIN, GAP + 2 + Math.ceil(Math.max(0, ...values.map((v) => pen.measureText(v).width)))); }
// The values beside the chart: from 0 in at most five equal steps, so that the last one has a line above all values.
export function scale(max) {
  let size = 10 ** Math.floor(Math.log10(Math.max(max, STEP_MIN) / STEPS_MAX));
  for (const factor of [1, 2, 5, 10]) if (max <= STEPS_MAX * size * factor || factor === 10) { size *= factor; break; }
  size = Math.max(size, STEP_MIN);
  return Array.from({ length: Math.max(1, Math.ceil(max / size - 1e-9)) + 1 }, (_, i) => Number((i * size).toPrecision(12)));
}
// The same with values below 0, which have steps of their own.
const steps = (min, max) => [...(min < 0 ? scale(-min).slice(1).map((v) => -v).reverse() : []), ...scale(Math.max(max, 0))];
// The times below the chart; one that the right edge would cut is left out.
function timeLabels(u, ticks, step) {
  const edge = u.bbox.width / devicePixelRatio + EDGE;
  pen.font = FONT;
  return ticks.map((t) => clock(t * 1000).slice(0, step < 60 ? 8 : 5)).map((text, i) => (u.valToPos(ticks[i], "x") + pen.measureText(text).width / 2 > edge ? null : text));
}
const probe = document.documentElement.appendChild(h("i", { hidden: true }));
const color = (name) => { probe.style.color = `var(--${name})`; return getComputedStyle(probe).color; };
const alpha = (rgb, a) => rgb.replace(/^rgb\((\d+), (\d+), (\d+)\)$/, `rgb($1 $2 $3 / ${a})`);

// Colours are functions of the tokens, read again when the theme changes.
function options(chart, width, height) {
  const axis = { stroke: () => color("text-3"), font: FONT, ticks: { show: false }, border: { show: false } };
  return {
    width, height, padding: [8, EDGE, 0, 0], legend: { show: false },
    cursor: { points: { size: 8, width: 2, fill: (u, i) => u.series[i].stroke(), stroke: () => color("surface") }, y: false, drag: { x: Boolean(chart.onselect), y: false, setScale: false }, sync: { key: "page" } },
    select: { show: Boolean(chart.onselect) },
    scales: { x: { time: true }, y: { range: (u, min, max) => { const all = steps(min, max || 1); return [all[0], all.at(-1)]; } } },
    axes: [
      { ...axis, grid: { show: false }, space: 96, size: 24, gap: 4, values: (u, ticks, at, space, step) => timeLabels(u, ticks, step) },
      { ...axis, grid: { stroke: () => color("line"), width: 1 }, splits: (u, at, min, max) => steps(min, max), size: (u, values) => axisSize(values ?? []), gap: GAP, values: (u, all) => all.map(chart.format) },
    ],
    series: [{}, ...chart.series.map((one) => ({ label: one.name, width: 1.75, dash: one.dash ? [4, 3] : undefined, points: { show: chart.sparse, size: 5 }, spanGaps: chart.sparse, stroke: () => color(one.color), fill: one.fill ? () => alpha(color(one.color), 0.1) : undefined }))],
    hooks: { setCursor: [() => chart.point()], setSelect: [() => chart.select()] },
  };
}

export class Chart {
  constructor(box, { series, format = (v) => (v < 10 && !Number.isInteger(v) ? v.toFixed(1) : short(v)), step = 1000, label, onselect = null, sparse = false }) {
    Object.assign(this, { box, series, format, step, onselect, sparse, data: null, at: null });
    this.plot = h("div", { class: "plot", tabindex: "0", role: "img", "aria-label": label });
    this.tip = h("div", { class: "tip", hidden: true });
    this.pick = h("button", { class: "btn sm pick-time", type: "button", hidden: true, onclick: () => this.onselect?.(...this.chosen) }, "Show these events");
    this.table = h("div", { class: "values", hidden: true, tabindex: "0", role: "region", "aria-label": `${label.split(".")[0]}, as a table` });
    this.toggle = h("button", { class: "btn quiet sm as-table", type: "button", "aria-expanded": "false", onclick: () => this.flip() }, "Show as table");
    box.append(this.plot, this.table, this.tip, this.pick); box.after(h("div", { class: "under-chart" }, this.toggle));
    this.resize = new ResizeObserver(() => this.draw()); this.resize.observe(box);
    this.theme = new MutationObserver(() => this.u?.redraw(false)); this.theme.observe(document.documentElement, { attributeFilter: ["data-theme"] });
    this.scheme = matchMedia("(prefers-color-scheme: dark)"); this.recolor = () => this.u?.redraw(false); this.scheme.addEventListener("change", this.recolor);
    this.plot.addEventListener("keydown", (e) => this.key(e));
    this.plot.addEventListener("blur", () => this.u?.setCursor({ left: -10, top: -10 }));
  }
  set(data, end = Date.now(), step = this.step) {
    const count = data[0].length, times = Array.from({ length: count }, (_, i) => (end - (count - 1 - i) * step) / 1000);
    this.setAt(times, data);
  }
  // At times of their own, in seconds, in order.
  setAt(times, data) { this.data = [times, ...data]; this.draw(); }
  draw() {
    const { clientWidth: width, clientHeight: height } = this.box;
    if (!this.data || !width) return;
    if (!this.table.hidden) { this.fill(); return; }
    if (!this.u) this.u = new uPlot(options(this, width, height), this.data, this.plot);
    else { if (this.u.width !== width || this.u.height !== height) this.u.setSize({ width, height }); this.u.setData(this.data); }
  }
  point() {
    const { idx, left } = this.u.cursor;
    if (idx === null || idx === undefined || left < 0) { this.tip.hidden = true; return; }
    this.tip.replaceChildren(h("div", { class: "faint" }, clock(this.data[0][idx] * 1000)), ...this.series.map((one, k) => h("div", { class: "row" }, h("i", { class: `key c-${one.color}` }), `${one.name} `, h("b", {}, this.value(k, idx)))));
    this.tip.hidden = false;
    const x = left + this.u.over.offsetLeft, wide = this.tip.offsetWidth;
    this.tip.style.transform = `translate(${x + 12 + wide > this.box.clientWidth ? x - wide - 12 : x + 12}px, 8px)`;
  }
  value(k, idx) { const v = this.data[k + 1][idx] ?? null; return v === null ? "none" : this.format(v); }
  key(e) {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[e.key];
    if (!move || !this.u) return;
    e.preventDefault();
    const last = this.data[0].length - 1, from = this.u.cursor.left < 0 ? last + (move > 0 ? 0 : 1) : (this.u.cursor.idx ?? last);
    const to = Math.max(0, Math.min(last, from + move * (e.shiftKey ? 10 : 1)));
    this.u.setCursor({ left: this.u.valToPos(this.data[0][to], "x"), top: 0 });
  }
  select() {
    const { left, width } = this.u.select;
    this.pick.hidden = width < SELECT_PX_MIN || !this.onselect;
    if (this.pick.hidden) return;
    this.chosen = [this.u.posToVal(left, "x") * 1000, this.u.posToVal(left + width, "x") * 1000];
    this.pick.style.transform = `translate(${Math.min(left + this.u.over.offsetLeft, this.box.clientWidth - 150)}px, 40px)`;
  }
  flip() {
    const open = this.table.hidden;
    this.table.hidden = !open; this.plot.hidden = open; this.tip.hidden = true; this.pick.hidden = true;
    this.toggle.setAttribute("aria-expanded", String(open)); this.toggle.textContent = open ? "Show as chart" : "Show as table";
    this.draw();
  }
  fill() {
    if (!this.table.firstChild) this.table.append(h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "Time"), this.series.map((one) => h("th", { class: "num" }, one.name)))), h("tbody", {})));
    const known = this.data[0].map((t, i) => i).filter((i) => this.series.some((_, k) => (this.data[k + 1][i] ?? null) !== null)).slice(-ROWS_MAX).reverse();
    this.table.querySelector("tbody").replaceChildren(...known.map((i) => h("tr", {}, h("td", {}, clock(this.data[0][i] * 1000)), this.series.map((_, k) => h("td", { class: "num" }, this.value(k, i))))));
  }
  close() { this.resize.disconnect(); this.theme.disconnect(); this.scheme.removeEventListener("change", this.recolor); this.u?.destroy(); }
}
