// Settings: how answers are chosen, and what tools the model is shown. In: what was set in this tab before. Out: values, checked.
// A value that is not right keeps its field marked, and no request is sent with it.

import { button, el, icon, plural } from "./dom.js";
import { tab } from "./storage.js";

const STORED = "gyre.settings";
const DEFAULTS = { system: "", temperature: "1", topP: "1", topK: "", maxTokens: "", seed: "", stop: "", tools: "", logprobs: true };

export const EXAMPLE_TOOLS = JSON.stringify([{
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather in a city now.",
    parameters: { type: "object", properties: { city: { type: "string" }, unit: { enum: ["celsius", "fahrenheit"] } }, required: ["city"] },
  },
}], null, 2);

// Each reader turns what a field has into a value of the request, or throws words that say what it takes.
const READERS = {
  system: (text) => text,
  temperature: (text) => decimal(text, 0, 100),
  topP: (text) => decimal(text, 0.01, 1),
  topK: (text) => whole(text, 0) ?? 0,
  maxTokens: (text) => whole(text, 1),
  seed: (text) => whole(text, Number.MIN_SAFE_INTEGER),
  stop: (text) => text.split("\n").filter(Boolean).map((line) => line.replaceAll("\\n", "\n").replaceAll("\\t", "\t")),
  tools: readTools,
  logprobs: (value) => value,
};

const OF_API = { max_tokens: "maxTokens", context_length_exceeded: "maxTokens", top_p: "topP", top_k: "topK", messages: "system" };

function decimal(text, low, high) {
  const value = Number(text);
  if (!text.trim() || !(value >= low && value <= high)) throw new Error(`Need a number from ${low} to ${high}.`);
  return value;
}

function whole(text, low) {
  if (!text.trim()) return null;
  const value = Number(text);
  if (!Number.isSafeInteger(value) || value < low) throw new Error(low > 0 || low === 0 ? `Need a whole number, ${low} or more.` : "Need a whole number.");
  return value;
}

function readTools(text) {
  if (!text.trim()) return [];
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new Error(`This is no JSON yet: ${error.message}`);
  }
  const tools = Array.isArray(value) ? value : [value];
  return tools.map((tool, number) => {
    const found = tool?.type === undefined && tool?.name ? { type: "function", function: tool } : tool;
    if (typeof found?.function?.name !== "string") throw new Error(`Tool ${number + 1}: need {"type": "function", "function": {"name": …}}.`);
    return found;
  });
}

export function mountSettings(dialog, { onChange, onClose }) {
  const raw = { ...DEFAULTS, ...readStored() };
  const values = {};
  const problems = new Map();
  const fields = new Map(); // by name: the control and the place of its problem

  function read(name) {
    try {
      values[name] = READERS[name](raw[name]);
      problems.delete(name);
    } catch (error) {
      problems.set(name, error.message);
    }
    const field = fields.get(name);
    field.problem.textContent = problems.get(name) ?? "";
    for (const control of field.controls) control.toggleAttribute("aria-invalid", problems.has(name));
    field.after?.();
  }

  function set(name, value) {
    raw[name] = value;
    for (const control of fields.get(name).controls) {
      if (control.type === "checkbox") control.checked = value;
      else if (control.value !== value) control.value = value;
    }
    read(name);
    tab.write(STORED, JSON.stringify(raw));
    onChange();
  }

  function field(name, label, note, ...controls) {
    const id = `set-${name}`;
    controls[0].id = id;
    const problem = el("p", { class: "problem", id: `${id}-problem`, role: "status" });
    for (const control of controls) {
      control.setAttribute("aria-describedby", `${id}-note ${id}-problem`);
      control.addEventListener("input", () => set(name, control.type === "checkbox" ? control.checked : control.value));
    }
    fields.set(name, { controls, problem });
    return el("div", { class: `field ${name}` }, el("label", { for: id }, label), el("div", { class: "controls" }, controls), el("p", { class: "note", id: `${id}-note` }, note), problem);
  }

  const numberField = (name, label, note, more = {}) => field(name, label, note, el("input", { type: "text", inputmode: "numeric", autocomplete: "off", ...more }));
  const rangeField = (name, label, note, max, step) => field(
    name, label, note, el("input", { type: "range", min: step, max, step, ...(name === "temperature" ? { min: 0 } : {}) }),
    el("input", { type: "text", inputmode: "decimal", autocomplete: "off", "aria-label": label }));

  const toolNames = el("p", { class: "names" });
  const toolField = field("tools", "Tools", "Functions that the model may call, as JSON. You answer its calls by hand.", el("textarea", { rows: 6, class: "mono", spellcheck: "false", placeholder: "[ ]" }));
  toolField.append(toolNames, el("div", { class: "row" }, button("Example", () => set("tools", EXAMPLE_TOOLS)), button("Clear", () => set("tools", ""))));

  dialog.append(
    el("header", {}, el("h2", { id: "settings-title" }, "Settings"),
      el("button", { type: "button", class: "icon", "aria-label": "Close settings", on: { click: () => dialog.close() } }, icon("M6 6l12 12M18 6L6 18"))),
    el("div", { class: "fields" },
      field("system", "System message", "What the model is told before the conversation.", el("textarea", { rows: 3 })),
      rangeField("temperature", "Temperature", "0 takes the best token each time.", 2, 0.05),
      rangeField("topP", "Top p", "Draw from the smallest set with this mass.", 1, 0.01),
      el("div", { class: "three" },
        numberField("topK", "Top k", "Draw from so many best tokens; empty: from all.", { placeholder: "all" }),
        numberField("maxTokens", "Max tokens", "Empty: as many as the context holds.", { placeholder: "context" }),
        numberField("seed", "Seed", "Equal seeds draw equally; empty: anew each time.", { placeholder: "random" })),
      field("stop", "Stop", "One text a line, \\n for a line's end. The answer ends before any.", el("textarea", { rows: 2, class: "mono", spellcheck: "false" })),
      field("logprobs", "Token probabilities", "Ask for each token's log-prob and its five best alternatives.", el("input", { type: "checkbox", role: "switch" })),
      toolField,
      el("div", { class: "row" }, button("Reset all", () => { for (const [name, value] of Object.entries(DEFAULTS)) set(name, value); }))));
  fields.get("tools").after = () => { toolNames.textContent = values.tools?.length ? `${plural(values.tools.length, "tool")}: ${values.tools.map((tool) => tool.function.name).join(", ")}` : ""; };
  for (const name of Object.keys(DEFAULTS)) {
    const [first, second] = fields.get(name).controls;
    if (first.type === "checkbox") first.checked = raw[name];
    else for (const control of [first, second]) if (control) control.value = raw[name];
    read(name);
  }
  dialog.addEventListener("close", onClose);

  return {
    values,
    set,
    // The field that is not right, if there is one.
    get firstProblem() { return [...problems.keys()][0] ?? ""; },
    // Put the focus on the field of a name, or of the API's name of it.
    focus(name) {
      const field = fields.get(OF_API[name] ?? name) ?? fields.get("system");
      field.controls[0].focus();
    },
    // A line of what differs from the defaults.
    summary() {
      const parts = [`temperature ${values.temperature}`];
      if (values.topP !== 1) parts.push(`top p ${values.topP}`);
      if (values.topK) parts.push(`top k ${values.topK}`);
      if (values.maxTokens !== null) parts.push(`max ${plural(values.maxTokens, "token")}`);
      if (values.seed !== null) parts.push(`seed ${values.seed}`);
      if (values.tools.length) parts.push(plural(values.tools.length, "tool"));
      if (values.system.trim()) parts.push("system message");
      return parts.join(" · ");
    },
  };
}

function readStored() {
  try {
    return JSON.parse(tab.read(STORED) ?? "{}");
  } catch {
    return {}; // of another version of this page
  }
}
