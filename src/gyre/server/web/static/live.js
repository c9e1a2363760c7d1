// Live: the server as it works. In: /metrics, every two seconds while this view is seen. Out: tiles, and a card for each engine, with their last minutes.

import { ApiFailure, explain, getText } from "./api.js";
import { button, count, el, percent, plural, rate, seconds, svg } from "./dom.js";
import { quantile, sample, tokenRate } from "./metrics.js";

const LOOK_MS = 2000;
const MOST_SAMPLES = 150; // five minutes
const LEAST_SAMPLES = 30; // that a line has room for

export class Live {
  constructor(root, server, { openKey }) {
    Object.assign(this, { root, server, openKey, samples: [], failure: null });
    this.tiles = el("div", { class: "tiles" });
    this.engines = el("div", { class: "engines" });
    this.notice = el("div", { class: "failure", role: "status", hidden: true });
    this.ends = el("div", { class: "ends card" });
    this.head = el("p", {});
    root.append(el("div", { class: "section-head" }, el("div", {}, el("h1", {}, "Live"), this.head)), this.notice, this.tiles,
      el("h2", {}, "Engines"), this.engines, el("h2", {}, "Requests since the start"), this.ends);
    document.addEventListener("visibilitychange", () => this.look());
    this.draw();
  }

  get isSeen() {
    return !this.root.hidden && !document.hidden;
  }

  // Look now, and again as long as the view is seen.
  async look() {
    clearTimeout(this.timer);
    if (!this.isSeen || this.isLooking) return;
    this.isLooking = true;
    try {
      this.take(sample(await getText("/metrics"), performance.now()));
      this.failure = null;
    } catch (error) {
      if (!(error instanceof ApiFailure)) throw error;
      this.failure = error;
    } finally {
      this.isLooking = false;
    }
    this.draw();
    if (this.isSeen) this.timer = setTimeout(() => this.look(), LOOK_MS);
  }

  take(one) {
    // what was measured before a pause would be drawn as if it had been just now
    if (this.samples.length && one.nowMs - this.samples.at(-1).nowMs > 5 * LOOK_MS) this.samples = [];
    this.samples.push(one);
    if (this.samples.length > MOST_SAMPLES) this.samples.shift();
  }

  draw() {
    this.drawNotice();
    const now = this.samples.at(-1);
    const { model, contextTokens } = this.server.state;
    this.head.textContent = now ? `${model || "The model"}${contextTokens ? `, ${count(contextTokens)} tokens of context` : ""}. Asked every two seconds; lines show up to five minutes.` : "Numbers come as soon as the server has told them.";
    for (const node of [this.tiles, this.engines, this.ends]) node.classList.toggle("old", this.failure !== null);
    for (const node of this.root.querySelectorAll("h2, .ends")) node.hidden = !now;
    if (!now) {
      this.tiles.replaceChildren();
      return;
    }
    this.drawTiles(now);
    this.engines.replaceChildren(...now.engines.map((one) => this.drawEngine(one)));
    if (!now.engines.length) this.engines.replaceChildren(el("p", { class: "note" }, "No engine has told its numbers yet."));
    this.drawEnds(now);
  }

  drawNotice() {
    this.notice.hidden = this.failure === null;
    if (this.failure === null) return;
    const { title, text, next, action } = explain(this.failure);
    this.notice.replaceChildren(el("h3", {}, title), el("p", {}, [text, next, this.samples.length ? "The numbers below are the last ones." : ""].filter(Boolean).join(" ")),
      action === "key" && el("div", { class: "row" }, button("Enter a key", this.openKey, { class: "btn strong" })));
  }

  series(read) {
    return this.samples.map((one, place) => read(one, this.samples[place - 1]));
  }

  drawTiles(now) {
    const sum = (read) => (one) => one.engines.reduce((all, engine) => all + (read(engine) || 0), 0);
    const rates = this.series((one, before) => (before ? tokenRate(before, one) : NaN));
    const running = sum((engine) => engine.running);
    const waiting = sum((engine) => engine.waiting);
    const kv = (one) => Math.max(0, ...one.engines.map((engine) => engine.kvUsed || 0));
    const [within, before] = firstTokenSpan(this.samples[0].firstToken, now.firstToken);
    const slow = quantile(0.95, before, now.firstToken);
    this.tiles.replaceChildren(
      tile("Tokens per second", rate(rates.at(-1)), "of all engines", rates, "--c3"),
      tile("Running", count(running(now)), plural(now.inFlight, "request"), this.series(running), "--c1"),
      tile("Waiting", count(waiting(now)), "for a place in the batch", this.series(waiting), "--c2"),
      tile("KV cache", percent(kv(now)), "of the fullest engine", this.series(kv), "--c4", 1),
      tile("First token", seconds(quantile(0.5, before, now.firstToken)), Number.isFinite(slow) ? `median ${within}; 95 % within ${seconds(slow)}` : "none yet", null));
  }

  drawEngine(one) {
    const of = (read) => this.series((moment, before) => {
      const found = moment.engines.find(({ engine }) => engine === one.engine);
      return found ? read(found, moment, before) : NaN;
    });
    const rates = of((_, moment, before) => (before ? tokenRate(before, moment, one.engine) : NaN));
    const isOld = one.ageS > 10;
    const fact = (name, value) => el("div", {}, el("dt", {}, name), el("dd", {}, value));
    const number = (value) => (Number.isFinite(value) ? count(value) : "–");
    return el("article", { class: "engine card", "aria-label": `Engine ${one.engine}` },
      el("header", {}, el("h3", {}, `Engine ${one.engine}`), el("span", { class: `state ${one.isUp ? "good" : "bad"}` }, el("i", { class: "dot" }), one.isUp ? "ready" : "not ready"),
        isOld && el("span", { class: "state warn" }, `numbers are ${seconds(one.ageS)} old`)),
      el("div", { class: "kv" }, el("div", { class: "kv-head" }, el("span", {}, "KV cache"), el("b", {}, percent(one.kvUsed))),
        el("div", { class: "meter", role: "meter", "aria-label": "KV cache in use", "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": Math.round((one.kvUsed || 0) * 100), vars: { "--p": `${(one.kvUsed || 0) * 100}%` } })),
      el("div", { class: "lines" },
        el("div", {}, el("span", {}, "tokens/s ", el("b", {}, rate(rates.at(-1)))), spark(rates, "--c3")),
        el("div", {}, el("span", {}, "running ", el("b", {}, number(one.running))), spark(of((engine) => engine.running), "--c1")),
        el("div", {}, el("span", {}, "waiting ", el("b", {}, number(one.waiting))), spark(of((engine) => engine.waiting), "--c2"))),
      el("dl", {}, fact("Prefix hits", percent(one.queries ? one.hits / one.queries : NaN)), fact("Outstanding tokens", number(one.outstanding)),
        fact("Preemptions", number(one.preemptions)), fact("Tokens chosen", number(one.generated)), fact("Weights", Number.isFinite(one.version) ? `version ${one.version}` : "–")));
  }

  drawEnds(now) {
    const names = { stop: "ended by themselves", length: "reached their limit", abort: "the client left", error: "failed" };
    const ended = Object.entries(names).map(([reason, text]) => el("li", {}, el("b", {}, count(now.finished[reason] ?? 0)), ` ${text}`));
    const errors = Object.entries(now.errors).filter(([, value]) => value > 0).map(([code, value]) => el("li", {}, el("b", {}, count(value)), " ", el("code", {}, code)));
    this.ends.replaceChildren(el("ul", {}, ended), errors.length ? el("ul", { "aria-label": "Refused and failed" }, errors) : el("p", { class: "note" }, "Nothing was refused."));
  }
}

// Of what came while the view was open; of everything, where nothing did.
function firstTokenSpan(before, now) {
  const came = now.at(-1)?.value > (before.at(-1)?.value ?? 0);
  return came ? ["in this view", before] : ["since the start", []];
}

function tile(label, value, note, values, color, most = 0) {
  return el("section", { class: "tile card" }, el("h3", { class: "tile-label" }, label), el("p", { class: "tile-value" }, value), el("p", { class: "tile-sub" }, note), values && spark(values, color, most));
}

// A line of the last minutes, from 0 to the highest value. Its last value stands beside it as text, so it is hidden from readers.
export function spark(values, color, most = 0) {
  const width = 240;
  const height = 36;
  const known = values.filter(Number.isFinite);
  const top = Math.max(most, ...known, Number.EPSILON);
  const room = Math.max(LEAST_SAMPLES, values.length) - 1;
  const x = (place) => (width * (room - values.length + 1 + place)) / room;
  const y = (value) => height - 2 - (value / top) * (height - 5);
  const points = values.map((value, place) => (Number.isFinite(value) ? [x(place), y(value)] : null)).filter(Boolean);
  const path = points.map(([left, up], place) => `${place ? "L" : "M"}${left.toFixed(1)} ${up.toFixed(1)}`).join("");
  const area = points.length ? `${path}L${points.at(-1)[0].toFixed(1)} ${height}L${points[0][0].toFixed(1)} ${height}Z` : "";
  const node = svg("svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" },
    svg("path", { class: "base", d: `M0 ${height - 0.5}H${width}`, "vector-effect": "non-scaling-stroke" }), svg("path", { class: "area", d: area }), svg("path", { class: "line", d: path, "vector-effect": "non-scaling-stroke" }));
  node.style.setProperty("--line-color", `var(${color})`);
  return node;
}
