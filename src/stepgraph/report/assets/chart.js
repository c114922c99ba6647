// A line chart: axes with titles, values under the pointer or the arrow keys, a part of the x axis by dragging.

/**
 * Series: {name, color, x, y, low, high, style}. `y` may hold nulls, which leave a gap; `low` and `high` draw a band.
 * Options: {title, xTitle, yTitle, format, log, height, domain, zooms, marks: [{x, text}]}.
 */
function lineChart(series, options) {
  const readout = element("div", { class: "readout", role: "status", hidden: true });
  const plot = element("div", {
    class: "plot",
    tabindex: "0",
    role: "group",
    "aria-label": described(series, options),
  });
  const made = element(
    "figure",
    { class: "chart" },
    element("figcaption", null, element("h3", null, options.title), legend(series)),
    plot,
    readout,
  );
  const zooms = options.zooms || {}; // by title: what a reader looks at closely outlives the chart, which is made anew
  const state = { at: null, drawn: null };

  const draw = () => {
    const width = Math.max(260, plot.clientWidth || 560);
    state.drawn = drawLines(series, options, width, options.height || 250, zooms[options.title]);
    plot.replaceChildren(state.drawn.svg);
    point(state.at);
  };
  new ResizeObserver(draw).observe(plot);

  function point(x) {
    state.at = x;
    const { drawn } = state;
    if (x === null || !drawn?.domain) {
      readout.hidden = true;
      drawn?.pointer?.replaceChildren();
      return;
    }
    const found = series.map((one) => ({ one, index: nearest(one.x, x) })).filter(({ index }) => index >= 0);
    if (!found.length) return;
    const at = found[0].one.x[found[0].index];
    const place = drawn.xScale(at);
    drawn.pointer.replaceChildren(
      shape("line", { x1: place, x2: place, y1: MARGIN.top, y2: drawn.height - MARGIN.bottom }),
      ...found
        .filter(({ one, index }) => drawn.shows(one.y[index]))
        .map(({ one, index }) =>
          shape("circle", {
            cx: drawn.xScale(one.x[index]),
            cy: drawn.yScale(one.y[index]),
            r: 3.5,
            style: { "--color": one.color },
          }),
        ),
    );
    readout.replaceChildren(
      element("b", null, `${options.xTitle} ${number(at)}`),
      ...found.map(({ one, index }) =>
        element(
          "span",
          { style: { "--color": one.color } },
          `${one.name} `,
          element("b", null, options.format(one.y[index])),
        ),
      ),
    );
    readout.hidden = false;
    readout.classList.toggle("left", place > drawn.width / 2);
  }

  const zoom = (ends) => {
    zooms[options.title] = ends;
    draw();
  };
  pointing(plot, state, point, zoom);
  return made;
}

/** Lets pointer and keys say which x is meant, and drag a part of the axis. */
function pointing(plot, state, point, zoom) {
  let pressed = null;
  const valueAt = (event) => {
    const box = plot.getBoundingClientRect();
    return state.drawn.xScale?.invert(((event.clientX - box.left) / box.width) * state.drawn.width);
  };
  const within = (x) => Math.min(Math.max(x, state.drawn.domain[0]), state.drawn.domain[1]);
  plot.addEventListener("pointermove", (event) => {
    if (!state.drawn?.domain) return;
    point(within(valueAt(event)));
    if (pressed !== null) state.drawn.select(pressed, within(valueAt(event)));
  });
  plot.addEventListener("pointerleave", () => point(null));
  plot.addEventListener("pointerdown", (event) => {
    if (!state.drawn?.domain || event.button !== 0) return;
    pressed = within(valueAt(event));
    plot.setPointerCapture(event.pointerId);
  });
  plot.addEventListener("pointerup", (event) => {
    if (pressed === null) return;
    const ends = [pressed, within(valueAt(event))].sort((a, b) => a - b);
    pressed = null;
    if (state.drawn.xScale(ends[1]) - state.drawn.xScale(ends[0]) > 8) zoom(ends);
  });
  plot.addEventListener("pointercancel", () => {
    pressed = null;
  });
  const reset = () => {
    point(null);
    zoom(null);
  };
  plot.addEventListener("dblclick", reset);
  plot.addEventListener("keydown", (event) => {
    if (event.key === "Escape") reset();
    const way = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -1e9, End: 1e9 }[event.key];
    if (!way || !state.drawn?.domain) return;
    event.preventDefault();
    const { steps } = state.drawn;
    const here = state.at === null ? (way > 0 ? -1 : steps.length) : nearest(steps, state.at);
    point(steps[Math.min(Math.max(here + way, 0), steps.length - 1)]);
  });
  plot.addEventListener("blur", () => point(null));
}

const legend = (series) =>
  element(
    "span",
    { class: "legend" },
    series
      .filter((one) => one.style !== "faint")
      .map((one) => element("span", { style: { "--color": one.color } }, one.name)),
  );

function described(series, options) {
  const ends = series
    .filter((one) => one.style !== "faint")
    .map((one) => {
      const last = one.y.findLast(isNumber);
      return `${one.name} ${last === undefined ? "has no values" : `ends at ${options.format(last)}`}`;
    });
  return `${options.title}: ${ends.join(", ")}. Arrow keys read values, Escape shows everything.`;
}

/** Index of the value closest to `x` in a growing list; -1 for an empty one. */
function nearest(list, x) {
  let [low, high] = [0, list.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (list[middle] <= x) low = middle;
    else high = middle;
  }
  return high < 0 ? -1 : x - list[low] <= list[high] - x ? low : high;
}
