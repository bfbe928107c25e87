// Asks the picker once a second while somebody looks, and shows what it said.

import { EVERY_MS, ask, goneWords, say } from "./asking.js";
import { byId, el, keep, setText } from "./dom.js";
import { Samples, showEndpoints } from "./endpoints.js";
import { showConfiguration } from "./configuration.js";
import { showExplanation, showNoExplanation } from "./explanation.js";
import { count, isOver, percent, rate } from "./format.js";
import { showQueues } from "./queues.js";
import { LIMIT, isHeld, showMore, showRequests } from "./requests.js";

const TITLE = document.title;
const DECISION = "#/decisions/";
const NAMES = ["endpoints", "queues", "requests", "configuration"];

const samples = new Samples();
const latest = { endpoints: null, queues: null, decisions: null, held: null };
let timer = null;
let asking = false;
let lastAnswer = null;
let rounds = 0;
let chosen = 0; // counts what was looked at

/** Ask for everything at once, and show each answer for itself; what went wrong, by its path. */
async function round() {
  const since = lastAnswer === null ? Infinity : (Date.now() - lastAnswer) / 1000;
  const questions = [
    [`endpoints?history=${samples.wanted(since)}`, takeEndpoints],
    ["queues", (queues) => (latest.queues = queues)],
    [`decisions?limit=${LIMIT}`, ({ decisions }) => (latest.decisions = decisions)],
  ];
  if (rounds % 5 === 0) questions.push(["config", showConfiguration]);
  const answers = questions.map(([path, take]) => ask(path).then(take));
  const settled = await Promise.allSettled(answers);
  const problems = settled.flatMap(({ status, reason }, index) =>
    status === "rejected" ? [[questions[index][0].split("?")[0], reason]] : [],
  );
  if (problems.length < questions.length) lastAnswer = Date.now();
  rounds += 1;
  return { problems, isSilent: problems.length === questions.length };
}

function takeEndpoints({ endpoints, history }) {
  samples.add(history);
  latest.endpoints = endpoints;
}

function show() {
  const { endpoints, queues, decisions } = latest;
  if (endpoints && queues) showSummary();
  if (endpoints) showEndpoints(endpoints, samples);
  if (queues) showQueues(queues);
  if (!isHeld()) latest.held = null;
  else latest.held ??= decisions;
  if (decisions) showRequests(latest.held ?? decisions);
}

async function poll() {
  if (asking || document.hidden) return;
  asking = true;
  clearTimeout(timer);
  try {
    const { problems, isSilent } = await round();
    show();
    if (!problems.length) say("live", "Live");
    else if (isSilent && !problems.some(([, error]) => error.status)) say("gone", goneWords(lastAnswer), lastAnswer !== null);
    else say("partly", partlyWords(problems));
    if (isSilent) rounds = 0; // it may be another picker when it is back, with another configuration
  } finally {
    asking = false;
    timer = setTimeout(poll, EVERY_MS);
  }
}

function partlyWords(problems) {
  const paths = problems.map(([path, error]) => `/${path}${error.status ? ` (${error.status})` : ""}`);
  return `The picker does not answer for ${paths.join(", ")}. Trying again.`;
}

function showSummary() {
  const { endpoints, queues } = latest;
  const usable = endpoints.filter((one) => one.health.state !== "ejected").length;
  const sum = (of) => endpoints.reduce((total, one) => total + (of(one) ?? 0), 0);
  const rates = endpoints.filter((one) => one.requests_per_second !== null);
  const caches = endpoints.filter((one) => one.metrics !== null);
  const mean = caches.reduce((total, one) => total + one.metrics.kv_cache_usage, 0) / caches.length;
  const figures = [
    ["Endpoints usable", `${count(usable)} of ${count(endpoints.length)}`],
    ["Under way", count(sum((one) => one.inflight_requests))],
    ["Running at endpoints", count(sum((one) => one.metrics?.running_requests))],
    ["Waiting at endpoints", count(sum((one) => one.metrics?.waiting_requests))],
    ["KV cache, mean", percent(caches.length ? mean : null)],
    ["Requests/s", rate(rates.length ? sum((one) => one.requests_per_second) : null)],
    ["Waiting in the picker", queues.is_on ? count(queues.queued_requests) : "off"],
  ];
  keep(byId("summary"), figures, (figure) => figure[0], ([name]) => {
    const value = el("dd");
    return {
      element: el("div", {}, el("dt", {}, name), value),
      update: (figure) => setText(value, figure[1]),
    };
  });
}

/** Explain a request, and once more when it is over, unless another one was chosen meanwhile. */
async function explain(requestId, movesFocus) {
  const mine = (chosen += 1);
  for (let isFirst = true; mine === chosen; isFirst = false) {
    let over = true;
    try {
      const record = await ask(`decisions/${encodeURIComponent(requestId)}`);
      if (mine !== chosen) return;
      over = isOver(record.summary);
      if (isFirst || over) showExplanation(record);
    } catch (error) {
      if (mine !== chosen) return;
      if (isFirst) showNoExplanation(requestId, lostRecord(error));
    }
    if (isFirst && movesFocus) byId("explanation-heading").focus();
    if (over) return;
    await new Promise((resolve) => setTimeout(resolve, EVERY_MS));
  }
}

function lostRecord(error) {
  return error.status ? `The picker says: ${error.message}.` : "The picker does not answer, or not for such an id.";
}

/** Show what the address names: a request, or a section of the overview; go there if asked to. */
function follow(wasAsked) {
  const { hash } = location;
  const isDecision = hash.startsWith(DECISION);
  byId("overview").hidden = isDecision;
  byId("explanation").hidden = !isDecision;
  if (isDecision) {
    explain(decoded(hash.slice(DECISION.length)), wasAsked);
    return;
  }
  document.title = TITLE;
  chosen += 1;
  byId("explanation").replaceChildren();
  const name = hash.slice(2);
  if (!NAMES.includes(name)) return;
  const heading = byId(name);
  heading.scrollIntoView({ block: "start" });
  if (wasAsked) heading.focus({ preventScroll: true });
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

addEventListener("hashchange", () => follow(true));
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !byId("explanation").hidden) location.hash = "#/requests";
});
document.addEventListener("visibilitychange", poll);
for (const id of ["endpoints-text", "requests-troubled", "requests-paused"]) byId(id).addEventListener("input", show);
byId("requests-more").addEventListener("click", () => {
  showMore();
  show();
});
follow(false);
poll();
