// How the program was started, where, and what it was asked for.

function drawEnvironment(place, data, view) {
  const run = data.runs[view.run];
  const { arguments: words = [], directory = "" } = run.command || {};
  const line = words.map(quoted).join(" ");
  const copy = element(
    "button",
    {
      type: "button",
      onclick: async () => {
        try {
          await navigator.clipboard.writeText(line);
          copy.textContent = "Copied";
        } catch {
          // a page opened from a file may not be allowed to
          getSelection().selectAllChildren(code);
        }
      },
    },
    "Copy",
  );
  const code = element("code", null, line);
  put(
    place,
    element("div", { class: "command" }, element("pre", { tabindex: "0", "aria-label": "Command" }, code), copy),
    element("p", { class: "lead" }, directory ? `Started in ${directory}, seen from the run folder.` : ""),
    element(
      "div",
      { class: "charts" },
      element("div", null, element("h3", null, "Environment"), list(run.environment)),
      element("div", null, element("h3", null, "Asked of fit"), list(run.settings)),
    ),
    element("h3", null, "Times"),
    element(
      "ul",
      { class: "times" },
      times(run).map((one) => element("li", null, one)),
    ),
    run.ranks.length ? element("h3", null, "Ranks") : null,
    run.ranks.length ? ranks(run) : null,
  );
}

/** A line per process that took part. */
const ranks = (run) =>
  table(
    [["Rank"], ["Time of an update", true], ["Of it waiting for others", true], ["Memory", true]],
    run.ranks.map((one) =>
      element(
        "tr",
        null,
        element("th", { scope: "row" }, String(one.rank)),
        [seconds(one.seconds), AS_TIMES.waiting(one.waiting), bytes(one.memory)].map((text) =>
          element("td", { class: "numeric" }, text),
        ),
      ),
    ),
  );

const list = (facts) =>
  element(
    "dl",
    { class: "list" },
    Object.entries(facts || {}).flatMap(([name, value]) => [
      element("dt", null, name.replaceAll("_", " ")),
      element("dd", null, typeof value === "number" ? number(value) : String(value ?? NOTHING)),
    ]),
  );

/** As a shell would need it. */
const quoted = (word) => (/^[\w@%+=:,./~…-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`);

function times(run) {
  const begun = run.begins.map((one, i) => {
    const what =
      i === 0
        ? "Training began"
        : one.resumed
          ? `Training went on from a checkpoint after update ${number(one.step)}`
          : "Training began again: there was no checkpoint to go on from";
    return `${moment(one.time)} · ${what}.`;
  });
  const who = run.end && run.end.who ? ` (${run.end.who})` : "";
  return [
    ...begun,
    run.end
      ? `${moment(run.end.time)} · It ended after update ${number(run.end.step)}: ${run.end.stopped}${who}.`
      : `${moment(run.changed)} · The last entry of its record.`,
  ];
}
