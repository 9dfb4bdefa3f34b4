// Runs in Node and, as the body of a function, in a browser: returns what it saw.
export async function scenario({ Client, VirtaError, FrameReader }, url) {
  const client = new Client(url);
  const event = (id, subject, data) => ({ specversion: "1.0", id, source: "/js", type: "order", subject, data });
  const seen = {};
  seen.first = await client.publish("js", event("1", "a", { status: "paid", total: 2 }));
  seen.repeat = (await client.publish("js", event("1", "a", { status: "paid", total: 2 }))).duplicate;
  await client.publish("js", event("2", "b", { status: "new", total: 3 }), event("3", "c", { status: "paid", total: 5 }));

  const subscription = client.subscribe("js", "status=paid", { from: "earliest" });
  seen.ids = [];
  for await (const { event: got } of subscription) {
    seen.ids.push(got.id);
    if (seen.ids.length === 2) break;
  }
  subscription.close();
  const gaps = [];
  const lost = client.subscribe("js", "", { lastEventId: "000000000000.7", onGap: (gap) => gaps.push(gap.reason) });
  const waiting = (async () => {
    for await (const { event: got } of lost) return got.id;
  })();
  while (!gaps.length) await new Promise((resolve) => setTimeout(resolve, 5));
  await client.publish("js", event("4", "d", { status: "new" }));
  seen.afterGap = await waiting;
  lost.close();
  seen.gaps = gaps;

  const view = await client.live("js", "status=paid").ready();
  seen.rows = [...view.rows.keys()].sort();
  const changes = [];
  let calls = 0;
  view.subscribe(() => (calls += 1));
  const left = new Promise((resolve) => {
    view.on((change) => {
      changes.push([change.kind, change.key]);
      if (change.kind === "leave") resolve();
    });
  });
  await client.publish("js", event("5", "b", { status: "paid", total: 4 }));
  await client.publish("js", event("6", "a", { status: "sent" }));
  await left;
  seen.changes = changes;
  seen.calls = calls;
  seen.after = [...view.rows.keys()].sort();
  const position = view.lastEventId;
  view.close();
  await client.publish("js", event("7", "e", { status: "paid" }));
  const resumed = client.live("js", "status=paid", { since: position });
  const kinds = [];
  resumed.on((change) => kinds.push(change.kind));
  await resumed.ready();
  seen.resumed = kinds;
  resumed.close();
  const other = client.live("js", "status=new", { since: position });
  const reasons = [];
  other.on((change) => change.kind === "reset" && reasons.push(change.reason));
  await other.ready();
  seen.reset = reasons;
  other.close();

  const totals = await client.live("js", "", { select: "count,sum(/data/total)", group: "/data/status" }).ready();
  seen.groups = [...totals.groups.values()].sort((x, y) => (x.group < y.group ? -1 : 1));
  totals.close();
  const koncorde = await client.live("js", "", { filter: { equals: { status: "paid" } }, dialect: "koncorde" }).ready();
  seen.koncorde = [...koncorde.rows.keys()].sort();
  koncorde.close();

  await client.jobs.push("http://example.com/1", { payload: { n: 1 } });
  const work = await client.jobs.next({ domain: "example.com", work_for: 30 });
  seen.work = JSON.stringify(work).includes("http://example.com/1");

  try {
    await client.live("js", "", { key: "nothing" }).ready();
  } catch (error) {
    seen.refused = [error instanceof VirtaError, error.code, error.status];
  }
  const reader = new FrameReader();
  seen.frames = [...reader.feed("event: a\r\nid:\r\ndata: 1\r"), ...reader.feed("\n\r\ndata: 2")].map((f) => [f.event, f.id, f.data]);
  return seen;
}
