// The frame round every screen: navigation, top bar, theme, go to, keyboard, toasts, token, lost connection.
import { $, $$, ago, bytes, h, icon, int, logo, text } from "./ui.js";
import { allChannels, call, figures, onUnauthorized, setToken, token } from "./api.js";

const NAV = [
  [null, [["overview", "Overview", "#/", "o"]]],
  ["Streams", [["channels", "Channels", "#/channels", "c"], ["live", "Live views", "#/views", "l"], ["queries", "Queries", "#/queries", "q"], ["why", "Why", "#/why", "y"]]],
  ["Work", [["jobs", "Jobs", "#/jobs", "j"], ["webhooks", "Webhooks", "#/webhooks", "w"], ["pipelines", "Pipelines", "#/pipelines", "p"]]],
  ["Server", [["health", "Health", "#/health", "h"]]],
];
const ALL = NAV.flatMap(([, items]) => items), OF = { "": "overview", views: "live" };
const KEYS = [["/", "Filter or search on this page"], ["Ctrl K", "Go to a channel or screen"], ["g o, g c, g l, g q, g y", "Overview, Channels, Live views, Queries, Why"], ["g j, g w, g p, g h", "Jobs, Webhooks, Pipelines, Health"], ["j, k", "Next row, row before"], ["Enter", "Open the row"], ["x", "Select the row"], ["Space", "Pause or go on"], ["w", "Why did it match, or not"], ["y", "Copy as curl"], ["t", "Light, dark"], ["Esc", "Close, leave the field"], ["?", "This list"]];
const TOAST_MS = 6000, UNDO_MS = 10_000, PILL_MS = 2000, LINE_MS = 5000;

// ---- toasts and acting ----
export function toast(title, body = "", kind = "accent", action) {
  const box = h("div", { class: `toast c-${kind}` }, h("div", { class: "grow" }, h("strong", {}, title), body), action && h("button", { class: "btn sm", type: "button", onclick: () => { action[1](); box.remove(); } }, action[0]), h("button", { class: "btn quiet sm", type: "button", "aria-label": "Close this message", onclick: () => box.remove() }, icon("cross")));
  $(".toasts").append(box);
  let timer;
  const arm = () => { if (kind !== "bad" || action) timer = setTimeout(() => box.remove(), action ? UNDO_MS : TOAST_MS); };
  box.addEventListener("pointerenter", () => clearTimeout(timer)); box.addEventListener("pointerleave", arm); box.addEventListener("focusin", () => clearTimeout(timer));
  arm();
  return box;
}
export const failed = (what, error) => toast(what, `${error.message}${error.code ? ` (${error.code})` : ""}`, "bad");
export async function act(what, run, done) { try { const result = await run(); if (done) toast(...(typeof done === "function" ? done(result) : [done, "", "good"])); return result; } catch (error) { failed(what, error); return undefined; } }
// What cannot be taken back waits, with Undo, before the request is sent.
export function later(title, body, run, undo) { let sent = false; const timer = setTimeout(() => { sent = true; run(); }, UNDO_MS); addEventListener("pagehide", () => { if (!sent) clearTimeout(timer); }, { once: true }); toast(title, body, "bad", ["Undo", () => { clearTimeout(timer); undo?.(); }]); }
export async function copy(value, what) {
  try { await navigator.clipboard.writeText(value); toast(`${what} copied`, "", "good"); } catch { toast(`${what} could not be copied`, "The browser did not allow it. Select the text and copy it by hand.", "bad"); }
}
export const quote = (value) => `'${String(value).replaceAll("'", "'\\''")}'`;
export const curl = (path, { method, body } = {}) => `curl ${method ? `-X ${method} ` : body ? "" : "-N "}${quote(location.origin + path)}${token() ? ' -H "Authorization: Bearer $VIRTA_TOKEN"' : ""}${body ? ` -d ${quote(JSON.stringify(body))}` : ""}`;

// ---- dialogs ----
export const closeAll = () => $$("dialog").forEach((d) => d.close());
export function dialog(title, ...body) {
  closeAll();
  const box = h("dialog", { "aria-label": title, onclose: (e) => e.target.remove() }, h("header", {}, h("h2", {}, title), h("button", { class: "btn quiet sq", type: "button", "aria-label": "Close", onclick: closeAll }, icon("cross"))), h("div", { class: "body stack" }, body));
  document.body.append(box); box.showModal();
  return box;
}
export const field = (label, control, note) => h("label", { class: "stack tightly" }, h("span", { class: "small muted" }, label), h("span", { class: "field" }, control), note && h("span", { class: "small faint" }, note));

// ---- theme ----
function theme(next) {
  if (next === "system") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = next;
  try { localStorage.setItem("virta.theme", next); } catch { /* private window: lasts for this page */ }
}
const isDark = () => { const scheme = getComputedStyle(document.documentElement).colorScheme; return scheme === "dark" || (scheme === "light dark" && matchMedia("(prefers-color-scheme: dark)").matches); };
const flip = () => theme(isDark() ? "light" : "dark");

// ---- frame ----
const count = {};
export function shell() {
  let wanted = new URLSearchParams(location.search).get("theme");
  try { wanted ??= localStorage.getItem("virta.theme"); } catch { /* as above */ }
  theme(wanted ?? "system");
  const link = ([id, name, href]) => h("a", { href, title: name, "data-screen": id }, icon(id), h("span", {}, name), (count[id] = h("span", { class: "count" })));
  const side = h("aside", { class: "side", "aria-label": "Console" }, h("a", { class: "brand", href: "#/", "aria-label": "Virta, overview" }, logo(), h("span", {}, "Virta")),
    h("nav", { class: "nav", "aria-label": "Screens" }, NAV.map(([title, items]) => [title && h("h3", {}, title), h("ul", {}, items.map((one) => h("li", {}, link(one))))])),
    h("div", { class: "server" }, h("span", { class: "mono" }, location.host), h("span", { id: "version" }), h("span", { id: "durability" })));
  const status = h("span", { class: "pill", id: "status", role: "status" }, "Connecting");
  const top = h("header", { class: "top" }, h("nav", { "aria-label": "Place" }, h("ol", { class: "crumbs" })),
    h("div", { class: "right" }, h("button", { class: "find", type: "button", "aria-keyshortcuts": "Control+K", onclick: palette }, icon("search"), h("span", {}, "Go to"), h("kbd", { "aria-hidden": "true" }, "Ctrl K")), status, h("button", { class: "btn quiet sq", type: "button", id: "theme", "aria-label": "Light or dark", onclick: flip }, icon("moon"))));
  const bottom = h("nav", { class: "bottom", "aria-label": "Screens, short" }, [["overview", "Overview"], ["channels", "Channels"], ["live", "Views"], ["jobs", "Jobs"]].map(([id, name]) => h("a", { href: ALL.find((a) => a[0] === id)[2], "data-screen": id }, icon(id), name, id === "jobs" && h("span", { class: "dot", id: "dead-dot", hidden: true }, h("span", { class: "vh" }, "some are dead")))), h("button", { type: "button", onclick: palette, id: "more" }, icon("more"), "More"));
  $(".main").prepend(top);
  document.body.prepend(h("a", { class: "skip", href: "#page", onclick: (e) => { e.preventDefault(); $("#page").focus(); } }, "Skip to the content"), side);
  document.body.append(bottom, h("div", { class: "toasts", role: "status", "aria-live": "polite" }));
  keyboard();
  connection();
  figures.listen(counts);
  onUnauthorized(askToken);
}
export function crumbs(screen, name, part) {
  const id = OF[screen] ?? screen, list = part ? [[name, `#/${screen}`], [part]] : [[name]];
  $(".crumbs").replaceChildren(...list.map(([word, href], i) => h("li", {}, i > 0 && h("span", { class: "sep", "aria-hidden": "true" }, "/"), href ? h("a", { href }, word) : h("span", { class: "clip", "aria-current": "page" }, word))));
  for (const a of $$("[data-screen]")) { if (a.dataset.screen === id) a.setAttribute("aria-current", "page"); else a.removeAttribute("aria-current"); }
  if (["pipelines", "queries", "why", "webhooks", "health"].includes(id)) $("#more").setAttribute("aria-current", "page"); else $("#more").removeAttribute("aria-current");
}
function mark(id, value, bad) {
  const box = count[id], shown = value ? int(value) : "";
  if (box.dataset.shown === `${shown}${bad}`) return;
  box.dataset.shown = `${shown}${bad}`; box.className = `count${bad ? " bad" : ""}`;
  box.replaceChildren(...(bad && shown ? [h("span", { class: "vh" }, id === "jobs" ? "dead jobs: " : "failed: ")] : []), shown);
}
export const countChannels = (number) => mark("channels", number, false);
function counts(now) {
  const dead = now.jobs?.dead ?? 0;
  mark("queries", now.subscribers, false); mark("jobs", dead, true); mark("webhooks", now.webhooks, false); mark("pipelines", now.pipelinesFailed || now.pipelines, now.pipelinesFailed > 0);
  $("#dead-dot").hidden = !dead;
}
async function aboutServer() {
  try {
    const { server } = await call("/stats");
    text($("#version"), `version ${server.version}, up ${ago((Date.now() - Date.parse(server.started)) / 1000)}`); text($("#durability"), `synced to disk: ${server.durability}`);
    $("#status").title = server.dataDir;
    countChannels((await allChannels()).length);
  } catch { /* the pill says that there is no connection */ }
}

// ---- token ----
function askToken() {
  if ($("dialog.token")) return;
  const input = h("input", { type: "password", autocomplete: "off", "aria-label": "Token", required: true });
  const form = h("form", { class: "stack", onsubmit: async (e) => { e.preventDefault(); setToken(input.value.trim()); closeAll(); (await import("./main.js")).reload(); aboutServer(); } }, h("p", {}, token() ? "The server does not know this token, or it has expired. Give another one." : "This server asks for a token. It stays in this tab and is sent with each request."), field("Token", input), h("div", { class: "row" }, h("button", { class: "btn primary", type: "submit" }, "Log in"), h("code", { class: "faint small" }, "virta token create --all")));
  dialog("Log in", form).classList.add("token");
  input.focus();
}

// ---- connection: nothing for 2 s, then the pill, then a line ----
function connection() {
  let since = 0, pillTimer, lineTimer, ticking, next = 0, stopping = false;
  const pill = () => $("#status");
  const lineOf = () => $(".lost");
  figures.states.add((state, detail) => {
    if (state === "live") {
      clearTimeout(pillTimer); clearTimeout(lineTimer); clearInterval(ticking); pillTimer = lineTimer = null; since = 0; stopping = false;
      lineOf()?.remove(); delete document.body.dataset.lost; pill().className = "pill good live"; text(pill(), "Live"); aboutServer();
      for (const b of $$("[data-writes]")) { b.disabled = false; b.title = ""; }
      return;
    }
    if (state === "refused" && detail.status === 403) { pill().className = "pill ring"; text(pill(), "Limited"); pill().title = "This token may not see the figures of the server"; return; }
    if (state === "stopping") stopping = true; // the connection ends next
    if (state !== "lost") return;
    next = Date.now() + detail * 1000;
    if (!since) since = Date.now();
    pillTimer ??= setTimeout(() => { document.body.dataset.lost = ""; pill().className = "pill warn half"; text(pill(), "Reconnecting"); for (const b of $$("[data-writes]")) { b.disabled = true; b.title = "There is no connection to the server"; } }, PILL_MS);
    lineTimer ??= setTimeout(() => {
      const again = h("span", {});
      const say = () => text(again, `Trying again in ${Math.max(0, Math.ceil((next - Date.now()) / 1000))} s.`);
      $(".top").after(h("div", { class: "lost", role: "alert" }, icon("alert"), h("span", { class: "grow" }, stopping ? "The server is stopping. Reconnecting when it is back. " : "", `No connection since ${new Date(since).toTimeString().slice(0, 8)}. What you see is from then. `, again), h("button", { class: "btn sm", type: "button", onclick: () => figures.stream.wake() }, "Try now")));
      say(); ticking = setInterval(say, 1000);
    }, LINE_MS);
  });
}

// ---- go to, keys ----
async function palette() {
  closeAll();
  const places = ALL.map(([id, name, href, key]) => [id, name, href, `g ${key}`]);
  const list = h("ul", { role: "listbox", id: "places", "aria-label": "Places" });
  const to = (item) => { if (item) { closeAll(); location.hash = item.dataset.href.slice(1); } };
  const choose = (item) => { for (const one of list.children) one.setAttribute("aria-selected", one === item ? "true" : "false"); if (item) { input.setAttribute("aria-activedescendant", item.id); item.scrollIntoView({ block: "nearest" }); } };
  const show = (q) => { list.replaceChildren(...places.filter(([, n]) => n.toLowerCase().includes(q)).slice(0, 60).map(([id, n, href, hint], i) => h("li", { role: "option", id: `place-${i}`, "data-href": href, "aria-selected": "false", onclick: (e) => to(e.currentTarget) }, icon(id), h("span", { class: "clip" }, n), h("span", { class: "hint" }, hint)))); choose(list.firstElementChild); };
  const input = h("input", { type: "text", role: "combobox", "aria-expanded": "true", "aria-controls": "places", "aria-autocomplete": "list", "aria-label": "Go to", placeholder: "Channel or screen", oninput: (e) => show(e.target.value.toLowerCase()), onkeydown: (e) => {
    const items = [...list.children], at = items.findIndex((i) => i.getAttribute("aria-selected") === "true"), move = { ArrowDown: 1, ArrowUp: -1 }[e.key];
    if (e.key === "Enter") to(items[at]);
    if (move && items.length) { e.preventDefault(); choose(items[(at + move + items.length) % items.length]); }
  } });
  show("");
  const box = h("dialog", { class: "palette", "aria-label": "Go to", onclose: (e) => e.target.remove() }, input, list);
  document.body.append(box); box.showModal();
  try { places.push(...(await allChannels()).map((c) => ["channels", c.name, `#/channels/${encodeURIComponent(c.name)}`, "channel"])); if (box.isConnected) show(input.value.toLowerCase()); } catch { /* screens are enough */ }
}
const keysOff = () => { try { return localStorage.getItem("virta.keys") === "off"; } catch { return false; } };
function help() {
  dialog("Keys", h("dl", { class: "keys" }, KEYS.map(([k, what]) => [h("dt", {}, k.split(", ").map((one) => [one.split(" ").map((c) => [h("kbd", {}, c), " "])])), h("dd", {}, what)])),
    h("label", { class: "switch" }, h("input", { type: "checkbox", class: "check", checked: !keysOff(), onchange: (e) => { try { localStorage.setItem("virta.keys", e.target.checked ? "on" : "off"); } catch { /* not kept */ } } }), "Single keys do something"));
}
function keyboard() {
  let prefix = 0;
  addEventListener("keydown", (e) => {
    if ((e.ctrlKey || e.metaKey) && e.key === "k") { e.preventDefault(); palette(); return; }
    if (e.ctrlKey || e.metaKey || e.altKey) return;
    const typing = e.target.closest?.("input:not([type=checkbox]), textarea, select");
    if (typing) { if (e.key === "Escape") e.target.blur(); return; }
    if (e.key === "?") { help(); return; }
    if (keysOff() || $("dialog[open]")) return;
    if (Date.now() - prefix < 1200) { prefix = 0; const found = ALL.find((a) => a[3] === e.key); if (found) { location.hash = found[2].slice(1); return; } }
    if (e.key === "g") prefix = Date.now();
    else if (e.key === "/") { const f = $("[data-find]"); if (f) { e.preventDefault(); f.focus(); } }
    else if (e.key === "t") flip();
    else if (e.key === "j" || e.key === "k") {
      const rows = $$("tr.pick"), at = rows.findIndex((r) => r === document.activeElement || r.getAttribute("aria-selected") === "true");
      const next = rows[Math.max(0, Math.min(rows.length - 1, at + (e.key === "j" ? 1 : -1)))];
      next?.focus(); next?.click();
    } else if (e.key === " " && !e.target.closest("button, a, summary, input")) { const b = $("[data-pause]"); if (b) { e.preventDefault(); b.click(); } }
    else if (e.key === "Enter" && e.target.matches("tr.pick")) e.target.click();
    else if ("wyx".includes(e.key)) $(`[data-key="${e.key}"]`)?.click();
  });
}
