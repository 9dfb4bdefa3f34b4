// The public API: requests with the token, streams that resume, and one stream of figures for the whole page.
import { parse } from "./ui.js";

const TOKEN = "virta.token", WAITS = [1, 2, 4, 8, 15];
const kept = (act) => { try { return act(sessionStorage); } catch { return null; } };
export const token = () => kept((s) => s.getItem(TOKEN));
export const setToken = (value) => kept((s) => (value ? s.setItem(TOKEN, value) : s.removeItem(TOKEN)));
export const draft = (name, value) => (value === undefined ? kept((s) => s.getItem(`virta.draft.${name}`)) : kept((s) => s.setItem(`virta.draft.${name}`, value)));

export class ApiError extends Error {
  constructor(status, body) {
    super(body?.message ?? body?.detail ?? (status ? `The server answered with status ${status}.` : "The server does not answer."));
    Object.assign(this, { status, code: body?.code ?? "", body, title: { 0: "No connection", 401: "A token is needed", 403: "This token may not do that", 404: "There is no such thing", 507: "The disk is full" }[status] });
  }
}
const listeners = { unauthorized: new Set() };
export const onUnauthorized = (act) => listeners.unauthorized.add(act);
const authorized = (headers = {}) => (token() ? { ...headers, Authorization: `Bearer ${token()}` } : headers);

async function refused(answer) {
  let body = null;
  try { body = await answer.json(); } catch { /* not JSON: the status says it */ }
  if (answer.status === 401) for (const act of listeners.unauthorized) act();
  return new ApiError(answer.status, body);
}
// `text` is sent as it is, `body` as JSON. Answers are parsed with their numbers as they were sent.
export async function call(path, { method, body, text, headers, signal, whole } = {}) {
  const content = text ?? (body === undefined ? undefined : JSON.stringify(body));
  let answer;
  try { answer = await fetch(path, { method: method ?? (content === undefined ? "GET" : "POST"), body: content, signal, cache: "no-store", headers: authorized({ ...(content === undefined ? {} : { "Content-Type": "application/json" }), ...headers }) }); } catch (error) { if (error.name === "AbortError") throw error; throw new ApiError(0, null); }
  if (!answer.ok) throw await refused(answer);
  if (whole) return answer;
  const said = await answer.text();
  return said ? parse(said) : null;
}
export const publish = async (channel, text) => { const answer = await call(`/channels/${encodeURIComponent(channel)}`, { text, headers: { "Content-Type": "application/cloudevents+json" }, whole: true }); return { offset: answer.headers.get("Virta-Offset"), duplicate: answer.headers.get("Virta-Duplicate") === "true" }; };

// A stream of server-sent events. It reads comments, which carry offsets, and sends the token as a header, so it needs
// neither EventSource nor a ticket. It resumes after the last id; `state` is called with live, lost, refused.
export class Stream {
  constructor(path, { onframe, onstate = () => {}, headers = {}, lastId = "" }) { Object.assign(this, { path, onframe, onstate, headers, lastId, closed: false, tries: 0 }); this.wake = () => this.waiting?.(); document.addEventListener("visibilitychange", this.wake); addEventListener("online", this.wake); this.run(); }
  close() { this.closed = true; this.abort?.abort(); this.waiting?.(); document.removeEventListener("visibilitychange", this.wake); removeEventListener("online", this.wake); }
  async run() {
    while (!this.closed) {
      this.abort = new AbortController();
      try {
        const answer = await fetch(this.path, { signal: this.abort.signal, cache: "no-store", headers: authorized({ Accept: "text/event-stream", ...this.headers, ...(this.lastId ? { "Last-Event-ID": this.lastId } : {}) }) });
        if (!answer.ok) { const error = await refused(answer); if (this.closed) return; this.onstate("refused", error); if (error.status < 500 && error.status !== 401 && error.status !== 429) { this.closed = true; return; } } else { this.tries = 0; if (!this.closed) this.onstate("live"); await this.read(answer.body.getReader()); }
      } catch { /* cut off: tried again below */ }
      if (this.closed) return;
      const wait = WAITS[Math.min(this.tries++, WAITS.length - 1)] * (1 + (Math.random() - .5) / 2);
      this.onstate("lost", wait);
      await new Promise((go) => { this.waiting = go; setTimeout(go, wait * 1000); });
      this.waiting = null;
    }
  }
  async read(reader) {
    const decoder = new TextDecoder(); let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done || this.closed) return;
      rest += decoder.decode(value, { stream: true });
      for (let end = rest.indexOf("\n\n"); end >= 0; end = rest.indexOf("\n\n")) { const text = rest.slice(0, end); rest = rest.slice(end + 2); this.frame(text); if (this.closed) return; }
    }
  }
  frame(text) {
    const frame = { event: "message", data: "", comment: "", id: null };
    for (const line of text.split("\n")) {
      const at = line.indexOf(":"), name = at < 0 ? line : line.slice(0, at), value = line.slice(at + 1).replace(/^ /, "");
      if (name === "data") frame.data += (frame.data ? "\n" : "") + value; else if (name === "event") frame.event = value; else if (name === "id") frame.id = value; else if (!name) frame.comment = value;
    }
    if (frame.id !== null) this.lastId = frame.id;
    this.onframe(frame);
  }
}

// One stream of figures for the page; screens listen to it, and it says whether there is a connection.
export const figures = {
  last: null, heard: new Set(), states: new Set(), stream: null,
  start() { this.stream?.close(); this.stream = new Stream("/stats/stream", { onframe: (f) => { if (f.event === "disconnect") { for (const act of this.states) act("stopping"); return; } if (f.event !== "stats") return; this.last = JSON.parse(f.data); for (const act of this.heard) act(this.last); }, onstate: (state, detail) => { for (const act of this.states) act(state, detail); } }); },
  listen(act) { this.heard.add(act); if (this.last) act(this.last); return () => this.heard.delete(act); },
};
// Call `act` now and every `ms`, one at a time, while the tab is visible; returns what stops it.
export function poll(act, ms) {
  let stopped = false, timer;
  const turn = async () => { if (stopped) return; if (!document.hidden) await act(); if (!stopped) timer = setTimeout(turn, ms); };
  turn();
  return () => { stopped = true; clearTimeout(timer); };
}
export async function allChannels() {
  const found = []; let after = null;
  do { const page = await call(`/channels?limit=1000${after === null ? "" : `&after=${encodeURIComponent(after)}`}`); found.push(...page.channels); after = page.next; } while (after !== null && found.length < 10_000);
  return found;
}
