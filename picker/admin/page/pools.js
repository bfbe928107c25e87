// The pools of a picker of several, asked for once a second while somebody looks.

import { EVERY_MS, ask, goneWords, say } from "./asking.js";
import { byId, cells, el, keep, setText } from "./dom.js";
import { badge } from "./drawing.js";
import { count } from "./format.js";

const READY = ["good", "✓", "ready"];
const NOT_READY = ["bad", "✕", "not ready"];
const COLUMNS = [
  ["Pool", "name"],
  ["State", "state"],
  ["Endpoints", "number"],
  ["In flight", "number"],
  ["Trouble", "note"],
];

let timer = null;
let asking = false;
let lastAnswer = null;

function row(first) {
  const parts = cells(COLUMNS);
  // The picker tells a path from its root; this page may be below some other.
  parts[0].append(el("a", { class: "title", href: first.path.slice(1) }, first.name));
  const mark = badge();
  parts[1].append(mark.element);
  const values = parts.slice(2).map((cell) => {
    const value = el("span", { class: "value" });
    cell.append(value);
    return value;
  });
  function update(one) {
    mark.update(one.ready ? READY : NOT_READY);
    const texts = [count(one.endpoints), count(one.inflight_requests), one.problem ?? "none"];
    texts.forEach((text, index) => setText(values[index], text));
  }
  return { element: el("tr", { role: "row" }, parts), update };
}

function show({ pools }) {
  keep(byId("pools-rows"), pools, (one) => one.name, row);
  const ready = pools.filter((one) => one.ready).length;
  setText(byId("pools-hint"), `${count(ready)} of ${count(pools.length)} ready. Choose one to see its endpoints, queues and requests.`);
}

async function poll() {
  if (asking || document.hidden) return;
  asking = true;
  clearTimeout(timer);
  try {
    show(await ask("pools"));
    lastAnswer = Date.now();
    say("live", "Live");
  } catch (error) {
    if (error.status) say("partly", `The picker says: ${error.message}. Trying again.`);
    else say("gone", goneWords(lastAnswer), lastAnswer !== null);
  } finally {
    asking = false;
    timer = setTimeout(poll, EVERY_MS);
  }
}

document.addEventListener("visibilitychange", poll);
poll();
