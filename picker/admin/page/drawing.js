// Small drawings: curves and bars.

import { el, svg, setAttribute, setText } from "./dom.js";

const WIDTH = 120;
const HEIGHT = 28;
const EDGE = 2;

/** The parts of a curve, `M` wherever it begins anew after a gap; the newest value is at the right. */
export function path(values, highest, samples = WIDTH) {
  const step = WIDTH / (samples - 1);
  const left = WIDTH - (values.length - 1) * step;
  const parts = [];
  let drawn = false;
  values.forEach((value, index) => {
    if (value === null) {
      drawn = false;
      return;
    }
    const x = left + index * step;
    const y = HEIGHT - EDGE - (Math.min(value, highest) / highest) * (HEIGHT - 2 * EDGE);
    const next = values[index + 1];
    const alone = !drawn && (next === null || next === undefined);
    parts.push(`${drawn ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}${alone ? "h0.1" : ""}`);
    drawn = true;
  });
  return parts.join("");
}

/** A number above a curve of its last two minutes. `update(text, values, highest, say)`. */
export function sparkline(label, kind) {
  const number = el("span", { class: "now" });
  const line = svg("path", { class: "line" });
  const floor = svg("path", { class: "floor", d: `M0 ${HEIGHT - EDGE}H${WIDTH}` });
  const drawing = svg(
    "svg",
    { class: `spark ${kind}`, viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" },
    floor,
    line,
  );
  const element = el("span", { class: "measure" }, number, drawing);
  function update(text, values, highest, say) {
    setText(number, text);
    setAttribute(line, "d", path(values, highest));
    const known = values.filter((value) => value !== null);
    const most = known.length ? `at most ${say(Math.max(...known))}` : "nothing known";
    setAttribute(drawing, "aria-label", `${label} in the last two minutes: ${most}`);
  }
  return { element, update };
}

/** A bar that is full at 1; it repeats a number that stands beside it. */
export function bar(kind = "") {
  const fill = el("span", { class: "fill" });
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
