// The endpoints, with their last two minutes.

import { byId, cells, el, hideColumns, keep, setAttribute, setText } from "./dom.js";
import { badge, sparkline } from "./drawing.js";
import { linkToEndpoint } from "./endpoint.js";
import { count, health, percent, plural, rate, seconds } from "./format.js";

const SHOWN = 100;
const SAMPLES = 120;
const ENOUGH_FOR_A_FILTER = 12;
const ORDER = { ejected: 0, unknown: 0, "on-trial": 1, suspect: 2 };
const COLUMNS = [
  ["Endpoint", "name"],
  ["State", "state"],
  ["Running", "curve"],
  ["Waiting", "curve"],
  ["KV cache", "curve"],
  ["Prefix hits", "curve"],
  ["In flight", "number"],
  ["Requests/s", "number"],
  ["Failed/s", "number"],
  ["TTFT there, p95", "number"],
  ["Tokens/s", "number"],
];

// Whether a column says nothing of any endpoint.
const MAY_BE_EMPTY = {
  "Prefix hits": (endpoints) => endpoints.every((one) => one.prefix_hit_share === null),
  "Failed/s": (endpoints) => endpoints.every((one) => !one.failures_per_second),
  "TTFT there, p95": (endpoints) => endpoints.every((one) => !one.ttft),
  "Tokens/s": (endpoints) => endpoints.every((one) => one.tokens_per_second === null),
};

/** Owns the samples that came so far; the picker is only asked for those that are missing. */
export class Samples {
  last = 0;
  series = new Map();
  pool = {};

  /** How many to ask for: a few to make up for a slow answer, all at first and after a pause. */
  wanted(secondsSinceLast) {
    return this.last && secondsSinceLast < 8 ? 10 : SAMPLES;
  }

  /** Take in what came. */
  add(view) {
    if (!view || view.last === this.last) return;
    const fresh = view.last - this.last;
    const series = new Map();
    for (const [key, given] of Object.entries(view.endpoints)) {
      const known = this.series.get(key);
      series.set(key, known && fresh > 0 ? merged(known, given, fresh) : given);
    }
    this.series = series;
    this.pool = this.last && fresh > 0 ? merged(this.pool, view.pool, fresh) : view.pool;
    this.last = view.last;
  }

  /** The highest value of a field at any endpoint; 1 at least. */
  highest(field) {
    let most = 1;
    for (const one of this.series.values()) {
      for (const value of one[field]) if (value > most) most = value;
    }
    return most;
  }
}

function merged(known, given, fresh) {
  const result = {};
  for (const [field, values] of Object.entries(given)) {
    const isComplete = fresh >= values.length;
    result[field] = isComplete ? values : [...known[field], ...values.slice(-fresh)].slice(-SAMPLES);
  }
  return result;
}

function row(first) {
  const parts = cells(COLUMNS);
  const [name, state, running, waiting, cache, prefix, ...rest] = parts;
  const title = el("a", { class: "title", href: linkToEndpoint(first.key) });
  const address = el("span", { class: "detail" });
  name.append(title, address);
  const mark = badge();
  const detail = el("span", { class: "detail" });
  state.append(mark.element, detail);
  const curves = {
    running: sparkline(`running at ${first.name}`, "running"),
    waiting: sparkline(`waiting at ${first.name}`, "waiting"),
    kv_cache_usage: sparkline(`KV cache usage of ${first.name}`, "cache"),
    prefix_hit_share: sparkline(`prefix hits at ${first.name}`, "prefix"),
  };
  [running, waiting, cache, prefix].forEach((cell, index) => {
    cell.append(Object.values(curves)[index].element);
  });
  const values = rest.map((cell) => {
    const value = el("span", { class: "value" });
    cell.append(value);
    return value;
  });

  function update({ endpoint, samples, scales }) {
    setText(title, endpoint.name);
    const space = endpoint.namespace === "default" ? "" : `${endpoint.namespace} · `;
    setText(address, space + endpoint.address);
    mark.update(health(endpoint.health.state));
    setText(detail, healthDetail(endpoint));
    const load = endpoint.metrics;
    const series = samples.series.get(endpoint.key);
    for (const [field, curve] of Object.entries(curves)) {
      const [text, say] = reading(field, endpoint, load);
      curve.update(text, series ? series[field] : [], scales[field], say);
    }
    setText(values[0], count(endpoint.inflight_requests));
    setText(values[1], rate(endpoint.requests_per_second));
    setText(values[2], rate(endpoint.failures_per_second));
    setAttribute(rest[2], "data-kind", endpoint.failures_per_second > 0 ? "bad" : "neutral");
    setText(values[3], seconds(endpoint.ttft?.p95));
    setText(values[4], rate(endpoint.tokens_per_second));
  }
  return { element: el("tr", { role: "row" }, parts), update, cells: parts };
}

function reading(field, endpoint, load) {
  switch (field) {
    case "running":
      return [count(load?.running_requests), count];
    case "waiting":
      return [count(load?.waiting_requests), count];
    case "kv_cache_usage":
      return [percent(load?.kv_cache_usage), percent];
    default:
      return [percent(endpoint.prefix_hit_share), percent];
  }
}

function healthDetail(endpoint) {
  const view = endpoint.health;
  const parts = [];
  if (view.consecutive_failures) parts.push(`${plural(view.consecutive_failures, "failure")} in a row`);
  if (view.next_probe_seconds !== null) parts.push(`next try in ${seconds(view.next_probe_seconds)}`);
  if (endpoint.metrics === null) {
    const age = endpoint.metrics_age_seconds;
    parts.push(age === null ? "metrics never read" : `metrics ${seconds(age)} old`);
  }
  return parts.join(", ");
}

/** Show them: what does not answer well first, then in the order of the pool. */
export function showEndpoints(endpoints, samples) {
  byId("endpoints-filter").hidden = endpoints.length < ENOUGH_FOR_A_FILTER;
  const text = byId("endpoints-text").value.trim().toLowerCase();
  const found = endpoints.filter((one) => `${one.key} ${one.address}`.toLowerCase().includes(text));
  const sorted = found.toSorted((a, b) => (ORDER[a.health.state] ?? 3) - (ORDER[b.health.state] ?? 3));
  const shown = sorted.slice(0, SHOWN);
  const scales = { kv_cache_usage: 1, prefix_hit_share: 1 };
  for (const field of ["running", "waiting"]) scales[field] = samples.highest(field);
  const items = shown.map((endpoint) => ({ endpoint, samples, scales }));
  keep(byId("endpoints-rows"), items, (item) => item.endpoint.key, (item) => row(item.endpoint));
  hideColumns(byId("endpoints-table"), COLUMNS.map(([label]) => MAY_BE_EMPTY[label]?.(endpoints) ?? false));
  for (const field of ["running", "waiting"]) setText(byId(`scale-${field}`), `0 to ${count(scales[field])}`);
  const hidden = sorted.length - shown.length;
  const note = byId("endpoints-note");
  note.hidden = !hidden && shown.length > 0;
  if (hidden) setText(note, `… and ${plural(hidden, "more endpoint")}; narrow them down by name.`);
  else if (!endpoints.length) setText(note, "The pool is empty.");
  else setText(note, "No endpoint has such a name.");
}
