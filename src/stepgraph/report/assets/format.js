// Numbers as people read them. Everything here takes null for "not known" and text for NaN and infinities.

const NOTHING = "–";

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** Four digits, no more zeros than needed: 0.01234, 12.35, 1,234, 1.2e-7. */
function number(value) {
  if (value === null || value === undefined) return NOTHING;
  if (!isNumber(value)) return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e7)) return value.toExponential(2).replace(/\.?0*e\+?/, "e");
  if (Number.isInteger(value) || size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(4)));
}

function bytes(count) {
  if (!isNumber(count)) return NOTHING;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (Math.abs(count) >= 1024 && unit < units.length - 1) {
    count /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? count.toFixed(0) : count.toPrecision(count >= 1000 ? 4 : 3)} ${units[unit]}`;
}

/** Short times with three digits in the unit that fits. */
function seconds(time) {
  if (!isNumber(time)) return NOTHING;
  if (time >= 1) return `${time.toPrecision(3)} s`;
  return time >= 1e-3 ? `${(time * 1e3).toPrecision(3)} ms` : `${(time * 1e6).toFixed(0)} µs`;
}

/** Long times: 1 h 05 min. */
function duration(time) {
  if (!isNumber(time)) return NOTHING;
  if (time < 60) return `${time.toFixed(1)} s`;
  const minutes = Math.floor(time / 60);
  const two = (value) => String(value).padStart(2, "0");
  if (minutes < 60) return `${minutes} min ${two(Math.floor(time % 60))} s`;
  return `${Math.floor(minutes / 60)} h ${two(minutes % 60)} min`;
}

function share(part, whole) {
  return whole > 0 ? `${((100 * part) / whole).toFixed(part / whole < 0.1 ? 1 : 0)} %` : NOTHING;
}

const capital = (text) => text.slice(0, 1).toUpperCase() + text.slice(1);

const count = (value, one, many = `${one}s`) => `${number(value)} ${value === 1 ? one : many}`;

const extents = (shape) => (shape.length ? shape.join(" × ") : "one number");

/** A moment in the reader's own time zone. */
function moment(text) {
  const time = new Date(text);
  if (Number.isNaN(time.getTime())) return text || NOTHING;
  return time.toLocaleString(undefined, { dateStyle: "medium", timeStyle: "medium" });
}
