// Conversation: messages as records, and what the API says of them. In: what the user wrote, events of a stream. Out: bodies of requests.
// No element is touched here.

export const ask = (text) => ({ role: "user", text });
export const toolResult = (call, text) => ({ role: "tool", callId: call.id, name: call.name, text });

// state: "waiting" until the first event, "streaming", then "done", "stopped" or "failed"
export function openAnswer(sentMs) {
  return { role: "assistant", text: "", reasoning: "", calls: [], tokens: [], finish: null, usage: null, version: "", state: "waiting",
    failure: null, queue: null, numEvents: 0, times: { sentMs, firstMs: null, lastMs: null, endMs: null } };
}

export function applyEvent(answer, event, nowMs) {
  if (event.usage) answer.usage = event.usage;
  if (event.system_fingerprint) answer.version = event.system_fingerprint;
  const choice = event.choices?.[0];
  if (!choice) return;
  const { delta } = choice;
  answer.text += delta.content ?? "";
  answer.reasoning += delta.reasoning_content ?? "";
  for (const part of delta.tool_calls ?? []) addToCall(answer.calls, part);
  for (const token of choice.logprobs?.content ?? []) answer.tokens.push(token);
  if (choice.finish_reason) answer.finish = choice.finish_reason;
  if (delta.role) return; // says who speaks, before any token
  answer.state = "streaming";
  answer.numEvents += 1;
  answer.times.firstMs ??= nowMs;
  answer.times.lastMs = nowMs;
}

function addToCall(calls, part) {
  const call = (calls[part.index] ??= { id: "", name: "", arguments: "", result: "" });
  if (part.id) call.id = part.id;
  if (part.function.name) call.name = part.function.name;
  call.arguments += part.function.arguments;
}

// Whether a call can be answered: the server takes back only a JSON object.
export function isWhole(call) {
  try {
    const value = JSON.parse(call.arguments || "{}");
    return typeof value === "object" && value !== null && !Array.isArray(value);
  } catch {
    return false;
  }
}

// What was measured of an answer. Tokens that never came as an event of their own are not known after a stop: then events count.
export function measure(answer) {
  const { sentMs, firstMs, lastMs, endMs } = answer.times;
  const tokens = answer.usage?.completion_tokens ?? (answer.tokens.length || answer.numEvents);
  const spanS = (lastMs - firstMs) / 1000;
  return {
    tokens,
    promptTokens: answer.usage?.prompt_tokens ?? null,
    firstS: firstMs === null ? NaN : (firstMs - sentMs) / 1000,
    perS: tokens > 1 && spanS > 0 ? (tokens - 1) / spanS : NaN,
    totalS: endMs === null ? NaN : (endMs - sentMs) / 1000,
  };
}

export function toBody(model, messages, settings) {
  const body = { model, messages: [], stream: true, stream_options: { include_usage: true }, temperature: settings.temperature, top_p: settings.topP };
  if (settings.system.trim()) body.messages.push({ role: "system", content: settings.system });
  for (const message of messages) {
    const sent = toMessage(message);
    if (sent) body.messages.push(sent);
  }
  if (settings.topK) body.top_k = settings.topK;
  if (settings.maxTokens !== null) body.max_tokens = settings.maxTokens;
  if (settings.seed !== null) body.seed = settings.seed;
  if (settings.stop.length) body.stop = settings.stop;
  if (settings.tools.length) body.tools = settings.tools;
  if (settings.logprobs) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  return body;
}

// An answer of which nothing came is left out: it would show the model a turn that nobody took.
function toMessage(message) {
  if (message.role === "user") return { role: "user", content: message.text };
  if (message.role === "tool") return { role: "tool", tool_call_id: message.callId, name: message.name, content: message.text };
  const calls = message.calls.filter(isWhole).map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text || "{}" } }));
  if (!message.text && !calls.length) return null;
  return {
    role: "assistant",
    content: message.text,
    ...(message.reasoning ? { reasoning_content: message.reasoning } : {}),
    ...(calls.length ? { tool_calls: calls } : {}),
  };
}
