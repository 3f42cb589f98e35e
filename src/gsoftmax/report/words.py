"""What a report found, in plain sentences: one for each head or model that is compared with the first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import measures, summary

_ONE = "This is about these trained models; to compare methods, train each with several seeds."


# What a measure means, in a line.
_MEANINGS = {
    "error": "Images whose predicted class is wrong.",
    "error_x": "The error if the largest raw output x decides, without the head's own term.",
    "mAP": "Mean average precision: AP averaged over the labels.",
    "mAP_voc12": "mAP with the precision envelope of PASCAL VOC 2012.",
    "AP": "Average precision: with the images ranked by p, the precision down to each image with the label, averaged.",
    "C_P": "Precision of each label, averaged over the labels. A label is predicted where p is at least 0.5.",
    "C_R": "Recall of each label, averaged over the labels.",
    "C_F1_mean": "F1, the harmonic mean of precision and recall, of each label, averaged over the labels.",
    "O_P": "Precision over all labels together.",
    "O_R": "Recall over all labels together.",
    "O_F1": "F1, the harmonic mean of precision and recall, over all labels together.",
    "hamming": "Predictions that are wrong, of all labels of all images.",
    "compactness": "1 / σ of the {own}. Larger: narrower.",
    "separability": "Symmetric Kullback-Leibler divergence between the Gaussians of the {own} and of {others}.",
    "ratio": "Separability / σ.",
    "relative_sigma": "σ of the {own} over the distance from its mean to that of {nearest}.",
    "dprime": "Distance between the means of the {own} and of {others}, in units of their common σ.",
    "nll": "Negative log-likelihood: mean of −log p of the right {answer}.",
    "ece": "Expected calibration error: distance between confidence and accuracy, averaged over 15 bins of confidence.",
    "accuracy": "Images of the class that are predicted right.",
    "nc1": "Variability of the features h within classes, relative to that of the class means. "
    "NC: neural collapse; its measures are 0 in full collapse.",
    "nc2_norms": "Whether all class means are equally far from their centre: coefficient of variation.",
    "nc2_angles": "Whether all angles between centred class means are equal: standard deviation of their cosines.",
    "nc2_simplex": "Mean distance of these cosines from −1 / (classes − 1), their value in a regular simplex.",
    "nc3": "Distance between the classifier's weights W and the centred class means, both scaled to norm 1.",
    "nc4": "Images that the model and the nearest class mean put into different classes.",
    "ncm_error": "Error of predicting the class whose mean of h is nearest.",
    "w_norms": "As NC2, norms, for the rows of W instead of the class means.",
    "w_simplex": "As NC2, distance from a simplex, for the rows of W instead of the class means.",
    "fisher": "Sum of squares of h between classes over that within classes.",
    "effective_rank": "Number of directions that h uses: exp of the entropy of its singular values.",
}
_OWN = {"own": "own output", "others": "each impostor, averaged", "nearest": "the nearest impostor", "answer": "class"}
_SIDES = ("own output, impostors", "Output x of an image's own class, and its other outputs. μ, σ: mean and deviation.")
_WITH = {"own": "x⁺ of images with the label", "answer": "answer"}
_WITH |= dict.fromkeys(("others", "nearest"), "images without it")
_AUROC = "How well the score tells test images from those of the other dataset. 50 % is chance."


def unit(doc: Mapping[str, Any]) -> str:
    """What the columns of a report are: heads with several seeds, or single models.

    doc: see `report.data`
    """
    return "head" if doc["kind"] == "compare" else "model"


def figures_title(doc: Mapping[str, Any]) -> str:
    """The title of the figures that are not about a class.

    doc: see `report.data`
    """
    title = unit(doc).capitalize() + "s" * (len(doc["heads"]) > 1)
    return f"{title} and seeds" if len(doc["seeds"]) > 1 else title


def meanings(doc: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Title and meaning of every measure that a report shows.

    doc: see `report.data`
    """
    shown = dict.fromkeys((*doc["metrics"], *(doc["measures"] if doc["geometry"] else ())))
    names = _WITH if doc["multilabel"] else _OWN
    told = [(measures.find(key).label, _MEANINGS[key].format(**names)) for key in shown if key in _MEANINGS]
    if any(key.startswith("ood_") for key in shown):
        told.append(("AUROC", _AUROC))
    return [*told, _SIDES] if "compactness" in shown and not doc["multilabel"] else told


def findings(doc: Mapping[str, Any]) -> list[summary.Finding]:
    """One for each head after the first; empty for a single model.

    doc: see `report.data`
    """
    if doc["kind"] == "analyze":
        return [_of_images(doc, head) for head in doc["heads"][1:] if doc["over_images"]]
    return summary.findings(doc)


def about(doc: Mapping[str, Any]) -> str:
    """What was compared, in a line.

    doc: see `report.data`
    """
    heads, seeds, found = len(doc["heads"]), len(doc["seeds"]), doc["examples"]
    parts = [f"{heads} {unit(doc)}{'s' * (heads > 1)}"]
    if doc["kind"] == "compare":
        parts.append(f"{seeds} seed{'s' * (seeds > 1)} of each")
    if doc["config"].get("data"):
        parts.insert(0, str(doc["config"]["data"]))
    if found:
        parts.append(f"{found['rows']:,} {'test images' if found['unit'] == 'image' else 'test rows'}")
    parts.append(f"{len(doc['classes']):,} {'labels' if doc['multilabel'] else 'classes'}")
    return ", ".join(parts)


def _of_images(doc: Mapping[str, Any], head: str) -> summary.Finding:
    measure = measures.find("hamming" if doc["multilabel"] else "error")
    found, tests = doc["over_images"][head], sum(len(of["paired"]) for of in doc["over_images"].values())
    error = {k: None if v is None else measure.scale * v for k, v in found["paired"]["error"].items()}
    error |= {key: found["paired"]["error"][key] for key in ("p", "p_holm")}
    named = "p" if found["mcnemar"] is None else "McNemar's p"
    judged = summary.judge(head, error, measure, f"{tests} tests over images", named)
    base = {k: rows[doc["heads"][0]]["mean"] for k, rows in doc["metrics"].items() if doc["heads"][0] in rows}
    over = {k: test for k, test in doc["over_classes"].get(head, {}).items() if k in base and test["n"]}
    return judged._replace(more=f"{summary.geometry_changes(over, base)} {_ONE}".strip())
