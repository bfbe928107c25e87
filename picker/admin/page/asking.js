// Asks the picker, and says how that goes.

import { byId, setAttribute, setText } from "./dom.js";
import { clock } from "./format.js";

export const EVERY_MS = 1000;
const PATIENCE_MS = 5000;

/** What a path of the picker says; throws for anything but what was asked for, in JSON. */
export async function ask(path) {
  const response = await fetch(path, { signal: AbortSignal.timeout(PATIENCE_MS), cache: "no-store" });
  if (response.ok) return response.json();
  const body = await response.json().catch(() => ({}));
  throw Object.assign(new Error(body.error ?? response.statusText), { status: response.status });
}

/** Screen readers hear of it when it changes, not every second. */
export function say(state, text, isStale = false) {
  setAttribute(byId("status"), "data-state", state);
  setText(byId("status"), text);
  document.body.classList.toggle("is-stale", isStale);
}

/** That nobody answers, and how old what is shown is; `lastAnswer` null: nothing is shown. */
export function goneWords(lastAnswer) {
  const seen = lastAnswer === null ? "" : ` What is shown is of ${clock(lastAnswer / 1000)}.`;
  return `The picker does not answer. Trying again.${seen}`;
}
