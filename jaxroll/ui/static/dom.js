// Elements, requests and formats. Text from a run reaches the page only as text nodes and attributes set here, and
// without control characters and direction marks.
const MARKED = new Set(["title", "aria-label", "data-heading"]);

export function h(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, one] of Object.entries(value)) node.style.setProperty(key, one);
    else if (name === "value" || name === "checked" || name === "disabled" || name === "hidden") node[name] = value;
    else node.setAttribute(name, value === true ? "" : MARKED.has(name) ? shown(value) : String(value));
  }
  add(node, children);
  return node;
}

export function add(node, children) {
  for (const child of children.flat(3)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(shown(child)));
  }
}

export function fill(node, ...children) {
  node.replaceChildren();
  add(node, children);
  return node;
}

// Text of a model or a run: isolated, so that its direction changes nothing around it.
export const foreign = (text, attributes) => h("bdi", attributes, text);

const CONTROL = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;
export const shown = text => String(text ?? "").replace(CONTROL, c => c < " " ? String.fromCharCode(0x2400 + c.charCodeAt(0)) : "\u2423");

export class Refused extends Error {
  constructor(status, text) { super(text); this.status = status; }
}

export async function api(name, query = {}, signal) {
  const parts = new URLSearchParams();
  for (const [key, value] of Object.entries(query)) {
    for (const one of Array.isArray(value) ? value : [value]) if (one !== null && one !== undefined && one !== "") parts.append(key, one);
  }
  return answered(await fetch(`/api/${name}?${parts}`, { signal }));
}

export async function post(path, body) {
  return answered(await fetch(path, {
    method: "POST", headers: { "Content-Type": "application/json", "X-JaxRoll": "1" }, body: JSON.stringify(body),
  }));
}

async function answered(answer) {
  if (answer.status === 401) location.reload();
  const value = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Refused(answer.status, value.error || `the server answered ${answer.status}`);
  return value;
}

const DASH = "–";
export const known = value => typeof value === "number" && Number.isFinite(value);

export function number(value, digits = 3) {
  if (!known(value)) return DASH;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e7) return value.toLocaleString("en-US");
  if (size >= 1e15 || size < 1e-4) return value.toExponential(Math.max(0, digits - 1));
  if (size >= 1e6) return compact(value);
  return Number(value.toPrecision(Math.max(digits, Math.ceil(Math.log10(size + 1))))).toLocaleString("en-US", { maximumFractionDigits: 8 });
}

export function compact(value) {
  if (!known(value)) return DASH;
  for (const [limit, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= limit) return Number((value / limit).toPrecision(3)) + unit;
  }
  return String(Number(value.toPrecision(3)));
}

export const percent = (share, digits = 1) => known(share) ? `${(100 * share).toFixed(digits)} %` : DASH;

export function duration(seconds) {
  if (!known(seconds)) return DASH;
  const size = Math.abs(seconds);
  if (size < 60) return `${Number(seconds.toPrecision(3))} s`;
  if (size < 3600) return `${Math.floor(seconds / 60)} min ${String(Math.floor(seconds % 60)).padStart(2, "0")} s`;
  if (size < 172800) return `${Math.floor(seconds / 3600)} h ${String(Math.floor(seconds / 60 % 60)).padStart(2, "0")} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor(seconds / 3600 % 24)} h`;
}

export const ago = unix => known(unix) && unix > 0 ? `${duration(Math.max(0, Date.now() / 1000 - unix))} ago` : DASH;
export const moment = unix => known(unix) && unix > 0 ? new Date(1000 * unix).toLocaleString("sv-SE") : DASH;
export const clock = unix => known(unix) ? new Date(1000 * unix).toLocaleTimeString("sv-SE") : DASH;

export const chip = (text, kind) => h("span", { class: `chip ${kind || text}` }, text);
export const empty = text => h("p", { class: "muted empty" }, text);
export const card = (title, hint, ...children) =>
  h("section", { class: "card" }, title && h("h2", {}, title), hint && h("p", { class: "hint" }, hint), ...children);

// A table that becomes a list of cards on a narrow screen: every cell knows its heading.
export function table(headings, rows, { caption, right = [] } = {}) {
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", { class: "data" }, h("caption", { class: "unseen" }, caption),
      h("thead", {}, h("tr", {}, headings.map((text, i) => h("th", { scope: "col", class: right.includes(i) ? "right" : null }, text)))),
      h("tbody", {}, rows.map(cells => h("tr", {}, cells.map((cell, i) =>
        h("td", { "data-heading": headings[i], class: right.includes(i) ? "right" : null }, cell)))))));
}
