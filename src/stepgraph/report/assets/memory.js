// The planned memory of a step over its operators, the peak, and what is alive there.

const KINDS = ["activations", "gradients", "workspace"];

function drawMemory(place, data, view) {
  const run = data.runs[view.run];
  const { plan, timeline } = run.memory;
  if (!plan || !timeline.length) {
    put(place, empty("This run has no memory plan."));
    return;
  }
  const lasting = plan.parameters + plan["optimizer state"] + plan.statistics;
  const parts = [
    ["parameters", plan.parameters],
    ["optimizer state", plan["optimizer state"]],
    ["statistics", plan.statistics],
    ...KINDS.map((kind) => [kind, plan[kind]]),
  ].filter(([, size]) => size > 0);
  put(
    place,
    element(
      "p",
      { class: "lead" },
      `Known before the first step: ${bytes(plan.total)} for a batch of ${count(run.graph.batch, "row")}. ` +
        `${bytes(lasting)} stay between steps, ${bytes(plan.total - lasting)} are needed at the peak of a step.`,
    ),
    element(
      "div",
      { class: "stack", role: "img", "aria-label": parts.map(([name, size]) => `${name} ${bytes(size)}`).join(", ") },
      bar(
        parts.map(([name, size]) => [kindClass(name), size]),
        plan.total,
      ),
    ),
    element(
      "p",
      { class: "keys" },
      parts.map(([name, size]) => element("span", { class: `key ${kindClass(name)}` }, `${name} ${bytes(size)}`)),
    ),
    element("div", { class: "split wide-left" }, timelineChart(run.memory), aliveTable(run.memory)),
  );
}

const kindClass = (name) => name.replace(" ", "-");

function timelineChart(memory) {
  const { timeline, peak, layers, phases } = memory;
  const totals = timeline.map((row) => row[2] + row[3] + row[4]);
  const readout = element("div", { class: "readout", role: "status", hidden: true });
  const plot = element("div", {
    class: "plot",
    tabindex: "0",
    role: "group",
    "aria-label": `Live memory over ${count(timeline.length, "operator")}; the peak is ${bytes(totals[peak])} in the ${phases[timeline[peak][1]]} phase of ${layers[timeline[peak][0]]}. Arrow keys read values.`,
  });
  const state = { at: null, drawn: null };
  const draw = () => {
    state.drawn = drawTimeline(memory, totals, Math.max(260, plot.clientWidth || 640), 300);
    plot.replaceChildren(state.drawn.svg);
  };
  const point = (index) => {
    state.at = index;
    readout.hidden = index === null;
    state.drawn.pointer.replaceChildren();
    if (index === null) return;
    const place = state.drawn.xScale(index);
    const [layer, phase] = timeline[index];
    state.drawn.pointer.append(shape("line", { x1: place, x2: place, y1: MARGIN.top, y2: 300 - MARGIN.bottom }));
    readout.replaceChildren(
      element("b", null, `${layers[layer]}, ${phases[phase]}`),
      element("span", null, `together ${bytes(totals[index])}`),
      ...KINDS.map((kind, i) =>
        element(
          "span",
          { style: { "--color": `var(--${kind})` } },
          `${kind} `,
          element("b", null, bytes(timeline[index][i + 2])),
        ),
      ),
    );
    readout.classList.toggle("left", place > state.drawn.width / 2);
  };
  new ResizeObserver(() => {
    draw();
    point(state.at);
  }).observe(plot);
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    const x = state.drawn.xScale.invert(((event.clientX - box.left) / box.width) * state.drawn.width);
    point(Math.min(Math.max(Math.round(x), 0), timeline.length - 1));
  });
  plot.addEventListener("pointerleave", () => point(null));
  plot.addEventListener("blur", () => point(null));
  plot.addEventListener("keydown", (event) => {
    const way = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -1e9, End: 1e9 }[event.key];
    if (!way) return;
    event.preventDefault();
    point(Math.min(Math.max((state.at ?? peak) + way, 0), timeline.length - 1));
  });
  return element(
    "figure",
    { class: "chart" },
    element(
      "figcaption",
      null,
      element("h3", null, "Live memory, operator by operator"),
      element(
        "span",
        { class: "legend" },
        KINDS.map((kind) => element("span", { style: { "--color": `var(--${kind})` } }, kind)),
      ),
    ),
    plot,
    readout,
  );
}

function drawTimeline({ timeline, peak, phases }, totals, width, height) {
  const [left, right, bottom] = [MARGIN.left, width - MARGIN.right, height - MARGIN.bottom];
  const xDomain = [0, Math.max(1, timeline.length - 1)];
  const most = Math.max(...totals, 1);
  const xScale = linear(xDomain, [left, right]);
  const yScale = linear([0, most * 1.12], [bottom, MARGIN.top]);
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Live memory" });
  const unit = 1024 ** Math.floor(Math.log(most) / Math.log(1024)); // round numbers in the unit that is written
  svg.append(
    ...axes({ width, height }, xScale, xDomain, yScale, [0, most * 1.12], {
      xTitle: "operator, in the order they run",
      yTitle: "bytes alive",
      wholeX: true,
      tick: bytes,
      ticks: ticks([0, (most * 1.12) / unit], 4).map((one) => one * unit),
    }),
  );
  const base = timeline.map(() => 0);
  KINDS.forEach((kind, k) => {
    const top = timeline.map((row, i) => base[i] + row[k + 2]);
    const there = top.map((value, i) => `${xScale(i).toFixed(1)} ${yScale(value).toFixed(1)}`);
    const back = base.map((value, i) => `${xScale(i).toFixed(1)} ${yScale(value).toFixed(1)}`).reverse();
    svg.append(
      shape("path", { class: "area", d: `M${[...there, ...back].join("L")}Z`, style: { "--color": `var(--${kind})` } }),
    );
    top.forEach((value, i) => {
      base[i] = value;
    });
  });
  svg.append(...phaseBorders(timeline, phases, xScale, bottom));
  const [x, y] = [xScale(peak), yScale(totals[peak])];
  const isRight = x > (left + right) / 2;
  svg.append(
    shape(
      "g",
      { class: "peak" },
      shape("circle", { cx: x, cy: y, r: 4 }),
      shape(
        "text",
        { x: x + (isRight ? -9 : 9), y: y - 7, "text-anchor": isRight ? "end" : "start" },
        `peak ${bytes(totals[peak])}`,
      ),
    ),
  );
  const pointer = shape("g", { class: "pointer" });
  svg.append(pointer);
  return { svg, xScale, width, pointer };
}

/** Thin lines where one phase ends and the next begins, with its name. */
function phaseBorders(timeline, phases, xScale, bottom) {
  const found = [];
  let start = 0;
  for (let i = 1; i <= timeline.length; i += 1) {
    if (i < timeline.length && timeline[i][1] === timeline[start][1]) continue;
    if (xScale(i - 1) - xScale(start) > 46)
      found.push(
        shape(
          "text",
          { class: "phase", x: (xScale(start) + xScale(i - 1)) / 2, y: bottom - 6, "text-anchor": "middle" },
          phases[timeline[start][1]],
        ),
      );
    if (i < timeline.length)
      found.push(
        shape("line", { class: "border", x1: xScale(i - 0.5), x2: xScale(i - 0.5), y1: MARGIN.top, y2: bottom }),
      );
    start = i;
  }
  return found.length > 40 ? [] : found; // phases that take turns all the time tell nothing
}

function aliveTable({ alive, timeline, peak, layers, phases }) {
  const most = Math.max(...alive.map((row) => row[3]), 1);
  const [layer, phase] = timeline[peak];
  return element(
    "div",
    { class: "alive" },
    element("h3", null, "Alive at the peak"),
    element("p", { class: "lead" }, `in the ${phases[phase]} phase of ${layers[layer]}`),
    scrolling(
      "Alive at the peak",
      table(
        [["Made by"], [""], ["Size", true]],
        alive.map(([name, when, kind, size]) =>
          element(
            "tr",
            null,
            element("th", { scope: "row" }, name, " ", element("small", null, when)),
            element("td", { class: "barcell" }, bar([[kind, size]], most)),
            element("td", { class: "numeric" }, bytes(size)),
          ),
        ),
      ),
      "short",
    ),
  );
}
