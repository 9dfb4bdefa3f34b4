// The JavaScript client of a Virta server: one ES module for browsers and Node 18+, without dependencies.

const BACKOFF_FIRST_MS = 100;
const BACKOFF_MAX_MS = 5000;
// A stream that is silent for longer is dead: the server pings every 30 s.
const SILENCE_MS = 75_000;
// The largest event is 10 MiB; a frame has little beside it.
const FRAME_CHARS_MAX = 16 * 1024 * 1024;
const SETS_ROW = new Set(["row", "enter", "update"]);

/** The server refused a request, or could not be reached (`status` 0). */
export class VirtaError extends Error {
  constructor(message, { code = "", status = 0 } = {}) {
    super(message);
    this.name = "VirtaError";
    this.code = code;
    this.status = status;
  }
}

/** A client of one server; `url` is empty for the server of the page. */
export class Client {
  constructor(url = "", { token = null, fetch: fetcher = globalThis.fetch.bind(globalThis) } = {}) {
    this.url = url.replace(/\/+$/, "");
    this._token = token;
    this._fetch = fetcher;
    this.jobs = new Jobs(this);
  }

  /** Publish events to a channel, several as one batch. An object without `specversion` becomes the data of a new event. */
  async publish(channel, ...events) {
    const made = events.map(asEvent);
    const single = made.length === 1;
    const response = await this.request("POST", `/channels/${encodeURIComponent(channel)}`, {
      headers: { "Content-Type": single ? "application/cloudevents+json" : "application/cloudevents-batch+json" },
      body: JSON.stringify(single ? made[0] : made),
    });
    await response.arrayBuffer();
    const offset = response.headers.get("Virta-Offset");
    return {
      durability: response.headers.get("Virta-Durability") ?? "",
      offset: offset === null ? null : Number(offset),
      duplicate: response.headers.get("Virta-Duplicate") === "true",
    };
  }

  /** The events of a channel that satisfy a query, as an async iterable that resumes after cuts. */
  subscribe(channel, query = "", options = {}) {
    return new Subscription(this, channel, query, options);
  }

  /** The rows of a channel that satisfy a query, as a map that stays current. */
  live(channel, query = "", options = {}) {
    return new LiveView(this, channel, query, options);
  }

  /** Send a request; throws VirtaError unless it succeeds. */
  async request(method, path, { headers = {}, body, signal } = {}) {
    const all = { ...headers };
    if (this._token !== null) all.Authorization = `Bearer ${this._token}`;
    let response;
    try {
      response = await this._fetch(this.url + path, { method, headers: all, body, signal, cache: "no-store" });
    } catch (error) {
      throw new VirtaError(`no answer from ${this.url || "the server"}: ${error.message}`, { code: "unreachable" });
    }
    if (response.ok) return response;
    const text = await response.text();
    let said = {};
    try {
      said = JSON.parse(text);
    } catch {
      // a refusal as plain text
    }
    throw new VirtaError(said.message ?? said.detail ?? said.code ?? (text || `status ${response.status}`), {
      code: said.code ?? "",
      status: response.status,
    });
  }
}

function asEvent(event) {
  if (event !== null && typeof event === "object" && "specversion" in event) return event;
  return { specversion: "1.0", id: randomId(), source: "/virta/js", type: "event", data: event };
}

function randomId() {
  const bytes = globalThis.crypto.getRandomValues(new Uint8Array(16));
  return [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Splits a stream of server-sent events into frames. */
export class FrameReader {
  constructor() {
    this._buffer = "";
  }

  feed(text) {
    this._buffer = (this._buffer + text).replace(/\r\n/g, "\n");
    const parts = this._buffer.split("\n\n");
    this._buffer = parts.pop();
    if (this._buffer.length > FRAME_CHARS_MAX) throw new VirtaError("a frame is too large: this is no stream of events");
    return parts.map(parseFrame).filter((frame) => frame !== null);
  }
}

function parseFrame(text) {
  const frame = { event: "message", data: "", id: null, retry: null };
  const data = [];
  for (const line of text.split("\n")) {
    const at = line.indexOf(":");
    const name = at < 0 ? line : line.slice(0, at);
    const value = at < 0 ? "" : line.slice(at + 1).replace(/^ /, "");
    if (name === "event") frame.event = value;
    else if (name === "data") data.push(value);
    else if (name === "id") frame.id = value;
    else if (name === "retry" && /^\d+$/.test(value)) frame.retry = Number(value);
  }
  frame.data = data.join("\n");
  return data.length || frame.id !== null || frame.retry !== null ? frame : null;
}

/** Reads frames over one connection after another. */
class Resuming {
  constructor(client, { lastEventId = null, reconnect = true, onError = null } = {}) {
    this._client = client;
    this._reconnect = reconnect;
    this._onError = onError;
    this._abort = new AbortController();
    /** After which id a later subscription would continue. */
    this.lastEventId = lastEventId;
  }

  /** End; iteration stops. */
  close() {
    this._abort.abort();
  }

  get closed() {
    return this._abort.signal.aborted;
  }

  async *_frames(path, headers) {
    let wait = BACKOFF_FIRST_MS;
    while (!this.closed) {
      let retry = null;
      try {
        for await (const frame of this._connection(path(), headers)) {
          wait = BACKOFF_FIRST_MS;
          if (frame.retry !== null) retry = frame.retry;
          if (frame.id !== null) this.lastEventId = frame.id === "" ? null : frame.id;
          yield frame;
        }
      } catch (error) {
        if (this.closed) return;
        const final = error instanceof VirtaError && error.status >= 400 && error.status < 500 && error.status !== 429;
        if (final || !this._reconnect) throw error;
        this._onError?.(error);
      }
      if (this.closed || !this._reconnect) return;
      await this._pause(retry ?? wait * (0.5 + Math.random() / 2));
      wait = Math.min(wait * 2, BACKOFF_MAX_MS);
    }
  }

  async *_connection(path, headers) {
    const all = { Accept: "text/event-stream", ...headers };
    if (this.lastEventId !== null) all["Last-Event-ID"] = this.lastEventId;
    const connection = new AbortController();
    const end = () => connection.abort();
    this._abort.signal.addEventListener("abort", end);
    let timer;
    const restart = () => {
      clearTimeout(timer);
      timer = setTimeout(end, SILENCE_MS);
    };
    try {
      restart();
      const response = await this._client.request("GET", path, { headers: all, signal: connection.signal });
      const reader = response.body.getReader();
      const decoder = new TextDecoder();
      const frames = new FrameReader();
      for (;;) {
        const { done, value } = await reader.read();
        if (done) return;
        restart();
        yield* frames.feed(decoder.decode(value, { stream: true }));
      }
    } finally {
      clearTimeout(timer);
      this._abort.signal.removeEventListener("abort", end);
      connection.abort();
    }
  }

  _pause(ms) {
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, ms);
      this._abort.signal.addEventListener("abort", () => {
        clearTimeout(timer);
        resolve();
      }, { once: true });
    });
  }
}

/** An async iterable of {event, id}; `onGap` is called with the server's report when events could not be resumed. */
export class Subscription extends Resuming {
  constructor(client, channel, query, { from = null, onGap = null, ...options } = {}) {
    super(client, options);
    this._base = `/channels/${encodeURIComponent(channel)}`;
    this._query = query;
    this._from = from;
    this._onGap = onGap;
  }

  async *[Symbol.asyncIterator]() {
    const path = () =>
      this._base + (this._from !== null ? `/from/${encodeURIComponent(this._from)}` : "") + (this._query ? `?${this._query}` : "");
    for await (const frame of this._frames(path, { "Virta-Positions": "1" })) {
      if (frame.event === "data") yield { event: JSON.parse(frame.data), id: frame.id };
      else if (frame.event === "gap") this._onGap?.(JSON.parse(frame.data));
    }
  }
}

/**
 * A live view. `rows` is a Map from key to event, `groups` one from group to aggregate; both stay current.
 * `subscribe(run)` calls run(rows) now and after every change (the contract of Svelte's stores); `on(run)` calls
 * run(change) for every frame, resets included.
 */
export class LiveView extends Resuming {
  constructor(client, channel, query, { since = null, ...options } = {}) {
    super(client, { lastEventId: since, reconnect: options.reconnect ?? true, onError: options.onError ?? null });
    const names = ["filter", "dialect", "key", "row", "fields", "select", "group"];
    const terms = query ? [query] : [];
    for (const name of names) {
      if (options[name]) {
        const text = typeof options[name] === "string" ? options[name] : JSON.stringify(options[name]);
        terms.push(`$${name}=${encodeURIComponent(text)}`);
      }
    }
    this._path = `/channels/${encodeURIComponent(channel)}/live${terms.length ? `?${terms.join("&")}` : ""}`;
    this.rows = new Map();
    this.groups = new Map();
    this.isLive = false;
    this.error = null;
    this._runs = new Set();
    this._listeners = new Set();
    this._waiting = [];
    this.finished = this._run();
  }

  /** Call run(rows) now and after every change; returns a function that ends it. */
  subscribe(run) {
    this._runs.add(run);
    run(this.rows);
    return () => this._runs.delete(run);
  }

  /** Call run(change) for every frame; returns a function that ends it. */
  on(run) {
    this._listeners.add(run);
    return () => this._listeners.delete(run);
  }

  /** Wait until `rows` is complete; throws if the view cannot be opened. */
  ready() {
    if (this.isLive) return Promise.resolve(this);
    if (this.error !== null) return Promise.reject(this.error);
    return new Promise((resolve, reject) => this._waiting.push([resolve, reject]));
  }

  async _run() {
    try {
      for await (const frame of this._frames(() => this._path, {})) this._apply(frame);
    } catch (error) {
      this.error = error;
    }
    const ended = this.error ?? new VirtaError("the view was closed", { code: "closed" });
    for (const [, reject] of this._waiting.splice(0)) reject(ended);
  }

  _apply(frame) {
    const kind = frame.event;
    if (kind === "ping" || kind === "message" || kind === "disconnect") return;
    const data = JSON.parse(frame.data);
    if (kind === "snapshot") {
      this.rows.clear();
      this.groups.clear();
    } else if (SETS_ROW.has(kind)) {
      this.rows.set(data.key, data.event);
    } else if (kind === "leave") {
      this.rows.delete(data.key);
    } else if (kind === "aggregate") {
      for (const gone of data.gone) this.groups.delete(gone);
      for (const group of data.groups) this.groups.set(group.group, group);
    }
    this.isLive = !["snapshot", "row", "reset"].includes(kind);
    for (const run of this._listeners) run({ kind, ...data });
    if (kind !== "snapshot" && kind !== "row" && kind !== "reset") {
      for (const run of this._runs) run(this.rows);
      if (kind === "live") for (const [resolve] of this._waiting.splice(0)) resolve(this);
    }
  }
}

/** Jobs of the server's journal. */
export class Jobs {
  constructor(client) {
    this._client = client;
  }

  /** Queue a job: push("http://…", {domain, priority, delay, payload}). */
  push(uri, options = {}) {
    return this._post("", { uri, ...options });
  }

  /** Take work: next({domain, count, work_for, wait}). */
  next(options = {}) {
    return this._post("/next", options);
  }

  done(key) {
    return this._post("/done", { key });
  }

  extend(key, seconds) {
    return this._post("/extend", { key, seconds });
  }

  giveBack(key) {
    return this._post("/give-back", { key });
  }

  fail(key, options = {}) {
    return this._post("/fail", { key, ...options });
  }

  async _post(path, body) {
    const response = await this._client.request("POST", `/journal/jobs${path}`, {
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
    });
    const text = await response.text();
    return text ? JSON.parse(text) : null;
  }
}
