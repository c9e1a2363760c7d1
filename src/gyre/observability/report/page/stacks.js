// Stacks: columns piled up by part: seconds per step by phase, bytes by owner, how much of the rules' time was hidden.

class StackChart {
  // parts: [{name, color, values}]; columns share their index. options: label(at), format, ticks(high, n), marks, ribbon(at), line
  constructor(parts, options) {
    this.parts = parts;
    this.options = options;
    this.size = parts.length ? parts[0].values.length : 0;
    this.window = [0, this.size];
    this.hover = null;
    this.height = options.height || 200;
    this.plot = svg("svg", { class: "plot", height: this.height, tabindex: 0, role: "img", "aria-label": options.describe });
    this.redraw = drawn(this.plot, (width) => this.draw(width));
    this.wire();
  }

  total(at) { return sum(this.parts.map((part) => part.values[at])); }

  draw(width) {
    const [from, to] = this.window;
    const { format, line } = this.options;
    let high = 0;
    for (let at = from; at < to; at += 1) high = Math.max(high, this.total(at), line && line[at] !== null ? line[at] : 0);
    high = high * 1.06 || 1;
    const yTicks = (this.options.ticks || ((top, n) => ticks(0, top, n)))(high, 4);
    const left = 10 + Math.max(...yTicks.map((value) => textWidth(format(value))));
    const [right, top, bottom] = [width - 8, PLOT_TOP, this.height - PLOT_BOTTOM - (this.options.ribbon ? 8 : 0)];
    this.sx = (at) => left + ((at - from) / (to - from)) * (right - left);
    this.sy = (value) => bottom - (value / high) * (bottom - top);
    this.frame = { left, right, top, bottom, width };
    this.plot.setAttribute("viewBox", `0 0 ${width} ${this.height}`);
    this.cursor = svg("g");
    this.plot.replaceChildren(
      ...yTicks.flatMap((value) => [
        svg("line", { class: "grid", x1: left, x2: right, y1: this.sy(value), y2: this.sy(value) }),
        svg("text", { x: left - 7, y: this.sy(value) + 3.5, "text-anchor": "end" }, format(value)),
      ]),
      ...this.areas(), ...(line ? [this.lineOver(line)] : []), ...this.ribbon(), ...this.marks(),
      svg("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }), ...this.xLabels(),
      ...axisNames(this.options.yName, this.options.xName, { left, right, bottom: this.frame.bottom + (this.options.ribbon ? 8 : 0) }), this.cursor);
    this.showCursor();
  }

  areas() {
    const [from, to] = this.window;
    const base = new Array(this.size).fill(0);
    const gap = (this.frame.right - this.frame.left) / (to - from) > 5 && !this.options.ribbon ? 1 : 0;
    return this.parts.map((part) => {
      let text = "";
      for (let at = from; at < to; at += 1) {
        const value = part.values[at];
        if (value > 0) {
          const [x1, x2] = [this.sx(at) + gap / 2, this.sx(at + 1) - gap / 2];
          text += `M${x1.toFixed(2)} ${this.sy(base[at]).toFixed(2)}V${this.sy(base[at] + value).toFixed(2)}H${x2.toFixed(2)}V${this.sy(base[at]).toFixed(2)}Z`;
        }
        base[at] += value;
      }
      return svg("path", { d: text, "shape-rendering": "geometricPrecision", style: { fill: part.color } });
    });
  }

  lineOver(line) {
    const [from, to] = this.window;
    let text = "";
    for (let at = from; at < to; at += 1) if (line[at] !== null) text += `${text ? "L" : "M"}${this.sx(at).toFixed(1)} ${this.sy(line[at]).toFixed(1)}L${this.sx(at + 1).toFixed(1)} ${this.sy(line[at]).toFixed(1)}`;
    return svg("path", { d: text, "stroke-dasharray": "5 4", style: { fill: "none", stroke: "var(--muted)", "stroke-width": 1.3 } });
  }

  ribbon() {
    if (!this.options.ribbon) return [];
    const [from, to] = this.window;
    const made = [];
    for (let at = from; at < to; at += 1) {
      const color = this.options.ribbon(at);
      if (color) made.push(svg("rect", { x: this.sx(at), y: this.frame.bottom + 3, width: Math.max(0.6, this.sx(at + 1) - this.sx(at)), height: 5, style: { fill: color } }));
    }
    return made;
  }

  marks() {
    return (this.options.marks || []).filter((mark) => mark.value !== undefined || (mark.at >= this.window[0] && mark.at <= this.window[1])).flatMap((mark) => {
      if (mark.value !== undefined) {
        if (this.sy(mark.value) < this.frame.top) return [];
        const y = this.sy(mark.value);
        return [svg("line", { class: "peak", x1: this.frame.left, x2: this.frame.right, y1: y, y2: y }),
          svg("text", { class: "peak-text", x: this.frame.right - 4, y: y - 4, "text-anchor": "end" }, mark.text)];
      }
      const x = this.sx(mark.at);
      if (x < this.frame.left + 2) return [];
      return [svg("line", { class: "stage-line", x1: x, x2: x, y1: this.frame.top - 12, y2: this.frame.bottom }),
        svg("text", { class: "stage-name", x: x + 5, y: this.frame.top - 5 }, `${mark.text} →`)];
    });
  }

  numSteps(steps) {
    const numbers = [...steps.values()];
    return sum(numbers.map((step, at) => (at > 0 && step > numbers[at - 1] ? step - numbers[at - 1] : 1)));
  }

  // Round step numbers, each where its first column stands, none so near another that they touch.
  xLabels() {
    const [from, to] = this.window;
    const steps = new Map();
    for (let at = from; at < to; at += 1) {
      const step = this.options.step(at);
      if (step !== null && (at === from || this.options.step(at - 1) !== step)) steps.set(at, step);
    }
    const room = Math.max(1, Math.floor((this.frame.right - this.frame.left) / 72));
    const every = [1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000].find((size) => this.numSteps(steps) / size <= room) || 1e6;
    const made = [];
    let end = -Infinity;
    const entries = [...steps];
    for (const [index, [at, step]] of entries.entries()) {
      const next = index + 1 < entries.length && entries[index + 1][1] > step ? entries[index + 1][1] : step + 1;
      const round = Math.ceil(step / every) * every; // a column may stand for several steps
      if (round >= next) continue;
      const text = `step ${count(round)}`;
      const [x, half] = [this.sx(at + 0.5), textWidth(text) / 2];
      if (x - half < Math.max(end + 10, this.frame.left - 8) || x + half > this.frame.width) continue;
      made.push(svg("text", { x, y: this.height - 22, "text-anchor": "middle" }, text));
      end = x + half;
    }
    return made;
  }

  zoom(from, to) {
    this.window = [clamp(Math.floor(from), 0, this.size - 1), clamp(Math.ceil(to), 1, this.size)];
    if (this.window[1] - this.window[0] < 2) this.window = [Math.max(0, this.window[1] - 2), this.window[1]];
    this.redraw();
    this.options.onzoom?.(this.window[0] > 0 || this.window[1] < this.size);
  }

  showCursor() {
    if (!this.frame) return;
    const at = this.hover;
    this.cursor.replaceChildren(...(at === null || at < this.window[0] || at >= this.window[1] ? [] : [
      svg("rect", { x: this.sx(at), y: this.frame.top, width: Math.max(1, this.sx(at + 1) - this.sx(at)), height: this.frame.bottom - this.frame.top, style: { fill: "var(--text)", opacity: 0.1 } })]));
    this.options.onhover?.(at);
  }

  wire() {
    const place = (event) => event.clientX - this.plot.getBoundingClientRect().left;
    const inverse = (px) => this.window[0] + ((px - this.frame.left) / (this.frame.right - this.frame.left)) * (this.window[1] - this.window[0]);
    const set = (at) => { this.hover = at; this.showCursor(); };
    let start = null;
    this.plot.addEventListener("pointerdown", (event) => { if (event.pointerType === "mouse") { start = place(event); this.plot.setPointerCapture(event.pointerId); } });
    this.plot.addEventListener("pointermove", (event) => {
      if (!this.frame) return;
      const px = clamp(place(event), this.frame.left, this.frame.right);
      set(clamp(Math.floor(inverse(px)), this.window[0], this.window[1] - 1));
      if (start !== null && Math.abs(px - start) > 6)
        this.cursor.append(svg("rect", { class: "select", x: Math.min(start, px), y: this.frame.top, width: Math.abs(px - start), height: this.frame.bottom - this.frame.top }));
    });
    this.plot.addEventListener("pointerup", (event) => {
      if (start === null) return;
      const ends = [start, place(event)].map((px) => clamp(px, this.frame.left, this.frame.right)).sort((a, b) => a - b);
      start = null;
      if (ends[1] - ends[0] > 6) this.zoom(inverse(ends[0]), inverse(ends[1]));
    });
    this.plot.addEventListener("pointerleave", () => { if (start === null) set(null); });
    this.plot.addEventListener("blur", () => set(null));
    this.plot.addEventListener("dblclick", () => this.zoom(0, this.size));
    this.plot.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { this.zoom(0, this.size); return; }
      const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
      if (move === undefined) return;
      event.preventDefault();
      set(clamp((this.hover ?? this.window[1]) + move, this.window[0], this.window[1] - 1));
      announce(`${this.options.label(this.hover)}: ${this.parts.filter((part) => part.values[this.hover] > 0).map((part) => `${part.name} ${this.options.format(part.values[this.hover])}`).join(", ")}`);
    });
  }
}

function stageMarks(xs) {
  return RUN.stages.filter((stage, at) => at > 0 && stage.steps > 0).map((stage) => ({ at: xs.findIndex((x) => x >= stage.firstX), text: words(stage.name) })).filter((mark) => mark.at > 0);
}

function stackLegend(parts, format) {
  const values = parts.map(() => el("b", {}));
  const node = el("div", { class: "legend" }, parts.map((part, at) => el("span", {}, dot(part.color), part.name, " ", values[at])));
  return { node, show: (at) => values.forEach((value, part) => { value.textContent = at === null ? "" : format(parts[part].values[at]); }) };
}

function perStepCard() {
  const { columns } = DATA.timeline;
  if (columns.x.length < 2) return null;
  const parts = columns.phases.map((phase) => ({ name: phase, color: phaseColor(phase), values: columns.seconds[phase] }));
  const legend = stackLegend(parts, seconds);
  const where = el("p", {});
  const unit = columns.size > 1 ? `mean of each ${columns.size} steps` : "each step";
  const chart = new StackChart(parts, {
    format: seconds, height: 296, yName: "Time per step (seconds)", xName: "Step", label: (at) => stepName(columns.x[at]), step: (at) => stageStep(columns.x[at]), marks: stageMarks(columns.x),
    describe: `Seconds per step by phase, ${columns.x.length} columns. Arrow keys read values.`,
    onhover: (at) => { legend.show(at); where.textContent = at === null ? unit : `${stepName(columns.x[at])}: ${seconds(chart.total(at))}`; },
  });
  return el("div", { class: "card" }, el("div", { class: "card-head" }, el("h3", {}, "Seconds per step"), where), legend.node, chart.plot);
}

function overlapCard() {
  const data = DATA.overlap;
  if (!data) return null;
  const { total, steps } = data;
  const open = steps.rule_s.map((value, at) => Math.max(0, value - steps.hidden_s[at]));
  const parts = [
    { name: "while rollouts ran", color: cssColor(1), values: steps.rollout_s, total: total.rollout_s },
    { name: "while the reference ran", color: cssColor(2), values: steps.reference_s, total: total.reference_s },
    { name: "waited for", color: cssColor(8), values: open, total: Math.max(0, total.rule_s - total.hidden_s) },
  ];
  const whole = sum(parts.map((part) => part.total)) || 1;
  const where = el("p", {});
  const values = parts.map(() => [el("span", { class: "num" }), el("b", {})]);
  const show = (at) => {
    const now = parts.map((part) => (at === null ? part.total : part.values[at]));
    const all = sum(now) || 1;
    values.forEach(([spent, share], part) => { spent.textContent = seconds(now[part]); share.textContent = percent(now[part] / all, 0); });
    where.textContent = at === null ? `${seconds(total.rule_s)} of rules in all` : stepName(data.x[at]);
  };
  const chart = data.x.length > 1 ? new StackChart(parts, {
    height: 186, format: seconds, yName: "Time of rules per step (seconds)", xName: "Step", label: (at) => stepName(data.x[at]), step: (at) => stageStep(data.x[at]), onhover: show,
    describe: "Seconds of rule rewards per step, by what hid them. Arrow keys read values.",
  }) : null;
  show(null);
  return el("div", { class: "card" },
    el("div", { class: "card-head" }, el("h3", {}, `${percent(total.rule_s ? total.hidden_s / total.rule_s : 1, 0)} of the rules' time was hidden`), where),
    el("div", { class: "bar", role: "img", "aria-label": parts.map((part) => `${part.name}: ${seconds(part.total)}`).join(", ") },
      parts.filter((part) => part.total > 0).map((part) => el("i", { style: { "--dot": part.color, flex: `${part.total / whole} 0 0` } }))),
    el("ul", { class: "share", style: { margin: "12px 0 4px" } }, parts.map((part, at) => el("li", {}, dot(part.color), el("span", {}, part.name), values[at]))),
    chart ? chart.plot : null);
}

function rolesCard() {
  const data = DATA.roles;
  if (!data) return null;
  const { total, steps } = data;
  const parts = [
    { name: "collector waited for a credit", color: cssColor(1), values: steps.collector_idle_s, total: total.collector_idle_s },
    { name: "learner waited for rollouts", color: cssColor(2), values: steps.learner_idle_s, total: total.learner_idle_s },
  ];
  const where = el("p", {});
  const values = parts.map(() => [el("span", { class: "num" }), el("b", {})]);
  const show = (at) => {
    const wall = (at === null ? total.seconds : steps.seconds[at]) || 1;
    parts.forEach((part, index) => {
      const idle = at === null ? part.total : part.values[at];
      values[index][0].textContent = seconds(idle);
      values[index][1].textContent = percent(idle / wall, 0);
    });
    const [spent, plain] = at === null ? [total.seconds, total.synchronous_s] : [steps.seconds[at], steps.synchronous_s[at]];
    where.textContent = `${at === null ? "" : `${stepName(data.x[at])}: `}${seconds(spent)}; one after the other ${seconds(plain)}`;
  };
  const chart = data.x.length > 1 ? new StackChart(parts, {
    height: 186, format: seconds, yName: "Idle time per step (seconds)", xName: "Step", label: (at) => stepName(data.x[at]), step: (at) => stageStep(data.x[at]), onhover: show,
    describe: "Seconds per step that collector and learner waited for each other. Arrow keys read values.",
  }) : null;
  show(null);
  return el("div", { class: "card" },
    el("div", { class: "card-head" }, el("h3", {}, `The synchronous order would take ${percent(total.seconds ? total.synchronous_s / total.seconds : 1, 0)} of the time`), where),
    el("ul", { class: "share", style: { margin: "12px 0 4px" } }, parts.map((part, at) => el("li", {}, dot(part.color), el("span", {}, part.name), values[at]))),
    chart ? chart.plot : null);
}

function memorySection() {
  if (!DATA.memory) return;
  const memory = DATA.memory;
  const tiers = ["device", "host", "disk"].filter((tier) => tier === "device" || peakOf(tier).total > 0);
  const state = { tier: "device" };
  const card = el("div", { class: "card" });
  const build = () => card.replaceChildren(...memoryParts(memory, state.tier));
  const { peak } = memory;
  const most = !peak ? "" : peak.of === "device"
    ? ` The most that was allocated within a phase, temporaries included, is ${bytes(peak.bytes)} (${peak.phase}).`
    : ` The most that the process ever held in all is ${bytes(peak.bytes)}.`;
  const node = section("memory", "Memory by owner", "Bytes of each component at every phase boundary, measured. The ribbon shows the phase; drag to zoom." + most,
    tiers.length > 1 ? segmented("Tier", tiers.map((tier) => [tier, { device: "Device", host: "Host", disk: "Disk" }[tier]]), () => state.tier, (tier) => { state.tier = tier; build(); }) : null);
  build();
  node.append(card, ...memory.notes.map(note));
}

function memoryParts(memory, tier) {
  const values = memory.tiers[tier];
  const colors = ownerColors(memory.owners);
  const parts = memory.owners.map((owner, at) => ({ name: owner, color: colors[at], values: values[owner] })).filter((part) => part.values.some((value) => value > 0));
  if (!parts.length) return [el("p", { class: "muted" }, `Nothing was ever on the ${tier} tier.`)];
  const peak = peakOf(tier);
  const place = (at) => [memory.stage[at] && RUN.stages.length > 1 ? words(memory.stage[at]) : "", memory.step[at] === null ? "" : `step ${memory.step[at]}`, memory.phase[at]].filter(Boolean).join(" · ");
  const rows = parts.map((part) => ({ part, now: el("td", { class: "r" }), share: el("td", { class: "r muted" }) }));
  const head = el("th", { colspan: 3 });
  const allNow = el("b", {});
  const whole = tier === "device" ? memory.whole : null; // its line is there where it does not dwarf what is used
  const line = whole ? whole.line : null;
  const show = (hover) => {
    const at = hover ?? peak.at;
    head.textContent = hover === null ? `when most was held: ${place(at)}` : place(at);
    const total = sum(parts.map((part) => part.values[at])) || 1;
    for (const row of rows) { row.now.textContent = bytes(row.part.values[at]); row.share.textContent = percent(row.part.values[at] / total, 0); }
    allNow.textContent = bytes(sum(parts.map((part) => part.values[at])));
  };
  const reset = el("button", { class: "btn", type: "button", hidden: true, on: { click: () => chart.zoom(0, chart.size) } }, "Whole run");
  const chart = new StackChart(parts, {
    height: 328, format: bytes, yName: "Held by components (bytes)", xName: "Ends of phases, in order", ticks: byteTicks, label: place, line, step: (at) => memory.step[at],
    ribbon: (at) => (memory.phase[at] ? phaseColor(memory.phase[at]) : null),
    marks: [{ at: peak.at, value: peak.total, text: `most held ${bytes(peak.total)}` }, ...RUN.stages.slice(1).map((stage) => ({ at: memory.stage.indexOf(stage.name), text: words(stage.name) })).filter((mark) => mark.at > 0)],
    describe: `Bytes on the ${tier} by owner; most held ${bytes(peak.total)} at ${place(peak.at)}. Arrow keys read values.`,
    onhover: show, onzoom: (zoomed) => { reset.hidden = !zoomed; strip?.show(); },
  });
  const strip = chart.size > 60 ? new MemoryStrip(parts, chart) : null;
  if (strip) chart.zoom(...fewSteps(memory));
  const phases = [...new Set(memory.phase)].filter(Boolean);
  const table = el("table", { class: "owners" }, el("thead", {}, el("tr", {}, head)),
    el("tbody", {}, rows.slice().reverse().map((row) => el("tr", {}, el("td", {}, dot(row.part.color), " ", el("span", { class: "mono", style: { "font-size": "12.5px" } }, row.part.name)), row.now, row.share)),
      el("tr", {}, el("td", {}, "all"), el("td", { class: "r" }, allNow), el("td", {}))));
  show(null);
  return [el("div", { class: "memory" },
    el("div", {}, strip ? strip.plot : null, chart.plot, el("div", { class: "legend" }, phases.map((phase) => el("span", {}, dot(phaseColor(phase)), phase)), whole ? el("span", {}, `${line ? "┄ " : ""}${whole.name}: ${bytes(whole.bytes)}`) : null, reset)), table)];
}

// Boundaries of a few steps from the middle of the last stage, where each phase can be seen.
function fewSteps(memory) {
  const last = memory.stage.indexOf(memory.stage[memory.stage.length - 1]);
  const middle = last + Math.floor((memory.phase.length - last) / 2);
  const first = Math.max(last, memory.step.indexOf(memory.step[middle], last));
  return [first, Math.min(memory.phase.length, first + 20)];
}

// The whole run above the chart: peaks of neighboring boundaries, and a window that moves the chart.
class MemoryStrip {
  constructor(parts, chart) {
    this.parts = parts;
    this.chart = chart;
    this.plot = svg("svg", { class: "plot memory-strip", height: 46, "aria-hidden": "true" });
    drawn(this.plot, (width) => this.draw(width));
    const move = (event) => {
      const box = this.plot.getBoundingClientRect();
      const [from, to] = chart.window;
      const size = to - from;
      const start = clamp(Math.round(((event.clientX - box.left) / box.width) * chart.size - size / 2), 0, chart.size - size);
      chart.zoom(start, start + size);
    };
    this.plot.addEventListener("pointerdown", (event) => { this.plot.setPointerCapture(event.pointerId); move(event); });
    this.plot.addEventListener("pointermove", (event) => { if (event.buttons) move(event); });
  }

  draw(width) {
    const { size } = this.chart;
    const columns = Math.min(size, Math.max(1, Math.floor(width / 3)));
    const totals = Array.from({ length: size }, (_, at) => sum(this.parts.map((part) => part.values[at])));
    const peaks = Array.from({ length: columns }, (_, column) => {
      const [from, to] = [Math.floor((column * size) / columns), Math.floor(((column + 1) * size) / columns)];
      let best = from;
      for (let at = from; at < to; at += 1) if (totals[at] > totals[best]) best = at;
      return best;
    });
    const high = Math.max(...totals) || 1;
    const base = new Array(columns).fill(0);
    this.width = width;
    this.window = svg("rect", { class: "window", y: 7, height: 38, rx: 4 });
    this.plot.setAttribute("viewBox", `0 0 ${width} 46`);
    this.plot.replaceChildren(...this.parts.map((part) => {
      const text = peaks.map((at, column) => {
        const [low, top] = [base[column], base[column] + part.values[at]];
        base[column] = top;
        const [x1, x2, y1, y2] = [(column / columns) * width, ((column + 1) / columns) * width + 0.3, 43 - (low / high) * 33, 43 - (top / high) * 33];
        return top > low ? `M${x1.toFixed(1)} ${y1.toFixed(1)}V${y2.toFixed(1)}H${x2.toFixed(1)}V${y1.toFixed(1)}Z` : "";
      }).join("");
      return svg("path", { d: text, opacity: 0.75, style: { fill: part.color } });
    }), this.window);
    this.show();
  }

  show() {
    if (!this.window) return;
    const [from, to] = this.chart.window.map((at) => (at / this.chart.size) * this.width);
    this.window.setAttribute("x", clamp(from, 1, this.width - 7));
    this.window.setAttribute("width", Math.max(6, to - from - 2));
  }
}
