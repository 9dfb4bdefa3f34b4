// Why an event matches or not: the verdict, the tree of conditions, the standing filters.
import { $$, h, icon, int, sign, text, tree } from "./ui.js";
import { call } from "./api.js";
import { members } from "./filterbox.js";

const WORDS = { and: "all of", or: "any of", not: "not", everything: "everything matches", nothing: "nothing can match" };
export const leaves = (node, out = []) => { if (node.kind === "condition") out.push(node); for (const one of node.children ?? []) leaves(one, out); return out; };
// The conditions that decided: failing ones of an "all of" that fails, holding ones of an "any of" that holds.
export function deciding(node, out = []) {
  if (!node.children) { if (node.kind === "condition") out.push(node); return out; }
  for (const one of node.children) if (node.kind === "not" || one.matches === node.matches) deciding(one, out);
  return out;
}
export const pointer = (path, root) => `${root === "document" ? "/data" : ""}/${path.replaceAll("[", ".").replaceAll("]", "").replaceAll(".", "/")}`;
export async function explain(filter, texts) { return call("/filters/explain", { text: `{${members(filter)},"events":[${texts.join(",")}]}` }); }

function node(e, relevant = true) {
  const state = !relevant ? "idle" : e.matches ? "holds" : "fails";
  const line = e.kind === "condition" ? h("div", {}, h("code", {}, e.path), ` should ${e.expected}`, h("span", { class: "got" }, "it is ", h("b", {}, e.actual), !relevant && ", which did not matter")) : h("div", { class: "op" }, WORDS[e.kind] ?? e.kind, h("span", { class: "vh" }, e.matches ? " (holds)" : " (fails)"));
  const item = h("li", { class: state }, h("div", { class: "node" }, sign(e.matches ? "yes" : "no", ""), line));
  // What could not change the answer is grey: the failed branches of an "any of" that holds.
  if (e.children?.length) item.append(h("ul", {}, e.children.map((c) => node(c, relevant && !(e.kind === "or" && e.matches && !c.matches)))));
  return item;
}
export function verdict(why, { filtered = true } = {}) {
  const list = deciding(why), first = list[0], yes = why.matches;
  const because = !filtered ? "The filter is empty" : yes ? list.slice(0, 3).map((r) => `${r.path} is ${r.actual}`).join(", ") || "everything matches" : first ? `${first.path} is ${first.actual}${list.length > 1 ? `, and ${list.length - 1} more` : ""}` : "nothing can match";
  return h("div", { class: `answer ${yes ? "yes" : "no"}`, role: "status" }, sign(yes ? "yes" : "no", ""), h("div", {}, h("strong", {}, yes ? "It matched" : "It did not match"), h("span", { class: "why" }, because)));
}
export const drawn = (why) => h("ul", { class: "root" }, node(why));
export const marked = (event, why, root) => tree(event, { marks: new Set(leaves(why).map((one) => pointer(one.path, root))) });

// The standing filters that an event satisfies, in `list`, and how many there are, in `number`.
export async function standing(list, number, channel, text_) {
  try {
    const found = await call("/filters/standing", { text: `{"channel":${JSON.stringify(channel)},"event":${text_}}` });
    text(number, `${int(found.matched)} of ${int(found.total)}`);
    const where = { query: `#/queries?channel=${encodeURIComponent(channel)}`, filter: "", webhook: "#/webhooks" };
    list.replaceChildren(...found.filters.slice(0, 8).map((one) => h("li", {}, icon("check", "good"), where[one.kind] ? h("a", { href: where[one.kind], class: "nowrap" }, one.kind === "query" ? `${int(one.subscribers)} subscriber${one.subscribers === 1 ? "" : "s"}` : "webhook") : h("span", { class: "nowrap" }, "filter"), h("code", { class: "faint clip", title: one.text }, one.text || "everything"))));
    if (!found.filters.length) list.replaceChildren(h("li", { class: "faint" }, found.total ? "None of them holds" : "No query, filter or webhook stands on this channel"));
    else if (found.matched > 8) list.append(h("li", { class: "faint" }, `and ${int(found.matched - 8)} more`));
  } catch (error) { text(number, ""); list.replaceChildren(h("li", { class: "faint" }, error.message)); }
}
