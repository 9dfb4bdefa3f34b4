// Routes: `#/channels/orders?filter=…`. A screen is a function that fills the page and returns what ends it.
import { $, h, problem } from "./ui.js";
import { closeAll, crumbs, shell } from "./shell.js";
import { figures } from "./api.js";
import overview from "./screens/overview.js";
import channels from "./screens/channels.js";
import channel from "./screens/channel.js";
import live from "./screens/live.js";
import queries from "./screens/queries.js";
import why from "./screens/why.js";
import jobs from "./screens/jobs.js";
import webhooks from "./screens/webhooks.js";
import pipelines from "./screens/pipelines.js";
import health from "./screens/health.js";

const SCREENS = { "": overview, channels: (root, at) => (at.name ? channel : channels)(root, at), views: live, queries, why, jobs, webhooks, pipelines, health };
const NAMES = { "": "Overview", channels: "Channels", views: "Live views", queries: "Queries", why: "Why", jobs: "Jobs", webhooks: "Webhooks", pipelines: "Pipelines", health: "Health" };
let end = null, turn = 0, shown = "";

function place() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?"), [screen = "", ...rest] = path.split("/");
  return { screen, name: rest.length ? decodeURIComponent(rest.join("/")) : "", params: new URLSearchParams(query) };
}
// Change the address without leaving the screen: a link opens the same thing.
export function remember(params) {
  const at = place(), query = new URLSearchParams(Object.entries(params).filter(([, v]) => v !== null && v !== undefined && v !== "")).toString();
  const to = `#/${at.screen}${at.name ? `/${encodeURIComponent(at.name)}` : ""}${query ? `?${query}` : ""}`;
  history.replaceState(null, "", to); shown = to;
}
async function go() {
  if (location.hash === shown) return;
  shown = location.hash;
  const at = place(), mine = ++turn, root = $("#page");
  closeAll(); end?.(); end = null;
  root.replaceChildren(); root.className = "page";
  const screen = SCREENS[at.screen];
  document.title = `${at.name || NAMES[at.screen] || "Not found"} · Virta`;
  crumbs(at.screen, NAMES[at.screen] ?? "Not found", at.name);
  scrollTo(0, 0);
  if (!screen) { root.append(h("div", { class: "card" }, problem({ title: "There is no such page", message: location.hash, code: "" }))); return; }
  try { const ends = await screen(root, at); if (mine === turn) end = ends ?? null; else ends?.(); } catch (error) { if (mine === turn) root.append(h("div", { class: "card" }, problem(error, () => { shown = ""; go(); }))); }
}
shell();
figures.start();
addEventListener("hashchange", go);
shown = "-";
go();
export const reload = () => { shown = "-"; figures.start(); go(); };
