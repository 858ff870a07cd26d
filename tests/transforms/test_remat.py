"""remat: the numbers of the plain block in every world, with less memory."""

import copy
import functools
import itertools
import shutil
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.utils._python_dispatch import TorchDispatchMode

import fzero
from fzero import optim, tree
from fzero.testing import assert_trees_close
from tests.helpers import LEAST, cases, examples, mlp_batch, mlp_loss, mlp_params, train_step_for
from tests.memory import peak_bytes

COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
needs_compiler = pytest.mark.skipif(not COMPILER, reason="no compiler")
SAVES = (None, "matmuls", "host", lambda op: "tanh" in str(op))


def block(p: Any, x: torch.Tensor, scale: float = 1.0) -> Any:
    return {"y": torch.tanh(x @ p["w"] + p["b"]) * scale + x, "layers": 1, "none": None}


def inputs(rows: int = 5) -> Any:
    g = torch.Generator().manual_seed(0)
    w, b, x = [torch.randn(s, generator=g, dtype=torch.float64) for s in ((4, 4), (4,), (rows, 4))]
    return {"w": w, "b": b}, x


def loss_of(f: Any) -> Any:
    return lambda p, x: (f(p, x, scale=0.5)["y"] ** 3).sum()


class Counting(TorchDispatchMode):
    """Counts the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.count: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").split(".")[0]
        self.count[name] = self.count.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def ops(f: Any, *args: Any) -> dict[str, int]:
    with Counting() as counting:
        f(*args)
    return counting.count


# ---------------------------------------------------------------- derivatives


def over_rows(f: Any) -> Any:
    return lambda p, x: vmap(f, (None, 0))(p, x[:, None])


DERIVATIVES = {
    "value": lambda f: f,
    "grad": lambda f: grad(f, argnums=(0, 1)),
    "grad of grad": lambda f: grad(lambda p, x: sum(g.square().sum() for g in grad(f)(p, x).values()), (0, 1)),
    "hessian": hessian,
    "jacrev of jacrev": lambda f: jacrev(jacrev(f, argnums=1)),
    "jacfwd": lambda f: jacfwd(f, argnums=1),
    "jacrev of jacfwd": lambda f: jacrev(jacfwd(f)),
    "jacfwd of jacfwd": lambda f: jacfwd(jacfwd(f)),
    "per-sample gradients": lambda f: over_rows(grad(f)),
    "gradient of a vmap": lambda f: grad(lambda p, x: over_rows(f)(p, x).square().sum()),
    "per-sample hessian": lambda f: over_rows(hessian(f)),
}


@pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES)
@pytest.mark.parametrize("save", SAVES)
def test_derivatives_are_the_plain_blocks(save, derivative):
    p, x = inputs(2)
    assert_trees_close(derivative(loss_of(fzero.remat(block, save)))(p, x), derivative(loss_of(block))(p, x))


@pytest.mark.parametrize("name", DERIVATIVES)
def test_what_waits_on_the_host_has_all_derivatives(name):
    """It was computed, so it moves; a second derivative is one of the copy, too."""

    def after(f: Any) -> Any:
        return DERIVATIVES[name](lambda p, x: loss_of(f)(p, (x * p["w"][:, 0]).tanh()))

    p, x = inputs(2)
    f = after(fzero.remat(block, "host"))
    assert_trees_close(f(p, x), after(block)(p, x))
    assert ("fzero::to_host" in ops(f, p, x)) == (name not in ("value", "jacfwd", "jacfwd of jacfwd"))


def test_a_second_derivative_by_plain_autograd_of_what_waits_on_the_host():
    p, x = inputs()

    def twice(f: Any) -> Any:
        own = {k: v.clone().requires_grad_() for k, v in p.items()}
        (g,) = torch.autograd.grad(loss_of(f)(own, (x * own["w"][:, 0]).tanh()), own["w"], create_graph=True)
        return torch.autograd.grad(g.square().sum(), own["w"])

    assert_trees_close(twice(fzero.remat(block, "host")), twice(block))


def test_parameters_and_numbers_do_not_wait_on_the_host():
    p, x = inputs()
    assert "fzero::to_host" not in ops(grad(loss_of(fzero.remat(block, "host"))), p, x)
    f = fzero.remat(lambda p, x, scale: torch.tanh(x @ p["w"]) * scale, "host")
    assert "fzero::to_host" not in ops(grad(lambda p: f(p, x, p["w"].sum()).sum()), p)

    def boxed(p: Any) -> Any:
        return loss_of(fzero.remat(block, "host"))(fzero.partition(tree.map(lambda w: w * 1, p)), x)

    program = fzero.mesh(dp=1).spmd(lambda p: fzero.PerRank(grad(boxed)(p)))
    assert "fzero::to_host" not in ops(program, p)


@pytest.mark.parametrize("save", SAVES)
def test_tangents_are_the_plain_blocks(save):
    p, x = inputs()
    ys = [jvp(lambda p, x, f=f: f(p, x)["y"], (p, x), (p, x)) for f in (fzero.remat(block, save), block)]
    assert_trees_close(*ys)


def test_results_keep_their_structure():
    p, x = inputs()
    y = fzero.remat(lambda p, x: {**block(p, x), "twice": (x, x), "index": x.argmax()})(p, x)
    assert y["layers"] == 1 and y["none"] is None and y["twice"][0] is y["twice"][1] and y["index"] == x.argmax()


@pytest.mark.parametrize("save", SAVES)
def test_plain_autograd(save):
    p, x = inputs()
    expected = grad(loss_of(block))(p, x)
    own = {k: v.clone().requires_grad_() for k, v in p.items()}
    loss_of(fzero.remat(block, save))(own, x).backward()
    assert_trees_close({k: v.grad for k, v in own.items()}, expected)
    (g,) = torch.autograd.grad(loss_of(fzero.remat(block, save))(own, x), own["w"], create_graph=True)
    twice = grad(lambda p: grad(loss_of(block))(p, x)["w"].square().sum())(p)["w"]
    assert_trees_close(torch.autograd.grad(g.square().sum(), own["w"])[0], twice)


@pytest.mark.parametrize(
    "outer,inner", cases(zip(SAVES, reversed(SAVES), strict=True), itertools.product(SAVES, SAVES))
)
def test_nested_remat_has_the_gradient_of_the_plain_function(outer, inner):
    def two(f):
        return lambda p, x, scale: f(p, f(p, x, scale)["y"], scale)

    p, x = inputs()
    rematerialised, plain = loss_of(fzero.remat(two(fzero.remat(block, inner)), outer)), loss_of(two(block))
    assert_trees_close(grad(rematerialised)(p, x), grad(plain)(p, x))


def test_ties_stay_tied():
    def tied(p, x):
        assert p["w"] is p["again"] and p["w"] is not p["b"]
        return torch.tanh(x @ p["w"]) @ p["again"].T

    p, x = inputs()

    def loss(f):
        return lambda p, x: f({"w": p["w"], "again": p["w"], "b": p["b"]}, x).square().sum()

    assert_trees_close(grad(loss(fzero.remat(tied)))(p, x), grad(loss(tied))(p, x))


def test_autocast_is_the_calls():
    p, x = inputs()
    p, x = {k: v.float() for k, v in p.items()}, x.float()

    def loss(f):
        def inside(p, x):
            with torch.autocast("cpu", torch.bfloat16):
                return f(p, x)["y"].float().square().sum()

        return inside

    assert_trees_close(grad(loss(fzero.remat(block)))(p, x), grad(loss(block))(p, x), rtol=0)


CORNERS = {
    "an input as it is": lambda w, x: (w, x * w),
    "a view": lambda w, x: w.T * x,
    "an unused input": lambda w, x: w * 2,
    "an unused output": lambda w, x: (w * x, x),
    "integers": lambda w, x: (torch.eye(2, dtype=w.dtype)[(x > 0).long()[0]] @ w[:2], x.argmax()),
    "a gradient inside": lambda w, x: grad(lambda x: torch.tanh(x @ w).sum())(x),
    "products that fold": lambda w, x: torch.tanh(x[None].transpose(1, 2) @ w),
    "a convolution": lambda w, x: F.conv2d(x[None, None], w[None, None, :2, :2]),
    "attention": lambda w, x: F.scaled_dot_product_attention((x @ w)[None], x[None], w[None], is_causal=True),
    "statistics of the batch": lambda w, x: F.batch_norm(x @ w, None, None, training=True),
    "complex numbers": lambda w, x: torch.complex(w, x).square().abs(),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch 2.15, of any vmap of attention
@pytest.mark.parametrize("f", CORNERS.values(), ids=CORNERS)
def test_blocks_with_unusual_arguments_and_results_have_the_same_gradients(f):
    p, x = inputs(4)

    def loss(f):
        return lambda w, x: sum([y.pow(3).sum() for y in fzero.tree.tensors(f(w, x))])

    for save in SAVES:
        plain, again = loss(f), loss(fzero.remat(f, save))
        assert_trees_close(grad(again, (0, 1))(p["w"], x), grad(plain, (0, 1))(p["w"], x))
        xs = torch.stack([x, x + 1])
        assert_trees_close(vmap(grad(again), (None, 0))(p["w"], xs), vmap(grad(plain), (None, 0))(p["w"], xs))


def test_a_backward_pass_may_run_twice():
    w = inputs()[0]["w"].requires_grad_()
    y = fzero.remat(lambda w: F.dropout(w.sin(), 0.5), "matmuls")(w).sum()
    first, second = [torch.autograd.grad(y, w, retain_graph=True)[0] for _ in range(2)]
    assert first.equal(second)


# ---------------------------------------------------------------- what runs


def test_inputs_without_gradient_cost_none():
    p, x = inputs()
    f = fzero.remat(lambda w, v, x: torch.tanh(x @ w) @ v)

    def loss(w, v):
        return f(w, v, x).sum()

    assert ops(grad(loss, (0, 1)), p["w"], p["w"] + 1)["mm"] == 2 + 2 + 3
    assert ops(grad(loss, 1), p["w"], p["w"] + 1)["mm"] == 2 + 2 + 1
    wanted = p["w"].clone().requires_grad_()
    assert ops(lambda: loss(p["w"], wanted).backward())["mm"] == 2 + 2 + 1


def test_saved_results_are_not_computed_again():
    p, x = inputs()
    counts = {save: ops(grad(loss_of(fzero.remat(block, save))), p, x) for save in SAVES}
    none, matmuls, host, tanhs = counts.values()
    assert (none["mm"], matmuls["mm"], host["mm"], tanhs["mm"]) == (3, 2, 3, 3)
    assert (none["tanh"], matmuls["tanh"], host["tanh"], tanhs["tanh"]) == (2, 2, 2, 1)


def test_kept_results_that_are_written_into():
    def writes(p, x):
        y = x @ p["w"]
        y.add_(p["b"]).mul_(2)
        return torch.tanh(y)

    p, x = inputs()
    for save in SAVES:
        assert_trees_close(*[grad(lambda p, f=f: f(p, x).pow(3).sum())(p) for f in (fzero.remat(writes, save), writes)])


def test_a_block_that_runs_otherwise_the_second_time_is_an_error():
    p, x = inputs()
    for counts, message in (
        ((1, 2), r"ran mm\(.* where .* ran no further"),
        ((2, 1), r"ran no further .* where .* ran mm\("),
    ):
        products = iter(counts)

        def moody(p, x, products=products):
            for _ in range(next(products)):
                x = x @ p["w"]
            return x

        with pytest.raises(RuntimeError, match=message):
            grad(lambda p, f=moody: fzero.remat(f, "matmuls")(p, x).sum())(p)


def test_a_block_that_writes_into_its_argument_is_an_error():
    def writes(p, x):
        return x.mul_(2) @ p["w"]

    p, x = inputs()
    with pytest.raises(RuntimeError, match="remat: the block writes into an argument in place"):
        grad(lambda p: fzero.remat(writes)(p, x * 1).sum())(p)


def test_save_is_checked():
    with pytest.raises(ValueError, match="save='all': expected None"):
        fzero.remat(block, "all")
    with pytest.raises(ValueError, match="save=3: expected None"):
        fzero.remat(block, 3)  # pyright: ignore[reportArgumentType]


# ---------------------------------------------------------------- random numbers


def drops(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Linear in w, so that the value is the gradient's product with w, if both passes drop the same."""
    y = F.dropout(x * w, 0.5) + F.dropout(x * w, 0.1, training=False)
    # Inductor, as fzero.jit calls it, has no rand
    return y if torch.compiler.is_compiling() else y + torch.rand_like(x) * w


WORLDS = {
    "eager": lambda f: f,
    "fx": lambda f: fzero.jit(f, backend="fx", **LEAST),
    "inductor": fzero.jit,
    "vmap": lambda f: lambda w, x: fzero.mesh(dp=2).spmd(f)(w, fzero.mesh(dp=2).split(x)),
    "lockstep": lambda f: lambda w, x: fzero.mesh(dp=2, simulate="lockstep").spmd(f)(w, fzero.mesh(dp=2).split(x)),
    "vmap fx": lambda f: fzero.jit(
        lambda w, x: fzero.mesh(dp=2).spmd(f)(w, fzero.mesh(dp=2).split(x)), backend="fx", **LEAST
    ),
}


@pytest.mark.parametrize(
    "world", [pytest.param(w, marks=[needs_compiler, pytest.mark.slow] if w == "inductor" else ()) for w in WORLDS]
)
@pytest.mark.parametrize("save", cases((None,), ("matmuls",)))
def test_both_passes_draw_the_same(world, save):
    w, x = torch.full((6,), 3.0, dtype=torch.float64), torch.ones(6, 6, dtype=torch.float64)
    torch.manual_seed(0)
    f = fzero.remat(fzero.remat(drops) if save is None else drops, save)
    value, g = WORLDS[world](fzero.value_and_grad(lambda w, x: f(w, x).mean()))(w, x)
    assert_trees_close(value, (w * g).sum())
    assert len(g.unique()) > 1


@pytest.mark.parametrize("randomness", ("same", "different"))
def test_both_passes_draw_the_same_under_vmap(randomness):
    w, x = torch.full((6,), 3.0, dtype=torch.float64), torch.ones(6, 6, dtype=torch.float64)
    f = fzero.remat(drops)
    gs, ys = vmap(torch.func.grad_and_value(lambda w, x: f(w, x).sum()), (None, 0), randomness=randomness)(w, x)
    assert_trees_close(ys, gs @ w)
    assert bool((ys == ys[0]).all()) == (randomness == "same")
    torch.manual_seed(0)
    expected = jacrev(lambda w: drops(w, x).sum(1))(w)
    torch.manual_seed(0)
    assert_trees_close(jacrev(lambda w: f(w, x).sum(1))(w), expected)


def test_the_generator_moves_as_for_the_plain_block():
    w, x = torch.ones(6), torch.ones(6, 6)
    states = []
    for f in (drops, fzero.remat(drops)):
        torch.manual_seed(0)
        g = grad(lambda w, f=f: f(w, x).sum())(w)
        states.append((g, torch.get_rng_state()))
    assert_trees_close(*states, rtol=0)


# ---------------------------------------------------------------- sharded steps


def remat_loss(save: Any) -> Any:
    f = fzero.remat(lambda p, x: torch.tanh(x @ p["w"] + p["b"]), save)

    def loss(params: Any, batch: Any) -> torch.Tensor:
        x = batch["x"]
        for p in params["blocks"]:
            x = f(p, x)
        rest = fzero.gather({k: params[k] for k in ("scale", "head")})
        return ((x @ rest["head"][0] * rest["scale"] - batch["y"]) ** 2).mean()

    return loss


def mesh_of(sim: str, n: int) -> fzero.ranks.Mesh:
    return fzero.mesh(dp=n, simulate=sim)


@examples(3, 25)
@given(
    st.sampled_from(("vmap", "lockstep")),
    st.integers(0, 3),
    st.integers(1, 8),
    st.integers(1, 5),
    st.booleans(),
    st.sampled_from(SAVES),
)
@example("vmap", 3, 2, 1, False, None)
@example("lockstep", 3, 3, 2, False, "matmuls")
@example("vmap", 1, 2, 3, False, None)
def test_a_sharded_step_computes_what_the_plain_one_does(sim, stage, n, k, whole, save):
    mesh, opt, params = mesh_of(sim, n), optim.adam(1e-2), mlp_params()
    plain = train_step_for(mlp_loss, opt, micro_batches=k)
    step = fzero.shard(train_step_for(remat_loss(save), opt, micro_batches=k, gather=whole), stage=stage, mesh=mesh)
    reference, state = [params, opt.init(params)], list(step.init(params, opt))
    for i in range(2):
        batch = mlp_batch(2 * n * k, seed=i)
        *reference, expected = plain(*reference, batch)
        *state, loss = step(*state, mesh.split(batch))
        assert_trees_close(loss, expected)
    assert_trees_close(step.gather(state), reference)


@pytest.mark.parametrize(
    "stage,whole", cases([(0, True), (2, True), (3, False)], itertools.product(range(4), (True, False)))
)
def test_a_jitted_step_computes_what_the_eager_one_does(stage, whole):
    mesh, opt, batch = fzero.mesh(dp=2), optim.adam(1e-2), mlp_batch(8)
    eager = fzero.shard(train_step_for(remat_loss(None), opt, micro_batches=2, gather=whole), stage=stage, mesh=mesh)
    jitted = fzero.jit(eager, backend="fx", **LEAST)
    results = [step(*eager.init(mlp_params(), opt), mesh.split(batch)) for step in (eager, jitted)]
    one, other = [[eager.gather(list(r[:2])), r[2]] for r in results]
    assert_trees_close(one, other)


@pytest.mark.parametrize("sim", ("vmap", "lockstep"))
def test_a_unit_is_gathered_once_in_each_pass(sim):
    opt, batch = optim.sgd(0.1), mlp_batch(4)
    for stage in range(4):
        mesh = mesh_of(sim, 2)
        step = fzero.shard(train_step_for(remat_loss(None), opt, gather=False), stage=stage, mesh=mesh)
        state = step.init(mlp_params(), opt)
        with fzero.collectives.record() as log:
            step(*state, mesh.split(batch))
        order = [(e.kind, e.unit) for e in log.events if e.unit.startswith("blocks")]
        scatters = [("reduce_scatter", f"blocks.{i}") for i in (1, 0)]
        gathers = [("all_gather", f"blocks.{i}") for i in (0, 1)]
        if stage == 3:
            assert order == [*gathers, gathers[1], scatters[0], gathers[0], scatters[1]]
        elif stage:  # the update's result alone is gathered
            assert order == [*scatters, *gathers]


@pytest.mark.parametrize(
    "sim,save,whole",
    cases(
        [("vmap", SAVES[0], False), ("lockstep", SAVES[1], False), ("vmap", SAVES[1], True)],
        itertools.product(("vmap", "lockstep"), SAVES[:2], (True, False)),
    ),
)
def test_tensor_parallel_blocks(sim, save, whole):
    def tp() -> Any:
        return "tp" if "tp" in fzero.axes.axis_names() else ()

    def part(p, x):
        h = torch.tanh(fzero.collectives.pvary(x, tp()) @ p["up"])
        return x + fzero.collectives.psum_invariant(h @ p["down"], tp()) + p["bias"]

    def loss(f):
        def inside(params, batch):
            x = batch["x"]
            for p in params["blocks"]:
                x = f(p, x)
            return (x - batch["y"]).square().mean()

        return inside

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    g = torch.Generator().manual_seed(0)
    dims = {"up": 1, "down": 0}
    params = {"blocks": [{"up": normal(3, 4), "down": normal(4, 3), "bias": normal(3)} for _ in range(2)]}
    batch, opt = {"x": normal(8, 3), "y": normal(8, 3)}, optim.adam(1e-2)
    mesh = fzero.mesh(dp=2, tp=2, simulate=sim)
    for stage in (1, 3):
        step = fzero.shard(
            train_step_for(loss(fzero.remat(part, save)), opt, gather=whole),
            stage=stage,
            mesh=mesh,
            axis="dp",
            split=lambda path, leaf: {"tp": dims[path.split(".")[-1]]} if path.split(".")[-1] in dims else None,
        )
        *state, value = step(*step.init(params, opt), mesh.split(batch, "dp"))
        *expected, plain = train_step_for(loss(part), opt)(params, opt.init(params), batch)
        assert_trees_close([step.gather(state), value], [expected, plain])


def test_a_compiled_step_computes_the_same():
    p, x = inputs()
    step = torch.compile(lambda p, x: grad(loss_of(fzero.remat(block)))(p, x), fullgraph=True, backend="aot_eager")
    assert_trees_close(step(p, x), grad(loss_of(block))(p, x))


# ---------------------------------------------------------------- what is refused


class Holder:
    """Something that a closure's inspection does not see into."""

    value: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.value


@pytest.mark.parametrize("save", (None, "matmuls"))
@pytest.mark.parametrize("hidden", (False, True))
def test_a_captured_tensor_that_is_differentiated_is_an_error(save, hidden):
    p, x = inputs()
    w, mesh = p["w"], fzero.mesh(dp=2)

    def loss(w, x):
        holder = Holder()
        holder.value = w
        return fzero.remat(holder if hidden else lambda x: x @ w, save)(x).sum()

    cases = [
        lambda: grad(loss)(w, x),
        lambda: vmap(grad(loss), (None, 0))(w, x[:, None]),
        lambda: loss(w.clone().requires_grad_(), x).backward(),
        lambda: loss(w.clone().requires_grad_(), x.clone().requires_grad_()).backward(),
        lambda: loss(w.clone().requires_grad_() * 2, x.clone().requires_grad_()).backward(),
        lambda: mesh.spmd(fzero.value_and_grad(loss))(w, mesh.split(torch.cat([x, x]))),
        lambda: fzero.jit(grad(loss), backend="fx")(w, x),
        lambda: grad(grad(lambda w: loss(w, x * w.sum())))(w),
    ]
    for case in cases:
        with pytest.raises(ValueError, match=r"a tensor float64 \[4, 4\] that was not given as an argument"):
            case()


def test_a_captured_batch_is_an_error():
    p, x = inputs(4)
    mesh = fzero.mesh(dp=2)

    def program(w, x):
        return fzero.value_and_grad(lambda w: fzero.remat(lambda w: x @ w)(w).sum())(w)

    with pytest.raises(ValueError, match="not given as an argument, and that is differentiated, or differs by rank"):
        mesh.spmd(program)(p["w"], mesh.split(x))


def test_constants_may_be_captured():
    p, x = inputs()
    for save in SAVES:
        f = fzero.remat(lambda w: torch.tanh(x @ w) * p["b"], save)
        expected = grad(lambda w: (torch.tanh(x @ w) * p["b"]).sum())(p["w"])
        assert_trees_close(grad(lambda w, f=f: f(w).sum())(p["w"]), expected)
        assert_trees_close(fzero.jit(grad(lambda w, f=f: f(w).sum()), backend="fx")(p["w"]), expected)


def test_an_object_that_could_be_written_is_an_error():
    class DynamicCache:
        pass

    x = inputs()[1]
    with pytest.raises(TypeError, match=r"argument leaf 'past' is a DynamicCache.*use_cache=False"):
        fzero.remat(lambda x, past: x)(x.requires_grad_(), past=DynamicCache())
    with pytest.raises(TypeError, match="argument 1 is a Holder, an object that the block"):
        fzero.remat(lambda x, y: x)(x, Holder())
    with pytest.raises(TypeError, match="result leaf 'y' is a Holder"):
        fzero.remat(lambda x: {"y": Holder()})(x)


# ---------------------------------------------------------------- memory

WIDTH, ROWS = 32, 512
UNIT = ROWS * WIDTH * 4  # bytes of a block's input


def deep_loss(f: Any) -> Any:
    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        for p in params:
            x = f(p, x)
        return x.square().mean()

    return loss


def deep(p: Any, x: torch.Tensor) -> torch.Tensor:
    return x + torch.tanh(F.gelu(F.gelu(x @ p["a"]) @ p["b"]) @ p["c"])


def deep_inputs(layers: int) -> Any:
    g = torch.Generator().manual_seed(0)
    params = [{k: torch.randn(WIDTH, WIDTH, generator=g) / 8 for k in "abc"} for _ in range(layers)]
    return params, torch.randn(ROWS, WIDTH, generator=g)


def growth(peak: Any) -> float:
    """How many block inputs a layer costs."""
    small, large = (peak(*deep_inputs(layers)) for layers in (4, 12))
    return (large - small) / 8 / UNIT


@pytest.mark.parametrize("backend", ["fx", pytest.param("inductor", marks=[needs_compiler, pytest.mark.slow])])
def test_a_plan_holds_one_input_a_layer(backend):
    def peak(f):
        # remat alone: jit's own recomputation of what is cheap would take some of what it saves
        step = fzero.jit(grad(deep_loss(f)), backend=backend, recompute=False)
        return lambda *args: step.plan(*args).added_bytes

    gradients = 3 * WIDTH * WIDTH * 4 / UNIT
    assert growth(peak(deep)) > 5
    assert growth(peak(fzero.remat(deep))) < 1.05 + gradients
    assert 3 < growth(peak(fzero.remat(deep, "matmuls"))) < 4.05 + gradients


def test_a_tied_block_says_where_its_leaves_lie():
    """Its boxes hold no shard of their own, so nothing but the message tells the block's function that."""
    opt, w = optim.sgd(0.1), torch.eye(4)

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        for block in params["h"]:
            x = fzero.remat(lambda p, x: x @ p["w"])(block, x)
        return x.sum()

    step = fzero.shard(train_step_for(loss, opt, gather=False), stage=3, mesh=fzero.mesh(dp=2))
    params, opt_state = step.init({"h": [{"w": w}, {"w": w}]}, opt)
    with pytest.raises(
        ValueError, match=r"w' lies in the shard of unit 'h.0', which is not in this tree.*first path of a tied leaf"
    ):
        step(params, opt_state, step.mesh.split(torch.ones(2, 4)))


@pytest.mark.slow
@pytest.mark.parametrize("k", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(
    "stage,whole",
    [
        (2, True),
        *[pytest.param(s, w, marks=pytest.mark.slow) for s, w in ((0, True), (1, True), (3, True), (3, False))],
    ],
)
def test_activations_wait_on_the_host(stage, k, whole):
    """One input a layer lies there, and of the parameters none; each goes down once, and comes up once."""

    def planned(layers: int, save: str | None) -> fzero.graph.Plan:
        params, x = deep_inputs(layers)
        f, opt = fzero.remat(deep, save), fzero.optim.sgd(0.1)
        loss = deep_loss(lambda p, x: f(tree.map(lambda w: w.t(), p) if whole else p, x))  # what is viewed is no leaf
        step = fzero.shard(train_step_for(loss, opt, micro_batches=k, gather=whole), stage=stage, mesh=fzero.mesh(dp=2))
        args = (*step.init(params, opt), step.mesh.split(x))
        return fzero.jit(step, backend="fx", recompute=False, prefetch=0, in_flight=0).plan(*args)

    few, many = (planned(layers, "host") for layers in (4, 12))
    up, down = (sum(t.bytes * t.times for t in many.transfers if t.kind == kind) for kind in ("to_device", "to_host"))
    assert up == down == 11 * UNIT  # the first input is the batch
    assert many.peak_of("host") - few.peak_of("host") == 8 * UNIT / k
    assert planned(12, None).peak_of("device") - many.peak_of("device") > (11 - 4) * UNIT / k - UNIT


def test_a_plan_computes_a_block_again():
    args = deep_inputs(4)
    flops = [fzero.jit(grad(deep_loss(f)), backend="fx").plan(*args).flops for f in (deep, fzero.remat(deep))]
    assert flops[1] / flops[0] > 1.3


@pytest.mark.slow
@needs_compiler
def test_inductor_does_not_merge_the_two_runs():
    args = deep_inputs(4)
    step = fzero.jit(grad(deep_loss(fzero.remat(deep))), backend="inductor")
    step(*args)
    assert peak_bytes(lambda: step(*args)) < step.plan(*args).added_bytes + 2 * UNIT


def test_remat_lowers_the_peak_of_an_eager_gradient():
    """torch.func.grad keeps what a second derivative would need: the block's input, and its result's gradient."""

    def by_grad(f):
        return lambda *args: peak_bytes(lambda: grad(deep_loss(f))(*args))

    def by_autograd(f):
        def run(params, x):
            params = [{k: v.requires_grad_() for k, v in p.items()} for p in params]
            return peak_bytes(lambda: deep_loss(f)(params, x).backward())

        return run

    gradients = 3 * WIDTH * WIDTH * 4 / UNIT
    assert growth(by_grad(deep)) > 10 and growth(by_grad(fzero.remat(deep))) < 2.1 + gradients
    assert growth(by_autograd(deep)) > 5 and growth(by_autograd(fzero.remat(deep))) < 1.1 + gradients


def test_stage_3_holds_one_block_whole():
    """On one rank of a world whose others are absent, so that no collective frees its memory late."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    layers, width = 24, 64
    f = fzero.remat(lambda p, x: torch.tanh(x @ p["w"]))

    def loss(params, x):
        for p in params["blocks"]:
            x = f(p, x)
        return x.square().mean()

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = fzero.mesh(dp=2, simulate=False)
        boxes = mesh.spmd(fzero.partition)({"blocks": [{"w": torch.eye(width)} for _ in range(layers)]})
        peaks = []
        for whole in (True, False):
            step = mesh.spmd(fzero.value_and_grad(loss, gather=whole))
            peak = peak_bytes(lambda step=step: step(boxes, mesh.local(torch.ones(4, width))))
            peaks.append(peak / (width * width * 4))
    finally:
        torch.distributed.destroy_process_group()
    # all units whole, and gradients' shards; or these, one unit and its gradient
    assert peaks[0] > 1.5 * layers and peaks[1] < layers / 2 + 6, peaks


# ---------------------------------------------------------------- modules


class Residual(torch.nn.Module):
    """A block with statistics, dropout, a keyword, and a tuple as its result."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width)
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> Any:
        y = self.norm(self.linear(x))
        return self.dropout(torch.tanh(y)) * scale + x, y


class Net(torch.nn.Module):
    """Three of them."""

    def __init__(self, dropout: float, tied: bool) -> None:
        super().__init__()
        self.h = torch.nn.ModuleList([Residual(6, dropout) for _ in range(3)])
        self.out = torch.nn.Linear(6, 2)
        if tied:
            self.h[2].linear.weight = self.h[0].linear.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        for b in self.h:
            assert b.linear.weight.shape == (6, 6)  # attributes are as they were
            x, y = b(x, scale=0.5)
            total = total + y.mean()
        return self.out(x) + total


def module_step(module: torch.nn.Module, remat: Any, whole: bool = True) -> Any:
    apply, params, buffers = fzero.nn.functional(module, remat)

    def loss(params, buffers, x):
        y, buffers = apply(params, buffers, x)
        return y.square().mean(), buffers

    def program(params, buffers, x):
        (value, buffers), grads = fzero.value_and_grad(loss, has_aux=True, gather=whole)(params, buffers, x)
        return value, fzero.collectives.pmean({k: v.double() for k, v in buffers.items()}), fzero.gather(grads)

    return program, params, buffers


def net(dropout: float = 0.0, tied: bool = False) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net(dropout, tied).double(), torch.randn(8, 6, dtype=torch.float64)


@pytest.mark.parametrize("remat", (True, "matmuls"))
def test_a_module_runs_as_it_does_plainly(remat):
    module, x = net(dropout=0.2)
    results = []
    for r in (False, remat):
        program, params, buffers = module_step(module, r)
        torch.manual_seed(0)
        results.append(program(params, buffers, x))
    assert_trees_close(*results)
    assert results[1][1]["h.0.norm.num_batches_tracked"] == 1


@pytest.mark.parametrize(
    "sim,stage,tied",
    cases(
        [("vmap", 2, False), ("lockstep", 3, False), ("vmap", 3, True)],
        itertools.product(("vmap", "lockstep"), (2, 3), (False, True)),
    ),
)
def test_a_sharded_module_runs_as_it_does_plainly(sim, stage, tied):
    module, x = net(tied=tied)
    mesh = mesh_of(sim, 2)
    results, gathers = [], []
    for remat, whole in ((False, True), (True, True), (True, False), ("matmuls", False)):
        program, params, buffers = module_step(module, remat, whole)

        def sharded(params, buffers, x, program=program):
            params = fzero.partition(params)
            params = params if stage == 2 else fzero.tree.map(lambda x: x, params)  # a box forgets its origin
            return program(params, buffers, x)

        with fzero.collectives.record() as log:
            results.append(mesh.spmd(sharded)(params, buffers, mesh.split(x)))
        gathers.append([e.unit for e in log.events if e.kind == "all_gather"])
    for other in results[1:]:
        assert_trees_close(other, results[0])
    if stage == 3:  # the last ones are of the gradients
        again = ["h.1"] if tied else ["h.2", "h.1", "h.0"]
        assert [u for u in gathers[2][: -len(gathers[0]) // 2] if u != "out"].count("h.1") == 2
        assert len(gathers[2]) == len(gathers[0]) + (2 if tied else len(again))


def test_a_module_keeps_itself_and_its_copies_apart():
    module, x = net()
    _, params, buffers = module_step(module, True)
    assert "forward" not in module.h[0].__dict__
    apply = fzero.nn.functional(module, remat=True).apply
    assert apply.blocks == ("h.0", "h.1", "h.2")
    twin = copy.deepcopy(apply.module)
    assert twin.h[1].forward.block is twin.h[1]
    assert_trees_close(functional_call(twin, {**params, **buffers}, (x,)), apply(params, buffers, x)[0])


def test_a_module_without_blocks_is_an_error():
    with pytest.raises(ValueError, match="Linear has no repeated blocks"):
        fzero.nn.functional(torch.nn.Linear(2, 2), remat=True)


@pytest.mark.parametrize("name", ("gpt2", "llama"))
def test_a_language_model_of_transformers(name):
    transformers = pytest.importorskip("transformers")
    ids = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(0))
    common = {"vocab_size": 32, "bos_token_id": 0, "eos_token_id": 0}
    if name == "gpt2":
        config = transformers.GPT2Config(n_positions=8, n_embd=8, n_layer=2, n_head=2, **common)
    else:
        config = transformers.LlamaConfig(
            hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, **common
        )
    module = transformers.AutoModelForCausalLM.from_config(config).double().train()
    results = []
    for remat in (False, True, "matmuls"):
        apply, params, buffers = fzero.nn.functional(module, remat)

        def loss(p, apply=apply, buffers=buffers, **options):
            return apply(p, buffers, input_ids=ids, labels=ids, **options)[0].loss

        torch.manual_seed(0)
        results.append(fzero.value_and_grad(lambda p, loss=loss: loss(p, use_cache=False))(params))
        if remat:
            with pytest.raises(TypeError, match=r"is a DynamicCache.*use_cache=False"):
                fzero.value_and_grad(lambda p, loss=loss: loss(p, use_cache=True))(params)
    assert_trees_close(results[1], results[0])
    assert_trees_close(results[2], results[0])


# ---------------------------------------------------------------- draws by key


def keyed_loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    def block(p: Any, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(torch.tanh(x @ p["w"]), 0.3)

    for p in params["blocks"]:
        x = fzero.remat(block)(p, x)
    return (x @ params["h"]).square().mean()


def keyed_params() -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    blocks = [{"w": torch.randn(5, 5, generator=g, dtype=torch.float64) / 2} for _ in range(3)]
    return {"blocks": blocks, "h": torch.randn(5, generator=g, dtype=torch.float64)}


def test_a_seeded_block_draws_the_same_in_both_runs():
    """The derivative is that of the very function that the forward pass computed."""
    x, params = torch.randn(8, 5, dtype=torch.float64), keyed_params()

    def f(params: Any) -> torch.Tensor:
        return fzero.random.seeded(keyed_loss)(fzero.random.key(1), params, x)

    direction = tree.map(torch.randn_like, params)
    before = torch.get_rng_state()
    ahead, behind = (f(tree.map(lambda p, d, e=e: p + e * d, params, direction)) for e in (1e-6, -1e-6))
    grads = torch.func.grad(f)(params)
    slope = sum((g * d).sum() for g, d in zip(tree.tensors(grads), tree.tensors(direction), strict=True))
    torch.testing.assert_close((ahead - behind) / 2e-6, slope, rtol=1e-6, atol=1e-6)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("k", [1, 2])
def test_a_block_that_seeds_itself_is_the_plain_one(k):
    """Also in a later micro-batch, which draws for itself."""
    x, params, key = torch.randn(8, 5, dtype=torch.float64), keyed_params(), fzero.random.key(3)
    found = []
    for wrapped in (fzero.remat, lambda f: f):

        def block(p: Any, x: torch.Tensor) -> torch.Tensor:
            return x + fzero.random.seeded(lambda x: F.dropout(torch.tanh(x @ p["w"]), 0.3))(key, x)

        run = wrapped(block)

        def loss(params: Any, x: torch.Tensor, run: Any = run) -> torch.Tensor:
            for p in params["blocks"]:
                x = run(p, x)
            return (x @ params["h"]).square().mean()

        found.append(fzero.value_and_grad(loss, micro_batches=k)(params, x))
    assert_trees_close(*found)


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_dropout_of_any_probability_is_the_plain_one(p):
    """At p = 1 all is 0, and so is the gradient: not 0 times infinity."""

    def block(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(torch.tanh(x), p) + x

    found = []
    for f in (fzero.remat(block), block):
        torch.manual_seed(0)
        found.append(torch.func.grad_and_value(lambda x, f=f: f(x).square().sum())(torch.linspace(-1, 1, 16)))
    assert_trees_close(*found)


@pytest.mark.slow
def test_seeded_blocks_draw_alike_in_every_world():
    opt, x = optim.sgd(0.1, momentum=0.9), torch.randn(8, 5, dtype=torch.float64)

    def train_step(params: Any, opt_state: Any, batch: Any, key: Any, gather: bool = True) -> Any:
        loss = lambda p, b: fzero.random.seeded(keyed)(key, p, b)  # noqa: E731

        def keyed(p: Any, b: Any) -> torch.Tensor:
            return keyed_loss(p if gather else {**p, "h": fzero.gather(p["h"])}, b)

        value, grads = fzero.value_and_grad(loss, micro_batches=2, gather=gather)(params, batch)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, value

    found = []
    for simulate, stage in (("vmap", 1), ("vmap", 3), ("lockstep", 3)):
        mesh = fzero.mesh(dp=2, simulate=simulate)
        for gather in (True, False):
            step = fzero.shard(functools.partial(train_step, gather=gather), stage, mesh)
            for run in (step, fzero.jit(step, backend="fx", **LEAST)) if simulate == "vmap" and stage == 3 else (step,):
                state = run.init(keyed_params(), opt)
                for i in range(2):
                    *state, loss = run(*state, mesh.split(x), fzero.random.fold_in(fzero.random.key(0), i))
                found.append((step.gather(state[0]), loss))
    for other in found[1:]:
        assert_trees_close(other, found[0])


@pytest.mark.parametrize("simulate", ["vmap", "lockstep"])
def test_frozen_parameters_stay_in_their_boxes(simulate):
    """With gather=False each block gathers its frozen parameters for itself, and they cost no gradient."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(*[torch.nn.Linear(6, 6) for _ in range(3)]).double()
    for layer in module:
        layer.weight.requires_grad_(False)
    plain, params, frozen = fzero.nn.functional(module)
    apply = fzero.nn.functional(module, remat=True).apply
    x, opt = torch.randn(4, 6).double(), optim.sgd(0.1)

    def train_step(params: Any, opt_state: Any, frozen: Any, x: Any, apply: Any = plain, gather: bool = True) -> Any:
        loss = lambda p, f, x: apply(p, f, x)[0].square().mean()  # noqa: E731
        value, grads = fzero.value_and_grad(loss, gather=gather)(params, frozen, x)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, value

    expected = train_step(params, opt.init(params), frozen, x)
    mesh = fzero.mesh(dp=2, simulate=simulate)
    lazy = functools.partial(train_step, apply=apply, gather=False)
    step = fzero.shard(lazy, stage=3, mesh=mesh)
    boxes, _ = step.init(frozen, optim.set_to_zero())
    with fzero.collectives.record() as log:
        new, _, loss = step(*step.init(params, opt), boxes, mesh.split(x))
    assert_trees_close((step.gather(new), loss), (expected[0], expected[2]))
    assert log.count("all_gather") == 12 and log.count("reduce_scatter") == 3  # 3 blocks x 2 units, twice; biases


# ---------------------------------------------------------------- what leaves a block otherwise


class Keeps(torch.nn.Module):
    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.w, self.kept, self.aux = torch.nn.Parameter(torch.eye(3)), kept, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x @ self.w)
        self.aux = self.kept(h.square().mean())
        return x + h


def test_what_a_block_leaves_elsewhere_is_refused():
    """Its gradient would be lost without a word: an auxiliary loss, say, or what a hook collects."""
    held: list[Any] = []

    def block(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        held.append((p**2).sum())
        return x * p

    with pytest.raises(ValueError, match=r"a tensor float32 \[\] that the block computed .* held elsewhere"):
        grad(lambda p: fzero.remat(block)(p, torch.ones(2)).sum() + held[-1])(torch.ones(2))
    for kept, refused in [(lambda a: a, True), (torch.Tensor.detach, False), (torch.Tensor.item, False)]:
        apply, params, buffers = fzero.nn.functional(torch.nn.Sequential(Keeps(kept)), remat=True)
        loss = lambda p, apply=apply, buffers=buffers: apply(p, buffers, torch.ones(2, 3))[0].sum()  # noqa: E731
        if refused:
            with pytest.raises(ValueError, match="held elsewhere"):
                grad(loss)(params)
        else:
            assert grad(loss)(params)["0.w"].abs().sum() > 0


def test_nested_blocks_collect_no_garbage(monkeypatch):
    """An outer block holds what an inner one has computed; a collection takes a second where there are many objects."""
    monkeypatch.setattr("gc.collect", None)
    p, x = inputs()
    inner = fzero.remat(block)
    outer = fzero.remat(lambda p, x, scale: inner(p, inner(p, x, scale)["y"], scale), "matmuls")
    assert grad(loss_of(outer))(p, x)["w"].abs().sum() > 0


def test_writing_into_a_result_does_not_reach_an_argument():
    def gradient(f: Any) -> torch.Tensor:
        def loss(x: torch.Tensor) -> torch.Tensor:
            x = x * 1
            y, z = f(torch.tensor(3.0), x)
            return (y.add_(x) * z).sum() + x.sum()

        return grad(loss)(torch.ones(2))

    plain = gradient(lambda p, x: (x.clone(), x * p))
    assert torch.equal(gradient(fzero.remat(lambda p, x: (x, x * p))), plain)
    assert torch.equal(gradient(fzero.remat(lambda p, x: (x.view(2), x * p))), plain)


# ---------------------------------------------------------------- attention


def attention(p: Any, x: torch.Tensor) -> torch.Tensor:
    """Attend with a bias that is a parameter, as T5 does."""
    q, k, v = [(x @ p[name]).unflatten(-1, (2, -1)).transpose(-2, -3) for name in "qkv"]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=p["bias"]).transpose(-2, -3).flatten(-2)


@pytest.mark.parametrize("save", [None, "matmuls"])
def test_attention_whose_mask_is_trained_is_the_plain_ones(save):
    """Torch chooses another kernel where the mask needs a gradient, as in the second run."""
    torch.manual_seed(0)
    params = {name: torch.randn(8, 8) for name in "qkv"} | {"bias": torch.randn(1, 2, 5, 5)}
    x = torch.randn(3, 5, 8)

    def check(f: Any) -> None:
        plain = grad(lambda p: attention(p, x).square().sum())(params)
        assert_trees_close(grad(lambda p: f(p, x).square().sum())(params), plain)
        wanted = {name: p.clone().requires_grad_() for name, p in params.items()}
        f(wanted, x).square().sum().backward()
        assert_trees_close({name: p.grad for name, p in wanted.items()}, plain)

    counted = ops(check, fzero.remat(attention, save))
    assert ("_scaled_dot_product_flash_attention_for_cpu" in counted) == (save is None) and counted["bmm"]
