// Tables: what the processes of a pod did in a step; what fell back, was dropped or tried again; and the files that say
// what was asked and decided.

function podCard() {
  const { rows, steps, drawing, idle_s } = DATA.pod;
  const right = (...parts) => el("td", { class: "r" }, ...parts);
  const short = (value) => (value === null || value === undefined ? "" : value < 1 ? `${(value * 1000).toPrecision(3)} ms` : seconds(value));
  const line = (row) => el("tr", {},
    el("td", { class: "kind" }, row.activity.replaceAll("_", " ")), el("td", { class: "muted" }, row.lane),
    ...(row.absent ? [el("td", { class: "muted", colspan: 5 }, row.absent)] : [
      right(count(row.steps)), right(el("b", {}, short(row.median_s))),
      right(short(row.worst_s), el("span", { class: "muted" }, ` step ${row.worst_step}, ${row.worst_worker}`)),
      right(row.bytes === null ? "" : bytes(row.bytes)), right(short(row.hidden_s))]),
    right(row.outside_s ? short(row.outside_s) : ""));
  const heads = ["Activity", "Lane", "Steps", "Median", "Worst", "Bytes", "Behind training", "Outside of steps"];
  const idle = Object.entries(idle_s).map(([lane, value]) => `${lane} ${short(value)}`).join(", ");
  return el("div", { class: "card" },
    el("div", { class: "card-head" }, el("h3", {}, "What the processes of the pod did in a step"), el("p", {}, `${plural(steps, "step", "steps")}; seconds of the slowest process, bytes of all together`)),
    el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, heads.map((text, at) => el("th", at > 1 ? { class: "r" } : {}, text)))), el("tbody", {}, rows.map(line)))),
    idle ? note(`None of these, in a median step: ${idle}.`) : null,
    drawing.length ? el("pre", { class: "file", tabindex: 0, role: "region", "aria-label": drawing[0] }, drawing.join("\n")) : null);
}

function eventSection() {
  const node = section("events", "Fallbacks, drops, retries", `Nothing happens silently: of ${plural(RUN.numEvents, "event", "events")}, ${RUN.numCounted ? `${plural(RUN.numCounted, "is", "are")} counted here` : "none is of these kinds"}.`);
  const card = el("div", { class: "card" });
  node.append(card);
  if (!DATA.counted.length)
    card.append(el("div", { class: "calm" }, svg("svg", { viewBox: "0 0 24 24", "aria-hidden": "true" }, svg("circle", { cx: 12, cy: 12, r: 10 }), svg("path", { d: "M7.5 12.5l3 3 6-6.5" })), "Nothing fell back, was dropped, was tried again or warned."));
  else card.append(el("div", { class: "scroll" }, countedTable()));
  const remarks = [];
  if (RUN.deadRows) remarks.push(`${count(RUN.deadRows)} rows were written again after a resume and are not counted twice.`);
  if (RUN.tornRows) remarks.push(`${count(RUN.tornRows)} ${RUN.tornRows === 1 ? "line was" : "lines were"} cut off in the middle, as a kill leaves them.`);
  node.append(...remarks.map(note));
  const kinds = Object.entries(DATA.kinds);
  if (kinds.length) node.append(el("details", { class: "fold" }, el("summary", {}, `All ${count(kinds.length)} kinds of event`), el("div", { class: "constants" }, kinds.map(([kind, times]) => el("span", { class: "chip mono" }, `${kind} × ${count(times)}`)))));
}

function countedTable() {
  const rows = DATA.counted.map((entry) => el("tr", {},
    el("td", { class: "kind" }, entry.kind), el("td", { class: "r" }, el("b", {}, count(entry.count))),
    el("td", { class: "r muted" }, entry.first === entry.last ? seconds(entry.first) : `${seconds(entry.first)} – ${seconds(entry.last)}`),
    el("td", { class: "wide" }, exampleList(entry))));
  return el("table", { class: "cards" }, el("thead", {}, el("tr", {}, el("th", {}, "Kind"), el("th", { class: "r" }, "Count"), el("th", { class: "r" }, "When"), el("th", {}, "What it said"))), el("tbody", {}, rows));
}

function exampleList(entry) {
  const line = (example) => el("div", { class: "detail-text" }, example.detail);
  const [first, ...others] = entry.examples;
  if (!others.length) return line(first);
  const merged = entry.kind === "warn.reward_failed"; // each example stands for all that are alike
  const left = merged ? 0 : entry.rows - entry.examples.length;
  return el("div", {}, line(first), el("details", { class: "fold" }, el("summary", { style: { padding: "2px 0", "font-size": "12.5px" } }, `${count(merged ? others.length : entry.rows - 1)} more`), others.map(line), left > 0 ? note(`${count(left)} further rows are in events.jsonl`) : null));
}

function fileSection() {
  if (!DATA.files.length) return;
  const state = { at: 0 };
  const body = el("pre", { class: "file", tabindex: 0, role: "region" });
  const cut = el("p", { class: "note", hidden: true });
  const copy = el("button", { class: "btn", type: "button", on: { click: async () => {
    try { await navigator.clipboard.writeText(DATA.files[state.at].text); copy.textContent = "Copied"; } catch { getSelection().selectAllChildren(body); copy.textContent = "Selected: press Ctrl C"; }
    setTimeout(() => { copy.textContent = "Copy"; }, 1600);
  } } }, "Copy");
  const show = (at) => {
    state.at = at;
    const file = DATA.files[at];
    body.replaceChildren(...(file.name.endsWith(".toml") ? tomlParts(file.text) : jsonParts(file.text)));
    body.setAttribute("aria-label", file.name);
    cut.hidden = !file.cut;
    cut.textContent = file.cut ? `${count(file.cut)} more characters are in ${file.name}.` : "";
  };
  const node = section("files", "Config and plan", "What was asked, what was decided, where it ran.",
    segmented("File", DATA.files.map((file, at) => [at, file.name]), () => state.at, show), copy);
  node.append(el("div", { class: "card" }, body), cut);
  show(0);
}

// Tinted text: each pattern's matches in a span of its class, the rest as it is.
function tinted(text, pattern, classes) {
  const parts = [];
  let last = 0;
  for (const match of text.matchAll(pattern)) {
    const kind = classes.find((name) => match.groups[name] !== undefined);
    parts.push(text.slice(last, match.index), el("span", { class: `code-${kind}` }, match[0]));
    last = match.index + match[0].length;
  }
  return [...parts, text.slice(last)];
}

const tomlParts = (text) => tinted(text, /(?<note>#[^\n]*)|(?<text>"(?:\\.|[^"\\\n])*"|'[^'\n]*')|(?<head>^\s*\[[^\]\n]+\]+)|(?<key>^\s*[\w.-]+(?=\s*=))|(?<number>(?<![\w.])[-+]?\d[\d_.]*(?:e[-+]?\d+)?\b)/gm, ["note", "text", "head", "key", "number"]);
const jsonParts = (text) => tinted(text, /(?<key>"(?:\\.|[^"\\])*"(?=\s*:))|(?<text>"(?:\\.|[^"\\])*")|(?<number>(?<![\w.])-?\d[\d.]*(?:[eE][-+]?\d+)?\b)/g, ["key", "text", "number"]);
