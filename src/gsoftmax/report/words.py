"""What a report found, in plain sentences: one for each head or model that is compared with the first."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from .. import measures, significance
from ..tables import p_value

WORTH = 0.5  # points that are worth knowing about, for the number of seeds


class Finding(NamedTuple):
    """What is said of one head."""

    head: str
    verdict: str  # better, worse, open (no difference shown), or none (no test)
    sentence: str  # about the headline measure
    more: str  # the rest, smaller


def findings(doc: Mapping[str, Any]) -> list[Finding]:
    """One for each head after the first; empty for a single model.

    doc: see `report.data`
    """
    if doc["kind"] == "analyze":
        return [_of_images(doc, head) for head in doc["heads"][1:] if doc["over_images"]]
    return [_of_seeds(doc, head) for head in doc["heads"][1:]]


def about(doc: Mapping[str, Any]) -> str:
    """What was compared, in a line.

    doc: see `report.data`
    """
    heads, seeds, found = len(doc["heads"]), len(doc["seeds"]), doc["examples"]
    parts = [f"{heads} {'head' if doc['kind'] == 'compare' else 'model'}{'s' * (heads > 1)}"]
    if doc["kind"] == "compare":
        parts.append(f"{seeds} seed{'s' * (seeds > 1)} of each")
    if doc["config"].get("data"):
        parts.insert(0, str(doc["config"]["data"]))
    if found:
        parts.append(f"{found['rows']:,} {'test images' if found['unit'] == 'image' else 'test rows'}")
    parts.append(f"{len(doc['classes']):,} {'labels' if doc['multilabel'] else 'classes'}")
    return ", ".join(parts)


def points(value: float) -> str:
    """A difference in points, with a sign.

    value: points

    >>> points(-0.4), points(0.0004), points(12.345)
    ('−0.40', '0.00', '+12.35')
    """
    shown = f"{value:+.2f}"
    return shown[1:] if float(shown) == 0 else shown.replace("-", "−")


def no_verdict(doc: Mapping[str, Any]) -> str:
    """Why a comparison with one seed has no verdict, and how many seeds would be needed; else nothing.

    doc: see `report.data`
    """
    if doc["kind"] == "analyze" or len(doc["seeds"]) > 1 or len(doc["heads"]) < 2:
        return ""
    small, large = (significance.required_n(sd, WORTH) for sd in (WORTH, 2 * WORTH))
    return (
        "One seed gives no verdict: another seed would give other differences, and one run of each head does not tell "
        f"how much they vary. If they vary by {WORTH:g} points (standard deviation), {small} seeds show a true "
        f"difference of {WORTH:g} points with 80 % power; twice that variation takes {large} seeds."
    )


def _of_seeds(doc: Mapping[str, Any], head: str) -> Finding:
    measure, rows, first = measures.headline(doc["multilabel"]), doc["metrics"], doc["heads"][0]
    row = rows[measure.key][head]
    paired = row.get("paired")
    if paired is None:
        change = points(row["mean"] - rows[measure.key][first]["mean"])
        label = measure.label[:1].upper() + measure.label[1:]
        return Finding(head, "none", f"{label} {change} points with one seed each: no evidence either way.", "")
    n, unlike = len(doc["seeds"]), paired["p"] is not None and paired["p"] < significance.ALPHA
    p = paired.get("p_holm", paired["p"])
    verdict = _verdict(paired["difference"], math.nan if p is None else p, measure)
    change = _change(measure, paired["difference"], paired["low"], paired["high"])
    if verdict != "open":
        sentence = f"{_HELPS[verdict]}: {change} (p {p_value(p)} after correction)."
    elif unlike:
        word = "helps" if (paired["difference"] < 0) == measure.smaller_is_better else "hurts"
        alone = p_value(paired["p"])
        sentence = f"Not shown that it {word}, after correction for all tests: {change} (p {alone} alone)."
    else:
        sentence = f"No evidence that it helps: {change}."
    return Finding(head, verdict, sentence, " ".join([_power(paired, n), _geometry(doc, head)]).strip())


def _of_images(doc: Mapping[str, Any], head: str) -> Finding:
    measure = measures.find("hamming" if doc["multilabel"] else "error")
    found = doc["over_images"].get(head, doc["over_images"])
    test, exact = found["paired"]["error"], found["mcnemar"]
    p = test["p"] if exact is None else exact["p"]
    verdict = _verdict(test["difference"], math.nan if p is None else p, measure)
    change = _change(measure, *(None if test[k] is None else 100 * test[k] for k in ("difference", "low", "high")))
    begin = _HELPS[verdict] if verdict != "open" else "No evidence that it differs"
    named = "p" if exact is None else "McNemar's p"
    where = f" on these {test['n']:,} images ({named} {p_value(math.nan if p is None else p)})."
    more = "This is about these two trained models; whether a method is better needs several seeds of each."
    return Finding(head, verdict, f"{begin}: {change}{where}", more)


_HELPS = {"better": "It helps", "worse": "It hurts"}


def _verdict(difference: float, p: float, measure: measures.Measure) -> str:
    word = significance.verdict(difference, p, measure.smaller_is_better)
    return word if word in _HELPS else "open"


def _change(measure: measures.Measure, difference: float, low: float | None, high: float | None) -> str:
    shown = f"{measure.label} {points(difference)} points"
    return shown if low is None or high is None else f"{shown}, between {points(low)} and {points(high)}"


def _power(paired: Mapping[str, Any], n: int) -> str:
    """How small a difference these seeds can show."""
    if paired["low"] is None:
        return ""
    sd = (paired["high"] - paired["low"]) / 2 / significance.t_quantile(0.975, n - 1) * math.sqrt(n)
    needed = significance.required_n(sd, WORTH)
    if needed <= n:
        return f"{n} seeds show a true difference of {WORTH:g} points with 80 % power or more."
    return f"{n} seeds are few: {needed:,} would show a true difference of {WORTH:g} points with 80 % power."


def _geometry(doc: Mapping[str, Any], head: str) -> str:
    """The measures of class geometry that change for certain."""
    told = []
    for key in ("compactness", "separability", "ratio"):
        row = doc["metrics"].get(key, {})
        if "paired" not in row.get(head, {}):
            continue
        test, base = row[head]["paired"], row[doc["heads"][0]]["mean"]
        p = test.get("p_holm", test["p"])
        if p is not None and p < significance.ALPHA and base:
            percent = round(100 * test["difference"] / base)
            told.append(f"{key} {percent:+d} %".replace("-", "−"))
    return f"Class geometry changes: {', '.join(told)}." if told else "No change of class geometry is shown."
