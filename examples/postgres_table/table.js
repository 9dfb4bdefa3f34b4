// A live view as a table: `row`, `enter` and `update` set a row, `leave` removes it, `snapshot` and `reset` start again.
const head = document.querySelector("thead");
const body = document.querySelector("tbody");
const state = document.querySelector("#state");
const rows = new Map();

function set({ key, event }) {
  const values = event.data.after ?? event.data;
  if (!head.rows.length) {
    const line = head.insertRow();
    for (const name of Object.keys(values)) {
      line.appendChild(document.createElement("th")).textContent = name;
    }
  }
  let line = rows.get(key);
  if (!line) {
    line = body.insertRow();
    line.dataset.key = key;
    rows.set(key, line);
  }
  line.replaceChildren();
  for (const value of Object.values(values)) {
    line.insertCell().textContent = value === null ? "" : String(value);
  }
  line.className = "changed";
  setTimeout(() => { line.className = ""; }, 500);
}

function remove(key) {
  rows.get(key)?.remove();
  rows.delete(key);
}

function clear() {
  rows.clear();
  body.replaceChildren();
}

async function start() {
  const { url } = await (await fetch("config.json")).json();
  const source = new EventSource(url);
  const on = (name, handle) => source.addEventListener(name, (m) => handle(JSON.parse(m.data)));
  on("snapshot", clear);
  on("reset", clear);
  on("row", set);
  on("enter", set);
  on("update", set);
  on("leave", ({ key }) => remove(key));
  on("live", () => { state.textContent = `live: ${rows.size} rows at the last check`; });
  source.onerror = () => { state.textContent = "reconnecting…"; };
}

start();
