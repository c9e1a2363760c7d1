// Stacks: columns piled up by part: seconds per step by phase, bytes by owner, how much of the rules' time was hidden.

class StackChart {
  // parts: [{name, colour, values}]; columns share their index. options: label(at), format, ticks(high, n), marks, ribbon(at), line
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
    const left = 10 + Math.max(...yTicks.map((value) => format(value).length)) * 6.3;
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
      svg("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }), ...this.xLabels(), this.cursor);
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
      return svg("path", { d: text, "shape-rendering": "geometricPrecision", style: { fill: part.colour } });
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
      const colour = this.options.ribbon(at);
      if (colour) made.push(svg("rect", { x: this.sx(at), y: this.frame.bottom + 3, width: Math.max(0.6, this.sx(at + 1) - this.sx(at)), height: 5, style: { fill: colour } }));
    }
    return made;
  }

  marks() {
    return (this.options.marks || []).filter((mark) => mark.at >= this.window[0] && mark.at <= this.window[1]).flatMap((mark) => {
      if (mark.value !== undefined) {
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

  xLabels() {
    const [from, to] = this.window;
    const every = Math.max(1, Math.ceil((to - from) / Math.max(1, Math.floor((this.frame.right - this.frame.left) / (this.options.labelWidth || 64)))));
    const made = [];
    let last = null;
    for (let at = from; at < to; at += every) {
      const text = this.options.short(at);
      if (text !== last) made.push(svg("text", { x: this.sx(at + 0.5), y: this.height - 6, "text-anchor": at === from ? "start" : "middle" }, text));
      last = text;
    }
    return made.slice(0, Math.max(1, made.length - (made.length > 2 && this.sx(to) - this.sx(from + (made.length - 1) * every) < 30 ? 1 : 0)));
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
  const node = el("div", { class: "legend" }, parts.map((part, at) => el("span", {}, dot(part.colour), part.name, " ", values[at])));
  return { node, show: (at) => values.forEach((value, part) => { value.textContent = at === null ? "" : format(parts[part].values[at]); }) };
}

function perStepCard() {
  const { columns } = DATA.timeline;
  if (columns.x.length < 2) return null;
  const parts = columns.phases.map((phase) => ({ name: phase, colour: phaseColour(phase), values: columns.seconds[phase] }));
  const legend = stackLegend(parts, seconds);
  const where = el("p", {});
  const unit = columns.size > 1 ? `mean of each ${columns.size} steps` : "each step";
  const chart = new StackChart(parts, {
    format: seconds, label: (at) => stepName(columns.x[at]), short: (at) => number(columns.x[at] - (stageAt(columns.x[at]) || { offset: 0 }).offset), marks: stageMarks(columns.x),
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
    { name: "while rollouts ran", colour: cssColour(1), values: steps.rollout_s, total: total.rollout_s },
    { name: "while the reference ran", colour: cssColour(2), values: steps.reference_s, total: total.reference_s },
    { name: "waited for", colour: cssColour(8), values: open, total: Math.max(0, total.rule_s - total.hidden_s) },
  ];
  const whole = sum(parts.map((part) => part.total)) || 1;
  const legend = stackLegend(parts, seconds);
  const where = el("p", {});
  const chart = data.x.length > 1 ? new StackChart(parts, {
    height: 150, format: seconds, label: (at) => stepName(data.x[at]), short: (at) => number(data.x[at] - (stageAt(data.x[at]) || { offset: 0 }).offset),
    describe: "Seconds of rule rewards per step, by what hid them. Arrow keys read values.",
    onhover: (at) => { legend.show(at); where.textContent = at === null ? `${seconds(total.rule_s)} of rules in all` : stepName(data.x[at]); },
  }) : null;
  return el("div", { class: "card" },
    el("div", { class: "card-head" }, el("h3", {}, `${percent(total.rule_s ? total.hidden_s / total.rule_s : 1, 0)} of the rules' time was hidden`), where),
    el("div", { class: "bar", role: "img", "aria-label": parts.map((part) => `${part.name}: ${seconds(part.total)}`).join(", ") },
      parts.filter((part) => part.total > 0).map((part) => el("i", { style: { "--dot": part.colour, flex: `${part.total / whole} 0 0` } }))),
    el("ul", { class: "share", style: { margin: "12px 0 4px" } }, parts.map((part) =>
      el("li", {}, dot(part.colour), el("span", {}, part.name), el("span", { class: "num" }, seconds(part.total)), el("b", {}, percent(part.total / whole, 0))))),
    chart ? [legend.node, chart.plot] : null);
}

function memorySection() {
  if (!DATA.memory) return;
  const memory = DATA.memory;
  const tiers = ["device", "host", "disk"].filter((tier) => tier === "device" || peakOf(tier).total > 0);
  const state = { tier: "device" };
  const card = el("div", { class: "card" });
  const build = () => card.replaceChildren(...memoryParts(memory, state.tier));
  const node = section("memory", "Memory by owner", "Bytes of each component at every phase boundary, measured. The ribbon shows the phase; drag to zoom.",
    tiers.length > 1 ? segmented("Tier", tiers.map((tier) => [tier, { device: "Device", host: "Host", disk: "Disk" }[tier]]), () => state.tier, (tier) => { state.tier = tier; build(); }) : null);
  build();
  node.append(card, ...memory.notes.map(note));
}

function memoryParts(memory, tier) {
  const values = memory.tiers[tier];
  const colours = ownerColours(memory.owners);
  const parts = memory.owners.map((owner, at) => ({ name: owner, colour: colours[at], values: values[owner] })).filter((part) => part.values.some((value) => value > 0));
  if (!parts.length) return [el("p", { class: "muted" }, `Nothing was ever on the ${tier} tier.`)];
  const peak = peakOf(tier);
  const place = (at) => [memory.stage[at] && RUN.stages.length > 1 ? words(memory.stage[at]) : "", memory.step[at] === null ? "" : `step ${memory.step[at]}`, memory.phase[at]].filter(Boolean).join(" · ");
  const rows = parts.map((part) => ({ part, now: el("td", { class: "r" }), share: el("td", { class: "r muted" }) }));
  const head = el("th", { colspan: 3 });
  const allNow = el("b", {});
  const line = tier === "device" && memory.free ? memory.free.map((free, at) => (free === null ? null : free + sum(parts.map((part) => part.values[at])))) : null;
  const show = (hover) => {
    const at = hover ?? peak.at;
    head.textContent = hover === null ? `at the peak: ${place(at)}` : place(at);
    const total = sum(parts.map((part) => part.values[at])) || 1;
    for (const row of rows) { row.now.textContent = bytes(row.part.values[at]); row.share.textContent = percent(row.part.values[at] / total, 0); }
    allNow.textContent = bytes(sum(parts.map((part) => part.values[at])));
  };
  const reset = el("button", { class: "btn", type: "button", hidden: true, on: { click: () => chart.zoom(0, chart.size) } }, "Reset zoom");
  const chart = new StackChart(parts, {
    height: 300, format: bytes, ticks: byteTicks, label: place, labelWidth: 90, line,
    short: (at) => (memory.step[at] === null ? memory.phase[at] : `step ${memory.step[at]}`),
    ribbon: (at) => (memory.phase[at] ? phaseColour(memory.phase[at]) : null),
    marks: [{ at: peak.at, value: peak.total, text: `peak ${bytes(peak.total)}` }, ...RUN.stages.slice(1).map((stage) => ({ at: memory.stage.indexOf(stage.name), text: words(stage.name) })).filter((mark) => mark.at > 0)],
    describe: `Bytes on the ${tier} by owner; peak ${bytes(peak.total)} at ${place(peak.at)}. Arrow keys read values.`,
    onhover: show, onzoom: (zoomed) => { reset.hidden = !zoomed; },
  });
  const phases = [...new Set(memory.phase)].filter(Boolean);
  const table = el("table", { class: "owners" }, el("thead", {}, el("tr", {}, head)),
    el("tbody", {}, rows.slice().reverse().map((row) => el("tr", {}, el("td", {}, dot(row.part.colour), " ", el("span", { class: "mono", style: { "font-size": "12.5px" } }, row.part.name)), row.now, row.share)),
      el("tr", {}, el("td", {}, "all"), el("td", { class: "r" }, allNow), el("td", {}))));
  show(null);
  return [el("div", { class: "memory" },
    el("div", {}, chart.plot, el("div", { class: "legend" }, phases.map((phase) => el("span", {}, dot(phaseColour(phase)), phase)), line ? el("span", {}, "┄ all that the device has") : null, reset)), table)];
}
