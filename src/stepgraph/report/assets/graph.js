// The drawing of the graph, and which layer is chosen in it.

function drawGraph(place, data, view) {
  const run = data.runs[view.run];
  if (!run.drawing) {
    put(place, empty("This run has no drawing of its graph."));
    return;
  }
  const drawing = document.importNode(
    new DOMParser().parseFromString(run.drawing, "image/svg+xml").documentElement,
    true,
  );
  const panel = element("div", {
    class: "facts",
    id: "facts",
    role: "region",
    "aria-label": "The chosen layer",
    "aria-live": "polite",
    tabindex: "-1",
  });
  const canvas = element(
    "div",
    {
      class: "canvas",
      role: "group",
      "aria-label": "The graph. Plus and minus zoom, arrow keys go from layer to layer.",
    },
    drawing,
  );
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
  const picker = element(
    "select",
    { id: "layer", onchange: (event) => choose(event.target.value) },
    names.map((name) => element("option", { value: name }, name)),
  );
  for (const node of nodes) {
    node.setAttribute("role", "button");
    node.setAttribute("aria-label", `Layer ${node.dataset.layer}`);
    node.addEventListener("click", () => {
      if (!camera.hasDragged()) choose(node.dataset.layer, false);
    });
  }
  canvas.addEventListener("keydown", (event) => walk(event, nodes, choose));
  view.chooseLayer = (name) => {
    choose(name);
    pick("#graph").scrollIntoView({ behavior: "smooth" });
  };
  const buttons = element(
    "div",
    { class: "zoom" },
    element(
      "button",
      { type: "button", "aria-label": "Zoom in", title: "Zoom in", onclick: () => camera.by(1.3) },
      "+",
    ),
    element(
      "button",
      { type: "button", "aria-label": "Zoom out", title: "Zoom out", onclick: () => camera.by(1 / 1.3) },
      "−",
    ),
    element("button", { type: "button", title: "The whole graph", onclick: () => camera.whole() }, "All"),
  );
  put(
    place,
    element(
      "div",
      { class: "controls" },
      element("label", { class: "control" }, "Layer ", picker),
      element(
        "span",
        { class: "hint" },
        "Drag to move. Zoom with the buttons, the keys + and −, or Ctrl and the wheel.",
      ),
    ),
    element("div", { class: "split" }, element("div", { class: "stage" }, canvas, buttons), panel),
  );
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
    pick("#facts").focus({ preventScroll: true });
  }
}
