// Api: requests to the server. In: a path, a body. Out: JSON or the events of a stream, or an ApiFailure, with words for it.
// Every wait has a limit. The key travels in a header, never in an address.

import { tab } from "./storage.js";

const KEY = "gyre.key";
export const readKey = () => tab.read(KEY) ?? "";
export const saveKey = (key) => (key ? tab.write(KEY, key) : tab.remove(KEY));

const ANSWER_MS = 15_000; // for a small answer
const FIRST_EVENT_MS = 600_000; // a queue may be long
const SILENCE_MS = 120_000; // between two events of a stream

export class ApiFailure extends Error {
  // kind: "refused" (the server said so), "unreachable", "broken" (within an answer), "silent", "strange" (no API answered)
  constructor(kind, message, { status = 0, code = "", param = null, retryS = 0 } = {}) {
    super(message);
    Object.assign(this, { kind, status, code, param, retryS });
  }
}

export async function getJson(path, { signal } = {}) {
  return readWhole(await send(path, { signal: limited(signal, ANSWER_MS) }), "json");
}

// Health answers with 503 and a reason: no failure, but what was asked for.
export async function getHealth() {
  return readWhole(await send("/health/ready", { signal: limited(null, ANSWER_MS) }, [503]), "json");
}

export async function getText(path) {
  return readWhole(await send(path, { signal: limited(null, ANSWER_MS) }), "text");
}

// Post a body, and yield the events of the answer until its [DONE].
export async function* stream(path, body, signal) {
  const options = { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) };
  const headers = new AbortController();
  const timer = setTimeout(() => headers.abort(new DOMException("no answer", "TimeoutError")), FIRST_EVENT_MS);
  try {
    const answer = await send(path, { ...options, signal: AbortSignal.any([signal, headers.signal]) });
    clearTimeout(timer);
    yield* readEvents(answer.body, signal);
  } finally {
    clearTimeout(timer);
  }
}

async function send(path, options, alsoFine = []) {
  const key = readKey();
  const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
  let answer;
  try {
    answer = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit", redirect: "error" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    if (error.name === "TimeoutError") throw new ApiFailure("silent", "The server did not answer in time.");
    throw new ApiFailure("unreachable", "The server does not answer.");
  }
  if (answer.ok || alsoFine.includes(answer.status)) return answer;
  throw await readRefusal(answer);
}

async function readRefusal(answer) {
  const retryS = Number(answer.headers.get("retry-after")) || 0;
  try {
    const { message, code, param } = (await answer.json()).error;
    return new ApiFailure("refused", String(message), { status: answer.status, code: String(code), param, retryS });
  } catch {
    // a proxy before the server answers in a form of its own
    return new ApiFailure("strange", `Something other than Gyre answered, with status ${answer.status}.`, { status: answer.status, retryS });
  }
}

async function readWhole(answer, form) {
  try {
    return await answer[form]();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    if (error.name === "TimeoutError") throw new ApiFailure("silent", "The server did not answer in time.");
    if (error.name === "SyntaxError") throw new ApiFailure("strange", "The answer is no JSON.");
    throw new ApiFailure("broken", "The connection ended before the answer did.");
  }
}

export async function* readEvents(body, signal, silenceMs = SILENCE_MS) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await within(reader.read(), silenceMs, signal);
      if (done) throw new ApiFailure("broken", "The connection ended before the answer did.");
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
        if (data === "[DONE]") return;
        if (data) yield readEvent(data);
      }
    }
  } finally {
    // the stream may have broken already: then there is nothing left to cancel
    reader.cancel().catch(() => {});
  }
}

function readEvent(data) {
  let event;
  try {
    event = JSON.parse(data);
  } catch {
    throw new ApiFailure("broken", "An event of the answer is no JSON.");
  }
  // a stream that has begun tells its failure in its last event
  if (event.error) throw new ApiFailure("refused", String(event.error.message), { status: 200, code: String(event.error.code), param: event.error.param });
  return event;
}

async function within(reading, silenceMs, signal) {
  let timer;
  const silence = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new ApiFailure("silent", `Nothing came for ${silenceMs / 1000} s.`)), silenceMs);
  });
  try {
    return await Promise.race([reading, silence]);
  } catch (error) {
    if (error instanceof ApiFailure) throw error;
    if (signal.aborted) throw new DOMException("stopped", "AbortError");
    throw new ApiFailure("broken", "The connection ended before the answer did.");
  } finally {
    clearTimeout(timer);
  }
}

function limited(signal, ms) {
  const limit = AbortSignal.timeout(ms);
  return signal ? AbortSignal.any([signal, limit]) : limit;
}

// What to say of a failure, and what to do next ------------------------------------------------------------------------

const OF_CODES = {
  invalid_api_key: { title: "This server asks for a key", text: "It answers only with a key that it knows.", next: "Enter the one that its owner gave you.", action: "key" },
  rate_limit_exceeded: { title: "A limit of your key is reached", action: "retry" },
  queue_full: { title: "The queue is full", next: "Others are before you.", action: "retry" },
  context_length_exceeded: { title: "This does not fit the model's context", next: "Lower max tokens, shorten the system message, or begin a new chat.", action: "settings" },
  request_too_large: { title: "This costs more than your key has", next: "Lower max tokens.", action: "settings" },
  body_too_large: { title: "The conversation is too long to send", next: "Begin a new chat.", action: "" },
  model_not_found: { title: "The server has another model now", next: "The page has asked for its name; try again.", action: "retry" },
  engine_unavailable: { title: "No engine is there to answer", next: "The server starts lost engines again by itself; the live view shows them.", action: "retry" },
  deadline_exceeded: { title: "The deadline has passed", action: "retry" },
  server_fault: { title: "The server had a fault", next: "Whoever runs it finds the details in its log.", action: "retry" },
};

const OF_KINDS = {
  unreachable: { title: "The server does not answer", next: "It may have been stopped, or the network is down. This page looks for it until it is back.", action: "retry" },
  broken: { title: "The answer broke off", next: "What came before is kept. Try again once the server answers.", action: "retry" },
  silent: { title: "The server fell silent", next: "It may be busy or stuck; the live view shows its engines.", action: "retry" },
  strange: { title: "The answer was not understood", next: "Is something else, such as a proxy, at this address?", action: "retry" },
};

export function explain(failure) {
  if (failure.kind !== "refused") return { text: failure.message, ...OF_KINDS[failure.kind] };
  const known = OF_CODES[failure.code] ?? { title: "The server refused the request", action: "settings", next: "" };
  return { text: sentence(failure.message), next: "", ...known };
}

function sentence(text) {
  const whole = text.trim();
  return /[.!?…]$/.test(whole) ? whole : `${whole}.`;
}
