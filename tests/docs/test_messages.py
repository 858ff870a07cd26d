"""docs/trouble.md lists messages by their text: each is provoked here, by the mistake of a newcomer's script."""

import io
import logging
import pathlib
import random
import re
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fzero
from fzero import _notice, optim
from fzero.parallel import context
from tests.distributed.launch import ROOT, world
from tests.helpers import LEAST, train_step_for

MESH, OTHER_MESH = fzero.mesh(dp=2), fzero.mesh(dp=4)
OPT = optim.adamw(0.1)
BFLOAT16 = fzero.Precision(param=torch.bfloat16)


def masters() -> optim.Optimizer:
    return optim.master_weights(OPT, BFLOAT16)


def data(**changed: Any) -> dict[str, Any]:
    return {"x": torch.ones(8, 4), "y": torch.ones(8, 3), **changed}


def make() -> dict[str, torch.Tensor]:
    return {"w": torch.full((4, 5), 0.1), "v": torch.full((5, 3), 0.1)}


def loss_fn(params: Any, batch: Any) -> torch.Tensor:
    return (torch.tanh(batch["x"] @ params["w"]) @ params["v"] - batch["y"]).square().mean()


TRAIN_STEP = train_step_for(loss_fn, OPT)


def step_of(train_step: Any = TRAIN_STEP, stage: Any = 2, mesh: Any = MESH) -> fzero.zero.ShardedStep:
    return fzero.shard(train_step, stage, mesh)


def run(train_step: Any = TRAIN_STEP, stage: int = 2, batch: Any = None, opt: Any = OPT, params: Any = None) -> Any:
    """The loop of the README, one step."""
    step = step_of(train_step, stage)
    params, opt_state = step.init(make() if params is None else params, opt)
    return fzero.jit(step, backend="fx", **LEAST)(params, opt_state, MESH.split(data()) if batch is None else batch)


def with_loss(loss: Callable[..., Any], **options: Any) -> Any:
    return run(train_step_for(loss, OPT, **options))


def ending(end: Callable[[Any, Any, Any, Any, Any], Any]) -> Callable[..., Any]:
    """A train step that computes gradients, and then does `end(params, opt_state, loss, grads, batch)`."""

    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = fzero.value_and_grad(loss_fn)(params, batch)
        return end(params, opt_state, loss, grads, batch)

    return train_step


def run_twice_with_noise() -> None:
    """A step that draws other numbers in its second run."""
    train_step = ending(lambda params, state, loss, grads, batch: (params, state, fzero.PerRank(torch.rand(2))))
    step = fzero.shard(train_step, 2, MESH, check=fzero.zero.Rerun())
    step(*step.init(make(), OPT), MESH.split(data()))


def updated(params: Any, opt_state: Any, grads: Any) -> Any:
    updates, opt_state = OPT.update(grads, opt_state, params)
    return optim.apply_updates(params, updates), opt_state


def saved(tree: Any) -> str:
    folder = tempfile.mkdtemp()
    fzero.save(folder, tree)
    return folder


def with_a_counter() -> Any:
    count = 0

    def counting(params: Any, opt_state: Any, batch: Any) -> Any:
        nonlocal count
        count += 1
        return TRAIN_STEP(params, opt_state, batch)

    return run(counting)


def with_samples_over_cp() -> Any:
    mesh = fzero.mesh(dp=2, cp=2)
    x = torch.zeros(4, 1, 2, 4)
    return mesh.spmd(lambda x: fzero.PerRank(context.attention(x, x, x)))(mesh.split(x))


def with_a_list() -> Any:
    losses: list[Any] = []

    def appending(params: Any, opt_state: Any, batch: Any) -> Any:
        params, opt_state, loss = TRAIN_STEP(params, opt_state, batch)
        losses.append(loss)
        return params, opt_state, loss

    return run(appending)


def with_old_results() -> Any:
    step = step_of()
    params, opt_state = step.init(make(), OPT)
    fast = fzero.jit(step, backend="fx")
    fast(params, opt_state, MESH.split(data()))
    return fast(params, opt_state, MESH.split(data()))


def with_grads_in_python(params: Any, opt_state: Any, batch: Any) -> Any:
    grads, loss = torch.func.grad_and_value(loss_fn)(params, batch)
    return (*updated(params, opt_state, grads), loss)


def with_a_module() -> Any:
    apply, params, buffers = fzero.nn.functional(torch.nn.Linear(4, 3))
    return fzero.value_and_grad(lambda p, x: (apply(p, buffers, x) - x[:, :3]).mean())(params, torch.ones(8, 4))


LABELS = data(y=torch.full((8,), 7))


def loss_of_labels(params: Any, batch: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(torch.tanh(batch["x"] @ params["w"]) @ params["v"], batch["y"])


LINEAR = torch.nn.Linear(4, 3)
INTEGERS = {**make(), "count": torch.ones(3, dtype=torch.int64)}

# the text of the page -> the mistakes that it is about
PROVOKED: dict[str, list[Callable[[], Any]]] = {
    "no argument of the step differs by rank": [lambda: run(batch=data())],
    "dimension 0 must be divisible by": [lambda: MESH.split({"x": torch.ones(7, 4)})],
    "a value that differs by rank must be a tensor": [
        lambda: MESH.split({"x": [1.0, 2.0]}),
        lambda: MESH.split({"x": torch.ones(8), "name": "a"}),
    ],
    "which is split already": [lambda: MESH.split(MESH.split(data()))],
    "no mesh and no torchrun world": [lambda: fzero.shard(TRAIN_STEP, stage=2)],
    "expected a stage of ZeRO": [lambda: step_of(stage=len(fzero.zero.STAGES)), lambda: step_of(stage="2")],
    "is sharded, and stage 2 takes it plain": [
        lambda: step_of(stage=2)(*step_of(stage=3).init(make(), OPT), MESH.split(data()))
    ],
    "trees are sharded differently": [
        lambda: step_of(stage=2)(make(), OPT.init(make()), MESH.split(data())),
        lambda: step_of(stage=3)(
            step_of(stage=3).init(make(), OPT)[0], step_of(stage=0).init(make(), OPT)[1], MESH.split(data())
        ),
    ],
    "is the state of an optimizer": [
        lambda: step_of()(*reversed(step_of().init(make(), OPT)), MESH.split(data())),
    ],
    "the batch was split into samples over it": [with_samples_over_cp],
    "(parameters) is PerRank": [lambda: step_of()(MESH.split(data()), *step_of().init(make(), OPT))],
    "(parameters) is a module": [lambda: step_of()(LINEAR, OPT.init(make()), MESH.split(data()))],
    "was donated to": [with_old_results],
    "was sharded for dp=2, and this mesh has dp=4": [
        lambda: step_of(stage=3, mesh=OTHER_MESH)(*step_of(stage=3).init(make(), OPT), OTHER_MESH.split(data()))
    ],
    "is in a box: give the mesh": [lambda: saved(step_of(stage=3).init(make(), OPT)[0])],
    "casts parameters, and no batch": [lambda: run(batch=MESH.split(data(x=torch.ones(8, 4, dtype=torch.float64))))],
    "expected the path of a folder": [lambda: fzero.save(make(), "runs"), lambda: fzero.load(make(), "runs")],
    "a function of leaves": [lambda: fzero.tree.map(make(), torch.sin)],
    "which keeps parameters by a policy already": [lambda: optim.master_weights(masters(), BFLOAT16)],
    "is not a checkpoint": [lambda: fzero.load(tempfile.mkdtemp(), like=make())],
    "is of another tree": [
        lambda: fzero.load(saved(make()), like={"w": torch.ones(4, 5)}),
        lambda: fzero.load(saved(OPT.init(make())), like=optim.lion(0.1).init(make())),
    ],
    "element 0 of tensors does not require grad": [lambda: run()[2].backward()],
    "returned None": [lambda: run(ending(lambda params, state, loss, grads, batch: None))],
    "returns no state": [
        lambda: run(ending(lambda params, state, loss, grads, batch: (updated(params, state, grads)[0], loss)))
    ],
    "where the new parameters belong": [
        lambda: run(ending(lambda params, state, loss, grads, batch: (loss, *updated(params, state, grads)))),
        lambda: run(ending(lambda params, state, loss, grads, batch: (grads, state, loss))),
        lambda: run(ending(lambda params, state, loss, grads, batch: (*OPT.update(grads, state, params), loss))),
    ],
    "returns its old parameters": [
        lambda: run(
            ending(lambda params, state, loss, grads, batch: (params, OPT.update(grads, state, params)[1], loss))
        ),
        lambda: step_of(
            ending(lambda params, state, loss, grads, batch: (params, updated(params, state, grads)[1], loss)), stage=0
        )(make(), OPT.init(make()), MESH.split(data())),
    ],
    "the old state of its optimizer": [
        lambda: run(ending(lambda params, state, loss, grads, batch: (updated(params, state, grads)[0], state, loss)))
    ],
    "was given gradients as params": [
        lambda: run(ending(lambda params, state, loss, grads, batch: OPT.update(params, state, grads))),
        lambda: run(
            ending(lambda params, state, loss, grads, batch: (optim.apply_updates(grads, params), state, loss))
        ),
    ],
    "was given gradients as updates": [
        lambda: run(ending(lambda params, state, loss, grads, batch: (optim.apply_updates(params, grads), state, loss)))
    ],
    "as gradients: expected a tree like the parameters": [
        lambda: run(ending(lambda params, state, loss, grads, batch: OPT.update(loss, state, params)))
    ],
    "was given a tuple of 2 as updates": [
        lambda: run(
            ending(
                lambda params, state, loss, grads, batch: optim.apply_updates(params, OPT.update(grads, state, params))
            )
        )
    ],
    "needs the parameters": [lambda: run(ending(lambda params, state, loss, grads, batch: OPT.update(grads, state)))],
    "make the state with step.init": [
        lambda: run(opt=optim.sgd(0.1)),
        lambda: run(ending(lambda params, state, loss, grads, batch: OPT.update(grads, params))),
    ],
    "is a box and not a tensor": [
        lambda: run(ending(lambda params, state, loss, grads, batch: params["w"].sub_(grads["w"]))),
        lambda: run(ending(lambda params, state, loss, grads, batch: params["w"] - 0.1 * grads["w"])),
        lambda: run(lambda params, state, batch: loss_fn(params, batch).backward()),
        lambda: loss_fn(step_of(stage=3).init(make(), OPT)[0], data()),
        lambda: MESH.split(data())["x"].mean(),  # pyright: ignore
        lambda: LINEAR.load_state_dict(step_of(stage=3).init(LINEAR, OPT)[0]),
    ],
    "in place (aten.": [
        lambda: with_loss(lambda params, batch: loss_fn({**params, "w": params["w"].clamp_(-1, 1)}, batch)),
        lambda: run(
            ending(
                lambda params, state, loss, grads, batch: (
                    *updated(params, state, (batch["x"].add_(1), grads)[1]),
                    loss,
                )
            )
        ),
    ],
    "reads the value of a tensor in Python": [
        lambda: run(ending(lambda params, state, loss, grads, batch: (params, state, loss.item()))),
        lambda: run(ending(lambda params, state, loss, grads, batch: (params, state, float(loss)))),
        lambda: run(ending(lambda params, state, loss, grads, batch: (params, state, loss) if loss > 1 else None)),
        lambda: run(ending(lambda params, state, loss, grads, batch: (params, state, loss.detach().numpy()))),
        lambda: run(ending(lambda params, state, loss, grads, batch: (params, state, f"{loss:.3f}"))),
    ],
    "a jitted step returns tensors": [
        lambda: run(ending(lambda params, state, loss, grads, batch: (*updated(params, state, grads), 3.0)))
    ],
    "changes the variable": [with_a_counter],
    "puts a tensor into the list": [with_a_list],
    "draws from random while it is traced": [
        lambda: with_loss(lambda params, batch: random.random() * loss_fn(params, batch))
    ],
    "differs by rank, and a plain result must be replicated": [
        lambda: run(with_grads_in_python, stage=0, batch=MESH.split(data(x=torch.arange(32.0).view(8, 4)))),
        lambda: run(lambda params, state, batch: (params, state, batch["x"].mean())),
    ],
    "trees differ in structure": [
        lambda: run(ending(lambda params, state, loss, grads, batch: OPT.update({"w": grads["w"]}, state, params)))
    ],
    "must return a 0-d floating-point loss": [
        lambda: with_loss(lambda params, batch: (batch["x"] @ params["w"]).mean(1)),
        lambda: with_loss(lambda params, batch: None),
        lambda: with_loss(lambda params, batch: (loss_fn(params, batch), batch["x"])),
        lambda: with_loss(lambda params, batch: 3.0),
    ],
    "must return (loss, aux)": [lambda: with_loss(loss_fn, has_aux=True)],
    "depends on no leaf of argument 0": [lambda: with_loss(lambda params, batch: LINEAR(batch["x"]).mean())],
    "which cannot be differentiated": [lambda: run(params=INTEGERS)],
    "is a module, Linear, and the gradient is of a tree": [
        lambda: fzero.value_and_grad(lambda model, x: model(x).mean())(LINEAR, torch.ones(8, 4))
    ],
    "argnums is": [lambda: fzero.value_and_grad(loss_fn, make(), data())],  # pyright: ignore
    "takes a function, the loss": [lambda: fzero.value_and_grad(loss_fn(make(), data()))],  # pyright: ignore
    "unsupported operand type(s) for -: 'tuple' and 'Tensor'": [with_a_module],
    "fzero: it failed in the step's operation of": [
        lambda: run(train_step_for(loss_of_labels, OPT), batch=MESH.split(LABELS)),
        lambda: run(batch=MESH.split(data(x=torch.ones(8, 4, dtype=torch.float64)))),
    ],
    "which writes into parameters that it holds": [
        lambda: step_of().init(make(), torch.optim.AdamW(LINEAR.parameters())),
        lambda: step_of().init(make(), torch.optim.AdamW),
    ],
    "takes no parameters": [lambda: optim.adamw(LINEAR.parameters())],  # pyright: ignore
    "takes learning_rate=, and not lr=": [lambda: optim.adamw(lr=1e-3)],  # pyright: ignore
    "has other bits than": [run_twice_with_noise],
    "a string is not a number": [lambda: optim.adamw("1e-3")],  # pyright: ignore
}

# mistakes of which a test on processes, below, provokes each
ON_PROCESSES = [
    "was split by mesh.split from batches that differ",
    "differs between rank 0 and rank 1, but a plain tensor must be equal",
    "is not the same step on all ranks",
]
ON_A_LOST_RANK = ["is lost: "]


def heard(mistake: Callable[[], Any]) -> str:
    """Make a mistake, and return what the user reads: the error with its notes, or the log."""
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    logging.getLogger("fzero").addHandler(handler)
    _notice.warn_once.cache_clear()
    try:
        mistake()
    except Exception as error:
        return "\n".join([str(error), *getattr(error, "__notes__", ())])
    finally:
        logging.getLogger("fzero").removeHandler(handler)
    return log.getvalue()


def test_the_page_lists_exactly_the_provoked_messages():
    section = pathlib.Path(ROOT, "docs/trouble.md").read_text().split("## Messages")[1].split("\n## ")[0]
    listed = re.findall(r"^\| `(.+?)` \|", section, re.MULTILINE)
    assert sorted(listed) == sorted([*PROVOKED, *ON_PROCESSES, *ON_A_LOST_RANK])


MISTAKES = [(text, mistake) for text, mistakes in PROVOKED.items() for mistake in mistakes]


@pytest.mark.parametrize("text, mistake", MISTAKES, ids=[f"{text} {i}" for i, (text, _) in enumerate(MISTAKES)])
def test_a_mistake_has_the_message_of_the_page(text, mistake):
    assert text in heard(mistake)


@pytest.mark.parametrize("stage", [0, 3])
def test_an_error_of_torch_has_a_note_of_what_each_rank_got(stage):
    message = heard(lambda: run(stage=stage, batch=MESH.split(data(y=torch.ones(8)))))
    assert "Each rank got, as argument 2, a dict: 'x' float32 [4, 4], 'y' float32 [4]" in message


def test_a_step_may_look_at_python_variables_and_draw_from_torch():
    lines: list[int] = []

    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        lines.append(len(batch["x"]))
        batch = {**batch, "x": batch["x"] + torch.rand(1) * 0.01}
        return TRAIN_STEP(params, opt_state, batch)

    assert run(train_step)[2].ndim == 0 and lines[0] == 4


def test_a_step_may_skip_an_update_and_return_what_it_was_given():
    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = fzero.value_and_grad(loss_fn)(params, batch)
        updated(params, opt_state, grads)
        return params, opt_state, loss  # as a step does whose loss is not finite

    step = step_of(train_step, stage=0)
    params, opt_state = step.init(make(), OPT)
    assert step(params, opt_state, MESH.split(data()))[0]["w"].equal(params["w"])


def test_a_result_of_apply_updates_on_added_gradients_is_allowed_by_tree_map():
    step = step_of(
        ending(lambda params, state, loss, grads, batch: (fzero.tree.map(torch.add, params, grads), loss)), stage=3
    )
    params, _ = step.init(make(), OPT)
    assert step_of(step.train_step, stage=3)(params, None, MESH.split(data()))[1].ndim == 0


RANKS = """
import torch, fzero
from fzero import optim
from tests.helpers import train_step_for
opt = optim.adamw(0.1)
train_step = train_step_for(lambda params, batch: (batch["x"] @ params["w"]).square().mean(), opt)
mesh = fzero.mesh(dp=-1)

def run(batch, jitted=False):
    step = fzero.shard(train_step, stage=2, mesh=mesh)
    params, opt_state = step.init({"w": torch.ones(4, 5)}, opt)
    step = fzero.jit(step, backend="fx") if jitted else step
    return step(params, opt_state, batch)

mine = {"x": torch.ones(8, 4) * (1 + mesh.rank)}
short = {"x": torch.ones(8 - 2 * mesh.rank, 4)}
for call in (lambda: run(mesh.split(mine)), lambda: run(mine), lambda: run(mesh.local(short), jitted=True),
             lambda: run(mesh.local(mine)), lambda: run(mesh.split({"x": torch.ones(8, 4)}))):
    try:
        call()
        print("no error", flush=True)
    except Exception as error:
        print(" ".join(str(error).split()), flush=True)
"""


def test_mistakes_on_processes_have_the_messages_of_the_page(tmp_path):
    script = tmp_path / "mistakes.py"
    script.write_text(RANKS)
    done = world(2, str(script))
    lines = done.stdout.splitlines()
    for text in ON_PROCESSES:
        assert sum(text in line for line in lines) == 2, (text, done.stdout, done.stderr[-2000:])
    assert lines.count("no error") == 4


def test_a_lost_rank_has_the_message_of_the_page():
    done = world(2, "tests/_liveness/lost.py", "killed", "300")
    assert all(text in done.stderr for text in ON_A_LOST_RANK), done
