// Time and memory by layer, as a table that sorts, with bars.

function drawProfile(place, data, view) {
  const run = data.runs[view.run];
  if (!run.profiles.length) {
    put(
      place,
      empty(
        missing(run, "profile") ||
          "No profile was taken yet: the first one comes with the second look, after some updates.",
      ),
    );
    return;
  }
  const which = Math.min(view.profile.which ?? run.profiles.length - 1, run.profiles.length - 1);
  const kinds = new Map(run.graph.nodes.map((node) => [node.layer, node.kind]));
  const rows = [...layerCosts(run, which)].map(([name, cost]) => ({
    name,
    cost,
    kind: kinds.get(name) || "",
    total: PHASES.reduce((sum, phase) => sum + cost[phase].time, 0),
    size: PHASES.reduce((sum, phase) => sum + cost[phase].size, 0),
  }));
  const whole = rows.reduce((sum, row) => sum + row.total, 0);
  const most = Math.max(...rows.map((row) => row.total));
  const columns = [
    { title: "Layer", value: (row) => row.name, cell: (row) => row.name },
    { title: "Kind", value: (row) => row.kind, cell: (row) => row.kind },
    ...PHASES.map((phase) => ({
      title: capital(phase),
      numeric: true,
      value: (row) => row.cost[phase].time,
      cell: (row) => (row.cost[phase].time ? seconds(row.cost[phase].time) : NOTHING),
    })),
    { title: "Together", numeric: true, value: (row) => row.total, cell: (row) => seconds(row.total) },
    { title: "Share", numeric: true, value: (row) => row.total, cell: (row) => share(row.total, whole) },
    {
      title: "",
      cell: (row) =>
        bar(
          PHASES.map((phase) => [phase, row.cost[phase].time]),
          most,
        ),
    },
    { title: "Memory made", numeric: true, value: (row) => row.size, cell: (row) => bytes(row.size) },
  ];
  const { step, rows_in_batch: batch, runs = 3 } = run.profiles[which];
  const options = run.profiles.map((one, i) => [
    String(i),
    i === 0 && one.when === "early" ? `early, update ${number(one.step)}` : `end, update ${number(one.step)}`,
  ]);
  const state = view.profile.sort;
  put(
    place,
    element(
      "p",
      { class: "lead" },
      `A step with ${count(batch, "row")} takes ${seconds(whole)}, operator by operator (update ${number(step)}, ${runs > 1 ? `the least of ${number(runs)} runs` : "one run"}). ` +
        "A real step is a little faster: nothing waits between its operators.",
    ),
    element(
      "div",
      { class: "controls" },
      run.profiles.length > 1
        ? element(
            "span",
            { class: "control" },
            "Taken ",
            choice("Taken", options, String(which), (value) => {
              view.profile.which = Number(value);
              drawProfile(place, data, view);
            }),
          )
        : null,
      element(
        "span",
        { class: "keys" },
        PHASES.map((phase) => element("span", { class: `key ${phase}` }, phase)),
      ),
    ),
    sortable("Time and memory by layer", columns, rows, state, (row) =>
      kinds.has(row.name) ? () => view.chooseLayer(row.name) : null,
    ),
  );
}

/** Why something was not recorded, if the run says so. */
function missing(run, what) {
  const found = run.missing.find((one) => one.what === what);
  return found ? `Not recorded: ${found.why}.` : null;
}
