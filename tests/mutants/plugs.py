"""Faults in fzero/plugs, and in what was made for it."""

from tests.mutants.changes import always, becomes, dropped, skipped
from tests.mutants.mutant import Fault, File

TRAINER = ("tests/plugs/test_transformers.py",)
LIGHTNING = ("tests/plugs/test_lightning.py", "-k", "not processes")
ACCELERATE = ("tests/plugs/test_accelerate.py", "-k", "not processes")
HOOKS = ("tests/plugs/test_forward_hooks.py",)
IN_PLACE = ("tests/nn/test_in_place.py",)
AUTOGRAD = ("tests/transforms/test_autograd.py",)

MUTANTS = [
    *File("plugs/transformers.py", TRAINER).faults(
        Fault(
            "a trainer's micro-batches are kept for the next step",
            "_ShardedTrainer.training_step",
            skipped("state.micro_batches.clear()"),
        ),
        Fault("dropout stays off after an evaluation", "_ShardedTrainer.training_step", skipped("model.train()")),
        Fault(
            "a loss per micro-batch is not divided by their number",
            "_compute_loss",
            becomes("loss / batch[_COUNT]", "loss"),
        ),
        Fault(
            "micro-batches of a step that a callback stopped are used by the next run",
            "_ShardedTrainer._inner_training_loop",
            skipped("self._fzero.grads = None"),
        ),
        Fault("the best model is not loaded", "_ShardedTrainer._load_best_model", skipped("A.load(B)")),
    ),
    *File("plugs/_engine.py", TRAINER).faults(
        Fault(
            "a resumed run does not read its state",
            "Engine.load",
            becomes("load(folder, self._checkpoint_tree(), self.mesh)", "self._checkpoint_tree()"),
        ),
        Fault(
            "half-precision parameters are saved in place of their masters",
            "Engine._exact_params",
            becomes("self.precision is None", "True"),
        ),
    ),
    *File("plugs/_loop_step.py", TRAINER).faults(
        Fault(
            "running statistics of a micro-batch are dropped", "LoopStep.gradients", becomes("pmean(new)", "buffers")
        ),
        Fault("the losses of ranks are summed", "LoopStep.gradients", becomes("loss / self.ranks", "loss")),
    ),
    *File("plugs/lightning.py", LIGHTNING).faults(
        Fault(
            "a Lightning step forgets its earlier micro-batches",
            "Strategy.backward",
            becomes("self._grads is None", "True"),
        ),
        Fault(
            "gradients outlive zero_grad",
            "Strategy._zero_grad",
            becomes("(None, True)", "(self._grads, True)"),
        ),
        Fault(
            "a Lightning loss is not divided by the number of batches",
            "Strategy._loss",
            becomes("loss / self._trainer.accumulate_grad_batches", "loss"),
        ),
        Fault(
            "the shards of a removed checkpoint stay",
            "Strategy.remove_checkpoint",
            skipped("self.checkpoint_io.remove_checkpoint(A)"),
        ),
        Fault(
            "the shards of a linked checkpoint are not found",
            "Strategy.load_checkpoint",
            becomes("os.path.realpath(path)", "path"),
        ),
        Fault(
            "a Lightning module gets no weights back", "Strategy.teardown", skipped("self._engine.restore_weights()")
        ),
    ),
    *File("plugs/_engine.py", ("tests/plugs/test_lightning.py", "-k", "processes")).faults(
        Fault(
            "each rank keeps its own first weights",
            "_copy_from_first_rank",
            skipped("torch.distributed.broadcast(on_device, 0)"),
        ),
    ),
    *File("plugs/accelerate.py", ACCELERATE).faults(
        Fault("a step of Accelerate keeps its micro-batches", "Step.__call__", skipped("self._micro_batches.clear()")),
        Fault("evaluation turns dropout off for good", "Step.evaluate", skipped("m.training = mode")),
        Fault(
            "the mean loss counts absent micro-batches",
            "Step.__call__",
            becomes("self._accelerator.gradient_accumulation_steps / len(batches)", "1"),
        ),
        Fault(
            "a loss of Accelerate is not divided",
            "shard_loop",
            becomes("loss(A, B) / accelerator.gradient_accumulation_steps", "loss(A, B)"),
        ),
        Fault("load_state loads no shards", "_load_engine", skipped("engine.load(folder)")),
    ),
    *File("plugs/_engine.py", ACCELERATE).faults(
        Fault("evaluation runs in full precision", "Engine.call", becomes("self.precision is None", "True")),
        Fault(
            "a state with master weights as shards loads at stage 3 alone",
            "Engine._checkpoint_tree",
            becomes("A._with_masters(B, C, 'in the state')", "B, C"),
        ),
        Fault(
            "a loaded state keeps masters beside its shards",
            "Engine.load",
            skipped("A, B = self._with_masters(C, D, 'as shards')"),
        ),
    ),
    *File("plugs/_half_precision.py", LIGHTNING).faults(
        Fault("half-precision shards lie beside their masters", "half_precision", dropped("shard=torch.float32")),
    ),
    *File("plugs/_engine.py", LIGHTNING).faults(
        Fault("half precision rounds frozen weights for good", "_exact_frozen", always("not A")),
        Fault("evaluation is recorded by autograd", "Engine.call", becomes("torch.no_grad()", "torch.enable_grad()")),
    ),
    *File("plugs/_stand_ins.py", TRAINER).faults(
        Fault(
            "a callback changes weights that are not there",
            "_StandIn.__torch_function__",
            becomes("not is_read", "False"),
        ),
        Fault(
            "a callback freezes a parameter that goes on training",
            "_StandIn.__torch_function__",
            becomes("arguments != stand_in.requires_grad", "False"),
        ),
    ),
    *File("plugs/_lightning_settings.py", LIGHTNING).faults(
        Fault(
            "clipping by value is by norm", "clipping", becomes('trainer.gradient_clip_algorithm == "value"', "False")
        ),
    ),
    *File("nn/_in_place.py", IN_PLACE).faults(
        Fault(
            "blocks run twice in a module that has its weights again",
            "put_back",
            skipped("undo_remat_blocks(apply.module, apply.blocks)"),
        ),
        Fault(
            "a recurrent module in place keeps no weights",
            "functional_in_place",
            skipped("refresh_flat_weights(module)"),
        ),
    ),
    *File("plugs/_engine.py", TRAINER).faults(
        Fault("the given model keeps its memory", "_release_modules", skipped('module.to("meta")')),
    ),
    *File("plugs/_param_groups.py", ("tests/plugs/test_used_up.py",)).faults(
        Fault(
            "a loop without shards resumes without moments",
            "_add_mark",
            becomes("[*state_dict['param_groups'], mark]", "[*state_dict['param_groups']]"),
        ),
    ),
    *File("plugs/_forward_hooks.py", HOOKS).faults(
        Fault(
            "a compiled step ignores a hook that was added", "check_hooks", becomes("hooks == compiled_hooks", "True")
        ),
    ),
    *File("plugs/_engine.py", ("tests/plugs/test_routers.py",)).faults(
        Fault(
            "blocks that lose the logits of routers run again",
            "_choose_step_models",
            becomes("not collects_router_logits", "True"),
        ),
    ),
    *File("plugs/_param_groups.py", TRAINER).faults(
        Fault(
            "a group's weight decay reaches all groups",
            "ParamGroups._group_optimizer",
            becomes("name in members", "True"),
        ),
        Fault(
            "a schedule of betas is not seen", "ParamGroups.rates", becomes("group[name] != value", "False"), LIGHTNING
        ),
        Fault("Adam's weight decay is decoupled", "_make_base", becomes("not group.get(A, B)", "False")),
    ),
    *File("transforms/_accumulate.py", AUTOGRAD).faults(
        Fault("autograd's loss keeps its graph", "_value_and_grad_by_autograd", becomes("loss.detach()", "loss")),
    ),
    *File("nn/_apply.py", ("tests/nn/test_functional.py",)).faults(
        Fault(
            "a method that is made anew at each call is kept",
            "Apply._run_and_check_writes",
            becomes('getattr(f, "__code__", f)', "f"),
        ),
    ),
]
