// What the page draws: the last two minutes, bars and badges.

import { chart } from "./chart.js";
import { el, svg, setAttribute, setText } from "./dom.js";

const SAMPLES = 120;
const SPARK = { left: 0, right: 120, top: 2, bottom: 26 };
const AGO = { unit: "ago", from: 1 - SAMPLES, to: 0, ticks: [[1 - SAMPLES, "2 min ago"], [-60, "1 min"], [0, "now"]] };

/** The parts of a small curve, `M` wherever it begins anew after a gap; the newest value is at the right. */
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

/**
 * Curves of the last two minutes. `lines` are [label, kind, field, isRare], of which a rare one is
 * left out while nothing is known of it; `unit` is that of a chart's y axis, `lead` an element to
 * stand first. `update(series)`. Numbers are the newest, or those beneath the pointer.
 */
export function timeline(title, lines, say, { unit, to, detail, lead } = {}) {
  const axis = { unit, to, label: detail };
  const drawn = chart(title, lines.map(([label, kind]) => ({ label, kind })), { x: AGO, y: axis, when: (x) => `${-x} s ago` });
  if (lead) drawn.element.querySelector("figcaption").after(lead);
  function update(series) {
    const values = lines.map(([, , field]) => series?.[field] ?? []);
    const known = values.flat().filter((value) => value !== null);
    drawn.update({
      series: values.map((each) => each.map((value, index) => [index + 1 - each.length, value])),
      rest: values.map((each) => say(each.at(-1))),
      hides: values.map((each, index) => Boolean(lines[index][3]) && each.every((value) => value === null)),
      words: `in the last two minutes ${known.length ? `at most ${say(Math.max(...known))}` : "nothing known"}`,
    });
  }
  return { element: drawn.element, update };
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
