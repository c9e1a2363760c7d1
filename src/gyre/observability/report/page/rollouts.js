// Rollouts: choose a step and a prompt, read what the policy wrote, token by token, and why it was scored so.

const ORDERS = { "as sampled": null, "best first": (a, b) => b.mean - a.mean, "worst first": (a, b) => a.mean - b.mean, "most divided": (a, b) => b.spread - a.spread };
const points = (score) => (score === null ? "–" : Math.abs(score) < 100 ? score.toFixed(2).replace("-", "−") : number(score));
const GOOD_FINISH = ["stop", ""];

function rolloutSection() {
  if (!DATA.samples) return;
  const node = section("rollouts", "Rollouts", "What the policy wrote. Shaded tokens surprised it; hover one, or use arrow keys, to see its probability.");
  node.append(new RolloutBrowser(DATA.samples).node, ...DATA.samples.notes.map(note));
}

class RolloutBrowser {
  constructor(data) {
    this.pieces = data.pieces;
    this.steps = data.steps;
    const scores = this.steps.flatMap((step) => step.groups.flatMap((group) => group.rollouts.map((rollout) => rollout.score))).filter((score) => score !== null);
    this.low = scores.length ? Math.min(...scores) : 0;
    this.high = scores.length ? Math.max(...scores) : 1;
    const groups = this.steps.flatMap((step) => step.groups);
    const texts = excerpts(groups.map((group) => group.prompt));
    groups.forEach((group, at) => Object.assign(group, this.spreadOf(group), { excerpt: texts[at] }));
    this.at = { step: this.steps.length - 1, group: null, rollout: 0 };
    this.order = "as sampled";
    this.build();
    this.setStep(this.at.step);
  }

  spreadOf(group) {
    const scores = group.rollouts.map((rollout) => rollout.score ?? 0);
    const mean = sum(scores) / (scores.length || 1);
    return { mean, spread: Math.sqrt(sum(scores.map((score) => (score - mean) ** 2)) / (scores.length || 1)) };
  }

  // Red for the run's lowest score, green for its highest.
  color(score) {
    if (score === null || score === undefined) return "var(--muted)";
    const share = this.high > this.low ? (score - this.low) / (this.high - this.low) : 1;
    return `color-mix(in oklab, var(--good) ${Math.round(share * 100)}%, var(--bad))`;
  }

  build() {
    const step = (move) => el("button", { class: "btn", type: "button", "aria-label": move < 0 ? "Earlier step" : "Later step", on: { click: () => this.setStep(this.at.step + move) } }, move < 0 ? "◀" : "▶");
    [this.back, this.forward] = [step(-1), step(1)];
    this.stepName = el("output", {});
    this.slider = el("input", { type: "range", min: 0, max: this.steps.length - 1, step: 1, "aria-label": "Step", on: { input: () => this.setStep(Number(this.slider.value)) } });
    this.slider.hidden = this.steps.length < 2;
    const order = el("select", { "aria-label": "Order of prompts", on: { change: () => { this.order = order.value; this.at.group = null; this.listGroups(); } } }, Object.keys(ORDERS).map((name) => el("option", { value: name }, name)));
    this.list = el("ul", { class: "groups", "aria-label": "Prompts of this step" });
    this.main = el("div", { class: "browser-main" });
    this.node = el("div", { class: "card browser" },
      el("div", { class: "browser-side" },
        el("div", { class: "browser-pick" }, el("div", { class: "stepper" }, this.back, this.stepName, this.forward), this.slider, el("label", { class: "field" }, "Prompts", order)),
        this.list),
      this.main);
  }

  setStep(at) {
    this.at.step = clamp(at, 0, this.steps.length - 1);
    const step = this.steps[this.at.step];
    this.back.disabled = this.at.step === 0;
    this.forward.disabled = this.at.step === this.steps.length - 1;
    this.slider.value = this.at.step;
    this.stepName.textContent = RUN.stages.length > 1 && step.stage ? `${words(step.stage)} · step ${number(step.step)}` : `step ${number(step.step)}`;
    this.at.group = null;
    this.listGroups();
  }

  groups() {
    const groups = this.steps[this.at.step].groups;
    return ORDERS[this.order] ? groups.slice().sort(ORDERS[this.order]) : groups;
  }

  listGroups() {
    const groups = this.groups();
    if (!groups.includes(this.at.group)) this.at.group = groups[0];
    this.list.replaceChildren(...groups.map((group) => el("li", {},
      el("button", { class: "group", type: "button", "aria-current": String(group === this.at.group), on: { click: () => { this.at.group = group; this.listGroups(); this.setRollout(0); } } },
        el("span", { class: "group-text" }, group.excerpt),
        el("span", { class: "group-dots" }, group.rollouts.map((rollout) => el("i", { style: { "--dot": this.color(rollout.score) } })), el("span", {}, `mean ${points(group.mean)}`))))));
    this.setRollout(Math.min(this.at.rollout, this.at.group.rollouts.length - 1));
  }

  setRollout(at) {
    this.at.rollout = at;
    const group = this.at.group;
    const tabs = group.rollouts.map((rollout, number_) => el("button", {
      class: "tab", type: "button", role: "tab", id: `rollout-tab-${number_}`, "aria-selected": String(number_ === at), tabindex: number_ === at ? 0 : -1, "aria-controls": "rollout-panel",
      on: { click: () => this.setRollout(number_), keydown: (event) => this.tabKey(event, number_) },
    }, el("i", { style: { "--dot": this.color(rollout.score) } }), el("span", {}, `#${number_ + 1}`), el("b", {}, points(rollout.score))));
    this.main.replaceChildren(
      el("div", {}, el("div", { class: "block-label" }, el("span", {}, "Prompt"), group.promptCut ? el("span", {}, `${count(group.promptCut)} more characters are not on this page`) : null), el("div", { class: "prompt", tabindex: 0, role: "region", "aria-label": "Prompt" }, group.prompt)),
      el("div", { class: "tabs", role: "tablist", "aria-label": "Completions" }, tabs),
      this.rolloutPanel(group.rollouts[at]));
    this.tabs = tabs;
  }

  tabKey(event, at) {
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: this.at.group.rollouts.length - 1 }[event.key];
    if (to === undefined || to < 0 || to >= this.at.group.rollouts.length) return;
    event.preventDefault();
    this.setRollout(to);
    this.tabs[to].focus();
  }

  rolloutPanel(rollout) {
    const known = rollout.logprobs.filter((logprob) => logprob !== null);
    const facts = [["score", points(rollout.score)], ["tokens", count(rollout.numTokens)], known.length ? ["mean log-prob", number(sum(known) / known.length)] : null].filter(Boolean);
    return el("div", { id: "rollout-panel", role: "tabpanel", "aria-labelledby": `rollout-tab-${this.at.rollout}`, style: { display: "grid", gap: "14px" } },
      el("div", { class: "facts" },
        facts.map(([name, value]) => el("span", { class: "chip" }, `${name} `, el("b", { style: { color: "var(--text)" } }, value))),
        el("span", { class: GOOD_FINISH.includes(rollout.finish) ? "chip" : "chip warn" }, `finish: ${rollout.finish || "unknown"}`)),
      this.completion(rollout, known.length > 0),
      rollout.parts.length ? this.partsTable(rollout) : null);
  }

  completion(rollout, shaded) {
    if (rollout.text !== null) return el("div", { class: "completion", tabindex: 0, role: "region", "aria-label": "Completion" }, rollout.text || "(empty)");
    const inspect = el("div", { class: "inspect" }, "Hover a token.");
    const tokens = rollout.tokens.map((piece, at) => tokenNode(this.pieces[piece][1], rollout.logprobs[at], at));
    const box = el("div", { class: "completion", tabindex: 0, role: "region", "aria-label": "Completion, token by token. Arrow keys move." }, tokens);
    let current = null;
    const point = (at, aloud) => {
      if (current !== null) tokens[current].classList.remove("on");
      current = at;
      if (at === null) { inspect.replaceChildren("Hover a token."); return; }
      tokens[at].classList.add("on");
      const [id, piece] = this.pieces[rollout.tokens[at]];
      const logprob = rollout.logprobs[at];
      inspect.replaceChildren(el("code", {}, visible(piece)), el("span", {}, "token ", el("b", {}, at + 1)), el("span", {}, "id ", el("b", {}, id)),
        logprob === null ? el("span", {}, "not sampled") : el("span", {}, "log-prob ", el("b", {}, number(logprob))), logprob === null ? "" : el("span", {}, "probability ", el("b", {}, percent(Math.exp(logprob), Math.exp(logprob) < 0.0995 ? 2 : 1))));
      if (aloud) { announce(`token ${at + 1}: ${visible(piece)}, log-prob ${number(logprob)}`); tokens[at].scrollIntoView({ block: "nearest" }); }
    };
    box.addEventListener("pointerover", (event) => { const token = event.target.closest(".tok"); if (token) point(Number(token.dataset.at)); });
    box.addEventListener("pointerleave", () => point(null));
    box.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (move === undefined || !tokens.length) return;
      event.preventDefault();
      point(clamp(current === null ? 0 : current + move, 0, tokens.length - 1), true);
    });
    const left = rollout.numTokens - rollout.tokens.length;
    const toggle = el("input", { type: "checkbox", checked: true, on: { change: () => box.classList.toggle("plain", !toggle.checked) } });
    return el("div", {},
      el("div", { class: "block-label" }, el("span", {}, left > 0 ? `Completion · the last ${count(left)} tokens are not on this page` : "Completion"),
        shaded ? el("span", { class: "controls" }, el("span", { class: "ramp" }, "sure", el("i"), "surprised"), el("label", { class: "field" }, toggle, "shade")) : null),
      tokens.length ? box : el("div", { class: "completion muted" }, "(no tokens)"), inspect);
  }

  partsTable(rollout) {
    const tag = (outcome) => el("span", { class: `tag ${outcome === "ok" ? "ok" : outcome === "invalid" ? "warn" : "bad"}` }, outcome);
    return el("div", { class: "scroll" }, el("table", { class: "cards" },
      el("thead", {}, el("tr", {}, el("th", {}, "Reward"), el("th", {}, "Outcome"), el("th", { class: "r" }, "Value"), el("th", { class: "r" }, "Weight"), el("th", {}, "Why"))),
      el("tbody", {}, rollout.parts.map((part) => el("tr", {}, el("td", { class: "kind" }, part.name), el("td", {}, tag(part.outcome)), el("td", { class: "r", "data-label": "value" }, el("b", {}, number(part.value))),
        el("td", { class: "r muted", "data-label": "weight" }, number(part.weight)), el("td", { class: "wide" }, part.reason || "–"))))));
  }
}

const visible = (text) => (text === "" ? "(empty)" : text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥"));

// What tells a prompt from the others: its text without template marks and without the words that all of them begin with.
function excerpts(prompts) {
  const plain = prompts.map((prompt) => prompt.replace(/<\|?[\w/]+\|?>/g, " ").replace(/\s+/g, " ").trim() || prompt);
  let shared = plain.length > 1 ? plain[0] : "";
  for (const text of plain) while (!text.startsWith(shared)) shared = shared.slice(0, -1);
  const cut = shared.length < 24 || plain.includes(shared) ? 0 : shared.lastIndexOf(" ") + 1;
  return plain.map((text) => (cut ? `…${text.slice(cut)}` : text));
}

function tokenNode(text, logprob, at) {
  const heat = logprob === null ? 0 : clamp(Math.sqrt(-Math.min(0, logprob)) * 32, 0, 78);
  const node = el("span", { class: "tok", "data-at": at, style: { "--h": `${heat < 3 ? 0 : heat.toFixed(0)}%` } });
  text.split("\n").forEach((line, number_) => {
    if (number_) node.append(el("span", { class: "ws", "aria-hidden": "true" }, "↵"), "\n");
    node.append(line);
  });
  return node;
}
