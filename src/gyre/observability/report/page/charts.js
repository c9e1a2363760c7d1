// Charts: a line chart over steps or time. All line charts share one cursor and one zoom.

const PLOT_TOP = 32; // room for the name of the upward axis, and of a stage below it
const PLOT_BOTTOM = 38; // room for ticks, and the name of the other axis below them
const FEWEST_JOINED = 3; // evaluations that a line is drawn through

// The names of both axes, with their units, over the top left corner and under the bottom right one.
function axisNames(yName, xName, { left, right, bottom }) {
  return [
    svg("text", { class: "axis-name", x: 0, y: 11 }, fitText(yName, right)),
    svg("text", { class: "axis-name", x: right, y: bottom + 32, "text-anchor": "end" }, fitText(xName, right - left)),
  ];
}

function fitText(text, room) {
  if (textWidth(text) <= room) return text;
  let cut = text;
  while (cut.length > 1 && textWidth(`${cut}…`) > room) cut = cut.slice(0, -1);
  return `${cut}…`;
}

// Straight lines fitted to the neighbors on both sides, twice: a mean where both sides are there, and no pull towards
// the inside where a stage begins or ends. `amount` from 0 to 1 sets the reach as a share of the stage, so that it means
// the same for short and long runs.
function smoothed(values, xs, amount) {
  const result = values.slice();
  let from = 0;
  while (from < values.length) {
    const stage = stageAt(xs[from]);
    let to = from;
    while (to < values.length && stageAt(xs[to]) === stage) to += 1;
    const reach = Math.round(amount ** 2 * (to - from) * 0.09);
    const part = fitNeighbors(fitNeighbors(values.slice(from, to), reach), reach);
    part.forEach((value, at) => { result[from + at] = value; });
    from = to;
  }
  return result;
}

function fitNeighbors(values, reach) {
  // Running sums of 1, x, x², y, xy over the values that are there.
  const sums = [[0, 0, 0, 0, 0]];
  values.forEach((y, x) => { const last = sums[x]; sums.push(y === null ? last : [last[0] + 1, last[1] + x, last[2] + x * x, last[3] + y, last[4] + x * y]); });
  return values.map((value, at) => {
    if (value === null) return null;
    const [low, high] = [sums[Math.max(0, at - reach)], sums[Math.min(values.length, at + reach + 1)]];
    const [n, x, xx, y, xy] = high.map((total, part) => total - low[part]);
    const spread = n * xx - x * x;
    const slope = spread > 0 ? (n * xy - x * y) / spread : 0;
    return y / n + slope * (at - x / n);
  });
}

function stageRange(stage) {
  return view.axis === "step" ? [stage.firstX, stage.lastX] : [stage.start, stage.end];
}

function nearest(values, target) {
  let low = 0;
  let high = values.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (values[middle] <= target) low = middle; else high = middle;
  }
  return Math.abs(values[high] - target) < Math.abs(values[low] - target) ? high : low;
}

class LineChart {
  constructor(panel, series, stage) {
    this.panel = panel;
    this.stage = stage;
    this.lines = series.map((line, at) => ({ ...line, color: seriesColor(at) }));
    this.wide = false;
    this.height = 196;
    this.value = el("div", { class: "chart-value" });
    this.legend = el("div", { class: "legend" });
    this.plot = svg("svg", { class: "plot", height: this.height, tabindex: 0, role: "img" });
    this.node = el("figure", { class: "card chart", style: { margin: 0 } },
      el("figcaption", { class: "chart-head" }, this.title(), this.value), this.helpText, this.legend, this.plot);
    this.wire();
    this.redraw = drawn(this.plot, (width) => this.draw(width));
    on("view", this.redraw);
    on("hover", () => this.showCursor());
  }

  setWide(wide) {
    if (wide === this.wide) return;
    this.wide = wide;
    this.height = wide ? 248 : 196;
    this.node.classList.toggle("wide", wide);
    this.plot.setAttribute("height", this.height);
    this.redraw();
  }

  title() {
    const unit = this.panel.unit && this.panel.unit !== "fraction" ? el("small", {}, ` ${this.panel.unit}`) : null;
    const where = this.stage ? el("small", {}, ` ${words(this.stage.name)}`) : null;
    if (!this.panel.help) { this.helpText = null; return el("div", { class: "chart-title" }, this.panel.title, where, unit); }
    this.helpText = el("p", { class: "help-text", hidden: true }, this.panel.help);
    const toggle = el("button", { class: "help", type: "button", "aria-expanded": "false", "aria-label": `What is ${this.panel.title}?`,
      on: { click: () => { this.helpText.hidden = !this.helpText.hidden; toggle.setAttribute("aria-expanded", String(!this.helpText.hidden)); } } }, "?");
    return el("div", { class: "chart-title" }, this.panel.title, where, unit, toggle);
  }

  xs(line) { return view.axis === "step" ? line.x : line.t; }

  domain() {
    const all = this.lines.flatMap((line) => { const xs = this.xs(line); return xs.length ? [xs[0], xs[xs.length - 1]] : []; });
    let [low, high] = [Math.min(...all), Math.max(...all)];
    if (view.domain) [low, high] = view.domain;
    else if (view.stage) {
      const stage = RUN.stages.find((known) => known.name === view.stage);
      const range = stageRange(stage);
      [low, high] = [Math.max(low, range[0] - (view.axis === "step" ? 1 : 0)), Math.min(high, range[1])];
    }
    return high > low ? [low, high] : [low - 1, low + 1];
  }

  range([low, high]) {
    const found = [];
    for (const line of this.lines) {
      const xs = this.xs(line);
      const smooth = this.isSmooth(line) && view.domain ? smoothed(line.v, line.x, view.smooth) : line.v;
      line.v.forEach((value, at) => {
        if (value === null || xs[at] < low - 1e-9 || xs[at] > high + 1e-9) return;
        found.push(smooth[at]);
        found.push(line.lo && line.lo[at] !== null ? line.lo[at] : value, line.hi && line.hi[at] !== null ? line.hi[at] : value);
      });
    }
    if (!found.length) return [0, 1];
    let [bottom, top] = [Infinity, -Infinity];
    for (const value of found) { bottom = Math.min(bottom, value); top = Math.max(top, value); }
    if (this.panel.unit === "fraction" && top > 0.5 && bottom >= 0 && top <= 1) return [0, 1];
    if (bottom === 0 && top === 0) return [0, 1];
    if (bottom > 0 && bottom < 0.6 * top) bottom = 0;
    if (bottom === top) { const pad = Math.abs(top) * 0.1 || 1; return [bottom - pad, top + pad]; }
    const pad = (top - bottom) * 0.06;
    return [bottom === 0 ? 0 : bottom - pad, top + pad];
  }

  draw(width) {
    const domain = this.domain();
    const range = this.range(domain);
    const yTicks = ticks(range[0], range[1], this.wide ? 5 : 4);
    const labels = yTicks.map((value) => (this.panel.unit === "fraction" ? percent(value, value * 100 % 1 ? 1 : 0) : tickText(value)));
    const left = 10 + Math.max(...labels.map(textWidth));
    const [right, bottom] = [width - 8, this.height - PLOT_BOTTOM];
    this.sx = (value) => left + ((value - domain[0]) / (domain[1] - domain[0])) * (right - left);
    this.sy = (value) => bottom - ((value - range[0]) / (range[1] - range[0])) * (bottom - PLOT_TOP);
    this.inverse = (px) => domain[0] + ((px - left) / (right - left)) * (domain[1] - domain[0]);
    this.frame = { left, right, top: PLOT_TOP, bottom, domain };
    this.plot.setAttribute("viewBox", `0 0 ${width} ${this.height}`);
    this.plot.setAttribute("aria-label", this.describe());
    const clip = `clip-${this.panel.id}-${this.stage ? this.stage.name : ""}`.replace(/[^\w-]/g, "_");
    this.cursor = svg("g");
    this.plot.replaceChildren(
      svg("clipPath", { id: clip }, svg("rect", { x: left - 4, y: 0, width: right - left + 8, height: bottom + 4 })),
      ...this.gridParts(yTicks, labels), ...this.stageParts(), ...axisNames(this.yName(), this.xName(), this.frame),
      svg("g", { "clip-path": `url(#${clip})` }, this.lines.map((line) => (line.dots ? this.dotParts(line).flat() : this.lineParts(line))).flat().filter(Boolean)),
      this.cursor);
    this.showCursor();
  }

  gridParts(yTicks, labels) {
    const { left, right, bottom, domain } = this.frame;
    let end = left - 4;
    const format = view.axis === "step" ? (x) => tickText(x - (this.stage || this.soleStage() || { offset: 0 }).offset) : seconds;
    const places = view.axis === "step"
      ? this.stepTicks(domain, Math.max(2, Math.floor((right - left) / 62)))
      : ticks(domain[0], domain[1], Math.max(2, Math.floor((right - left) / 96)));
    return [
      yTicks.map((value, at) => [
        svg("line", { class: "grid", x1: left, x2: right, y1: this.sy(value), y2: this.sy(value) }),
        svg("text", { x: left - 7, y: this.sy(value) + 3.5, "text-anchor": "end" }, labels[at]),
      ]),
      svg("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }),
      places.map((value) => {
        const [text, half] = [format(value), textWidth(format(value)) / 2];
        const middle = clamp(this.sx(value), left + half - 4, right - half + 6);
        if (middle - half < end) return null;
        end = middle + half + 8;
        return svg("text", { x: middle, y: bottom + 15, "text-anchor": "middle" }, text);
      }),
    ].flat(2).filter(Boolean);
  }

  yName() {
    const title = capital(this.panel.title);
    if (this.panel.unit === "fraction") return `${title} (%)`;
    return this.panel.unit ? `${title} (${this.panel.unit})` : title;
  }

  xName() {
    if (view.axis === "time") return "Time since the run began (hours, minutes, seconds)";
    const stage = this.stage || this.soleStage();
    if (stage) return RUN.stages.length > 1 ? `Step of ${words(stage.name)}` : "Step";
    return RUN.stages.filter((known) => known.steps > 0).length > 1 ? "Step, stages end to end" : "Step";
  }

  // Round step numbers of the stage, where one stage is in view.
  stepTicks(domain, parts) {
    const offset = (this.stage || this.soleStage() || { offset: 0 }).offset;
    return ticks(domain[0] - offset, domain[1] - offset, parts).filter((step) => Number.isInteger(step)).map((step) => step + offset);
  }

  soleStage() {
    const [low, high] = this.frame.domain;
    const inside = RUN.stages.filter((stage) => stage.steps > 0 && stageRange(stage)[1] > low + 1e-9 && stageRange(stage)[0] < high - 1e-9);
    return view.axis === "step" && inside.length === 1 ? inside[0] : null;
  }

  stageParts() {
    const { left, right, top, bottom } = this.frame;
    const parts = [];
    RUN.stages.filter((stage) => stage.steps > 0).forEach((stage, at) => {
      if (at === 0) return;
      const x = this.sx(view.axis === "step" ? stage.firstX - 0.5 : stage.start);
      if (x <= left + 14 || x >= right - 2) return;
      parts.push(svg("line", { class: "stage-line", x1: x, x2: x, y1: top - 12, y2: bottom }));
      const room = right - x > 60;
      parts.push(svg("text", { class: "stage-name", x: room ? x + 5 : x - 5, y: top - 5, "text-anchor": room ? "start" : "end" }, room ? `${words(stage.name)} →` : words(stage.name)));
    });
    return parts;
  }

  // Lines break where a value is missing, and lines of steps where a stage begins.
  path(line, values) {
    const xs = this.xs(line);
    let pen = false;
    let stage = null;
    let text = "";
    values.forEach((value, at) => {
      const now = line.dots ? null : stageAt(line.x[at]);
      if (value === null || now !== stage) pen = false;
      stage = now;
      if (value === null) return;
      text += `${pen ? "L" : "M"}${this.sx(xs[at]).toFixed(1)} ${this.sy(value).toFixed(1)}`;
      pen = true;
    });
    return text;
  }

  lineParts(line) {
    const xs = this.xs(line);
    const style = { fill: "none", stroke: line.color, "stroke-linejoin": "round", "stroke-linecap": "round" };
    if (line.v.length === 1) return svg("circle", { cx: this.sx(xs[0]), cy: this.sy(line.v[0] ?? 0), r: 3.5, style: { fill: line.color } });
    if (!this.isSmooth(line)) return svg("path", { d: this.path(line, line.v), "stroke-width": 1.8, style });
    return [
      svg("path", { d: this.path(line, line.v), "stroke-width": 1, opacity: 0.3, style }),
      svg("path", { d: this.path(line, smoothed(line.v, line.x, view.smooth)), "stroke-width": 2.1, style }),
    ];
  }

  // A schedule is no noise: it is drawn as it is.
  isSmooth(line) { return !line.dots && view.smooth > 0 && line.v.length >= 8 && this.panel.id !== "learning_rate"; }

  dotParts(line) {
    const xs = this.xs(line);
    const style = { stroke: line.color };
    const whiskers = line.v.map((value, at) => value !== null && line.lo && line.lo[at] !== null
      ? svg("line", { x1: this.sx(xs[at]), x2: this.sx(xs[at]), y1: this.sy(line.lo[at]), y2: this.sy(line.hi[at]), "stroke-width": 1.4, opacity: 0.6, style }) : null);
    const dots = line.v.map((value, at) => value === null ? null
      : svg("circle", { cx: this.sx(xs[at]), cy: this.sy(value), r: xs.length > 40 ? 2 : 3.6, "stroke-width": 1.5, style: { fill: line.color, stroke: "var(--surface)" } }));
    // Two evaluations say nothing of what lies between them.
    const joined = line.v.filter((value) => value !== null).length >= FEWEST_JOINED
      ? svg("path", { d: this.path(line, line.v), "stroke-width": 1.6, "stroke-dasharray": "1 4", "stroke-linecap": "round", style: { ...style, fill: "none" } }) : [];
    return [joined, whiskers, dots];
  }

  // Value of a line at the cursor, or its newest. Lines that do not reach the cursor have none.
  at(line) {
    const xs = this.xs(line);
    if (!xs.length) return null;
    if (view.hover === null) {
      const [low, high] = this.frame.domain;
      for (let at = xs.length - 1; at >= 0; at -= 1) if (xs[at] <= high + 1e-9 && xs[at] >= low - 1e-9 && line.v[at] !== null) return at;
      return null;
    }
    const at = nearest(xs, view.hover);
    const reach = line.dots ? Infinity : Math.max(1.5, (xs[xs.length - 1] - xs[0]) / xs.length * 1.5);
    return Math.abs(xs[at] - view.hover) <= reach ? at : null;
  }

  showCursor() {
    if (!this.frame) return;
    const { left, right, top, bottom } = this.frame;
    const x = view.hover === null ? null : this.sx(view.hover);
    const parts = x !== null && x >= left - 1 && x <= right + 1 ? [svg("line", { class: "cross", x1: x, x2: x, y1: top, y2: bottom })] : [];
    const hits = this.lines.map((line) => {
      const at = this.at(line);
      if (at !== null && parts.length && line.v[at] !== null)
        parts.push(svg("circle", { cx: this.sx(this.xs(line)[at]), cy: this.sy(line.v[at]), r: 3.6, "stroke-width": 2, style: { fill: line.color, stroke: "var(--surface)" } }));
      return at;
    });
    this.cursor.replaceChildren(...parts);
    const main = this.lines.findIndex((line, at) => hits[at] !== null && line.v[hits[at]] !== null);
    this.value.textContent = main < 0 ? "–" : shown(this.lines[main].v[hits[main]], this.panel.unit);
    this.value.style.color = main < 0 ? "" : this.lines[main].color;
    this.legend.replaceChildren(...(this.lines.length === 1 && !this.lines[0].dots ? [] : this.lines.map((line, at) =>
      el("span", {}, dot(line.color, line.dots), line.name, " ", el("b", {}, hits[at] === null ? "–" : shown(line.v[hits[at]], this.panel.unit))))));
  }

  describe() {
    const parts = this.lines.map((line) => {
      const values = line.v.filter((value) => value !== null);
      return values.length ? `${line.name} from ${shown(values[0], this.panel.unit)} to ${shown(values[values.length - 1], this.panel.unit)}` : `${line.name} without values`;
    });
    return `${this.panel.title}: ${parts.join("; ")}. Arrow keys read values, drag to zoom.`;
  }

  wire() {
    const place = (event) => event.clientX - this.plot.getBoundingClientRect().left;
    let start = null;
    const setHover = (value) => { view.hover = value; tell("hover"); };
    this.plot.addEventListener("pointerdown", (event) => { if (event.pointerType === "mouse") { start = place(event); this.plot.setPointerCapture(event.pointerId); } });
    this.plot.addEventListener("pointermove", (event) => {
      if (!this.frame) return;
      const { left, right, top, bottom, domain } = this.frame;
      const px = clamp(place(event), left, right);
      setHover(clamp(this.inverse(px), domain[0], domain[1]));
      if (start !== null && Math.abs(px - start) > 6)
        this.cursor.append(svg("rect", { class: "select", x: Math.min(start, px), y: top, width: Math.abs(px - start), height: bottom - top }));
    });
    this.plot.addEventListener("pointerup", (event) => {
      if (start === null) return;
      const { left, right } = this.frame;
      const ends = [clamp(start, left, right), clamp(place(event), left, right)].sort((a, b) => a - b);
      start = null;
      if (ends[1] - ends[0] > 6) { view.domain = ends.map((px) => this.inverse(px)); tell("view"); }
    });
    this.plot.addEventListener("pointerleave", () => { if (start === null) setHover(null); });
    this.plot.addEventListener("blur", () => setHover(null));
    this.plot.addEventListener("dblclick", () => { view.domain = null; tell("view"); });
    this.plot.addEventListener("keydown", (event) => this.key(event, setHover));
  }

  key(event, setHover) {
    if (event.key === "Escape") { view.domain = null; setHover(null); tell("view"); return; }
    const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity }[event.key];
    if (move === undefined) return;
    event.preventDefault();
    const line = this.lines.find((known) => !known.dots) || this.lines[0];
    const xs = this.xs(line);
    const from = view.hover === null ? xs.length - 1 : nearest(xs, view.hover);
    const at = view.hover === null && move < 0 ? from : clamp(from + move, 0, xs.length - 1);
    setHover(xs[at]);
    announce(`${stepName(line.x[at])}: ${this.lines.map((known) => { const hit = this.at(known); return hit === null ? "" : `${known.name} ${shown(known.v[hit], this.panel.unit)}`; }).join(", ")}`);
  }
}
