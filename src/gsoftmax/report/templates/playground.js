"use strict";
// The sliders set the signals of the three figures, and the table repeats the values at x1 and x2.
(async () => {
  const names = ["lam", "mu1", "sigma1", "mu2", "sigma2", "x1", "x2"];
  const panels = [...document.querySelectorAll("[data-playground]")];
  for (const panel of panels) {
    const name = panel.dataset.playground;
    await draw(`playground-${name}`, panel, specs.playground[name]);
  }
  const cells = ["x", "phi", "z", "slope", "p", "softmax"];

  function update() {
    const v = Object.fromEntries(names.map((name) => [name, Number(document.getElementById(name).value)]));
    for (const name of names) {
      document.getElementById(`${name}-shown`).textContent = minus(v[name]);
      for (const panel of panels) views[`playground-${panel.dataset.playground}`].signal(name, v[name]);
    }
    for (const panel of panels) views[`playground-${panel.dataset.playground}`].run();
    // the figures' own numbers, so that table and dots cannot disagree
    document.querySelectorAll("#values tbody tr").forEach((row, i) => {
      row.querySelectorAll("td").forEach((cell, k) => {
        cell.textContent = show(views["playground-z"].signal(`${cells[k]}${i + 1}`));
      });
    });
  }
  document.getElementById("sliders").addEventListener("input", update);
  update();
  document.documentElement.dataset.playground = "ready";
})();
