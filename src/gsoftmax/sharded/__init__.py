"""Heads whose classes are spread over processes: every process holds some classes, and sees every example's h.

`GSoftmaxHead(in_features, num_classes, shard="class")` and `SoftmaxHead(..., shard="class")` keep weight, bias, mu and
rho as DTensors, `Shard(0)` on a 1-D mesh.  With K processes, of which number r has the rows h_r (n_r, D) of a batch:

    h   (N, D)      gathered, N = n_1 + ... + n_K          on the wire: N D numbers
    x   (N, C_r)    = h W_r^T + bias_r, own classes only, and only a tile of it at a time
    max, sum of exp(z - max), target's z                   on the wire: a few numbers a row
    dh  (N, D)      summed and sent back to the rows' owners: N D numbers

Logits never travel.  The backward pass makes x again, tile by tile (unless all of it was one tile).

**The loss** is that of all rows of all processes together: reduction="mean" and "sum" give the same number on every
process, "none" gives the losses of the own rows.  n_r may differ from process to process and be 0; every process must
make the call.

**Gradients.**  After `loss.backward()` on every process the gradients of weight, bias, mu and rho are exactly those of
that one loss: nothing is left to reduce, keep the head out of DistributedDataParallel.  A backbone under
DistributedDataParallel or FSDP has its gradients *averaged* over the processes, although each of them saw a different
part of the sum; so by default (`averaged=True`) dh is multiplied by the number of processes, and the average is the
gradient of the loss.  It is also what dh is in ordinary training with these wrappers, where every process takes the
mean of its own rows.  With `averaged=False` dh is exactly the gradient of the loss with respect to the own rows, right
for a backbone whose gradients are added up, or that does not learn.  What a loss is multiplied by before `backward`
must be the same on all processes (reduction="none" excepted).  Give the optimiser the head's parameters in groups of
their own, `[{"params": backbone.parameters()}, *head.param_groups(lr=...)]`: its fused loops take DTensors or tensors,
not both.  Clip with `sharded.clip_grad_norm_`.

**Negatives.**  With `negatives=n` a training step looks at the classes that are a target anywhere in the batch and at
about n others, drawn uniformly from each process's own in proportion to their number, at least one from each process.
A drawn class stands for 1/pi classes, pi being the probability that it is drawn, so log(1/pi) is added to its z: the
sum of exponentials is right on average (its logarithm is a little too small on average, the less so the larger n).
Gradients of rows that were not drawn are zero.  What is drawn depends on `seed`, on the number of steps taken, which
is saved with the head, and on the split of the classes.

**Outputs.**  `features(h)`, `head(h)` and `predict_proba(h)` are DTensors (N, C) with `Shard(1)`: rows of all processes
in the order of processes, own columns.  `predict(h)` and `topk(h, k)` are about the own rows, over all classes.

The package also has what a sharded head needs around it: `ClassStatistics`, `compactness`, `separability` and `ratio`
without gathering; `save` and `load`, for any number of processes; `clip_grad_norm_`; `top1_error`; `bytes_on_wire`.
"""

from __future__ import annotations

from .checkpoint import load, save
from .head import ClassShard, set_up
from .loss import TILE
from .measures import ClassStatistics, clip_grad_norm_, compactness, ratio, separability, top1_error
from .wire import Wire, bytes_on_wire, split

__all__ = [
    "ClassShard",
    "ClassStatistics",
    "Wire",
    "TILE",
    "bytes_on_wire",
    "clip_grad_norm_",
    "compactness",
    "load",
    "ratio",
    "save",
    "separability",
    "set_up",
    "split",
    "top1_error",
]
