"""remat: a block saves only its inputs for the backward pass, and runs again there.

The algorithm has five parts:

1. A call of the block becomes a function of distinct tensors; its arguments hold indices in place of tensors
   (`_block_call`).
2. One autograd Function runs the call below all transforms of torch.func, where nothing is tracked or kept alive.
   Guards refuse tensors that the block captures or stores elsewhere, since their gradients would be lost
   (`_remat_guards`).
3. This first run records the results of random draws and of selected operations (`_remat_tape`). They become outputs
   of the Function, and inputs of its backward pass.
4. A derivative is a `Computation`: the call, and the steps that derive it (`_derivation_steps`). A step is a vjp, a
   jvp or a map over a batch. The computation runs the block again inside these transforms, and replays the recording.
5. The backward pass, the jvp and the vmap rule of the Function apply the same Function to the computation that they
   derive. So every order of differentiation saves only inputs, with `save="host"` in host memory.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from fzero._arguments import check_callable, check_remat
from fzero._torch import in_transform
from fzero._tracebacks import api_boundary
from fzero.random import call_with_key, next_key
from fzero.transforms._block_call import flatten_call, gather_and_call
from fzero.transforms._remat_runs import Computation, RematFunction
from fzero.transforms._remat_tape import SaveFilter, is_matmul

__all__ = ["remat"]


@api_boundary
def remat(block: Callable[..., Any], save: str | SaveFilter | None = None) -> Callable[..., Any]:
    """Make a function that computes `block`, and runs it again in the backward pass instead of saving its residuals.

    Between the passes only the block's arguments are alive (activation checkpointing). Arguments may hold boxes: the
    block receives full leaves, which are gathered for it alone, and gathered again for the backward pass. So
    `fzero.remat(block)(params["blocks"][i], x)` inside `value_and_grad(loss_fn, gather=False)` holds the full
    parameters of one block at a time. Derivatives of any order, `vmap`, and plain autograd work, and `remat` nests.

    Random numbers that the block draws from torch's generators are saved for the second run, one byte per element of a
    dropout mask. Draws by a key (`fzero.random`, also in an outer `seeded` function) cost no memory. Under
    `torch.compile` the block is called directly: the compiler decides which operations to recompute.

    Args:
        block: a pure function of trees. All differentiated tensors must be arguments; constants may be captured.
        save: the results to save besides the arguments; None for none. "matmuls" saves the results of matrix products,
            convolutions and attention, so that only cheap operations are recomputed. A function receives an aten
            operation (`torch.ops.aten.mm.default`) and returns whether to save its results. Forward-mode derivatives
            (`jvp`) recompute saved results. "host" saves only the arguments, and offloads those that earlier blocks
            computed to host memory until the backward pass; parameters stay where they are.

    Returns:
        A function of the block's arguments.

    Raises:
        ValueError: if the block uses a tensor that is not an argument, but requires grad or is tracked by a running
            transform. Also if the block stores a tensor, computed from its arguments, outside its result: in an
            attribute, a list, or a hook that collects tensors. Also if `save` is not one of the values above.
        TypeError: if an argument or a result holds an object that is neither a tensor nor a simple constant. The block
            would write twice into such an object, for example into the key-value cache of a language model.
        RuntimeError: if the block writes into an argument in place, or its second run does not run the operations whose
            results were saved.

    Example:
        >>> import torch
        >>> def block(p, x):
        ...     return x + torch.tanh(x @ p["w"])
        >>> p, x = {"w": torch.eye(2)}, torch.ones(1, 2)
        >>> loss = lambda p: remat(block)(p, x).sum()
        >>> torch.func.grad(loss)(p)["w"].equal(torch.func.grad(lambda p: block(p, x).sum())(p)["w"])
        True
    """
    check_callable("block", block, "a function, as in fzero.remat(block)(params, x)")
    check_remat("save", save)
    uses_host = save == "host"
    is_saved_op = is_matmul if save == "matmuls" else None
    save_filter = is_saved_op if isinstance(save, str) else save

    @functools.wraps(block)
    def seeded_block(key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return call_with_key(key, block, *args, **kwargs)

    def run_block(*args: Any, **kwargs: Any) -> Any:
        key = next_key()  # inside a seeded function: both runs draw from this key, which becomes an argument
        f, args = (block, args) if key is None else (seeded_block, (key, *args))
        if torch.compiler.is_dynamo_compiling() or not (torch.is_grad_enabled() or in_transform()):
            return gather_and_call(f, args, kwargs)
        call, tensors = flatten_call(f, save_filter, args, kwargs, uses_host)
        info, *outputs = RematFunction.apply(Computation(call), *tensors)  # pyright: ignore[reportGeneralTypeIssues]
        return info.recording.result.restore(outputs)

    return run_block
