"use strict";
// Draws the figures of the page from the numbers embedded in it; every number was computed before, none is here.

const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs;
const byId = (id) => document.getElementById(id);
const percent = (share, digits = 1) => (share == null ? "–" : (100 * share).toFixed(digits) + " %");
const plain = (value, digits = 3) => (value == null ? "–" : value.toFixed(digits));
const colour = (run) => `--c: var(--c${run % 10})`;
const has = (value) => value !== null && value !== undefined;
const trained = (client) => !has(client.new_alpha);
const known = (client) => (trained(client) ? client.name : `${client.name} (new${ofAlpha(client.new_alpha)})`);
const ofAlpha = (kind) => (kind === "sites" ? "" : `, alpha ${kind}`);
const everyone = (run) => (run.clients.every(trained) ? "all clients" : "all training clients");

// ---- elements ------------------------------------------------------------------------------------------------------

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) if (has(value)) element.setAttribute(name, value);
  element.append(...children.filter(has)); // strings become text, never markup
  return element;
}
const html = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
const tip = (text) => svg("title", {}, text);
const line = (x1, y1, x2, y2, name) => svg("line", { x1, y1, x2, y2, class: name });
const text = (x, y, content, anchor = "middle", name = null) =>
  svg("text", { x, y, "text-anchor": anchor, class: name }, content);
const canvas = (width, height, label, ...children) =>
  svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }, ...children);

const painters = new Map(); // place -> how to draw it again when the window changes
function show(place, draw) {
  const paint = () => place.replaceChildren(draw(Math.max(place.clientWidth, 200)));
  painters.set(place, paint);
  paint();
}
let width = window.innerWidth;
window.addEventListener("resize", () => {
  if (window.innerWidth === width) return; // phones change the height while they scroll
  width = window.innerWidth;
  requestAnimationFrame(() => painters.forEach((paint) => paint()));
});
const missing = (why) => () => html("p", { class: "note" }, why);

// ---- axes ----------------------------------------------------------------------------------------------------------

/** Round numbers between two values, about as many as asked for. */
function ticks(low, high, count = 5) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}

/** The range of some values with a margin; never empty. */
function range(values, { from = null, to = null } = {}) {
  const low = has(from) ? from : Math.min(...values), high = Math.max(...values);
  const margin = (high - low) * 0.08 || Math.abs(high) * 0.1 || 0.1;
  return [has(from) ? from : low - margin, has(to) ? Math.min(to, high + margin) : high + margin];
}

/** A frame with two axes: where values lie, and the elements to draw on. An axis: {range, label, show, ticks}. */
function axes(width, height, x, y, margin = { left: 52, right: 16, top: 8, bottom: 38 }) {
  const [left, right, top, bottom] = [margin.left, width - margin.right, margin.top, height - margin.bottom];
  const X = (v) => left + ((v - x.range[0]) / (x.range[1] - x.range[0])) * (right - left);
  const Y = (v) => bottom - ((v - y.range[0]) / (y.range[1] - y.range[0])) * (bottom - top);
  const drawn = [];
  for (const v of y.ticks || ticks(...y.range))
    drawn.push(line(left, Y(v), right, Y(v), "gridline"), text(left - 6, Y(v) + 4, y.show(v), "end"));
  for (const v of x.ticks || ticks(...x.range, Math.max(2, Math.floor((right - left) / 50))))
    drawn.push(text(X(v), bottom + 15, x.show(v)));
  drawn.push(line(left, bottom, right, bottom, "axis"), line(left, top, left, bottom, "axis"));
  drawn.push(text((left + right) / 2, height - 5, x.label));
  const middle = (top + bottom) / 2;
  drawn.push(svg("text", { x: 0, y: 0, "text-anchor": "middle", transform: `translate(11 ${middle}) rotate(-90)` }, y.label));
  return { X, Y, left, right, top, bottom, drawn };
}
const wholePercent = (v) => `${Number((100 * v).toFixed(2))}`;

/** One of five shapes: with ten colours and two kinds of line, no run is told by its colour alone. */
function mark(run, x, y, r = 4) {
  const shapes = [
    () => svg("circle", { cx: x, cy: y, r }),
    () => svg("rect", { x: x - r * 0.9, y: y - r * 0.9, width: 1.8 * r, height: 1.8 * r }),
    () => svg("path", { d: `M${x} ${y - 1.3 * r}L${x + 1.3 * r} ${y}L${x} ${y + 1.3 * r}L${x - 1.3 * r} ${y}Z` }),
    () => svg("path", { d: `M${x} ${y - 1.2 * r}L${x + 1.2 * r} ${y + r}L${x - 1.2 * r} ${y + r}Z` }),
    () => svg("path", { d: `M${x} ${y + 1.2 * r}L${x + 1.2 * r} ${y - r}L${x - 1.2 * r} ${y - r}Z` }),
  ];
  return fill(shapes[(run + Math.floor(run / 5)) % 5](), { class: "mark", style: colour(run) }, []);
}
const dash = (run) => (Math.floor(run / 5) % 2 ? "6 3" : null);

// ---- learning curves and scatter -----------------------------------------------------------------------------------

function curves(key, floor, label, showValue) {
  const lines = RUNS.map((run) => run.curves[key]);
  const floors = floor ? RUNS.map((run) => run.curves[floor]) : [];
  const points = [...lines, ...floors].flat();
  if (!points.length) return missing("No round was judged.");
  const rounds = points.map(([round]) => round);
  const lowest = key === "accuracy" ? {} : { from: 0 };
  const values = range(points.map(([, value]) => value), { ...lowest, to: key === "nll" ? null : 1 });
  return (width) => {
    const x = { range: [0, Math.max(...rounds)], label: "round", show: String };
    const a = axes(width, 230, x, { range: values, label, show: key === "nll" ? String : wholePercent });
    const path = (part) => part.map(([r, v], i) => `${i ? "L" : "M"}${a.X(r)} ${a.Y(v)}`).join("");
    floors.forEach((part, i) => a.drawn.push(svg("path", { d: path(part), class: "floor", style: colour(i) })));
    lines.forEach((part, i) => {
      a.drawn.push(svg("path", { d: path(part), class: "line", style: colour(i), "stroke-dasharray": dash(i) }));
      for (const [r, v] of part)
        a.drawn.push(svg("g", {}, mark(i, a.X(r), a.Y(v), 3.5), tip(`${RUNS[i].name}, round ${r}: ${showValue(v)}`)));
    });
    return canvas(width, 230, `${label} over rounds`, ...a.drawn);
  };
}

function legend(runs) {
  return runs.map((run) => [run, RUNS.indexOf(run)]).map(([run, i]) => html("span", {},
    canvas(28, 14, "", svg("path", { d: "M0 7L28 7", class: "line", style: colour(i), "stroke-dasharray": dash(i) }), mark(i, 14, 7)),
    run.name));
}

function scatter() {
  const points = RUNS.map((run, i) => ({ i, name: run.name, ...run.scores })).filter((p) => has(p.accuracy) && has(p.ece_pooled));
  if (!points.length) return missing("No run was judged.");
  const x = { range: range(points.map((p) => p.accuracy), { to: 1 }), label: "accuracy, %", show: wholePercent };
  const tops = points.map((p) => Math.max(p.ece_pooled, p.ece_pooled_high || 0));
  const y = { range: range(tops, { from: 0, to: 1 }), label: "pooled ECE, %", show: wholePercent };
  return (width) => {
    const a = axes(width, 320, x, y);
    const taken = points.map((p) => ({ y: a.Y(p.ece_pooled), from: a.X(p.accuracy) - 9, to: a.X(p.accuracy) + 9 }));
    for (const p of points) {
      const [px, py] = [a.X(p.accuracy), a.Y(p.ece_pooled)];
      const group = svg("g", { style: colour(p.i) });
      if (has(p.ece_pooled_low)) group.append(line(px, a.Y(p.ece_pooled_low), px, a.Y(p.ece_pooled_high), "whisker"));
      if (has(p.ece_pooled_floor)) group.append(line(px - 6, a.Y(p.ece_pooled_floor), px + 6, a.Y(p.ece_pooled_floor), "whisker"));
      const [left, long] = [px > width * 0.6, 7 * p.name.length];
      let ly = py + 4; // a label moves up until it covers no other and no mark
      const from = left ? px - 10 - long : px + 10;
      while (taken.some((t) => Math.abs(t.y - ly) < 14 && from < t.to && t.from < from + long)) ly -= 14;
      taken.push({ y: ly, from, to: from + long });
      group.append(mark(p.i, px, py, 6), text(left ? px - 10 : px + 10, ly, p.name, left ? "end" : "start", "strong"));
      group.append(tip(`${p.name}: accuracy ${percent(p.accuracy, 2)}, ECE ${percent(p.ece_pooled, 2)} ` +
        `(${percent(p.ece_pooled_low, 2)} to ${percent(p.ece_pooled_high, 2)}), floor ${percent(p.ece_pooled_floor, 2)}`));
      a.drawn.push(group);
    }
    return canvas(width, 320, "Accuracy against pooled ECE", ...a.drawn);
  };
}

// ---- new clients ---------------------------------------------------------------------------------------------------

/** A score of new clients over their alphas, one step each; that of the training clients stands apart, before the first. */
function overAlpha(key, floor, label) {
  const kind = (text) => (text === "sites" ? text : Number(text)); // whole sites have no alpha
  const alphas = [...new Set(RUNS.flatMap((run) => Object.keys(run.new).map(kind)))].sort((p, q) => (p === "sites") - (q === "sites") || p - q);
  const lines = RUNS.map((run) => {
    const judged = Object.entries(run.new).map(([alpha, scores]) => [1 + alphas.indexOf(kind(alpha)), scores]);
    return (judged.length ? [[0, run.scores], ...judged] : []).filter(([, scores]) => has(scores[key]));
  });
  const scores = lines.flat().map(([, s]) => s);
  if (!scores.length) return missing("No new client was judged.");
  const y = { range: range(scores.flatMap((s) => [s[key], s[floor]]).filter(has), { from: 0, to: 1 }), label, show: wholePercent };
  return (width) => {
    const places = [...alphas.keys()].map((i) => i + 1);
    const x = { range: [-0.4, alphas.length + 0.4], label: "alpha", show: (i) => (i ? String(alphas[i - 1]) : "training"), ticks: [0, ...places] };
    const a = axes(width, 230, x, y);
    a.drawn.push(svg("line", { x1: a.X(0.5), y1: a.top, x2: a.X(0.5), y2: a.bottom, class: "axis", "stroke-dasharray": "2 4" }));
    lines.forEach((part, i) => {
      const path = (name) => part.filter(([at, s]) => at && has(s[name])).map(([at, s], n) => `${n ? "L" : "M"}${a.X(at)} ${a.Y(s[name])}`).join("");
      a.drawn.push(svg("path", { d: path(floor), class: "floor", style: colour(i) }),
        svg("path", { d: path(key), class: "line", style: colour(i), "stroke-dasharray": dash(i) }));
      for (const [at, s] of part) {
        const where = at ? `new clients${ofAlpha(alphas[at - 1])}` : "training clients";
        const short = has(s[floor]) ? svg("path", { d: `M${a.X(at) - 7} ${a.Y(s[floor])}h14`, class: "floor", style: colour(i) }) : null;
        a.drawn.push(svg("g", {}, short, mark(i, a.X(at), a.Y(s[key]), 4),
          tip(`${RUNS[i].name}, ${where}: ${percent(s[key], 2)}, floor ${percent(s[floor], 2)}`)));
      }
    });
    return canvas(width, 230, `${label} over alpha`, ...a.drawn);
  };
}

// ---- reliability ---------------------------------------------------------------------------------------------------

function reliability(view, run, label) {
  if (!view) return missing("The predictions of this run were not kept.");
  const most = Math.max(...view.bins.map(([, examples]) => examples));
  return (width) => {
    const side = Math.min(width, 340), height = Math.round(side * 0.72), below = 86;
    const unit = { range: [0, 1], show: wholePercent, ticks: [0, 0.2, 0.4, 0.6, 0.8, 1] };
    const a = axes(side, height, { ...unit, label: "" }, { ...unit, label: "accuracy, %" }, { left: 52, right: 16, top: 8, bottom: 20 });
    const b = axes(side, below, { ...unit, label: "confidence, %" },
      { range: [0, most], label: "count", show: (v) => v.toLocaleString("en", { notation: "compact" }), ticks: [0, most] });
    a.drawn.push(line(a.X(0), a.Y(0), a.X(1), a.Y(1), "diagonal"));
    for (const [bin, examples, confidence, accuracy] of view.bins) {
      const [from, to] = [bin / DATA.bins, (bin + 1) / DATA.bins];
      const [x, wide] = [a.X(from) + 1, a.X(to) - a.X(from) - 2];
      const words = `confidence ${percent(from, 0)} to ${percent(to, 0)}: ${examples.toLocaleString("en")} predictions, ` +
        `mean confidence ${percent(confidence)}, accuracy ${percent(accuracy)}`;
      const at = a.X(confidence);
      const pale = examples < 10 ? "pale" : null;
      a.drawn.push(svg("g", { class: pale },
        svg("rect", { x, y: a.Y(accuracy), width: wide, height: a.Y(0) - a.Y(accuracy), class: "bar soft" }),
        line(at, a.Y(accuracy), at, a.Y(confidence), "gap"), line(x, a.Y(confidence), x + wide, a.Y(confidence), "gap"),
        svg("rect", { x, y: a.top, width: wide, height: a.bottom - a.top, "fill-opacity": 0 }), tip(words)));
      const tall = Math.max(b.Y(0) - b.Y(examples), 0.75);
      b.drawn.push(svg("g", {}, svg("rect", { x, y: b.Y(0) - tall, width: wide, height: tall, class: "bar" }), tip(words)));
    }
    return canvas(side, height + below, label, svg("g", { style: colour(run) }, ...a.drawn),
      svg("g", { style: colour(run), transform: `translate(0 ${height})` }, ...b.drawn));
  };
}

function diagram(run, title, note, view) {
  const place = html("div", { class: "plot" });
  const figure = html("figure", {}, html("figcaption", {}, html("span", { class: "swatch", style: colour(run) }), title),
    html("p", { class: "note" }, note), place);
  byId("diagrams").append(figure);
  show(place, reliability(view, run, `Reliability: ${title}`));
}

function diagrams() {
  RUNS.forEach((run, i) => {
    const s = run.scores;
    diagram(i, `${run.name}: ${everyone(run)}`,
      `ECE ${percent(s.ece_pooled, 2)}, floor ${percent(s.ece_pooled_floor, 2)}, debiased ${percent(s.ece_pooled_debiased, 2)}`, run.pooled);
    if (run.worst === null) return;
    const client = run.clients[run.worst];
    diagram(i, `${run.name}: worst client`,
      `${client.name}: ECE ${percent(client.scores.ece, 2)}, floor ${percent(client.scores.ece_floor, 2)}, debiased ${percent(client.scores.ece_debiased, 2)}`, client.view);
  });
}

// ---- promises ------------------------------------------------------------------------------------------------------

/** Every client's coverage beside what chance allows, and below it the mean size of its sets. */
function promises({ run, promised, rows }) {
  if (!rows.length) return missing("No client has a promise: its calibration part is too small.");
  const lowest = Math.min(...rows.map((row) => Math.min(row.coverage, row.low))), most = Math.max(...rows.map((row) => row.set_size));
  return (space) => {
    const width = Math.max(space, 70 + 9 * rows.length), x = { range: [-0.7, rows.length - 0.3], show: String, ticks: [] };
    const height = 240, below = 100;
    const a = axes(width, height, { ...x, label: "" }, { range: [Math.max(lowest - 0.03, 0), 1], label: "coverage, %", show: wholePercent },
      { left: 52, right: 16, top: 8, bottom: 12 });
    const b = axes(width, below, { ...x, label: "clients, by their coverage" }, { range: [0, most], label: "set size", show: String, ticks: ticks(0, most, 2) },
      { left: 52, right: 16, top: 8, bottom: 24 });
    a.drawn.push(line(a.left, a.Y(promised), a.right, a.Y(promised), "diagonal"));
    const wide = Math.min(a.X(1) - a.X(0) - 2, 22);
    rows.forEach((row, i) => {
      const words = () => tip(`${row.name}: covers ${percent(row.coverage)} of ${row.tested} test examples, by chance ${percent(row.low)} to ` +
        `${percent(row.high)}; mean size of a set ${plain(row.set_size, 2)}; ${row.fitted} calibration examples`);
      const pick = (group) => { group.addEventListener("click", () => { choose(run, row.place); byId("clients").scrollIntoView(); }); return group; };
      const at = a.X(i), name = row.new ? "clickable hollow" : "clickable";
      a.drawn.push(pick(svg("g", { class: name },
        svg("rect", { x: at - wide / 2, y: a.Y(row.high), width: wide, height: Math.max(a.Y(row.low) - a.Y(row.high), 1), class: "bar pale" }),
        mark(run, at, a.Y(row.coverage), 4),
        svg("rect", { x: at - wide / 2, y: a.top, width: wide, height: a.bottom - a.top, "fill-opacity": 0 }), words())));
      b.drawn.push(pick(svg("g", { class: name },
        svg("rect", { x: at - wide / 2, y: b.Y(row.set_size), width: wide, height: b.Y(0) - b.Y(row.set_size), class: row.new ? "bar soft" : "bar" }), words())));
    });
    return canvas(width, height + below, `Coverage and set size of every client, ${RUNS[run].name}`, svg("g", { style: colour(run) }, ...a.drawn),
      svg("g", { style: colour(run), transform: `translate(0 ${height})` }, ...b.drawn));
  };
}

// ---- one client ----------------------------------------------------------------------------------------------------

const brush = document.createElement("canvas").getContext("2d");
brush.font = `12px ${getComputedStyle(document.body).fontFamily}`; // that of svg text
const long = (words) => brush.measureText(words).width;

/** A name, cut where it would be longer than so many pixels. */
function cut(name, most) {
  const letters = [...name].slice(0, 60); // more never fit
  while (letters.length > 1 && long(letters.join("")) > most) letters.splice(-2, 2, "…");
  return letters.join("");
}

function confusion(view, names) {
  if (!view) return missing("The predictions of this run were not kept.");
  const classes = [...new Set(view.confusion.flatMap(([label, guess]) => [label, guess]))].sort((p, q) => p - q);
  const place = new Map(classes.map((label, i) => [label, i]));
  const named = classes.length <= 10; // more are numbers on the axes, and named where the pointer is
  const whole = (label) => (!(label in names) ? String(label) : named ? names[label] : `${label} (${names[label]})`);
  const shown = classes.map((label) => (named ? cut(whole(label), 72) : String(label)));
  const longest = Math.max(...shown.map(long));
  const rows = new Map();
  for (const [label, , examples] of view.confusion) rows.set(label, (rows.get(label) || 0) + examples);
  return (width) => {
    const left = Math.max(28 + longest, 44), size = Math.min((Math.min(width, 380) - left - 4) / classes.length, 44), end = size * classes.length;
    const drawn = [svg("rect", { x: left, y: 4, width: end, height: end, class: "frame" })];
    const every = Math.ceil((named ? 14 : Math.max(14, longest + 5)) / size); // name every class if there is room, or every so many
    const slanted = named && longest > size - 4, below = slanted ? 14 + 0.87 * longest : 18;
    classes.forEach((label, i) => {
      if (i % every) return;
      const [x, y] = [left + (i + 0.5) * size, 4 + (i + 0.5) * size];
      const column = slanted
        ? svg("text", { "text-anchor": "end", transform: `translate(${x + 4} ${end + 14}) rotate(-60)` }, shown[i])
        : text(x, end + 18, shown[i]);
      for (const element of [text(left - 6, y + 4, shown[i], "end"), column]) {
        if (shown[i] !== whole(label)) element.append(tip(whole(label)));
        drawn.push(element);
      }
    });
    for (const [label, guess, examples] of view.confusion) {
      const [x, y, share] = [left + place.get(guess) * size, 4 + place.get(label) * size, examples / rows.get(label)];
      const cell = svg("g", {}, svg("rect", { x, y, width: size, height: size, class: "cell", "fill-opacity": 0.06 + 0.64 * share }));
      if (size >= 26 && String(examples).length * 7.5 < size) cell.append(text(x + size / 2, y + size / 2 + 4, String(examples), "middle", "strong"));
      cell.append(tip(`class ${whole(label)} taken for ${whole(guess)}: ${examples} of ${rows.get(label)} (${percent(share)})`));
      drawn.push(cell);
    }
    drawn.push(text(left + end / 2, end + below + 18, "predicted class"));
    drawn.push(svg("text", { "text-anchor": "middle", transform: `translate(11 ${4 + end / 2}) rotate(-90)` }, "true class"));
    return canvas(Math.max(left + end + 4, 150), end + below + 24, "Confusion matrix", ...drawn);
  };
}

const GROUPS = [["right", "--c: var(--right)"], ["wrong", "--c: var(--wrong)"]];

function split(view) {
  if (!view) return missing("The predictions of this run were not kept.");
  const top = Math.max(...GROUPS.map(([name]) => view[name].aleatoric + view[name].epistemic), 1e-6);
  return (width) => {
    const side = Math.min(width, 380), left = 48, scale = (side - left - 62) / top;
    const drawn = GROUPS.flatMap(([name, style], i) => {
      const { examples, aleatoric, epistemic } = view[name];
      const y = 4 + 30 * i, end = left + (aleatoric + epistemic) * scale;
      const words = `${examples} ${name} predictions: total ${plain(aleatoric + epistemic)}, aleatoric ${plain(aleatoric)}, epistemic ${plain(epistemic)} nats`;
      return [text(left - 6, y + 14, name, "end"), svg("g", { style },
        svg("rect", { x: left, y, width: aleatoric * scale, height: 20, class: "bar soft" }),
        svg("rect", { x: left + aleatoric * scale, y, width: epistemic * scale, height: 20, class: "bar" }), tip(words)),
        text(end + 5, y + 14, examples ? plain(aleatoric + epistemic) : "none", "start")];
    });
    drawn.push(text(left, 78, "pale: aleatoric, full: epistemic", "start"));
    return canvas(side, 84, "Mean uncertainty of right and wrong predictions", ...drawn);
  };
}

function histogram(view, classes) {
  if (!view) return missing("");
  const top = classes > 1 ? Math.log(classes) : 1;
  const shares = GROUPS.map(([name]) => view[name].counts.map((n) => n / Math.max(view[name].examples, 1)));
  const most = Math.max(...shares.flat(), 0.01);
  return (width) => {
    const side = Math.min(width, 380);
    const a = axes(side, 190, { range: [0, top], label: "total uncertainty, nats", show: String },
      { range: [-most, most], label: "share of each, %", show: (v) => wholePercent(Math.abs(v)) });
    shares.forEach((part, g) => part.forEach((share, i) => {
      if (!share) return;
      const [name, style] = GROUPS[g];
      const [from, to] = [(i / part.length) * top, ((i + 1) / part.length) * top];
      const [y, end] = g ? [a.Y(0), a.Y(-share)] : [a.Y(share), a.Y(0)];
      a.drawn.push(svg("g", { style }, svg("rect", { x: a.X(from) + 1, y, width: a.X(to) - a.X(from) - 2, height: end - y, class: "bar" }),
        tip(`${view[name].counts[i]} of ${view[name].examples} ${name} predictions between ${plain(from, 2)} and ${plain(to, 2)} nats`)));
    }));
    a.drawn.push(line(a.left, a.Y(0), a.right, a.Y(0), "axis"));
    a.drawn.push(text(a.right, a.top + 10, "right", "end"), text(a.left + 6, a.bottom - 4, "wrong", "start"));
    return canvas(side, 190, "Histogram of total uncertainty for right and wrong predictions", ...a.drawn);
  };
}

function rankBars(run, ranks) {
  if (!ranks) return missing(run.layers.length ? "Pick a client to see its ranks." : "This run has no ranks: its models carry no masks, or were not kept.");
  return (width) => {
    const side = Math.min(width, 380), left = 10 + 7 * Math.max(...run.layers.map((name) => name.length));
    const step = (side - left - 30) / run.max_rank;
    const drawn = run.layers.flatMap((name, i) => {
      const y = 6 + 24 * i;
      const boxes = Array.from({ length: run.max_rank }, (_, r) => svg("rect", {
        x: left + r * step + 1, y, width: Math.max(step - 2, 1), height: 16, class: r < ranks[i] ? "cell" : "frame" }));
      return [text(left - 6, y + 12, name, "end"), svg("g", {}, ...boxes, tip(`${name}: ${ranks[i]} of ${run.max_rank} gates open`)),
        text(side - 24, y + 12, String(ranks[i]), "start", "strong")];
    });
    const end = 6 + 24 * run.layers.length;
    drawn.push(text(left, end + 14, `open gates of ${run.max_rank}`, "start"));
    return canvas(side, end + 20, "Rank per layer", ...drawn);
  };
}

function rankMap(run, i) {
  return (width) => {
    const left = 10 + 7 * Math.max(...run.layers.map((name) => name.length));
    const columns = run.clients.filter(trained).length;
    const size = Math.max(8, Math.min(34, (width - left - 4) / columns)), tall = 24;
    const drawn = run.layers.map((name, row) => text(left - 6, row * tall + 16, name, "end"));
    run.clients.forEach((client, column) => {
      if (!client.ranks || !trained(client)) return;
      const strip = svg("g", { class: "clickable" }, ...client.ranks.map((rank, row) => {
        const [x, y] = [left + column * size, row * tall];
        const box = svg("rect", { x, y, width: size - 1, height: tall - 1, class: "cell", "fill-opacity": 0.08 + 0.57 * rank / run.max_rank });
        const words = tip(`${client.name}, ${run.layers[row]}: rank ${rank} of ${run.max_rank}`);
        return svg("g", {}, box, size >= 16 ? text(x + (size - 1) / 2, y + 16, String(rank), "middle", "strong") : null, words);
      }));
      strip.addEventListener("click", () => { choose(i, column); byId("clients").scrollIntoView(); });
      drawn.push(strip);
    });
    return canvas(left + size * columns, run.layers.length * tall, `Rank of every client and layer, ${run.name}`, ...drawn);
  };
}

// ---- the table of clients and its picker ---------------------------------------------------------------------------

const meanRank = (client) => (client.ranks ? client.ranks.reduce((a, b) => a + b, 0) / client.ranks.length : client.scores.rank);
const bare = (digits) => (v) => (v == null ? "–" : (100 * v).toFixed(digits));
const COLUMNS = [
  ["client", (c) => c.name, String],
  ["new, alpha", (c) => c.new_alpha, (v) => (has(v) ? String(v) : "")],
  ["examples", (c) => c.scores.examples, (v) => plain(v, 0)],
  ["accuracy", (c) => c.scores.accuracy, bare(2)],
  ["NLL", (c) => c.scores.nll, plain],
  ["Brier", (c) => c.scores.brier, plain],
  ["ECE", (c) => c.scores.ece, bare(2)],
  ["floor", (c) => c.scores.ece_floor, bare(2)],
  ["debiased", (c) => c.scores.ece_debiased, bare(2)],
  ["coverage", (c) => c.scores.coverage, bare(2)],
  ["set size", (c) => c.scores.set_size, (v) => plain(v, 2)],
  ["total", (c) => c.scores.total, plain],
  ["epistemic", (c) => c.scores.epistemic, plain],
  ["mean rank", meanRank, (v) => plain(v, 2)],
];
const state = { run: 0, client: null, column: 6, rising: false }; // no client: all of them together

function compare(p, q) {
  if (!has(p) || !has(q)) return has(q) - has(p); // what is missing stays at the end
  const order = typeof p === "string" ? p.localeCompare(q, "en", { numeric: true }) : p - q;
  return state.rising ? order : -order;
}

function table() {
  const run = RUNS[state.run];
  const columns = COLUMNS.map((column, i) => [...column, i]).filter(([, value]) => run.clients.some((c) => has(value(c))));
  const heads = columns.map(([name, , , i]) => {
    const sorted = i === state.column;
    const button = html("button", { type: "button" }, name + (sorted ? (state.rising ? " ▲" : " ▼") : ""));
    button.addEventListener("click", () => {
      state.rising = sorted ? !state.rising : i === 0;
      state.column = i;
      table();
      byId("client-table").querySelector("[aria-sort] button").focus();
    });
    return html("th", { scope: "col", class: i ? null : "text", "aria-sort": sorted ? (state.rising ? "ascending" : "descending") : null }, button);
  });
  const key = COLUMNS[state.column][1];
  const order = run.clients.map((client, place) => ({ client, place })).sort((p, q) => compare(key(p.client), key(q.client)));
  const rows = order.map(({ client, place }) => {
    const cells = columns.map(([, value, shown, i]) => html(i ? "td" : "th", i ? {} : { class: "text", scope: "row", title: client.name }, shown(value(client))));
    const row = html("tr", { "data-client": place, class: place === state.client ? "picked" : null }, ...cells);
    row.addEventListener("click", () => choose(state.run, place));
    return row;
  });
  const [head, body] = byId("client-table").children;
  head.replaceChildren(html("tr", {}, ...heads));
  body.replaceChildren(...rows);
}

function choose(runIndex, client) {
  const run = RUNS[runIndex];
  if (runIndex !== state.run || !byId("pick-client").options.length) {
    state.run = runIndex;
    const all = html("option", { value: "" }, `${everyone(run)} together`);
    byId("pick-client").replaceChildren(all, ...run.clients.map((c, i) => html("option", { value: i }, known(c))));
    state.client = client;
    table();
  }
  state.client = client;
  byId("pick-run").value = runIndex;
  byId("pick-client").value = client === null ? "" : client;
  for (const row of byId("client-table").tBodies[0].rows) row.classList.toggle("picked", row.dataset.client === String(client));
  const one = client === null ? null : run.clients[client];
  const s = one ? one.scores : { ...run.scores, ece: run.scores.ece_pooled, ece_floor: run.scores.ece_pooled_floor, ece_debiased: run.scores.ece_pooled_debiased };
  byId("client-scores").textContent = `${one ? known(one) : everyone(run).replace("a", "A")}: accuracy ${percent(s.accuracy, 2)}, ECE ${percent(s.ece, 2)}, ` +
    `floor ${percent(s.ece_floor, 2)}, debiased ${percent(s.ece_debiased, 2)}`;
  const view = one ? one.view : run.pooled;
  show(byId("client-reliability"), reliability(view, runIndex, "Reliability of the picked client"));
  show(byId("client-confusion"), confusion(view, run.class_names));
  show(byId("client-split"), split(view));
  show(byId("client-histogram"), histogram(view, run.classes));
  show(byId("client-ranks"), rankBars(run, one && one.ranks));
}

function rankMaps() {
  const masked = RUNS.map((run, i) => [run, i]).filter(([run]) => run.layers.length);
  if (!masked.length) byId("rank-maps").append(missing("No run here has ranks: its models carry no masks, or were not kept.")());
  for (const [run, i] of masked) {
    const place = html("div", { class: "plot", tabindex: 0 });
    byId("rank-maps").append(html("figure", {}, html("figcaption", {}, `Rank of every client and layer: ${run.name}`),
      html("p", { class: "note" }, `Columns: ${run.clients.filter(trained).length} ${everyone(run).replace("all ", "")}. Shade: open gates, 1 to ${run.max_rank}. A click picks the client.`), place));
    show(place, rankMap(run, i));
  }
}

// ---- light and dark, printing, start -------------------------------------------------------------------------------

const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
const root = document.documentElement;
const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches);
const nameTheme = () => { byId("theme").textContent = isDark() ? "Light" : "Dark"; };
byId("theme").addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; nameTheme(); });
prefersDark.addEventListener("change", nameTheme);
window.addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((part) => { part.open = true; }));

nameTheme();
if (RUNS.length > 1) show(byId("scatter"), scatter());
byId("legend").append(...legend(RUNS));
show(byId("curve-accuracy"), curves("accuracy", null, "accuracy, %", (v) => percent(v, 2)));
show(byId("curve-nll"), curves("nll", null, "NLL, nats", plain));
show(byId("curve-ece"), curves("ece_pooled", "ece_pooled_floor", "pooled ECE, %", (v) => percent(v, 2)));
performance.mark("first figures");
if (byId("new-clients")) {
  byId("new-legend").append(...legend(RUNS.filter((run) => Object.keys(run.new).length)));
  show(byId("new-ece"), overAlpha("ece_pooled", "ece_pooled_floor", "pooled ECE, %"));
  show(byId("new-worst"), overAlpha("ece_worst", "ece_floor_worst", "worst client's ECE, %"));
}
DATA.promised.forEach((section, i) => show(byId(`promise-${i}`), promises(section)));
diagrams();
byId("pick-run").append(...RUNS.map((run, i) => html("option", { value: i }, run.name)));
byId("pick-run").addEventListener("change", (event) => choose(Number(event.target.value), null));
byId("pick-client").addEventListener("change", (event) => choose(state.run, event.target.value === "" ? null : Number(event.target.value)));
choose(0, RUNS[0].worst);
rankMaps();
performance.mark("all figures");
