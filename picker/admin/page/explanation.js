// One request: what was asked for, who could have served it, and why it went where it went.

import { byId, el, scrolling } from "./dom.js";
import { badge, bar, stackedBar } from "./drawing.js";
import { UNKNOWN, bytes, count, deciding, endpointName, isOver, moment, outcome, percent, plural, score, seconds, weight } from "./format.js";

const TITLE = document.title; // which may name a pool

/** Show a request's record. */
export function showExplanation(record) {
  const { summary } = record;
  const mark = badge();
  mark.update(outcome(summary));
  fill(
    summary.request_id,
    el("p", { class: "lead" }, mark.element, " ", record.reasons.join(" ")),
    record.refusal && refusal(record.refusal),
    facts(record),
    stages(record.stages),
    record.profiles.map(profile),
  );
}

/** Say why a request cannot be shown. */
export function showNoExplanation(requestId, text) {
  fill(requestId, el("p", { class: "notice" }, text));
}

function fill(requestId, ...content) {
  const id = requestId || "(no id)";
  const back = el("a", { class: "back", href: "#/requests" }, "← All requests");
  const heading = el("h2", { id: "explanation-heading", tabindex: "-1" }, "Request ", el("code", {}, id));
  byId("explanation").replaceChildren(back, heading, ...content.flat().filter(Boolean));
  document.title = `${id} · ${TITLE}`;
}

function refusal(view) {
  const again = view.retry_after_seconds === null ? null : `Try again after ${seconds(view.retry_after_seconds)}.`;
  return el("div", { class: "notice bad" },
    el("strong", {}, `✕ Refused with ${view.status} ${view.code}`),
    el("p", {}, view.message), view.reason && el("p", {}, "Reason: ", el("code", {}, view.reason)), again && el("p", {}, again));
}

function facts(record) {
  const { summary } = record;
  const model = record.incoming_model === record.target_model || !record.target_model
    ? record.incoming_model
    : `${record.incoming_model} → ${record.target_model}`;
  const matched = record.matched_prefix_tokens === null ? null
    : `${tokens(record.matched_prefix_tokens)}${record.prompt_tokens ? ` (${percent(record.matched_prefix_tokens / record.prompt_tokens)} of the prompt)` : ""}`;
  const rows = [
    ["Received", moment(summary.received_unix_seconds)],
    ["Model", model],
    ["Rewritten by", record.rewritten_by],
    ["Objective", record.objective],
    ["Flow", summary.fairness_id],
    ["Priority", count(summary.priority)],
    ["Size", bytes(record.size_bytes)],
    ["Waited in the queue", seconds(summary.queue_seconds)],
    ["Deciding took", seconds(deciding(summary))],
    ["First token after", summary.ttft_seconds === null ? null : seconds(summary.ttft_seconds)],
    [isOver(summary) ? "Over after" : "In flight for", summary.seconds === null ? null : seconds(summary.seconds)],
    ["Destination", record.destination],
    ["Served by", record.served_by],
    ["Prompt", tokens(record.prompt_tokens)],
    ["Expected in its cache", matched],
    ["Cached, as it said", tokens(record.cached_tokens)],
    ["Answer", tokens(record.completion_tokens)],
  ];
  const given = rows.filter((row) => row[1] !== null && row[1] !== "");
  return el("dl", { class: "facts" }, given.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

function tokens(number) {
  return number === null ? null : plural(number, "token");
}

function stages(view) {
  const rows = Object.entries(view);
  if (!rows.length) return null;
  const listed = rows.map(([name, reason]) => el("li", {}, el("strong", {}, name), `: ${reason}`));
  return el("div", { class: "notice" }, "Left out:", el("ul", {}, listed));
}

function profile(view) {
  const heading = `Profile ${view.name}${view.is_primary ? "" : " (secondary)"}`;
  return el("section", { class: "profile" },
    el("h3", {}, heading),
    el("p", { class: "hint" }, `Picked by ${view.picker}: ${view.picked.map(endpointName).join(", ") || "none"}.`),
    filters(view),
    view.candidates.length > 0 && scores(view));
}

function filters(view) {
  if (!view.filters.length) return null;
  const steps = view.filters.map((one) => {
    const gone = one.before - one.after;
    const names = one.removed.map(endpointName).join(", ");
    const more = gone > one.removed.length ? ` and ${count(gone - one.removed.length)} more` : "";
    const text = gone ? `removed ${count(gone)}: ${names}${more}` : "removed none";
    return el("li", {}, el("span", { class: "title" }, one.filter), el("span", { class: "flow-of" }, `${count(one.before)} → ${count(one.after)}`), el("span", { class: "detail" }, text));
  });
  return el("ol", { class: "filters", "aria-label": "Filters, in their order" }, steps);
}

function scores(view) {
  const scorers = view.candidates[0].scores.map((one) => one.scorer);
  const highest = Math.max(...view.candidates.map((one) => one.total), 1e-9);
  const head = ["Endpoint", "Total", ...scorers, "In flight", "Running", "Waiting", "KV cache", "Metrics age"];
  const first = view.candidates[0];
  const table = el("table", { class: "scores" },
    el("caption", {}, caption(view)),
    el("thead", {}, el("tr", {}, head.map((name, index) => {
      const which = index - 2;
      const isScorer = which >= 0 && which < scorers.length;
      return el("th", { scope: "col", class: index ? "number" : null },
        isScorer && el("span", { class: `key series-${which % 7}`, "aria-hidden": "true" }), name,
        isScorer && el("span", { class: "detail" }, `weight ${weight(first.scores[which].weight)}`));
    }))),
    el("tbody", {}, view.candidates.map((one) => candidate(one, view, highest))));
  return scrolling(`Scores of profile ${view.name}`, table);
}

function caption(view) {
  const kept = view.candidates.length < view.num_scored ? `The best ${count(view.candidates.length)} of ${count(view.num_scored)}` : "All";
  const tie = view.num_tied > 1 ? ` ${count(view.num_tied)} share the best total.` : "";
  return `${kept} candidates that were scored, the best first. Each scorer: what it said, and what that counted.${tie}`;
}

function candidate(one, view, highest) {
  const isPicked = view.picked.includes(one.endpoint);
  const shares = one.scores.map((each) => Math.max(0, each.weighted) / highest);
  const name = el("th", { scope: "row" },
    el("span", { class: "title" }, isPicked ? "▸ " : "", endpointName(one.endpoint)),
    el("span", { class: "detail" }, isPicked ? "picked" : one.address));
  const total = el("td", { class: "number" }, el("strong", {}, score(one.total)), stackedBar(shares));
  const each = one.scores.map((part, index) => {
    const fill = bar("", `series-${index % 7}`);
    fill.update(part.raw);
    return el("td", { class: "number" }, el("span", {}, score(part.raw)), " ",
      el("span", { class: "detail" }, `→ ${score(part.weighted)}`), fill.element);
  });
  const ages = one.metrics_age_seconds === null ? UNKNOWN : seconds(one.metrics_age_seconds);
  const load = [count(one.inflight_requests), count(one.running_requests), count(one.waiting_requests), percent(one.kv_cache_usage), ages];
  return el("tr", { class: isPicked ? "picked" : null }, name, total, each, load.map((text) => el("td", { class: "number" }, text)));
}
