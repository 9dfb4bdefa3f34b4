// Koncorde on one set: node match_koncorde.js HOME re2|js FILTERS DOCUMENTS SECONDS; prints one line of JSON.
const fs = require("fs");
const path = require("path");

const BLOCK_SECONDS = 0.05; // as in match_workload.py, whose method this is
const BLOCK_MIN = 20;

const [home, engine, filtersFile, documentsFile, seconds] = process.argv.slice(2);
const { Koncorde } = require(path.join(home, "node_modules", "koncorde"));
const lines = (file) => fs.readFileSync(file, "utf8").split("\n").filter(Boolean);
const filters = lines(filtersFile).map((line) => JSON.parse(line));
const texts = lines(documentsFile);
const documents = texts.map((text) => JSON.parse(text));
const koncorde = new Koncorde({ regExpEngine: engine });
const now = () => Number(process.hrtime.bigint()) / 1e9;
const cpu = () => { const used = process.cpuUsage(); return (used.user + used.system) / 1e6; };

function elapsed(run) {
  const start = now();
  const busy = cpu();
  run();
  return Math.min(now() - start, cpu() - busy);
}

// Items a second: the best of as many blocks as fit, with no clock read inside a block.
function itemRate(call, items) {
  let count = BLOCK_MIN / 2;
  let block;
  const run = () => { for (const item of block) call(item); };
  do {
    count *= 2;
    block = Array.from({ length: count }, (_, i) => items[i % items.length]);
  } while (elapsed(run) < BLOCK_SECONDS);
  let best = 0;
  const end = now() + Number(seconds);
  do best = Math.max(best, count / elapsed(run)); while (now() < end);
  return best;
}

// Microseconds of single calls, in order.
function callTimes() {
  const times = [];
  const end = now() + Number(seconds);
  for (const document of documents) {
    const before = now();
    koncorde.test(document);
    times.push((now() - before) * 1e6);
    if (now() > end) break;
  }
  return times.sort((a, b) => a - b);
}

const memory = process.memoryUsage().rss;
const ids = new Set();
const registered = elapsed(() => { for (const filter of filters) ids.add(koncorde.register(filter)); });
const bytes = (process.memoryUsage().rss - memory) / ids.size;

const hits = documents.reduce((sum, document) => sum + koncorde.test(document).length, 0);
const objects = itemRate((document) => koncorde.test(document), documents);
const json = itemRate((text) => koncorde.test(JSON.parse(text)), texts);
const times = callTimes();
const at = (share) => times[Math.floor(times.length * share)];
console.log(JSON.stringify({
  filters: ids.size, hits: hits / documents.length, register: filters.length / registered, bytes, objects, json,
  p50: at(0.5), p99: at(0.99),
}));
