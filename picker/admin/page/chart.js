// The charts of the page and of the reports that `bench` and `simulate` write.
//
// Theory of operation. A chart is drawn in the pixels that it has, and anew when its width changes,
// so its text is as large on a phone as on a desk. Margins are as wide as the labels need. Ticks are
// 1, 2 or 5 times a power of ten, whole for counts, as many as fit; the labels of marks go into rows
// above the plot, each into the first that has room. Legends stand below, so that the plots of one
// row of charts line up.

import { el, svg, setText } from "./dom.js";
import { count, number, percent, rate, seconds, secondsUpTo } from "./format.js";

const FONT = "12px"; // as style.css has it
const LINE = 15;
const GAP = 22; // between two labels
const FAR = 2; // a mark further out than this many times the highest value does not stretch the axis
const TICKS = { seconds: secondsUpTo, percent: () => percent };
const SAID = { seconds, percent, rate, count };

/** Round numbers from 0 to `high` or just above it, in at most `most` steps. */
export function roundTicks(high, most, isWhole = false) {
  if (!(high > 0)) return [0, 1];
  const least = high / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(least));
  const round = [1, 2, 5, 10].find((each) => each * power >= least * 0.9999) * power;
  const step = isWhole ? Math.max(1, round) : round;
  const steps = Math.ceil(high / step - 1e-4);
  return Array.from({ length: steps + 1 }, (_, index) => Number((index * step).toPrecision(9)));
}

/** Round numbers of a logarithmic axis between two values, at most `most`. */
export function logTicks(low, high, most) {
  for (const parts of [[1, 2, 5], [1, 3], [1]]) {
    const ticks = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) {
      for (const part of parts) ticks.push(Number((part * 10 ** power).toPrecision(3)));
    }
    const inside = ticks.filter((one) => one >= low * 0.999 && one <= high * 1.001);
    if (inside.length <= most || parts.length === 1) return inside.filter((_, index) => index % Math.ceil(inside.length / most) === 0);
  }
}

let ruler = null;

/** How many pixels a text is wide. */
function wide(text) {
  if (!ruler) {
    ruler = document.createElement("canvas").getContext("2d");
    ruler.font = `${FONT} ${getComputedStyle(document.body).fontFamily}`;
  }
  return ruler.measureText(text).width;
}

/** What an axis shows: its ends, its ticks as [value, text], and where a value is from 0 to 1. */
function scale(axis, values, marks, most) {
  let high = axis.to ?? Math.max(0, ...values);
  const low = axis.from ?? 0;
  for (const mark of marks) if (mark.at <= FAR * high) high = Math.max(high, mark.at);
  if (axis.ticks) return { ticks: axis.ticks, high, low, place: (value) => (value - low) / (high - low) };
  if (axis.log) {
    const floor = Math.min(...values.filter((value) => value > 0), high / 10);
    const place = (value) => Math.log(Math.max(value, floor) / floor) / Math.log(high / floor);
    const ticks = logTicks(floor, high, most);
    return { ticks: ticks.map((one) => [one, TICKS.seconds(one)(one)]), high, low: floor, place };
  }
  const round = roundTicks(high, most, axis.unit === "count");
  if (!axis.isTight || !high) high = round.at(-1);
  const shown = round.filter((value) => value <= high * 1.0001);
  const say = TICKS[axis.unit]?.(high) ?? number;
  return { ticks: shown.map((value) => [value, say(value)]), high, low, place: (value) => value / high };
}

/** The parts of a curve, `M` wherever it begins anew after a gap. */
function path(points, place, isStepped) {
  const parts = [];
  let before = null;
  points.forEach((point, index) => {
    if (point === null || point[1] === null) {
      before = null;
      return;
    }
    const [x, y] = place(point);
    const next = points[index + 1];
    const isAlone = before === null && (!next || next[1] === null);
    const step = isStepped && before !== null ? `H${x.toFixed(1)}` : "";
    parts.push(`${step}${before === null ? "M" : "L"}${x.toFixed(1)} ${y.toFixed(1)}${isAlone ? "h0.1" : ""}`);
    before = point;
  });
  return parts.join("");
}

/** Marks of the x axis with the row and the side of the line that each label gets. */
function arranged(marks, left, right, x) {
  const ends = [];
  return marks.map((mark) => {
    const isBeyond = x.place(mark.at) > 1.0001;
    const text = isBeyond ? `${mark.label} →` : mark.label;
    const at = isBeyond ? right : left + (right - left) * x.place(mark.at);
    const isLeft = isBeyond || at + 4 + wide(text) > right;
    const begin = isLeft ? at - 4 - wide(text) : at + 4;
    let row = ends.findIndex((end) => end.every(([from, to]) => begin > to + 6 || begin + wide(text) < from - 6));
    if (row < 0) row = ends.push([]) - 1;
    ends[row].push([begin, begin + wide(text)]);
    return { ...mark, text, at, isBeyond, isLeft, row };
  });
}

/**
 * A chart. `lines` are {label, kind, form}, where `form` is "line", "steps" or "dots"; axes are
 * {unit, label, from, to, ticks, log, isTight}, with a `unit` of seconds, percent, rate or count.
 * `update({series, knots, marks, rest, words, hides})` draws points [x, y] (y null: unknown) of each line,
 * with [x, y, words] as knots on it; marks are {axis, at, label, kind}, of the kind "limit" or, on
 * the y axis, "level". Beside a label of the legend stands `rest`, or, beneath the pointer, the
 * line's value there; `when` says a value of x in words, `words` what there is to see, and `hides`
 * whose label to leave out.
 */
export function chart(title, lines, { x, y, height = 150, when = null }) {
  const drawing = svg("svg", { class: "plot", role: "img", height });
  const numbers = lines.map(() => el("b"));
  const note = el("span", { class: "detail" });
  const keys = lines.map(({ label, kind }, index) =>
    el("span", {}, el("span", { class: `key ${kind}`, "aria-hidden": "true" }), `${label} `, numbers[index]));
  const element = el("figure", { class: "chart" }, el("figcaption", {}, el("strong", {}, title), note), drawing, el("p", { class: "legend" }, keys));
  let data = { series: lines.map(() => []), knots: [], marks: [], rest: [], words: "" };
  let width = 0;
  let box = null; // of the last drawing
  let pointed = null; // the value of x beneath the pointer

  function drawn() {
    const of = (axis) => data.marks.filter((mark) => mark.axis === axis);
    const points = data.series.flat().filter((point) => point !== null && point[1] !== null);
    const sy = scale(y, points.map((point) => point[1]), of("y"), Math.max(2, Math.floor(height / 45)));
    const left = 8 + Math.max(...sy.ticks.map(([, text]) => wide(text)));
    const margin = Math.max(0, ...of("y").filter(isLevel).map((mark) => 4 + wide(mark.label)));
    const right = width - 8 - margin;
    const values = points.map((point) => point[0]);
    const roughly = scale(x, values, of("x"), 4);
    const longest = Math.max(...roughly.ticks.map(([, text]) => wide(text)));
    const sx = scale(x, values, of("x"), Math.max(2, Math.floor((right - left) / (longest + GAP))));
    const marks = arranged(of("x"), left, right, sx);
    const top = 9 + LINE * (marks.length && 1 + Math.max(...marks.map((mark) => mark.row)));
    const bottom = height - 21;
    box = { left, right, top, bottom, sx };
    const across = (value) => left + (right - left) * sx.place(value);
    const up = (value) => bottom - (bottom - top) * Math.min(1, sy.place(value));
    return [
      ...sy.ticks.flatMap(([value, text]) => [
        svg("path", { class: "floor", d: `M${left} ${up(value)}H${right}` }),
        svg("text", { x: left - 6, y: up(value) + 4, "text-anchor": "end" }, text),
      ]),
      ...sx.ticks.map(([value, text]) => {
        const half = wide(text) / 2;
        const at = Math.min(Math.max(across(value), half + 1), width - half - 1);
        return svg("text", { x: at, y: bottom + 16, "text-anchor": "middle" }, text);
      }),
      ...levels(of("y"), up, sy, left, right),
      ...marks.flatMap((mark) => upright(mark, top, bottom)),
      ...lines.map((line, index) => curve(line, data.series[index], (point) => [across(point[0]), up(point[1])])),
      ...(data.knots ?? []).flatMap((knots, index) => knots.map(([vx, vy, words]) =>
        svg("circle", { class: `knot ${lines[index].kind}`, cx: across(vx).toFixed(1), cy: up(vy).toFixed(1), r: 3 }, svg("title", {}, words)))),
      pointed === null ? null : svg("path", { class: "cursor", d: `M${across(pointed).toFixed(1)} ${top}V${bottom}` }),
    ];
  }

  function redraw() {
    if (width <= 0) return;
    drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
    drawing.replaceChildren(...drawn().filter(Boolean));
    tell();
  }

  function tell() {
    lines.forEach(({ form }, index) => {
      const near = pointed === null || form === "dots" ? null : nearest(data.series[index], pointed);
      setText(numbers[index], near === null ? data.rest[index] ?? "" : SAID[y.unit](near[1]));
    });
    setText(note, pointed === null || !when ? y.label ?? "" : when(pointed));
  }

  drawing.addEventListener("pointermove", ({ clientX }) => {
    if (!box || !when) return;
    const { left, right, sx } = box;
    const along = (clientX - drawing.getBoundingClientRect().x - left) / (right - left);
    const share = Math.min(1, Math.max(0, along));
    const value = x.log ? sx.low * (sx.high / sx.low) ** share : sx.low + share * (sx.high - sx.low);
    pointed = x.unit === "ago" ? Math.round(value) : value;
    redraw();
  });
  drawing.addEventListener("pointerleave", () => {
    pointed = null;
    redraw();
  });
  new ResizeObserver(([{ contentRect }]) => {
    if (Math.round(contentRect.width) === width) return;
    width = Math.round(contentRect.width);
    redraw();
  }).observe(drawing);

  function update(given) {
    data = { ...data, ...given };
    keys.forEach((key, index) => (key.hidden = given.hides?.[index] ?? false));
    drawing.setAttribute("aria-label", `${title}${data.words ? `: ${data.words}` : ""}`);
    redraw();
  }
  return { element, update };
}

function nearest(points, at) {
  let best = null;
  for (const point of points) {
    if (point !== null && (best === null || Math.abs(point[0] - at) < Math.abs(best[0] - at))) best = point;
  }
  return best;
}

function isLevel(mark) {
  return mark.kind === "level";
}

/** Marks of the y axis. A level has its label beside the plot; those of limits stand in it, at the right, side by side where they are close. */
function levels(marks, up, sy, left, right) {
  const placed = [];
  return marks.flatMap((mark) => {
    const isBeyond = sy.place(mark.at) > 1.0001;
    const line = isBeyond ? null : svg("path", { class: `mark ${mark.kind}`, d: `M${left} ${up(mark.at)}H${right}` });
    if (isLevel(mark)) return [line, svg("text", { class: "mark-label", x: right + 5, y: up(mark.at) + 4 }, mark.label)];
    const text = isBeyond ? `${mark.label} ↑` : mark.label;
    const y = isBeyond ? up(sy.high) + 12 : Math.max(up(sy.high) + 12, up(mark.at) - 4);
    const x = Math.min(right - 2, ...placed.filter((one) => Math.abs(one.y - y) < LINE).map((one) => one.begin - 10));
    placed.push({ y, begin: x - wide(text) });
    return [line, svg("text", { class: `mark-label ${mark.kind}`, x, y, "text-anchor": "end" }, text)];
  });
}

function upright(mark, top, bottom) {
  const y = top - 4 - LINE * mark.row;
  const line = mark.isBeyond ? null : svg("path", { class: `mark ${mark.kind}`, d: `M${mark.at.toFixed(1)} ${y - 9}V${bottom}` });
  const x = mark.at + (mark.isLeft ? -4 : 4);
  return [line, svg("text", { class: `mark-label ${mark.kind}`, x, y, "text-anchor": mark.isLeft ? "end" : "start" }, mark.text)];
}

function curve({ kind, form }, points, place) {
  if (form !== "dots") return svg("path", { class: `line ${kind}`, d: path(points, place, form === "steps") });
  return svg("g", { class: `dots ${kind}` }, points.map((point) => {
    const [cx, cy] = place(point);
    return svg("circle", { cx: cx.toFixed(1), cy: cy.toFixed(1), r: 1.8 });
  }));
}
