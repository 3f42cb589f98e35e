"use strict";
// Every figure has a function that picks its rows out of the document for what is chosen above it.
(async () => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const value = (id) => document.getElementById(id)?.value ?? "";
  const mean = (values) => {
    const known = values.filter((v) => v !== null && v !== undefined);
    return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
  };
  const deviation = (values) => {
    const m = mean(values);
    return values.length > 1 ? Math.sqrt(values.reduce((s, v) => s + (v - m) ** 2, 0) / (values.length - 1)) : null;
  };
  const chosen = (run) =>
    (value("head") === "" || run.head === value("head")) && (value("seed") === "" || String(run.seed) === value("seed"));
  const split = () => value("split") || data.splits[0];
  const geometry = () => data.geometry.filter((g) => chosen(g) && g.split === split());
  const heads = () => data.heads.filter((h) => value("head") === "" || h === value("head"));
  const own = data.multilabel ? "with the label" : "own output";
  const other = data.multilabel ? "without the label" : "impostor";
  const cross = "M-.8,-.8L.8,.8M.8,-.8L-.8,.8"; // two thin strokes

  const rows = {
    scatter(head) {
      const c = Number(value("class"));
      const out = [];
      for (const run of data.points) {
        if (run.head !== head || !chosen({ head, seed: run.seed })) continue;
        for (let i = 0; i < run.c.length; i++) {
          if (run.c[i] !== c) continue;
          out.push({
            x: run.x[i], p: run.p[i], own: run.own[i] === 1, side: run.own[i] ? own : other, shape: run.own[i] ? "circle" : cross,
            output: data.classes[run.j[i]] ?? "another class", seed: run.seed,
          });
        }
      }
      return out.sort((a, b) => a.own - b.own);
    },

    gaussians() {
      const c = Number(value("class"));
      const found = [];
      for (const g of geometry()) {
        const add = (pair, isOwn, side, thin) => {
          if (pair && pair[0] !== null && pair[1] > 0) {
            found.push({ head: g.head, seed: g.seed, mean: pair[0], sigma: pair[1], own: isOwn, side, thin });
          }
        };
        add(g.other[c], false, data.multilabel ? other : "all impostors", false);
        if (value("head") !== "" || data.heads.length === 1) {
          for (const [j, m, s] of g.nearest[c]) add([m, s], false, `impostor ${data.classes[j]}`, true);
        }
        add(g.own[c], true, own, false);
      }
      const low = Math.min(...found.map((f) => f.mean - 3.5 * f.sigma));
      const high = Math.max(...found.map((f) => f.mean + 3.5 * f.sigma));
      return found.flatMap((f, id) =>
        Array.from({ length: 161 }, (_, i) => {
          const x = low + ((high - low) * i) / 160;
          const density = Math.exp(-0.5 * ((x - f.mean) / f.sigma) ** 2) / (f.sigma * Math.sqrt(2 * Math.PI));
          return { ...f, id, x, density };
        }));
    },

    bars() {
      const first = Number(value("range") || 0), measure = value("measure");
      const out = [];
      for (let c = first; c < Math.min(first + 20, data.classes.length); c++) {
        for (const head of heads()) {
          const runs = geometry().filter((g) => g.head === head);
          const values = runs.map((g) => g[measure]?.[c]).filter((v) => v !== null && v !== undefined);
          if (!values.length) continue;
          const m = mean(values), sd = deviation(values);
          const name = data.classes[c];
          out.push({ name: label(c), class: name, head, value: m, sd, low: sd === null ? null : m - sd, high: sd === null ? null : m + sd });
        }
      }
      return out;
    },

    learned() {
      const out = [];
      const c = Number(value("class"));
      for (const g of data.geometry.filter((g) => chosen(g) && g.split === "test" && g.learned)) {
        g.learned.forEach((pair, k) => {
          const kinds = { "its own images": g.own[k], learned: pair, "all images": g.overall?.[k] };
          for (const [kind, p] of Object.entries(kinds)) {
            if (!p || p[0] === null || p[1] === null) continue;
            const name = data.classes[k];
            out.push({ name, head: g.head, kind, mean: p[0], sigma: p[1], chosen: k === c, id: `${g.head}/${g.seed}/${k}` });
          }
        });
      }
      return out;
    },

    curves() {
      const key = value("curve");
      return data.curves.filter((run) => chosen(run) && run[key]).flatMap((run) =>
        run.epoch.map((epoch, i) => ({ epoch, value: run[key][i], head: run.head, seed: run.seed, id: `${run.head}/${run.seed}` }))
          .filter((row) => row.value !== null && row.value > 0));
    },

    seeds() {
      return heads().flatMap((head) => {
        const row = data.metrics[value("metric")][head];
        const each = row.values.map((v, i) => ({ head, seed: data.seeds[i], value: v, mean: false }));
        return [...each, { head, value: row.mean, low: row.low, high: row.high, mean: true }];
      });
    },

    differences() {
      const metric = data.metrics[value("metric")], first = metric[data.heads[0]];
      return heads().filter((h) => metric[h].paired).flatMap((head) => {
        const d = metric[head].paired;
        const each = metric[head].values.map((v, i) => ({ head, seed: data.seeds[i], value: v - first.values[i], mean: false }));
        return [...each, { head, value: d.difference, low: d.low, high: d.high, mean: true }];
      });
    },

    calibration() {
      return heads().flatMap((head) => {
        const runs = data.calibration.filter((run) => run.head === head && chosen(run));
        if (!runs.length) return [];
        const total = runs.reduce((s, run) => s + run.count.reduce((a, b) => a + b, 0), 0);
        return runs[0].count.map((_, k) => {
          const count = runs.reduce((s, run) => s + run.count[k], 0);
          const pooled = (key) => runs.reduce((s, run) => s + (run[key][k] ?? 0) * run.count[k], 0) / count;
          return { head, count, share: count / total, confidence: pooled("confidence"), right: pooled("right") };
        }).filter((row) => row.count > 0);
      });
    },
  };

  // Classes may share a name: then their numbers tell them apart.
  const twice = new Set(data.classes.filter((name, i) => data.classes.indexOf(name) !== i));
  const label = (c) => (twice.has(data.classes[c]) ? `${data.classes[c]} (${c})` : data.classes[c]);

  function numbers() {
    const c = Number(value("class"));
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
      const runs = geometry().filter((g) => g.head === head);
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

  // The range of x that the panels of x against p share.
  function range() {
    let low = Infinity, high = -Infinity;
    for (const head of data.heads) {
      for (const { x } of rows.scatter(head)) { low = Math.min(low, x); high = Math.max(high, x); }
    }
    if (low > high) return [0, 1];
    const edge = 0.03 * (high - low) || 1;
    return [low - edge, high + edge];
  }

  function barsHeight() {
    const classes = Math.min(20, data.classes.length - Number(value("range") || 0));
    return classes * (11 * heads().length + 7) + 10;
  }

  async function first({ name, head, key, container }) {
    const spec = { ...specs.figures[name], data: { name: "rows", values: rows[name](head) } };
    if (name === "scatter") {
      const [x0, x1] = range();
      spec.params = Object.entries({ x0, x1, colour: specs.colours[head] }).map(([k, v]) => ({ name: k, value: v }));
    }
    if (name === "bars") spec.height = barsHeight();
    await draw(key, container, spec);
  }

  function update() {
    const [x0, x1] = range();
    for (const { name, head, key, container } of charts) {
      const view = views[key];
      if (name === "scatter") {
        container.closest(".panel").hidden = !heads().includes(head);
        view.signal("x0", x0).signal("x1", x1);
      }
      if (name === "bars") view.height(barsHeight());
      view.data("rows", rows[name](head)).resize().run();
    }
    numbers();
  }

  const ranges = document.getElementById("range");
  if (ranges) {
    for (let c = 0; c < data.classes.length; c += 20) {
      const last = Math.min(c + 20, data.classes.length) - 1;
      ranges.add(new Option(`${data.classes[c]} … ${data.classes[last]}`, c));
    }
    document.getElementById("range-label").hidden = data.classes.length <= 20;
  }
  for (const chart of charts) await first(chart);
  for (const control of document.querySelectorAll("#figures select")) control.addEventListener("change", update);
  if (charts.length) numbers();
  document.documentElement.dataset.report = "ready";
})();
