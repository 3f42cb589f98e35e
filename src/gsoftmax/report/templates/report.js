"use strict";
// The controls set the parameters of the figures, whose specs select their own rows of the document.
(async () => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const element = (id) => document.getElementById(id);
  const value = (id) => element(id)?.value ?? "";
  const paperColour = () => getComputedStyle(document.body).backgroundColor;
  let paper = paperColour();
  const choice = () => ({
    paper,
    cls: Number(value("class")),
    head: value("head") || null,
    seed: value("seed") === "" ? null : Number(value("seed")),
    split: value("split") || data.splits[0],
    metric: value("metric"),
    curve: value("curve"),
  });
  const heads = () => data.heads.filter((h) => value("head") === "" || h === value("head"));
  const colours = specs.parameters.doc.colours;
  const colour = (head) => colours[data.heads.indexOf(head)];
  const known = (values) => values.filter((v) => v !== null && v !== undefined);
  const mean = (values) => {
    const found = known(values);
    return found.length ? found.reduce((a, b) => a + b, 0) / found.length : null;
  };
  const make = (tag, text, properties = {}) => Object.assign(document.createElement(tag), { textContent: text, ...properties });
  const pick = (c) => {
    const button = make("button", data.classes[c], { type: "button", className: "pick" });
    button.dataset.class = c;
    return button;
  };

  // One row of a small table, which a phone shows with the name of the column above each cell.
  function line(table, title, cells) {
    const row = table.tBodies[0].insertRow(), head = make("th", "", { scope: "row", className: "name" });
    head.append(...title);
    row.append(head);
    row.setAttribute("role", "row");
    head.setAttribute("role", "rowheader");
    cells.forEach((text, k) => {
      const cell = row.insertCell();
      cell.textContent = text;
      cell.setAttribute("role", "cell");
      cell.dataset.label = table.tHead.rows[0].cells[k + 1].textContent;
    });
  }

  // A number in the unit of its measure's title.
  const scales = specs.parameters.doc.scales;
  const scaled = (measure, v) => (v === null || v === undefined ? null : scales[measure] * v);
  // As many decimals as give the largest of some numbers four digits; all have the same.
  const decimals = (values) => {
    const most = Math.max(0, ...known(values).map(Math.abs));
    return most >= 10 ? 2 : most >= 1 ? 3 : 4;
  };
  const fixed = (v, digits, sign = "") => {
    if (v === null || v === undefined) return "–";
    const text = v.toFixed(digits);
    return Number(text) === 0 ? text.replace("-", "") : (v > 0 ? sign : "") + minus(text);
  };

  function numbers() {
    const { cls: c, seed, split } = choice(), table = element("numbers"), rows = [];
    for (const place of document.querySelectorAll("span.chosen")) place.textContent = data.classes[c];
    if (!table) return;
    table.tBodies[0].replaceChildren();
    for (const head of heads()) {
      const runs = data.geometry.filter((g) => g.head === head && g.split === split && (seed === null || g.seed === seed));
      const add = (title, pair, measures, of) => of.length && rows.push([title, [
        ...[0, 1].map((k) => mean(of.map((g) => g[pair][c]?.[k]))),
        ...data.measures.map((m) => scaled(m, mean(of.map((g) => measures(g)[m]?.[c])))),
      ]]);
      add(head, "own", (g) => g, runs);
      add(`${head}, learned`, "learned", (g) => g.learned_measures, runs.filter((g) => g.learned));
    }
    const digits = rows.length ? rows[0][1].map((_, k) => decimals(rows.map(([, values]) => values[k]))) : [];
    for (const [title, values] of rows) line(table, [title], values.map((v, k) => fixed(v, digits[k])));
  }

  // What is taken for what, by the chosen heads and seed: in percent of the class, the most frequent first.
  function confusions() {
    const { seed } = choice(), sums = new Map(), found = data.examples.confusion.heads;
    for (const head of heads()) {
      const { wrong, images, seeds } = found[head] ?? { wrong: [], seeds: [] }, place = seeds.indexOf(seed);
      if (seed !== null && place < 0) continue;
      for (const [c, j, all, ...each] of wrong) {
        const n = seed === null ? all : each[place];
        if (!n) continue;
        const key = `${c} ${j}`, entry = sums.get(key) ?? { c, j, sum: 0, by: {} };
        entry.by[head] = (100 * n) / (seed === null ? images[c] : images[c] / seeds.length);
        entry.sum += entry.by[head];
        sums.set(key, entry);
      }
    }
    return [...sums.values()].sort((a, b) => b.sum - a.sum || a.c - b.c || a.j - b.j);
  }

  // The table of the chosen class, and that of all.
  function confused() {
    if (!element("frequent")) return;
    const { cls, seed } = choice(), most = 4, frequent = 20, all = confusions();
    const told = data.seeds.length === 1 ? "" : seed === null ? ", over all seeds" : `, seed ${seed}`;
    for (const place of document.querySelectorAll("span.seeds")) place.textContent = told;
    const fill = (table, rows) => {
      const top = document.createElement("tr");
      top.append(make("td", "", { className: "name" }), ...heads().map((h) => make("th", h, { scope: "col" })));
      table.tHead.replaceChildren(top);
      table.tBodies[0].replaceChildren();
      for (const [title, by] of rows) line(table, title, heads().map((h) => (by[h] ?? 0).toFixed(2)));
      if (!rows.length) line(table, ["nothing"], heads().map(() => "–"));
    };
    const away = all.filter((e) => e.c === cls).slice(0, most), here = all.filter((e) => e.j === cls).slice(0, most);
    if (element("confused")) fill(element("confused"), [
      ...away.map(({ j, by }) => [["taken for ", pick(j)], by]),
      ...here.map(({ c, by }) => [[pick(c), ` taken for ${data.classes[cls]}`], by]),
    ]);
    fill(element("frequent"), all.slice(0, frequent).map(({ c, j, by }) => [[pick(c), " taken for ", pick(j)], by]));
  }

  // Every class: a dot for each head, and the numbers.  Only the rows near those in sight are in the table.
  const order = { key: "", down: true, rows: [], shown: [], height: 0, from: -1 };

  function sortKeys() {
    const shown = heads(), word = element("every") && data.heads[0];
    return [
      ...shown.slice(data.heads.length > 1 ? 0 : 1).filter((h) => h !== word).map((h) => [`change ${h}`, `size of change, ${h}`]),
      ...shown.map((h) => [`value ${h}`, h]),
      ["name", "name"], ["count", "images"], ["place", "order of the data"],
      ...(specs.parameters.doc.confusable.length === data.classes.length ? [["near", "confusable neighbours"]] : []),
    ];
  }

  function everyClass() {
    const table = element("every");
    if (!table) return;
    const { seed, split } = choice(), measure = value("measure"), shown = heads(), first = data.heads[0];
    const by = {}, near = new Map(specs.parameters.doc.confusable.map((c, i) => [c, i]));
    for (const head of new Set([first, ...shown])) {
      const runs = data.geometry.filter((g) => g.head === head && g.split === split && (seed === null || g.seed === seed));
      by[head] = data.classes.map((_, c) => {
        const values = known(runs.map((g) => scaled(measure, g[measure]?.[c]))), middle = mean(values);
        const sd = values.length > 1 ? Math.sqrt(values.reduce((a, v) => a + (v - middle) ** 2, 0) / (values.length - 1)) : null;
        return { mean: middle, sd };
      });
    }
    const all = shown.flatMap((h) => by[h]).filter((v) => v.mean !== null);
    const ends = all.flatMap(({ mean: m, sd }) => [m - (sd ?? 0), m + (sd ?? 0)]).sort((a, b) => a - b);
    let low = ends[0] ?? 0, high = ends.at(-1) ?? 0;
    if (measure === "accuracy" || measure === "AP") [low, high] = [Math.max(low, 0), Math.min(high, scales[measure])];
    else if (all.length >= 20) {
      // Few values do not take most of the axis: it ends where 98 % of them do, if that at least doubles the scale.
      const most = ends[Math.floor(0.98 * (ends.length - 1))], least = ends[Math.ceil(0.02 * (ends.length - 1))];
      if (high - low > 2 * (most - low)) high = most;
      if (high - low > 2 * (high - least)) low = least;
    }
    const cut = [all.some((v) => v.mean < low), all.some((v) => v.mean > high)];
    element("clipped").textContent = cut[0] || cut[1] ? `${cut[0] ? "◀" : ""}${cut[1] ? "▶" : ""}: beyond the axis, which ends where 98 % of the values do.` : "";
    if (low > 0 && low < high / 2) low = 0;
    const at = (v) => `${(100 * (Math.min(Math.max(v, low), high) - low)) / (high - low || 1)}%`;
    const digits = high >= 100 ? 1 : decimals([low, high]);
    const changed = shown.filter((h) => h !== first), lane = 7, height = lane * shown.length + 7;

    const keys = sortKeys();
    if (!keys.some(([key]) => key === order.key)) Object.assign(order, { key: keys[0][0], down: true });
    element("sort").replaceChildren(...keys.map(([key, text]) => new Option(text, key, false, key === order.key)));
    const row = document.createElement("tr");
    const column = (key, text, type = "", title = "") => {
      const cell = make("th", "", { scope: "col", className: type, title }), button = make("button", text, { type: "button", className: "sort" });
      button.dataset.sort = key;
      cell.append(button);
      row.append(cell);
    };
    column("name", "class", "name");
    const axis = make("th", "", { scope: "col", className: "plot" }), span = make("div", "", { className: "ends" });
    const [left, right] = [`${cut[0] ? "◀ " : ""}${fixed(low, digits)}`, `${fixed(high, digits)}${cut[1] ? " ▶" : ""}`];
    span.append(make("span", left), make("span", specs.parameters.doc.titles[measure]), make("span", right));
    axis.append(span);
    row.append(axis);
    shown.forEach((h) => column(`value ${h}`, h, "wide"));
    changed.forEach((h) => column(`change ${h}`, shown.length === 2 ? "change" : `Δ ${h}`, "wide", `${h} minus ${first}`));
    column("count", "images", "wide");
    table.tHead.replaceChildren(row);

    const count = data.geometry.find((g) => g.split === split)?.count ?? [];
    const svg = "http://www.w3.org/2000/svg";
    const shape = (name, attributes) => {
      const made = document.createElementNS(svg, name);
      for (const [k, v] of Object.entries(attributes)) made.setAttribute(k, v);
      return made;
    };
    const build = (c) => {
      const row = document.createElement("tr"), title = make("th", "", { scope: "row", className: "name" }), plot = make("td", "", { className: "plot" });
      row.dataset.class = c;
      title.append(pick(c));
      title.title = data.classes[c];
      const drawing = shape("svg", { height, "aria-hidden": "true" });
      shown.forEach((h, k) => {
        const { mean: m, sd } = by[h][c], y = lane * (k + 1), paint = colour(h);
        if (m === null) return;
        if (low === 0) drawing.append(shape("line", { x1: 0, x2: at(m), y1: y, y2: y, stroke: paint, "stroke-width": 4, opacity: 0.35 }));
        if (sd) drawing.append(shape("line", { x1: at(m - sd), x2: at(m + sd), y1: y, y2: y, stroke: paint, "stroke-width": 1.2 }));
        if (m >= low && m <= high) drawing.append(shape("circle", { cx: at(m), cy: y, r: 3, fill: paint }));
        else {
          const place = drawing.appendChild(shape("svg", { x: at(m), y, overflow: "visible" })), out = m > high ? 1 : -1;
          place.append(shape("path", { d: `M${-3 * out},-4L${4 * out},0L${-3 * out},4Z`, fill: paint }));
        }
      });
      plot.append(drawing);
      row.append(title, plot);
      row.style.height = `${order.height}px`;
      for (const h of shown) row.append(make("td", fixed(by[h][c].mean, digits), { className: "wide" }));
      for (const h of changed) row.append(make("td", fixed(changeOf(h, c), digits, "+"), { className: "wide" }));
      row.append(make("td", (count[c] ?? "–").toLocaleString("en"), { className: "wide" }));
      return row;
    };
    const changeOf = (h, c) => (by[h][c].mean === null || by[first][c].mean === null ? null : by[h][c].mean - by[first][c].mean);
    order.height = Math.max(height, 26) + 1;
    order.rows = data.classes.map((name, c) => {
      const sort = { name, place: c, count: count[c], near: near.get(c) };
      for (const h of shown) sort[`value ${h}`] = by[h][c].mean;
      for (const h of changed) sort[`change ${h}`] = changeOf(h, c);
      let row;
      return { c, sort, name: name.toLowerCase(), row: () => (row ??= build(c)) };
    });
    arrange();
  }

  function arrange() {
    const { key, down, rows } = order, sign = down ? -1 : 1;
    const size = (e) => (key.startsWith("change") ? Math.abs(e.sort[key]) : e.sort[key]);
    const lacks = (e) => e.sort[key] === null || e.sort[key] === undefined;
    const compare = (a, b) => {
      if (lacks(a) || lacks(b)) return lacks(a) - lacks(b) || a.c - b.c;
      return (key === "name" ? sign * a.sort.name.localeCompare(b.sort.name, "en", { numeric: true }) : sign * (size(a) - size(b))) || a.c - b.c;
    };
    const part = value("find").toLowerCase();
    order.shown = [...rows].sort(compare).filter((e) => e.name.includes(part));
    order.from = -1;
    reveal();
    element("sort").value = key;
    for (const button of document.querySelectorAll("#every thead button")) {
      button.parentElement.setAttribute("aria-sort", button.dataset.sort === key ? (down ? "descending" : "ascending") : "none");
    }
  }

  function sortBy(key) {
    order.down = key === order.key ? !order.down : key.startsWith("change") || key === "count";
    order.key = key;
    arrange();
  }

  // Puts the rows near those in sight into the table, between two empty rows as high as the rest.
  function lay() {
    const { shown, height } = order, box = element("every-scroll"), beyond = 20;
    const top = Math.min(box.scrollTop, shown.length * height); // the box may still be scrolled for more rows
    const from = Math.max(0, beyond * Math.floor(top / height / beyond) - beyond);
    if (from === order.from) return;
    order.from = from;
    const to = Math.min(shown.length, from + Math.ceil(box.clientHeight / height) + 3 * beyond), { cls } = choice();
    const focused = document.activeElement?.closest("#every tbody") && document.activeElement.dataset.class;
    const space = (rows) => {
      const row = document.createElement("tr");
      row.style.height = `${rows * height}px`;
      row.setAttribute("aria-hidden", "true");
      return row;
    };
    const rows = shown.slice(from, to).map((e) => e.row());
    for (const row of rows) row.classList.toggle("chosen", Number(row.dataset.class) === cls);
    element("every").tBodies[0].replaceChildren(
      ...(from ? [space(from)] : []), ...rows, ...(to < shown.length ? [space(shown.length - to)] : []));
    if (focused) order.rows[focused].row().querySelector("button").focus({ preventScroll: true });
  }

  // Brings the chosen class into sight within its table.
  function reveal() {
    const box = element("every-scroll"), { cls } = choice(), head = 40;
    if (!box) return;
    const top = order.height * order.shown.findIndex((e) => e.c === cls);
    if (top >= 0 && (top < box.scrollTop || top + order.height + head > box.scrollTop + box.clientHeight)) {
      lay(); // as high as all rows, or there is nothing to scroll
      box.scrollTop = top - box.clientHeight / 2;
    }
    order.from = -1;
    lay();
  }

  function filterTiles() {
    const only = element("only")?.checked, c = value("class");
    for (const tile of document.querySelectorAll(".tile")) tile.hidden = only && tile.dataset.of !== c;
  }

  // Figures
  // A phone shows what is below the first tables on demand; figures are drawn at the width of the page all the same.
  if (matchMedia("(max-width: 40rem)").matches) for (const part of document.querySelectorAll("details.fold")) part.open = false;
  const charts = [...document.querySelectorAll("[data-figure]")].map((container) => {
    const { figure: name, head, metric } = container.dataset, spec = specs.figures[name];
    const uses = (parameter) => new RegExp(`\\b${parameter}\\b`).test(JSON.stringify(spec));
    const fixed = { ...(head !== undefined && { panel: head }), ...(metric !== undefined && { metric }) };
    const follows = Object.keys(choice()).filter((parameter) => !(parameter in fixed) && uses(parameter));
    return { name, head, container, spec, fixed, follows, key: head === undefined ? name : `${name}-${head}` };
  });

  // The points of one class are a small part of all.
  function pointsOf(cls) {
    return data.points.map((run) => {
      const rows = [...run.c.keys()].filter((i) => run.c[i] === cls);
      return { ...run, ...Object.fromEntries(["c", "own", "j", "x", "p"].map((k) => [k, rows.map((i) => run[k][i])])) };
    });
  }
  const sources = { ...data, ...specs.sources };
  const rowsOf = (name) => (name === "points" ? pointsOf(choice().cls) : sources[name].map((row) => ({ ...row })));

  // Names beside marks, moved or left out so that none is on another or on a mark.
  function placeNames(vega) {
    const names = vega.marks.filter((mark) => mark.type === "text"), others = vega.marks.map((mark) => mark.name);
    const beside = others.filter((name, k) => vega.marks[k].type === "symbol").slice(1); // not the points
    const anchor = ["top", "bottom", "right", "left", "top-right", "top-left", "bottom-right", "bottom-left"];
    for (const mark of names) {
      delete mark.encode.update.dy;
      mark.clip = true; // a name without a place counts as at 0, 0
      mark.transform = [{ type: "label", size: { signal: "[width, height]" }, anchor, offset: [8], avoidMarks: beside }];
    }
    return vega;
  }

  async function first({ name: figure, head, key, container, spec, fixed }) {
    const name = spec.data.name, parameters = { ...specs.parameters, ...choice(), ...fixed };
    const params = Object.entries(parameters).map(([k, v]) => ({ name: k, value: v }));
    const patch = figure.startsWith("features-") ? placeNames : [];
    await draw(key, container, { ...spec, params, datasets: { [name]: rowsOf(name) } }, patch);
    views[key].addEventListener("click", (_, item) => clicked(item?.datum));
  }

  // A click on a mark selects its class, a second click the other class that the mark is about.
  function clicked(datum) {
    const { cls } = choice(), others = known([datum?.c, datum?.j]).filter((c) => c >= 0 && c !== cls);
    if (others.length) select(others[0]);
  }

  function select(c) {
    if (String(c) === value("class")) return;
    element("class").value = c;
    update({ target: element("class") });
  }

  let before = choice();
  function update({ target }) {
    const now = choice(), changed = Object.keys(now).filter((k) => now[k] !== before[k]);
    before = now;
    for (const { name, head, key, container, follows } of charts) {
      const panel = head === undefined ? null : container.closest(".panel");
      const appears = panel?.hidden && heads().includes(head);
      if (panel) panel.hidden = !heads().includes(head);
      const mine = follows.filter((k) => changed.includes(k));
      if (!mine.length && !appears) continue;
      for (const parameter of mine) views[key].signal(parameter, now[parameter]);
      if (name === "scatter" && mine.includes("cls")) views[key].data("points", pointsOf(now.cls));
      (changed.includes("head") ? views[key].resize() : views[key]).run();
    }
    if (!element("class")) return;
    numbers();
    if (["class", "seed", "head"].includes(target.id)) confused();
    if (target.id === "class") {
      reveal();
      filterTiles();
    } else if (["measure", "split", "seed", "head"].includes(target.id)) everyClass();
  }

  for (const chart of charts) await first(chart);
  for (const media of ["(prefers-color-scheme: dark)", "print"]) {
    matchMedia(media).addEventListener("change", () => {
      paper = paperColour();
      update({ target: {} });
    });
  }
  if (element("class")) {
    numbers();
    confused();
    everyClass();
  }
  document.addEventListener("change", (event) => {
    if (event.target.id === "sort") sortBy(event.target.value);
    else if (event.target.id === "only") filterTiles();
    else if (event.target.matches("select") && !event.target.closest("#playground")) update(event);
  });
  element("find")?.addEventListener("input", arrange);
  element("every-scroll")?.addEventListener("scroll", lay);
  document.addEventListener("click", ({ target }) => {
    const sort = target.closest("[data-sort]"), chosen = target.closest("[data-class]");
    if (sort) sortBy(sort.dataset.sort);
    else if (chosen && element("class")) select(Number(chosen.dataset.class));
  });
  document.documentElement.dataset.report = "ready";
})();
