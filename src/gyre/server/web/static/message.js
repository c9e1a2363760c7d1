// Message: how a turn of the conversation looks. In: a record of conversation.js. Out: an element, brought up to date while the answer comes.

import { explain } from "./api.js";
import { isWhole, measure } from "./conversation.js";
import { button, count, el, plural, rate, seconds } from "./dom.js";
import { copyText, showMarkdown } from "./markdown.js";
import { TokenText } from "./tokens.js";

export function userTurn(message, { onEdit }) {
  const node = el("article", { class: "turn user", "aria-label": "You" }, el("div", { class: "said" }, message.text));
  node.append(el("div", { class: "turn-tools" }, button("Edit", () => onEdit(message), { class: "link" })));
  return node;
}

const FINISHES = { stop: "", tool_calls: "calls tools", length: "stopped at the limit of tokens" };

export class AnswerTurn {
  // `actions`: onRetry, onResults, onKey, onSettings
  constructor(answer, actions, { isLast }) {
    this.answer = answer;
    this.actions = actions;
    this.isLast = isLast;
    this.reasoningText = el("div", { class: "reasoning-text" });
    this.reasoningHead = el("summary", {});
    this.reasoning = el("details", { class: "reasoning", hidden: true, open: true }, this.reasoningHead, this.reasoningText);
    this.said = el("div", { class: "said prose" });
    this.tokens = new TokenText();
    this.tokens.node.hidden = true;
    this.calls = el("div", { class: "calls" });
    this.callNodes = [];
    this.waiting = el("p", { class: "waiting" }, el("i", { class: "pulse" }), el("span", {}));
    this.failure = el("div", { class: "failure", role: "alert", hidden: true });
    this.facts = el("p", { class: "facts" });
    this.tools = el("div", { class: "turn-tools" });
    this.node = el("article", { class: "turn assistant", "aria-label": "Model" },
      this.waiting, this.reasoning, this.said, this.tokens.node, this.calls, this.failure, this.facts, this.tools);
    this.showsTokens = false;
    this.update();
  }

  update() {
    const { answer } = this;
    const isOpen = answer.state === "waiting" || answer.state === "streaming";
    this.node.dataset.state = answer.state;
    this.waiting.hidden = answer.state !== "waiting";
    this.waiting.lastChild.textContent = waitingText(answer);
    this.updateReasoning(isOpen);
    if (this.showsTokens) this.tokens.show(answer.tokens);
    else showMarkdown(this.said, answer.text.trimStart());
    this.said.hidden = this.showsTokens || !answer.text.trim();
    answer.calls.forEach((call, place) => this.updateCall(call, place, isOpen));
    this.updateFacts(isOpen);
    if (!isOpen) this.close();
  }

  updateReasoning(isOpen) {
    const { answer } = this;
    this.reasoning.hidden = !answer.reasoning;
    if (!answer.reasoning) return;
    const isThinking = isOpen && !answer.text && !answer.calls.length;
    this.reasoningHead.textContent = isThinking ? "Thinking" : "Thought before the answer";
    if (this.reasoningText.textContent !== answer.reasoning) this.reasoningText.textContent = answer.reasoning;
    // folded once, when the answer begins; after that whoever reads decides
    if (!isThinking && !this.wasFolded) {
      this.wasFolded = true;
      this.reasoning.open = !answer.text && !answer.calls.length;
    }
  }

  updateCall(call, place, isOpen) {
    if (!this.callNodes[place]) {
      const name = el("code", {});
      const text = el("pre", { tabindex: "0", "aria-label": "Arguments" });
      const result = el("textarea", { rows: 2, class: "mono", spellcheck: "false", placeholder: "What the tool answers", "aria-label": "Answer of the tool" });
      result.value = call.result;
      result.addEventListener("input", () => { call.result = result.value; });
      result.addEventListener("keydown", (event) => {
        if (event.key === "Enter" && (event.metaKey || event.ctrlKey)) this.actions.onResults(this.answer);
      });
      const answerBox = el("label", { class: "result", hidden: true }, el("span", {}, "Answer"), result);
      const answered = el("div", { class: "result", hidden: true }, el("span", {}, "Answer"), el("pre", { tabindex: "0", "aria-label": "Answer of the tool" }));
      const state = el("span", { class: "call-state" });
      this.calls.append(el("section", { class: "call" }, el("header", {}, el("span", {}, "Calls"), name, state), text, answerBox, answered));
      this.callNodes[place] = { name, text, result, answerBox, answered, state };
    }
    const { name, text, answerBox, answered, state } = this.callNodes[place];
    name.textContent = call.name;
    text.textContent = isWhole(call) ? pretty(call.arguments) : call.arguments;
    const isAnswered = call.answered !== undefined;
    answerBox.hidden = isOpen || isAnswered || !isWhole(call) || !this.isLast();
    answered.hidden = !isAnswered;
    answered.lastChild.textContent = call.answered ?? "";
    state.textContent = isOpen || isWhole(call) ? "" : "incomplete: it cannot be answered";
  }

  updateFacts(isOpen) {
    const { tokens, promptTokens, firstS, perS, totalS } = measure(this.answer);
    const { answer } = this;
    const parts = [];
    if (Number.isFinite(firstS)) {
      parts.push([plural(tokens, "token"), "Tokens of the answer"], [`${rate(perS)} tokens/s`, "After the first token"], [`first after ${seconds(firstS)}`, "From sending to the first token"]);
      if (!isOpen) parts.push([`${seconds(totalS)} in all`, "From sending to the end"]);
      if (promptTokens !== null) parts.push([`${count(promptTokens)} in the prompt`, "Tokens of the prompt"]);
    }
    if (answer.state === "stopped") parts.push(["stopped by you", "The engine was told to end it"]);
    if (FINISHES[answer.finish]) parts.push([FINISHES[answer.finish], "Why it ended"]);
    if (answer.version && !isOpen) parts.push([answer.version.replace("-", " "), "Of the weights"]);
    this.facts.replaceChildren(...parts.map(([text, title]) => el("span", { title }, text)));
    this.facts.hidden = !parts.length;
  }

  // What can be done once the answer has ended.
  close() {
    const { answer, actions } = this;
    const tools = [];
    if (answer.text) {
      const copy = button("Copy", () => copyText(answer.text, copy), { class: "link" });
      tools.push(copy);
    }
    if (answer.tokens.length) {
      tools.push(button(this.showsTokens ? "Text" : "Tokens", () => this.toggleTokens(), { class: "link", "aria-pressed": String(this.showsTokens) }));
    }
    if (this.isLast() && answer.state !== "failed") tools.push(button("Regenerate", () => actions.onRetry(answer), { class: "link" }));
    this.tools.replaceChildren(...tools);
    const open = answer.calls.filter((call) => isWhole(call) && call.answered === undefined);
    if (open.length && this.isLast() && !this.sendResults) {
      this.sendResults = el("div", { class: "row" }, button(open.length > 1 ? "Send answers" : "Send answer", () => actions.onResults(answer), { class: "btn strong" }));
      this.calls.append(this.sendResults);
    } else if (this.sendResults && (!open.length || !this.isLast())) {
      this.sendResults.remove();
      this.sendResults = null;
    }
    if (answer.failure && !this.failure.childNodes.length) this.showFailure(answer.failure);
    if (!answer.text && !answer.calls.length && answer.state === "done") {
      this.said.hidden = this.showsTokens;
      this.said.replaceChildren(el("p", { class: "note" }, "The answer is empty."));
    }
    this.failure.hidden = !answer.failure;
    // to try an earlier answer again would drop what came after it
    if (answer.failure) this.failure.lastChild.hidden = !this.isLast();
  }

  toggleTokens() {
    this.showsTokens = !this.showsTokens;
    this.tokens.node.hidden = !this.showsTokens;
    this.update();
    this.tools.querySelector("[aria-pressed]").focus();
  }

  showFailure(failure) {
    const { title, text, next, action } = explain(failure);
    const { onKey, onSettings, onRetry } = this.actions;
    const retry = button("Try again", () => onRetry(this.answer), { class: "btn strong" });
    const actions = { key: [button("Enter a key", onKey, { class: "btn strong" }), retry], settings: [button("Open settings", () => onSettings(failure), { class: "btn" }), retry], retry: [retry], "": [] }[action];
    this.failure.replaceChildren(el("h3", {}, title), el("p", {}, [text, next].filter(Boolean).join(" ")), el("div", { class: "row" }, actions));
    if (failure.retryS) countDown(retry, failure.retryS);
  }
}

function countDown(node, fromS) {
  const text = node.textContent;
  let left = Math.ceil(fromS);
  const tick = () => {
    node.textContent = left > 0 ? `${text} in ${left} s` : text;
    node.disabled = left > 0;
    left -= 1;
    if (left >= 0) setTimeout(tick, 1000);
  };
  tick();
}

function waitingText({ queue, times }) {
  const waitedS = (performance.now() - times.sentMs) / 1000;
  const parts = [waitedS < 3 ? "Waiting for the first token" : `Waiting for the first token for ${seconds(waitedS)}`];
  if (queue) parts.push(`${count(queue.running)} running, ${count(queue.waiting)} in the queue`);
  return parts.join(" · ");
}

const pretty = (text) => JSON.stringify(JSON.parse(text || "{}"), null, 2);
