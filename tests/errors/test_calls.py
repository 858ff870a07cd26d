"""Calls with wrong arguments: the error has fzero's word for the argument, or an example of the call."""

from typing import Any

import pytest
import torch

import fzero
from fzero import optim
from fzero._call_hints import _find_example
from fzero._tracebacks import api_boundary
from tests.errors.helpers import OPT, PARAMS, TRAIN_STEP, TWO, X, init, run, step_of
from tests.public_names import OF_FZERO, public_names

STEP = step_of(3)


def in_a_step(program: Any) -> Any:
    """Run a step that makes a wrong call."""
    return run(3, *init(3), train_step=lambda params, state, x: (params, state, program(x)))


# What is called first, with arguments missing, unknown or of another library.
CALLS: dict[str, tuple[Any, str]] = {
    "shard without a stage": (lambda: fzero.shard(TRAIN_STEP), "for example, fzero.shard(train_step, stage=2"),
    "shard of nothing": (lambda: fzero.shard(), "for example, fzero.shard(train_step, stage=2, mesh=mesh)"),
    "zero_stage": (lambda: fzero.shard(TRAIN_STEP, zero_stage=2), "did you mean stage=, not zero_stage=?"),
    "num_microbatches of shard": (
        lambda: step_of(3, num_microbatches=2),
        "num_microbatches= is fzero.value_and_grad(loss_fn, micro_batches=4)",
    ),
    "max_norm of shard": (lambda: step_of(3, max_norm=1.0), "max_norm= is the optimizer's: fzero.optim.chain("),
    "jit of nothing": (lambda: fzero.jit(), "for example, "),
    "value_and_grad of nothing": (lambda: fzero.value_and_grad(), "for example, fzero.value_and_grad("),
    "adamw of nothing": (lambda: optim.adamw(), "for example, adamw(3e-4, mask="),
    "a schedule without steps": (lambda: optim.warmup_cosine(1e-3), "for example, warmup_cosine("),
    "a clip without a norm": (lambda: optim.clip_by_global_norm(), "for example, "),
    "init without an optimizer": (lambda: STEP.init(PARAMS), "for example, step.init("),
    "gather of nothing": (lambda: STEP.gather(), "gather takes one tree: step.gather((params, opt_state))"),
    "update without a state": (
        lambda: OPT.update(PARAMS),
        "The arguments are opt.update(grads, opt_state, params)",
    ),
    "split of nothing": (lambda: TWO.split(), "for example, "),
    "save without values": (lambda: fzero.save("/nowhere"), "for example, fzero.save("),
    "load without a tree": (lambda: fzero.load("/nowhere"), "for example, fzero.load("),
    "batches without a mesh": (lambda: fzero.data.batches(X), "for example, "),
    "batch_size": (
        lambda: fzero.data.batches(X, TWO, batch_size=2),
        "global_batch=, not batch_size=",
    ),
    "a mesh by position": (lambda: fzero.mesh(4), "Give each axis a name: fzero.mesh(dp=4)"),
    "evaluate of nothing": (lambda: fzero.evaluate(), "evaluate(step, f) returns a program"),
    "tune of a step": (lambda: fzero.tune(STEP), "for example, fzero.tune(make_step, world_size=8, global_batch=64"),
    "an elastic run of a step": (
        lambda: fzero.elastic.run(TRAIN_STEP, "/nowhere"),
        'for example, fzero.elastic.run(train, "runs/gpt", steps=1000',
    ),
    "remat of nothing": (lambda: fzero.remat(), "for example, "),
    "a policy without a dtype": (lambda: fzero.Precision(), "for example, Precision(param=torch.bfloat16"),
    "param_dtype of FSDP2": (lambda: fzero.Precision(param_dtype=torch.bfloat16), "did you mean param=, not param_d"),
    "axis_name of psum": (lambda: fzero.collectives.psum(X, axis_name="dp"), "did you mean axis=, not axis_name=?"),
    "axis_name in a step": (
        lambda: in_a_step(lambda x: fzero.collectives.pmean(x, axis_name="dp")),
        "did you mean axis=, not axis_name=?",
    ),
    "group of torch": (
        lambda: fzero.collectives.all_gather(X, group=None),
        "did you mean axis=, not group=?",
    ),
    "tiled of JAX": (
        lambda: fzero.collectives.all_gather(X, "dp", tiled=True),
        "tiled= is not needed: a gather concatenates, and never stacks",
    ),
    "scatter_dimension of JAX": (
        lambda: fzero.collectives.psum_scatter(X, "dp", scatter_dimension=1),
        "did you mean dim=, not scatter_dimension=?",
    ),
    "split_axis of JAX": (
        lambda: fzero.collectives.all_to_all(X, "dp", split_axis=1, concat_axis=0),
        "did you mean split_dim=, not split_axis=?; did you mean concat_dim=, not concat_axis=?",
    ),
    "a source of torch": (lambda: fzero.collectives.broadcast(X, src=0), "did you mean source=, not src=?"),
    "a permutation without pairs": (
        lambda: fzero.collectives.ppermute(X, "dp"),
        'for example, fzero.collectives.ppermute(x, "dp", perm=',
    ),
    "psum of nothing": (lambda: fzero.collectives.psum(), "for example, fzero.collectives.psum("),
    "the bits of a codec": (lambda: fzero.codecs.int8(bits=4), "the arguments are block, rounding"),
    "fullgraph of torch": (lambda: fzero.jit(STEP, fullgraph=True), "did you mean strict=, not fullgraph=?"),
    "tensor_parallel of DeepSpeed": (
        lambda: step_of(3, tensor_parallel=2),
        "tensor_parallel= is an axis of the mesh, such as tp of fzero.mesh(dp=2, tp=2)",
    ),
    "bf16 of DeepSpeed": (lambda: step_of(3, bf16=True), "bf16= is fzero.Precision's: fzero.optim.master_weights("),
    "auto_wrap_policy of FSDP": (lambda: step_of(3, auto_wrap_policy=len), "did you mean units=, not auto_wrap_policy"),
    "a scheduler of DeepSpeed": (
        lambda: step_of(3, scheduler=len),
        "scheduler= is the optimizer's rate: fzero.optim.adamw(fzero.optim.warmup_cosine(",
    ),
    "find_unused_parameters of DDP": (
        lambda: step_of(3, find_unused_parameters=True),
        "find_unused_parameters= is not needed",
    ),
    "in_specs of JAX": (lambda: TWO.spmd(len, in_specs=()), "in_specs= is not needed: a PerRank or a Shard differs"),
    "an input in place of parameters": (
        lambda: fzero.nn.functional(torch.nn.Linear(2, 2))[0](X),  # pyright: ignore
        "The call is apply(params, buffers, x), with all three results of apply, params, buffers = nn.functional(",
    ),
    "an input in place of a method's parameters": (
        lambda: fzero.nn.functional(torch.nn.Linear(2, 2))[0].method(len)(X),  # pyright: ignore
        "The call is apply(params, buffers, x), with all three results of",
    ),
    "a generator of torch": (
        lambda: fzero.random.normal(fzero.random.key(0), (2,), generator=None),
        "generator= is the first argument, a key: fzero.random.key(0)",
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_wrong_call_is_answered_with_the_right_one(case):
    call, hint = CALLS[case]
    with pytest.raises(TypeError) as caught:
        call()
    texts = [str(caught.value), *getattr(caught.value, "__notes__", ())]
    assert any(hint in text for text in texts), texts


def test_an_error_within_a_function_gets_no_hint_of_a_call():
    def takes_two(x: Any, y: Any) -> Any:
        return x + y

    @api_boundary
    def outer() -> Any:
        """Call another function of its name.

        >>> outer(1)
        """
        return inner()

    def inner(x: Any) -> Any:
        return x

    inner.__qualname__ = "outer"
    for call in (lambda: fzero.tree.map(takes_two, {"w": 1}), outer):
        with pytest.raises(TypeError, match="missing 1 required positional argument") as caught:
            call()
        assert not any("example" in note for note in getattr(caught.value, "__notes__", ()))
    with pytest.raises(TypeError, match="takes 0 positional arguments") as caught:
        outer(2)  # pyright: ignore
    assert caught.value.__notes__ == ["for example, outer(1)"]


def test_nearly_every_public_function_has_an_example_of_its_call():
    names = {name: value for name, value in public_names(OF_FZERO).items() if hasattr(value, "__wrapped__")}
    lacking = [name for name, value in names.items() if f"{value.__name__}(" not in _find_example(value)]
    assert len(lacking) <= 8, lacking  # the others are passed to mesh.spmd
