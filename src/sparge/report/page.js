"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const METRICS = ["sparsity", "error", "missed"];
const PARTS = ["prediction", "quantization", "attention", "rest"];
const INVISIBLE = 255, FULL = 254, DECADES = 6;

// Heads that hold a value, in one list: what the maps and the table show is a selection of it.
// A layer goes by the number in its name, as in model.layers.7.self_attn, unless two would share one.
const named = data.layers.map((layer) => Number(layer.name.match(/(?:\.|layer )(\d+)(?:\.|$)/)?.[1] ?? NaN));
const unique = new Set(named).size === named.length && !named.some(Number.isNaN);
const heads = data.layers.flatMap((layer, index) => layer.sparsity.map((_, head) => ({
  index, layer: unique ? named[index] : index, head, name: layer.name, sparsity: layer.sparsity[head], error: layer.error[head],
  missed: layer.missed[head], skipped_values: layer.skipped_values[head],
})));
const state = { layers: null, heads: null, order: "index", by: "layer", down: false, chosen: null };
const tops = { sparsity: 1, error: greatest("error"), missed: greatest("missed") };

function greatest(metric) { return Math.max(1e-9, ...heads.map((one) => one[metric])); }
function percent(share, digits = 1) { return (100 * share).toFixed(digits) + " %"; }
function shown(metric, value) { return metric === "error" ? value.toFixed(4) : percent(value, metric === "sparsity" ? 1 : 2); }
function time(seconds) { return seconds < 1 ? (1000 * seconds).toFixed(1) + " ms" : seconds.toFixed(2) + " s"; }
function make(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

// "0-4, 9" to a set of numbers; null: all; undefined: not understood.
function numbers(text) {
  if (!text.trim()) return null;
  const found = new Set();
  for (const part of text.split(",")) {
    const match = part.trim().match(/^(\d+)(?:\s*-\s*(\d+))?$/);
    if (!match) return undefined;
    const last = Number(match[2] ?? match[1]);
    for (let n = Number(match[1]); n <= last && n < 100000; n++) found.add(n);
  }
  return found;
}

function selected() {
  return heads.filter((one) => (!state.layers || state.layers.has(one.layer)) && (!state.heads || state.heads.has(one.head)));
}

function layersInOrder(list) {
  const groups = new Map();
  for (const one of list) groups.set(one.layer, [...(groups.get(one.layer) ?? []), one]);
  const rows = [...groups.values()];
  if (state.order === "index") return rows;
  const score = (row) => state.order === "sparsity"
    ? row.reduce((sum, one) => sum + one.sparsity, 0) / row.length
    : Math.max(...row.map((one) => one[state.order]));
  return rows.sort((a, b) => score(b) - score(a));
}

function describe(one) {
  return `layer ${one.layer}, head ${one.head}\n${one.name}\nskipped ${shown("sparsity", one.sparsity)}\n`
    + `relative L1 ${shown("error", one.error)}\nmissed ${shown("missed", one.missed)}`;
}

function drawMaps(list) {
  const rows = layersInOrder(list);
  const columns = [...new Set(list.map((one) => one.head))].sort((a, b) => a - b);
  for (const metric of METRICS) {
    const map = byId("map-" + metric);
    const cells = [make("span"), ...columns.map((head) => make("span", { className: "head", textContent: head }))];
    for (const row of rows) {
      cells.push(make("span", { textContent: row[0].layer, title: row[0].name }));
      const there = new Map(row.map((one) => [one.head, one]));
      for (const head of columns) cells.push(there.has(head) ? cell(there.get(head), metric) : make("span"));
    }
    map.style.gridTemplateColumns = `max-content repeat(${columns.length}, minmax(15px, 30px))`;
    const focused = map.contains(document.activeElement);
    map.replaceChildren(...cells);
    map.onkeydown = (event) => moveFocus(event, columns.length);
    const entry = map.querySelector("button.chosen") ?? map.querySelector("button");
    if (entry) entry.tabIndex = 0;
    if (focused && entry) entry.focus({ preventScroll: true });
    byId("top-" + metric).textContent = shown(metric, tops[metric]);
  }
}

function cell(one, metric) {
  const button = make("button", { type: "button", tabIndex: -1 });
  button.style.setProperty("--v", Math.min(1, one[metric] / tops[metric]).toFixed(3));
  button.setAttribute("aria-label", `layer ${one.layer}, head ${one.head}: ${shown(metric, one[metric])}`);
  button.classList.toggle("chosen", one === state.chosen);
  button.addEventListener("click", () => choose(one));
  button.addEventListener("pointerenter", (event) => tip(describe(one), event.clientX, event.clientY));
  button.addEventListener("focus", () => { const at = button.getBoundingClientRect(); tip(describe(one), at.right, at.bottom); });
  for (const end of ["pointerleave", "blur"]) button.addEventListener(end, () => tip(null));
  return button;
}

// One stop for the Tab key in each map; arrows go from cell to cell.
function moveFocus(event, columns) {
  const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[event.key];
  const buttons = [...event.currentTarget.querySelectorAll("button")];
  const next = buttons[buttons.indexOf(event.target) + step];
  if (!next) return;
  event.preventDefault();
  event.target.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

function tip(text, x = 0, y = 0) {
  const box = byId("tip");
  box.hidden = text === null;
  if (text === null) return;
  box.textContent = text;
  box.style.left = Math.max(4, Math.min(x + 14, innerWidth - box.offsetWidth - 6)) + "px";
  box.style.top = Math.max(4, Math.min(y + 14, innerHeight - box.offsetHeight - 6)) + "px";
}

function drawTable(list) {
  const rows = [...list].sort((a, b) => (a[state.by] - b[state.by] || a.layer - b.layer || a.head - b.head));
  if (state.down) rows.reverse();
  byId("table").tBodies[0].replaceChildren(...rows.map((one) => {
    const line = make("tr", { className: one === state.chosen ? "chosen" : "", title: one.name },
      ...[one.layer, one.head, ...METRICS.map((metric) => shown(metric, one[metric])), percent(one.skipped_values)]
        .map((value) => make("td", { textContent: value })));
    line.addEventListener("click", () => choose(one));
    return line;
  }));
}

// ---- pictures

function decode(picture) {
  const bytes = Uint8Array.from(atob(picture.data), (letter) => letter.charCodeAt(0));
  const size = picture.rows * picture.columns;
  return { ...picture, kept: bytes.subarray(0, size), mass: bytes.subarray(size) };
}

function colour(name) {
  const canvas = Object.assign(document.createElement("canvas"), { width: 1, height: 1 });
  const pen = canvas.getContext("2d");
  pen.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  pen.fillRect(0, 0, 1, 1);
  return pen.getImageData(0, 0, 1, 1).data;
}

function paint(canvas, picture, values, top) {
  canvas.width = picture.columns;
  canvas.height = picture.rows;
  const pen = canvas.getContext("2d"), image = pen.createImageData(picture.columns, picture.rows);
  const low = colour("--low"), high = colour("--high"), hidden = colour("--hidden");
  picture.kept.forEach((kept, place) => {
    const share = values[place] / top;
    for (let part = 0; part < 3; part++) {
      const mixed = low[part] + (high[part] - low[part]) * share;
      image.data[4 * place + part] = kept === INVISIBLE ? hidden[part] : mixed;
    }
    image.data[4 * place + 3] = 255;
  });
  pen.putImageData(image, 0, 0);
}

function drawPictures() {
  const one = state.chosen, layer = data.layers[one.index], picture = decode(layer.pictures[one.head]);
  paint(byId("mask"), picture, picture.kept, FULL);
  paint(byId("mass"), picture, picture.mass, 255);
  byId("chosen").textContent = `Layer ${one.layer} (${one.name}), head ${one.head}: ${percent(one.sparsity)} skipped, `
    + `${percent(one.missed, 2)} of the true attention missed, relative L1 ${one.error.toFixed(4)}. `
    + `Blocks of ${layer.block[0]} x ${layer.block[1]} tokens, ${layer.tokens[0]} x ${layer.tokens[1]} in all.`;
  for (const id of ["mask", "mass"]) byId(id).onpointermove = (event) => readPatch(event, picture, layer);
  byId("strip").replaceChildren(...layer.pictures.map((small, head) => {
    const canvas = make("canvas"), other = heads.find((each) => each.index === one.index && each.head === head);
    paint(canvas, decode(small), decode(small).kept, FULL);
    const button = make("button", { type: "button", className: other === one ? "chosen" : "" }, canvas, `head ${head}: ${percent(other.sparsity, 0)}`);
    button.addEventListener("click", () => choose(other));
    return button;
  }));
}

function readPatch(event, picture, layer) {
  const box = event.target.getBoundingClientRect();
  const row = Math.min(picture.rows - 1, Math.max(0, Math.floor((event.clientY - box.top) / box.height * picture.rows)));
  const column = Math.min(picture.columns - 1, Math.max(0, Math.floor((event.clientX - box.left) / box.width * picture.columns)));
  const place = row * picture.columns + column, kept = picture.kept[place], mass = picture.mass[place];
  const part = (index, count, length) => `${Math.floor(index * length / count)} to ${Math.min(length, Math.ceil((index + 1) * length / count)) - 1}`;
  const what = kept === INVISIBLE ? "cannot be seen"
    : `${percent(kept / FULL, 0)} computed, ${mass ? "about " + percent(10 ** ((mass - 1) / 254 * DECADES - DECADES), 3) : "less than 0.0001 %"} of these rows' attention`;
  byId("patch").textContent = `Queries ${part(row, picture.rows, layer.tokens[0])}, keys ${part(column, picture.columns, layer.tokens[1])}: ${what}.`;
}

// ---- times and order

function drawTime() {
  const longest = Math.max(...data.time.map((one) => one.whole));
  const bars = data.time.flatMap(({ way, whole, parts }) => {
    const bar = make("div", { className: "bar" });
    for (const part of PARTS.filter((name) => parts[name])) {
      const piece = make("i");
      piece.style.width = 100 * parts[part] / longest + "%";
      piece.style.background = `var(--${part})`;
      const said = `${way}, ${part}: ${time(parts[part])} (${percent(parts[part] / whole)})`;
      piece.addEventListener("pointerenter", (event) => tip(said, event.clientX, event.clientY));
      piece.addEventListener("pointerleave", () => tip(null));
      bar.append(piece);
    }
    return [make("span", { textContent: `${way} ${time(whole)}` }), bar];
  });
  const sparse = data.time[data.time.length - 1];
  const legend = make("div", { className: "legend" }, ...PARTS.filter((part) => part in sparse.parts).map((part) => {
    const swatch = make("i");
    swatch.style.background = `var(--${part})`;
    return make("span", {}, swatch, `${part}: ${time(sparse.parts[part])} of sparse`);
  }));
  byId("time").replaceChildren(...bars, legend);
}

function drawCurve() {
  const [frames, height, width] = data.order.drawn, path = data.order.path, size = 10;
  const few = Math.min(frames, 8);
  byId("curve").replaceChildren(...Array.from({ length: few }, (_, frame) => {
    const canvas = make("canvas", { width: width * size, height: height * size }), pen = canvas.getContext("2d");
    pen.lineWidth = 2;
    path.forEach((cell, place) => {
      if (Math.floor(cell / (height * width)) !== frame) return;
      const at = (token) => [(token % width + .5) * size, (Math.floor(token / width) % height + .5) * size];
      pen.strokeStyle = pen.fillStyle = `hsl(${Math.round(300 * place / path.length)} 70% 50%)`;
      const next = path[place + 1];
      if (next === undefined) return;
      pen.beginPath();
      if (Math.floor(next / (height * width)) === frame) { pen.moveTo(...at(cell)); pen.lineTo(...at(next)); }
      else pen.arc(...at(cell), size / 3, 0, 7);
      pen.stroke();
    });
    return make("figure", {}, canvas, `frame ${frame}${frame === few - 1 && few < frames ? `, and ${frames - few} more` : ""}`);
  }));
}

// ---- controls

function choose(one) {
  state.chosen = one;
  drawPictures();
  refresh();
}

function refresh() {
  const list = selected();
  byId("shown").textContent = `${list.length} of ${heads.length} heads`;
  drawMaps(list);
  drawTable(list);
}

function redrawPictures() {
  if (state.chosen) drawPictures();
}

byId("theme").addEventListener("change", (event) => {
  document.documentElement.dataset.theme = event.target.value;
  redrawPictures();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawPictures);

if (heads.length) {
  for (const name of ["layers", "heads"]) byId(name).addEventListener("input", (event) => {
    const found = numbers(event.target.value);
    event.target.classList.toggle("wrong", found === undefined);
    if (found !== undefined) { state[name] = found; refresh(); }
  });
  byId("order").addEventListener("change", (event) => { state.order = event.target.value; refresh(); });
  byId("controls").addEventListener("submit", (event) => event.preventDefault());
  byId("controls").addEventListener("reset", () => {
    Object.assign(state, { layers: null, heads: null, order: "index" });
    for (const name of ["layers", "heads"]) byId(name).classList.remove("wrong");
    refresh();
  });
  for (const button of byId("table").tHead.querySelectorAll("button")) button.addEventListener("click", () => {
    state.down = state.by === button.dataset.by ? !state.down : !["layer", "head"].includes(button.dataset.by);
    state.by = button.dataset.by;
    for (const head of byId("table").tHead.rows[0].cells) head.removeAttribute("aria-sort");
    button.parentElement.setAttribute("aria-sort", state.down ? "descending" : "ascending");
    refresh();
  });
  drawTime();
  choose(heads.reduce((best, one) => one.error > best.error ? one : best));
}
if (data.order) drawCurve();
