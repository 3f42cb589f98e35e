"""Augmentation: drawn once per epoch for every example, applied to whole batches on their device.

The augmentation of example i depends only on (seed, epoch, i): not on the head, the batch size, the number of worker
processes, or the device. Each kind of change has its own generator, so that enabling one does not alter the others.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .seeded import mix

# Principal axes of RGB over ImageNet, on the scale 0 to 1 (Krizhevsky et al. 2012)
_EIGENVALUES = (0.2175, 0.0188, 0.0045)
_EIGENVECTORS = ((-0.5675, 0.7192, 0.4009), (-0.5808, -0.0045, -0.8140), (-0.5836, -0.6948, 0.4203))
_LUMA = (0.299, 0.587, 0.114)


@dataclass(frozen=True)
class Augment:
    """The augmentation of training images; the default is none.

    pad: shift by up to this many pixels and fill with black
    reflect: fill with the mirrored image instead
    flip: mirror left and right, half the time
    cutout: gray out a square with this side, its center anywhere in the image
    area: crop a rectangle of at least this fraction of the area (aspect 3/4 to 4/3) and resize it; 0 is off, 0.08 usual
    jitter: brightness, contrast and saturation times 1 ± this, in random order
    lighting: standard deviation of AlexNet's shift along the principal colors

    >>> Augment.parse("crop-flip,reflect,cutout=8")
    Augment(pad=4, reflect=True, flip=True, cutout=8, area=0.0, jitter=0.0, lighting=0.0)
    """

    pad: int = 0
    reflect: bool = False
    flip: bool = False
    cutout: int = 0
    area: float = 0.0
    jitter: float = 0.0
    lighting: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("pad", self.pad), ("cutout", self.cutout)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"augment {name} must be a number of pixels, 0 or more, got {value!r}")
        if not 0 <= self.area <= 1:
            raise ValueError(f"augment area must be between 0 (off) and 1, got {self.area!r}")
        if not 0 <= self.jitter < 1:
            raise ValueError(f"augment jitter must be at least 0 and below 1, got {self.jitter!r}")
        if not 0 <= self.lighting < float("inf"):
            raise ValueError(f"augment lighting must be 0 or more, got {self.lighting!r}")
        if self.pad and self.area:
            raise ValueError("augment pad and area are two ways to crop: set one of them to 0")

    @staticmethod
    def parse(text: str) -> Augment:
        """An Augment from a recipe's text.

        text: a preset's name (see PRESETS) or changes `key=value`, or both, separated by commas
        """
        chosen = Augment()
        kinds = {f.name: str(f.type) for f in fields(Augment)}
        for position, word in enumerate(text.split(",")):
            key, equals, value = word.strip().partition("=")
            if position == 0 and not equals and key in PRESETS:
                chosen = PRESETS[key]
            elif key in kinds and (equals or kinds[key] == "bool"):
                changes: dict[str, Any] = {key: _value(key, kinds[key], value)}
                chosen = replace(chosen, **changes)
            else:
                presets, keys = ", ".join(PRESETS), ", ".join(kinds)
                raise ValueError(f"augment must be one of {presets}, or changes of {keys}, got {word.strip()!r}")
        return chosen


def _value(key: str, kind: str, text: str) -> bool | int | float:
    try:
        if kind == "bool":
            yes, no = ("", "1", "true", "yes"), ("0", "false", "no")
            return (yes + no).index(text.lower()) < len(yes)
        return int(text) if kind == "int" else float(text)
    except ValueError:
        raise ValueError(f"augment {key} must be a {kind}, got {text!r}") from None


PRESETS: dict[str, Augment] = {
    "none": Augment(),
    "shift": Augment(pad=1),  # digits
    "crop": Augment(pad=4),
    "crop-flip": Augment(pad=4, flip=True),  # CIFAR
    "photo": Augment(flip=True, jitter=0.4, lighting=0.1),  # COCO and NUS-WIDE, as the authors' code does
    "photo-crop": Augment(flip=True, area=0.08, jitter=0.4, lighting=0.1),  # Tiny ImageNet, likewise
}


def draw(augment: Augment, n: int, seed: int, epoch: int) -> dict[str, Tensor]:
    """The random numbers of one epoch, row i for example i.

    shift: int64 (n, 2) rows and columns; flip: bool (n,); cutout: (n, 2) centre in [0, 1);
    box: (n, 4) area, aspect, row, column in [0, 1); jitter: (n, 3) factors of brightness, contrast, saturation;
    order: int64 (n, 3) in which they come; lighting: (n, 3).
    """

    def generator(kind: int) -> torch.Generator:
        return torch.Generator().manual_seed(mix(seed, epoch, kind))

    drawn = {}
    if augment.pad:
        drawn["shift"] = torch.randint(-augment.pad, augment.pad + 1, (n, 2), generator=generator(1))
    if augment.flip:
        drawn["flip"] = torch.rand(n, generator=generator(2)) < 0.5
    if augment.cutout:
        drawn["cutout"] = torch.rand(n, 2, generator=generator(3))
    if augment.area:
        drawn["box"] = torch.rand(n, 4, generator=generator(4))
    if augment.jitter:
        drawn["jitter"] = 1 + augment.jitter * (2 * torch.rand(n, 3, generator=generator(5)) - 1)
        drawn["order"] = torch.rand(n, 3, generator=generator(6)).argsort(1)
    if augment.lighting:
        drawn["lighting"] = augment.lighting * torch.randn(n, 3, generator=generator(7))
    return drawn


def boxes(drawn: Tensor, smallest: float, height: Tensor | float, width: Tensor | float) -> Tensor:
    """Crop rectangles (top, left, height, width) in pixels, (n, 4), from four uniform numbers each.

    Area uniform in [smallest, 1], aspect log-uniform in [3/4, 4/3], position uniform, clipped to the image.
    """
    area = (smallest + (1 - smallest) * drawn[:, 0]) * height * width
    aspect = torch.exp((2 * drawn[:, 1] - 1) * torch.log(torch.tensor(4 / 3)))
    h = torch.minimum((area / aspect).sqrt(), torch.as_tensor(float(height)))
    w = torch.minimum((area * aspect).sqrt(), torch.as_tensor(float(width)))
    return torch.stack([drawn[:, 2] * (height - h), drawn[:, 3] * (width - w), h, w], 1)


def shift_and_flip(x: Tensor, shift: Tensor | None, flip: Tensor | None, pad: int = 0, reflect: bool = False) -> Tensor:
    """Shift by whole pixels and mirror, in one gather.  x: (B, C, H, W) of any type, shift: (B, 2), flip: (B,)."""
    if shift is None:
        return x if flip is None else torch.where(flip.view(-1, 1, 1, 1), x.flip(-1), x)
    b, c, h, w = x.shape
    rows = shift[:, :1] + torch.arange(h, device=x.device)  # (B, H): where each row of the result comes from
    cols = shift[:, 1:] + torch.arange(w, device=x.device)
    if flip is not None:
        cols = torch.where(flip.view(-1, 1), cols.flip(1), cols)
    if reflect:
        if pad >= min(h, w):
            raise ValueError(f"augment pad must be below the image's side {min(h, w)} to reflect, got {pad}")
        rows = (h - 1) - ((h - 1) - rows.abs()).abs()
        cols = (w - 1) - ((w - 1) - cols.abs()).abs()
    else:
        x = F.pad(x, (pad, pad, pad, pad))
        rows, cols = rows + pad, cols + pad
    flat = (rows[:, :, None] * x.shape[3] + cols[:, None, :]).view(b, 1, h * w)
    return x.reshape(b, c, -1).gather(2, flat.expand(b, c, h * w)).view(b, c, h, w)


def whole_pixels(box: Tensor, height: int, width: int) -> Tensor:
    """Rectangles (n, 4) rounded to whole pixels: at least one each way, and inside the image."""
    top, left, h, w = box.round().unbind(1)
    h, w = h.clamp(1, height), w.clamp(1, width)
    return torch.stack([torch.minimum(top, height - h), torch.minimum(left, width - w), h, w], 1)


def crop_and_resize(x: Tensor, box: Tensor, size: tuple[int, int]) -> Tensor:
    """The rectangle of each image, in whole pixels, resized bicubically.

    x: float (B, C, H, W) on the scale 0 to 255, box: (B, 4) top, left, height, width
    """
    top, left, h, w = whole_pixels(box.to(x.dtype), x.shape[-2], x.shape[-1]).unbind(1)
    rows = _bicubic(top, h, x.shape[-2], size[0])
    columns = _bicubic(left, w, x.shape[-1], size[1])
    return (rows[:, None] @ x @ columns[:, None].mT).clamp_(0, 255)


def _bicubic(start: Tensor, length: Tensor, source: int, target: int) -> Tensor:
    """Weights (B, target, source) that resize `length` pixels from `start` on to `target` pixels.

    They are Pillow's and torchvision's: Keys' cubic with a = -1/2, widened when the image shrinks; pixels outside the
    rectangle get no weight.
    """
    start, length = start.view(-1, 1, 1), length.view(-1, 1, 1)
    centre = start + (torch.arange(target, device=start.device)[:, None] + 0.5) * (length / target)
    pixel = torch.arange(source, device=start.device) + 0.5
    d = ((pixel - centre) / (length / target).clamp_min(1)).abs()
    near, far = (1.5 * d - 2.5) * d * d + 1, ((-0.5 * d + 2.5) * d - 4) * d + 2
    weight = torch.where(d < 1, near, torch.where(d < 2, far, 0.0))
    weight = weight * ((pixel > start) & (pixel < start + length))
    return weight / weight.sum(2, keepdim=True)


def color(x: Tensor, factors: Tensor | None, order: Tensor | None, lighting: Tensor | None) -> Tensor:
    """Brightness, contrast and saturation in each example's own order, then the shift along the principal colors.

    Each of the three is a blend f·x + (1 - f)·reference; the reference is 0, the mean gray, or the gray image.
    x: float (B, C, H, W) on the scale 0 to 255; nothing is clipped, as in the authors' code.
    """
    view = (-1, 1, 1, 1)
    if factors is not None and order is not None:
        luma = x.new_tensor(_LUMA if x.shape[1] == 3 else [1 / x.shape[1]] * x.shape[1]).view(1, -1, 1, 1)
        for step in range(3):
            kind = order[:, step]
            f = factors.to(x.dtype).gather(1, kind[:, None]).view(view)
            grey = (x * luma).sum(1, keepdim=True)
            reference = torch.where((kind == 2).view(view), grey, grey.mean((2, 3), keepdim=True))
            reference = reference * (kind > 0).view(view)
            x = f * x + (1 - f) * reference
    if lighting is not None:
        if x.shape[1] != 3:
            raise ValueError(f"augment lighting needs images with 3 channels, got {x.shape[1]}")
        axes = x.new_tensor(_EIGENVECTORS) * x.new_tensor(_EIGENVALUES)  # (rgb, axis)
        x = x + 255 * (lighting.to(x.dtype) @ axes.T).view(-1, 3, 1, 1)
    return x


def cut_out(x: Tensor, centre: Tensor, side: int) -> Tensor:
    """Zero a square in each (normalised) image.  centre: (B, 2) in [0, 1) of height and width."""
    h, w = x.shape[-2:]
    top = (centre[:, :1] * h).floor() - side // 2
    left = (centre[:, 1:] * w).floor() - side // 2
    r, c = torch.arange(h, device=x.device), torch.arange(w, device=x.device)
    inside = ((r >= top) & (r < top + side))[:, :, None] & ((c >= left) & (c < left + side))[:, None, :]
    return x.masked_fill(inside[:, None], 0)
