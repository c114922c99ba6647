// From values to places, and the round numbers beside an axis.

function linear([low, high], [from, to]) {
  const width = high - low || 1;
  const scale = (value) => from + ((value - low) / width) * (to - from);
  scale.invert = (place) => low + ((place - from) / (to - from)) * width;
  return scale;
}

function logarithmic([low, high], range) {
  const inner = linear([Math.log10(low), Math.log10(high)], range);
  const scale = (value) => inner(Math.log10(value));
  scale.invert = (place) => 10 ** inner.invert(place);
  return scale;
}

/** Steps of 1, 2 or 5 times a power of ten. */
function ticks([low, high], wanted) {
  const rough = (high - low) / Math.max(1, wanted);
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5, 10].find((one) => one * power >= rough * 0.999) || 10);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1)
    found.push(Number((i * step).toPrecision(12)));
  return found;
}

/** Powers of ten, and within few of them 2 and 5 too. */
function logTicks([low, high]) {
  const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  const every = Math.max(1, Math.ceil((last - first) / 8));
  const found = [];
  for (let power = first; power <= last; power += every) {
    for (const one of last - first <= 2 ? [1, 2, 5] : [1]) found.push(Number((one * 10 ** power).toPrecision(6)));
  }
  const shown = found.filter((value) => value >= low * 0.999 && value <= high * 1.001);
  return shown.length > 1 ? shown : ticks([low, high], 4).filter((value) => value > 0);
}

/** Bounds of some numbers, with a little room; null where there are none. */
function bounds(values, isLog = false) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (!isNumber(value) || (isLog && value <= 0)) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (low > high) return null;
  if (isLog) return low === high ? [low / 2, high * 2] : [low / (high / low) ** 0.04, high * (high / low) ** 0.04];
  const room = (high - low) * 0.05 || Math.abs(high) * 0.1 || 1;
  return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
}
