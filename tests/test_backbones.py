"""The networks: sizes against the original papers, shapes, gradients, initialisation, weights files, errors."""

from __future__ import annotations

import math
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from gsoftmax import backbones, data
from gsoftmax.backbones.densenet import DenseNet
from gsoftmax.backbones.layers import GlobalPool
from gsoftmax.backbones.resnet9 import whitening_filters


def on_meta(name: str, **options) -> nn.Module:
    """A network without storage: big ones cost nothing to count."""
    with torch.device("meta"):
        return backbones.create(name, input_shape=(3, 32, 32), **options)


def count(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def with_head(network: nn.Module, classes: int = 10) -> int:
    return count(network) + (network.num_features + 1) * classes


# closed forms, written from the papers and not from the code


def wrn_formula(depth: int, k: int) -> int:
    """In each group one block goes from w_in to w channels and n - 1 keep w; a normalisation has 2 per channel."""
    n = (depth - 4) // 6
    total = 27 * 16
    for w_in, w in ((16, 16 * k), (16 * k, 32 * k), (32 * k, 64 * k)):
        first = 9 * w_in * w + 9 * w * w + 2 * w_in + 2 * w + (w_in * w if w_in != w else 0)
        total += first + (n - 1) * (18 * w * w + 4 * w)
    return total + 2 * 64 * k


def densenet_formula(depth: int, k: int, bc: bool) -> int:
    """Layer i of a block sees c + ik channels, so a block sums an arithmetic series."""
    n = (depth - 4) // (6 if bc else 3)
    c = 2 * k if bc else 16
    total = 27 * c
    for block in range(3):
        seen = n * c + k * n * (n - 1) // 2  # sum of the channels that the n layers see
        total += (2 + 4 * k) * seen + n * (8 * k + 36 * k * k) if bc else (2 + 9 * k) * seen
        c += n * k
        total += 2 * c  # BN of the transition, or the last one
        if block < 2:
            total += c * (c // 2 if bc else c)
            c = c // 2 if bc else c
    return total


VGG_CHANNELS = (3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("wrn-40-1", 0.6), ("wrn-40-2", 2.2), ("wrn-40-4", 8.9), ("wrn-40-8", 35.7), ("wrn-28-10", 36.5),
        ("wrn-28-12", 52.5), ("wrn-22-8", 17.2), ("wrn-22-10", 26.8), ("wrn-16-8", 11.0), ("wrn-16-10", 17.1),
        ("densenet-40-12", 1.0), ("densenet-100-12", 7.0), ("densenet-100-24", 27.2), ("densenet-bc-100-12", 0.8),
        ("densenet-bc-250-24", 15.3), ("densenet-bc-190-40", 25.6),
    ],
)  # fmt: skip
def test_sizes_are_those_of_the_original_papers(name, millions):
    assert round(with_head(on_meta(name)) / 1e6, 1) == millions


@pytest.mark.parametrize(("depth", "width"), [(10, 1), (16, 8), (22, 3), (28, 10), (40, 4), (40, 14)])
def test_wrn_count_by_formula(depth, width):
    assert count(on_meta(f"wrn-{depth}-{width}")) == wrn_formula(depth, width)


@pytest.mark.parametrize(
    ("depth", "growth", "bc"),
    [(40, 12, False), (100, 24, False), (22, 5, False), (100, 12, True), (190, 40, True), (22, 5, True)],
)
def test_densenet_count_by_formula(depth, growth, bc):
    network = on_meta(f"densenet-{'bc-' if bc else ''}{depth}-{growth}")
    assert count(network) == densenet_formula(depth, growth, bc)


def test_counts_stated_in_the_documentation():
    assert with_head(on_meta("wrn-40-14")) == 109_416_410
    assert with_head(on_meta("wrn-28-10")) == 36_479_194
    densenet = on_meta("densenet-100-24")
    assert (with_head(densenet), densenet.num_features) == (27_249_082, 2320)
    vgg = on_meta("vgg16")
    assert (count(vgg.convolutions), count(vgg.hidden)) == (14_718_912, 525_312)
    resnet9 = on_meta("resnet9")
    assert sum(p.numel() for p in resnet9.parameters() if p.requires_grad) == 1_968_792
    assert sum(p.numel() for p in resnet9.parameters() if p.dim() == 4) == 1_967_616


def test_vgg_count_by_formula():
    convolutions = sum(9 * i * o + 2 * o for i, o in zip(VGG_CHANNELS[:-1], VGG_CHANNELS[1:], strict=True))
    assert count(on_meta("vgg16")) == convolutions + 2 * (512 * 512 + 512)
    assert count(on_meta("vgg16", hidden=())) == convolutions
    assert round(convolutions / 1e6, 1) == 14.7
    layers = [m for m in on_meta("vgg16").modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len(layers) == 15  # 16 with the head


def test_vgg_convolutions_match_torchvision_apart_from_the_biases():
    with torch.device("meta"):
        reference = torchvision.models.vgg16_bn()
    shapes = [tuple(m.weight.shape) for m in reference.features if isinstance(m, nn.Conv2d)]
    assert [tuple(m.weight.shape) for m in on_meta("vgg16").convolutions if isinstance(m, nn.Conv2d)] == shapes


# shapes, gradients, initialisation

SMALL = [
    ("cnn", (1, 8, 8), {}, 64),
    ("cnn", (1, 16, 16), {}, 64),
    ("cnn", (3, 32, 32), {"features": 48, "dropout": 0.1}, 48),
    ("cnn", (3, 20, 28), {"pool": "max"}, 64),
    ("cnn", (1, 8, 8), {"pool": "avg", "widths": [8, 8, 8]}, 64),
    ("mlp", (294,), {}, 128),
    ("mlp", (1, 8, 8), {"hidden": [32], "dropout": 0.2}, 32),
    ("vgg16", (3, 32, 32), {}, 512),
    ("vgg16", (1, 64, 64), {"pool": "max", "hidden": []}, 512),
    ("wrn-10-2", (3, 32, 32), {"dropout": 0.3}, 128),
    ("wrn-16-1", (1, 17, 23), {"pool": "max"}, 64),
    ("densenet-10-4", (3, 32, 32), {"dropout": 0.2}, 40),
    ("densenet-10-4", (3, 32, 32), {"memory_efficient": True}, 40),
    ("densenet-bc-16-6", (3, 33, 33), {"pool": "max", "memory_efficient": True}, 24),
    ("resnet9", (3, 32, 32), {"widths": [16, 32, 24]}, 24),
    ("resnet9", (3, 32, 32), {"widths": [8, 16, 16], "residual": False, "whiten": False, "pool": "avg"}, 16),
    ("resnet9", (1, 17, 17), {"widths": [8, 16, 16], "convs": 3}, 16),
]


LIBRARIES = [
    ("torchvision:mobilenet_v3_small", (3, 64, 64), {}, 1024),
    ("torchvision:resnet18", (3, 64, 64), {"pool": "max"}, 512),
    ("timm:resnet18", (3, 64, 64), {}, 512),
    ("timm:resnet18", (1, 32, 32), {"pool": "max"}, 512),
    ("timm:vit_tiny_patch16_224", (3, 224, 224), {}, 192),
    ("timm:vit_tiny_patch16_224", (3, 64, 64), {"pool": "avg"}, 192),
    ("timm:mobilenetv3_small_050", (3, 64, 64), {}, 1024),
]


@pytest.mark.parametrize(("name", "shape", "options", "features"), SMALL + LIBRARIES)
def test_shape_and_gradients(name, shape, options, features):
    torch.manual_seed(0)
    network = backbones.create(name, input_shape=shape, **options)
    h = network(torch.randn(6, *shape))
    assert h.shape == (6, features) == (6, network.num_features)
    assert torch.isfinite(h).all()
    h.square().sum().backward()
    for key, parameter in network.named_parameters():
        if parameter.requires_grad:
            zero_init = name.startswith("timm:")  # its residual branches start with the weight 0
            assert parameter.grad is not None and (zero_init or parameter.grad.abs().sum() > 0), key
    frozen = {key for key, parameter in network.named_parameters() if not parameter.requires_grad}
    assert all(name == "resnet9" and "norm" in key and key.endswith("weight") for key in frozen)


@pytest.mark.parametrize(("name", "shape", "options", "features"), SMALL)
def test_the_seed_decides_the_weights(name, shape, options, features):
    def state(seed):
        torch.manual_seed(seed)
        return backbones.create(name, input_shape=shape, **options).state_dict()

    first, again, other = state(1), state(1), state(2)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", ["vgg16", "wrn-16-4", "densenet-40-12", "resnet9", "cnn"])
def test_channels_last_gives_the_same_features(name):
    """In float64: the two layouts sum in different orders, and float32 rounding depends on the processor."""
    torch.manual_seed(0)
    network = backbones.create(name, input_shape=(3, 32, 32)).double().eval()
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad():
        plain = network(images)
        fast = network.to(memory_format=torch.channels_last)(images.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(fast, plain, rtol=0, atol=1e-10 * plain.abs().max().item())


@pytest.mark.parametrize("name", ["vgg16", "wrn-16-4", "densenet-bc-40-12", "resnet9"])
def test_bfloat16_autocast_runs(name):
    torch.manual_seed(0)
    network = backbones.create(name, input_shape=(3, 32, 32))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = network(torch.randn(2, 3, 32, 32))
    h.float().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in network.parameters() if p.requires_grad)


@pytest.mark.parametrize("name", ["vgg16", "wrn-16-4", "densenet-40-12"])
def test_convolutions_start_with_he_fan_out(name):
    torch.manual_seed(0)
    network = backbones.create(name, input_shape=(3, 32, 32))
    ratios = []
    for module in network.modules():
        if isinstance(module, nn.Conv2d) and module.weight.numel() > 2000:
            k = module.kernel_size[0]
            ratios.append(module.weight.std().item() / math.sqrt(2 / (k * k * module.out_channels)))
            assert module.bias is None
    assert len(ratios) > 5
    np.testing.assert_allclose(ratios, 1, atol=0.07)
    norms = [m for m in network.modules() if isinstance(m, nn.BatchNorm2d)]
    assert all((m.weight == 1).all() and (m.bias == 0).all() for m in norms)


@pytest.mark.parametrize("name", ["resnet9", "wrn-10-1", "densenet-10-4", "vgg16", "cnn"])
def test_torch_compile_sees_one_graph(name):
    torch.manual_seed(0)
    network = backbones.create(name, input_shape=(3, 32, 32), **({"dropout": 0.0} if name == "vgg16" else {})).double()
    images = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    traced = torch.compile(network, backend="eager", fullgraph=True)  # a graph break would raise
    torch.testing.assert_close(traced(images), network(images))


def test_pooling_against_torch_layers():
    a = torch.randn(3, 5, 7, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(GlobalPool("avg")(a), F.adaptive_avg_pool2d(a, 1).flatten(1))
    torch.testing.assert_close(GlobalPool("max")(a), F.adaptive_max_pool2d(a, 1).flatten(1))


@pytest.mark.parametrize("name", ["wrn-10-1", "densenet-10-4", "cnn", "resnet9", "torchvision:resnet18"])
def test_pool_changes_the_features_and_nothing_else(name):
    def made(pool):
        torch.manual_seed(3)
        return backbones.create(name, input_shape=(3, 48, 48), pool=pool).eval()

    average, maximum = made("avg"), made("max")
    assert average.state_dict().keys() == maximum.state_dict().keys()
    images = torch.randn(2, 3, 48, 48)
    with torch.no_grad():
        a, m = average(images), maximum(images)
    assert a.shape == m.shape == (2, average.num_features)
    assert not torch.allclose(a, m)
    if name != "cnn":  # it has a linear layer behind the pooling
        assert (m >= a - 1e-5 * a.abs()).all()  # a mean of up to 2304 floats is rounded


# DenseNet by recomputation


@pytest.mark.parametrize("bc", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_memory_efficient_densenet_is_the_same_network(bc, dropout):
    def step(memory_efficient):
        torch.manual_seed(0)
        network = DenseNet((3, 16, 16), depth=16, growth=4, bc=bc, dropout=dropout, memory_efficient=memory_efficient)
        network.double()
        images = torch.randn(4, 3, 16, 16, dtype=torch.float64)
        for _ in range(2):
            network(images).square().sum().backward()
        return network

    plain, efficient = step(False), step(True)
    for (key, a), (_, b) in zip(plain.named_parameters(), efficient.named_parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=key)
    for (key, a), (_, b) in zip(plain.named_buffers(), efficient.named_buffers(), strict=True):
        torch.testing.assert_close(a, b, msg=key)  # running statistics: each batch taken in once
    assert {int(b) for key, b in efficient.named_buffers() if key.endswith("num_batches_tracked")} == {2}
    assert all(m.momentum == 0.1 for m in efficient.modules() if isinstance(m, nn.BatchNorm2d))


def test_memory_efficient_densenet_keeps_less():
    def saved(memory_efficient):
        network = DenseNet((3, 16, 16), depth=40, growth=4, memory_efficient=memory_efficient)
        sizes: dict[int, int] = {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            h = network(torch.randn(2, 3, 16, 16))
        del h
        return sum(sizes.values())

    assert saved(True) < 0.4 * saved(False)


# resnet9


def correlated_images(n: int = 200) -> torch.Tensor:
    """Smooth images with different channel scales, so that whitening has something to do."""
    noise = torch.randn(n, 3, 34, 34, generator=torch.Generator().manual_seed(5))
    return F.avg_pool2d(noise, 3, stride=1) * torch.tensor([3.0, 1.0, 0.3]).view(3, 1, 1)


def test_whitening_against_numpy():
    images = correlated_images()
    windows = np.lib.stride_tricks.sliding_window_view(images.double().numpy(), (2, 2), axis=(2, 3))
    patches = windows.transpose(0, 2, 3, 1, 4, 5).reshape(-1, 12)  # rows of (channel, dy, dx)
    filters = whitening_filters(images, eps=1e-3).reshape(12, 12).double().numpy()
    responses = patches @ filters.T
    moment = responses.T @ responses / len(responses)
    # Each response has second moment e / (e + eps), and they are uncorrelated.
    eigenvalues = np.linalg.eigvalsh(patches.T @ patches / len(patches))[::-1]
    np.testing.assert_allclose(moment, np.diag(eigenvalues / (eigenvalues + 1e-3)), atol=1e-4)
    assert (filters[np.arange(12), np.abs(filters).argmax(1)] > 0).all()


def test_whitening_layer_is_set_from_images_saved_and_never_learned():
    network = backbones.create("resnet9", input_shape=(3, 32, 32), widths=(8, 8, 8))
    before = network.stem_weight.clone()
    images = correlated_images()
    assert network.init_whiten(images) is network
    assert not torch.equal(network.stem_weight, before)
    torch.testing.assert_close(network.stem_weight[:12], whitening_filters(images))
    torch.testing.assert_close(network.stem_weight[12:], -network.stem_weight[:12])
    assert "stem_weight" in network.state_dict() and "stem_weight" not in dict(network.named_parameters())

    learned = backbones.create("resnet9", input_shape=(3, 32, 32), widths=(8, 8, 8), whiten=False)
    before = learned.stem_weight.clone()
    learned.init_whiten(images)
    assert torch.equal(learned.stem_weight, before) and learned.stem_weight.requires_grad


@pytest.mark.parametrize("images", [torch.zeros(0, 3, 32, 32), torch.zeros(4, 1, 32, 32), torch.zeros(3, 32, 32)])
def test_whitening_rejects_other_images(images):
    network = backbones.create("resnet9", input_shape=(3, 32, 32), widths=(8, 8, 8))
    with pytest.raises(ValueError, match=r"images must be \(N, 3, H, W\)"):
        network.init_whiten(images)


def test_resnet9_convolutions_start_as_the_identity():
    torch.manual_seed(0)
    block = backbones.create("resnet9", input_shape=(3, 32, 32)).blocks[1].double()
    x = torch.randn(2, 64, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(block.conv(x)[:, :64], x)
    x = torch.randn(2, 256, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(block.convs[0](x), x)


def test_resnet9_flops_as_documented():
    network = on_meta("resnet9")
    with FlopCounterMode(display=False) as counter:
        network(torch.zeros(1, 3, 32, 32, device="meta"))
    blocks = ((31, 24, 64), (15, 64, 64), (15, 64, 256), (7, 256, 256), (7, 256, 256), (3, 256, 256))
    by_hand = 2 * (31**2 * 12 * 24 + sum(side**2 * 9 * into * out for side, into, out in blocks))
    assert counter.get_total_flops() == by_hand
    assert round(by_hand / 1e9, 2) == pytest.approx(0.24)


# it learns


def test_cnn_learns_the_digits_in_a_second_or_two():
    digits = data.load("digits")
    torch.manual_seed(0)
    network = backbones.create("cnn", input_shape=(1, 8, 8))
    head = nn.Linear(network.num_features, 10)
    model = nn.Sequential(network, head)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 15)
    for epoch in range(15):
        for x, y in data.train_batches(digits, 64, seed=0, epoch=epoch):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
    model.eval()
    x, y = next(data.eval_batches(digits, "test", 500))
    with torch.no_grad():
        assert (model(x).argmax(1) != y).float().mean().item() < 0.03


# torchvision and timm


def test_resnet101_is_torchvisions_with_either_pooling():
    reference = torchvision.models.resnet101().eval()
    state = {key: tensor for key, tensor in reference.state_dict().items() if not key.startswith("fc.")}
    with torch.device("meta"):
        gap, gmp = (backbones.create("resnet101", input_shape=(3, 64, 64), pool=pool).eval() for pool in (None, "max"))
    for network in (gap, gmp):
        network.load_state_dict(state, assign=True)
    assert gap.num_features == 2048
    assert count(gap) == count(reference) - 2049 * 1000
    images = torch.randn(2, 3, 64, 64)
    maps = {}
    reference.layer4.register_forward_hook(lambda module, inputs, output: maps.update(last=output))
    with torch.no_grad():
        x = reference(images)
        torch.testing.assert_close(reference.fc(gap(images)), x)
        torch.testing.assert_close(gmp(images), maps["last"].amax((2, 3)))
        assert gmp(torch.randn(1, 3, 96, 96)).shape == (1, 2048)  # another size, the same network


FAMILIES = "alexnet convnext_tiny densenet121 efficientnet_b0 googlenet inception_v3 shufflenet_v2_x0_5 swin_t vgg11_bn"


@pytest.mark.parametrize("name", [*FAMILIES.split(), "vit_b_32"])
def test_the_classifier_comes_off_every_family_of_torchvision(name):
    shape = {"inception_v3": (3, 299, 299), "vit_b_32": (3, 64, 64)}.get(name, (3, 224, 224))
    with torch.device("meta"):
        network = backbones.create(f"torchvision:{name}", input_shape=shape)
        h = network(torch.zeros(2, *shape, device="meta"))
    assert h.shape == (2, network.num_features)


# weights from a file


def save(state: dict, path: Path) -> Path:
    if path.suffix == ".safetensors":
        from safetensors.torch import save_file

        save_file(state, path)
    else:
        torch.save(state, path)
    return path


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("name", ["wrn-10-1", "resnet9", "timm:resnet18", "torchvision:resnet18"])
def test_weights_make_the_round_trip(tmp_path, name, suffix):
    torch.manual_seed(0)
    source = backbones.create(name, input_shape=(3, 32, 32)).eval()
    if name == "resnet9":
        source.init_whiten(correlated_images())
    path = save(source.state_dict(), tmp_path / f"weights{suffix}")
    torch.manual_seed(1)
    loaded = backbones.create(name, input_shape=(3, 32, 32), weights=path).eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(loaded(images), source(images))


@pytest.mark.parametrize(("name", "whole"), [("torchvision:resnet18", "torchvision"), ("timm:resnet18", "timm")])
def test_weights_of_the_whole_classifier_fit(tmp_path, name, whole):
    reference = torchvision.models.resnet18() if whole == "torchvision" else timm.create_model("resnet18")
    reference.eval()
    # As other tools save them: inside a checkpoint, under a wrapper's prefix, with the classifier, without counters.
    kept = {k: v for k, v in reference.state_dict().items() if not k.endswith("num_batches_tracked")}
    state = {f"module.{key}": tensor for key, tensor in kept.items()}
    path = save({"state_dict": state, "epoch": 3}, tmp_path / "checkpoint.pth")
    network = backbones.create(name, input_shape=(3, 64, 64), weights=str(path)).eval()
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(reference.fc(network(images)), reference(images))


def test_old_names_in_densenet_files(tmp_path):
    with torch.device("meta"):
        reference = torchvision.models.densenet121().state_dict()
    state = {}
    for number, (key, tensor) in enumerate(reference.items()):  # each tensor contains a different number
        for part in ("norm1", "norm2", "conv1", "conv2"):
            if "denselayer" in key:
                key = key.replace(f".{part}.", f".{part[:-1]}.{part[-1]}.")
        state[key] = torch.full_like(tensor, number, device="cpu")
    assert any(".norm.1." in key for key in state)
    path = save(state, tmp_path / "densenet121.pth")
    network = backbones.create("torchvision:densenet121", input_shape=(3, 64, 64), weights=path)
    found = network.state_dict()
    for number, key in enumerate(reference):
        assert key.startswith("classifier.") or (found.pop(key) == number).all(), key
    assert not found


def one_line(error: pytest.ExceptionInfo) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("suffix", "name", "change", "message"),
    [
        (
            ".pth",
            "wrn-10-1",
            {},
            r"of another shape \(first groups.0.0.conv1.weight: \(32, 16, 3, 3\) in .*, \(16",
        ),
        (".pth", "wrn-10-2", {"extra": torch.zeros(1)}, r"does not fit wrn-10-2: 1 unknown \(first extra\)$"),
        (".safetensors", "wrn-10-2", {"bn.weight": None}, r"wrn-10-2: 1 of \d+ tensors missing \(first bn.weight\)$"),
    ],
)
def test_weights_that_do_not_fit(tmp_path, suffix, name, change, message):
    state = backbones.create("wrn-10-2", input_shape=(3, 32, 32)).state_dict() | change
    path = save({k: v for k, v in state.items() if v is not None}, tmp_path / f"weights{suffix}")
    with pytest.raises(ValueError, match=message) as error:
        backbones.create(name, input_shape=(3, 32, 32), weights=path)
    assert one_line(error).startswith(f"weights: {path} does not fit {name}: ")


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_weights_that_are_not_there_or_damaged(tmp_path, suffix):
    path = tmp_path / f"weights{suffix}"
    with pytest.raises(ValueError, match="there is no file") as error:
        backbones.create("resnet101", input_shape=(3, 64, 64), weights=path)
    assert str(path) in one_line(error)
    path.write_bytes(b"not a tensor in sight")
    with pytest.raises(ValueError, match="can't be read as a file of tensors") as error:
        backbones.create("cnn", input_shape=(1, 8, 8), weights=path)
    one_line(error)


def test_weights_file_with_something_else_in_it(tmp_path):
    path = save({"epoch": 3, "note": "no tensors"}, tmp_path / "other.pth")
    with pytest.raises(ValueError, match="contains no state dict"):
        backbones.create("cnn", input_shape=(1, 8, 8), weights=path)


def test_pretrained_without_a_network(monkeypatch):
    def unreachable(*args, **kwargs):
        raise URLError("name resolution failed")

    monkeypatch.setattr(torchvision.models._api, "load_state_dict_from_url", unreachable)
    with pytest.raises(ValueError, match="could not be fetched .*name resolution failed") as error:
        backbones.create("resnet101", input_shape=(3, 64, 64), pretrained=True)
    message = one_line(error)
    assert "weights=PATH" in message
    assert torchvision.models.ResNet101_Weights.IMAGENET1K_V1.url in message
    with pytest.raises(ValueError, match="must be True or one of IMAGENET1K_V1, IMAGENET1K_V2, got 'V9'"):
        backbones.create("resnet101", input_shape=(3, 64, 64), pretrained="V9")

    create_model = timm.create_model
    offline = lambda name, pretrained=False, **kw: unreachable() if pretrained else create_model(name, **kw)  # noqa: E731
    monkeypatch.setattr(timm, "create_model", offline)
    with pytest.raises(ValueError, match="could not be fetched .*name resolution failed.*weights=PATH") as error:
        backbones.create("timm:resnet18", input_shape=(3, 64, 64), pretrained=True)
    one_line(error)


def test_pretrained_weights_are_the_ones_loaded(monkeypatch):
    torch.manual_seed(9)
    published = torchvision.models.resnet18().state_dict()
    asked = []
    monkeypatch.setattr(
        torchvision.models._api, "load_state_dict_from_url", lambda url, **kwargs: asked.append(url) or published
    )
    network = backbones.create("torchvision:resnet18", input_shape=(3, 64, 64), pretrained=True)
    assert set(asked) == {torchvision.models.ResNet18_Weights.DEFAULT.url}
    assert torch.equal(network.layer4[1].conv2.weight, published["layer4.1.conv2.weight"])


# wrong arguments


@pytest.mark.parametrize(
    ("name", "shape", "options", "message"),
    [
        ("wnr-28-10", (3, 32, 32), {}, r"unknown backbone 'wnr-28-10', did you mean 'wrn-28-10'; known: cnn"),
        ("vgg-16", (3, 32, 32), {}, r"unknown backbone 'vgg-16', did you mean 'vgg16'"),
        ("resnet18", (3, 32, 32), {}, r"did you mean 'torchvision:resnet18' or 'timm:resnet18'; known"),
        ("torchvision:resnet19", (3, 32, 32), {}, r"torchvision has no network 'resnet19', did you mean .*'resnet18'"),
        ("timm:resnet19", (3, 32, 32), {}, r"timm has no network 'resnet19', did you mean .*'resnet18'"),
        ("timm:", (3, 32, 32), {}, r"unknown backbone 'timm:'"),
        ("wrn-41-4", (3, 32, 32), {}, r"wrn depth must be 6n \+ 4 .* got 41"),
        ("wrn-40-0", (3, 32, 32), {}, r"wrn width must be at least 1, got 0"),
        ("densenet-41-12", (3, 32, 32), {}, r"densenet depth must be 3n \+ 4 .* got 41"),
        ("densenet-bc-103-12", (3, 32, 32), {}, r"densenet-bc depth must be 6n \+ 4 .* got 103"),
        ("densenet-40-0", (3, 32, 32), {}, r"densenet growth must be at least 1, got 0"),
        ("wrn-16-4", (3, 32, 32), {"drop": 0.1}, r"options of wrn-16-4 are dropout; got 'drop'"),
        ("wrn-16-4", (3, 32, 32), {"depth": 22}, r"options of wrn-16-4 are dropout; got 'depth'"),
        ("wrn-16-4", (3, 32, 32), {"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
        ("wrn-16-4", (294,), {}, r"input_shape of wrn-16-4 must be \(channels, height, width\), got \(294,\)"),
        ("vgg16", (3, 28, 28), {}, r"input_shape of vgg16 must be at least 32x32, got 28x28"),
        ("mlp", (0,), {}, r"input_shape must be positive whole numbers, got \(0,\)"),
        ("mlp", (10,), {"pool": "avg"}, r"pool must be None for mlp"),
        ("mlp", (10,), {"hidden": []}, r"mlp hidden must be one or more positive widths, got \(\)"),
        ("cnn", (1, 8, 8), {"pool": "mean"}, r"pool must be avg, max or None, got 'mean'"),
        ("cnn", (1, 8, 8), {"widths": [8, 8, 8, 8]}, r"at most 3 stages for 8x8 images, got 4"),
        ("cnn", (1, 8, 8), {"features": 0}, r"cnn widths and features must be positive"),
        ("resnet9", (3, 32, 32), {"widths": [8, 8]}, r"resnet9 widths must be three positive numbers, got \(8, 8\)"),
        ("resnet9", (3, 32, 32), {"convs": 1}, r"at least 2, got 1"),
        ("cnn", (1, 8, 8), {"pretrained": True}, r"pretrained must be False for cnn"),
        ("resnet101", (3, 64, 64), {"pretrained": True, "weights": "w.pth"}, r"pretrained or weights, not both"),
        ("torchvision:resnet18", (3, 64, 64), {"depth": 3}, r"options of resnet18: .*depth"),
        ("timm:resnet18", (3, 64, 64), {"deepness": 3}, r"options of timm's resnet18: .*deepness"),
        ("timm:resnet18", (3, 64, 64), {"pretrained": "a1_in1k"}, r"timm:resnet18.TAG"),
        ("torchvision:vgg11", (3, 224, 224), {"pool": "max"}, r"pool must be None for torchvision's vgg11"),
        ("torchvision:squeezenet1_1", (3, 64, 64), {}, r"squeezenet1_1 does not end in a linear classifier"),
        ("torchvision:resnet18", (1, 64, 64), {}, r"must have 3 channels, got 1"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(name, shape, options, message):
    with pytest.raises(ValueError, match=message) as error, torch.device("meta"):
        backbones.create(name, input_shape=shape, **options)
    one_line(error)


def test_available_names_are_real():
    names = [name for name, _ in backbones.available()]
    assert len(names) == len(set(names)) and all(text and "\n" not in text for _, text in backbones.available())
    filled = {"depth}-{width": "16-1", "depth}-{growth": "16-4"}
    for name in names:
        for blank, value in filled.items():
            name = name.replace("{" + blank + "}", value)
        name = name.replace("NAME", "resnet18")
        shape = (20,) if name == "mlp" else (3, 32, 32)
        with torch.device("meta"):
            assert backbones.create(name, input_shape=shape).num_features > 0
