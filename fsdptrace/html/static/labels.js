"use strict";
// Names, measured once, and the names of the lanes as a picture that is drawn anew only when other lanes come into sight.
class Names {
  constructor() {
    this.widths = new Map();
    this.short = new Map();
  }

  // The width of a text in the small font, which must be the one in use.
  width(g, text) {
    let width = this.widths.get(text);
    if (width === undefined) this.widths.set(text, width = g.measureText(text).width);
    return width;
  }

  // The text, shortened to `room` pixels in the font in use: the end of a name says more than its begin.
  fitting(g, text, room) {
    const key = `${room} ${text}`;
    let short = this.short.get(key);
    if (short === undefined) this.short.set(key, short = shorten(g, text, room));
    return short;
  }
}

class Labels {
  constructor(view, names) {
    this.view = view;
    this.names = names;
    this.canvas = document.createElement("canvas");
    this.shown = null;
  }

  forget() { this.shown = null; }

  // Puts the names of the rows `from` to `to` on the canvas `g` is of; how many had to be drawn.
  draw(g, scroll, from, to, colours) {
    const { view, canvas, shown } = this, { width, height } = view.canvas;
    let drawn = 0;
    if (!shown || shown.scroll !== scroll || shown.rows !== view.rows || shown.height !== height || shown.ratio !== view.ratio) {
      this.shown = { scroll, rows: view.rows, height, ratio: view.ratio };
      canvas.width = Math.min(width, Math.ceil(GUTTER * view.ratio));
      canvas.height = height; // which clears it
      const own = canvas.getContext("2d");
      own.setTransform(view.ratio, 0, 0, view.ratio, 0, 0);
      own.textBaseline = "middle";
      for (let i = from; i < to; i++, drawn++) this.one(own, view.rows[i], view.rows[i].y - scroll, colours);
    }
    g.drawImage(canvas, 0, 0, canvas.width / view.ratio, canvas.height / view.ratio);
    return drawn;
  }

  one(g, row, y, c) {
    const process = this.view.processes[row.p], rank = row.type === "rank", middle = y + row.height / 2;
    g.fillStyle = rank || row.matched ? c.fg : c.muted;
    g.font = rank ? BOLD : MONO;
    const text = rank ? `${this.view.folded.has(row.p) ? "▸" : "▾"} ${process.title}  ${process.data.host}` : process.laneName(row.lane);
    g.fillText(this.names.fitting(g, text, GUTTER - (rank ? 120 : 28)), rank ? 8 : 22, middle);
    if (rank && process.peak) {
      g.font = SMALL;
      g.fillStyle = c.muted;
      g.textAlign = "right";
      g.fillText(`peak ${showBytes(process.peak)}`, GUTTER - 10, middle);
      g.textAlign = "left";
    }
  }
}

function shorten(g, text, room) {
  if (g.measureText(text).width <= room) return text;
  let cut = Math.max(1, text.length - Math.floor(text.length * room / g.measureText(text).width));
  while (cut < text.length && g.measureText(`…${text.slice(cut)}`).width > room) cut++;
  return `…${text.slice(cut)}`;
}
