"""Names and one-line descriptions of the built-in datasets, backbones and heads.

Nothing here imports torch: `gsoftmax datasets` and `gsoftmax heads` answer at once.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from importlib import resources

__all__ = ["BACKBONES", "DATASETS", "DatasetInfo", "HeadInfo", "heads", "options"]


@dataclass(frozen=True)
class DatasetInfo:
    """What `gsoftmax datasets` prints about one family."""

    name: str  # as in a spec
    size: str  # rows, classes and input shape
    source: str  # where to get it
    layout: str  # of its files


DIGITS = DatasetInfo(
    name="digits",
    size="1,297 train, 500 test, 10 classes, 1x8x8 images",
    source="comes with scikit-learn (UCI: Optical Recognition of Handwritten Digits), nothing to download",
    layout="none",
)
DIGITS_MOSAIC = DatasetInfo(
    name="digits-mosaic",
    size="1,297 train, 500 test, 10 labels, 1x16x16 images",
    source="mosaic(digits): 2x2 grids of the digits, nothing to download",
    layout="none",
)
CIFAR10 = DatasetInfo(
    name="cifar10",
    size="50,000 train, 10,000 test, 10 classes, 3x32x32 images",
    source="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz (163 MB, MD5 c58f30108f718f92721af3b95e74349a)",
    layout="ROOT/cifar-10-python.tar.gz as downloaded, or extracted:\n"
    "ROOT/cifar-10-batches-py/{data_batch_1, ..., data_batch_5, test_batch, batches.meta}",
)
CIFAR100 = DatasetInfo(
    name="cifar100",
    size="50,000 train, 10,000 test, 100 classes, 3x32x32 images",
    source="https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz (161 MB, MD5 eb9058c3a382ffc7106e4002c42a8d85)",
    layout="ROOT/cifar-100-python.tar.gz as downloaded, or extracted:\nROOT/cifar-100-python/{train, test, meta}",
)
TINY_IMAGENET = DatasetInfo(
    name="tiny-imagenet",
    size="100,000 train, 10,000 test (its validation part, which has labels), 200 classes, 3x64x64 images",
    source="http://cs231n.stanford.edu/tiny-imagenet-200.zip (237 MB)",
    layout="ROOT/tiny-imagenet-200/wnids.txt, words.txt, train/<wnid>/images/*.JPEG,\n"
    "val/val_annotations.txt, val/images/*.JPEG (the zip, unpacked)",
)
COCO = DatasetInfo(
    name="coco",
    size="82,081 train, 40,137 test (the labelled images of train2014 and val2014), 80 labels, photographs",
    source="https://cocodataset.org/#download (2014 Train images 13 GB, Val images 6 GB, annotations 241 MB)",
    layout="ROOT/coco/annotations/instances_train2014.json, annotations/instances_val2014.json,\n"
    "ROOT/coco/train2014/*.jpg, ROOT/coco/val2014/*.jpg (or in coco/images/, or all of it in ROOT itself)",
)
COCO2017 = DatasetInfo(
    name="coco2017",
    size="117,266 train, 4,952 test (the labelled images of train2017 and val2017), 80 labels, photographs",
    source="https://cocodataset.org/#download (2017 Train images 18 GB, Val images 1 GB, annotations 241 MB)",
    layout="ROOT/coco2017/annotations/instances_train2017.json, annotations/instances_val2017.json,\n"
    "ROOT/coco2017/train2017/*.jpg, ROOT/coco2017/val2017/*.jpg (or in ROOT/coco, or in ROOT itself)",
)
NUSWIDE = DatasetInfo(
    name="nuswide",
    size="161,789 train, 107,859 test (119,986 and 80,283 in the cleaned lists), 81 labels, photographs",
    source="images: https://lms.comp.nus.edu.sg/research/NUS-WIDE.htm, with the official lists; "
    "the four cleaned lists: https://github.com/zhufengx/SRN_multilabel (train/test split files)",
    layout="ROOT/nuswide/ConceptsList/Concepts81.txt (or nuswide/Concepts81.txt), nuswide/Flickr/... or images/...,\n"
    "official: ROOT/nuswide/ImageList/{Train,Test}Imagelist.txt,\n"
    "ROOT/nuswide/Groundtruth/TrainTestLabels/Labels_CONCEPT_{Train,Test}.txt: one line per image, 0 or 1;\n"
    "cleaned: ROOT/nuswide/clean/nus_wide_{train,test}_imglist.txt: one line per image, path and number of labels,\n"
    "ROOT/nuswide/clean/nus_wide_{train,test}_label.txt: the same rows, 81 times 0 or 1;\n"
    "where both are there, the cleaned lists are read, and with nuswide?lists=official the official ones",
)
FOLDER = DatasetInfo(
    name="folder:PATH",
    size="any number of images in class folders; held in memory when all are small (side up to 64) and alike",
    source="your own images",
    layout="PATH/train/<class>/*.jpg, PATH/test/<class>/*.jpg and, if you have it, PATH/val/<class>/*.jpg (png, ...);\n"
    "or PATH/<class>/*.jpg or PATH/train alone: a fifth of every class is set aside as the test set, the same one for\n"
    "every seed (folder:PATH?test=0.3 sets another fraction aside); with train/ and val/ alone, val/ is the test set",
)
CSV = DatasetInfo(
    name="csv:PATH",
    size="any number of images listed in a table, with one or several labels each",
    source="your own images",
    layout="a first line of column names: path and label, or path and labels, and if you have it split;\n"
    "path is relative to the table; labels are separated by ; or | and may be empty; split is train, val or test;\n"
    "without split a fifth is set aside as the test set, stratified by label, the same for every seed (?test=0.3)",
)
NPZ = DatasetInfo(
    name="npz:PATH",
    size="any arrays: a table (N, D), or uint8 images (N, H, W), (N, H, W, C) or (N, C, H, W)",
    source="your own arrays, saved with numpy.savez",
    layout="x_train, y_train, x_test, y_test, if you have them x_val, y_val, and names (the classes' names);\n"
    "y is (N,) integers or strings, or (N, L) of 0 and 1 for multi-label",
)
ARFF = DatasetInfo(
    name="arff:PATH",
    size="multi-label tables, dense or sparse, numeric and nominal columns",
    source="your own, or e.g. the MULAN collection (https://mulan.sourceforge.net/datasets-mlc.html)",
    layout="arff:x-train.arff,x-test.arff, or arff:x-train.arff with x-test.arff beside it, or arff:x.arff?test=0.3;\n"
    "labels: ?labels=6 (the last six), else as in x.xml (MULAN), else MEKA's -C, else the {0,1} ones at the end",
)
MOSAIC = DatasetInfo(
    name="mosaic(DATASET)",
    size="as many mosaics as DATASET has images; labels are DATASET's classes",
    source="made from DATASET: any single-label set of small images (digits-mosaic is mosaic(digits))",
    layout="mosaic(cifar10), mosaic(folder:PATH)?grid=3x2&train=5000&test=1000&seed=1;\n"
    "grid is rows x columns (2x2), train, val and test the numbers of mosaics, seed chooses the images",
)

DATASETS = [
    DIGITS,
    DIGITS_MOSAIC,
    CIFAR10,
    CIFAR100,
    TINY_IMAGENET,
    COCO,
    COCO2017,
    NUSWIDE,
    FOLDER,
    CSV,
    NPZ,
    ARFF,
    MOSAIC,
]

BACKBONES = {
    "cnn": "small CNN for small images (digits 8x8, mosaics 16x16, colour up to 64x64)",
    "mlp": "fully connected network for tables and flattened images",
    "resnet9": "fast network for 32x32 colour images, for many seeds on one GPU",
    "vgg16": "VGG-16 with batch normalization for 32x32 images, 512-512 before the head",
    "wrn-{depth}-{width}": "wide residual network for 32x32 images, e.g. wrn-40-14, wrn-28-10",
    "densenet-{depth}-{growth}": "DenseNet for 32x32 images, e.g. densenet-100-24",
    "densenet-bc-{depth}-{growth}": "DenseNet-BC (bottlenecks, compression) for 32x32 images, e.g. densenet-bc-100-12",
    "resnet101": "torchvision's ResNet-101, pool avg (GAP) or max (GMP), for 64, 224 or 448 pixels",
    "torchvision:NAME": "any torchvision image classifier without its classifier",
    "timm:NAME": "any timm network without its classifier",
}


@dataclass(frozen=True)
class HeadInfo:
    """What `gsoftmax heads` prints about one head."""

    name: str
    summary: str  # the first line of its docstring
    options: dict[str, str]  # keyword -> default, as written in the signature


@cache
def heads() -> list[HeadInfo]:
    """The heads of `gsoftmax.heads.HEADS`, read from the source without importing it.

    >>> [head.name for head in heads()][:5]
    ['softmax', 'lsoftmax', 'gsoftmax', 'adjusted', 'focal']
    >>> heads()[1].options["margin"]
    '2'
    """
    assigned = [node for node in _parse("heads", "__init__").body if isinstance(node, ast.AnnAssign)]
    registry = next(node.value for node in assigned if ast.unparse(node.target) == "HEADS")
    assert isinstance(registry, ast.Dict)
    split = {node.name: node for node in _parse("sharded", "head").body if isinstance(node, ast.ClassDef)}
    found = []
    for key, value in zip(map(ast.literal_eval, filter(None, registry.keys)), registry.values, strict=True):
        name = ast.unparse(value)
        cls = next(n for n in _parse("heads", key).body if isinstance(n, ast.ClassDef) and n.name == name)
        own = _options(cls)
        if f"Sharded{name}" in split:
            own |= {"shard": "None"} | _options(split["ShardedSoftmaxHead"])
        found.append(HeadInfo(key, (ast.get_docstring(cls) or "").partition("\n")[0], own))
    return found


def options(head: str) -> dict[str, str]:
    """The options of a built-in head with their defaults; empty for a head of your own.

    head: its name
    """
    return next((info.options for info in heads() if info.name == head), {})


def _parse(*path: str) -> ast.Module:
    return ast.parse(resources.files(__package__).joinpath(*path[:-1], f"{path[-1]}.py").read_text("utf-8"))


def _options(cls: ast.ClassDef) -> dict[str, str]:
    """Keyword options of a class and their defaults."""
    args = next(f.args for f in cls.body if isinstance(f, ast.FunctionDef) and f.name == "__init__")
    pairs = zip(args.kwonlyargs, args.kw_defaults, strict=True)
    found = {a.arg: ast.unparse(d) for a, d in pairs if d is not None and a.arg not in ("device", "dtype", "mesh")}
    if args.kwarg and args.kwarg.arg == "gaussian_options":
        classes = {node.name: node for node in _parse("gaussians").body if isinstance(node, ast.ClassDef)}
        found = _options(classes["GaussianLogits"]) | found
    return found
