// A line chart: axes with titles, values under the pointer or the arrow keys, a part of the x axis by dragging.

const MARGIN = { top: 14, right: 16, bottom: 44, left: 70 };

/**
 * Series: {name, color, x, y, low, high, style}. `y` may hold nulls, which leave a gap; `low` and `high` draw a band.
 * Options: {title, xTitle, yTitle, format, log, height, domain, marks: [{x, text}]}.
 */
function lineChart(series, options) {
  const readout = element("div", { class: "readout", role: "status", hidden: true });
  const plot = element("div", { class: "plot", tabindex: "0", role: "group", "aria-label": described(series, options) });
  const made = element("figure", { class: "chart" },
    element("figcaption", null, element("h3", null, options.title), legend(series)), plot, readout);
  const state = { zoom: null, at: null, drawn: null };

  const draw = () => {
    const width = Math.max(260, plot.clientWidth || 560);
    state.drawn = drawLines(series, options, width, options.height || 250, state.zoom);
    plot.replaceChildren(state.drawn.svg);
    point(state.at);
  };
  new ResizeObserver(draw).observe(plot);

  function point(x) {
    state.at = x;
    const { drawn } = state;
    if (x === null || !drawn.domain) {
      readout.hidden = true;
      drawn.pointer?.replaceChildren();
      return;
    }
    const found = series.map((one) => ({ one, index: nearest(one.x, x) })).filter(({ index }) => index >= 0);
    if (!found.length) return;
    const at = found[0].one.x[found[0].index];
    const place = drawn.xScale(at);
    drawn.pointer.replaceChildren(
      shape("line", { x1: place, x2: place, y1: MARGIN.top, y2: drawn.height - MARGIN.bottom }),
      ...found.filter(({ one, index }) => drawn.shows(one.y[index])).map(({ one, index }) => shape("circle", {
        cx: drawn.xScale(one.x[index]), cy: drawn.yScale(one.y[index]), r: 3.5, style: { "--color": one.color } })));
    readout.replaceChildren(element("b", null, `${options.xTitle} ${number(at)}`), ...found.map(({ one, index }) =>
      element("span", { style: { "--color": one.color } }, `${one.name} `, element("b", null, options.format(one.y[index])))));
    readout.hidden = false;
    readout.classList.toggle("left", place > drawn.width / 2);
  }

  pointing(plot, state, point, draw);
  return made;
}

/** Lets pointer and keys say which x is meant, and drag a part of the axis. */
function pointing(plot, state, point, draw) {
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
  });
  plot.addEventListener("pointerup", (event) => {
    if (pressed === null) return;
    const ends = [pressed, within(valueAt(event))].sort((a, b) => a - b);
    pressed = null;
    if (state.drawn.xScale(ends[1]) - state.drawn.xScale(ends[0]) > 8) state.zoom = ends;
    draw();
  });
  const reset = () => {
    state.zoom = null;
    point(null);
    draw();
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

function drawLines(series, options, width, height, zoom) {
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": options.title });
  const domain = zoom || options.domain || bounds(series.flatMap((one) => [one.x[0], one.x.at(-1)]));
  const inside = (one) => one.x.map((x, i) => (zoom && (x < zoom[0] || x > zoom[1]) ? null : one.y[i]));
  const yBounds = bounds(series.flatMap(inside), options.log);
  if (!domain || !yBounds) {
    svg.append(shape("text", { class: "nothing", x: width / 2, y: height / 2 },
      options.log && series.some((one) => one.y.some(isNumber)) ? "no value above zero to show on a logarithmic axis" : "no values yet"));
    return { svg, width, height, domain: null };
  }
  const xDomain = domain[0] === domain[1] ? [domain[0] - 0.5, domain[1] + 0.5] : domain;
  const xScale = linear(xDomain, [MARGIN.left, width - MARGIN.right]);
  const yScale = (options.log ? logarithmic : linear)(yBounds, [height - MARGIN.bottom, MARGIN.top]);
  const shows = (value) => isNumber(value) && (!options.log || value > 0);
  const box = { width, height };
  svg.append(...axes(box, xScale, xDomain, yScale, yBounds, options));
  const clip = `clip-${(drawLines.made = (drawLines.made || 0) + 1)}`;
  svg.append(shape("clipPath", { id: clip }, shape("rect", { x: MARGIN.left, y: 0,
    width: Math.max(0, width - MARGIN.left - MARGIN.right), height })));
  const lines = shape("g", { "clip-path": `url(#${clip})` });
  for (const one of series) {
    if (one.low) lines.append(shape("path", { class: "band", d: band(one, xScale, yScale, shows), style: { "--color": one.color } }));
    const drawn = one.y.filter(shows).length;
    lines.append(shape("path", { class: `line ${one.style || ""}`, d: path(one, xScale, yScale, shows), style: { "--color": one.color } }));
    if (drawn <= 40 && one.style !== "faint") lines.append(...dots(one, xScale, yScale, shows));
  }
  const selection = shape("rect", { class: "selection", y: MARGIN.top, height: height - MARGIN.top - MARGIN.bottom, width: 0 });
  const pointer = shape("g", { class: "pointer" });
  svg.append(lines, ...marks(options.marks || [], xScale, xDomain, height), selection, pointer);
  const select = (from, to) => {
    const [left, right] = [xScale(from), xScale(to)].sort((a, b) => a - b);
    selection.setAttribute("x", left);
    selection.setAttribute("width", right - left);
  };
  const longest = series.reduce((best, one) => (one.x.length > best.length ? one.x : best), []);
  const steps = longest.filter((x) => x >= xDomain[0] && x <= xDomain[1]);
  return { svg, width, height, domain: xDomain, xScale, yScale, pointer, select, shows, steps };
}

function axes({ width, height }, xScale, xDomain, yScale, yBounds, options) {
  const bottom = height - MARGIN.bottom;
  const rows = (options.ticks || (options.log ? logTicks(yBounds) : ticks(yBounds, 5))).map((value) => shape("g", { class: "tick" },
    shape("line", { x1: MARGIN.left, x2: width - MARGIN.right, y1: yScale(value), y2: yScale(value) }),
    shape("text", { x: MARGIN.left - 8, y: yScale(value), dy: "0.32em", "text-anchor": "end" }, options.tick ? options.tick(value) : number(value))));
  const whole = (value) => !options.wholeX || Number.isInteger(value);
  const columns = ticks(xDomain, Math.min(8, width / 80)).filter(whole).map((value) => shape("text",
    { class: "tick", x: xScale(value), y: bottom + 17, "text-anchor": "middle" }, number(value)));
  return [...rows, ...columns,
    shape("line", { class: "axis", x1: MARGIN.left, x2: width - MARGIN.right, y1: bottom, y2: bottom }),
    shape("text", { class: "title", x: (MARGIN.left + width - MARGIN.right) / 2, y: height - 8, "text-anchor": "middle" }, options.xTitle),
    shape("text", { class: "title", "text-anchor": "middle", transform: `translate(10 ${(MARGIN.top + bottom) / 2}) rotate(-90)` }, options.yTitle)];
}

function path(one, xScale, yScale, shows) {
  let isDown = false;
  return one.x.map((x, i) => {
    if (!shows(one.y[i])) {
      isDown = false;
      return "";
    }
    const way = isDown ? "L" : "M";
    isDown = true;
    return `${way}${xScale(x).toFixed(1)} ${yScale(one.y[i]).toFixed(1)}`;
  }).join("");
}

function band(one, xScale, yScale, shows) {
  const known = one.x.map((x, i) => [x, one.low[i], one.high[i]]).filter(([, low, high]) => shows(low) && shows(high));
  const there = known.map(([x, , high]) => `${xScale(x).toFixed(1)} ${yScale(high).toFixed(1)}`);
  const back = known.reverse().map(([x, low]) => `${xScale(x).toFixed(1)} ${yScale(low).toFixed(1)}`);
  return there.length ? `M${[...there, ...back].join("L")}Z` : "";
}

const dots = (one, xScale, yScale, shows) => one.x.flatMap((x, i) => (shows(one.y[i])
  ? [shape("circle", { class: "dot", cx: xScale(x), cy: yScale(one.y[i]), r: 2.4, style: { "--color": one.color } })] : []));

const marks = (given, xScale, [low, high], height) => given.filter(({ x }) => x >= low && x <= high).map(({ x, text }) =>
  shape("g", { class: "mark" }, shape("title", null, text),
    shape("line", { x1: xScale(x), x2: xScale(x), y1: MARGIN.top, y2: height - MARGIN.bottom }),
    shape("text", { x: xScale(x) + 4, y: MARGIN.top + 9 }, text)));

const legend = (series) => element("span", { class: "legend" }, series.filter((one) => one.style !== "faint").map((one) =>
  element("span", { style: { "--color": one.color } }, one.name)));

function described(series, options) {
  const ends = series.filter((one) => one.style !== "faint").map((one) => {
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
