"""Precision: a policy of dtypes, and how to apply it to a tree.

The policy is data. It sets the dtypes in which `fzero.value_and_grad(precision=)` sums gradients, and in which
`optim.master_weights` stores masters. No tensor is cast anywhere else: the model decides the dtypes of its operations.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fzero import tree
from fzero._names import missing_members
from fzero._tracebacks import api_boundary_of_class
from fzero.codecs import Codec, CodecKey
from fzero.sharding import Shard, Slot, is_box, make_box, traced_spec
from fzero.tree import Tree

__all__ = ["Precision"]


class _GradientDtypes(NamedTuple):
    """The dtype of a gradient while it is summed over ranks, and its dtype while summed over micro-batches.

    Attributes:
        reduce: on the wire; float32 with a codec.
        grad: between micro-batches, and in the update.
        gather_key: the settings of the codec by which the parameters are gathered; None for none.
        reduce_key: the settings of the codec by which gradients are summed over ranks; None for none.
    """

    reduce: torch.dtype
    grad: torch.dtype
    gather_key: CodecKey | None = None
    reduce_key: CodecKey | None = None


_FOREIGN_NAMES = {  # names of FSDP2's MixedPrecisionPolicy and of jmp's Policy
    "param_dtype": "precision.param",
    "compute_dtype": "precision.param",
    "output_dtype": "the model's: outputs are not cast, and losses may be, loss.float()",
    "cast_forward_inputs": "the batch's: inputs are not cast, so cast them, batch.to(precision.param)",
    "buffer_dtype": "the module's: buffers are not cast",
    "cast_to_compute": "precision.cast(params)",
    "cast_to_param": "precision.cast(params)",
    "cast_to_output": "the model's: outputs are not cast",
    "grad_dtype": "precision.grad",
    "autocast": "not needed: parameters have the dtype precision.param, and the model computes in it",
}


@api_boundary_of_class
@dataclass(frozen=True)
class Precision:
    """The dtypes of parameters, gradients and master weights: mixed precision (arXiv:1710.03740) as data.

    Attributes:
        param: the dtype of parameters between steps, in gathers, and in the computation.
        reduce: the dtype of gradients while they are summed over ranks. Or a codec, such as `fzero.codecs.int4()`: then
            each rank sends codes, and their sum is in float32.
        master: the dtype of the master weights that `optim.master_weights` stores in the sharded optimizer state.
        grad: the dtype of gradients while they are summed over micro-batches, and in the update; by default `reduce`.
        full: a rule `(path, leaf) -> bool` for leaves that always have the dtype `master`, such as norms and routers:
            `lambda path, leaf: "norm" in path`. They have no second copy. A block with leaves of both kinds is two
            units.
        shard: the dtype of parameters that are sharded between steps, as at stage 3; by default `param`. With the dtype
            `master`, a rank's shards are the master weights, and gathers cast them to `param`, as FSDP2 does. So there
            are not shards in half precision beside them. Numbers are equal to the last bit. Other stages keep full
            parameters in `param`, with masters in the optimizer state.
        gather: a codec, such as `fzero.codecs.int8()`, by which the parameters are rounded wherever the loss uses
            them, at every stage; at stage 3 they are sent so. Gradients pass the rounding unchanged. Leaves of `full`
            are not rounded if the parameters have another dtype.

    Raises:
        TypeError: if a dtype is not a floating-point dtype, or a codec is none.
        ValueError: if master weights would be in half precision, or narrower than the parameters; if `shard` is neither
            `param` nor `master`; or if `gather` rounds at random.

    Example:
        >>> precision = Precision(param=torch.bfloat16, full=lambda path, leaf: "norm" in path)
        >>> params = precision.cast({"w": torch.ones(2, 2), "norm": torch.ones(2)})
        >>> params["w"].dtype, params["norm"].dtype
        (torch.bfloat16, torch.float32)
    """

    param: torch.dtype
    reduce: torch.dtype | Codec = torch.float32
    master: torch.dtype = torch.float32
    grad: torch.dtype | None = None
    full: Callable[[str, torch.Tensor], bool] | None = None
    shard: torch.dtype | None = None
    gather: Codec | None = None

    def __post_init__(self) -> None:
        """Check the dtypes and the codecs."""
        dtypes = {"param": self.param, "reduce": self.reduce_dtype, "master": self.master}
        dtypes |= {"grad": self.grad, "shard": self.shard}
        for name, dtype in dtypes.items():
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                codec = ", or a codec, such as fzero.codecs.int4()" if name == "reduce" else ""
                raise TypeError(f"{name}={dtype!r}: expected a floating-point dtype, such as torch.bfloat16{codec}")
        if not (self.gather is None or isinstance(self.gather, Codec)):
            raise TypeError(f"gather={self.gather!r}: expected a codec, such as fzero.codecs.int8(); a dtype is param=")
        if self.gather is not None and self.gather.is_stochastic:
            raise ValueError(
                "gather rounds at random: the parameters would change with the order of a unit's leaves; use "
                f"rounding='nearest' in {self.gather!r}"
            )
        if self.master.itemsize < 4:
            raise ValueError(
                f"master={self.master}: master weights in half precision lose every update smaller than their last "
                "bit; use torch.float32, or train without optim.master_weights"
            )
        if self.param.itemsize > self.master.itemsize:
            raise ValueError(
                f"param={self.param} is wider than master={self.master}: give master={self.param}, or a narrower param="
            )
        if self.shard not in (None, self.param, self.master):
            raise ValueError(
                f"shard={self.shard}: expected param={self.param}, for master weights in the optimizer state, or "
                f"master={self.master}, for shards that are the master weights"
            )

    if not TYPE_CHECKING:  # a type checker finds a missing name itself
        __getattr__ = missing_members(_FOREIGN_NAMES)

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype in which gradients are summed over ranks: with a codec, the dtype of the decoded sum."""
        return torch.float32 if isinstance(self.reduce, Codec) else self.reduce

    @property
    def has_master_shards(self) -> bool:
        """Whether shards of parameters are the master weights, in a wider dtype than gathers send."""
        return self.shard not in (None, self.param)

    def leaf_dtype(self, path: str, leaf: torch.Tensor) -> torch.dtype:
        """Return the dtype that the policy gives a parameter: its own if that is not a floating-point dtype."""
        if not leaf.is_floating_point():
            return leaf.dtype
        return self.master if self.full is not None and self.full(path, leaf) else self.param

    def cast(self, params: Tree) -> Tree:
        """Cast a tree of parameters to the policy's dtypes; a sharded unit gets the dtype in its spec, or `shard`.

        `step.init(params, optim.master_weights(opt, precision))` casts the parameters after it made the master weights.
        If the cast came first, the masters would start from rounded values.
        """
        return tree.map(lambda x, like: x.to(like.dtype), params, self.dtype_tree(params))

    def dtype_tree(self, params: Tree) -> Tree:
        """Return a tree like `params`, on any layout, of empty meta tensors with the policy's dtypes."""
        paths, entries, structure = tree.flatten_with_paths(params, is_box)
        empty_leaves: dict[int, torch.Tensor] = {}  # a tied leaf has the dtype of its first path
        for i, (path, x) in enumerate(zip(paths, entries, strict=True)):
            if isinstance(x, Shard):
                empty = torch.empty(0, dtype=self._shard_dtype(x), device="meta")
                entries[i] = make_box(x.spec_id, [empty] * len(x.pieces))
            elif isinstance(x, torch.Tensor):
                if id(x) not in empty_leaves:
                    empty_leaves[id(x)] = torch.empty(0, dtype=self.leaf_dtype(path, x), device="meta")
                entries[i] = empty_leaves[id(x)]
        return tree.unflatten(structure, entries)

    def to_param(self, params: Tree) -> Tree:
        """Cast shards that are master weights to `param`, for a forward pass outside `fzero.value_and_grad`.

        Example:
            >>> import fzero
            >>> precision = Precision(param=torch.bfloat16, shard=torch.float32)
            >>> step = fzero.shard(lambda p, s, x: (p, s), stage=3, mesh=fzero.mesh(dp=2))
            >>> params, _ = step.init({"w": torch.ones(4)}, fzero.optim.master_weights(fzero.optim.sgd(0.1), precision))
            >>> step.gather(params), step.gather(precision.to_param(params))
            ({'w': tensor([1., 1., 1., 1.])}, {'w': tensor([1., 1., 1., 1.], dtype=torch.bfloat16)})
        """

        def narrow(x: Any) -> Any:
            dtype = traced_spec(x.spec_id).dtype if isinstance(x, Shard) else None
            is_master = dtype == self.param and x.dtype == self.shard
            return tree.map(lambda data: data.to(dtype), x) if is_master else x

        entries, structure = tree.flatten(params, is_box)
        return tree.unflatten(structure, [narrow(x) for x in entries])

    def _shard_dtype(self, x: Shard) -> torch.dtype:
        """Return the dtype of a shard: that of its unit, or `shard` if it is sharded between steps and has this dtype.

        A shard of stage 1 or 2 is part of full leaves, its origin. When the masters are made, it has their dtype, too.
        """
        spec = traced_spec(x.spec_id)
        is_master = self.shard is not None and spec.dtype == self.param and x.dtype == self.shard
        return x.dtype if is_master and spec.axes and x.origin is None else spec.dtype

    def gradients(self, dtype: torch.dtype) -> _GradientDtypes:
        """Return the dtypes in which gradients of parameters of this dtype are summed, over ranks and micro-batches.

        The gradient of a full-precision leaf is never narrower than the leaf.
        """
        policy = _GradientDtypes(self.reduce_dtype, self.grad or self.reduce_dtype)
        if dtype == self.param:
            keys = [x.key if isinstance(x, Codec) else None for x in (self.gather, self.reduce)]
            return _GradientDtypes(*policy[:2], *keys)
        return _GradientDtypes(torch.promote_types(policy.reduce, dtype), torch.promote_types(policy.grad, dtype))

    def check(self, name: str, paths: Sequence[str], entries: Sequence[Any]) -> None:
        """Check that parameters have the policy's dtypes; with other dtypes the policy would silently do nothing.

        Raises:
            TypeError: if a parameter has another dtype. The message names the parameter.
        """
        expected: dict[Any, torch.dtype] = {}  # a tied leaf has the dtype of its first path
        for path, x in zip(paths, entries, strict=True):
            leaf, key = x, id(x)
            if isinstance(x, Shard | Slot):
                index = x.index if isinstance(x, Slot) else 0
                shape, key = traced_spec(x.spec_id).full_shapes[index], (x.spec_id, index)
                leaf = torch.empty(shape, dtype=traced_spec(x.spec_id).dtype, device="meta")
            if not isinstance(leaf, torch.Tensor):
                continue
            if key not in expected:
                expected[key] = self.leaf_dtype(path, leaf)
            dtype, of_policy = leaf.dtype, expected[key]
            if isinstance(x, Shard) and dtype == of_policy:
                dtype, of_policy = x.dtype, self._shard_dtype(x)
            if dtype != of_policy:
                raise TypeError(
                    f"{name}: leaf {path!r} is {dtype}, and precision= says {of_policy}: start with "
                    "params, opt_state = step.init(params, optim.master_weights(opt, precision)); unsharded, params = "
                    "precision.cast(params) after opt.init(params)"
                )
