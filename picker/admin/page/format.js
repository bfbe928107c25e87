// Numbers and states as people read them.

export const UNKNOWN = "–";

/** A number as it is, with commas between thousands, as `bench` and `simulate` print them. */
export function number(value) {
  const [whole, rest] = String(value).split(".");
  return whole.replace(/\B(?=(\d{3})+$)/g, ",") + (rest ? `.${rest}` : "");
}

/** A count. */
export function count(value) {
  return value === null || value === undefined ? UNKNOWN : number(Math.round(value));
}

/** A share in [0, 1]. */
export function percent(value) {
  if (value === null || value === undefined) return UNKNOWN;
  return `${Math.round(value * 100)}%`;
}

/** Requests a second. */
export function rate(value) {
  if (value === null || value === undefined) return UNKNOWN;
  return value >= 10 || value === 0 ? count(value) : value.toFixed(1);
}

/** A span of time, in the unit in which it is a number with three digits or so. */
export function seconds(value) {
  if (value === null || value === undefined) return UNKNOWN;
  if (value === 0) return "0";
  if (value < 0.001) return `${Math.max(1, Math.round(value * 1e6))} µs`;
  if (value < 0.01) return `${(value * 1e3).toFixed(1)} ms`;
  if (value < 1) return `${Math.round(value * 1e3)} ms`;
  if (value < 10) return `${value.toFixed(2)} s`;
  if (value < 120) return `${value.toFixed(1)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  return `${Math.round(value / 3600)} h`;
}

/** Times along an axis that ends at `top`, all in its unit. */
export function secondsUpTo(top) {
  const [unit, factor] = top < 0.001 ? ["µs", 1e6] : top < 1 ? ["ms", 1e3] : ["s", 1];
  return (value) => (value ? `${number(Number((value * factor).toPrecision(6)))} ${unit}` : "0");
}

/** How long something has been there, roughly. */
export function age(value) {
  const whole = Math.max(0, Math.round(value));
  if (whole < 120) return `${whole} s`;
  if (whole < 7200) return `${Math.round(whole / 60)} min`;
  return whole < 172_800 ? `${Math.round(whole / 3600)} h` : `${count(whole / 86_400)} d`;
}

/** A size. */
export function bytes(value) {
  if (value === null || value === undefined) return UNKNOWN;
  if (value < 1000) return `${value} B`;
  const units = ["kB", "MB", "GB", "TB"];
  let power = 0;
  for (value /= 1000; value >= 999.5 && power < units.length - 1; power += 1) value /= 1000;
  return `${value < 10 ? value.toFixed(1) : Math.round(value)} ${units[power]}`;
}

/** A weight: up to three decimals, without needless zeros. */
export function weight(value) {
  return String(Math.round(value * 1000) / 1000);
}

/** A score: three decimals, so that columns line up. */
export function score(value) {
  return value === null || value === undefined ? UNKNOWN : value.toFixed(3);
}

/** The time of day, where the reader is. */
export function clock(unixSeconds) {
  return moment(unixSeconds).slice(11);
}

/** The day and the time of day as ISO 8601 writes them, where the reader is. */
export function moment(unixSeconds) {
  const at = new Date(unixSeconds * 1000);
  return new Date(at - at.getTimezoneOffset() * 60_000).toISOString().slice(0, 19).replace("T", " ");
}

/** An endpoint without the namespace that all share. */
export function endpointName(key) {
  return key.startsWith("default/") ? key.slice("default/".length) : key;
}

/** The beginning of an id, enough to tell requests of a list apart. */
export function shortId(id) {
  if (!id) return "(no id)";
  return id.length > 13 ? `${id.slice(0, 8)}…` : id;
}

/** "1 request", "2 requests". */
export function plural(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}

const HEALTH = {
  healthy: ["good", "✓", "healthy"],
  suspect: ["doubtful", "!", "suspect"],
  ejected: ["bad", "✕", "ejected"],
  "on-trial": ["doubtful", "?", "on trial"],
  unknown: ["bad", "✕", "unknown"],
};

/** [kind, symbol, word] of an endpoint's state; never told by colour alone. */
export function health(state) {
  return HEALTH[state] ?? ["neutral", "·", state];
}

const OUTCOMES = {
  waiting: ["busy", "…"],
  "under-way": ["busy", "→"],
  completed: ["good", "✓"],
  skipped: ["good", "✓"],
  "client-gone": ["neutral", "·"],
  shutdown: ["neutral", "·"],
};

// Of requests, of reasons why they were refused, and of times in the queue.
const WORDS = {
  "under-way": "in progress",
  "client-gone": "client gone",
  skipped: "completed, not observed",
  reset: "connection lost",
  shutdown: "cut by a shutdown",
  "rejected-saturated": "queue full",
  "rejected-no-endpoints": "no endpoint",
  "rejected-ttl-expired": "waited too long",
  "rejected-context-cancelled": "client gone",
  "rejected-shutting-down": "shutting down",
  evicted: "stopped for others",
  "evicted-queue-pressure": "stopped for others that wait",
  "evicted-priority": "stopped for a higher priority",
  ResourceExhausted: "too many requests",
  Dispatched: "sent on",
  RejectedCapacity: "refused, queue full",
  RejectedNoEndpoints: "refused, no endpoint",
  RejectedOther: "refused",
  EvictedTTL: "waited too long",
  EvictedNoEndpoints: "lost the last endpoint",
  EvictedContextCancelled: "client gone",
  EvictedOther: "removed from the queue",
};

/** The words for one of the picker's enums; what is none stays as it is. */
export function words(name) {
  return WORDS[name] ?? name.replaceAll("-", " ");
}

/** Whether a request has ended. */
export function isOver(summary) {
  return summary.outcome !== "waiting" && summary.outcome !== "under-way";
}

/** What deciding took, less the wait in the queue; null for what is not decided. */
export function deciding(summary) {
  if (summary.outcome === "waiting") return null;
  return Math.max(0, summary.decision_seconds - summary.queue_seconds);
}

/** [kind, symbol, words] of how a request ended. */
export function outcome(summary) {
  const [kind, symbol] = OUTCOMES[summary.outcome] ?? ["bad", "✕"];
  const { status } = summary;
  if (kind === "good" && status >= 500) return ["bad", "✕", `server error ${status}`];
  if (kind === "good" && status >= 400) return ["doubtful", "!", `client error ${status}`];
  const code = status === null || status === 200 ? "" : ` ${status}`;
  const reason = summary.reason ? words(summary.reason) : "";
  if (reason && summary.outcome === "evicted") return [kind, symbol, `${reason}${code}`];
  return [kind, symbol, `${words(summary.outcome)}${code}${reason ? `, ${reason}` : ""}`];
}
