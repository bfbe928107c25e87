// The last requests.

import { byId, cells, el, hideColumns, keep, setAttribute, setText } from "./dom.js";
import { badge } from "./drawing.js";
import { UNKNOWN, clock, count, deciding, endpointName, outcome, seconds, shortId } from "./format.js";
import { showCounts } from "./queues.js";

export const LIMIT = 200;
const AT_FIRST = 15;
const MORE = 45;
const COLUMNS = [
  ["Time", "time"],
  ["Outcome", "state"],
  ["Endpoint", "text"],
  ["Model", "text"],
  ["Flow", "text"],
  ["Priority", "number"],
  ["In queue", "number"],
  ["Deciding", "number"],
  ["First token", "number"],
  ["Total", "number"],
];

// Whether a column says nothing of any of the requests.
const MAY_BE_EMPTY = {
  Endpoint: (items) => items.every((one) => one.endpoint === null),
  Model: (items) => items.every((one) => !one.model),
  Flow: (items) => items.every((one) => !one.fairness_id),
  Priority: (items) => items.every((one) => !one.priority),
  "In queue": (items) => items.every((one) => one.queue_seconds < 0.0005),
  "First token": (items) => items.every((one) => one.ttft_seconds === null),
};

/** The address, within the page, of a request's explanation. */
export function linkTo(requestId) {
  return `#/decisions/${encodeURIComponent(requestId)}`;
}

/** Whether new requests shall not move the list. */
export function isHeld() {
  return byId("requests-paused").checked;
}

function row(first) {
  const parts = cells(COLUMNS);
  const link = el("a", { href: linkTo(first.request_id), title: first.request_id }, shortId(first.request_id));
  parts[0].append(el("span", { class: "when" }, clock(first.received_unix_seconds)), " ", link);
  const mark = badge();
  parts[1].append(mark.element);
  const values = parts.slice(2).map((cell) => {
    const value = el("span", { class: "value" });
    cell.append(value);
    return value;
  });
  const element = el("tr", { role: "row", class: "chosen-by-click" }, parts);
  element.addEventListener("click", (event) => {
    const isOwn = event.target.closest("a") || String(getSelection()) !== "";
    if (!isOwn) location.hash = linkTo(first.request_id);
  });
  function update(one) {
    const state = outcome(one);
    mark.update(state);
    setAttribute(element, "data-kind", state[0]);
    const texts = [
      one.endpoint === null ? UNKNOWN : endpointName(one.endpoint),
      one.model || UNKNOWN,
      one.fairness_id || UNKNOWN,
      count(one.priority),
      seconds(one.queue_seconds),
      seconds(deciding(one)),
      seconds(one.ttft_seconds),
      seconds(one.seconds),
    ];
    texts.forEach((text, index) => setText(values[index], text));
  }
  return { element, update, cells: parts };
}

function holds(one, text) {
  return [one.request_id, one.model, one.fairness_id, one.endpoint].some((part) => part?.toLowerCase().includes(text));
}

let length = AT_FIRST;

/** Let the list be longer. */
export function showMore() {
  length += MORE;
}

/** Show them. */
export function showRequests(decisions) {
  const counts = new Map();
  for (const one of decisions) counts.set(one.outcome, (counts.get(one.outcome) ?? 0) + 1);
  showCounts(byId("requests-outcomes"), [...counts]);
  const isTroubled = byId("requests-troubled").checked;
  const text = byId("requests-text").value.trim().toLowerCase();
  const shown = decisions.filter((one) => (!isTroubled || ["bad", "doubtful"].includes(outcome(one)[0])) && holds(one, text));
  // Clients may send the same id twice.
  const seen = new Set();
  const keyOf = (one) => `${one.received_unix_seconds} ${one.request_id}`;
  const found = shown.filter((one) => !seen.has(keyOf(one)) && seen.add(keyOf(one)));
  const items = found.slice(0, length);
  keep(byId("requests-rows"), items, keyOf, row);
  hideColumns(byId("requests-table"), COLUMNS.map(([label]) => MAY_BE_EMPTY[label]?.(items) ?? false));
  byId("requests-more").hidden = found.length <= items.length;
  const hint = `The last ${decisions.length > 1 ? `${decisions.length} ` : ""}requests, the newest first.`;
  setText(byId("requests-hint"), `${hint} Choose one to see why it went where it went.`);
  const note = byId("requests-note");
  note.hidden = items.length > 0;
  setText(note, decisions.length ? "None of them is like that. Enter looks for an older one by its id." : "No request came yet.");
}
