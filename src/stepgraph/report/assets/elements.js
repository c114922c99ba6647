// Making elements. Text only ever becomes text nodes, so no label of a graph can become markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(made, settings, children) {
  for (const [name, value] of Object.entries(settings || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, one] of Object.entries(value)) made.style.setProperty(key, one);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

const element = (tag, settings, ...children) => fill(document.createElement(tag), settings, children);
const shape = (tag, settings, ...children) => fill(document.createElementNS(SVG, tag), settings, children);
/** Children in place of those that are there; what is null is left out. */
const put = (place, ...children) =>
  place.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined));
const pick = (selector, within = document) => within.querySelector(selector);

/** A group of buttons of which one is pressed. */
function choice(label, options, current, onChoose) {
  const buttons = options.map(([value, text]) =>
    element(
      "button",
      {
        type: "button",
        "aria-pressed": String(value === current),
        "data-value": value,
        onclick: () => {
          for (const one of buttons) one.setAttribute("aria-pressed", String(one.dataset.value === value));
          onChoose(value);
        },
      },
      text,
    ),
  );
  return element("div", { class: "choice", role: "group", "aria-label": label }, buttons);
}

/** A bar of one or several parts, for tables; the numbers beside it say the same. */
function bar(parts, whole) {
  return element(
    "span",
    { class: "bar", "aria-hidden": "true" },
    parts.map(([kind, value]) =>
      element("span", { class: `part ${kind}`, style: { width: `${whole > 0 ? (100 * value) / whole : 0}%` } }),
    ),
  );
}

/** What may be wider than the page scrolls by itself, also by the keyboard. */
const scrolling = (label, child, size = "") =>
  element("div", { class: `scroll ${size}`.trim(), tabindex: "0", role: "region", "aria-label": label }, child);

/** Titles are [text, whether numbers stand below]; rows and foot are elements. */
function table(titles, rows, settings = null, foot = null) {
  const heads = titles.map(([text, isNumeric]) => element("th", { scope: "col", class: isNumeric && "numeric" }, text));
  return element(
    "table",
    settings,
    element("thead", null, element("tr", null, heads)),
    element("tbody", null, rows),
    foot,
  );
}

const empty = (text) => element("p", { class: "empty" }, text);

/** A table whose columns sort when their title is pressed. Columns: {title, value(row), cell(row), numeric}. */
function sortable(caption, columns, rows, state, onRow) {
  const body = element("tbody");
  const heads = columns.map((column, index) =>
    element(
      "th",
      { scope: "col", class: column.numeric ? "numeric" : "" },
      column.value ? element("button", { type: "button", onclick: () => sortBy(index) }, column.title) : column.title,
    ),
  );
  const made = element(
    "table",
    { class: "sortable" },
    element("caption", { class: "unseen" }, caption),
    element("thead", null, element("tr", null, heads)),
    body,
  );

  function sortBy(index) {
    const first = columns[index].numeric ? -1 : 1; // the largest numbers are what people look for
    state.direction = state.column === index ? -state.direction : first;
    state.column = index;
    show();
  }

  function show() {
    const { value } = columns[state.column];
    const ordered = [...rows].sort((a, b) => {
      const [left, right] = [value(a), value(b)];
      return state.direction * (typeof left === "string" ? left.localeCompare(right) : left - right);
    });
    heads.forEach((head, index) => {
      if (index === state.column) head.setAttribute("aria-sort", state.direction > 0 ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
    });
    body.replaceChildren(
      ...ordered.map((row) =>
        element(
          "tr",
          { "data-row": row.name },
          columns.map((column, index) =>
            element(
              index === 0 ? "th" : "td",
              { scope: index === 0 ? "row" : null, class: column.numeric ? "numeric" : "" },
              index === 0 && onRow(row)
                ? element("button", { type: "button", class: "link", onclick: onRow(row) }, column.cell(row))
                : column.cell(row),
            ),
          ),
        ),
      ),
    );
  }

  show();
  return scrolling(caption, made);
}
