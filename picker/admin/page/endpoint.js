// One endpoint: how it is, its last two minutes, and the last requests that went there.

import { byId, el, keep, setText } from "./dom.js";
import { badge, timeline } from "./drawing.js";
import { UNKNOWN, clock, count, health, outcome, percent, rate, seconds } from "./format.js";

const SHOWN = 20;

/** The address, within the page, of an endpoint. */
export function linkToEndpoint(key) {
  return `#/endpoints/${encodeURIComponent(key)}`;
}

/** Show the endpoint `key`; `update(latest, samples)` whenever more is known. */
export function endpointPage(key) {
  const mark = badge();
  const address = el("span", { class: "detail" });
  const facts = el("dl", { class: "facts" });
  const charts = [
    timeline("Requests per second", [["sent", "running", "requests_per_second"], ["failed", "bad", "failures_per_second"]], rate, { unit: "rate" }),
    timeline("First token, at the endpoint", [["p95", "waiting", "ttft_p95_seconds"]], seconds, { unit: "seconds" }),
    timeline("Requests there", [["running", "running", "running"], ["waiting", "waiting", "waiting"]], count, { unit: "count" }),
    timeline("KV cache", [["in use", "cache", "kv_cache_usage"]], percent, { unit: "percent", to: 1 }),
  ];
  const requests = el("ol", { class: "links" });
  const note = el("p", { class: "hint" });
  const shown = [
    el("p", { class: "lead" }, mark.element, " ", address), facts,
    el("div", { class: "charts", role: "region", tabindex: "0", "aria-label": "The last two minutes" }, charts.map((one) => one.element)),
    el("h3", {}, "Last requests"), note, requests,
  ];
  byId("explanation").replaceChildren(
    el("a", { class: "back", href: "#/endpoints" }, "← All endpoints"),
    el("h2", { id: "explanation-heading", tabindex: "-1" }, "Endpoint ", el("code", {}, key)),
    ...shown,
  );

  return function update({ endpoints, decisions }, samples) {
    const one = endpoints?.find((each) => each.key === key);
    for (const part of shown) part.hidden = !one && part !== note;
    if (!one) {
      setText(note, endpoints ? "The pool has no such endpoint." : "Asking the picker …");
      return;
    }
    mark.update(health(one.health.state));
    setText(address, one.address);
    keep(facts, factsOf(one), (fact) => fact[0], ([name]) => {
      const value = el("dd");
      return { element: el("div", {}, el("dt", {}, name), value), update: (fact) => setText(value, fact[1]) };
    });
    for (const each of charts) each.update(samples.series.get(key));
    const own = (decisions ?? []).filter((each) => each.endpoint === key).slice(0, SHOWN);
    setText(note, own.length ? "The newest first. Choose one to see why it went here." : "None of the last requests went here.");
    keep(requests, own, (each) => `${each.received_unix_seconds} ${each.request_id}`, request);
  };
}

function factsOf(one) {
  const load = one.metrics ?? one.last_metrics;
  const ttft = one.ttft ? ["p50", "p95", "p99"].map((share) => seconds(one.ttft[share])).join(" / ") : UNKNOWN;
  const labels = Object.entries(one.labels).map(([name, value]) => `${name}=${value}`);
  return [
    ["In flight from here", count(one.inflight_requests)],
    ["First token at the endpoint, p50 / p95 / p99", ttft],
    ["Tokens/s", rate(one.tokens_per_second)],
    ["Failures in a row", count(one.health.consecutive_failures)],
    ["Ejections", count(one.health.ejections)],
    ["Metrics age", one.metrics_age_seconds === null ? "never read" : seconds(one.metrics_age_seconds)],
    ["KV cache", load?.num_kv_blocks ? `${count(load.num_kv_blocks)} blocks of ${count(load.block_size_tokens)} tokens` : UNKNOWN],
    ["LoRA adapters", load?.active_models.join(", ") || "none"],
    ["Labels", labels.join(", ") || "none"],
  ];
}

function request(first) {
  const mark = badge();
  const detail = el("span", { class: "detail" });
  const link = el("a", { href: `#/decisions/${encodeURIComponent(first.request_id)}` }, first.request_id || "(no id)");
  function update(one) {
    mark.update(outcome(one));
    setText(detail, `${clock(one.received_unix_seconds)}, ${one.seconds === null ? "in flight" : seconds(one.seconds)}`);
  }
  return { element: el("li", {}, link, mark.element, detail), update };
}
