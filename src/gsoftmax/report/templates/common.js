"use strict";
const specs = JSON.parse(document.getElementById("specs").textContent);
const views = {}; // figures that are drawn, by name

// Draws one figure into its container, which has the description: what is inside is hidden from screen readers.
// patch: changes the spec of Vega that Vega-Lite makes
async function draw(name, container, spec, patch = []) {
  const errorsOnly = 1;
  const options = { mode: "vega-lite", renderer: "svg", actions: false, logLevel: errorsOnly, patch };
  const inside = container.appendChild(document.createElement("div"));
  inside.setAttribute("aria-hidden", "true");
  const result = await vegaEmbed(inside, structuredClone(spec), options);
  views[name] = result.view;
}

// A number as text, with the minus sign of the figures.
const minus = (number) => String(number).replaceAll("-", "−");

// A number for reading: four significant digits.
function show(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const text = value.toPrecision(4);
  return minus(text.includes("e") ? Number(text).toExponential() : text);
}
