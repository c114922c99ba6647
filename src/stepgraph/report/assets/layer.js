// What is known about one layer: shapes, parameters, time and memory by phase.

const PHASES = ["forward", "gradient", "update"];

/** What the profile says about a layer, by phase. Work on a parameter (`layer.field`) counts for its layer. */
function layerCosts(run, which = run.profiles.length - 1) {
  const profile = run.profiles[which];
  const costs = new Map();
  if (!profile) return costs;
  const owner = new Map(run.graph.nodes.flatMap((node) => node.parameters.map((one) => [one.name, node.layer])));
  for (const [name, phase, time, size] of profile.rows) {
    const layer = owner.get(name) || name;
    if (!costs.has(layer)) costs.set(layer, Object.fromEntries(PHASES.map((one) => [one, { time: 0, size: 0 }])));
    const cost = costs.get(layer)[phase];
    if (cost) {
      cost.time += time;
      cost.size += size;
    }
  }
  return costs;
}

/** Everything known about one layer. */
function facts(run, name, costs) {
  const nodes = run.graph.nodes.filter((node) => node.layer === name);
  const [first] = nodes;
  const learned = first.parameters.reduce((sum, one) => sum + one.shape.reduce((a, b) => a * b, 1), 0);
  const rows = [
    ["Kind", first.kind + (first.loss ? ", the loss" : "")],
    ["Made at", [...new Set(nodes.map((node) => node.line).filter(Boolean))].join(", ") || NOTHING],
    ...nodes.flatMap((node, i) => [
      [nodes.length > 1 ? `Reads (${i + 1})` : "Reads", node.sources.map((one) => tensorLine(one, one.from))],
      [nodes.length > 1 ? `Makes (${i + 1})` : "Makes", node.results.map((one) => tensorLine(one))],
    ]),
    [
      "Parameters",
      first.parameters.length
        ? [
            `${number(learned)}${first.frozen ? ", frozen" : ""}`,
            ...first.parameters.map((one) =>
              tensorLine(one, one.name.slice(name.length + 1) + (one.trained ? "" : " (not trained)")),
            ),
          ]
        : "none",
    ],
  ];
  return [
    element("h3", { "data-chosen": name }, name),
    element(
      "dl",
      null,
      rows.flatMap(([term, value]) => [
        element("dt", null, term),
        ...(Array.isArray(value) ? value : [value]).map((one) => element("dd", null, one)),
      ]),
    ),
    costTable(costs.get(name), run),
    updatedTogether(first, costs.get(name)),
  ];
}

const updatedTogether = (node, cost) =>
  cost && !cost.update.time && node.parameters.some((one) => one.trained)
    ? element(
        "p",
        { class: "lead" },
        "Its parameters are small and updated together with others: see the optimizer below.",
      )
    : null;

const tensorLine = (one, label) =>
  [label ? `${label}: ` : "", extents(one.shape), " ", element("small", null, `${one.type}, ${bytes(one.bytes)}`)]
    .flat()
    .reduce((line, part) => {
      line.append(part);
      return line;
    }, element("span"));

function costTable(cost, run) {
  if (!run.profiles.length) return empty("No profile was taken.");
  if (!cost) return empty("The profile has no operator of this layer: it only changes how memory is looked at.");
  const total = PHASES.reduce((sum, phase) => sum + cost[phase].time, 0);
  return table(
    [["Phase"], ["Time", true], ["Memory made", true]],
    PHASES.map((phase) =>
      element(
        "tr",
        null,
        element("th", { scope: "row" }, element("span", { class: `key ${phase}` }, phase)),
        element("td", { class: "numeric" }, cost[phase].time ? seconds(cost[phase].time) : NOTHING),
        element("td", { class: "numeric" }, cost[phase].time ? bytes(cost[phase].size) : NOTHING),
      ),
    ),
    null,
    element(
      "tfoot",
      null,
      element(
        "tr",
        null,
        element("th", { scope: "row" }, "together"),
        element("td", { class: "numeric" }, seconds(total)),
        element("td", { class: "numeric" }, bytes(PHASES.reduce((sum, phase) => sum + cost[phase].size, 0))),
      ),
    ),
  );
}
