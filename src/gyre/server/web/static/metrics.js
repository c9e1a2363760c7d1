// Metrics: Prometheus' text format to the numbers of the live view. In: texts of /metrics, and when they came. Out: samples. Pure.

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

// Return the series of each name, as { labels, value }.
export function parseMetrics(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const parts = line.startsWith("#") ? null : LINE.exec(line);
    if (!parts) continue;
    const labels = {};
    for (const [, name, value] of (parts[2] ?? "").matchAll(LABEL)) labels[name] = value.replace(/\\(.)/g, (_, one) => (one === "n" ? "\n" : one));
    if (!found.has(parts[1])) found.set(parts[1], []);
    found.get(parts[1]).push({ labels, value: parts[3] === "+Inf" ? Infinity : Number(parts[3]) });
  }
  return found;
}

const total = (metrics, name) => (metrics.get(name) ?? []).reduce((sum, { value }) => sum + value, 0);

// One moment of the server: its engines, in order, and its own counts.
export function sample(text, nowMs) {
  const metrics = parseMetrics(text);
  const of = (name, engine) => metrics.get(name)?.find(({ labels }) => labels.engine === engine)?.value ?? NaN;
  const engines = (metrics.get("gyre_engine_up") ?? []).map(({ labels: { engine }, value }) => ({
    engine,
    isUp: value === 1,
    running: of("vllm:num_requests_running", engine),
    waiting: of("vllm:num_requests_waiting", engine),
    kvUsed: of("vllm:kv_cache_usage_perc", engine),
    generated: of("vllm:generation_tokens_total", engine),
    queries: of("vllm:prefix_cache_queries_total", engine),
    hits: of("vllm:prefix_cache_hits_total", engine),
    preemptions: of("vllm:num_preemptions_total", engine),
    version: of("gyre_weights_version", engine),
    outstanding: of("gyre_engine_outstanding_tokens", engine),
    ageS: of("gyre_engine_stats_age_seconds", engine),
  }));
  const byLabel = (name, label) => Object.fromEntries((metrics.get(name) ?? []).map(({ labels, value }) => [labels[label], value]));
  return {
    nowMs,
    engines,
    states: byLabel("gyre_replicas", "state"),
    finished: byLabel("vllm:request_success_total", "finished_reason"),
    errors: byLabel("gyre_request_errors_total", "code"),
    inFlight: total(metrics, "gyre_requests_in_flight"),
    firstToken: buckets(metrics, "vllm:time_to_first_token_seconds"),
  };
}

const buckets = (metrics, name) => (metrics.get(`${name}_bucket`) ?? []).map(({ labels, value }) => ({ le: labels.le === "+Inf" ? Infinity : Number(labels.le), value }));

// Tokens chosen each second between two samples. An engine that began anew counts from zero, and is left out once.
export function tokenRate(before, now, engine = null) {
  const spanS = (now.nowMs - before.nowMs) / 1000;
  let gained = 0;
  for (const one of now.engines) {
    if (engine !== null && one.engine !== engine) continue;
    const earlier = before.engines.find((other) => other.engine === one.engine);
    const delta = one.generated - (earlier?.generated ?? NaN);
    if (delta >= 0) gained += delta;
  }
  return spanS > 0 ? gained / spanS : NaN;
}

// A quantile of what was observed between two samples of a histogram, as Prometheus reckons it.
export function quantile(share, before, now) {
  const rows = now.map(({ le, value }, place) => ({ le, value: value - (before[place]?.value ?? 0) }));
  const all = rows.at(-1)?.value ?? 0;
  if (!(all > 0)) return NaN;
  const rank = share * all;
  const at = rows.findIndex(({ value }) => value >= rank);
  const [low, under] = at > 0 ? [rows[at - 1].le, rows[at - 1].value] : [0, 0];
  if (rows[at].le === Infinity) return low;
  return low + ((rows[at].le - low) * (rank - under)) / (rows[at].value - under);
}
