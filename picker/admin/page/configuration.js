// The configuration in use, and whence it came.

import { byId, el } from "./dom.js";
import { moment } from "./format.js";

let shown = "";

/** Show it; nothing is touched while it stays the same. */
export function showConfiguration(view) {
  const text = JSON.stringify(view);
  if (text === shown) return;
  shown = text;
  const body = byId("configuration-body");
  const open = new Set([...body.querySelectorAll("details[open]")].map((one) => one.id));
  body.replaceChildren(...parts(view));
  for (const id of open) byId(id)?.setAttribute("open", "");
}

function parts(view) {
  if (!view.effective && !view.source) return [el("p", { class: "hint" }, "Nothing is known of it.")];
  const since = view.loaded_unix_seconds ? `, in use since ${moment(view.loaded_unix_seconds)}` : "";
  return [
    el("p", { class: "hint" }, "From ", el("code", {}, view.source || "the built-in default"), since, "."),
    view.last_error && el("div", { class: "notice bad", role: "alert" },
      el("strong", {}, "✕ The file has changed and cannot be used. The one before it stays in use."),
      el("pre", { tabindex: "0", role: "region", "aria-label": "What is wrong with the file" }, view.last_error)),
    view.warnings.length > 0 && el("div", { class: "notice doubtful" },
      el("strong", {}, "! Warnings"),
      el("ul", {}, view.warnings.map((one) => el("li", {}, one)))),
    document_("configuration-effective", "In effect, with defaults", view.effective),
    document_("configuration-written", "As it was written", view.written),
  ].filter(Boolean);
}

function document_(id, title, text) {
  if (!text) return null;
  const content = el("pre", { tabindex: "0", role: "region", "aria-label": title }, text);
  return el("details", { id }, el("summary", {}, title), content);
}
