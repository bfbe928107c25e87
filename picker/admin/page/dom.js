// Makes and updates elements. Text only ever becomes text: much of it was chosen by clients.

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes; children are elements, or anything else as text. */
export function el(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** The same for a part of a drawing. */
export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat()) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

/** What stands under an id of the page. */
export function byId(id) {
  return document.getElementById(id);
}

/** Set a text only when it is another one, so that selections and screen readers are left alone. */
export function setText(element, text) {
  const wanted = String(text);
  if (element.textContent !== wanted) element.textContent = wanted;
}

/** The same for an attribute. */
export function setAttribute(element, name, value) {
  const wanted = String(value);
  if (element.getAttribute(name) !== wanted) element.setAttribute(name, wanted);
}

/**
 * Make the children of `parent` those of `items`, in their order. A child stays the same element
 * for as long as its key is there, so focus and selection survive. `make(item)` gives an object
 * with `element` and `update(item)`.
 */
export function keep(parent, items, keyOf, make) {
  const known = (parent.kept ??= new Map());
  const wanted = new Set(items.map(keyOf));
  for (const [key, part] of known) {
    if (!wanted.has(key)) {
      part.element.remove();
      known.delete(key);
    }
  }
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    let part = known.get(key);
    if (!part) known.set(key, (part = make(item)));
    if (part.element === place) place = place.nextElementSibling;
    else parent.insertBefore(part.element, place);
    part.update(item);
  }
}

/** Cells of a row that becomes a card on a narrow screen: `columns` are [label, class]. */
export function cells(columns) {
  return columns.map(([label, kind], index) => {
    const tag = index ? "td" : "th";
    const role = index ? "cell" : "rowheader";
    return el(tag, { role, scope: index ? null : "row", class: kind, "data-label": label });
  });
}

/** Leave columns out, by their order; rows are those that `keep` made, whose parts have `cells`. */
export function hideColumns(table, hidden) {
  const heads = [...table.tHead.rows[0].cells];
  const rows = [heads, ...[...table.tBodies[0].kept.values()].map((part) => part.cells)];
  for (const row of rows) row.forEach((cell, index) => (cell.hidden = hidden[index]));
}

/** Something too wide for a narrow screen, which then scrolls by itself; keys reach it too. */
export function scrolling(label, content) {
  return el("div", { class: "scrolling", role: "region", tabindex: "0", "aria-label": label }, content);
}
