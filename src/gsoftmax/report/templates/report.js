"use strict";
// The controls set the parameters of the figures, whose specs select their own rows of the document.
(async () => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const value = (id) => document.getElementById(id)?.value ?? "";
  const choice = () => ({
    cls: Number(value("class")),
    head: value("head") || null,
    seed: value("seed") === "" ? null : Number(value("seed")),
    split: value("split") || data.splits[0],
    measure: value("measure"),
    metric: value("metric"),
    curve: value("curve"),
    first: Number(value("range")),
  });
  const heads = () => data.heads.filter((h) => value("head") === "" || h === value("head"));
  const mean = (values) => {
    const known = values.filter((v) => v !== null && v !== undefined);
    return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
  };

  function numbers() {
    const { cls: c, seed, split } = choice();
    document.getElementById("chosen").textContent = data.classes[c];
    const body = document.querySelector("#numbers tbody");
    body.replaceChildren();
    const line = (name, cells) => {
      const row = body.insertRow();
      const head = document.createElement("th");
      head.scope = "row";
      head.className = "name";
      head.textContent = name;
      row.append(head);
      for (const cell of cells) row.insertCell().textContent = show(cell);
    };
    for (const head of heads()) {
      const runs = data.geometry.filter((g) => g.head === head && g.split === split && (seed === null || g.seed === seed));
      if (!runs.length) continue;
      const of = (pick) => mean(runs.map(pick));
      line(head, [of((g) => g.own[c][0]), of((g) => g.own[c][1]), ...data.measures.map((m) => of((g) => g[m]?.[c]))]);
      const taught = runs.filter((g) => g.learned);
      if (taught.length) {
        const from = (pick) => mean(taught.map(pick));
        line(`${head}, learned`, [
          from((g) => g.learned[c][0]), from((g) => g.learned[c][1]),
          ...data.measures.map((m) => from((g) => g.learned_measures[m]?.[c])),
        ]);
      }
    }
  }

  const charts = [...document.querySelectorAll("[data-figure]")].map((container) => {
    const name = container.dataset.figure, head = container.dataset.head;
    return { name, head, container, key: head === undefined ? name : `${name}-${head}` };
  });

  const shown = specs.shown;
  const barsHeight = () => Math.min(shown, data.classes.length - choice().first) * (11 * heads().length + 7) + 10;

  async function first({ name, head, key, container }) {
    const spec = specs.figures[name], source = spec.data.name;
    const rows = source === "heads" ? data.heads.map((h) => ({ head: h })) : data[source];
    const params = Object.entries({ ...specs.parameters, ...choice(), panel: head }).map(([k, v]) => ({ name: k, value: v }));
    const height = name === "bars" ? barsHeight() : spec.height;
    await draw(key, container, { ...spec, height, params, datasets: { [source]: rows } });
  }

  function update() {
    for (const { name, head, key, container } of charts) {
      if (head !== undefined) container.closest(".panel").hidden = !heads().includes(head);
      for (const [parameter, chosen] of Object.entries(choice())) views[key].signal(parameter, chosen);
      if (name === "bars") views[key].height(barsHeight());
      views[key].resize().run();
    }
    numbers();
  }

  const ranges = document.getElementById("range");
  if (ranges) {
    for (let c = 0; c < data.classes.length; c += shown) {
      const last = Math.min(c + shown, data.classes.length) - 1;
      ranges.add(new Option(`${data.classes[c]} … ${data.classes[last]}`, c));
    }
    document.getElementById("range-label").hidden = data.classes.length <= shown;
  }
  for (const chart of charts) await first(chart);
  for (const control of document.querySelectorAll("#figures select")) control.addEventListener("change", update);
  if (charts.length) numbers();
  document.documentElement.dataset.report = "ready";
})();
