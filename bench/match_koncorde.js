// Koncorde on one set: node match_koncorde.js HOME re2|js FILTERS DOCUMENTS SECONDS; prints one line of JSON.
const fs = require("fs");
const path = require("path");

const [home, engine, filtersFile, documentsFile, seconds] = process.argv.slice(2);
const { Koncorde } = require(path.join(home, "node_modules", "koncorde"));
const lines = (file) => fs.readFileSync(file, "utf8").split("\n").filter(Boolean).map((l) => JSON.parse(l));
const filters = lines(filtersFile);
const documents = lines(documentsFile);
const koncorde = new Koncorde({ regExpEngine: engine });
const now = () => Number(process.hrtime.bigint()) / 1e9;
const cpu = () => { const used = process.cpuUsage(); return (used.user + used.system) / 1e6; };

const memory = process.memoryUsage().rss;
let start = now();
let busy = cpu();
const ids = new Set(filters.map((filter) => koncorde.register(filter)));
const registered = Math.min(now() - start, cpu() - busy);
const bytes = (process.memoryUsage().rss - memory) / ids.size;

for (const document of documents.slice(0, 20)) koncorde.test(document);
const found = documents.map((document) => koncorde.test(document).length);
const times = [];
let best = 0;
const end = now() + Number(seconds);
while (now() < end) {
  // Runs of at most a second: at 30 documents a second the whole list would take a minute.
  start = now();
  busy = cpu();
  let count = 0;
  for (const document of documents) {
    const before = now();
    koncorde.test(document);
    times.push((now() - before) * 1e6);
    count++;
    if (now() - start > 1) break;
  }
  best = Math.max(best, count / Math.min(now() - start, cpu() - busy));
}
times.sort((a, b) => a - b);
const at = (share) => times[Math.floor(times.length * share)];
console.log(JSON.stringify({
  filters: ids.size, hits: found.reduce((a, b) => a + b, 0) / found.length, register: filters.length / registered, bytes, objects: best, p50: at(0.5), p99: at(0.99),
}));
