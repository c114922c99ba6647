// The parts of a line chart as shapes: axes, lines, bands, marks.

const MARGIN = { top: 14, right: 16, bottom: 44, left: 76 };
let clips = 0; // every chart cuts its lines off at its own frame

function drawLines(series, options, width, height, zoom) {
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": options.title });
  const domain = zoom || options.domain || bounds(series.flatMap((one) => [one.x[0], one.x.at(-1)]));
  const inside = (one) => one.x.map((x, i) => (zoom && (x < zoom[0] || x > zoom[1]) ? null : one.y[i]));
  const yBounds = bounds(series.flatMap(inside), options.log);
  if (!domain || !yBounds) {
    svg.append(
      shape(
        "text",
        { class: "nothing", x: width / 2, y: height / 2 },
        options.log && series.some((one) => one.y.some(isNumber))
          ? "no value above zero to show on a logarithmic axis"
          : "no values yet",
      ),
    );
    return { svg, width, height, domain: null };
  }
  const xDomain = domain[0] === domain[1] ? [domain[0] - 0.5, domain[1] + 0.5] : domain;
  const xScale = linear(xDomain, [MARGIN.left, width - MARGIN.right]);
  const yScale = (options.log ? logarithmic : linear)(yBounds, [height - MARGIN.bottom, MARGIN.top]);
  const shows = (value) => isNumber(value) && (!options.log || value > 0);
  const box = { width, height };
  svg.append(...axes(box, xScale, xDomain, yScale, yBounds, options));
  clips += 1;
  const clip = `clip-${clips}`;
  svg.append(
    shape(
      "clipPath",
      { id: clip },
      shape("rect", { x: MARGIN.left, y: 0, width: Math.max(0, width - MARGIN.left - MARGIN.right), height }),
    ),
  );
  const lines = shape("g", { "clip-path": `url(#${clip})` });
  for (const one of series) {
    if (one.low)
      lines.append(
        shape("path", { class: "band", d: band(one, xScale, yScale, shows), style: { "--color": one.color } }),
      );
    const drawn = one.y.filter(shows).length;
    lines.append(
      shape("path", {
        class: `line ${one.style || ""}`,
        d: path(one, xScale, yScale, shows),
        style: { "--color": one.color },
      }),
    );
    if (drawn <= 40 && one.style !== "faint") lines.append(...dots(one, xScale, yScale, shows));
  }
  const selection = shape("rect", {
    class: "selection",
    y: MARGIN.top,
    height: height - MARGIN.top - MARGIN.bottom,
    width: 0,
  });
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
  const rows = (options.ticks || (options.log ? logTicks(yBounds) : ticks(yBounds, 5))).map((value) =>
    shape(
      "g",
      { class: "tick" },
      shape("line", { x1: MARGIN.left, x2: width - MARGIN.right, y1: yScale(value), y2: yScale(value) }),
      shape(
        "text",
        { x: MARGIN.left - 8, y: yScale(value), dy: "0.32em", "text-anchor": "end" },
        options.tick ? options.tick(value) : number(value),
      ),
    ),
  );
  const whole = (value) => !options.wholeX || Number.isInteger(value);
  const columns = ticks(xDomain, Math.min(8, width / 80))
    .filter(whole)
    .map((value) =>
      shape("text", { class: "tick", x: xScale(value), y: bottom + 17, "text-anchor": "middle" }, number(value)),
    );
  return [
    ...rows,
    ...columns,
    shape("line", { class: "axis", x1: MARGIN.left, x2: width - MARGIN.right, y1: bottom, y2: bottom }),
    shape(
      "text",
      { class: "title", x: (MARGIN.left + width - MARGIN.right) / 2, y: height - 8, "text-anchor": "middle" },
      options.xTitle,
    ),
    shape(
      "text",
      { class: "title", "text-anchor": "middle", transform: `translate(10 ${(MARGIN.top + bottom) / 2}) rotate(-90)` },
      options.yTitle,
    ),
  ];
}

function path(one, xScale, yScale, shows) {
  let isDown = false;
  return one.x
    .map((x, i) => {
      if (!shows(one.y[i])) {
        isDown = false;
        return "";
      }
      const way = isDown ? "L" : "M";
      isDown = true;
      return `${way}${xScale(x).toFixed(1)} ${yScale(one.y[i]).toFixed(1)}`;
    })
    .join("");
}

function band(one, xScale, yScale, shows) {
  const known = one.x.map((x, i) => [x, one.low[i], one.high[i]]).filter(([, low, high]) => shows(low) && shows(high));
  const there = known.map(([x, , high]) => `${xScale(x).toFixed(1)} ${yScale(high).toFixed(1)}`);
  const back = known.reverse().map(([x, low]) => `${xScale(x).toFixed(1)} ${yScale(low).toFixed(1)}`);
  return there.length ? `M${[...there, ...back].join("L")}Z` : "";
}

const dots = (one, xScale, yScale, shows) =>
  one.x.flatMap((x, i) =>
    shows(one.y[i])
      ? [
          shape("circle", {
            class: "dot",
            cx: xScale(x),
            cy: yScale(one.y[i]),
            r: 2.4,
            style: { "--color": one.color },
          }),
        ]
      : [],
  );

const marks = (given, xScale, [low, high], height) =>
  given
    .filter(({ x }) => x >= low && x <= high)
    .map(({ x, text }) =>
      shape(
        "g",
        { class: "mark" },
        shape("title", null, text),
        shape("line", { x1: xScale(x), x2: xScale(x), y1: MARGIN.top, y2: height - MARGIN.bottom }),
        shape("text", { x: xScale(x) + 4, y: MARGIN.top + 9 }, text),
      ),
    );
