// Numbers and states as people read them.

export const UNKNOWN = "–";

/** A count, with thin spaces between thousands. */
export function count(value) {
  if (value === null || value === undefined) return UNKNOWN;
  return String(Math.round(value)).replace(/\B(?=(\d{3})+$)/g, "\u202f");
}

/** A share in [0, 1]. */
export function percent(value) {
  if (value === null || value === undefined) return UNKNOWN;
  return `${Math.round(value * 100)} %`;
}

/** Requests a second. */
export function rate(value) {
  if (value === null || value === undefined) return UNKNOWN;
  return value >= 10 ? count(value) : value.toFixed(1);
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

/** The time of day. */
export function clock(unixSeconds) {
  return new Date(unixSeconds * 1000).toLocaleTimeString([], { hour12: false });
}

/** The day and the time of day. */
export function moment(unixSeconds) {
  return new Date(unixSeconds * 1000).toLocaleString([], { hour12: false });
}

/** An endpoint without the namespace that all share. */
export function endpointName(key) {
  return key.startsWith("default/") ? key.slice("default/".length) : key;
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
  let [kind, symbol] = OUTCOMES[summary.outcome] ?? ["bad", "✕"];
  if (kind === "good" && summary.status !== null && summary.status >= 400) {
    [kind, symbol] = ["bad", "✕"];
  }
  const status = summary.status === null || summary.status === 200 ? "" : ` ${summary.status}`;
  const reason = summary.reason ? `, ${summary.reason}` : "";
  return [kind, symbol, `${summary.outcome.replaceAll("-", " ")}${status}${reason}`];
}
