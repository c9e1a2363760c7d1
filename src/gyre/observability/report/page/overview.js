// Overview: what the run is, what came of it, where the time went.

function overview() {
  const node = document.getElementById("overview");
  document.getElementById("chips").append(...chips());
  const outcome = outcomeCard();
  const ring = DATA.timeline ? ringCard() : null;
  const parts = [outcome, ring].filter(Boolean);
  if (DATA.outcomes.length) document.getElementById("summary").textContent = lead();
  if (parts.length) node.append(el("div", { class: parts.length === 1 ? "hero-grid single" : "hero-grid" }, parts));
  const facts = tiles();
  node.append(el("div", { class: "tiles", style: { "--columns": facts.length > 6 ? Math.ceil(facts.length / 2) : facts.length } }, facts));
  node.append(...DATA.mismatches.map(note));
}

function chips() {
  const texts = [RUN.objective && [RUN.objective.toUpperCase(), "strong"], RUN.model && [RUN.model], RUN.device && [RUN.device], RUN.seed !== null && RUN.seed !== undefined && [`seed ${RUN.seed}`],
    RUN.startedAt && [new Date(RUN.startedAt).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" })],
    !RUN.finished && ["not finished", "warn"], RUN.attempts > 1 && [`resumed ${RUN.attempts - 1 === 1 ? "once" : `${RUN.attempts - 1} times`}`, "warn"]];
  return texts.filter(Boolean).map(([text, kind]) => el("span", { class: `chip ${kind || ""}` }, text));
}

function lead() {
  const first = DATA.outcomes[0];
  const spent = `${RUN.finished ? "in" : "so far, after"} ${seconds(RUN.seconds)}`;
  if (first.path.length < 2) return `One evaluation ${spent}.`;
  if (first.unit !== "fraction" || first.measure !== "accuracy") return `${capital(first.title)} from ${shown(first.before.value, first.unit)} to ${shown(first.after.value, first.unit)} ${spent}.`;
  const points = (first.after.value - first.before.value) * 100;
  if (Math.abs(points) < 0.05) return `As accurate as at the start, ${spent}.`;
  return `${Math.abs(points).toFixed(1)} points ${points > 0 ? "more" : "less"} accurate ${spent}.`;
}

function outcomeCard() {
  if (!DATA.outcomes.length) return lossCard();
  const [first, ...others] = DATA.outcomes;
  const interval = first.after.interval;
  const several = first.path.length > 1;
  return el("div", { class: "card outcome" },
    el("div", { class: "outcome-label" }, el("b", {}, capital(first.title)), first.after.n ? ` · n = ${count(first.after.n)}` : ""),
    el("div", { class: "outcome-numbers", role: "img", "aria-label": span(first) },
      several ? [el("span", { class: "outcome-before" }, tight(first.before.value, first.unit)), arrow()] : null,
      el("span", { class: "outcome-after" }, tight(first.after.value, first.unit))),
    several && first.path.length > 2 ? [pathChart(first), el("p", { class: "outcome-axis" }, `${capital(first.title)}${first.unit === "fraction" ? " (%)" : ""} over steps, ${count(first.path.length)} evaluations`)] : null,
    first.meaning ? el("p", { class: "outcome-meaning" }, `${capital(words(first.measure))}: ${first.meaning}`) : null,
    DATA.contradiction ? el("p", { class: "outcome-warning", role: "note" }, capital(DATA.contradiction)) : null,
    el("div", { class: "outcome-more" },
      interval ? el("span", {}, "95 % interval ", el("b", {}, `${shown(interval[0], first.unit)} to ${shown(interval[1], first.unit)}`)) : null,
      others.slice(0, 4).map((other) => el("span", {}, `${other.title} `, el("b", {}, span(other))))));
}

const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
const tight = (value, unit) => (unit === "fraction" ? `${(value * 100).toFixed(1)}%` : number(value));
const span = ({ path, before, after, unit }) => (path.length > 1 ? `${shown(before.value, unit)} → ${shown(after.value, unit)}` : shown(after.value, unit));
const arrow = () => svg("svg", { class: "outcome-arrow", viewBox: "0 0 46 24", "aria-hidden": "true" },
  svg("path", { d: "M2 12h40M32 3l10 9-10 9", style: { fill: "none", stroke: "currentcolor", "stroke-width": 2.6, "stroke-linecap": "round", "stroke-linejoin": "round" } }));

// A line without axes: how accuracy came about, stage by stage.
function pathChart(outcome) {
  const node = svg("svg", { class: "outcome-path", height: 84, "aria-hidden": "true" });
  drawn(node, (width) => {
    const xs = outcome.path.map((point) => point.x);
    const [low, high] = [Math.min(...xs), Math.max(...xs)];
    const values = outcome.path.map((point) => point.value);
    const [bottom, top] = [Math.min(...values), Math.max(...values)];
    const sx = (x) => 6 + ((x - low) / (high - low || 1)) * (width - 12);
    const sy = (value) => 64 - ((value - bottom) / (top - bottom || 1)) * 46;
    // The last evaluation before a stage is what that stage started from.
    const starts = stagesWithin(low, high).map((stage) => outcome.path.filter((point) => point.x < stage.firstX).pop()).filter((point) => point && point !== outcome.before);
    const line = outcome.path.map((point, at) => `${at ? "L" : "M"}${sx(point.x).toFixed(1)} ${sy(point.value).toFixed(1)}`).join("");
    node.setAttribute("viewBox", `0 0 ${width} 84`);
    const names = RUN.stages.length > 1 ? RUN.stages.filter((stage) => stage.steps > 0 && stage.lastX > low && stage.firstX <= high) : [];
    node.replaceChildren(
      svg("linearGradient", { id: "path-fill", x1: 0, x2: 0, y1: 0, y2: 1 },
        svg("stop", { offset: 0, style: { "stop-color": "var(--accent)", "stop-opacity": 0.25 } }), svg("stop", { offset: 1, style: { "stop-color": "var(--accent)", "stop-opacity": 0 } })),
      svg("path", { d: `${line}L${sx(high)} 66L${sx(low)} 66Z`, fill: "url(#path-fill)" }),
      ...starts.map((point) => svg("text", { x: sx(point.x) - 7, y: sy(point.value) - 9, "text-anchor": "end", style: { fill: "var(--text)", "font-size": "13px", "font-weight": 600 } }, shown(point.value, outcome.unit))),
      ...stagesWithin(low, high).map((stage) => svg("line", { x1: sx(stage.firstX - 0.5), x2: sx(stage.firstX - 0.5), y1: 6, y2: 66, "stroke-dasharray": "3 3", style: { stroke: "var(--muted)", opacity: 0.6 } })),
      svg("path", { d: line, style: { fill: "none", stroke: "var(--accent)", "stroke-width": 2.4, "stroke-linejoin": "round", "stroke-linecap": "round" } }),
      ...outcome.path.map((point) => svg("circle", { cx: sx(point.x), cy: sy(point.value), r: 3.2, style: { fill: "var(--accent)", stroke: "var(--surface)", "stroke-width": 1.5 } })),
      ...names.map((stage) => {
        const [from, to] = [sx(clamp(stage.firstX, low, high)), sx(clamp(stage.lastX, low, high))];
        return to - from < 56 ? svg("text") : svg("text", { x: (from + to) / 2, y: 81, "text-anchor": "middle", style: { fill: "var(--muted)", "font-size": "11.5px" } }, words(stage.name));
      }));
  });
  return node;
}

const stagesWithin = (low, high) => RUN.stages.filter((stage, at) => at > 0 && stage.steps > 0 && stage.firstX > low && stage.firstX < high);

// A run that was never evaluated still has a loss or a reward to show.
function lossCard() {
  const panel = ["reward", "loss"].map((id) => DATA.panels.find((known) => known.id === id)).find(Boolean);
  const values = panel ? panel.series[0].v.filter((value) => value !== null) : [];
  if (values.length < 2) return null;
  return el("div", { class: "card outcome" },
    el("div", { class: "outcome-label" }, el("b", {}, panel.title), " · no evaluation was recorded"),
    el("div", { class: "outcome-numbers" }, el("span", { class: "outcome-before" }, number(values[0])), arrow(), el("span", { class: "outcome-after" }, number(values[values.length - 1]))));
}

function shares() {
  const { seconds: spent, unaccounted_s: rest } = DATA.timeline;
  const outer = DATA.timeline.outer.map((phase) => ({ name: phase, seconds: spent[phase], color: phaseColor(phase) }));
  if (rest > 0.005 * RUN.seconds) outer.push({ name: "between phases", seconds: rest, color: "var(--line)" });
  const total = sum(outer.map((part) => part.seconds)) || 1;
  return outer.map((part) => ({ ...part, share: part.seconds / total }));
}

function ringCard() {
  const parts = shares();
  const gap = parts.length > 1 ? 0.022 : 0;
  const point = (radius, turn) => `${(100 + radius * Math.sin(turn)).toFixed(2)} ${(100 - radius * Math.cos(turn)).toFixed(2)}`;
  let turn = 0;
  const arcs = parts.map((part) => {
    const [from, to] = [turn + gap, Math.max(turn + gap + 0.012, turn + part.share * Math.PI * 2 - gap)];
    turn += part.share * Math.PI * 2;
    const end = Math.min(to, from + Math.PI * 2 - 0.001);
    const large = end - from > Math.PI ? 1 : 0;
    return svg("path", { d: `M${point(84, from)}A84 84 0 ${large} 1 ${point(84, end)}`, style: { fill: "none", stroke: part.color, "stroke-width": 19 } },
      svg("title", {}, `${part.name}: ${seconds(part.seconds)}, ${percent(part.share)}`));
  });
  const label = parts.map((part) => `${part.name} ${percent(part.share, 0)}`).join(", ");
  return el("div", { class: "card ring" },
    svg("svg", { viewBox: "0 0 200 200", role: "img", "aria-label": `Share of time by phase: ${label}` }, arcs,
      svg("text", { class: "ring-center", x: 100, y: 104, "text-anchor": "middle", style: { "font-size": `${Math.min(27, 230 / seconds(RUN.seconds).length)}px` } }, seconds(RUN.seconds)),
      svg("text", { class: "ring-sub", x: 100, y: 123, "text-anchor": "middle" }, RUN.gaps.length ? "of running" : "wall time")),
    el("ul", { class: "share", "aria-label": "Time by phase" }, parts.map((part) =>
      el("li", {}, dot(part.color), el("span", {}, part.name), el("span", { class: "num" }, seconds(part.seconds)), el("b", {}, percent(part.share, part.share < 0.0995 ? 1 : 0))))));
}

function tiles() {
  const made = [];
  const tile = (label, value, sub) => made.push(el("div", { class: "card tile" },
    el("div", { class: "tile-label" }, label), el("div", { class: "tile-value" }, value), el("div", { class: "tile-sub" }, sub || "\u00a0")));
  const last = (id) => { const panel = DATA.panels.find((known) => known.id === id); return panel ? panel.series.find((line) => !line.dots) : null; };
  const ends = (line) => { const values = line.v.filter((value) => value !== null); return [values[0], values[values.length - 1]]; };
  const steps = sum(RUN.stages.map((stage) => stage.steps));
  tile("Steps", count(steps), RUN.stages.filter((stage) => stage.steps).map((stage) => `${words(stage.name)} ${count(stage.steps)}`).join(" + "));
  for (const [id, label, digits] of [["reward", "Reward"], ["length", "Length", "tokens"], ["kl", "KL", "nats"], ["logprob_gap", "Log-prob gap", "nats"]]) {
    const line = last(id);
    if (!line) continue;
    const [from, to] = ends(line);
    if (to !== undefined) tile(label, number(to), `from ${number(from)}${digits ? ` ${digits}` : ""}`);
  }
  const speed = last("tokens_per_second");
  if (speed) {
    const stage = stageAt(speed.x[speed.x.length - 1]);
    const sorted = speed.v.filter((value, at) => value !== null && stageAt(speed.x[at]) === stage).sort((a, b) => a - b);
    if (sorted.length) tile("Tokens per second", number(sorted[sorted.length >> 1]), `median of ${stage && RUN.stages.length > 1 ? words(stage.name) : "the run"}`);
  }
  if (DATA.memory) peakTile(tile);
  tile("Counted events", count(RUN.numCounted), RUN.numCounted ? "fallbacks, drops, retries" : "nothing fell back");
  return made;
}

// The most that was ever allocated, as the allocator or the system measured it within phases; else the largest sum of
// components at the end of a phase, which is less.
function peakTile(tile) {
  const { peak } = DATA.memory;
  const at = (phase) => (phase === "idle" ? "between phases" : `in ${phase || "the run"}`);
  const held = peakOf("device");
  if (!peak) tile("Most held by components", bytes(held.total), at(held.phase));
  else if (peak.of === "device") tile("Peak device memory", bytes(peak.bytes), at(peak.phase));
  else tile("Peak process memory", bytes(peak.bytes), `components ${bytes(held.total)} at most`);
}

function peakOf(tier) {
  const values = DATA.memory.tiers[tier];
  let best = { total: 0, at: 0 };
  DATA.memory.phase.forEach((_, at) => {
    const total = sum(DATA.memory.owners.map((owner) => values[owner][at]));
    if (total > best.total) best = { total, at };
  });
  return { ...best, phase: DATA.memory.phase[best.at], step: DATA.memory.step[best.at] };
}
