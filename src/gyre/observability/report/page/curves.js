// Curves: every metric over steps or time, stages end to end.

function curves() {
  if (!DATA.panels.length) return;
  const stages = RUN.stages.filter((stage) => stage.steps > 0);
  const smooth = el("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: view.smooth, "aria-label": "Smoothing",
    on: { input: () => { view.smooth = Number(smooth.value); tell("view"); } } });
  const reset = el("button", { class: "btn", type: "button", hidden: true, on: { click: () => { view.domain = null; tell("view"); } } }, "Reset zoom");
  on("view", () => { reset.hidden = !view.domain; });
  const node = section("curves", "Curves", "Drag across a chart to zoom all of them; hover or use arrow keys to read values.",
    reset,
    stages.length > 1 ? segmented("Stage", [[null, "All stages"], ...stages.map((stage) => [stage.name, words(stage.name)])], () => view.stage,
      (name) => { view.stage = name; view.domain = null; tell("view"); tell("stage"); }) : null,
    segmented("Axis", [["step", "Steps"], ["time", "Time"]], () => view.axis, (axis) => { view.axis = axis; view.domain = null; view.hover = null; tell("view"); }),
    el("label", { class: "field" }, "Smoothing", smooth));
  const known = DATA.panels.filter((panel) => !panel.id.startsWith("more-"));
  const more = DATA.panels.filter((panel) => panel.id.startsWith("more-"));
  node.append(chartGrid(known, stages));
  if (more.length || DATA.constants.length) {
    const fold = el("details", { class: "fold more" }, el("summary", {}, plural(more.length + DATA.constants.length, "more metric", "more metrics")));
    fold.addEventListener("toggle", () => { if (fold.open && fold.childElementCount === 1) fold.append(chartGrid(more, stages), constantChips()); });
    node.append(fold);
  }
  for (const text of DATA.curveNotes) node.append(note(text));
}

function chartGrid(panels, stages) {
  const grid = el("div", { class: "charts" });
  const charts = [];
  for (const panel of panels) {
    const split = panel.perStage && stages.length > 1;
    const made = split ? stages.map((stage) => stageChart(panel, stage)).filter(Boolean) : [new LineChart(panel, panel.series, null)];
    made.forEach((chart) => {
      grid.append(chart.node);
      charts.push(chart);
      const lives = (stage) => chart.stage ? chart.stage.name === stage.name : chart.lines.some((line) => line.x.some((x) => x >= stage.firstX && x <= stage.lastX));
      on("stage", () => { chart.node.hidden = view.stage !== null && !lives(stages.find((stage) => stage.name === view.stage)); });
    });
  }
  on("stage", () => widen(charts));
  widen(charts);
  return grid;
}

// The first charts are wide, as many as it takes for the rows of three below them to be full.
function widen(charts) {
  const seen = charts.filter((chart) => !chart.node.hidden);
  const wide = [0, 4, 2][seen.length % 3];
  seen.forEach((chart, at) => chart.setWide(at < wide));
}

// The part of a panel that belongs to one stage, on a scale of its own.
function stageChart(panel, stage) {
  const series = panel.series.map((line) => {
    const keep = line.x.map((x, at) => at).filter((at) => line.x[at] >= stage.firstX && line.x[at] <= stage.lastX);
    const cut = { ...line };
    for (const key of ["x", "t", "v", "lo", "hi", "n"]) if (line[key]) cut[key] = keep.map((at) => line[key][at]);
    return cut;
  }).filter((line) => line.v.some((value) => value !== null));
  return series.length ? new LineChart(panel, series, stage) : null;
}

function constantChips() {
  if (!DATA.constants.length) return null;
  return el("div", {}, note("Never changed, or never a finite number (–):"), el("div", { class: "constants" },
    DATA.constants.map((item) => el("span", { class: "chip mono" }, `${item.name} = ${number(item.value)}`))));
}
