// Small helpers: elements, icons, figures, sparkline, JSON tree. Text is always set as text, never as HTML.
const NS = "http://www.w3.org/2000/svg";

export function h(tag, props, ...children) {
  const el = document.createElement(tag);
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) el.addEventListener(name.slice(2), value);
    else if (name === "class") el.className = value;
    else if (name === "css") for (const [p, v] of Object.entries(value)) el.style.setProperty(p, v);
    else if (name in el && typeof value !== "string") el[name] = value;
    else el.setAttribute(name, value === true ? "" : value);
  }
  el.append(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false));
  return el;
}
export function s(tag, attrs, ...children) {
  const el = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attrs ?? {})) el.setAttribute(name, value);
  el.append(...children.flat());
  return el;
}
export const $ = (selector, root = document) => root.querySelector(selector);
export const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];

const ICONS = {
  overview: "M2 9.5h3l2-6 3 9 1.500-5H14",
  channels: "M2 4.500c2-2 4-2 6 0s4 2 6 0M2 8.500c2-2 4-2 6 0s4 2 6 0M2 12.500c2-2 4-2 6 0s4 2 6 0",
  live: "M2.500 3h11v10h-11zM2.500 6.500h11M6.500 6.500V13",
  queries: "M2 3h12l-4.500 5.500V13l-3-1.500v-3z",
  why: "M8 14A6 6 0 1 0 8 2a6 6 0 0 0 0 12zM6.300 6.300a1.750 1.750 0 1 1 2.500 1.600c-.5.25-.8.6-.8 1.100M8 11.250v.01",
  jobs: "M2.500 4h7M2.500 8h7M2.500 12h4.500M11.500 10.500l1.250 1.500 2-3M12 4h1.500",
  webhooks: "M6 4.500a2.500 2.500 0 1 1 3.500 2.300l1.500 3M4.500 8.500a2.500 2.500 0 1 0 2.800 2.500H11M11.500 8.500a2.500 2.500 0 1 1-1.800 4M7.500 7 6 9.800",
  pipelines: "M2 3h4v3.500H2zM10 3h4v3.500h-4zM10 9.500h4V13h-4zM6 4.750h4M8 4.750v6.500h2",
  health: "M8 13.500S2.500 10.500 2.500 6.500A2.900 2.900 0 0 1 8 5.200a2.900 2.900 0 0 1 5.500 1.300c0 4-5.500 7-5.500 7z",
  search: "M7 11.500a4.500 4.500 0 1 0 0-9 4.500 4.500 0 0 0 0 9zM10.500 10.500 14 14",
  sun: "M8 10.750a2.750 2.750 0 1 0 0-5.500 2.750 2.750 0 0 0 0 5.500zM8 1.500v1M8 13.500v1M1.500 8h1M13.500 8h1M3.400 3.400l.7.7M11.900 11.900l.7.7M3.400 12.600l.7-.7M11.900 4.100l.7-.7",
  moon: "M13.500 9.700A5.750 5.750 0 0 1 6.300 2.500a5.750 5.750 0 1 0 7.200 7.200z",
  check: "m3.500 8.500 3 3 6-7", cross: "m4 4 8 8M12 4l-8 8", dash: "M4 8h8", plus: "M8 3.500v9M3.500 8h9", dotmid: "M8 7.500v1", change: "M3 6h9l-2.500-2.500M13 10H4l2.500 2.500",
  pause: "M5.500 3.500v9M10.500 3.500v9", play: "M5 3.500v9l7-4.500z", copy: "M5.500 5.500h8v8h-8zM10.500 5.500v-3h-8v8h3", link: "M6.500 9.500l3-3M7 4.500l1.300-1.300a2.650 2.650 0 0 1 3.700 3.800L10.750 8.250M9 11.500l-1.300 1.300A2.650 2.650 0 0 1 4 9L5.250 7.750",
  send: "M13.500 2.500 7 9M13.500 2.500l-4 11L7 9 2.500 6.500z", alert: "M8 2.500 14.250 13H1.750zM8 6.500v3M8 11.250v.01", info: "M8 14A6 6 0 1 0 8 2a6 6 0 0 0 0 12zM8 7.500v3.250M8 5.250v.01",
  restart: "M13 8a5 5 0 1 1-1.600-3.700M13 2.500V5h-2.500", stop: "M4 4h8v8H4z", more: "M3.500 8v.01M8 8v.01M12.500 8v.01", clock: "M8 14A6 6 0 1 0 8 2a6 6 0 0 0 0 12zM8 4.750V8l2.250 1.500", skull: "M8 2.500a5 5 0 0 0-3 9V13.500h6v-2a5 5 0 0 0-3-9zM6 8v.01M10 8v.01",
  db: "M2.500 4c0-1.100 2.500-2 5.500-2s5.500.9 5.500 2-2.500 2-5.500 2-5.500-.9-5.500-2zM2.500 4v8c0 1.100 2.500 2 5.500 2s5.500-.9 5.500-2V4M2.500 8c0 1.100 2.500 2 5.500 2s5.500-.9 5.500-2",
  sum: "M12 4V3H4l4 5-4 5h8v-1", columns: "M2.500 3h11v10h-11zM6.200 3v10M9.800 3v10", dedupe: "M2.500 2.500h7v7h-7zM6.500 12v1.500h7v-7H12",
};
export const icon = (name, cls = "") => s("svg", { class: `icon ${cls}`, viewBox: "0 0 16 16", "aria-hidden": "true" }, s("path", { d: ICONS[name] }));
export const sign = (kind, cls = kind) => h("span", { class: `sign ${cls}` }, icon({ yes: "check", no: "cross", fail: "cross", idle: "dash" }[kind]));
export const logo = () => s("svg", { viewBox: "0 0 24 24", "aria-hidden": "true" }, s("rect", { width: 24, height: 24, rx: 6, class: "tile-bg" }), s("path", { d: "M4.500 9c2.500-3 5-3 7.500 0s5 3 7.500 0M4.500 15c2.500-3 5-3 7.500 0s5 3 7.500 0" }));

// ---- figures ----
const group = new Intl.NumberFormat("en-US");
export const int = (n) => group.format(Math.round(n));
export const rate = (n) => (n > 0 && n < 10 ? n.toFixed(1) : int(n));
export function short(n) {
  if (n < 10_000) return int(n);
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) if (n >= size) return `${(n / size).toFixed(n / size < 100 && n % size ? 1 : 0)} ${unit}`;
}
export function bytes(n) {
  for (const [size, unit] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) if (n >= size) return `${(n / size).toFixed(n / size < 100 ? 1 : 0)} ${unit}`;
  return `${Math.round(n)} B`;
}
export const clock = (t, ms = false) => { const d = new Date(t); return d.toTimeString().slice(0, 8) + (ms ? "." + String(d.getMilliseconds()).padStart(3, "0") : ""); };
export function ago(seconds) {
  if (seconds < 2) return "now";
  if (seconds < 60) return `${Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.round(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} d`;
}
export const since = (time) => ago(Math.max(0, (Date.now() - Date.parse(time)) / 1000));
export const plural = (n, word) => `${int(n)} ${word}${n === 1 ? "" : "s"}`;
export function text(el, value) { if (el && el.textContent !== value) el.textContent = value; }

// ---- sparkline: values are an array, stretched over the whole box ----
export function spark(box, given, { area = true, zero = false } = {}) {
  const values = given.filter((v) => v !== null && v !== undefined);
  if (values.length < 2) { box.replaceChildren(); return; }
  const max = Math.max(...values), min = zero ? 0 : Math.min(...values), span = max - min || 1;
  const y = (v) => (26 - ((v - min) / span) * 22).toFixed(2);
  const d = values.map((v, i) => `${i ? "L" : "M"}${((i / (values.length - 1)) * 100).toFixed(2)} ${y(v)}`).join("");
  let svg = box.firstElementChild;
  if (!svg) {
    svg = s("svg", { viewBox: "0 0 100 30", preserveAspectRatio: "none", "aria-hidden": "true" }, s("path", { class: "ar" }), s("path", { class: "ln" }));
    box.append(svg);
  }
  svg.children[0].setAttribute("d", area ? `${d}L100 30L0 30Z` : "");
  svg.children[1].setAttribute("d", d);
}

// ---- JSON with numbers as they were sent ----
export class Exact { constructor(source) { this.source = source; } }
export const parse = (source) => JSON.parse(source, (key, value, context) => (typeof value === "number" && !Number.isSafeInteger(value) && context?.source && String(value) !== context.source ? new Exact(context.source) : value));
const MEMBERS_MAX = 500, MEMBERS_FIRST = 100, CHARS_MAX = 400;

// ---- JSON tree: native <details>, so that the keyboard and screen readers work without more code ----
export function tree(value, { marks = new Set(), path = "", name, open = 3, last = true } = {}) {
  const key = name === undefined ? [] : [h("span", { class: `k${marks.has(path) ? " hit" : ""}` }, typeof name === "number" ? String(name) : JSON.stringify(name)), h("span", { class: "p" }, ": ")];
  const comma = last ? [] : [h("span", { class: "p" }, ",")];
  if (value instanceof Exact) return h("span", { class: "leaf" }, key, h("span", { class: "n" }, value.source), comma);
  if (value === null || typeof value !== "object") {
    const kind = typeof value === "string" ? "s" : typeof value === "number" ? "n" : "b", whole = JSON.stringify(value), shown = h("span", { class: kind }, whole.length > CHARS_MAX ? `${whole.slice(0, CHARS_MAX)}…` : whole);
    const more = whole.length > CHARS_MAX && h("button", { class: "btn sm", type: "button", onclick: (e) => { shown.textContent = whole; e.target.remove(); } }, "Show all");
    return h("span", { class: "leaf" }, key, shown, comma, more);
  }
  const list = Array.isArray(value), entries = Object.entries(value), [a, b] = list ? "[]" : "{}";
  const box = h("details", { open: open > 0 }, h("summary", {}, key, h("span", { class: "p" }, `${a}${entries.length ? "" : b}`), h("span", { class: "p" }, entries.length ? ` ${entries.length}` : "")));
  const item = ([k, v], i) => h("li", {}, tree(v, { marks, path: `${path}/${k}`, name: list ? Number(k) : k, open: open - 1, last: i === entries.length - 1 }));
  const many = entries.length > MEMBERS_MAX, ul = h("ul", {}, (many ? entries.slice(0, MEMBERS_FIRST) : entries).map(item));
  if (many) ul.append(h("li", {}, h("button", { class: "btn sm", type: "button", onclick: (e) => { e.target.parentElement.remove(); ul.append(...entries.slice(MEMBERS_FIRST).map((one, i) => item(one, i + MEMBERS_FIRST))); } }, `Show ${int(entries.length - MEMBERS_FIRST)} more`)));
  if (entries.length) box.append(ul, h("span", { class: "leaf p" }, b, comma)); else box.append(h("span", { class: "p" }, comma));
  return box;
}

export function legend(box, series, values) {
  box.replaceChildren(...series.map((one, k) => h("span", {}, h("i", { class: `key c-${one.color}${one.dash ? " dash" : ""}` }), one.name, " ", h("b", {}, values[k]))));
}
export function segment(box, onpick) {
  const buttons = $$("button", box);
  const pick = (one) => { if (!one) return; for (const b of buttons) { b.setAttribute("aria-checked", b === one); b.tabIndex = b === one ? 0 : -1; } onpick(one.value, one); };
  for (const b of buttons) b.tabIndex = b.getAttribute("aria-checked") === "true" ? 0 : -1;
  box.addEventListener("click", (e) => { const b = e.target.closest("button"); if (b) pick(b); });
  box.addEventListener("keydown", (e) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[e.key];
    if (!move) return;
    e.preventDefault();
    const next = buttons[(buttons.indexOf(document.activeElement) + move + buttons.length) % buttons.length];
    next.focus(); pick(next);
  });
}

// ---- parts that screens share ----
export const empty = (pic, title, ...body) => h("div", { class: "empty" }, icon(pic), h("strong", {}, title), ...body);
export const problem = (error, again) => h("div", { class: "empty", role: "alert" }, icon("alert", "bad"), h("strong", {}, error.title ?? "This could not be loaded"), h("span", {}, error.message), error.code && h("code", {}, error.code), again && h("button", { class: "btn", type: "button", onclick: again }, "Try again"));
export const pill = (kind, word) => h("span", { class: `pill ${kind}` }, word);
export const kv = (pairs) => h("dl", { class: "kv" }, pairs.filter(Boolean).map(([k, v]) => [h("dt", {}, k), h("dd", {}, v)]));
export const head = (title, facts, ...buttons) => h("div", { class: "head" }, h("div", {}, h("h1", {}, title), facts), buttons.length ? h("div", { class: "row wrap-s" }, buttons) : null);
export const button = (name, pic, onclick, props = {}) => h("button", { type: "button", onclick, ...props, class: `btn ${props.class ?? ""}` }, pic && icon(pic), name);
export const radios = (label, id, values, chosen) => h("div", { class: "seg", role: "radiogroup", "aria-label": label, id }, values.map(([value, name]) => h("button", { type: "button", role: "radio", value, "aria-checked": value === chosen ? "true" : "false" }, name)));
// A tile is blank until there is a figure; with null the figure stays and only the line is drawn.
export function tiles(specs) {
  const made = specs.map((t) => { const el = h("div", { class: `tile c-${t.color ?? "accent"}` }, h("div", { class: "label" }, t.label), h("div", { class: "figure" }, h("span", {}, "\u00a0"), h("small", { hidden: true }, t.unit ?? "")), h("div", { class: "note clip" }), t.meter ? h("div", { class: "meter", role: "img", "aria-label": t.label }, h("i")) : h("div", { class: "spark" })); return { ...t, el, values: [] }; });
  const box = h("section", { class: "tiles", "aria-label": "Figures" }, made.map((t) => t.el));
  box.style.setProperty("--n", String(made.length));
  return { el: box, set(index, figure, note, value) { const t = made[index], [, fig, line, draw] = t.el.children; if (figure !== null) { text(fig.firstChild, figure); fig.lastChild.hidden = figure === "none"; text(line, note); } if (t.meter) draw.firstChild.style.width = `${Math.min(100, value)}%`; else { if (Array.isArray(value)) t.values = value; else if (value !== undefined) { t.values.push(value); if (t.values.length > 60) t.values.shift(); } spark(draw, t.values.slice(-60)); } } };
}
