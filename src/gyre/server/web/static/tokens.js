// Tokens: an answer token by token, colored by probability. In: tokens with log-probs. Out: marks, and a card beside the one that is looked at.
// A mark is looked at by mouse, by touch, or by the arrow keys once the text has the focus.

import { byId, el, percent } from "./dom.js";

const MOST_MARKS = 4000; // more would make the page slow; the rest is told as a count

export class TokenText {
  constructor() {
    this.text = el("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": "Tokens; the arrow keys go from one to the next" });
    this.rest = el("p", { class: "note" });
    this.node = el("div", {}, this.text, this.rest, el("p", { class: "ramp note" }, "Probability 100 %", el("i", {}), "below 1 %. Point at a token, or go with the arrow keys."));
    this.tokens = [];
    this.at = -1;
    const mark = (event) => event.target.closest(".tok");
    this.text.addEventListener("pointerover", (event) => { if (mark(event) && event.pointerType === "mouse") this.look(mark(event).place); });
    this.text.addEventListener("pointerleave", () => hidePeek());
    this.text.addEventListener("click", (event) => { if (mark(event)) this.look(mark(event).place); });
    this.text.addEventListener("keydown", (event) => this.onKey(event));
    this.text.addEventListener("blur", () => hidePeek());
  }

  // Show these tokens, which begin with those shown before.
  show(tokens) {
    for (let place = this.tokens.length; place < Math.min(tokens.length, MOST_MARKS); place += 1) {
      const node = el("span", { class: "tok", vars: { "--h": `${heat(tokens[place].logprob)}%` } }, visible(tokens[place].token).replaceAll("⏎", "⏎\n"));
      node.place = place;
      this.text.append(node);
    }
    this.tokens = tokens.slice(0, MOST_MARKS);
    this.rest.textContent = tokens.length > MOST_MARKS ? `${tokens.length - MOST_MARKS} more tokens are not drawn.` : "";
  }

  onKey(event) {
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
    const places = { Home: 0, End: this.tokens.length - 1 };
    if (event.key === "Escape" && !byId("peek").hidden) {
      hidePeek();
      event.stopPropagation();
    } else if (event.key in steps || event.key in places) {
      const place = event.key in steps ? this.at + steps[event.key] : places[event.key];
      this.look(Math.max(0, Math.min(this.tokens.length - 1, place)));
      event.preventDefault();
    }
  }

  look(place) {
    if (!this.tokens.length) return;
    hidePeek();
    this.at = place;
    const node = this.text.children[place];
    node.classList.add("on");
    node.scrollIntoView({ block: "nearest" });
    showPeek(node, this.tokens[place]);
  }
}

// From no color at a sure token to most at one whose probability is below 1 in 100.
const heat = (logprob) => Math.round(Math.min(1, Math.sqrt(Math.max(0, -logprob) / 4.6)) * 70);

export const visible = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";

function showPeek(node, token) {
  const others = token.top_logprobs.length ? token.top_logprobs : [token];
  const same = (other) => other.token === token.token && other.logprob === token.logprob;
  const rows = others.some(same) ? others : [...others, token];
  const peek = byId("peek");
  peek.replaceChildren(
    el("p", { class: "peek-head" }, el("code", {}, spaced(token.token)), el("b", {}, percent(Math.exp(token.logprob))), el("span", {}, `log-prob ${token.logprob.toFixed(3).replace("-", "−")}`)),
    el("ol", {}, rows.map((other) => el("li", { class: same(other) ? "chosen" : "", vars: { "--p": `${Math.exp(other.logprob) * 100}%` } },
      el("code", {}, spaced(other.token)), el("span", {}, percent(Math.exp(other.logprob)))))));
  peek.hidden = false;
  movePeek();
  byId("spoken").textContent = `${token.token}: ${percent(Math.exp(token.logprob))}`;
}

// Spaces are what tokens often differ by, so they are shown here.
const spaced = (text) => visible(text).replaceAll(" ", "␣");

// Put the card beside its token, where that is now.
export function movePeek() {
  const peek = byId("peek");
  const box = document.querySelector(".tok.on")?.getClientRects()[0];
  if (peek.hidden || !box) return;
  const margin = 8;
  const { width, height } = peek.getBoundingClientRect();
  const left = Math.min(Math.max(margin, box.left + box.width / 2 - width / 2), innerWidth - width - margin);
  const above = box.top - height - margin;
  peek.style.setProperty("left", `${left}px`);
  peek.style.setProperty("top", `${above > margin ? above : box.bottom + margin}px`);
}

export function hidePeek() {
  byId("peek").hidden = true;
  for (const node of document.querySelectorAll(".tok.on")) node.classList.remove("on");
}
