// Drawings: charts, curves and bars.

import { el, svg, setAttribute, setText } from "./dom.js";

const SAMPLES = 120;
const SPARK = { left: 0, right: 120, top: 2, bottom: 26 };
const CHART = { left: 52, right: 396, top: 8, bottom: 112 };
const SHARES = [0, 0.5, 1];

/** The parts of a curve, `M` wherever it begins anew after a gap; the newest value is at the right. */
function path(values, highest, box) {
  const step = (box.right - box.left) / (SAMPLES - 1);
  const left = box.right - (values.length - 1) * step;
  const parts = [];
  let drawn = false;
  values.forEach((value, index) => {
    if (value === null) {
      drawn = false;
      return;
    }
    const x = left + index * step;
    const y = heightOf(Math.min(value, highest) / highest, box);
    const next = values[index + 1];
    const alone = !drawn && (next === null || next === undefined);
    parts.push(`${drawn ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}${alone ? "h0.1" : ""}`);
    drawn = true;
  });
  return parts.join("");
}

function heightOf(share, box) {
  return box.bottom - share * (box.bottom - box.top);
}

/** The least of 1, 2, 5, 10 … (and a tenth of these …) that is not below a value. */
function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((each) => each * power >= value * 0.999) * power;
}

/**
 * Curves of the last two minutes, with axes. `lines` are [label, kind, field]; `update(series)`. Its
 * numbers are the newest, or those beneath the pointer.
 */
export function chart(title, lines, say, highest = null) {
  const { left, right, bottom } = CHART;
  const numbers = lines.map(() => el("b"));
  const when = el("span", { class: "detail" });
  const curves = lines.map(([, kind]) => svg("path", { class: `line ${kind}` }));
  const ticks = SHARES.map((share) => svg("text", { x: left - 6, y: heightOf(share, CHART) + 4, "text-anchor": "end" }));
  const floor = svg("path", { class: "floor", d: SHARES.map((share) => `M${left} ${heightOf(share, CHART)}H${right}`).join("") });
  const times = [["2 min ago", left, "start"], ["1 min", (left + right) / 2, "middle"], ["now", right, "end"]]
    .map(([text, x, anchor]) => svg("text", { x, y: bottom + 16, "text-anchor": anchor }, text));
  const cursor = svg("path", { class: "cursor" });
  const drawing = svg("svg", { viewBox: "0 0 400 132", role: "img" }, floor, ticks, times, curves, cursor);
  const legend = lines.map(([label, kind], index) =>
    el("span", {}, el("span", { class: `key ${kind}`, "aria-hidden": "true" }), `${label} `, numbers[index]));
  const element = el("figure", { class: "chart" }, el("figcaption", {}, el("strong", {}, title), when, legend), drawing);
  let values = lines.map(() => []);
  let ago = 0; // samples before the newest

  function tell() {
    values.forEach((each, index) => setText(numbers[index], say(each.at(-1 - ago))));
    setText(when, ago ? `${ago} s ago` : "");
    const x = right - (ago * (right - left)) / (SAMPLES - 1);
    setAttribute(cursor, "d", ago ? `M${x.toFixed(1)} ${CHART.top}V${bottom}` : "");
  }
  drawing.addEventListener("pointermove", ({ clientX }) => {
    const { x, width } = drawing.getBoundingClientRect();
    const share = (right - ((clientX - x) / width) * 400) / (right - left);
    ago = Math.max(0, Math.min(SAMPLES - 1, Math.round(share * (SAMPLES - 1))));
    tell();
  });
  drawing.addEventListener("pointerleave", () => {
    ago = 0;
    tell();
  });
  function update(series) {
    values = lines.map(([, , field]) => series?.[field] ?? []);
    const known = values.flat().filter((value) => value !== null);
    const most = Math.max(0, ...known);
    const top = highest ?? (most ? nice(most) : 1);
    SHARES.forEach((share, index) => setText(ticks[index], say(share * top)));
    curves.forEach((curve, index) => setAttribute(curve, "d", path(values[index], top, CHART)));
    const said = known.length ? `at most ${say(most)}` : "nothing known";
    setAttribute(drawing, "aria-label", `${title} in the last two minutes: ${said}`);
    tell();
  }
  return { element, update };
}

/** A number above a curve of its last two minutes. `update(text, values, highest, say)`. */
export function sparkline(label, kind) {
  const number = el("span", { class: "now" });
  const line = svg("path", { class: `line ${kind}` });
  const floor = svg("path", { class: "floor", d: `M0 ${SPARK.bottom}H${SPARK.right}` });
  const drawing = svg(
    "svg",
    { class: `spark ${kind}`, viewBox: "0 0 120 28", preserveAspectRatio: "none", role: "img" },
    floor,
    line,
  );
  const element = el("span", { class: "measure" }, number, drawing);
  function update(text, values, highest, say) {
    setText(number, text);
    setAttribute(line, "d", path(values, highest, SPARK));
    const known = values.filter((value) => value !== null);
    const most = known.length ? `at most ${say(Math.max(...known))}` : "nothing known";
    setAttribute(drawing, "aria-label", `${label} in the last two minutes: ${most}`);
  }
  return { element, update };
}

/** A bar that is full at 1; it repeats a number that stands beside it. */
export function bar(kind = "", colour = "") {
  const fill = el("span", { class: `fill ${colour}` });
  const element = el("span", { class: `bar ${kind}`, "aria-hidden": "true" }, fill);
  return { element, update: (share) => (fill.style.width = `${limited(share) * 100}%`) };
}

/** Several shares beside each other in one bar. */
export function stackedBar(shares) {
  const element = el("span", { class: "bar stacked", "aria-hidden": "true" });
  shares.forEach((share, index) => {
    const fill = el("span", { class: `fill series-${index % 7}` });
    fill.style.width = `${limited(share) * 100}%`;
    element.append(fill);
  });
  return element;
}

/** A symbol and a word in the colour of their kind. */
export function badge() {
  const symbol = el("span", { class: "symbol", "aria-hidden": "true" });
  const word = el("span", { class: "word" });
  const element = el("span", { class: "badge" }, symbol, word);
  function update([kind, sign, text]) {
    setAttribute(element, "data-kind", kind);
    setText(symbol, sign);
    setText(word, text);
  }
  return { element, update };
}

function limited(share) {
  return Number.isFinite(share) ? Math.min(1, Math.max(0, share)) : 0;
}
