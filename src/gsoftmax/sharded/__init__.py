"""Heads with their classes split over processes: each process holds a part of the classes and receives all rows of h.

`ShardedGSoftmaxHead(in_features, num_classes)` and `ShardedSoftmaxHead(...)` keep weight, bias, mu and rho as DTensors,
`Shard(0)` on a 1-D mesh.  With K processes, of which number r has the rows h_r (n_r, D) of a batch:

    h   (N, D)      gathered, N = n_1 + ... + n_K          communication: N D numbers
    x   (N, C_r)    = h W_r^T + bias_r, local classes only, and only a tile of it at a time
    max, sum of exp(z - max), target's z                   communication: a few numbers per row
    dh  (N, D)      summed, and sent back to the rows' owners: N D numbers

Logits are never communicated.  The backward pass recomputes x, tile by tile (unless it fits in one tile).

**The loss** is that of all rows of all processes together: reduction="mean" and "sum" give the same number on every
process, "none" the losses of the local rows.  n_r may differ from process to process and be 0; every process must make
the call.

**Gradients.**  After `loss.backward()` on every process the gradients of weight, bias, mu and rho are exactly those of
this loss and need no further reduction: keep the head out of DistributedDataParallel.  A backbone under
DistributedDataParallel or FSDP has its gradients *averaged* over the processes, although each of them saw a different
part of the sum; so by default (`averaged=True`) dh is multiplied by the number of processes, and the average is the
gradient of the loss.  This is also what dh is in ordinary training with these wrappers, where every process takes the
mean of its own rows.  With `averaged=False` dh is exactly the gradient of the loss with respect to the local rows, for
a backbone that is frozen or whose gradients are summed.  A factor of the loss before `backward` must be the same on all
processes (except with reduction="none").  Give the optimizer the head's parameters in groups of their own,
`[{"params": backbone.parameters()}, *head.param_groups(lr=...)]`: fused optimizers cannot mix DTensors and tensors in
one group.  Clip with `sharded.clip_grad_norm_`.

**Negatives.**  With `negatives=n` a training step uses the classes that are a target anywhere in the batch and about n
others, sampled uniformly from the classes of each process in proportion to their number, at least one per process.  A
sampled class is weighted by 1/pi, pi being the probability that it is sampled, so log(1/pi) is added to its z: the sum
of exponentials is unbiased (its logarithm is a little too small on average, the less so the larger n).  Gradients of
rows that were not sampled are zero.  The sample depends on `seed`, on the number of steps taken, which is saved with
the head, and on how the classes are split.

**Outputs.**  `features(h)`, `head(h)` and `predict_proba(h)` are DTensors (N, C) with `Shard(1)`: rows of all processes
in the order of the processes, local columns.  `predict(h)` and `topk(h, k)` return results for the local rows, over all
classes.  `unsharded()` gives every process a plain head with all classes.

The package also has `ClassStatistics`, `compactness`, `separability` and `ratio` without gathering; `save` and `load`,
for any number of processes; `clip_grad_norm_`; `top1_error`; `bytes_on_wire`.
"""

from __future__ import annotations

from .checkpoint import load, save
from .collectives import Wire, bytes_on_wire
from .head import ShardedGSoftmaxHead, ShardedSoftmaxHead, sharded_class
from .loss import TILE
from .measures import ClassStatistics, clip_grad_norm_, compactness, ratio, separability, top1_error
from .shard import ClassShard, split

__all__ = [
    "ClassShard",
    "ClassStatistics",
    "ShardedGSoftmaxHead",
    "ShardedSoftmaxHead",
    "TILE",
    "Wire",
    "bytes_on_wire",
    "clip_grad_norm_",
    "compactness",
    "load",
    "ratio",
    "save",
    "separability",
    "sharded_class",
    "split",
    "top1_error",
]
