// The drawing of the graph: zoom, pan, and the facts of a layer that was chosen.

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

function drawGraph(place, data, view) {
  const run = data.runs[view.run];
  if (!run.drawing) {
    put(place, empty("This run has no drawing of its graph."));
    return;
  }
  const drawing = document.importNode(new DOMParser().parseFromString(run.drawing, "image/svg+xml").documentElement, true);
  const panel = element("div", { class: "facts", id: "facts", role: "region", "aria-label": "The chosen layer", "aria-live": "polite", tabindex: "-1" });
  const canvas = element("div", { class: "canvas", role: "group", "aria-label": "The graph. Plus and minus zoom, arrow keys go from layer to layer." }, drawing);
  const camera = zooming(canvas, drawing, view.graph);
  const nodes = [...drawing.querySelectorAll(".node")];
  const costs = layerCosts(run);

  function choose(name, isMoved = true) {
    view.graph.layer = name;
    for (const node of nodes) {
      const isChosen = node.dataset.layer === name;
      node.classList.toggle("chosen", isChosen);
      node.setAttribute("aria-pressed", String(isChosen));
      node.setAttribute("tabindex", isChosen ? "0" : "-1");
    }
    picker.value = name;
    put(panel, facts(run, name, costs));
    const chosen = nodes.find((node) => node.dataset.layer === name);
    if (chosen && isMoved) camera.show(chosen);
  }

  const names = [...new Set(run.graph.nodes.map((node) => node.layer))];
  const picker = element("select", { id: "layer", onchange: (event) => choose(event.target.value) },
    names.map((name) => element("option", { value: name }, name)));
  for (const node of nodes) {
    node.setAttribute("role", "button");
    node.setAttribute("aria-label", `Layer ${node.dataset.layer}`);
    node.addEventListener("click", () => { if (!camera.hasDragged()) choose(node.dataset.layer, false); });
  }
  canvas.addEventListener("keydown", (event) => walk(event, nodes, choose));
  view.chooseLayer = (name) => {
    choose(name);
    find("#graph").scrollIntoView({ behavior: "smooth" });
  };
  const buttons = element("div", { class: "zoom" },
    element("button", { type: "button", "aria-label": "Zoom in", title: "Zoom in", onclick: () => camera.by(1.3) }, "+"),
    element("button", { type: "button", "aria-label": "Zoom out", title: "Zoom out", onclick: () => camera.by(1 / 1.3) }, "−"),
    element("button", { type: "button", title: "The whole graph", onclick: () => camera.whole() }, "All"));
  put(place,
    element("div", { class: "controls" }, element("label", { class: "control" }, "Layer ", picker),
      element("span", { class: "hint" }, "Drag to move. Zoom with the buttons, the keys + and −, or Ctrl and the wheel.")),
    element("div", { class: "split" }, element("div", { class: "stage" }, canvas, buttons), panel));
  camera.start();
  choose(names.includes(view.graph.layer) ? view.graph.layer : names[0], false);
}

/** Arrow keys go along the list of layers, Enter and space choose. */
function walk(event, nodes, choose) {
  const here = nodes.indexOf(document.activeElement);
  const way = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 }[event.key];
  if (here >= 0 && way) {
    event.preventDefault();
    const next = nodes[Math.min(Math.max(here + way, 0), nodes.length - 1)];
    choose(next.dataset.layer);
    next.focus({ preventScroll: true });
  } else if (here >= 0 && (event.key === "Enter" || event.key === " ")) {
    event.preventDefault();
    choose(nodes[here].dataset.layer);
    find("#facts").focus({ preventScroll: true });
  }
}

/** The visible part of the drawing, as its viewBox: the browser scales, nothing is drawn again. */
function zooming(canvas, drawing, kept) {
  const [, , width, height] = (drawing.getAttribute("viewBox") || "0 0 100 100").split(/[ ,]+/).map(Number);
  let [drag, moved] = [null, false];
  for (const name of ["width", "height"]) drawing.removeAttribute(name);
  drawing.setAttribute("preserveAspectRatio", "xMidYMid meet");

  const set = (box) => {
    kept.box = box;
    drawing.setAttribute("viewBox", box.map((one) => one.toFixed(2)).join(" "));
  };
  /** Around a point of the drawing, never closer than a few letters nor further than twice the whole. */
  const by = (factor, at) => {
    const [x, y, w, h] = kept.box;
    const largest = 2 * Math.max(width, height);
    const scale = Math.min(Math.max(1 / factor, 60 / Math.max(w, h)), largest / Math.max(w, h));
    const [px, py] = at || [x + w / 2, y + h / 2];
    set([px - (px - x) * scale, py - (py - y) * scale, w * scale, h * scale]);
  };
  const unit = () => Math.max(kept.box[2] / (canvas.clientWidth || 1), kept.box[3] / (canvas.clientHeight || 1));
  const pointOf = (event) => {
    const box = canvas.getBoundingClientRect();
    const [x, y, w, h] = kept.box;
    return [x + w / 2 + (event.clientX - box.left - box.width / 2) * unit(), y + h / 2 + (event.clientY - box.top - box.height / 2) * unit()];
  };
  const whole = () => set([0, 0, width, height]);
  /** A tall graph begins at its top, at a size that can be read. */
  const start = () => {
    if (kept.box && kept.of === `${width} ${height}`) {
      set(kept.box);
      return;
    }
    kept.of = `${width} ${height}`;
    const [w, h] = [canvas.clientWidth || 700, canvas.clientHeight || 520];
    const scale = Math.max(Math.min(w / width, h / height), Math.min(0.75, w / width));
    set([width / 2 - w / scale / 2, height * scale <= h ? height / 2 - h / scale / 2 : 0, w / scale, h / scale]);
  };
  const show = (node) => {
    const { x, y, width: w, height: h } = node.getBBox();
    const [left, top, across, down] = kept.box;
    const isSeen = x > left && y > top && x + w < left + across && y + h < top + down;
    if (!isSeen) set([x + w / 2 - across / 2, y + h / 2 - down / 2, across, down]);
  };

  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return; // the page scrolls as ever
    event.preventDefault();
    by(Math.exp(-event.deltaY / 300), pointOf(event));
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    drag = { x: event.clientX, y: event.clientY, box: kept.box, unit: unit() };
    moved = false;
  });
  const move = (event) => {
    if (!drag) return;
    const [dx, dy] = [event.clientX - drag.x, event.clientY - drag.y];
    if (!moved && Math.hypot(dx, dy) < 4) return;
    moved = true;
    set([drag.box[0] - dx * drag.unit, drag.box[1] - dy * drag.unit, drag.box[2], drag.box[3]]);
  };
  canvas.addEventListener("pointermove", (event) => {
    if (drag && !moved && Math.hypot(event.clientX - drag.x, event.clientY - drag.y) >= 4) canvas.setPointerCapture(event.pointerId);
    move(event);
  });
  for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => { drag = null; });
  canvas.addEventListener("keydown", (event) => {
    if (event.key === "+" || event.key === "=") by(1.3);
    if (event.key === "-") by(1 / 1.3);
    if (event.key === "0") whole();
  });
  return { by, whole, start, show, hasDragged: () => moved };
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
      [nodes.length > 1 ? `Makes (${i + 1})` : "Makes", node.results.map((one) => tensorLine(one))]]),
    ["Parameters", first.parameters.length
      ? [`${number(learned)}${first.frozen ? ", frozen" : ""}`, ...first.parameters.map((one) => tensorLine(one, one.name.slice(name.length + 1) + (one.trained ? "" : " (not trained)")))]
      : "none"],
  ];
  return [
    element("h3", { "data-chosen": name }, name),
    element("dl", null, rows.flatMap(([term, value]) => [element("dt", null, term),
      ...(Array.isArray(value) ? value : [value]).map((one) => element("dd", null, one))])),
    costTable(costs.get(name), run),
    updatedTogether(first, costs.get(name)),
  ];
}

const updatedTogether = (node, cost) => (cost && !cost.update.time && node.parameters.some((one) => one.trained)
  ? element("p", { class: "lead" }, "Its parameters are small and updated together with others: see the optimizer below.") : null);

const tensorLine = (one, label) => [label ? `${label}: ` : "", extents(one.shape), " ", element("small", null, `${one.type}, ${bytes(one.bytes)}`)].flat()
  .reduce((line, part) => { line.append(part); return line; }, element("span"));

function costTable(cost, run) {
  if (!run.profiles.length) return empty("No profile was taken.");
  if (!cost) return empty("The profile has no operator of this layer: it only changes how memory is looked at.");
  const total = PHASES.reduce((sum, phase) => sum + cost[phase].time, 0);
  return element("table", null,
    element("thead", null, element("tr", null, ["Phase", "Time", "Memory made"].map((one, i) => element("th", { scope: "col", class: i ? "numeric" : "" }, one)))),
    element("tbody", null, PHASES.map((phase) => element("tr", null, element("th", { scope: "row" }, element("span", { class: `key ${phase}` }, phase)),
      element("td", { class: "numeric" }, cost[phase].time ? seconds(cost[phase].time) : NOTHING),
      element("td", { class: "numeric" }, cost[phase].time ? bytes(cost[phase].size) : NOTHING)))),
    element("tfoot", null, element("tr", null, element("th", { scope: "row" }, "together"), element("td", { class: "numeric" }, seconds(total)),
      element("td", { class: "numeric" }, bytes(PHASES.reduce((sum, phase) => sum + cost[phase].size, 0))))));
}
