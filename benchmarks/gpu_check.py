"""Accuracy on a GPU: `python -m benchmarks.gpu_check`.

Loss and gradients of the kernels against float64, in every option, at sizes that do not divide the tiles and at the
largest ones, with outputs filled with NaN beforehand; then bit-identical repetition, no GPU synchronization, CUDA
graphs, compiled code, extreme values and second derivatives; the linear layer in one; and z, p, the loss of several
labels and the sharded head.  A line for each, status 1 where one fails.
"""

from __future__ import annotations

import contextlib
import gc
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu import LOSSES, data, name_of, say
from gsoftmax import GaussianLogits, equations, functional
from gsoftmax.checks import MULTILABEL_FORMS
from gsoftmax.sharded import ShardedGSoftmaxHead
from gsoftmax.sharded.loss import TILE

# Of x for z and p: rows of one tile and of several, images, and those of the benchmark.
TERMS = [(37, 11), (70, 1003), (33, 9001), (300, 50257), (3, 17, 5, 7), (2048, 128256)]
LABELS = [(37, 11), (70, 1003), (4096, 20000)]  # rows, labels
HALF_OR_SINGLE = (torch.float32, torch.bfloat16, torch.float16)


class Checks:
    """PASS and FAIL lines, and how many of each."""

    def __init__(self) -> None:
        self.passed, self.failed = 0, []

    def __call__(self, name: str, fine: bool, words: str = "") -> None:
        if fine:
            self.passed += 1
        else:
            self.failed.append(name)
        say(f"{'PASS' if fine else 'FAIL'}  {name}  {words}")

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception:
            self(name, False, traceback.format_exc(limit=4)[-900:])
            torch.cuda.synchronize()


def exact(x, target, mu, sigma, lam, weight, ignore_index, reduction, smoothing, grad) -> list[Tensor]:
    """Loss, dx, dmu, dsigma in float64, some rows at a time."""
    n, c = x.shape
    mu, sigma = (v.detach().double().requires_grad_() for v in (mu, sigma))
    hard = not target.is_floating_point()
    weight = None if weight is None else weight.double()
    divisor = torch.ones((), dtype=torch.float64, device="cuda")
    if reduction == "mean":
        counts = (target != ignore_index) if hard else torch.ones(n, device="cuda", dtype=torch.bool)
        of_row = torch.ones(n, device="cuda").double() if weight is None or not hard else weight[target.clamp(0, c - 1)]
        divisor = (counts * of_row).sum()
    factor = grad.double() / divisor if grad.ndim == 0 else grad.double()
    losses, dx = [], []
    for i in range(0, n, max(1, (1 << 26) // c)):
        at = slice(i, i + max(1, (1 << 26) // c))
        part = x[at].detach().double().requires_grad_()
        z = part + lam * torch.special.ndtr((part - mu) / sigma) if lam else part
        y = target[at] if hard else target[at].double()
        loss = F.cross_entropy(z, y, weight, None, ignore_index, None, "none", smoothing)
        (loss * (factor[at] if factor.ndim else factor)).sum().backward()
        losses.append(loss.detach())
        dx.append(part.grad.float())
    rows = torch.cat(losses)
    loss = rows if reduction == "none" else rows.sum() / divisor
    zero = torch.zeros_like(mu)
    return [loss, torch.cat(dx), zero if mu.grad is None else mu.grad, zero if sigma.grad is None else sigma.grad]


def errors(got: list[Tensor], expected: list[Tensor], dtype: torch.dtype, scale: float = 1.0) -> tuple[bool, str]:
    """Whether loss and gradients are as accurate as their dtype allows, and the errors as text.

    `scale` is the gradient of a row's loss: where p is nearly 1, p - 1 is off by some 1e-7 of it in float32.
    """
    eps = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    off = ((got[0].double() - expected[0]).abs() / (expected[0].abs() + 1)).max().item()
    fine, words = off <= eps, [f"loss {off:.1e}"]
    for name, a, b in zip(("dx", "dmu", "dsigma"), got[1:], expected[1:], strict=True):
        difference, norm = (a.double() - b.double()).norm().item(), b.double().norm().item()
        limit = (eps if name == "dx" else 2e-6) * norm + 5e-7 * scale
        if a.dtype is torch.float16:  # its numbers are never closer than 2^-24, however small
            limit += 2.0**-25 * math.sqrt(a.numel())
        fine = fine and a.shape == b.shape and difference <= limit
        words.append(f"{name} {difference / max(norm, 1e-30):.1e}")
    return fine, ", ".join(words)


def ours(x, target, mu, sigma, rest, grad=None) -> list[Tensor]:
    """Loss, dx, dmu, dsigma by the kernels, in memory that held NaN before."""
    leaves = [v.detach().requires_grad_() for v in (x, mu, sigma)]
    with poisoned():
        loss = functional.gsoftmax_cross_entropy(
            leaves[0], target, leaves[1], leaves[2], rest[0], weight=rest[1], ignore_index=rest[2], reduction=rest[3],
            label_smoothing=rest[4], impl="triton",
        )  # fmt: skip
        grad = torch.ones_like(loss) if grad is None else grad.to(loss.dtype)
        loss.backward(grad)
    return [loss.detach(), *(v.grad for v in leaves)]


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)  # and torch.empty is filled with NaN
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def check() -> Checks:
    checks = Checks()
    check_options(checks)
    check_sizes(checks)
    check_behaviour(checks)
    check_linear(checks)
    check_terms(checks)
    check_labels(checks)
    check_sharded(checks)
    say(f"\n{checks.passed} passed, {len(checks.failed)} failed")
    for name in checks.failed:
        say("FAILED", name)
    return checks


def check_options(checks: Checks) -> None:
    options = {
        "plain": {},
        "sum, lam 4": {"reduction": "sum", "lam": 4.0},
        "none": {"reduction": "none"},
        "smoothing": {"smoothing": 0.1},
        "weight": {"weight": True},
        "weight, smoothing": {"weight": True, "smoothing": 0.2},
        "probabilities": {"soft": True},
        "probabilities, weight, smoothing, none": {
            "soft": True, "weight": True, "smoothing": 0.3, "reduction": "none",
        },
        "transposed": {"layout": "transposed"},
        "every other column": {"layout": "columns"},
    }  # fmt: skip
    for dtype in (torch.float32, torch.bfloat16):
        for n, c in ((37, 11), (70, 1003), (33, 5001)):
            for name, o in options.items():
                name = f"{name}, {name_of(n, c, dtype=dtype)}"
                with checks.part(name):
                    x, target, mu, sigma = (v.detach() for v in data(n, c, dtype, seed=len(name)))
                    x = x * 3
                    target[n // 2] = -100
                    if o.get("soft"):
                        target = torch.rand(n, c, device="cuda").softmax(1)
                    if o.get("layout") == "transposed":
                        x = x.t().contiguous().t()
                    elif o.get("layout") == "columns":
                        x = torch.stack([x, x * float("nan")], 2).flatten(1)[:, ::2]
                    weight = torch.rand(c, device="cuda") + 0.1 if o.get("weight") else None
                    rest = (o.get("lam", 1.0), weight, -100, o.get("reduction", "mean"), o.get("smoothing", 0.0))
                    grad = torch.rand(n if rest[3] == "none" else (), device="cuda").to(dtype) + 0.5
                    got = ours(x, target, mu, sigma, rest, grad)
                    scale = 1 / n if rest[3] == "mean" else 1.0
                    checks(name, *errors(got, exact(x, target, mu, sigma, *rest, grad), dtype, scale))


def check_sizes(checks: Checks) -> None:
    sizes = [(1, 2), (2, 1), (128, 10), (100000, 21), (64, 1024), (5, 1025), (257, 4099), (300, 50257), (3, 1000003)]
    cases = [(n, c, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16) for n, c in sizes]
    cases += [(n, c, dtype) for n, c, dtype, *_ in LOSSES]
    for n, c, dtype in cases:
        name = f"size {name_of(n, c, dtype=dtype)}"
        with checks.part(name):
            x, target, mu, sigma = (v.detach() for v in data(n, c, dtype, seed=n + c))
            x.mul_(3)
            sums = n * c < 1e8 and (dtype is not torch.float16 or n < 1000)  # a larger sum is beyond float16
            rest = (1.0, None, -100, "sum" if sums else "mean", 0.0)
            grad = torch.tensor(0.75, device="cuda", dtype=dtype)
            got = ours(x, target, mu, sigma, rest, grad)
            scale = 1 / n if rest[3] == "mean" else 1.0
            checks(name, *errors(got, exact(x, target, mu, sigma, *rest, grad), dtype, scale))
        gc.collect()
        torch.cuda.empty_cache()

    for layout in ("rows", "columns"):
        n, c = 36000, 65600  # more than 2^31 elements
        name = f"64-bit offsets along {layout}, {name_of(n, c)}"
        with checks.part(name):
            x = torch.empty((n, c) if layout == "rows" else (c, n), dtype=torch.bfloat16, device="cuda").normal_()
            x = x if layout == "rows" else x.t()
            target, mu, sigma = torch.randint(c, (n,), device="cuda"), *data(1, c, torch.bfloat16)[2:]
            rest = (1.0, None, -100, "none", 0.0)
            x.requires_grad_()
            gaussians = mu.detach(), sigma.detach()
            loss = functional.gsoftmax_cross_entropy(x, target, *gaussians, reduction="none", impl="triton")
            loss.backward(torch.ones_like(loss))
            some = torch.tensor([0, 1, 17000, n - 2, n - 1], device="cuda")
            expected = exact(x.detach()[some], target[some], mu, sigma, *rest, torch.ones(5, device="cuda"))
            got = [loss.detach()[some], x.grad[some], expected[2], expected[3]]
            checks(name, *errors(got, expected, torch.bfloat16))
            del x, loss, got
        gc.collect()
        torch.cuda.empty_cache()


def twice(x: Tensor, target: Tensor, mu: Tensor, sigma: Tensor) -> Tensor:
    return functional.gsoftmax_cross_entropy(x * 2, target, mu, sigma)


def check_behaviour(checks: Checks) -> None:
    from gsoftmax.kernels import triton_ce

    x, target, mu, sigma = (v.detach() for v in data(512, 9000, torch.bfloat16))
    rest = (1.0, None, -100, "mean", 0.0)
    with checks.part("the same bits twice"):
        first, again = ours(x, target, mu, sigma, rest), ours(x, target, mu, sigma, rest)
        checks("the same bits twice", all(torch.equal(a, b) for a, b in zip(first, again, strict=True)))

    with checks.part("the GPU is never waited for"):
        leaves = [v.clone().requires_grad_() for v in (x, mu, sigma)]
        grad = torch.ones((), device="cuda", dtype=torch.bfloat16)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            loss = functional.gsoftmax_cross_entropy(leaves[0], target, *leaves[1:])
            loss.backward(grad)
            h = torch.ones(8, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            weight = torch.ones(9000, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            functional.linear_gsoftmax_cross_entropy(h, weight, target[:8], *leaves[1:], impl="triton").backward(grad)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        checks("the GPU is never waited for", True)

    with checks.part("a CUDA graph"):
        leaves = [v.clone().requires_grad_() for v in (x, mu, sigma)]
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                functional.gsoftmax_cross_entropy(leaves[0], target, *leaves[1:]).backward()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        for v in leaves:
            v.grad = None
        with torch.cuda.graph(graph):
            loss = functional.gsoftmax_cross_entropy(leaves[0], target, *leaves[1:])
            loss.backward()
        graph.replay()
        torch.cuda.synchronize()
        expected = ours(x, target, mu, sigma, rest)
        checks("a CUDA graph", torch.equal(loss, expected[0]) and torch.equal(leaves[0].grad, expected[1]))

    for n, c in ((64, 100), (4096, 5000)):
        name = f"torch.compile, whole graph, {name_of(n, c)}"
        with checks.part(name):
            torch._dynamo.reset()
            v = data(n, c, torch.float32)
            loss = torch.compile(twice, fullgraph=True)(*v)
            loss.backward()
            expected = exact(v[0] * 2, v[1], v[2], v[3], *rest, torch.ones((), device="cuda"))
            expected[1] *= 2
            checks(name, *errors([loss.detach(), v[0].grad, v[2].grad, v[3].grad], expected, torch.float32, 1 / n))

    with checks.part("extreme values"):
        y, t, m, s = (v.detach() for v in data(64, 3000, torch.float32))
        y[0, ::2] = y[1, 512:2048] = -float("inf")
        t[0] = t[1] = 3
        y[2], y[3], y[4] = y[2] * 1e4, y[3] - 1e4, y[4] + 1e4
        s[::7] = 1e-6
        leaves = [v.clone().requires_grad_() for v in (y, m, s)]
        loss = functional.gsoftmax_cross_entropy(leaves[0], t, *leaves[1:], reduction="none", impl="triton")
        loss.sum().backward()
        wide = [v.double().requires_grad_() for v in (y, m, s)]
        expected = F.cross_entropy(equations.logits(*wide, 1.0), t, reduction="none")
        expected.sum().backward()
        got = [loss.detach(), *(v.grad for v in leaves)]
        finite = all(v.isfinite().all() for v in got)
        fine, words = errors(got, [expected.detach(), *(v.grad for v in wide)], torch.float32)
        checks("extreme values", finite and fine, words)

    with checks.part("rows that do not count, labels out of range"):
        t = target.clone()
        t[5:9], t[9] = -100, 9000
        got = ours(x, t, mu, sigma, (1.0, None, -100, "none", 0.1))
        bad = torch.zeros(512, dtype=torch.bool, device="cuda")
        bad[9] = True
        fine = got[0].isnan().equal(bad) and got[1].isnan().any(1).equal(bad) and bool((got[1][5:9] == 0).all())
        checks("rows that do not count, labels out of range", fine)

    with checks.part("second derivatives"):
        v = data(8, 12, torch.float32)
        wide = [w.detach().double().requires_grad_() for w in (v[0], v[2], v[3])]
        seconds = []
        for leaves, impl in (((v[0], v[2], v[3]), "triton"), (wide, "plain")):
            loss = functional.gsoftmax_cross_entropy(leaves[0], v[1], leaves[1], leaves[2], impl=impl)
            grads = torch.autograd.grad(loss, leaves, create_graph=True)
            sum(g.square().sum() for g in grads).backward()
            seconds.append([w.grad for w in leaves])
        off = max(((a.double() - b).norm() / b.norm()).item() for a, b in zip(*seconds, strict=True))
        checks("second derivatives", off < 1e-4, f"{off:.1e}")

    with checks.part("attach"):
        layer = GaussianLogits(5000, device="cuda")
        x = torch.randn(256, 5000, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        target = torch.randint(5000, (256,), device="cuda")
        found, expected = (F.cross_entropy(z, target) for z in (layer(x), layer(x).clone()))
        fine = found.dtype is torch.float32 and abs(found.item() - expected.item()) < 1e-3
        checks("attach: the loss without z", fine, f"{found.item():.6f} {expected.item():.6f}")

    for n, c, dtype, *_ in LOSSES:
        for kind in ("forward", "backward"):
            say("      ", name_of(n, c, dtype=dtype), kind, triton_ce.plan(kind, n, c, dtype.itemsize, x.device))


def check_linear(checks: Checks) -> None:
    from gsoftmax.kernels import linear

    usual = dict(linear.CHUNK)
    for dtype, limit in ((torch.float32, 5e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)):
        for reduction, lam, bias in (("mean", 1.0, False), ("none", 1.0, True), ("mean", 0.0, True)):
            name = f"linear, {reduction}, lam {lam:g}, {str(dtype).removeprefix('torch.')}"
            with checks.part(name):
                torch.manual_seed(0)
                linear.CHUNK["cuda"] = 200 * 5003
                n, d, c = 1000, 64, 5003
                values = [
                    torch.randn(n, d, device="cuda").to(dtype), (torch.randn(c, d, device="cuda") / 4).to(dtype),
                    torch.randn(c, device="cuda").to(dtype) if bias else None,
                    torch.randn(c, device="cuda"), torch.rand(c, device="cuda") + 0.3,
                ]  # fmt: skip
                target = torch.randint(c, (n,), device="cuda")
                target[3] = -100
                leaves = [None if v is None else v.clone().requires_grad_() for v in values]
                loss = functional.linear_gsoftmax_cross_entropy(
                    leaves[0], leaves[1], target, leaves[3], leaves[4], lam, bias=leaves[2], reduction=reduction,
                    impl="triton",
                )  # fmt: skip
                grad = torch.rand(loss.shape, device="cuda").to(dtype) * (1000.0 if dtype == torch.float16 else 1.0)
                loss.backward(grad.to(loss.dtype))
                wide = [None if v is None else v.double().requires_grad_() for v in values]
                x = F.linear(wide[0], wide[1], wide[2])
                x = x + (x.detach().to(dtype).double() - x.detach())  # as the layer rounds it
                z = x + lam * torch.special.ndtr((x - wide[3]) / wide[4])
                expected = F.cross_entropy(z, target, reduction=reduction)
                expected.backward(grad.double())
                off = [((loss.double() - expected).abs() / (expected.abs() + 1)).max().item()]
                off += [
                    ((a.grad.double() - b.grad).norm() / b.grad.norm().clamp_min(1e-9)).item()
                    for a, b in zip(leaves, wide, strict=True) if a is not None
                ]  # fmt: skip
                checks(name, max(off) < limit, " ".join(f"{o:.1e}" for o in off))
            linear.CHUNK.update(usual)


def compare(
    checks: Checks, name: str, f: Callable[..., Tensor], inputs: Sequence[Tensor], scale: float = 1.0
) -> list[Tensor]:
    """The value of `f` of x, mu and sigma and its gradients, by kernels and in float64; every time the same bits."""
    x, mu, sigma = inputs
    grad, seen = None, []
    for _ in range(2):  # the second time the launcher remembers what it compiled
        leaves = [v.detach().requires_grad_() for v in inputs]
        with poisoned():
            out = f(*leaves)
            grad = torch.randn(out.shape, device="cuda").to(out.dtype) if grad is None else grad
            out.backward(grad)
        seen.append([out.detach(), *(v.grad for v in leaves)])
    wide = [v.detach().double().requires_grad_() for v in inputs]
    out = f(*wide)
    out.backward(grad.double())
    fine, words = errors(seen[0], [out.detach(), *(v.grad for v in wide)], x.dtype, scale)
    checks(name, fine and all(torch.equal(a, b) for a, b in zip(*seen, strict=True)), words)
    return [seen[0][0], out.detach()]


def check_terms(checks: Checks) -> None:
    for dtype in HALF_OR_SINGLE:
        for shape in TERMS:
            for layout in ("rows", "columns"):
                _, _, mu, sigma = (v.detach() for v in data(1, shape[1], dtype, seed=sum(shape)))
                x = 3 * torch.randn(shape, device="cuda")
                x = x.to(dtype) if layout == "rows" else x.to(dtype).transpose(0, 1).contiguous().transpose(0, 1)
                for what, f in (("z", functional.gsoftmax_logits), ("p", functional.gsoftmax)):
                    name = f"{what}, {layout}, {name_of(*shape, dtype=dtype)}"
                    with checks.part(name):
                        seen, exact = compare(checks, name, f, (x, mu, sigma))
                        if what == "z":  # in float32, whatever x is
                            checks(f"{name}, digits", bool(((seen - exact).abs() <= 1e-6 * (exact.abs() + 1)).all()))
                gc.collect()
                torch.cuda.empty_cache()


def check_labels(checks: Checks) -> None:
    options = [
        {}, {"reduction": "sum"}, {"reduction": "none", "label_smoothing": 0.1}, {"reduction": "batchmean", "lam": 4.0},
        {"weights": True, "label_smoothing": 0.2}, {"weights": True, "reduction": "none"}, {"gaussians": None},
    ]  # fmt: skip
    for dtype in HALF_OR_SINGLE:
        for n, labels in LABELS:
            # a sum over millions of labels is beyond float16
            few = [o for o in options if dtype is not torch.float16 or n < 1000 or o.get("reduction") != "sum"]
            for form, o in ((form, o) for form in MULTILABEL_FORMS for o in few):
                name = f"{form}, {', '.join(map(str, o.items())) or 'plain'}, {name_of(n, labels, dtype=dtype)}"
                with checks.part(name):
                    one = form == "msml"
                    x, _, mu, sigma = (v.detach() for v in data(n, labels if one else 2 * labels, dtype, seed=n))
                    target = torch.randint(2, (n, labels), device="cuda")
                    target[torch.rand(n, labels, device="cuda") < 0.2] = -100
                    given = {k: v for k, v in o.items() if k not in ("weights", "gaussians")}
                    if o.get("weights"):
                        given |= {k: torch.rand(labels, device="cuda") + 0.1 for k in ("weight", "pos_weight")}

                    def f(x, mu, sigma, form=form, target=target, given=given, o=o, labels=labels) -> Tensor:
                        if form == "msml":
                            outputs, gaussians = (x, None), (mu, sigma)
                        else:
                            (x_neg, x_pos), (m_neg, m_pos), (s_neg, s_pos) = (
                                v.split(labels, -1) for v in (x, mu, sigma)
                            )
                            outputs, gaussians = (x_pos, x_neg), (m_pos, s_pos, m_neg, s_neg)
                        gaussians = None if "gaussians" in o else gaussians
                        loss = functional.multilabel_cross_entropy(
                            *outputs, target, form=form, gaussians=gaussians, **given
                        )
                        # without Gaussians their gradient is 0
                        return loss + 0 * (mu.sum() + sigma.sum()).to(loss.dtype)

                    compare(checks, name, f, (x, mu, sigma), 1 / n)
                gc.collect()
                torch.cuda.empty_cache()


def check_sharded(checks: Checks) -> None:
    """The sharded head on one process, in several tiles of rows and classes and in one."""
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    usual = dict(TILE)
    n, d, c = 300, 64, 5003
    for tile in (usual["cuda"], (1 << 16, 1 << 10)):
        for o in ({}, {"reduction": "none"}, {"label_smoothing": 0.1}, {"reduction": "sum"}):
            name = f"sharded, {', '.join(map(str, o.items())) or 'plain'}, tiles of {tile}"
            with checks.part(name):
                TILE["cuda"] = tile
                torch.manual_seed(0)
                head = ShardedGSoftmaxHead(d, c, device="cuda", mu=0.2, sigma=0.7)
                h, target = torch.randn(n, d, device="cuda"), torch.randint(c, (n,), device="cuda")
                target[3] = -100
                results = []
                for of, inputs in ((head, h.clone()), (head.unsharded().double(), h.double())):
                    loss = of.loss(inputs.requires_grad_(), target, **o)
                    loss.backward(torch.ones_like(loss))
                    gradients = (getattr(p.grad, "to_local", lambda g=p.grad: g)() for p in of.parameters())
                    results.append([loss.detach(), inputs.grad, *gradients])
                off = [((a.double() - b).norm() / b.norm()).item() for a, b in zip(*results, strict=True)]
                checks(name, max(off) < 5e-6, " ".join(f"{v:.1e}" for v in off))
    TILE.update(usual)
    dist.destroy_process_group()


def main() -> int:
    if not torch.cuda.is_available():
        say("no GPU here: nothing checked")
        return 2
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    return int(bool(check().failed))


if __name__ == "__main__":
    sys.exit(main())
