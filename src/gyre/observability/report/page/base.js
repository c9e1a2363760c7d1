// Base: data, elements, numbers for people, colors. Everything else on the page is built from these.
// Text of the run enters the page as text nodes only, never as markup.

const DATA = JSON.parse(document.getElementById("data").textContent);
const RUN = DATA.run;
const SVG = "http://www.w3.org/2000/svg";

function fill(node, props, children) {
  for (const [key, value] of Object.entries(props || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "on") for (const [name, listener] of Object.entries(value)) node.addEventListener(name, listener);
    else if (key === "style") for (const [name, item] of Object.entries(value)) node.style.setProperty(name, item);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

const el = (tag, props, ...children) => fill(document.createElement(tag), props, children);
const svg = (tag, props, ...children) => fill(document.createElementNS(SVG, tag), props, children);
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
const sum = (values) => values.reduce((total, value) => total + value, 0);
const words = (name) => String(name).replaceAll("_", " ");
const announce = (text) => { document.getElementById("live").textContent = text; };

// Numbers -----------------------------------------------------------------------------------------------------------

function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e6) return trim((value / 1e6).toFixed(2)) + " M";
  if (size >= 1e4) return trim((value / 1e3).toFixed(1)) + " k";
  if (size >= 1000) return count(Math.round(value)).replace("-", "−");
  if (size >= 100) return value.toFixed(0);
  if (size >= 10) return trim(value.toFixed(1));
  if (size >= 1) return trim(value.toFixed(2));
  if (size >= 0.001) return trim(value.toPrecision(3));
  const [mantissa, exponent] = value.toExponential(1).split("e");
  return `${trim(mantissa)}e${Number(exponent)}`.replaceAll("-", "−");
}
const trim = (text) => (text.includes(".") ? text.replace(/\.?0+$/, "") : text).replace("-", "−");
// A tick is a round number already: all its digits count.
const tickText = (value) => (Math.abs(value) < 1e3 && Math.abs(value) >= 0.001 ? trim(String(Number(value.toPrecision(6)))) : number(value));
function percent(value, digits = 1) {
  if (!Number.isFinite(value)) return "–";
  const least = 10 ** -digits;
  return value > 0 && value * 100 < least / 2 ? `<${least.toFixed(digits)} %` : `${(value * 100).toFixed(digits).replace("-", "−")} %`;
}
const plural = (n, one, many) => `${count(n)} ${n === 1 ? one : many}`;
const count = (value) => value.toLocaleString("en-US");
const shown = (value, unit) => (unit === "fraction" ? (value === null || value === undefined ? "–" : percent(value)) : number(value));

function seconds(value) {
  if (value === 0) return "0 s";
  if (value < 0.0995) return `${Math.round(value * 1000)} ms`;
  if (value < 9.95) return `${value.toFixed(value < 1 ? 2 : 1)} s`;
  if (value < 59.5) return `${Math.round(value)} s`;
  const total = Math.round(value);
  const hours = Math.floor(total / 3600);
  const minutes = Math.floor((total % 3600) / 60);
  const rest = String(total % 60).padStart(2, "0");
  return hours ? `${hours} h ${String(minutes).padStart(2, "0")} min` : `${minutes} min ${rest} s`;
}

// A moment of the run, as fine as the steps between such moments are.
function moment(value, step) {
  const digits = step >= 1 ? 0 : step >= 0.1 ? 1 : step >= 0.01 ? 2 : 3;
  if (value < 60) return `${value.toFixed(digits)} s`;
  const rest = (value % 60).toFixed(digits).padStart(digits ? digits + 3 : 2, "0");
  const minutes = Math.floor(value / 60);
  return minutes < 60 ? `${minutes}:${rest}` : `${Math.floor(minutes / 60)}:${String(minutes % 60).padStart(2, "0")}:${rest}`;
}

function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  let size = value;
  while (size >= 1024 && at < units.length - 1) { size /= 1024; at += 1; }
  return `${at === 0 ? size : size >= 100 ? size.toFixed(0) : size.toFixed(1)} ${units[at]}`;
}

// Round numbers that cut [low, high] into about `parts`.
function ticks(low, high, parts) {
  if (!(high > low)) return [low];
  const rough = (high - low) / Math.max(1, parts);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at += 1) found.push(Number((at * step).toPrecision(12)));
  return found;
}

function byteTicks(high, parts) {
  const unit = 1024 ** Math.max(0, Math.floor(Math.log(Math.max(1, high)) / Math.log(1024)));
  return ticks(0, high / unit, parts).map((value) => value * unit);
}

// Colors -----------------------------------------------------------------------------------------------------------

const PHASE_COLORS = { rollout: 1, score: 2, train: 3, handover: 4, evaluate: 5, snapshot: 6 };
const SERIES_COLORS = [3, 4, 1, 2, 5, 7, 6, 8];
const OWNER_COLORS = { engine: 1, actor: 3, critic: 4, reference: 2, reward: 5 };
const cssColor = (index) => `var(--c${index})`;
const seriesColor = (at) => cssColor(SERIES_COLORS[at % SERIES_COLORS.length]);

const phaseNumbers = new Map();
function phaseColor(phase) {
  const parent = phase.split("/")[0];
  if (parent === "idle") return "var(--line)";
  if (PHASE_COLORS[parent]) return cssColor(PHASE_COLORS[parent]);
  if (!phaseNumbers.has(parent)) phaseNumbers.set(parent, [7, 8, 6, 5][phaseNumbers.size % 4]);
  return cssColor(phaseNumbers.get(parent));
}

// Owners of one part of the system share a hue and differ in strength.
function ownerColors(owners) {
  const seen = new Map();
  const spare = [7, 8, 6];
  return owners.map((owner) => {
    const part = owner.split(".")[0];
    if (!seen.has(part)) seen.set(part, { hue: OWNER_COLORS[part] || spare[seen.size % spare.length], used: 0 });
    const entry = seen.get(part);
    const [strength, other] = [[100, "surface"], [62, "surface"], [58, "text"], [38, "surface"]][Math.min(3, entry.used)];
    entry.used += 1;
    return `color-mix(in oklab, ${cssColor(entry.hue)} ${strength}%, var(--${other}))`;
  });
}

// What a canvas needs: the color that a CSS expression means under the present theme.
function resolve(color) {
  const probe = document.getElementById("live");
  probe.style.color = color;
  const value = getComputedStyle(probe).color;
  probe.style.color = "";
  return value;
}

// Width of a text in a plot. Its font is the page's at 11 px.
const ruler = document.createElement("canvas").getContext("2d");
function textWidth(text) {
  ruler.font = `11px ${getComputedStyle(document.body).fontFamily}`;
  return ruler.measureText(text).width;
}

const dot = (color, round) => el("span", { class: round ? "dot round" : "dot", style: { "--dot": color } });

// Stages and events -------------------------------------------------------------------------------------------------

function stageAt(x) {
  const found = RUN.stages.filter((stage) => stage.steps > 0 && x >= stage.firstX - 0.5 && x <= stage.lastX + 0.5);
  return found.length ? found[found.length - 1] : null;
}

const stageStep = (x) => Math.round(x - (stageAt(x) || { offset: 0 }).offset);

function stepName(x) {
  const stage = stageAt(x);
  if (!stage) return `step ${number(x)}`;
  const step = count(Math.round(x - stage.offset));
  return RUN.stages.length > 1 ? `${words(stage.name)} · step ${step}` : `step ${step}`;
}

// The page's one shared state. A change is told to whoever listens for it.
const view = { axis: "step", stage: null, domain: null, smooth: 0.6, hover: null };
const listeners = {};
const on = (name, listener) => { (listeners[name] ||= []).push(listener); };
const tell = (name) => { for (const listener of listeners[name] || []) listener(); };

// Calls `draw(width)` now and whenever the width of `node` or the theme changes.
function drawn(node, draw) {
  let last = 0;
  const redraw = () => { if (last > 0) draw(last); };
  new ResizeObserver((entries) => {
    const width = Math.floor(entries[0].contentRect.width);
    if (width > 80 && width !== last) { last = width; draw(width); }
  }).observe(node);
  on("theme", redraw);
  return redraw;
}

function segmented(label, options, get, set) {
  const buttons = options.map(([value, text]) =>
    el("button", { type: "button", on: { click: () => { set(value); refresh(); } } }, text));
  const refresh = () => options.forEach(([value], at) => buttons[at].setAttribute("aria-pressed", String(get() === value)));
  refresh();
  return el("div", { class: "seg", role: "group", "aria-label": label }, buttons);
}

function section(id, title, lead, ...controls) {
  const head = el("div", { class: "section-head" },
    el("div", {}, el("h2", { id: `${id}-title` }, title), lead ? el("p", {}, lead) : null),
    controls.length ? el("div", { class: "controls" }, controls) : null);
  const node = el("section", { id, "aria-labelledby": `${id}-title` }, head);
  document.getElementById("main").append(node);
  return node;
}

const note = (text) => el("p", { class: "note" }, text);
