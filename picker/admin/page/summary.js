// What is wrong, the figures of the pool, and their last two minutes.

import { byId, el, keep, setAttribute, setText } from "./dom.js";
import { chart } from "./drawing.js";
import { UNKNOWN, count, health, percent, rate, seconds } from "./format.js";

const NOT_USABLE = new Set(["ejected", "unknown"]);
const NAMED = 3;
const CHARTS = [
  chart("Requests per second", [["all", "running", "requests_per_second"]], rate),
  chart("Errors per second", [["refused", "waiting", "refusals_per_second"], ["failed", "bad", "failures_per_second"]], rate),
  chart("Time to first token", [["p50", "running", "ttft_p50_seconds"], ["p95", "waiting", "ttft_p95_seconds"]], seconds),
  chart("Running and waiting", [["running", "running", "running"], ["waiting", "waiting", "waiting"], ["in the picker", "prefix", "queued"]], count),
];

/** Show all of it; `configuration` null: not asked for yet. */
export function showSummary({ endpoints, pool, queues, configuration }, samples) {
  const lost = endpoints.filter((one) => NOT_USABLE.has(one.health.state));
  const isRefusing = pool.refusals_per_second > 0;
  const isFailing = pool.failures_per_second > 0;
  const sum = (of) => endpoints.reduce((total, one) => total + (of(one) ?? 0), 0);
  const loads = endpoints.filter((one) => one.metrics !== null);
  const usages = loads.map((one) => one.metrics.kv_cache_usage).filter((one) => one !== null);
  const usage = usages.reduce((total, one) => total + one, 0) / usages.length;
  const ttft = pool.ttft ? `${seconds(pool.ttft.p50)} / ${seconds(pool.ttft.p95)}` : UNKNOWN;
  showFigures([
    ["Endpoints usable", `${count(endpoints.length - lost.length)} of ${count(endpoints.length)}`, lost.length > 0 || !endpoints.length],
    ["Requests/s", rate(pool.requests_per_second)],
    ["Refused/s", rate(pool.refusals_per_second), isRefusing],
    ["Failed/s", rate(pool.failures_per_second), isFailing],
    ["First token, p50 / p95", ttft],
    ["Tokens/s", rate(pool.tokens_per_second)],
    ["In flight", count(sum((one) => one.inflight_requests))],
    ["Waiting at endpoints", count(loads.length ? sum((one) => one.metrics?.waiting_requests) : null)],
    ["Waiting in the picker", queues.is_on ? count(queues.queued_requests) : UNKNOWN],
    ["KV cache, mean", percent(loads.length ? usage : null)],
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

function named(endpoints) {
  const names = endpoints.slice(0, NAMED).map((one) => `${one.name} (${health(one.health.state)[2]})`);
  return names.join(", ") + (endpoints.length > NAMED ? ", …" : "");
}

function showFigures(figures) {
  keep(byId("summary"), figures, (figure) => figure[0], ([name]) => {
    const value = el("dd");
    const element = el("div", {}, el("dt", {}, name), value);
    return {
      element,
      update: ([, text, isBad]) => {
        setText(value, isBad ? `✕ ${text}` : text);
        setAttribute(element, "data-kind", isBad ? "bad" : "neutral");
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
