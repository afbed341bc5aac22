"use strict";
// How numbers are shown, and how elements are made: text goes in as text, never as markup.
function showBytes(value) {
  if (value < 10240) return `${Math.round(value).toLocaleString("en")} B`;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (value >= 1024 && i < units.length - 1) { value /= 1024; i++; }
  return `${value < 100 ? String(Number(value.toPrecision(3))) : Math.round(value)} ${units[i]}`;
}

function showTime(ns) {
  const size = Math.abs(ns);
  for (const [unit, scale] of [["s", 1e9], ["ms", 1e6], ["µs", 1e3]]) {
    if (size >= scale) return `${Number((ns / scale).toPrecision(4))} ${unit}`;
  }
  return `${Math.round(ns)} ns`;
}

function showNumber(value) {
  return Number.isInteger(value) ? value.toLocaleString("en") : value.toFixed(2);
}

const SHOW = { bytes: showBytes, ns: showTime, number: showNumber, name: (value) => value || "(root)", text: String };

function element(tag, options = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name === "class") made.className = value;
    else made[name] = value;
  }
  made.append(...children);
  return made;
}

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
