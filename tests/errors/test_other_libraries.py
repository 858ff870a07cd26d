"""Names that DeepSpeed, FSDP2, optax, JAX and equinox have are answered with what fzero has in their place."""

from typing import Any

import pytest
import torch

import fzero
from fzero import data, optim
from tests.errors.helpers import TRAIN_STEP, TWO, init, run, step_of

ANY: Any = 3.0
STEP = step_of(3)
BATCHES = data.batches([1, 2], TWO, global_batch=2)
MODULE = torch.nn.Linear(2, 2)


def run_with(program: Any) -> Any:
    """Run a step that does one wrong thing."""
    return run(3, *init(3), train_step=lambda params, state, x: (params, state, program(params, x)))


NAMES: dict[str, tuple[Any, str, str]] = {
    "FSDP": (fzero, "FSDP", "here it is fzero.shard(train_step, stage=3, mesh=mesh)"),
    "fully_shard": (fzero, "fully_shard", "here it is fzero.shard(train_step, stage=3"),
    "DDP": (fzero, "DDP", "here it is fzero.shard(train_step, stage=0"),
    "a device mesh": (fzero, "init_device_mesh", "here it is fzero.mesh(dp=4)"),
    "DeepSpeed's engine": (fzero, "initialize", "here it is fzero.shard(train_step, stage=2"),
    "a policy of FSDP2": (fzero, "MixedPrecisionPolicy", "here it is fzero.Precision, in"),
    "no_sync": (fzero, "no_sync", "here it is fzero.value_and_grad(loss_fn, micro_batches=4)"),
    "a checkpoint of DeepSpeed": (fzero, "save_checkpoint", "here it is fzero.save(path, values)"),
    "equinox's jit": (fzero, "filter_jit", "here it is fzero.jit"),
    "JAX's grad": (fzero, "grad", "here it is fzero.value_and_grad, or torch.func.grad"),
    "a map over trees": (fzero, "tree_map", "here it is fzero.tree.map"),
    "a spec of JAX": (fzero, "PartitionSpec", "here it is a rule of split="),
    "full parameters": (fzero, "GatheredParameters", "here it is step.gather(params)"),
    "a wrapper of remat": (fzero, "checkpoint_wrapper", "here it is fzero.remat(fn)"),
    "gradients set to zero": (fzero, "zero_grad", "fzero.value_and_grad returns gradients and keeps none"),
    "a fused optimizer": (fzero, "FusedAdam", "here it is fzero.optim.adamw"),
    "a key of JAX": (fzero, "PRNGKey", "here it is fzero.random.key"),
    "a schedule of torch": (optim, "LambdaLR", "a function from the step's count to a rate"),
    "a collective of torch": (fzero, "all_reduce", "here it is fzero.collectives.psum"),
    "a scaler of torch": (optim, "GradScaler", "here it is fzero.optim.dynamic_loss_scale"),
    "a nearest name": (fzero, "value_and_grads", "did you mean fzero.value_and_grad?"),
    "a cosine schedule of optax": (optim, "cosine_decay_schedule", "here it is fzero.optim.warmup_cosine"),
    "optax's check": (optim, "apply_if_finite", "here it is fzero.optim.dynamic_loss_scale"),
    "backward of an engine": (STEP, "backward", "fzero.value_and_grad(loss_fn)(params, batch) within train_step"),
    "step of an engine": (STEP, "step", "here it is a call: params, opt_state, loss = step("),
    "parameters of a module": (STEP, "parameters", "step.gather(params) makes the parameters full"),
    "a state dict": (STEP, "state_dict", "fzero.save(path, values, mesh) saves them in any layout"),
    "a state dict of a jitted step": (fzero.jit(STEP), "state_dict", "fzero.save(path, values, mesh)"),
    "the groups of a device mesh": (TWO, "get_group", "mesh.device_mesh has the process groups"),
    "a rank of a device mesh": (TWO, "get_local_rank", "here it is mesh.index(axis), and within a step"),
}
CALLS: dict[str, tuple[Any, str]] = {
    "reshard_after_forward": (lambda more: step_of(3, **more), "is the stage's: 3 gathers a unit again"),
    "mp_policy": (lambda more: step_of(3, **more), "fzero.optim.master_weights(opt, precision)"),
    "cpu_offload": (lambda more: step_of(3, **more), "fzero.optim.offload(opt, ratio)"),
    "offload_optimizer": (lambda more: step_of(3, **more), "fzero.optim.offload(opt, ratio)"),
    "gradient_clipping": (lambda more: step_of(3, **more), "fzero.optim.clip_by_global_norm"),
    "config": (lambda more: fzero.shard(TRAIN_STEP, **more), "as docs/vocabulary.md lists them"),
    "device_mesh": (lambda more: fzero.shard(TRAIN_STEP, **more), "did you mean mesh=, not device_mesh=?"),
    "use_reentrant": (lambda more: fzero.remat(TRAIN_STEP, **more), "not needed: blocks run again under torch.func"),
    "micro_batches": (lambda more: step_of(3, **more), "fzero.value_and_grad(loss_fn, micro_batches=4)"),
    "static_argnums": (lambda more: fzero.jit(TRAIN_STEP, **more), "arguments that are no tensors are constants"),
    "donate_argnums": (lambda more: fzero.jit(TRAIN_STEP, **more), "did you mean donate=, not donate_argnums=?"),
}
RAISED: dict[str, tuple[Any, str]] = {
    "the state of a module": (lambda: optim.adamw(0.1).init(MODULE), "dict(module.named_parameters())"),
    "the state of a generator": (lambda: optim.adamw(0.1).init(MODULE.parameters()), "was given a generator as params"),
    "a state of nothing": (lambda: optim.adamw(0.1).init(), "opt.init(params) makes the state"),  # pyright: ignore
    "backward within a step": (
        lambda: run_with(lambda params, x: fzero.gather(params)["c"].sum().backward()),
        "A step has no tape of autograd: loss, grads = fzero.value_and_grad",
    ),
    "the output of apply as a tensor": (
        lambda: run_with(lambda params, x: (x, {}).mean()),  # pyright: ignore
        "apply of fzero.nn.functional returns (output, buffers)",
    ),
    "epochs without end": (lambda: [*BATCHES], "for i, batch in data.steps(0, n) takes n of them"),
    "a number of steps as a float": (lambda: BATCHES.steps(0, ANY), "expected numbers of steps, ints"),
    "a seed of another type": (
        lambda: data.batches([1, 2], TWO, global_batch=2, seed="a"),
        "seed='a': expected an int",
    ),  # pyright: ignore
    "a batch that is split twice": (lambda: TWO.split(TWO.split(torch.ones(4))), "which is split already"),
    "a step that is sharded twice": (lambda: fzero.shard(STEP, 3, TWO), "sharded already: step.train_step"),
    "the number of a step to restore": (
        lambda: fzero.checkpoint.checkpoints("/nowhere").restore(4),
        "like=4: expected the tree to read into, checkpoints.restore(like) of the newest step",
    ),
    "weights of torch.load": (
        lambda: fzero.load("/nowhere", {}, weights_only=True),  # pyright: ignore
        "weights_only= is not needed: a checkpoint of fzero holds no pickles",
    ),
    "overwrite of Orbax": (
        lambda: fzero.save("/nowhere", {}, overwrite=True),  # pyright: ignore
        "overwrite= is not needed: a save replaces the folder's checkpoint",
    ),
    "a factor of text": (lambda: optim.scale("x"), "factor='x': expected a number; a string"),  # pyright: ignore
    "the weight of a linear module": (
        lambda: fzero.parallel.tensor.row(torch.ones(2, 3), torch.ones(4, 3)),
        "x is [2, 3] and w [4, 3]: expected x [.., f / n] and w [f / n, d]; the weight of a torch.nn.Linear is transp",
    ),
    "the weight of a linear module in front": (
        lambda: fzero.parallel.tensor.column(torch.ones(2, 3), torch.ones(4, 3)),
        "expected x [.., d] and w [d, f / n]; the weight of a torch.nn.Linear is transposed, so pass weight.mT",
    ),
    "a constant schedule of text": (lambda: optim.constant("1"), "value='1': expected a number"),  # pyright: ignore
    "a peak of optax": (
        lambda: optim.warmup_cosine(peak_value=1.0, warmup_steps=1, total_steps=2),  # pyright: ignore
        "did you mean peak=, not peak_value=?",
    ),
    "a batch in place of batches": (
        lambda: fzero.testing.assert_equivalent(TRAIN_STEP, {}, optim.sgd(0.1), {"x": torch.ones(2)}),  # pyright: ignore
        "batches is a dict: expected a list of global batches",
    ),
    "a process's number within a simulation": (
        lambda: run_with(lambda params, x: torch.distributed.get_rank()),
        "Simulated ranks have no process group: fzero.collectives has the collectives",
    ),
}


@pytest.mark.parametrize("case", NAMES)
def test_a_name_of_another_library_is_answered_with_the_right_one(case):
    value, name, hint = NAMES[case]
    with pytest.raises(AttributeError) as caught:
        getattr(value, name)
    assert hint in str(caught.value)
    assert not hasattr(value, "_none")


@pytest.mark.parametrize("argument", CALLS)
def test_an_argument_of_another_library_is_answered_with_the_right_one(argument):
    call, hint = CALLS[argument]
    with pytest.raises(TypeError) as caught:
        call({argument: ANY})
    assert hint in caught.value.__notes__[0]


@pytest.mark.parametrize("case", RAISED)
def test_a_habit_of_another_library_is_answered_with_the_right_one(case):
    action, hint = RAISED[case]
    with pytest.raises((TypeError, RuntimeError, ValueError, AttributeError)) as caught:
        action()
    assert any(hint in text for text in (str(caught.value), *getattr(caught.value, "__notes__", ())))
