"use strict";
// A click computes the weights of the context in every layer: q . key and q . table entry.
const data = JSON.parse(document.getElementById("data").textContent);
const [height, width] = data.image;
const source = document.querySelector("#picture img").src;
const STOPS = [[45, 0, 75], [128, 115, 172], [216, 218, 235], [247, 247, 247], [254, 224, 182], [224, 130, 20], [127, 59, 8]];
let head = -1, over = true, differences = true, query = data.query;

function numbers(text) {
  if (text === null) return null;
  const bytes = Uint8Array.from(atob(text), c => c.charCodeAt(0));
  const halves = new DataView(bytes.buffer), result = new Float32Array(bytes.length / 2);
  for (let i = 0; i < result.length; i++) {
    const h = halves.getUint16(2 * i, true), e = (h >> 10) & 31, f = h & 1023;
    result[i] = (h >> 15 ? -1 : 1) * (e ? 2 ** (e - 15) * (1 + f / 1024) : f * 2 ** -24);
  }
  return result;
}

for (const layer of data.layers)
  for (const part of ["queries", "keys", "table"]) layer[part] = numbers(layer[part]);

function cellOf(layer) {
  const [down, across] = layer.queryGrid;
  return [Math.min(down - 1, Math.floor(query[0] * down / height)), Math.min(across - 1, Math.floor(query[1] * across / width))];
}

function dot(queries, from, others, at, depth) {
  let sum = 0;
  for (let k = 0; k < depth; k++) sum += queries[from + k] * others[at + k];
  return sum;
}

// The map of one kind for the query: one head, or the mean of all.
function weights(layer, kind) {
  const [down, across] = layer.grid, depth = layer.depth, [row, column] = cellOf(layer);
  const others = kind === "content" ? layer.keys : layer.table;
  const [tall, wide] = layer.scope, size = kind === "content" ? down * across * depth : tall * wide * depth;
  const groups = others.length / size, start = (row * layer.queryGrid[1] + column) * layer.heads * depth;
  const heads = head < 0 ? [...Array(layer.heads).keys()] : [head];
  const map = new Float32Array(down * across);
  for (let y = 0; y < down; y++) for (let x = 0; x < across; x++) {
    let at = (y * across + x) * depth;
    if (kind === "position") {
      const i = (y - row * layer.stride[0]) / layer.dilation[0] + ((tall - 1) >> 1);
      const j = (x - column * layer.stride[1]) / layer.dilation[1] + ((wide - 1) >> 1);
      if (!Number.isInteger(i) || !Number.isInteger(j) || i < 0 || j < 0 || i >= tall || j >= wide) continue;
      at = (i * wide + j) * depth;
    }
    let sum = 0;
    for (const h of heads) sum += dot(layer.queries, start + h * depth, others, (groups > 1 ? h * size : 0) + at, depth);
    map[y * across + x] = sum / heads.length * (kind === "content" ? layer.keyScale : 1);
  }
  return map;
}

function colour(value) {  // -1 .. 1
  const at = (value + 1) / 2 * (STOPS.length - 1), low = Math.min(STOPS.length - 2, Math.floor(at)), part = at - low;
  return [0, 1, 2].map(c => STOPS[low][c] + part * (STOPS[low + 1][c] - STOPS[low][c]));
}

function paint(canvas, map, limit) {
  const context = canvas.getContext("2d"), pixels = context.createImageData(canvas.width, canvas.height);
  for (let i = 0; i < map.length; i++) {
    const value = map[i] / limit;
    const [r, g, b] = colour(over ? Math.sign(value) * (.45 + .45 * Math.abs(value)) : value);
    pixels.data.set([r, g, b, over ? 255 * Math.min(1, Math.abs(value)) ** .7 : 255], 4 * i);
  }
  context.putImageData(pixels, 0, 0);
}

function reach(layer, map) {
  const [row, column] = cellOf(layer), [down, across] = layer.grid;
  let total = 0, far = 0;
  map.forEach((value, i) => {
    const y = (Math.floor(i / across) - row * layer.stride[0]) * height / down;
    const x = (i % across - column * layer.stride[1]) * width / across;
    total += Math.abs(value);
    far += Math.abs(value) * Math.hypot(x, y);
  });
  return total ? far / total : 0;
}

function make(tag, parent, name, text) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

function build() {
  const maps = document.getElementById("maps");
  for (const layer of data.layers) {
    const card = make("section", maps, "card"), title = make("h3", card, "", layer.stage + " ");
    make("span", title, "", `${layer.name}, ${layer.grid[0]} x ${layer.grid[1]}`);
    const two = make("div", card, "two");
    layer.panels = {};
    for (const [kind, there] of [["content", layer.keys], ["position", layer.table]]) {
      const figure = make("figure", two);
      if (!there) {
        make("div", figure, "off", kind + ": off").style.aspectRatio = width / height;
        continue;
      }
      const box = make("div", figure, "map");
      box.style.aspectRatio = width / height;
      const picture = make("img", box), canvas = make("canvas", box), cell = make("i", box, "cell");
      picture.src = source;
      picture.alt = "";
      [canvas.height, canvas.width] = layer.grid;
      box.addEventListener("click", event => ask(event, box));
      layer.panels[kind] = {picture, canvas, cell, caption: make("figcaption", figure)};
    }
  }
  const heads = document.getElementById("heads"), most = Math.max(...data.layers.map(layer => layer.heads));
  for (let h = -1; h < most; h++) {
    const button = make("button", heads, "", h < 0 ? "mean of heads" : `head ${h + 1}`);
    button.type = "button";
    button.addEventListener("click", () => { head = h; draw(); });
  }
  for (const name of ["over", "differences"]) {
    const box = document.getElementById(name);
    box.addEventListener("change", () => {
      if (name === "over") over = box.checked; else differences = box.checked;
      draw();
    });
  }
  const picture = document.getElementById("picture");
  picture.addEventListener("click", event => ask(event, picture));
  picture.addEventListener("keydown", event => {
    const move = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]}[event.key];
    if (!move) return;
    event.preventDefault();
    const finest = [0, 1].map(axis => Math.max(...data.layers.map(layer => layer.queryGrid[axis])));
    move_to(query[0] + move[0] * Math.max(1, Math.round(height / finest[0])), query[1] + move[1] * Math.max(1, Math.round(width / finest[1])));
  });
}

function ask(event, box) {
  const place = box.getBoundingClientRect();
  move_to(Math.floor((event.clientY - place.top) / place.height * height), Math.floor((event.clientX - place.left) / place.width * width));
}

function move_to(row, column) {
  query = [Math.min(height - 1, Math.max(0, row)), Math.min(width - 1, Math.max(0, column))];
  draw();
}

// A page around this one may choose the pixel, as fractions of height and width.
addEventListener("message", event => {
  const at = event.data && event.data.query;
  if (Array.isArray(at) && at.length === 2 && at.every(Number.isFinite)) move_to(Math.floor(at[0] * height), Math.floor(at[1] * width));
});

function draw() {
  const cross = document.getElementById("cross");
  cross.style.top = `${(query[0] + .5) / height * 100}%`;
  cross.style.left = `${(query[1] + .5) / width * 100}%`;
  document.getElementById("where").textContent = `row ${query[0]}, column ${query[1]}`;
  document.querySelectorAll("#heads button").forEach((button, i) => button.setAttribute("aria-pressed", String(i - 1 === head)));
  for (const layer of data.layers) {
    const [row, column] = cellOf(layer), [down, across] = layer.grid;
    for (const [kind, panel] of Object.entries(layer.panels)) {
      panel.canvas.style.visibility = head < layer.heads ? "" : "hidden";
      if (head >= layer.heads) { panel.caption.textContent = "this layer has fewer heads"; continue; }
      const map = panel.map = weights(layer, kind);
      const mean = kind === "content" && differences ? map.reduce((sum, value) => sum + value, 0) / map.length : 0;
      const shown = map.map(value => value - mean);
      const limit = shown.reduce((most, value) => Math.max(most, Math.abs(value)), 1e-30);
      paint(panel.canvas, shown, limit);
      panel.picture.style.display = over ? "" : "none";
      Object.assign(panel.cell.style, {
        top: `${row * layer.stride[0] / down * 100}%`, left: `${column * layer.stride[1] / across * 100}%`,
        height: `${100 / down}%`, width: `${100 / across}%`,
      });
      panel.caption.textContent = "";
      make("b", panel.caption, "", kind);
      const size = mean ? `mean ${mean.toPrecision(2)}, deviation up to ${limit.toPrecision(2)}` : `weights up to ${limit.toPrecision(2)}`;
      panel.caption.append(`: ${size}, mean distance ${Math.round(reach(layer, map))} px`);
    }
  }
}

build();
draw();
