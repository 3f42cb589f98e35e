"""Report and playground in a real browser: what is shown, against numbers computed here; no error, no request."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import norm
from test_report import EVIL, HEADS, NAMES, fake_comparison, fake_outputs

from gsoftmax import report
from gsoftmax.report import playground

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PATIENCE = 300_000  # milliseconds: a busy machine is no reason to fail


def need(thing, how):
    """Skips, and says so; with NEED_BROWSER=1, as on the project's own CI, nothing may be left out."""
    text = f"browser tests left out: no {thing} on this machine ({how})"
    if os.environ.get("NEED_BROWSER") or os.environ.get("GITHUB_ACTIONS") == "true":
        pytest.fail(text)
    pytest.skip(text)


@pytest.fixture(scope="module")
def browser():
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        need("Chromium", "apt-get install chromium")
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError:
        need("playwright", "pip install 'gsoftmax[dev]'")
    with sync_playwright() as driver:
        try:
            running = driver.chromium.launch(executable_path=path, args=ARGUMENTS, timeout=PATIENCE)
        except Error as error:  # as the stand-in that Ubuntu has for a snap
            need("Chromium that starts", " ".join(str(error).split())[:200])
        yield running
        running.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    root = tmp_path_factory.mktemp("pages")
    made = {"compare": fake_comparison(root / "compare"), "playground": playground.main(str(root / "playground.html"))}
    heads = ("softmax", "gsoftmax")
    made["several"] = fake_comparison(root / "several", heads=heads, seeds=2, multilabel=True)
    for name in heads:
        o = fake_outputs(name, 0)
        np.savez(root / f"{name}.npz", x=o["x"].numpy(), y=o["y"].numpy(), names=NAMES)
    made["analyze"] = report.write(report.from_outputs(root / "softmax.npz", root / "gsoftmax.npz"), root / "a")[0]
    return made


@pytest.fixture
def visit(browser, pages):
    """Opens a page and, when the test is over, makes sure nothing went wrong in it."""
    trouble, contexts = [], []

    def open_(name, *, width=1200, scheme="light"):
        viewport, here = {"width": width, "height": 900}, {"locale": "de-DE", "timezone_id": "Pacific/Kiritimati"}
        context = browser.new_context(viewport=viewport, color_scheme=scheme, offline=True, **here)
        context.set_default_timeout(PATIENCE)
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda m: trouble.append(f"console: {m.text}") if m.type in ("error", "warning") else None)
        tab.on("pageerror", lambda e: trouble.append(f"error: {e}"))
        tab.on("dialog", lambda d: trouble.append(f"dialog: {d.message}"))
        tab.on("request", lambda r: None if r.url.startswith("file:") else trouble.append(f"request: {r.url}"))
        tab.goto(pages[name].as_uri())
        part = "playground" if name == "playground" else "report"
        tab.wait_for_selector(f"html[data-{part}=ready][data-playground=ready]", state="attached")
        return tab

    yield open_
    for context in contexts:
        context.close()
    assert trouble == []


def cells(tab, selector):
    """The rows of a table as it is shown, by the text of their first cell."""
    rows = tab.locator(f"{selector} tbody tr").all()
    return {row.locator("th").inner_text(): row.locator("td").all_inner_texts() for row in rows}


def numbers(texts):
    return [float(t) for t in texts]


# ---------------------------------------------------------------------------------------------------------- the report


def expected(head, seed, c):
    """Mean, sigma, compactness, separability and ratio of a class, from its outputs."""
    o = fake_outputs(head, seed)
    x, y = o["x"].double().numpy(), o["y"].numpy()
    mean, std = x[y == c].mean(0), x[y == c].std(0)
    v, d2 = std**2, (mean - mean[c]) ** 2
    separability = np.delete((v[c] + d2) / v + (v + d2) / v[c] - 2, c).sum() / 16
    return np.array([mean[c], std[c], 1 / std[c], separability, separability / std[c]])


def test_the_numbers_follow_class_head_seed_and_split(visit):
    tab = visit("compare")
    shown = cells(tab, "#numbers")
    assert list(shown) == ["softmax", "lsoftmax", "gsoftmax", "gsoftmax, learned"]
    for head in HEADS:  # first class, mean over seeds
        mean = np.mean([expected(head, s, 0) for s in range(3)], axis=0)
        assert numbers(shown[head][:5]) == pytest.approx(mean, rel=6e-4)
    tab.select_option("#class", label="plain")
    tab.select_option("#seed", "1")
    tab.select_option("#head", "gsoftmax")
    shown = cells(tab, "#numbers")
    assert list(shown) == ["gsoftmax", "gsoftmax, learned"] and tab.inner_text("#chosen") == "plain"
    assert numbers(shown["gsoftmax"][:5]) == pytest.approx(expected("gsoftmax", 1, 2), rel=6e-4)
    o = fake_outputs("gsoftmax", 1)
    assert numbers(shown["gsoftmax, learned"][:2]) == pytest.approx([float(o[k][2]) for k in ("mu", "sigma")], rel=6e-4)
    tab.select_option("#split", "train")
    assert numbers(cells(tab, "#numbers")["gsoftmax"][:1]) == pytest.approx(
        1.5 * expected("gsoftmax", 1, 2)[:1], rel=6e-4
    )


ROWS = """([name, kind]) => {
    const found = [];
    const visit = (mark) => mark.items.forEach((item) => {
        if (mark.role === "mark" && mark.marktype === kind) found.push(item.datum);
        (item.items ?? []).forEach(visit);
    });
    visit(views[name].scenegraph().root);
    return found;
}"""


def rows(tab, view, kind="symbol"):
    """The rows behind the marks of a figure."""
    return tab.evaluate(ROWS, [view, kind])


def test_figures_draw_what_is_chosen(visit):
    tab = visit("compare")
    tab.select_option("#class", label="plain")
    tab.select_option("#seed", "2")
    o = fake_outputs("lsoftmax", 2)
    x, p, y = (o[k].double().numpy() for k in "xpy")
    points = rows(tab, "scatter-lsoftmax")
    assert {r["own"] for r in points} == {0, 1}
    for r in points[::7]:
        j = NAMES.index(r["output"])
        i = np.abs(x[:, j] - r["x"]).argmin()
        assert (x[i, j], p[i, j]) == pytest.approx((r["x"], r["p"]), rel=1e-4) and y[i] == 2 and (j == 2) == r["own"]
    # every row has its mark
    marks = tab.locator("[data-figure=scatter][data-head=lsoftmax] .mark-symbol path")
    assert marks.count() == len(points)
    # bars, as hovering tells them
    tab.select_option("#measure", "separability")
    bars = rows(tab, "bars", "rect")
    assert [r["value"] for r in bars if r["name"] == "plain"] == pytest.approx(
        [expected(h, 2, 2)[3] for h in HEADS], rel=1e-9
    )
    bar = tab.locator("[data-figure=bars] .mark-rect path")
    assert bar.count() == 15
    bar.nth(0).hover()
    tip = tab.locator("#vg-tooltip-element.visible")
    tip.wait_for()
    assert EVIL in tip.inner_text() and f"{expected('softmax', 2, 0)[3]:.4g}" in tip.inner_text()
    # one head only
    tab.select_option("#head", "gsoftmax")
    assert tab.locator(".panel[data-head=softmax]").is_hidden() and bar.count() == 5
    curve = [r for r in rows(tab, "gaussians", "line") if r["side"] == "own output"]
    mean, sigma = expected("gsoftmax", 2, 2)[:2]
    np.testing.assert_allclose([r["density"] for r in curve], norm.pdf([r["x"] for r in curve], mean, sigma), rtol=1e-9)
    assert {r["head"] for r in rows(tab, "calibration")} == {"gsoftmax"}
    confidence, right = p.max(1), p.argmax(1) == y
    tab.select_option("#head", "lsoftmax")
    last = rows(tab, "calibration")[-1]
    top = confidence > 14 / 15
    assert (last["count"], last["confidence"], last["right"]) == pytest.approx(
        (top.sum(), confidence[top].mean(), right[top].mean())
    )


def test_seeds_and_curves_follow_their_controls(visit):
    tab = visit("compare")
    tab.select_option("#metric", "ratio")
    each = [r["value"] for r in rows(tab, "seeds") if r["head"] == "gsoftmax" and "low" not in r]
    ratios = [np.mean([expected("gsoftmax", s, c)[4] for c in range(5)]) for s in range(3)]
    assert each == pytest.approx(ratios, rel=1e-9)
    assert next(r for r in rows(tab, "differences") if r["head"] == "gsoftmax" and "low" in r)[
        "value"
    ] == pytest.approx(
        np.mean(ratios) - np.mean([expected("softmax", s, c)[4] for c in range(5) for s in range(3)]), rel=1e-9
    )
    tab.select_option("#curve", "lr")
    assert sorted({r["value"] for r in rows(tab, "curves")}) == pytest.approx([0.1 / 3, 0.05, 0.1])


def test_names_show_as_text(visit):
    tab = visit("compare")
    assert tab.locator("#class option").all_inner_texts() == NAMES
    assert tab.inner_text("#chosen") == EVIL
    assert tab.locator("#tables th", has_text=EVIL).count() >= 6
    assert tab.locator("img").count() == 0
    tab.locator("[data-figure=bars] text", has_text="<img src=x").first.wait_for()
    tab.locator("[data-figure=learned] .mark-symbol path").first.hover()
    tab.locator("#vg-tooltip-element.visible").wait_for()
    assert tab.locator("#vg-tooltip-element img, #vg-tooltip-element script").count() == 0


def test_several_labels_and_two_models(visit):
    tab = visit("several")
    o = fake_outputs("softmax", 1, multilabel=True)
    tab.select_option("#class", "3")
    tab.select_option("#seed", "1")
    x = o["x"][:, 1].double().numpy()[o["y"].numpy()[:, 3] == 1, 3]
    assert numbers(cells(tab, "#numbers")["softmax"][:3]) == pytest.approx([x.mean(), x.std(), 1 / x.std()], rel=6e-4)
    tab = visit("analyze")
    assert tab.locator("#seed, #split, #metric, #curve").count() == 0
    assert numbers(cells(tab, "#numbers")["gsoftmax"][:5]) == pytest.approx(expected("gsoftmax", 0, 0), rel=6e-4)
    assert "McNemar" in tab.inner_text("#summary")


# ------------------------------------------------------------------------------------------------------ the playground


@pytest.mark.parametrize("name", ["playground", "compare"])  # by itself, and inside a report
def test_the_playground_follows_its_sliders(visit, name):
    tab = visit(name)
    chosen = {"lam": 3.5, "mu1": -1.2, "sigma1": 0.4, "mu2": 2.3, "sigma2": 1.7, "x1": 0.5, "x2": 1.1}
    for key, value in chosen.items():
        tab.locator(f"#{key}").fill(str(value))
    tab.locator("#x1").press("ArrowRight")
    chosen["x1"] = 0.6
    assert [tab.inner_text(f"#{k}-shown") for k in chosen] == [str(v) for v in chosen.values()]
    x = np.array([chosen["x1"], chosen["x2"]])
    mu, sigma = (np.array([chosen[f"{k}{c}"] for c in (1, 2)]) for k in ("mu", "sigma"))
    phi = norm.cdf(x, mu, sigma)
    z, slope = x + 3.5 * phi, 1 + 3.5 * norm.pdf(x, mu, sigma)
    p, plain = (np.exp(v) / np.exp(v).sum() for v in (z, x))
    table = np.stack([x, phi, z, slope, p, plain], axis=1)
    shown = cells(tab, "#values")
    for c in range(2):
        assert numbers(shown[f"class {c + 1}"]) == pytest.approx(table[c], rel=6e-4)
        for key, value in zip(("phi", "z", "slope", "p", "softmax"), table[c][1:], strict=True):
            exact = tab.evaluate("k => views['playground-z'].signal(k)", f"{key}{c + 1}")
            assert exact == pytest.approx(value, rel=1e-12), key
    # the line of z itself: hovering over the dot of class 1 tells its value
    dot = tab.locator("[data-playground=z] .mark-symbol path").first
    dot.hover()
    tip = tab.locator("#vg-tooltip-element.visible")
    tip.wait_for()
    assert f"{z[0]:.4g}" in tip.inner_text()
    for key in ("lam", "x1"):
        tab.locator(f"#{key}").fill("0")
    assert cells(tab, "#values")["class 1"][4] == cells(tab, "#values")["class 1"][5]  # lam = 0: softmax


# -------------------------------------------------------------------------------------------------- for every reader


@pytest.mark.parametrize("name", ["compare", "several", "analyze", "playground"])
def test_no_sideways_scrolling_on_a_phone(visit, name):
    tab = visit(name, width=390)
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390
    wide = tab.evaluate("[...document.querySelectorAll('svg.marks')].map(s => s.getBoundingClientRect().right)")
    assert len(wide) >= 3 and max(wide) <= 390


@pytest.mark.parametrize(
    "name, scheme, rules",
    [
        ("compare", "light", {}),
        ("compare", "dark", {"runOnly": ["color-contrast"]}),  # nothing else depends on the scheme
        ("analyze", "light", {}),
        ("playground", "dark", {}),
    ],
)
def test_accessibility(visit, name, scheme, rules):
    spec = importlib.util.find_spec("axe_playwright_python")  # importing it reads axe in the locale's encoding
    if spec is None:
        need("axe-core", "pip install axe-playwright-python")
    tab = visit(name, scheme=scheme)
    tab.evaluate("for (const d of document.querySelectorAll('details')) d.open = true")
    tab.evaluate(Path(spec.origin).with_name("axe.min.js").read_text("utf-8"))
    found = tab.evaluate("options => axe.run(options)", {"resultTypes": ["violations"], **rules})["violations"]
    serious = [(v["id"], v["nodes"][0]["html"][:200]) for v in found if v["impact"] in ("serious", "critical")]
    assert serious == []


def test_dark_paper_and_print(visit, tmp_path):
    tab = visit("compare", scheme="dark")
    colour = "getComputedStyle(document.body).backgroundColor"
    assert tab.evaluate(colour) == "rgb(21, 23, 26)"
    tab.emulate_media(media="print")
    assert tab.evaluate(colour) == "rgb(255, 255, 255)" and tab.locator("#class").is_hidden()
    tab.pdf(path=tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").read_bytes()[:5] == b"%PDF-"
