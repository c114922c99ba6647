// How parameters and gradients were spread over time.

function drawHistograms(place, data, view) {
  const run = data.runs[view.run];
  const looks = run.distributions;
  const names = looks.length ? Object.keys(looks[0].parameters) : [];
  if (!names.length) {
    put(place, empty("Nothing was recorded yet."));
    return;
  }
  if (!names.includes(view.histograms.parameter)) [view.histograms.parameter] = names;
  const timeOf = (one) => ({ step: one.step, isEnd: run.end !== null && one.step > run.end.step });
  const ridges = element("div", { class: "charts ridges" });
  const seen = looks.filter((one) => Object.keys(one.gradients).length);
  const sizes = seen
    .flatMap((one) => names.map((name) => one.gradients[name]?.rms))
    .filter((one) => one > 0)
    .map(Math.log10);
  const range = bounds(sizes) || [0, 1];
  const rows = names.map((name) =>
    element(
      "button",
      { type: "button", class: "strip", "data-parameter": name, onclick: () => choose(name) },
      element("span", { class: "name" }, name),
      strip(seen, name, range),
      element("span", { class: "numeric" }, number(seen.at(-1)?.gradients[name]?.rms)),
    ),
  );

  function choose(name) {
    view.histograms.parameter = name;
    for (const row of rows) row.setAttribute("aria-pressed", String(row.dataset.parameter === name));
    ridges.replaceChildren(
      ridgeChart(
        `${name}: values`,
        "value",
        looks.map((one) => ({ ...timeOf(one), spread: one.parameters[name] })),
        "var(--series-1)",
      ),
      ridgeChart(
        `${name}: gradient`,
        "log₁₀ of the magnitude",
        looks.map((one) => ({ ...timeOf(one), spread: one.gradients[name] })),
        "var(--series-2)",
      ),
    );
  }

  choose(view.histograms.parameter);
  put(
    place,
    element(
      "p",
      { class: "lead" },
      `${count(looks.length, "look")}, further and further apart: the parameters before an update, and in ${number(seen.length)} of them the gradient of one batch. ` +
        "Each strip is the size of a parameter's gradient over time (root mean square), stronger where it is larger.",
    ),
    element(
      "div",
      { class: "strips", role: "group", "aria-label": "Parameters" },
      element(
        "p",
        { class: "strip head" },
        element("span", { class: "name" }, "parameter"),
        element("span", null, "gradient over time"),
        element("span", { class: "numeric" }, "last"),
      ),
      rows,
    ),
    ridges,
  );
}

function strip(looks, name, [low, high]) {
  const svg = shape("svg", { viewBox: `0 0 ${looks.length} 1`, preserveAspectRatio: "none", "aria-hidden": "true" });
  looks.forEach(({ gradients }, i) => {
    const rms = gradients[name]?.rms;
    const weight = rms > 0 ? 0.08 + (0.92 * (Math.log10(rms) - low)) / (high - low || 1) : 0;
    svg.append(shape("rect", { x: i, y: 0, width: 1, height: 1, "fill-opacity": weight.toFixed(3) }));
  });
  return svg;
}

/** One histogram behind the other, time downwards; each has its own bounds on a common axis. */
function ridgeChart(title, xTitle, looks, color) {
  const known = looks.filter(({ spread }) => spread && spread.bins);
  const figure = element("figure", { class: "chart" }, element("figcaption", null, element("h3", null, title)));
  if (!known.length) {
    figure.append(empty(looks.some(({ spread }) => spread && spread.zeros) ? "All zeros." : "Not recorded."));
    return figure;
  }
  const [row, tall] = [Math.max(11, Math.min(22, 260 / known.length)), 44];
  const height = MARGIN.top + tall + row * known.length + MARGIN.bottom;
  const plot = element("div", { class: "plot" });
  const readout = element("p", { class: "below" }, told(known.at(-1)));
  const domain = [
    Math.min(...known.map(({ spread }) => spread.from)),
    Math.max(...known.map(({ spread }) => spread.to)),
  ];

  const draw = () => {
    const width = Math.max(260, plot.clientWidth || 500);
    const xScale = linear(domain, [MARGIN.left, width - MARGIN.right]);
    const svg = shape("svg", {
      viewBox: `0 0 ${width} ${height}`,
      role: "img",
      "aria-label": `${title}, ${known.map(told).join("; ")}`,
    });
    const bottom = height - MARGIN.bottom;
    svg.append(
      ...ticks(domain, Math.min(6, width / 90)).map((value) =>
        shape(
          "g",
          { class: "tick" },
          shape("line", { x1: xScale(value), x2: xScale(value), y1: MARGIN.top, y2: bottom }),
          shape("text", { x: xScale(value), y: bottom + 17, "text-anchor": "middle" }, number(value)),
        ),
      ),
      shape(
        "text",
        { class: "title", x: (MARGIN.left + width - MARGIN.right) / 2, y: height - 8, "text-anchor": "middle" },
        xTitle,
      ),
      shape(
        "text",
        {
          class: "title",
          "text-anchor": "middle",
          transform: `translate(10 ${(MARGIN.top + bottom) / 2}) rotate(-90)`,
        },
        "update",
      ),
    );
    const every = Math.ceil(14 / row);
    known.forEach((look, i) => {
      const base = MARGIN.top + tall + row * (i + 1);
      svg.append(
        shape(
          "path",
          {
            class: "ridge",
            d: ridge(look.spread, xScale, base, tall),
            style: { "--color": color },
            onpointerenter: () => {
              readout.textContent = told(look);
            },
          },
          shape("title", null, told(look)),
        ),
      );
      if (i % every === 0 || i === known.length - 1)
        svg.append(
          shape("text", { class: "tick", x: MARGIN.left - 8, y: base, dy: "0.1em", "text-anchor": "end" }, label(look)),
        );
    });
    plot.replaceChildren(svg);
  };
  new ResizeObserver(draw).observe(plot);
  figure.append(plot, readout);
  return figure;
}

function ridge({ bins, from, to }, xScale, base, tall) {
  const most = Math.max(...bins, 1);
  const width = (to - from) / bins.length;
  const points = bins.map(
    (value, i) => `${xScale(from + (i + 0.5) * width).toFixed(1)} ${(base - (tall * value) / most).toFixed(1)}`,
  );
  return `M${xScale(from).toFixed(1)} ${base}L${points.join("L")}L${xScale(to).toFixed(1)} ${base}Z`;
}

/** The look after the last update is at parameters that no update follows. */
const label = ({ step, isEnd }) => (isEnd ? "end" : `${number(step)}`);

function told({ step, spread, isEnd }) {
  const zeros = spread.zeros ? `, ${share(spread.zeros, spread.count)} zeros` : "";
  const wild = spread.not_finite ? `, ${number(spread.not_finite)} not finite` : "";
  return `${isEnd ? "at the end" : `before update ${number(step)}`}: mean ${number(spread.mean)}, root mean square ${number(spread.rms)}, ${number(spread.low)} to ${number(spread.high)}${zeros}${wild}`;
}
