"use strict";
// Mouse, wheel and keys.
class Controls {
  constructor(timeline) {
    const { canvas, host } = timeline;
    let drag = null;
    const place = (event) => {
      const box = canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      drag = { x: event.clientX, y: event.clientY, moved: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!drag) {
        timeline.hooks.onHover(timeline.pick(...place(event)), event);
        return;
      }
      const dx = event.clientX - drag.x, dy = event.clientY - drag.y;
      if (!drag.moved && Math.abs(dx) + Math.abs(dy) < 4) return;
      drag.moved = true;
      canvas.classList.add("dragging");
      timeline.hooks.onHover(null, event);
      timeline.pan(-dx);
      host.scrollTop -= dy;
      drag.x = event.clientX;
      drag.y = event.clientY;
    });
    canvas.addEventListener("pointerup", (event) => {
      const moved = drag && drag.moved;
      drag = null;
      canvas.classList.remove("dragging");
      if (moved) return;
      const hit = timeline.pick(...place(event));
      if (!hit) return;
      if (hit.row.type === "rank") timeline.toggle(hit.row.p);
      else if (hit.layer) {
        timeline.evidence = [];
        timeline.select({ layer: hit.layer, p: hit.p, i: hit.i });
      } else timeline.select(null);
    });
    canvas.addEventListener("pointercancel", () => { drag = null; });
    canvas.addEventListener("pointerleave", (event) => timeline.hooks.onHover(null, event));
    canvas.addEventListener("dblclick", (event) => {
      const hit = timeline.pick(...place(event));
      if (hit && hit.layer) {
        const layer = timeline.processes[hit.p][hit.layer];
        timeline.show(layer.t0[hit.i], layer.t1[hit.i], 0.1);
      }
    });
    host.addEventListener("wheel", (event) => {
      if (event.ctrlKey || event.metaKey) {
        event.preventDefault();
        timeline.zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * 0.008), Math.max(GUTTER, place(event)[0]));
      } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        event.preventDefault();
        timeline.pan(event.deltaX || event.deltaY);
      }
    }, { passive: false });
    host.addEventListener("scroll", () => timeline.invalidate());
    host.addEventListener("keydown", (event) => {
      const step = (timeline.width - GUTTER) / 6;
      const actions = {
        w: () => timeline.zoom(0.7), s: () => timeline.zoom(1 / 0.7), a: () => timeline.pan(-step), d: () => timeline.pan(step),
        ArrowLeft: () => timeline.pan(-step), ArrowRight: () => timeline.pan(step), 0: () => timeline.fit(),
        Escape: () => { timeline.evidence = []; timeline.select(null); },
      };
      const action = actions[event.key];
      if (action && !event.ctrlKey && !event.metaKey && !event.altKey) { event.preventDefault(); action(); }
    });
    new ResizeObserver(() => { if (host.clientWidth !== timeline.width) timeline.layout(); }).observe(host);
  }
}
