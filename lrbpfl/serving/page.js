"use strict";
const $ = (id) => document.getElementById(id);
let clients = [];

async function ask(path, body) {
  const headers = { "Content-Type": "application/json" };
  if ($("token").value) headers.Authorization = `Bearer ${$("token").value}`;
  const reply = await fetch(path, body ? { method: "POST", headers, body: JSON.stringify(body) } : { headers });
  const said = await reply.json().catch(() => ({}));
  if (reply.status === 401) $("token-part").hidden = false;
  if (!reply.ok) throw new Error(said.detail || `the service answered ${reply.status}`);
  return said;
}

function fault(error) {
  $("fault").textContent = error ? error.message : "";
  $("fault").hidden = !error;
  if (error) $("answer").hidden = true;
}

async function load() {
  try {
    clients = (await ask("clients")).clients;
    $("client").replaceChildren(...clients.map(({ name }) => new Option(name, name)));
    $("client").disabled = false;
    $("about").textContent = `${clients.length} client${clients.length === 1 ? "" : "s"}, each with a model of its own.`;
    fault(null);
    choose();
  } catch (error) {
    $("about").textContent = "The clients are not shown yet.";
    fault(error);
  }
}

const chosen = () => clients[$("client").selectedIndex];
const count = (shape) => shape.reduce((n, size) => n * size, 1);

function choose() {
  const { algorithm, classes, rank, examples, inputs } = chosen();
  const ranks = rank ? `, ranks ${Object.values(rank).join(", ")}` : "";
  $("told").textContent = `${algorithm}${ranks}; ${classes.length} classes; trained on ${examples ?? "?"} examples`;
  $("wanted").textContent = inputs.shape
    ? `${count(inputs.shape)} numbers (${inputs.dtype}, shape ${inputs.shape.join(" × ") || "of one number"}), with commas, spaces or lines between`
    : `JSON: ${JSON.stringify(inputs)}`;
}

function nested(numbers, shape) {
  if (!shape.length) return numbers[0];
  const [, ...rest] = shape, size = count(rest);
  if (!rest.length) return numbers;
  return Array.from({ length: shape[0] }, (_, i) => nested(numbers.slice(i * size, (i + 1) * size), rest));
}

function row({ shape }) {
  const text = $("row").value.trim();
  if (!shape) return JSON.parse(text);
  const words = text.split(/[\s,;[\]]+/).filter(Boolean);
  const odd = words.find((word) => !Number.isFinite(Number(word)));
  if (odd !== undefined) throw new Error(`“${odd}” is not a number`);
  if (words.length !== count(shape)) throw new Error(`${words.length} numbers were given, and the model takes ${count(shape)}`);
  return nested(words.map(Number), shape);
}

function bar(name, parts, full, shown) {
  const label = document.createElement("span"), track = document.createElement("div"), number = document.createElement("span");
  label.textContent = name;
  track.className = "track";
  for (const [value, colour] of parts) {
    const piece = document.createElement("i");
    piece.style.width = `${full ? Math.min(100, (100 * value) / full) : 0}%`;
    piece.style.setProperty("--c", `var(${colour})`);
    track.append(piece);
  }
  number.className = "number";
  number.textContent = shown;
  return [label, track, number];
}

function show({ label, probability, total, aleatoric, epistemic, set }) {
  $("label").textContent = set ? `${label} (set: ${set.join(", ")})` : label;
  const names = Object.entries(probability), most = Math.log(names.length);
  $("probability").replaceChildren(...names.flatMap(([name, p]) =>
    bar(name, [[p, name === String(label) ? "--c0" : "--c7"]], 1, `${(100 * p).toFixed(1)} %`)));
  $("uncertainty").replaceChildren(
    ...bar("total", [[aleatoric, "--c4"], [epistemic, "--c3"]], most, total.toFixed(3)),
    ...bar("aleatoric", [[aleatoric, "--c4"]], most, aleatoric.toFixed(3)),
    ...bar("epistemic", [[epistemic, "--c3"]], most, epistemic.toFixed(3)));
  $("answer").hidden = false;
}

$("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  try {
    if (!clients.length) { await load(); return; }
    const { name, inputs } = chosen();
    show((await ask("predict", { client: name, inputs: [row(inputs)] })).predictions[0]);
    fault(null);
  } catch (error) { fault(error); }
});
$("client").addEventListener("change", () => { choose(); $("answer").hidden = true; });
$("token").addEventListener("change", load);
$("zeros").addEventListener("click", () => {
  const { shape } = chosen()?.inputs ?? {};
  if (shape) $("row").value = Array(count(shape)).fill(0).join(", ");
});
load();
