// Timeline: every phase as a bar. A strip shows the whole run; below it, one lane per phase shows the part in the window.

const LANE = 26;
const RULER = 22;

function timeSection() {
  if (!DATA.timeline && !DATA.overlap && !DATA.pod) return;
  const node = section("time", "Where the time went", "Each bar is one phase, over the time since the run began. Drag to move, Ctrl and scroll to zoom; arrow keys step from bar to bar.");
  const stack = el("div", { class: "stack" });
  node.append(stack);
  if (DATA.timeline) stack.append(new Timeline(DATA.timeline).node);
  const pair = [DATA.timeline ? perStepCard() : null, overlapCard(), rolesCard()].filter(Boolean);
  if (pair.length) stack.append(el("div", { class: pair.length > 1 ? "pair" : "stack" }, pair));
  if (DATA.pod) stack.append(podCard());
  for (const text of DATA.timeline ? DATA.timeline.notes : []) node.append(note(text));
  for (const gap of RUN.gaps) node.append(note(`${seconds(gap)} between two attempts, lost work included, are cut out of all times.`));
}

class Timeline {
  constructor(data) {
    this.phases = data.phases;
    this.spans = data.spans.map(([phase, depth, start, length, x, stage]) => ({ phase: data.phases[phase], lane: phase, depth, start, length, x, stage }));
    this.end = Math.max(RUN.seconds, ...this.spans.slice(-50).map((span) => span.start + span.length)) || 1;
    this.longest = this.spans.reduce((most, span) => Math.max(most, span.length), 0);
    this.window = this.firstWindow();
    this.selected = null;
    this.strip = el("canvas", { class: "strip", "aria-hidden": "true" });
    const spent = data.outer.map((phase) => `${phase} ${seconds(data.seconds[phase])}`).join(", ");
    this.canvas = el("canvas", { class: "detail", tabindex: 0, role: "img", "aria-label": `Timeline of phases: ${spent}. Arrow keys step from bar to bar, plus and minus zoom, 0 shows all.` });
    this.readout = el("div", { class: "readout" });
    const button = (text, label, act) => el("button", { class: "btn", type: "button", "aria-label": label, on: { click: act } }, text);
    this.node = el("div", { class: "card" },
      el("div", { class: "card-head" }, el("h3", {}, "Phases"),
        el("div", { class: "controls" }, button("◀", "Earlier", () => this.pan(-0.5)), button("▶", "Later", () => this.pan(0.5)),
          button("−", "Zoom out", () => this.zoom(2)), button("+", "Zoom in", () => this.zoom(0.5)), button("All", "Show the whole run", () => this.setWindow(0, this.end)))),
      this.strip, this.canvas, this.readout);
    this.redraw = drawn(this.canvas, () => this.draw());
    this.wireStrip();
    this.wireDetail();
    this.show(null);
  }

  // A few steps from the middle of the last stage: bars that one can tell apart.
  firstWindow() {
    const steps = this.spans.filter((span) => span.depth === 0 && span.x >= 0);
    if (steps.length < 12) return [0, this.end];
    const inner = new Set(this.spans.filter((span) => span.depth > 0 && span.x >= 0).map((span) => span.x));
    const all = [...new Set(steps.map((span) => span.x))];
    const xs = inner.size ? all.filter((x) => inner.has(x)) : all;
    const stage = RUN.stages.filter((known) => known.steps > 0).pop();
    const last = stage ? xs.filter((x) => x >= stage.firstX && x <= stage.lastX) : xs;
    const middle = (last.length ? last : xs)[Math.floor((last.length || xs.length) / 2)];
    const near = steps.filter((span) => span.x >= middle && span.x < middle + 4);
    const [from, to] = [Math.min(...near.map((span) => span.start)), Math.max(...near.map((span) => span.start + span.length))];
    const pad = (to - from) * 0.03;
    return [Math.max(0, from - pad), Math.min(this.end, to + pad)];
  }

  setWindow(from, to) {
    const width = clamp(to - from, Math.min(this.end, 0.002), this.end);
    const start = clamp(from, 0, this.end - width);
    this.window = [start, start + width];
    if (!this.selected) this.show(null);
    this.redraw();
  }

  pan(share) { const [from, to] = this.window; this.setWindow(from + (to - from) * share, to + (to - from) * share); }

  zoom(factor, at = (this.window[0] + this.window[1]) / 2) {
    const [from, to] = this.window;
    this.setWindow(at - (at - from) * factor, at + (to - at) * factor);
  }

  size(canvas, height) {
    const ratio = window.devicePixelRatio || 1;
    const width = canvas.clientWidth;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.font = `11.5px ${getComputedStyle(document.body).fontFamily}`;
    context.textBaseline = "middle";
    return [context, width];
  }

  draw() {
    this.paint = new Map(this.phases.map((phase) => [phase, resolve(phaseColor(phase))]));
    this.ink = Object.fromEntries(["text", "muted", "line", "grid", "raised", "surface", "focus"].map((name) => [name, resolve(`var(--${name})`)]));
    this.drawStrip();
    this.drawDetail();
  }

  drawStrip() {
    const [context, width] = this.size(this.strip, 34);
    const sx = (t) => (t / this.end) * width;
    context.fillStyle = this.ink.raised;
    context.fillRect(0, 0, width, 34);
    for (const span of this.spans) {
      if (span.depth > 0) continue;
      context.fillStyle = this.paint.get(span.phase);
      context.fillRect(sx(span.start), 6, Math.max(0.4, sx(span.length)), 22);
    }
    const [from, to] = this.window.map(sx);
    context.fillStyle = this.ink.surface;
    context.globalAlpha = 0.62;
    context.fillRect(0, 0, from, 34);
    context.fillRect(to, 0, width - to, 34);
    context.globalAlpha = 1;
    context.strokeStyle = this.ink.text;
    context.lineWidth = 1.5;
    context.strokeRect(clamp(from, 1, width - 4), 1.5, Math.max(3, to - from - 2), 31);
  }

  drawDetail() {
    const height = RULER + this.phases.length * LANE + 4;
    const [context, width] = this.size(this.canvas, height);
    const label = Math.min(width * 0.32, 14 + Math.max(...this.phases.map((phase) => context.measureText(this.laneName(phase)).width)));
    const [from, to] = this.window;
    this.left = label;
    this.sx = (t) => label + ((t - from) / (to - from)) * (width - label);
    this.inverse = (px) => from + ((px - label) / (width - label)) * (to - from);
    context.clearRect(0, 0, width, height);
    this.drawRuler(context, width, height);
    this.phases.forEach((phase, lane) => {
      const y = RULER + lane * LANE;
      context.fillStyle = phase.includes("/") ? this.ink.muted : this.ink.text;
      context.fillText(this.fit(context, this.laneName(phase), label - 6), 0, y + LANE / 2);
      context.fillStyle = this.ink.grid;
      context.fillRect(label, y + LANE - 0.5, width - label, 1);
    });
    this.drawBars(context, width);
  }

  laneName(phase) { const parts = phase.split("/"); return `${"  ".repeat(parts.length - 1)}${parts.length > 1 ? "└ " : ""}${parts[parts.length - 1]}`; }

  fit(context, text, room) {
    if (context.measureText(text).width <= room) return text;
    let cut = text;
    while (cut.length > 1 && context.measureText(`${cut}…`).width > room) cut = cut.slice(0, -1);
    return cut.length > 1 ? `${cut}…` : "";
  }

  drawRuler(context, width, height) {
    const [from, to] = this.window;
    const marks = ticks(from, to, Math.max(2, Math.floor((width - this.left) / 100)));
    context.lineWidth = 1;
    for (const t of marks) {
      const x = Math.round(this.sx(t)) + 0.5;
      context.strokeStyle = this.ink.grid;
      context.beginPath(); context.moveTo(x, RULER - 4); context.lineTo(x, height); context.stroke();
      const text = moment(t, marks.length > 1 ? marks[1] - marks[0] : 1);
      const half = context.measureText(text).width / 2;
      context.fillStyle = this.ink.muted;
      if (x - half >= this.left - 2 && x + half <= width) context.fillText(text, x - half, 9);
    }
  }

  drawBars(context, width) {
    const [from, to] = this.window;
    context.save();
    context.beginPath();
    context.rect(this.left, 0, width - this.left, 10_000);
    context.clip();
    for (let at = this.firstAfter(from - this.longest); at < this.spans.length && this.spans[at].start < to; at += 1) {
      const span = this.spans[at];
      if (span.start + span.length < from) continue;
      const [x, y, w, h] = [this.sx(span.start), RULER + span.lane * LANE + 4, Math.max(1, this.sx(span.start + span.length) - this.sx(span.start) - 0.6), LANE - 8];
      context.fillStyle = this.paint.get(span.phase);
      context.globalAlpha = span.depth > 0 ? 0.62 : 1;
      context.beginPath();
      context.roundRect(x, y, w, h, Math.min(4, w / 2));
      context.fill();
      context.globalAlpha = 1;
      if (span === this.selected) { context.strokeStyle = this.ink.text; context.lineWidth = 2; context.stroke(); }
      const [shownFrom, text] = [Math.max(x, this.left), seconds(span.length)];
      if (context.measureText(text).width + 12 <= Math.min(x + w, width) - shownFrom) { context.fillStyle = this.ink.surface; context.fillText(text, shownFrom + 6, y + h / 2 + 0.5); }
    }
    context.restore();
  }

  firstAfter(t) {
    let [low, high] = [0, this.spans.length];
    while (low < high) { const middle = (low + high) >> 1; if (this.spans[middle].start < t) low = middle + 1; else high = middle; }
    return low;
  }

  hit(event) {
    const box = this.canvas.getBoundingClientRect();
    const lane = Math.floor((event.clientY - box.top - RULER) / LANE);
    const px = event.clientX - box.left;
    if (px < this.left) return null;
    const [t, slack] = [this.inverse(px), this.inverse(px + 3) - this.inverse(px)];
    let best = null;
    for (let at = this.firstAfter(t - this.longest - slack); at < this.spans.length && this.spans[at].start <= t + slack; at += 1) {
      const span = this.spans[at];
      if (span.lane === lane && span.start + span.length >= t - slack) best = span;
    }
    return best;
  }

  show(span) {
    if (span === this.selected && span !== null) return;
    this.selected = span;
    if (span === null) {
      const [from, to] = this.window;
      this.readout.replaceChildren(el("span", {}, "Window ", el("b", {}, `${moment(from, (to - from) / 20)} – ${moment(to, (to - from) / 20)}`), ` of ${moment(this.end, 1)}`));
    } else {
      this.readout.replaceChildren(dot(phaseColor(span.phase)), el("b", {}, span.phase), el("span", {}, seconds(span.length)),
        el("span", {}, span.x >= 0 ? stepName(span.x) : words(span.stage)), el("span", {}, `began at ${moment(span.start, 0.01)}`));
    }
  }

  select(span) {
    this.show(span);
    if (span && (span.start + span.length < this.window[0] || span.start > this.window[1])) {
      const half = (this.window[1] - this.window[0]) / 2;
      this.setWindow(span.start - half, span.start + half);
    } else this.redraw();
  }

  wireStrip() {
    const move = (event) => {
      const box = this.strip.getBoundingClientRect();
      const t = ((event.clientX - box.left) / box.width) * this.end;
      const half = (this.window[1] - this.window[0]) / 2;
      this.show(null);
      this.setWindow(t - half, t + half);
    };
    this.strip.addEventListener("pointerdown", (event) => { this.strip.setPointerCapture(event.pointerId); move(event); });
    this.strip.addEventListener("pointermove", (event) => { if (event.buttons) move(event); });
  }

  wireDetail() {
    let grip = null;
    this.canvas.addEventListener("pointerdown", (event) => { if (event.pointerType !== "mouse") { this.select(this.hit(event)); } grip = { x: event.clientX, window: this.window }; this.canvas.setPointerCapture(event.pointerId); this.canvas.classList.add("dragging"); });
    this.canvas.addEventListener("pointermove", (event) => {
      if (grip) {
        const move = ((event.clientX - grip.x) / (this.canvas.clientWidth - this.left)) * (grip.window[1] - grip.window[0]);
        if (Math.abs(event.clientX - grip.x) > 2) this.setWindow(grip.window[0] - move, grip.window[1] - move);
      } else {
        const span = this.hit(event);
        if (span !== this.selected) this.select(span);
      }
    });
    const drop = () => { grip = null; this.canvas.classList.remove("dragging"); };
    this.canvas.addEventListener("pointerup", drop);
    this.canvas.addEventListener("pointercancel", drop);
    this.canvas.addEventListener("pointerleave", () => { if (!grip && this.selected) this.select(null); });
    this.canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      this.zoom(Math.exp(clamp(event.deltaY, -60, 60) / 160), this.inverse(event.clientX - this.canvas.getBoundingClientRect().left));
    }, { passive: false });
    this.canvas.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    const act = {
      ArrowLeft: () => this.neighbor(-1), ArrowRight: () => this.neighbor(1), "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2),
      0: () => this.setWindow(0, this.end), Home: () => this.setWindow(0, this.window[1] - this.window[0]), End: () => this.setWindow(this.end, this.end + this.window[1] - this.window[0]),
    }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }

  neighbor(move) {
    const from = this.selected ? this.spans.indexOf(this.selected) : this.firstAfter(this.window[0]) - (move > 0 ? 1 : 0);
    const span = this.spans[clamp(from + move, 0, this.spans.length - 1)];
    this.select(span);
    announce(`${span.phase}, ${seconds(span.length)}, ${span.x >= 0 ? stepName(span.x) : ""}`);
  }
}
