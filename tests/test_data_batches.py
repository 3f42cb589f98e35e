"""Batches: the same for every head, in any number of processes, from any point on."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from gsoftmax import data
from gsoftmax.data import Augment, augment, batches, images, smoke
from gsoftmax.data.batches import num_batches


@pytest.fixture(scope="module")
def digits() -> data.Dataset:
    return data.load("digits", val_fraction=0.1)


@pytest.fixture(scope="module")
def cifar(tmp_path_factory) -> data.Dataset:
    root = tmp_path_factory.mktemp("cifar")
    return data.load(data.write_smoke("cifar10", root), root)


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> data.Dataset:
    pytest.importorskip("torchvision")
    root = tmp_path_factory.mktemp("coco")
    return data.load(data.write_smoke("coco", root), root, image_size=40)


ALL = Augment(pad=4, flip=True, cutout=8, jitter=0.4, lighting=0.1)
CROP = Augment(area=0.08, flip=True, jitter=0.4, lighting=0.1)


def same(a, b) -> bool:
    a, b = list(a), list(b)
    return len(a) == len(b) and all(
        torch.equal(p, q) and torch.equal(u, v) for (p, u), (q, v) in zip(a, b, strict=True)
    )


# order


def test_an_epoch_has_every_row_once(digits):
    x, y = map(torch.cat, zip(*data.train_batches(digits, 100, seed=0, epoch=0, drop_last=False), strict=True))
    assert torch.equal(y.sort().values, digits.train.y.sort().values)
    pixels = torch.round((x * digits.std + digits.mean) * 255).to(torch.uint8)
    assert sorted(r.numpy().tobytes() for r in pixels) == sorted(r.numpy().tobytes() for r in digits.train.x)
    owner = {r.numpy().tobytes(): int(y) for r, y in zip(digits.train.x, digits.train.y, strict=True)}
    assert [owner[r.numpy().tobytes()] for r in pixels] == y.tolist()  # labels stay with their images


def test_seed_and_epoch_decide_and_nothing_else_does(cifar):
    def run(**changes):
        return list(data.train_batches(cifar, 32, **{"seed": 1, "epoch": 3, "augment": ALL, **changes}))

    first = run()
    torch.manual_seed(1234)
    torch.rand(7)
    state = torch.random.get_rng_state()
    assert same(first, run())
    assert torch.equal(torch.random.get_rng_state(), state)  # the global generator is not used
    assert not same(first, run(seed=2))
    assert not same(first, run(epoch=4))
    assert not torch.equal(run(seed=0, epoch=1)[0][1], run(seed=1, epoch=0)[0][1])


def test_augmentation_belongs_to_the_example_not_to_the_batch(cifar):
    def rows(batch_size):
        batches = data.train_batches(cifar, batch_size, seed=1, epoch=3, augment=ALL, drop_last=False)
        return torch.cat([x for x, _ in batches])

    torch.testing.assert_close(rows(200), rows(7), rtol=0, atol=1e-5)


def test_resuming_within_an_epoch(cifar):
    whole = list(data.train_batches(cifar, 32, seed=1, epoch=3, augment=ALL))
    assert len(whole) == 6
    for skip in range(7):
        assert same(whole[skip:], data.train_batches(cifar, 32, seed=1, epoch=3, augment=ALL, skip=skip))
    with pytest.raises(ValueError, match="skip must be from 0 to the epoch's 6 batches, got 7"):
        data.train_batches(cifar, 32, seed=1, epoch=3, skip=7)


@pytest.mark.parametrize("world", [2, 3])
def test_shards_make_up_the_whole_batch(cifar, world):
    whole = list(data.train_batches(cifar, 32, seed=1, epoch=0, augment=ALL))
    shards = [list(data.train_batches(cifar, 32, seed=1, epoch=0, augment=ALL, shard=(r, world))) for r in range(world)]
    for k, (x, y) in enumerate(whole):
        torch.testing.assert_close(torch.cat([s[k][0] for s in shards]), x, rtol=0, atol=1e-5)
        assert torch.equal(torch.cat([s[k][1] for s in shards]), y)
    parts = [torch.cat([y for _, y in data.eval_batches(cifar, "test", 60, shard=(r, world))]) for r in range(world)]
    assert torch.equal(torch.cat(parts), cifar.test.y)
    with pytest.raises(ValueError, match=r"shard must be \(rank, world\) with 0 <= rank < world, got \(2, 2\)"):
        data.train_batches(cifar, 32, seed=0, epoch=0, shard=(2, 2))


def test_drop_last_and_number_of_batches(digits):
    n = len(digits.train)
    for size, drop in itertools.product((1, 100, n - 1, n), (True, False)):
        batches = list(data.train_batches(digits, size, seed=0, epoch=0, drop_last=drop))
        assert len(batches) == num_batches(n, size, drop)
        assert sum(len(y) for _, y in batches) == (len(batches) * size if drop else n)


def test_batch_sizes_that_cannot_be(digits):
    n = len(digits.train)
    with pytest.raises(ValueError) as caught:
        data.train_batches(digits, n + 1, seed=0, epoch=0)  # at once, not when the first batch is taken
    assert str(caught.value) == f"batch_size must be at most the {n:,} training rows of digits, got {n + 1:,}"
    for bad in (0, -1, 2.0, True, "8"):
        with pytest.raises(ValueError, match="batch_size must be a whole number above 0, got"):
            data.train_batches(digits, bad, seed=0, epoch=0)
        with pytest.raises(ValueError, match="batch_size must be a whole number above 0, got"):
            data.eval_batches(digits, "test", bad)


def test_evaluation_is_in_order_and_unchanged(cifar):
    x = torch.cat([x for x, _ in data.eval_batches(cifar, "test", 7)])
    expected = (cifar.test.x.double() / 255 - cifar.mean.view(1, 3, 1, 1)) / cifar.std.view(1, 3, 1, 1)
    torch.testing.assert_close(x.double(), expected.double(), rtol=1e-5, atol=1e-5)
    assert sum(len(y) for _, y in data.eval_batches(cifar, "test", 10**6)) == 60
    with pytest.raises(ValueError, match="part must be 'train', 'val' or 'test', got 'dev'"):
        data.eval_batches(cifar, "dev")
    with pytest.raises(ValueError, match="has no validation split"):
        data.eval_batches(cifar, "val")


def test_normalised_training_data_has_mean_0_and_deviation_1(cifar, tmp_path):
    x = torch.cat([x for x, _ in data.eval_batches(cifar, "train")])
    torch.testing.assert_close(x.mean((0, 2, 3)), torch.zeros(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(x.std((0, 2, 3), correction=0), torch.ones(3), atol=1e-4, rtol=0)
    table = data.load(data.write_smoke("arff", tmp_path))
    x = torch.cat([x for x, _ in data.train_batches(table, 1, seed=0, epoch=0)])
    torch.testing.assert_close(x.mean(0), torch.zeros(8), atol=1e-4, rtol=0)
    torch.testing.assert_close(x.std(0, correction=0), torch.ones(8), atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match="augment is for images, and arff:smoke .* is a table"):
        data.train_batches(table, 8, seed=0, epoch=0, augment=ALL)


def test_dtype_and_memory_format(cifar):
    x, _ = next(data.train_batches(cifar, 8, seed=0, epoch=0, dtype=torch.bfloat16, channels_last=True))
    assert x.dtype == torch.bfloat16 and x.is_contiguous(memory_format=torch.channels_last)
    plain, _ = next(data.train_batches(cifar, 8, seed=0, epoch=0))
    assert plain.is_contiguous() and torch.equal(plain.bfloat16(), x)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("changes", [ALL, CROP, Augment(pad=4, reflect=True)])
def test_cuda_sees_what_the_cpu_sees(cifar, changes):
    there = cifar.to("cuda")
    for (x, y), (p, q) in zip(
        data.train_batches(cifar, 32, seed=0, epoch=1, augment=changes),
        data.train_batches(there, 32, seed=0, epoch=1, augment=changes),
        strict=True,
    ):
        assert p.is_cuda and torch.equal(y, q.cpu())
        torch.testing.assert_close(p.cpu(), x, atol=1e-3, rtol=1e-4)


# augmentation, each against another way to compute it


def test_shift_and_flip_against_a_loop():
    x = (torch.arange(6 * 2 * 5 * 4) % 251).to(torch.uint8).view(6, 2, 5, 4)
    shift = torch.tensor([[0, 0], [2, -1], [-2, 2], [1, 1], [-1, -2], [2, 2]])
    flip = torch.tensor([False, True, False, True, False, True])
    for reflect in (False, True):
        out = augment.shift_and_flip(x, shift, flip, pad=2, reflect=reflect)
        for i in range(6):
            wide = np.pad(x[i].numpy(), ((0, 0), (2, 2), (2, 2)), mode="reflect" if reflect else "constant")
            r, c = (2 + shift[i]).tolist()
            expected = wide[:, r : r + 5, c : c + 4]
            if flip[i]:
                expected = expected[:, :, ::-1]
            assert np.array_equal(out[i].numpy(), expected)
    assert torch.equal(augment.shift_and_flip(x, None, flip)[1], x[1].flip(-1))
    with pytest.raises(ValueError, match="augment pad must be below the image's side 4 to reflect, got 4"):
        augment.shift_and_flip(x, shift, flip, pad=4, reflect=True)


def test_draws_cover_their_range_evenly():
    drawn = augment.draw(Augment(pad=4, flip=True, cutout=8, jitter=0.4, lighting=0.1), 20000, seed=0, epoch=0)
    counts = torch.bincount(drawn["shift"][:, 0] + 4, minlength=9)
    assert counts.min() > 20000 / 9 * 0.9 and len(counts) == 9
    assert abs(drawn["flip"].float().mean() - 0.5) < 0.02
    assert drawn["jitter"].min() >= 0.6 and drawn["jitter"].max() <= 1.4
    assert abs(drawn["lighting"].std() - 0.1) < 0.005
    assert len(drawn["order"].unique(dim=0)) == 6
    later = augment.draw(Augment(pad=4, flip=True, cutout=8, jitter=0.4, lighting=0.1), 20000, seed=0, epoch=1)
    assert all(not torch.equal(later[k], drawn[k]) for k in drawn)
    # one change more leaves the others as they were
    fewer = augment.draw(Augment(flip=True), 20000, seed=0, epoch=0)
    assert torch.equal(fewer["flip"], drawn["flip"])


def test_colour_against_torchvision():
    pytest.importorskip("torchvision")
    from torchvision.transforms.v2 import functional as V

    x = torch.rand(6, 3, 8, 8) * 100 + 60  # stays within 0 ... 255, where torchvision would clip
    factors = 1 + 0.2 * (2 * torch.rand(6, 3) - 1)
    orders = torch.tensor(list(itertools.permutations(range(3))))
    out = augment.color(x, factors, orders, None)
    steps = (V.adjust_brightness, V.adjust_contrast, V.adjust_saturation)
    for i in range(6):
        image = x[i] / 255
        for kind in orders[i].tolist():
            image = steps[kind](image, float(factors[i, kind]))
        torch.testing.assert_close(out[i] / 255, image, atol=2e-4, rtol=0)  # torchvision's grey has four digits


def test_lighting_moves_all_pixels_alike_along_the_principal_colours():
    x = torch.rand(3, 3, 4, 4) * 255
    alpha = torch.tensor([[1.0, 0, 0], [0, 1.0, 0], [0.1, -0.2, 0.3]])
    moved = augment.color(x, None, None, alpha) - x
    torch.testing.assert_close(moved, moved[:, :, :1, :1].expand_as(moved), atol=1e-3, rtol=0)
    axes = torch.tensor(augment._EIGENVECTORS)
    torch.testing.assert_close(axes.T @ axes, torch.eye(3), atol=2e-3, rtol=0)  # an orthonormal basis
    torch.testing.assert_close(moved[0, :, 0, 0] / 255, 0.2175 * axes[:, 0], atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="augment lighting needs images with 3 channels, got 1"):
        augment.color(x[:, :1], None, None, alpha)


SIZES = [((20, 30), (40, 44)), ((40, 44), (13, 17)), ((8, 8), (16, 16)), ((32, 48), (48, 32))]  # from, to


@pytest.mark.parametrize(("source", "target"), SIZES)
def test_resize_against_pillow_and_torchvision(source, target):
    pytest.importorskip("torchvision")
    from PIL import Image
    from torchvision.transforms.v2 import functional as V

    x = torch.randint(60, 196, (2, 3, *source), dtype=torch.uint8)  # nothing to clip: Pillow clips after each axis
    for image, out in zip(x, images.resize(x, target), strict=True):
        pixels = Image.fromarray(image.permute(1, 2, 0).numpy()).resize(target[::-1], Image.Resampling.BICUBIC)
        assert (out.permute(1, 2, 0).int() - torch.from_numpy(np.array(pixels)).int()).abs().max() <= 1
    theirs = V.resize(x.float(), list(target), interpolation=V.InterpolationMode.BICUBIC, antialias=True)
    torch.testing.assert_close(images.resize(x.float(), target), theirs, atol=1e-3, rtol=0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_resized_pixels_stay_in_range(dtype):
    edge = torch.zeros(1, 1, 8, 8, dtype=dtype)
    edge[..., 4:] = 255  # a cubic overshoots at an edge
    out = images.resize(edge, (24, 24))
    assert out.dtype == dtype and out.min() == 0 and out.max() == 255
    assert (out[..., :10] < 128).all() and (out[..., 14:] > 128).all()  # 255 would wrap around to 0
    inside = augment.crop_and_resize(edge.float(), torch.tensor([[0.0, 0, 8, 8]]), (24, 24))
    torch.testing.assert_close(inside, out.float(), atol=0.51, rtol=0)
    assert inside.min() == 0 and inside.max() == 255


@pytest.mark.parametrize(("source", "target"), SIZES)
def test_crop_and_resize_against_torchvision(source, target):
    pytest.importorskip("torchvision")
    from torchvision.transforms.v2 import functional as V

    x = torch.rand(4, 3, *source) * 255
    h, w = source
    box = torch.tensor([[0.0, 0, h, w], [2, 3, h - 2, w - 3], [h - 5, 0, 5, 4], [h / 2 + 0.3, w / 3 + 0.4, h / 3, 2.6]])
    found = augment.crop_and_resize(x, box, target)
    for image, corner, out in zip(x, box.round().int().tolist(), found, strict=True):
        part = V.crop(image, *corner)
        theirs = V.resize(part, list(target), interpolation=V.InterpolationMode.BICUBIC, antialias=True)
        torch.testing.assert_close(out, theirs.clamp(0, 255), atol=2e-3, rtol=0)


def test_crops_of_whole_pixels():
    box = torch.tensor([[0.0, 0, 0.2, 0.4], [7.6, 9.9, 0.4, 0.1], [1.5, 0.4, 6.5, 9.6], [2.4, 3.6, 5.6, 6.4]])
    assert augment.whole_pixels(box, 8, 10).tolist() == [[0, 0, 1, 1], [7, 9, 1, 1], [2, 0, 6, 10], [2, 4, 6, 6]]
    x = torch.rand(2, 3, 16, 12) * 255
    part = torch.tensor([[4.0, 2, 8, 6], [8, 6, 8, 6]])
    out = augment.crop_and_resize(x, part, (8, 6))
    torch.testing.assert_close(out, torch.stack([x[0, :, 4:12, 2:8], x[1, :, 8:16, 6:12]]), atol=1e-3, rtol=0)


@pytest.mark.parametrize("changes", [Augment(area=0.08), Augment()])
def test_files_and_images_in_memory_are_resized_alike(changes, tmp_path):
    pytest.importorskip("torchvision")
    smoke.write_files(tmp_path, smoke.folder_files("ab", {"train": 4, "test": 1}, (40, 48), "png"))
    held = replace(data.load(f"folder:{tmp_path}"), input_shape=(3, 20, 20))
    paths = tuple(sorted(map(str, tmp_path.glob("train/*/*"))))
    files = replace(held, kind="files", train=data.Split(paths, held.train.y))
    a, b = (next(data.train_batches(d, 8, seed=0, epoch=0, augment=changes, workers=0))[0] for d in (held, files))
    assert (a - b).abs().max() < 1.01 / 255 / held.std.min()  # files are rounded to whole levels


def test_files_are_decoded_once_while_they_fit(tmp_path, monkeypatch):
    pytest.importorskip("torchvision")
    smoke.write_files(tmp_path, smoke.folder_files("ab", {"train": 5, "test": 2}, (70, 48), "png"))
    read, opened = batches.read_image, []
    monkeypatch.setattr(batches, "read_image", lambda path: opened.append(path) or read(path))

    def epochs(size: int) -> list[torch.Tensor]:
        loaded = data.load(f"folder:{tmp_path}", image_size=size)
        opened.clear()
        train = [data.train_batches(loaded, 4, seed=0, epoch=e, workers=0, drop_last=False) for e in (0, 1)]
        return [x for found in (*train, data.eval_batches(loaded, "test", 3, workers=0)) for x, _ in found]

    kept, some = epochs(80), len(opened)
    monkeypatch.setattr(images, "CACHE_BYTES", 10 * 3 * 80**2 - 1)  # the ten training images no longer fit
    again = epochs(80)
    assert (some, len(opened)) == (14, 24)
    assert all(map(torch.equal, kept, again))
    monkeypatch.setattr(images, "CACHE_BYTES", 10 * 3 * 80**2)  # they fit, but not together with the test images
    one, other = (data.load(f"folder:{tmp_path}", image_size=80) for _ in range(2))
    opened.clear()
    for loaded, part, reads in ((one, "train", 10), (one, "train", 10), (one, "test", 14), (one, "train", 24)):
        list(data.eval_batches(loaded, part, 3, workers=0))
        assert len(opened) == reads
    list(data.eval_batches(other, "train", 3, workers=0))  # the same paths, whose content may be new
    assert len(opened) == 34


def test_boxes_stay_inside_and_keep_their_area():
    drawn = torch.rand(5000, 4, generator=torch.Generator().manual_seed(0))
    for h, w in ((64, 64), (48, 200)):
        top, left, bh, bw = augment.boxes(drawn, 0.08, h, w).unbind(1)
        assert (top >= 0).all() and (left >= 0).all()
        assert (top + bh <= h + 1e-3).all() and (left + bw <= w + 1e-3).all()
        assert (bh * bw <= h * w * 1.0001).all() and bh.min() > 1 and bw.min() > 1
    top, left, bh, bw = augment.boxes(drawn, 0.08, 64, 64).unbind(1)
    inside = (bh < 64) & (bw < 64)
    share = (bh * bw / 64**2)[inside]
    assert share.min() > 0.079 and inside.float().mean() > 0.8
    ratio = (bw / bh)[inside]
    assert ratio.min() > 0.7499 and ratio.max() < 1.3334


def test_cutout_greys_a_square():
    x = torch.ones(3, 2, 10, 10)
    out = augment.cut_out(x, torch.tensor([[0.5, 0.5], [0.0, 0.0], [0.95, 0.2]]), 4)
    zeros = (out == 0)[:, 0]
    assert zeros.sum((1, 2)).tolist() == [16, 4, 3 * 4]
    assert zeros[0, 3:7, 3:7].all() and zeros[1, :2, :2].all() and zeros[2, 7:, :4].all()


def test_augment_presets_and_text():
    assert Augment.parse("none") == Augment()
    assert Augment.parse("photo,jitter=0.2") == replace(data.PRESETS["photo"], jitter=0.2)
    assert Augment.parse("flip,pad=2") == Augment(pad=2, flip=True)
    assert Augment.parse("crop-flip,flip=no") == Augment(pad=4)
    for text, message in {
        "crip": "must be one of none, shift, crop",
        "crop,wobble=1": "must be one of",
        "pad": "must be one of",
        "pad=x": "pad must be a int, got 'x'",
        "flip=perhaps": "flip must be a bool, got 'perhaps'",
        "pad=-1": "pad must be a number of pixels, 0 or more, got -1",
        "crop,area=0.5": "pad and area are two ways to crop",
        "area=2": "area must be between 0",
        "jitter=1": "jitter must be at least 0 and below 1, got 1.0",
        "lighting=nan": "lighting must be 0 or more, got nan",
    }.items():
        with pytest.raises(ValueError, match=f"^augment {message}[^\n]*$"):
            Augment.parse(text)


def test_small_images_can_be_cropped_and_enlarged_on_their_device(cifar):
    large = replace(cifar, input_shape=(3, 48, 48))
    x, _ = next(data.train_batches(large, 16, seed=0, epoch=0, augment=CROP))
    assert x.shape == (16, 3, 48, 48) and torch.isfinite(x).all()


# image files


@pytest.mark.parametrize("changes", [None, CROP], ids=["photo", "crop"])
def test_workers_do_not_change_the_result(photos, changes):
    def run(workers, **more):
        return list(data.train_batches(photos, 8, seed=1, epoch=2, augment=changes, workers=workers, **more))

    torch.manual_seed(0)
    state = torch.random.get_rng_state()
    alone = run(0)
    assert alone[0][0].shape == (8, 3, 40, 40) and alone[0][1].shape == (8, 80) and len(alone) == 2
    assert same(alone, run(2))
    assert same(alone[1:], run(0, skip=1))
    assert torch.equal(torch.random.get_rng_state(), state)
    other = list(data.train_batches(photos, 8, seed=1, epoch=3, augment=changes, workers=0))
    assert not same(alone, other)


def test_files_are_resized_to_the_square_and_normalised(photos):
    from PIL import Image
    from torchvision.transforms import v2

    x, y = map(torch.cat, zip(*data.eval_batches(photos, "test", 5, workers=0), strict=True))
    assert torch.equal(y, photos.test.y)
    steps = v2.Compose(
        [
            v2.PILToTensor(),
            v2.Resize((40, 40), interpolation=v2.InterpolationMode.BICUBIC),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(photos.mean.tolist(), photos.std.tolist()),
        ]
    )
    for path, image in zip(photos.test.x, x, strict=True):
        torch.testing.assert_close(image, steps(Image.open(path)), atol=1e-4, rtol=0)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_file_among_many_is_named_in_one_line(photos, tmp_path, workers):
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(b"nothing")
    paths = (*photos.train.x[:5], str(broken), *photos.train.x[6:])
    bad = replace(photos, train=data.Split(paths, photos.train.y))
    with pytest.raises(data.DataError) as caught:
        list(data.train_batches(bad, 7, seed=0, epoch=0, workers=workers))
    assert str(caught.value) == f"{broken} is not a readable image: not a known image format"
    missing = replace(photos, train=data.Split((*photos.train.x[:-1], str(tmp_path / "gone.jpg")), photos.train.y))
    with pytest.raises(data.DataError, match="gone.jpg cannot be read: No such file or directory"):
        list(data.eval_batches(missing, "train", workers=workers))


def test_splits_and_subsets_of_files(tmp_path):
    data.write_smoke("coco", tmp_path)
    part = data.load("coco", tmp_path, val_fraction=0.25, train_fraction=0.5)
    assert (len(part.val), len(part.train)) == (5, 8)
    assert not set(part.val.x) & set(part.train.x)
