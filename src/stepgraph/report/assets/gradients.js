// Where gradients stop: in the graph as it is wired, and in what was seen while training.

function drawGradients(place, data, view) {
  const run = data.runs[view.run];
  const stops = run.graph.gradients || [];
  const trained = new Set(
    run.graph.nodes.flatMap((node) => node.parameters.filter((one) => one.trained).map((one) => one.name)),
  );
  const looks = run.distributions.filter((one) => Object.keys(one.gradients).length);
  const troubles = gradientTroubles(looks, trained);
  put(
    place,
    element(
      "p",
      { class: "lead" },
      stops.length
        ? `${count(stops.length, "place")} in this graph ${stops.length === 1 ? "lets" : "let"} no gradient through.`
        : `Nothing stops them: gradients flow from the loss to all ${count(trained.size, "parameter tensor")}.`,
    ),
    stops.length
      ? scrolling(
          "Where gradients stop",
          table(
            [["Layer"], ["What gets none"], ["Why"]],
            stops.map(([layer, what, why]) =>
              element(
                "tr",
                null,
                element(
                  "th",
                  { scope: "row" },
                  element("button", { type: "button", class: "link", onclick: () => view.chooseLayer(layer) }, layer),
                ),
                element("td", null, what),
                element("td", null, why),
              ),
            ),
          ),
        )
      : null,
    looks.length
      ? element(
          "p",
          { class: troubles.length ? "notice" : "lead" },
          troubles.length
            ? "Seen while training:"
            : `Seen while training: in ${count(looks.length, "look")} every trained parameter had a gradient, with no value that is not finite.`,
        )
      : empty(missing(run, "gradients") || "No gradients were looked at yet."),
    troubles.length
      ? element(
          "ul",
          null,
          troubles.map((text) => element("li", null, text)),
        )
      : null,
  );
}

/** Parameters that should learn and were seen with a gradient of zeros, or of what is no number. */
function gradientTroubles(looks, trained) {
  const found = [];
  for (const name of trained) {
    const zero = looks.filter(
      ({ gradients }) => gradients[name] && gradients[name].zeros === gradients[name].count,
    );
    const wild = looks.filter(({ gradients }) => gradients[name] && gradients[name].not_finite > 0);
    if (zero.length)
      found.push(
        `${name}: the whole gradient was zero at ${zero.length === looks.length ? "every look" : `update ${zero.map((one) => number(one.step)).join(", ")}`}.`,
      );
    if (wild.length)
      found.push(`${name}: the gradient was not finite at update ${wild.map((one) => number(one.step)).join(", ")}.`);
  }
  return found;
}
