// What is wrong, which pool this is, its figures, and their last two minutes.

import { byId, el, keep, setAttribute, setText } from "./dom.js";
import { bar, timeline } from "./drawing.js";
import { age, count, health, percent, rate, seconds } from "./format.js";
import { fullness } from "./queues.js";

const NOT_USABLE = new Set(["ejected", "unknown"]);
const NAMED = 3;

/** A chart below its most important number. */
function leading(title, explains, lines, say, unit, detail) {
  const value = el("span");
  const lead = el("p", { class: "headline" }, value, " ", el("small", {}, explains));
  const drawn = timeline(title, lines, say, { unit, detail, lead });
  return { ...drawn, lead: (text, isBad = false) => {
    setText(value, isBad ? `✕ ${text}` : text);
    setAttribute(lead, "data-kind", isBad ? "bad" : "neutral");
  } };
}

const REQUESTS = leading("Requests", "per second", [["all", "running", "requests_per_second"]], rate, "rate");
const FIRST = leading("Time to first token", "p95, as clients see it", [
  ["p50", "running", "ttft_p50_seconds"], ["p95", "waiting", "ttft_p95_seconds"],
  ["in the queue, p95", "prefix", "queue_wait_p95_seconds", true],
], seconds, "seconds", "queue included");
const LOAD = leading("Running and waiting", "running", [
  ["running", "running", "running"], ["waiting", "waiting", "waiting"], ["in picker", "prefix", "queued"],
], count, "count", "requests");
const ERRORS = leading("Errors", "per second", [
  ["refused", "prefix", "refusals_per_second"], ["failed", "bad", "failures_per_second"],
], rate, "rate");
const CHARTS = [REQUESTS, FIRST, LOAD, ERRORS];

/** Show all of it; `configuration` null: not asked for yet. */
export function showSummary({ about, endpoints, pool, queues, configuration }, samples) {
  showAbout(about);
  const lost = endpoints.filter((one) => NOT_USABLE.has(one.health.state));
  const isRefusing = pool.refusals_per_second > 0;
  const isFailing = pool.failures_per_second > 0;
  const sum = (of) => endpoints.reduce((total, one) => total + (of(one) ?? 0), 0);
  const loads = endpoints.filter((one) => one.metrics !== null);
  const usages = loads.map((one) => one.metrics.kv_cache_usage).filter((one) => one !== null);
  const usage = usages.length ? usages.reduce((total, one) => total + one, 0) / usages.length : null;
  REQUESTS.lead(rate(pool.requests_per_second));
  FIRST.lead(seconds(pool.ttft?.p95));
  LOAD.lead(count(loads.length ? sum((one) => one.metrics?.running_requests) : null));
  ERRORS.lead(rate(pool.refusals_per_second === null ? null : pool.refusals_per_second + pool.failures_per_second), isRefusing || isFailing);
  const [used, most] = [queues.queued_requests, queues.max_requests];
  showFigures([
    ["Endpoints usable", `${count(endpoints.length - lost.length)} of ${count(endpoints.length)}`, lost.length > 0 || !endpoints.length],
    ["In flight", count(sum((one) => one.inflight_requests))],
    ["Waiting at endpoints", count(loads.length ? sum((one) => one.metrics?.waiting_requests) : null)],
    ["Waiting in the picker", queues.is_on ? `${count(used)}${most === null ? "" : ` of ${count(most)}`}` : "no queue", false, fullness(queues)],
    ["KV cache, mean", percent(usage), false, usage],
    ["Tokens/s", rate(pool.tokens_per_second)],
  ]);
  const share = pool.refusals_per_second / pool.requests_per_second;
  showTrouble([
    !endpoints.length && ["bad", "The pool has no endpoint: every request is refused."],
    lost.length > 0 && ["bad", `${count(lost.length)} of ${count(endpoints.length)} endpoints cannot be used: ${named(lost)}.`],
    isRefusing && ["bad", `${rate(pool.refusals_per_second)} requests per second are refused, ${percent(Math.min(1, share))} of those that come.`],
    isFailing && ["bad", `${rate(pool.failures_per_second)} requests per second fail at endpoints.`],
    queues.is_on && queues.saturation >= 1 && ["doubtful", `The pool is full: ${count(queues.queued_requests)} requests wait in the picker.`],
    configuration?.last_error && ["doubtful", "The configuration file was rejected; the one before it stays in use."],
  ].filter(Boolean));
  byId("charts").hidden = false;
  for (const one of CHARTS) one.update(samples.pool);
}

function showAbout({ pool, version, started_unix_seconds: started }) {
  const parts = [pool, version, started ? `up ${age(Date.now() / 1000 - started)}` : ""];
  setText(byId("about"), parts.filter(Boolean).join(" · "));
}

function named(endpoints) {
  const names = endpoints.slice(0, NAMED).map((one) => `${one.name} (${health(one.health.state)[2]})`);
  return names.join(", ") + (endpoints.length > NAMED ? ", …" : "");
}

function showFigures(figures) {
  keep(byId("summary"), figures, (figure) => figure[0], ([name]) => {
    const value = el("dd");
    const fill = bar();
    const element = el("div", {}, el("dt", {}, name), value, fill.element);
    return {
      element,
      update: ([, text, isBad, share = null]) => {
        setText(value, isBad ? `✕ ${text}` : text);
        setAttribute(element, "data-kind", isBad ? "bad" : "neutral");
        fill.element.hidden = share === null;
        fill.update(share);
      },
    };
  });
}

function showTrouble(lines) {
  const list = byId("trouble");
  list.hidden = !lines.length;
  keep(list, lines, ([, text]) => text.replaceAll(/[\d.\s]+/g, ""), ([kind]) => {
    const element = el("li", { "data-kind": kind });
    return { element, update: ([, text]) => setText(element, `${kind === "bad" ? "✕" : "!"} ${text}`) };
  });
}

byId("charts").append(...CHARTS.map((one) => one.element));
