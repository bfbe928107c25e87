// Asks the picker once a second while somebody looks, and shows what it said.

import { EVERY_MS, ask, goneWords, say } from "./asking.js";
import { byId } from "./dom.js";
import { endpointPage } from "./endpoint.js";
import { Samples, showEndpoints } from "./endpoints.js";
import { showConfiguration } from "./configuration.js";
import { showExplanation, showNoExplanation } from "./explanation.js";
import { isOver } from "./format.js";
import { showQueues } from "./queues.js";
import { LIMIT, isHeld, linkTo, showMore, showRequests } from "./requests.js";
import { showSummary } from "./summary.js";

const TITLE = document.title;
const DECISION = "#/decisions/";
const ENDPOINT = "#/endpoints/";
const NAMES = ["endpoints", "queues", "requests", "configuration"];

const samples = new Samples();
const latest = { endpoints: null, pool: null, queues: null, configuration: null, decisions: null, held: null };
let timer = null;
let asking = false;
let lastAnswer = null;
let rounds = 0;
let updateEndpoint = null; // of the endpoint that is looked at
let chosen = 0; // counts what was looked at

/** Ask for everything at once, and show each answer for itself; what went wrong, by its path. */
async function round() {
  const since = lastAnswer === null ? Infinity : (Date.now() - lastAnswer) / 1000;
  const questions = [
    [`endpoints?history=${samples.wanted(since)}`, takeEndpoints],
    [`decisions?limit=${LIMIT}`, ({ decisions }) => (latest.decisions = decisions)],
  ];
  if (rounds % 5 === 0) questions.push(["config", takeConfiguration]);
  const answers = questions.map(([path, take]) => ask(path).then(take));
  const settled = await Promise.allSettled(answers);
  const problems = settled.flatMap(({ status, reason }, index) =>
    status === "rejected" ? [[questions[index][0].split("?")[0], reason]] : [],
  );
  if (problems.length < questions.length) lastAnswer = Date.now();
  rounds += 1;
  return { problems, isSilent: problems.length === questions.length };
}

/** One answer has all numbers, of one moment; before the first sample there are no queues. */
function takeEndpoints({ about, endpoints, pool, history }) {
  samples.add(history);
  Object.assign(latest, { about, endpoints, pool, queues: history.last ? history.queues : null });
}

function takeConfiguration(configuration) {
  latest.configuration = configuration;
  showConfiguration(configuration);
}

function show() {
  const { endpoints, queues, decisions } = latest;
  if (endpoints && queues) showSummary(latest, samples);
  if (endpoints) showEndpoints(endpoints, samples);
  if (queues) showQueues(queues);
  if (!isHeld()) latest.held = null;
  else latest.held ??= decisions;
  if (decisions) showRequests(latest.held ?? decisions);
  updateEndpoint?.(latest, samples);
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
  const isEndpoint = hash.startsWith(ENDPOINT);
  byId("overview").hidden = isDecision || isEndpoint;
  byId("explanation").hidden = !isDecision && !isEndpoint;
  updateEndpoint = null;
  if (isDecision) {
    explain(decoded(hash.slice(DECISION.length)), wasAsked);
    return;
  }
  document.title = TITLE;
  chosen += 1;
  if (isEndpoint) {
    const key = decoded(hash.slice(ENDPOINT.length));
    document.title = `${key} · ${TITLE}`;
    updateEndpoint = endpointPage(key);
    updateEndpoint(latest, samples);
    if (wasAsked) byId("explanation-heading").focus();
    return;
  }
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
  if (event.key === "Escape" && !byId("explanation").hidden) location.hash = updateEndpoint ? "#/endpoints" : "#/requests";
});
byId("requests-text").addEventListener("keydown", ({ key, target }) => {
  if (key === "Enter" && target.value.trim()) location.hash = linkTo(target.value.trim());
});
document.addEventListener("visibilitychange", poll);
for (const id of ["endpoints-text", "requests-text", "requests-troubled", "requests-paused"]) byId(id).addEventListener("input", show);
byId("requests-more").addEventListener("click", () => {
  showMore();
  show();
});
follow(false);
poll();
