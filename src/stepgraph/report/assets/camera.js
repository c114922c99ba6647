// Zoom and pan of a drawing.

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
    return [
      x + w / 2 + (event.clientX - box.left - box.width / 2) * unit(),
      y + h / 2 + (event.clientY - box.top - box.height / 2) * unit(),
    ];
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

  canvas.addEventListener(
    "wheel",
    (event) => {
      if (!event.ctrlKey && !event.metaKey) return; // the page scrolls as ever
      event.preventDefault();
      by(Math.exp(-event.deltaY / 300), pointOf(event));
    },
    { passive: false },
  );
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
    if (drag && !moved && Math.hypot(event.clientX - drag.x, event.clientY - drag.y) >= 4)
      canvas.setPointerCapture(event.pointerId);
    move(event);
  });
  for (const name of ["pointerup", "pointercancel"])
    canvas.addEventListener(name, () => {
      drag = null;
    });
  canvas.addEventListener("keydown", (event) => {
    if (event.key === "+" || event.key === "=") by(1.3);
    if (event.key === "-") by(1 / 1.3);
    if (event.key === "0") whole();
  });
  return { by, whole, start, show, hasDragged: () => moved };
}
