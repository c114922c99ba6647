// Loss, metrics, learning rate and throughput; several runs lie over each other.

const COLORS = [
  "var(--series-1)",
  "var(--series-2)",
  "var(--series-3)",
  "var(--series-4)",
  "var(--series-5)",
  "var(--series-6)",
];
const AS_TIMES = { seconds, waiting: (part) => (isNumber(part) ? share(part, 1) : NOTHING) };
const NOT_METRICS = new Set(["epoch", "step", "rate", "seconds", "waiting"]);

/** Controls are made once: a live page must not take a slider out of the reader's hand, nor close what is open. */
function drawCurves(place, data, view) {
  const kept = view.curves;
  kept.runs = data.runs;
  if (!kept.charts) {
    kept.charts = element("div", { class: "charts" });
    kept.tables = element("div");
    put(place, curveControls(kept), kept.charts, kept.tables);
  }
  showCurves(kept);
  const opened = [...kept.tables.querySelectorAll("details[open]")].map((one) => one.dataset.table);
  put(
    kept.tables,
    data.runs.map((run) => epochTables(run, data.runs.length > 1)),
  );
  for (const one of kept.tables.querySelectorAll("details")) one.open = opened.includes(one.dataset.table);
}

function curveControls(kept) {
  const set = (name, value) => {
    kept[name] = value;
    showCurves(kept);
  };
  const axes = [
    ["linear", "linear"],
    ["log", "log"],
  ];
  const slider = { type: "range", min: 0, max: 0.98, step: 0.02, value: kept.smoothing };
  return element(
    "div",
    { class: "controls" },
    element(
      "span",
      { class: "control" },
      "Axis of loss and rate ",
      choice("Axis of loss and rate", axes, kept.axis, (axis) => set("axis", axis)),
    ),
    element(
      "label",
      { class: "control" },
      "Smoothing ",
      element("input", { ...slider, oninput: (event) => set("smoothing", Number(event.target.value)) }),
    ),
    element("span", { class: "hint" }, "Drag across a chart to look closer, double-click to see all of it."),
  );
}

function showCurves(kept) {
  const focused = [...kept.charts.querySelectorAll(".plot")].indexOf(document.activeElement);
  put(kept.charts, allCharts(kept));
  kept.charts.querySelectorAll(".plot")[focused]?.focus({ preventScroll: true });
}

function allCharts({ runs, axis, smoothing, zooms }) {
  const log = axis === "log";
  const together = runs.length > 1;
  const label = (run, name) => (together ? `${run.name}: ${name}` : name);
  const color = (index) => COLORS[index % COLORS.length];
  const domain = [1, Math.max(1, ...runs.map((run) => run.loss.x.at(-1) || 1))];
  const base = {
    domain,
    zooms,
    xTitle: "update",
    format: number,
    wholeX: true,
    marks: together ? [] : resumes(runs[0]),
  };
  const charts = [
    lineChart(
      runs.flatMap((run, index) => lossSeries(run, label, color, index, smoothing, together)),
      { ...base, log, title: "Loss", yTitle: "loss" },
    ),
  ];
  for (const name of metricNames(runs)) {
    const series = runs.flatMap((run, index) =>
      [name, `validation ${name}`]
        .filter((one) => isCurve(run, one))
        .map((one, second) => ({
          name: label(run, one === name ? "training" : "validation"),
          color: color(together ? 2 * index + second : second),
          ...byEpoch(run, one),
        })),
    );
    charts.push(lineChart(series, { ...base, title: capital(name), yTitle: name }));
  }
  const rates = runs.map((run, index) => ({
    name: label(run, "learning rate"),
    color: color(together ? index : 3),
    ...run.rate,
  }));
  const speeds = runs.map((run, index) => ({
    name: label(run, "rows a second"),
    color: color(together ? index : 2),
    ...run.speed,
  }));
  charts.push(lineChart(rates, { ...base, log, title: "Learning rate", yTitle: "rate" }));
  charts.push(lineChart(speeds, { ...base, title: "Throughput", yTitle: "rows / s" }));
  return charts;
}

function lossSeries(run, label, color, index, smoothing, together) {
  const own = color(together ? 2 * index : 0);
  const raw = { ...run.loss, name: label(run, "each update"), color: own };
  const found =
    smoothing > 0
      ? [
          { ...raw, low: null, high: null, style: "faint" },
          { ...raw, low: null, high: null, name: label(run, "training, smoothed"), y: smoothed(raw.y, smoothing) },
        ]
      : [{ ...raw, name: label(run, "training"), low: run.loss.together > 1 ? raw.low : null }];
  if (isCurve(run, "validation loss")) {
    found.push({
      name: label(run, "validation"),
      color: color(together ? 2 * index + 1 : 1),
      ...byEpoch(run, "validation loss"),
    });
  }
  return found;
}

/** A moving mean that forgets, corrected for having begun at zero; gaps stay gaps. */
function smoothed(values, weight) {
  let [mean, total] = [0, 0];
  return values.map((value) => {
    if (!isNumber(value)) return null;
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}

const isCurve = (run, name) => run.epochs.some((row) => isNumber(row[name]));
const byEpoch = (run, name) => ({
  x: run.epochs.map((row) => row.step),
  y: run.epochs.map((row) => (isNumber(row[name]) ? row[name] : null)),
});

function metricNames(runs) {
  const names = runs.flatMap((run) =>
    run.epochs.flatMap((row) => Object.keys(row).filter((name) => !Array.isArray(row[name]))),
  );
  return [...new Set(names.map((name) => name.replace(/^validation /, "")))].filter(
    (name) => name !== "loss" && !NOT_METRICS.has(name),
  );
}

const resumes = (run) =>
  run.begins.slice(1).map((one) => ({ x: one.step, text: one.resumed ? "resumed" : "begun again" }));

/** The numbers behind the curves, for those who read rather than look. */
function epochTables(run, isNamed) {
  if (!run.epochs.length) return null;
  // A run that was resumed with other metrics has other numbers in later epochs.
  const known = [...new Set(run.epochs.flatMap(Object.keys))];
  const names = known.filter((name) => !run.epochs.some((row) => Array.isArray(row[name])));
  const cells = (row) =>
    names.map((name) => element("td", { class: "numeric" }, (AS_TIMES[name] || number)(row[name])));
  const matrices = known.filter((name) => isMatrix(run.epochs.at(-1)[name]));
  return element(
    "div",
    null,
    element(
      "details",
      { class: "numbers", "data-table": `${run.name} epochs` },
      element("summary", null, `Numbers of ${count(run.epochs.length, "epoch")}${isNamed ? ` of ${run.name}` : ""}`),
      scrolling(
        "Numbers by epoch",
        table(
          names.map((name) => [name, true]),
          run.epochs.map((row) => element("tr", null, cells(row))),
        ),
      ),
    ),
    ...matrices.map((name) => matrix(run, name, isNamed)),
  );
}

const isMatrix = (value) =>
  Array.isArray(value) && value.length > 0 && value.length <= 40 && value.every(Array.isArray);

/** Counts by class: shaded by their share of the row. */
function matrix(run, name, isNamed) {
  const rows = run.epochs.at(-1)[name];
  return element(
    "details",
    { class: "numbers", "data-table": `${run.name} ${name}` },
    element("summary", null, `${isNamed ? `${run.name}: ` : ""}${name}, last epoch`),
    scrolling(
      name,
      table(
        [["class ↓ taken for →", false], ...rows[0].map((_, i) => [i, true])],
        rows.map((row, i) => {
          const total = row.reduce((sum, one) => sum + one, 0);
          const shaded = (one) => ({ "--share": `${total ? Math.round((100 * one) / total) : 0}%` });
          return element(
            "tr",
            null,
            element("th", { scope: "row" }, i),
            row.map((one) => element("td", { class: "numeric", style: shaded(one) }, number(one))),
          );
        }),
        { class: "matrix" },
      ),
    ),
  );
}
