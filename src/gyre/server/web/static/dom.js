// Dom: elements, and numbers for people. Everything else on the page is built from these.
// Text enters the page as text nodes only, never as markup: a model may have written it.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, props, children) {
  for (const [key, value] of Object.entries(props || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "on") for (const [name, listener] of Object.entries(value)) node.addEventListener(name, listener);
    else if (key === "vars") for (const [name, item] of Object.entries(value)) node.style.setProperty(name, item);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export const el = (tag, props, ...children) => fill(document.createElement(tag), props, children);
export const svg = (tag, props, ...children) => fill(document.createElementNS(SVG, tag), props, children);
export const byId = (id) => document.getElementById(id);
export const button = (text, onClick, more = {}) => el("button", { type: "button", class: "btn", on: { click: onClick }, ...more }, text);
export const icon = (path) => svg("svg", { viewBox: "0 0 24 24", "aria-hidden": "true" }, svg("path", { d: path }));

export const count = (value) => Math.round(value).toLocaleString("en-US");
export const plural = (n, one, many = `${one}s`) => `${count(n)} ${n === 1 ? one : many}`;

export function seconds(value) {
  if (!Number.isFinite(value)) return "–";
  if (value < 0.0995) return `${Math.round(value * 1000)} ms`;
  if (value < 9.95) return `${value.toFixed(value < 1 ? 2 : 1)} s`;
  if (value < 89.5) return `${Math.round(value)} s`;
  return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}

export function rate(value) {
  if (!Number.isFinite(value)) return "–";
  return value < 9.95 ? value.toFixed(1) : count(value);
}

export function percent(value) {
  if (!Number.isFinite(value)) return "–";
  const shown = value * 100;
  if (shown > 0 && shown < 0.05) return "<0.1 %";
  return `${shown < 9.95 || (shown > 99 && shown < 100) ? shown.toFixed(1) : Math.round(shown)} %`;
}
