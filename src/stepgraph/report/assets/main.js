// Puts the sections together, keeps what the reader has chosen, and asks a live server for news.

const EVERY = 1500; // milliseconds between two questions

const view = {
  run: 0,
  curves: { axis: "linear", smoothing: 0, zooms: {} },
  graph: { layer: null, box: null },
  profile: { which: null, sort: { column: 5, direction: -1 } },
  histograms: { parameter: null },
  chooseLayer: () => {},
};

// What each section is drawn from: it is drawn again only when that has changed, so that a live page stays calm.
const one = (data) => data.runs[view.run];
const sections = [
  [
    "curves",
    drawCurves,
    (data) => data.runs.map((run) => [run.name, run.loss, run.rate, run.speed, run.epochs, run.begins]),
  ],
  ["graph", drawGraph, (data) => [one(data).drawing, one(data).graph, one(data).profiles]],
  ["profile", drawProfile, (data) => [one(data).profiles, one(data).missing]],
  ["memory", drawMemory, (data) => one(data).memory],
  ["gradients", drawGradients, (data) => [one(data).graph.gradients, one(data).distributions, one(data).missing]],
  ["histograms", drawHistograms, (data) => one(data).distributions],
  [
    "environment",
    drawEnvironment,
    (data) => {
      const { command, environment, settings, begins, end, ranks } = one(data);
      return [command, environment, settings, begins, end, ranks];
    },
  ],
];
const drawn = new Map();

function show(data) {
  drawHead(data);
  for (const [name, draw, from] of sections) {
    const now = `${view.run} ${JSON.stringify(from(data))}`;
    if (drawn.get(name) === now) continue;
    drawn.set(name, now);
    draw(pick(`#${name} .content`), data, view);
  }
}

const STATUS = {
  finished: ["good", "finished"],
  "no improvement": ["good", "stopped: no improvement"],
  interrupted: ["fair", "interrupted"],
  terminated: ["fair", "terminated"],
  failed: ["bad", "failed"],
  running: ["fair", "no end recorded"],
};

function drawHead(data) {
  const run = data.runs[view.run];
  pick("#title").textContent = data.runs.map((each) => each.name).join(" · ");
  const [kind, text] =
    data.live && run.status === "running" ? ["live", "training"] : STATUS[run.status] || ["fair", run.status];
  const status = pick("#status");
  if (status.textContent !== text) status.replaceChildren(element("span", { class: kind }, text));
  pick("#notices").replaceChildren(...notices(data, run).map((one_) => element("p", { class: "notice" }, one_)));
  pick("#tiles").replaceChildren(
    ...tiles(run).map(([name, value, note]) =>
      element(
        "div",
        null,
        element("dt", null, name),
        element("dd", null, value),
        note ? element("dd", { class: "note" }, note) : null,
      ),
    ),
  );
}

function notices(data, run) {
  const found = [];
  if (!data.live && run.status === "running")
    found.push(
      "No end is recorded: training was still going on when this page was made, or its process was killed. Everything up to the last entry is here.",
    );
  if (run.loss.not_finite !== null)
    found.push(`The loss stopped being a number at update ${number(run.loss.not_finite)}.`);
  if (run.begins.length > 1)
    found.push(
      `This run went on ${run.begins.length - 1 === 1 ? "once" : `${run.begins.length - 1} times`}; what was done twice is shown once.`,
    );
  for (const each of run.missing) found.push(`The report has no ${each.what} from some point on: ${each.why}.`);
  return found;
}

function tiles(run) {
  const last = run.epochs.at(-1);
  const loss = last ? last.loss : run.loss.y.findLast(isNumber);
  const metric =
    last && Object.keys(last).find((name) => !NOT_METRICS.has(name) && !name.endsWith("loss") && isNumber(last[name]));
  const learned = new Map(
    run.graph.nodes.flatMap((node) =>
      node.parameters.map((each) => [each.name, each.shape.reduce((a, b) => a * b, 1)]),
    ),
  );
  const steps = run.end ? run.end.step : run.loss.x.at(-1) || 0;
  const found = [
    ["Loss", number(loss), last && "validation loss" in last ? `validation ${number(last["validation loss"])}` : null],
  ];
  if (metric)
    found.push([
      capital(metric),
      number(last[metric]),
      `validation ${metric}` in last ? `validation ${number(last[`validation ${metric}`])}` : null,
    ]);
  found.push([
    "Updates",
    number(steps),
    `${run.total ? `of ${number(run.total)}, ` : ""}${count(run.epochs.length, "epoch")}`,
  ]);
  found.push(["Throughput", run.speed.y.length ? `${number(middle(run.speed.y))}/s` : NOTHING, "rows, median"]);
  if (run.epochs.length) {
    const total = run.epochs.reduce((sum, row) => sum + row.seconds, 0);
    const waited = run.epochs.reduce((sum, row) => sum + row.seconds * (row.waiting || 0), 0);
    found.push(["Time", duration(total), `in all epochs, ${share(waited, total)} waiting for data`]);
  }
  found.push([
    "Parameters",
    number([...learned.values()].reduce((a, b) => a + b, 0)),
    count(run.graph.nodes.length, "layer"),
  ]);
  found.push(["Memory", bytes(run.memory.plan?.total), "planned for a step"]);
  found.push([
    "Device",
    (run.environment.device || "").split(" (")[0],
    (run.environment.device || "").match(/\((.*)\)/)?.[1],
  ]);
  return found;
}

const middle = (values) => [...values].sort((a, b) => a - b)[values.length >> 1];

// Light, dark, or what the system says. A page from a file may not be allowed to remember it.
const SCHEMES = { auto: "Colors: auto", light: "Colors: light", dark: "Colors: dark" };

function scheme() {
  const button = pick("#scheme");
  let current = "auto";
  try {
    current = localStorage.getItem("stepgraph-scheme") || "auto";
  } catch {
    /* not remembered, then */
  }
  const set = (name) => {
    current = name in SCHEMES ? name : "auto";
    if (current === "auto") delete document.documentElement.dataset.scheme;
    else document.documentElement.dataset.scheme = current;
    button.textContent = SCHEMES[current];
    try {
      localStorage.setItem("stepgraph-scheme", current);
    } catch {
      /* the same */
    }
  };
  button.addEventListener("click", () => set({ auto: "light", light: "dark", dark: "auto" }[current]));
  set(current);
}

function chooser(data) {
  if (data.runs.length < 2) return;
  const select = pick("#run");
  select.append(...data.runs.map((run, i) => element("option", { value: i }, run.name)));
  select.addEventListener("change", () => {
    Object.assign(view, {
      run: Number(select.value),
      graph: { layer: null, box: null },
      histograms: { parameter: null },
    });
    show(latest);
  });
  pick("#choose").hidden = false;
}

/** Asks until every run has ended; a server that has gone ends it too, and what is there stays. */
async function follow() {
  let tag = "";
  for (;;) {
    await new Promise((resume) => {
      setTimeout(resume, EVERY);
    });
    let answer;
    try {
      answer = await fetch("data.json", { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
    } catch {
      pick("#status").replaceChildren(element("span", { class: "fair" }, "no longer served"));
      return;
    }
    if (answer.status === 200) {
      tag = answer.headers.get("ETag") || "";
      latest = await answer.json();
      show(latest);
      if (latest.runs.every((run) => run.status !== "running")) return;
    }
  }
}

let latest = JSON.parse(pick("#data").textContent);
scheme();
chooser(latest);
show(latest);
addEventListener("beforeprint", () => {
  for (const each of document.querySelectorAll("details")) each.open = true;
});
if (latest.live && latest.runs.some((run) => run.status === "running")) follow();
