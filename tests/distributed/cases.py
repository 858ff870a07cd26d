"""Cases that every rank of a torchrun world runs; see test_gloo.py.

One alone: torchrun --nproc-per-node 2 -m tests.distributed.cases NAME
"""

import datetime
import itertools
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fzero
from fzero import PerRank, optim, tree
from fzero.collectives import gloo
from fzero.sharding import Shard
from fzero.sharding._boxes import is_box
from fzero.testing import assert_trees_close
from tests.collectives.helpers import COLLECTIVES, draw_stacked
from tests.distributed.harness import Cases, into, run
from tests.helpers import ALL_STAGES, LEAST, either, mlp_batch, mlp_loss, mlp_params, train_step_for
from tests.random.helpers import BATCH, PARAMS, keyed_step, made_by, masks

CASES: Cases = {}
SLOW: Cases = {}  # of them; only make test-all runs these
case, slow_case = into(CASES), into(CASES, SLOW)


def own_part(mesh: fzero.ranks.Mesh, value: torch.Tensor) -> torch.Tensor:
    """This rank's part of what a simulation stacks."""
    return value[mesh.rank]


@case
def collectives_equal_the_simulation(mesh: fzero.ranks.Mesh) -> None:
    """Value, gradient, second gradient, jvp and per-sample gradient of every collective, in both simulations."""
    n = mesh.size
    for f, shape, _ in COLLECTIVES.values():
        X = draw_stacked(n, 3, *shape(n))

        def loss(x: torch.Tensor, f: Any = f) -> torch.Tensor:
            return (torch.sin(f(x)) ** 2).sum()

        programs = [
            lambda x, f=f: f(x[0]),
            lambda x, loss=loss: torch.func.grad(loss)(x[0]),
            lambda x, loss=loss: torch.func.grad(lambda x: torch.func.grad(loss)(x).square().sum())(x[0]),
            lambda x, f=f: torch.func.jvp(f, (x[0],), (x[1],))[1],
            lambda x, loss=loss: torch.vmap(torch.func.grad(loss))(x),
        ]
        for program in programs:
            boxed = lambda x, program=program: PerRank(program(x))  # noqa: E731
            got = mesh.spmd(boxed)(mesh.local(own_part(mesh, X))).value
            for simulate in either(("lockstep",), ("vmap", "lockstep")):
                expected = own_part(mesh, fzero.mesh(dp=n, simulate=simulate).spmd(boxed)(PerRank(X)).value)
                # bitwise on two ranks; gloo sums in its own order on more
                torch.testing.assert_close(got, expected, rtol=0 if n == 2 else 1e-12, atol=0 if n == 2 else 1e-12)


@case
def messages_in_flight_arrive_where_they_belong(mesh: fzero.ranks.Mesh) -> None:
    """Several at once, of several shapes, waited for in another order, gathers twice; sums in the order of ranks."""
    n, group = mesh.size, torch.distributed.group.WORLD.group_name  # pyright: ignore
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        g = torch.Generator().manual_seed(0)
        data = [(10 * torch.randn(n, n * m, 3, generator=g)).to(dtype) for m in (1, 5, 2000)]
        before = [x.clone() for x in data]
        sums = [gloo.reduce_scatter(x[mesh.rank], "sum", n, group) for x in data]
        gathers = [gloo.all_gather(x[mesh.rank], n, group) for x in data]
        for x, scattered, gathered in reversed(list(zip(data, sums, gathers, strict=True))):
            for _ in range(2):
                assert torch.equal(gloo.wait(gathered), x.flatten(0, 1))
            assert torch.equal(gloo.wait(scattered), x.sum(0, dtype=dtype).chunk(n)[mesh.rank])
        assert all(torch.equal(x, y) for x, y in zip(data, before, strict=True))  # what was sent is as it was
    z = torch.randn(n * n, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(gloo.wait(gloo.all_gather(z.conj(), n, group))[: len(z)], z.conj())
    assert torch.allclose(gloo.wait(gloo.reduce_scatter(z.conj(), "sum", n, group)), n * z.conj().chunk(n)[mesh.rank])


@case
def messages_are_not_taken_for_a_users(mesh: fzero.ranks.Mesh) -> None:
    """A user who waits for a message of a small tag gets it, though our collectives run before it is sent."""
    n, rank = mesh.size, mesh.rank
    limit = datetime.timedelta(seconds=30)  # who takes another's message leaves him waiting
    process_group: Any = torch.distributed.new_group(list(range(n)), timeout=limit)  # its exchanges count from 0
    ahead, behind = (rank + 1) % n, (rank - 1) % n
    received = [torch.zeros(3) for _ in range(4)]
    works = [torch.distributed.irecv(x, behind, process_group, tag) for tag, x in enumerate(received)]
    for i in range(4):
        mine = torch.full((3,), float(10 * i + rank))
        gathered = gloo.wait(gloo.all_gather(mine, n, process_group.group_name))
        assert torch.equal(gathered, 10 * i + torch.arange(n).repeat_interleave(3)), gathered
    messages = [
        torch.distributed.isend(torch.full((3,), 100.0 * rank + tag), ahead, process_group, tag) for tag in range(4)
    ]
    for work in [*works, *messages]:
        work.wait()
    assert all(torch.equal(x, torch.full((3,), 100.0 * behind + tag)) for tag, x in enumerate(received)), received


@case
def reductions_other_than_sums_are_torchs(mesh: fzero.ranks.Mesh) -> None:
    """Only sums are messages: the greatest of each element is not the sum."""
    n, group = mesh.size, torch.distributed.group.WORLD.group_name  # pyright: ignore
    x = torch.randn(n, 2 * n, generator=torch.Generator().manual_seed(0))
    got = gloo.wait(gloo.reduce_scatter(x[mesh.rank], "max", n, group))
    assert torch.equal(got, x.amax(0).chunk(n)[mesh.rank])


@case
def a_unit_arrives_in_its_leaves(mesh: fzero.ranks.Mesh) -> None:
    """Leaves that end within a rank's part, an empty one, one without dimensions, a gap; as messages, and without."""
    n, group = mesh.size, torch.distributed.group.WORLD.group_name  # pyright: ignore
    applies = gloo._uses_messages
    for dtype, messages in itertools.product((torch.float32, torch.bfloat16, torch.int64), (True, False)):
        for k in (1, 2, 7, 1000):
            data = (torch.arange(n * k) * 10).to(dtype)
            shapes = [(k // 2,), (0, 3), (), (1, max(n * k - k // 2 - 3, 0))]
            offsets = [0, k // 2, min(k // 2, n * k - 1), min(k // 2 + 2, n * k)]
            leaves = [torch.full(shape, -1, dtype=dtype) for shape in shapes]
            gloo._uses_messages = applies if messages else lambda x, group: False
            try:
                started = gloo.all_gather_into(data.chunk(n)[mesh.rank], n, group, leaves, offsets)
            finally:
                gloo._uses_messages = applies
            for i in reversed(range(len(leaves))):
                assert gloo.wait(started[i]) is leaves[i]
                expected = data[offsets[i] :][: leaves[i].numel()].view(shapes[i])
                assert torch.equal(leaves[i], expected), (k, i, leaves[i], expected)


@case
def every_stage_equals_unsharded_training(mesh: fzero.ranks.Mesh) -> None:
    simulated, n = fzero.mesh(dp=mesh.size, simulate=True), mesh.size
    lockstep = fzero.mesh(dp=mesh.size, simulate="lockstep")
    opts = [
        optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(1e-2, eps=1e-3, mask=_matrices)),
        optim.sgd(0.1, momentum=0.9),
        optim.adam(1e-2, eps=1e-3, moments=optim.Moments("int8", full=lambda path, leaf: leaf.ndim == 1)),
    ]
    pairs = [*zip(opts, (3, 1, 1), strict=True)]
    few = [(pairs[0], 3), (pairs[2], 2)]
    for (opt, k), stage in either(few, [*itertools.product(pairs, ALL_STAGES)]):
        train_step = train_step_for(mlp_loss, opt, micro_batches=k)
        step = fzero.shard(train_step, stage=stage, mesh=mesh, check=True)
        twin = fzero.shard(train_step, stage=stage, mesh=simulated)
        brother = fzero.shard(train_step, stage=stage, mesh=lockstep)
        params = {**mlp_params(), "empty": torch.zeros(0, 3).double()}
        state, sim, ref = step.init(params, opt), twin.init(params, opt), (params, opt.init(params))
        other = brother.init(params, opt)
        for i in range(3):
            batch = mlp_batch(2 * n * k, seed=i)
            *ref, ref_loss = train_step(*ref, batch)
            *sim, sim_loss = twin(*sim, simulated.split(batch))
            *other, other_loss = brother(*other, lockstep.split(batch))
            *state, loss = step(*state, mesh.split(batch))
            assert_trees_close([loss, sim_loss], [ref_loss, ref_loss])
        assert_trees_close(step.gather(list(state)), list(ref))
        assert_trees_close(_own_shards(mesh, sim), _shards(state))
        # in lockstep bit for bit on two ranks: a vmap may merge matrix products, lockstep runs what a process does
        exact = 0 if n == 2 else None
        assert_trees_close([loss, *_own_shards(mesh, other)], [other_loss, *_shards(state)], rtol=exact)
        assert step.state_bytes(*state) == twin.state_bytes(*sim)


def _matrices(params: Any) -> Any:
    return tree.map(lambda p: p.ndim >= 2, params)


def _shards(values: Any) -> list[torch.Tensor]:
    return [x.data for x in tree.flatten(values, is_box)[0] if isinstance(x, Shard)]


def _own_shards(mesh: fzero.ranks.Mesh, values: Any) -> list[torch.Tensor]:
    return [own_part(mesh, x) for x in _shards(values)]


@case
def elements_moved_are_the_simulations(mesh: fzero.ranks.Mesh) -> None:
    simulated = fzero.mesh(dp=mesh.size, simulate=True)
    opt = optim.chain(optim.clip_by_global_norm(1.0), optim.adam(1e-2))
    for stage, k in either([(1, 1), (3, 4)], [*itertools.product(ALL_STAGES, (1, 4))]):
        logs = []
        for m in (mesh, simulated):
            step = fzero.shard(train_step_for(mlp_loss, opt, micro_batches=k), stage=stage, mesh=m)
            state = step.init(mlp_params(), opt)
            with fzero.collectives.record() as log:
                step(*state, m.split(mlp_batch(mesh.size * k)))
            logs.append(log)
        assert sorted(map(str, logs[0].unit_events)) == sorted(map(str, logs[1].unit_events))
        assert logs[0].other_events == logs[1].other_events


@case
def blocks_under_remat_are_gathered_in_each_pass(mesh: fzero.ranks.Mesh) -> None:
    n, opt, layers, width = dict(mesh.shape)["dp"], optim.adam(1e-2), 3, 7
    block = fzero.remat(lambda p, x: torch.tanh(x @ p["w"]))

    def loss_of(f: Any) -> Any:
        def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
            for p in params["blocks"]:
                x = f(p, x)
            return x.square().mean()

        return loss

    g = torch.Generator().manual_seed(0)
    params = {"blocks": [{"w": torch.randn(width, width, generator=g).double() / 8} for _ in range(layers)]}
    x = torch.randn(4 * n, width, generator=g).double()
    plain = train_step_for(loss_of(lambda p, x: torch.tanh(x @ p["w"])), opt)(params, opt.init(params), x)
    few = [(1, True), (3, True), (3, False)]
    for stage, whole in either(few, [*itertools.product(ALL_STAGES, (True, False))]):
        step = fzero.shard(train_step_for(loss_of(block), opt, gather=whole), stage=stage, mesh=mesh)
        state = step.init(params, opt)
        with fzero.collectives.record() as log:
            out = step(*state, mesh.split(x))
        assert_trees_close([step.gather(list(out[:2])), out[2]], [list(plain[:2]), plain[2]])
        gathers = sum(e.kind == "all_gather" for e in log.events)
        assert gathers == (0 if stage == 0 else layers if stage < 3 or whole else 2 * layers)


@case
def local_batches_and_results_that_differ(mesh: fzero.ranks.Mesh) -> None:
    box = mesh.local(lambda rank: {"r": torch.tensor(float(rank))})
    assert box.value["r"].item() == mesh.rank
    total = mesh.spmd(lambda b: fzero.collectives.psum(b["r"]))(box)
    assert total.item() == sum(range(mesh.size))
    assert mesh.spmd(lambda b: PerRank(b["r"] + 1))(box).value.item() == mesh.rank + 1


@case
def a_unit_that_only_some_ranks_use_is_reduced_in_order_on_all(mesh: fzero.ranks.Mesh) -> None:
    """Data-dependent experts of equal size: each rank uses its own, and one is used by none."""
    params = {"shared": torch.ones(3), "experts": [{"w": torch.full((5,), float(i + 1))} for i in range(mesh.size + 1)]}

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        order = [mesh.rank] if mesh.rank % 2 else [mesh.rank, 0]
        return sum((params["experts"][i]["w"].square().sum() for i in order), x.sum() * params["shared"].sum())

    x = mesh.local(torch.ones(2))
    expected = [0.0] * (mesh.size + 1)
    for rank in range(mesh.size):
        for i in [rank] if rank % 2 else [rank, 0]:
            expected[i] += 2.0 * (i + 1) / mesh.size
    for stage, k in itertools.product(ALL_STAGES, (1, 2)):

        def program(params: Any, x: torch.Tensor, stage: int = stage, k: int = k) -> Any:
            boxes = params if stage == 0 else fzero.partition(params, reduce_grads="once" if stage == 1 else "each")
            boxes = tree.map(torch.clone, boxes) if stage == 3 else boxes
            _value, grads = fzero.value_and_grad(loss, micro_batches=k)(boxes, x)
            return fzero.gather(grads)

        grads = mesh.spmd(program)(params, x)
        for i, e in enumerate(expected):
            torch.testing.assert_close(grads["experts"][i]["w"], torch.full((5,), e))


@case
def boxes_made_in_a_real_run_hold_no_whole_parameters(mesh: fzero.ranks.Mesh) -> None:
    step = fzero.shard(train_step_for(mlp_loss, optim.sgd(0.1)), stage=3, mesh=mesh)
    params, _ = step.init(mlp_params(), optim.sgd(0.1))
    assert all(x.origin is None for x in tree.flatten(params, is_box)[0] if isinstance(x, Shard))


@case
def trees_built_differently_are_refused(mesh: fzero.ranks.Mesh) -> None:
    """Their order, a leaf, a shape or a dtype differs: they are refused also when all values are equal."""
    zeros = torch.zeros(4)
    trees = [
        ({"a": zeros, "b": zeros}, {"b": zeros, "a": zeros}, "on rank 0 params leaf 'a' is float32 [4]"),
        ({"a": zeros}, {"a": zeros, "extra": zeros}, "on rank 1 params leaf 'extra'"),
        ({"a": zeros}, {"a": torch.zeros(8)}, "float32 [8]"),
        ({"a": zeros}, {"a": zeros.double()}, "float64 [4]"),
    ]
    for one, other, message in trees:
        step = fzero.shard(train_step_for(mlp_loss, optim.sgd(0.1)), stage=0, mesh=mesh)
        try:
            step.init(other if mesh.rank == 1 else one, optim.sgd(0.1))
        except ValueError as error:
            assert "the ranks hold different trees" in str(error) and message in str(error), error
        else:
            raise AssertionError("not refused")


@case
def init_and_partition_take_and_give_whole_leaves(mesh: fzero.ranks.Mesh) -> None:
    """They equal the simulation bit for bit, and gather is partition's inverse; donated or not."""
    opt = optim.chain(optim.adamw(1e-2), optim.params_ema(0.9))
    simulated = fzero.mesh(dp=mesh.size, simulate=True)
    few = [(1, True), (3, False)]
    for stage, donate in either(few, [*itertools.product(ALL_STAGES, (False, True))]):
        step, twin = (fzero.shard(train_step_for(mlp_loss, opt), stage=stage, mesh=m) for m in (mesh, simulated))
        state = step.init(tree.map(torch.clone, mlp_params()), opt, donate=donate)
        expected = twin.init(mlp_params(), opt)
        assert_trees_close(step.gather(state), twin.gather(expected), rtol=0)
        *state, _ = step(*state, mesh.split(mlp_batch(mesh.size * 2)))
        whole = step.gather(state)
        again = step.partition(tree.map(torch.clone, whole), like=state, donate=donate)
        assert tree.flatten(again)[1] == tree.flatten(state)[1]
        assert_trees_close(step.gather(again), whole, rtol=0)
        assert_trees_close(step.gather(step.partition(whole[0])), whole[0], rtol=0)
    try:
        step.partition({"w": torch.full((3,), float(mesh.rank))})
    except ValueError as error:
        assert "values leaf 'w' differs between rank 0 and rank 1" in str(error)
    else:
        raise AssertionError("not refused")


@case
def functions_that_make_other_shapes_are_refused_before_they_run(mesh: fzero.ranks.Mesh) -> None:
    step = fzero.shard(train_step_for(mlp_loss, optim.sgd(0.1)), stage=3, mesh=mesh)
    try:
        step.init(lambda: {"w": torch.zeros((3, 2) if mesh.rank else (2, 3))}, optim.sgd(0.1))
    except ValueError as error:
        assert "on rank 0 params leaf 'w' is float32 [2, 3], and on rank 1" in str(error), error
    else:
        raise AssertionError("not refused")


@case
def ranks_that_start_apart_are_refused(mesh: fzero.ranks.Mesh) -> None:
    params = {"a": torch.ones(3), "b": {"w": torch.full((2,), float(mesh.rank))}}
    step = fzero.shard(train_step_for(mlp_loss, optim.sgd(0.1)), stage=2, mesh=mesh)
    try:
        step.init(params, optim.sgd(0.1))
    except ValueError as error:
        assert "params leaf 'b.w' differs between rank 0 and rank 1" in str(error)
    else:
        raise AssertionError("not refused")


@case
def plain_values_that_differ_by_rank_are_refused(mesh: fzero.ranks.Mesh) -> None:
    """They are refused at the first call by default, at each call with check=True."""

    def train_step(params: Any, x: torch.Tensor) -> Any:
        return params, {"loss": x.sum()}

    w, ones = {"w": torch.ones(1)}, mesh.local(torch.ones(2))
    own_rank = torch.full((1,), float(mesh.rank))
    for check, argument, batch, message in (
        (True, w, mesh.local(own_rank), "result 1, leaf 'loss' differs"),
        ("first", w, mesh.local(own_rank), "result 1, leaf 'loss' differs"),
        ("first", {"w": own_rank}, ones, "argument 0, leaf 'w' differs between rank 0 and rank 1"),
        ("first", w, own_rank, "argument 1 differs"),  # a batch that is not wrapped
        ("first", w, float(mesh.rank), "the ranks hold different trees: on rank 0 argument 1 is 0.0"),
    ):
        step = fzero.shard(train_step, stage=0, mesh=mesh, check=check)
        if check is True:
            step(w, ones)  # a good first call
        try:
            step(argument, batch)
        except ValueError as error:
            assert message in str(error), error
        else:
            raise AssertionError("not refused")
    step = fzero.shard(train_step, stage=0, mesh=mesh)
    step(w, ones)
    step(w, mesh.local(own_rank))
    fzero.shard(train_step, stage=0, mesh=mesh, check=False)(w, mesh.local(own_rank))


@case
def a_step_traces_with_make_fx(mesh: fzero.ranks.Mesh) -> None:
    """The graph holds the collectives, and gives the step's numbers on other data."""
    opt = optim.adam(1e-2, eps=1e-3)
    for stage in either((3,), (2, 3)):
        step = fzero.shard(train_step_for(mlp_loss, opt), stage=stage, mesh=mesh, check=False)
        args = (*step.init(mlp_params(), opt), mesh.split(mlp_batch(mesh.size * 2)))
        leaves, structure = tree.flatten(args)

        def flat(*leaves: Any, step: Any = step, structure: Any = structure) -> Any:
            return tree.tensors(step(*tree.unflatten(structure, list(leaves))))

        graph = make_fx(flat)(*[torch.zeros_like(x) for x in leaves])
        names = [str(node.target) for node in graph.graph.nodes]
        for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
            assert sum(name in target for target in names) == 4, (stage, names)
        # the graph's collectives are gloo's, which sums four buffers in its own order
        assert_trees_close(graph(*leaves), flat(*leaves), rtol=0.0 if mesh.size == 2 else 1e-12)


@case
def a_mesh_of_another_size_than_the_world_is_refused(mesh: fzero.ranks.Mesh) -> None:
    try:
        fzero.mesh(dp=mesh.size + 1)
    except ValueError as error:
        assert f"dp={mesh.size + 1}, but the world has {mesh.size} processes" in str(error)
    else:
        raise AssertionError("not refused")
    assert fzero.mesh(dp=-1).size == mesh.size and not fzero.mesh(dp=-1).simulated
    assert repr(mesh) == f"Mesh(dp={mesh.size}, rank {mesh.rank})"


@slow_case
def compiled_steps_equal_eager_ones(mesh: fzero.ranks.Mesh) -> None:
    if mesh.size > 2:
        return
    params, opt = (
        {"b": [{"w": mlp_params()["blocks"][0]["w"]}], "h": torch.ones(3).double()},
        optim.adam(1e-2, eps=1e-3),
    )

    def loss(params: Any, batch: Any) -> torch.Tensor:
        return (torch.tanh(batch["x"] @ params["b"][0]["w"])[:, :3] * params["h"] - batch["y"]).square().mean()

    for stage in ALL_STAGES:
        torch.compiler.reset()
        step = fzero.shard(train_step_for(loss, opt), stage=stage, mesh=mesh)
        compiled = torch.compile(step, fullgraph=True, backend="inductor" if stage == 3 else "aot_eager")
        state = other = step.init(params, opt)
        for i in range(2):
            batch = mesh.split(mlp_batch(4, seed=i))
            *state, expected = step(*state, batch)
            *other, got = compiled(*other, batch)
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
        assert_trees_close(step.gather(list(other)), step.gather(list(state)))


@case
def draws_by_key_are_those_of_the_simulations(mesh: fzero.ranks.Mesh) -> None:
    """Bit for bit: a rank program's, and the dropout of a step at every stage, jitted too."""
    key, n = fzero.random.key(3), mesh.size
    program = lambda k, x: PerRank(fzero.random.seeded(masks)(k, k, x))  # noqa: E731
    simulated = [fzero.mesh(dp=n, simulate=simulate) for simulate in ("vmap", "lockstep")]
    for m in simulated:
        expected = m.spmd(program)(key, torch.ones(5, 3)).value
        assert own_part(mesh, expected).equal(mesh.spmd(program)(key, torch.ones(5, 3)).value)
        assert expected.flatten(1).unique(dim=0).shape[0] == n
    opt, before = optim.adam(1e-2), torch.get_rng_state()
    twin = fzero.shard(keyed_step(opt, micro_batches=3), stage=0, mesh=simulated[0])
    *_, expected = twin(*twin.init(PARAMS, opt), simulated[0].split(BATCH), key)
    for stage in either((3,), ALL_STAGES):
        step = fzero.shard(keyed_step(opt, micro_batches=3), stage=stage, mesh=mesh, check=True)
        for f in (step, fzero.jit(step, backend="fx", **LEAST)) if stage in either((3,), (1, 3)) else (step,):
            *_, dropped = f(*step.init(PARAMS, opt), mesh.split(BATCH), key)
            assert dropped.value.equal(own_part(mesh, expected.value))
        params, _ = step.init(lambda: made_by(key), opt)
        assert_trees_close(step.gather(params), made_by(key), rtol=0)
    assert torch.equal(before, torch.get_rng_state())


if __name__ == "__main__":
    run(CASES)
