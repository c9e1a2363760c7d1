// Chat: the conversation, and what may be done with it. In: what is written, settings. Out: one request at a time, its answer as it comes.

import { ApiFailure, getJson, stream } from "./api.js";
import { applyEvent, ask, isWhole, openAnswer, toBody, toolResult } from "./conversation.js";
import { byId, button, count, el } from "./dom.js";
import { AnswerTurn, userTurn } from "./message.js";
import { EXAMPLE_TOOLS } from "./settings.js";

const LOAD_MS = 1000; // between two looks at the queue while the first token is awaited
const SPEAK_MS = 2500; // between two pieces read out while an answer comes

export class Chat {
  // `actions`: openSettings, openKey, refresh
  constructor(settings, server, actions) {
    Object.assign(this, { settings, server, actions });
    this.messages = [];
    this.turns = new Map(); // of answers, by their record
    this.running = null; // the answer that comes, with what stops it
    this.log = byId("log");
    this.input = byId("ask");
    byId("composer").addEventListener("submit", (event) => { event.preventDefault(); this.submit(); });
    byId("stop").addEventListener("click", () => this.stop());
    byId("to-newest").addEventListener("click", () => this.follow(true));
    this.log.addEventListener("scroll", () => this.showNewest(), { passive: true });
    this.input.addEventListener("input", () => this.showInput());
    this.input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.submit();
    });
    this.draw();
  }

  submit() {
    const text = this.input.value;
    if (!text.trim() || this.running) return;
    if (this.settings.firstProblem) {
      this.actions.openSettings(this.settings.firstProblem);
      return;
    }
    this.input.value = "";
    this.messages.push(ask(text));
    this.answer();
  }

  stop() {
    this.running?.controller.abort();
  }

  clear() {
    this.stop();
    this.messages = [];
    this.turns.clear();
    this.draw();
    this.input.focus();
  }

  // Ask for the next turn of the conversation as it is.
  async answer() {
    const answer = openAnswer(performance.now());
    const body = toBody(this.server.state.model, this.messages, this.settings.values);
    const running = (this.running = { answer, controller: new AbortController() });
    this.messages.push(answer);
    this.draw();
    this.follow(true);
    this.watchQueue(running);
    const speech = new Speech();
    try {
      for await (const event of stream("/v1/chat/completions", body, running.controller.signal)) {
        applyEvent(answer, event, performance.now());
        speech.hear(answer.text);
        this.redraw(answer);
      }
      answer.state = "done";
    } catch (error) {
      answer.state = error.name === "AbortError" ? "stopped" : "failed";
      if (answer.state === "failed") answer.failure = error instanceof ApiFailure ? error : new ApiFailure("strange", `${error}`);
      if (answer.failure?.kind === "strange") console.error(error);
    } finally {
      answer.times.endMs = performance.now();
      if (this.running === running) this.running = null;
      this.end(answer, speech);
    }
  }

  end(answer, speech) {
    const active = document.activeElement;
    const hadFocus = [byId("stop"), document.body].includes(active) || (active === this.input && !this.input.value);
    this.drawComposer();
    if (!this.messages.includes(answer)) return; // the chat was cleared meanwhile
    const wasAtEnd = this.isAtEnd();
    this.turns.get(answer).update();
    if (wasAtEnd) this.follow(true);
    speech.end(answer);
    const call = this.turns.get(answer).callNodes.find(({ answerBox }) => !answerBox.hidden);
    if (hadFocus && call) call.result.focus();
    else if (hadFocus && matchMedia("(pointer: fine)").matches) this.input.focus();
    if (answer.failure) this.actions.refresh();
  }

  // The queue is of interest only until the first token.
  async watchQueue({ answer, controller }) {
    for (;;) {
      await new Promise((done) => setTimeout(done, LOAD_MS));
      if (answer.state !== "waiting") return;
      try {
        answer.queue = await getJson("/health/load", { signal: controller.signal });
      } catch (error) {
        if (error.name === "AbortError") return;
        answer.queue = null; // the answer itself tells what is wrong
      }
      this.redraw(answer);
    }
  }

  retry(answer) {
    if (this.running) return;
    this.messages.splice(this.messages.indexOf(answer));
    this.turns.delete(answer);
    this.answer();
  }

  edit(message) {
    if (this.running) this.stop();
    for (const dropped of this.messages.splice(this.messages.indexOf(message))) this.turns.delete(dropped);
    this.input.value = message.text;
    this.draw();
    this.input.focus();
  }

  sendResults(answer) {
    if (this.running) return;
    for (const call of answer.calls.filter(isWhole)) {
      call.answered = call.result;
      this.messages.push(toolResult(call, call.result));
    }
    this.answer();
  }

  // Drawing ---------------------------------------------------------------------------------------------------------

  draw() {
    // what a tool answered stands in the card of its call
    const nodes = this.messages.filter(({ role }) => role !== "tool").map((message) => this.turnOf(message));
    byId("messages").replaceChildren(...(nodes.length ? nodes : [this.drawEmpty()]));
    for (const turn of this.turns.values()) turn.update();
    this.drawComposer();
    this.showInput();
    this.showNewest();
  }

  turnOf(message) {
    if (message.role === "user") return userTurn(message, { onEdit: (one) => this.edit(one) });
    if (!this.turns.has(message)) {
      const actions = {
        onRetry: (one) => this.retry(one),
        onResults: (one) => this.sendResults(one),
        onKey: this.actions.openKey,
        onSettings: ({ param, code }) => this.actions.openSettings(param?.split(".")[0] || code),
      };
      this.turns.set(message, new AnswerTurn(message, actions, { isLast: () => this.messages.at(-1) === message }));
    }
    return this.turns.get(message).node;
  }

  drawEmpty() {
    const { phase, model, contextTokens, version } = this.server.state;
    const facts = phase === "ready" || phase === "unready" ? [`${count(contextTokens)} tokens of context`, `version ${version} of its weights`] : [];
    const starter = (text, before = () => {}) => el("button", { type: "button", class: "starter", on: { click: () => { before(); this.input.value = text; this.submit(); } } }, text);
    return el("div", { class: "empty" },
      el("h1", {}, TITLES[phase] ?? ["Ask ", el("span", { class: "model-name" }, model)]),
      el("p", {}, facts.length ? `${facts.join(", ")}.` : HINTS[phase] ?? ""),
      phase === "locked" && el("div", { class: "row" }, button("Enter a key", this.actions.openKey, { class: "btn strong" })),
      facts.length > 0 && el("div", { class: "starters" },
        starter("What is the sum of 17 and 25?"),
        starter("Write a function in Python that reverses a list."),
        starter("What is the weather in Oslo? Use the tool.", () => this.settings.set("tools", EXAMPLE_TOOLS))));
  }

  drawComposer() {
    byId("send").hidden = this.running !== null;
    byId("stop").hidden = this.running === null;
    byId("asked-with").textContent = this.settings.summary();
  }

  // Events may come faster than the screen is drawn.
  redraw(answer) {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      const wasAtEnd = this.isAtEnd();
      this.turns.get(answer)?.update();
      if (wasAtEnd) this.follow();
    });
  }

  isAtEnd() {
    return this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 48;
  }

  follow(always = false) {
    if (always || this.isAtEnd() || this.running) this.log.scrollTop = this.log.scrollHeight;
    this.showNewest();
  }

  showNewest() {
    byId("to-newest").hidden = this.isAtEnd();
  }

  showInput() {
    this.input.style.setProperty("height", "auto");
    this.input.style.setProperty("height", `${Math.min(this.input.scrollHeight, innerHeight * 0.4)}px`);
    byId("send").disabled = !this.input.value.trim();
  }
}

const TITLES = { connecting: "Connecting", locked: "This server asks for a key", unreachable: "The server does not answer" };
const HINTS = {
  connecting: "Asking the server for its model.",
  locked: "It stays in this tab, and ends with it.",
  unreachable: "This page looks for it until it is back. Start it with: gyre serve RUN",
};

// What a screen reader is told of an answer: whole words, a few times while it comes, and how it ended.
class Speech {
  constructor() {
    this.told = 0;
    this.lastMs = performance.now();
  }

  hear(text) {
    if (performance.now() - this.lastMs < SPEAK_MS) return;
    const end = text.lastIndexOf(" ");
    if (end > this.told) this.say(text.slice(this.told, end));
    this.told = Math.max(this.told, end);
  }

  end({ text, state, failure, calls }) {
    const how = { done: "The answer has ended.", stopped: "Stopped.", failed: failure?.message }[state];
    const asked = calls.map((call) => `Calls ${call.name}.`).join(" ");
    this.say(`${text.slice(this.told)} ${asked} ${how}`);
  }

  say(text) {
    this.lastMs = performance.now();
    byId("spoken").textContent = text;
  }
}
