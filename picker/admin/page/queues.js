// Flow control: the bands of priority and whose requests wait in them.

import { byId, el, keep, setText } from "./dom.js";
import { bar } from "./drawing.js";
import { bytes, count, percent, plural, rate, seconds, words } from "./format.js";

const FLOWS = 8;

/** Show who waits. */
export function showQueues(view) {
  byId("bands").hidden = !view.is_on;
  setText(byId("queues-summary"), summary(view));
  showCounts(byId("queues-outcomes"), view.is_on ? Object.entries(view.outcomes) : []);
  const bands = view.is_on ? view.bands.map((band) => ({ band, view })) : [];
  keep(byId("bands"), bands, ({ band }) => band.priority, makeBand);
}

/** The limits of the whole queue: what is used of each, what it is, how that is said, whose it is. */
function limitsOf(view) {
  return [
    [view.queued_requests, view.max_requests, count],
    [view.queued_bytes, view.max_bytes, bytes],
    [view.queued_memory_bytes, view.max_memory_bytes, (value) => `${bytes(value)} of memory`],
  ].map((limit) => [...limit, "the whole queue"]);
}

/** Of some limits the one that is nearest; null where there is none. */
function binding(limits) {
  const known = limits.filter(([, most]) => most);
  if (!known.length) return null;
  const shares = known.map(([used, most, say, whose]) => ({ share: used / most, used, most, say, whose }));
  return shares.reduce((a, b) => (b.share > a.share ? b : a));
}

/** How full the queue is by the limit that binds, from 0 to 1; null without one. */
export function fullness(view) {
  return view.is_on ? binding(limitsOf(view))?.share ?? null : null;
}

/** Show counts as a list of chips, the most frequent first. */
export function showCounts(list, entries) {
  const sorted = entries.filter((entry) => entry[1]).toSorted((a, b) => b[1] - a[1]);
  list.hidden = !sorted.length;
  keep(list, sorted, (entry) => entry[0], ([name]) => {
    const number = el("dd");
    return {
      element: el("div", {}, el("dt", {}, words(name)), number),
      update: (entry) => setText(number, count(entry[1])),
    };
  });
}

function summary(view) {
  if (!view.is_on) return "Flow control is off: no request waits in the picker.";
  const stale = view.stale_endpoints ? `, judged without fresh metrics for ${view.stale_endpoints}` : "";
  const most = view.max_requests === null ? "" : ` of at most ${count(view.max_requests)}`;
  return (
    `${plural(view.queued_requests, "request")} waiting${most} (${bytes(view.queued_bytes)}), ` +
    `${count(view.under_way)} in flight, ${rate(view.dispatched_per_second)} dispatched per second. ` +
    `Saturation of the pool: ${percent(view.saturation)}${view.detector ? ` (${view.detector})` : ""}${stale}.`
  );
}

function makeBand({ band: first }) {
  const heading = `Priority ${first.priority}`;
  const facts = el("p", { class: "detail" });
  const fill = bar("wide");
  const flows = el("ul", { class: "flows", "aria-label": `Flows of priority ${first.priority}` });
  const more = el("p", { class: "detail" });
  const element = el("article", { class: "band" }, el("h3", {}, heading), facts, fill.element, flows, more);
  function update({ band, view }) {
    const ceiling = band.ceiling < 1 ? ` Held back from ${percent(band.ceiling)} saturation.` : "";
    const own = [[band.queued_requests, band.max_requests, count, "this band"], [band.queued_bytes, band.max_bytes, bytes, "this band"]];
    const limit = binding([...own, ...limitsOf(view)]);
    const full = limit ? ` ${limit.say(limit.used)} of the ${limit.say(limit.most)} that ${limit.whose} may hold (${percent(limit.share)}).` : "";
    setText(facts, `${plural(band.queued_requests, "request")}, ${bytes(band.queued_bytes)}.${full}${ceiling}`);
    fill.update(limit?.share ?? 0);
    const waiting = band.flows.filter((flow) => flow.queued_requests > 0);
    const sorted = waiting.toSorted((a, b) => b.queued_requests - a.queued_requests);
    const items = sorted.slice(0, FLOWS).map((flow) => ({ flow, whole: band.queued_requests }));
    keep(flows, items, (item) => item.flow.fairness_id, makeFlow);
    flows.hidden = !items.length;
    const hidden = sorted.length - items.length;
    setText(more, hidden ? `… and ${plural(hidden, "more flow")}` : "");
    more.hidden = !hidden;
  }
  return { element, update };
}

function makeFlow({ flow: first }) {
  const facts = el("span", { class: "detail" });
  const fill = bar();
  const element = el("li", {}, el("span", { class: "title" }, first.fairness_id), fill.element, facts);
  function update({ flow, whole }) {
    fill.update(whole ? flow.queued_requests / whole : 0);
    setText(
      facts,
      `${plural(flow.queued_requests, "request")} (${percent(whole ? flow.queued_requests / whole : 0)}), ` +
        `${bytes(flow.queued_bytes)}, the oldest for ${seconds(flow.oldest_wait_seconds)}`,
    );
  }
  return { element, update };
}
