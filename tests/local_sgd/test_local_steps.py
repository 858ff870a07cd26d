"""local_steps equals replicas in plain torch, on any mesh, stage and schedule."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero import optim
from fzero.local_sgd import LocalSteps, Replicas, local_steps
from fzero.local_sgd._parts import divide_into_parts
from tests.helpers import ALL_STAGES, LEAST, cases, either, examples
from tests.local_sgd import reference
from tests.local_sgd.helpers import NAMES, batches_of, loss, start, train_step_of


def by_replica(mesh: fzero.ranks.Mesh, x: torch.Tensor) -> list[torch.Tensor]:
    """Return each replica's part of a batch that `mesh.split` splits over all ranks."""
    sizes = [size for _, size in mesh.shape]
    parts = x.unflatten(0, (*sizes, -1)).movedim(mesh.axis_names.index("replica"), 0)
    return [part.flatten(0, len(sizes) - 1) for part in parts]


def run(step: LocalSteps, opt: Any, batches: list[torch.Tensor], params: Any = None) -> Any:
    params, state = step.init(start() if params is None else params, opt)
    losses = []
    for x in batches:
        params, state, value = step(params, state, step.mesh.split(x))
        losses.append(value.value)
    return params, state, losses


MESHES = st.sampled_from(
    [
        {"replica": 2, "dp": 2},
        {"dp": 2, "replica": 3},
        {"replica": 1, "dp": 3},
        {"replica": 4, "dp": 1},
        {"node": 2, "replica": 2, "gpu": 2},
    ]
)
OUTERS = {
    "mean": (lambda: None, lambda ps: torch.optim.SGD(ps, 1.0)),
    "nesterov": (
        lambda: optim.sgd(0.7, momentum=0.9, nesterov=True),
        lambda ps: torch.optim.SGD(ps, 0.7, momentum=0.9, nesterov=True),
    ),
}


@given(
    shape=MESHES,
    stage=st.integers(0, 3),
    schedule=st.sampled_from([(1, 1, 0), (2, 1, 0), (3, 2, 0), (3, 1, 2), (4, 3, 1), (4, 4, 3)]),
    mix=st.sampled_from([0.0, 0.25]),
    outer=st.sampled_from(sorted(OUTERS)),
    simulate=st.sampled_from(["vmap", "lockstep"]),
)
@examples(2, 100)
def test_local_sgd_equals_replicas_in_plain_torch(shape, stage, schedule, mix, outer, simulate):
    every, parts, delay = schedule
    mesh, opt = fzero.mesh(**shape, simulate=simulate), optim.adam(0.1)
    sharded = fzero.shard(train_step_of(opt), stage=stage, mesh=mesh)
    make, make_torch = OUTERS[outer]
    step = local_steps(sharded, every=every, outer=make(), parts=parts, delay=delay, mix=mix)
    batches = batches_of(9, mesh.size)
    params, state, losses = run(step, opt, batches)
    entries = divide_into_parts(state.anchor, parts)
    anchor, replicas, expected = reference.train(
        start(),
        loss,
        [by_replica(mesh, x) for x in batches],
        lambda ps: torch.optim.Adam(ps, 0.1),
        make_torch,
        every,
        [[NAMES[i] for i in sorted(part)] for part in entries],
        delay,
        mix,
    )
    torch.testing.assert_close(torch.stack(losses), torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=0)
    torch.testing.assert_close(step.gather(state.anchor), anchor, rtol=1e-10, atol=1e-12)
    inner: Any = step.step
    for mine, theirs in zip(params.trees, replicas, strict=True):
        torch.testing.assert_close(inner.gather(mine), theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("stage", cases((3,), ALL_STAGES))
def test_one_step_and_an_outer_rate_of_1_average_the_parameters(stage):
    """H = 1 with plain SGD inside and outside is data parallelism over all ranks."""
    opt, mesh = optim.sgd(0.1), fzero.mesh(replica=2, dp=2)
    step = local_steps(fzero.shard(train_step_of(opt), stage=stage, mesh=mesh), every=1, outer=optim.sgd(1.0))
    batches = batches_of(5, mesh.size)
    _, state, _ = run(step, opt, batches)
    params, opt_state = start(), opt.init(start())
    for x in batches:
        params, opt_state, _ = train_step_of(opt)(params, opt_state, x)
    torch.testing.assert_close(step.gather(state.anchor), params, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("stage", cases((3,), [0, 2]))
def test_a_jitted_local_step_equals_the_eager_one_bit_for_bit(stage):
    opt, mesh = optim.adam(0.1), fzero.mesh(replica=2, dp=2)
    sharded, batches = fzero.shard(train_step_of(opt), stage=stage, mesh=mesh), batches_of(5, 4)
    runs = [run(local_steps(x, every=2), opt, batches) for x in (sharded, fzero.jit(sharded, backend="fx", **LEAST))]
    (eager, state, losses), (jitted, jitted_state, jitted_losses) = runs
    assert [x.tolist() for x in losses] == [x.tolist() for x in jitted_losses]
    mine, theirs = [fzero.tree.tensors(x) for x in ((eager.trees, state.anchor), (jitted.trees, jitted_state.anchor))]
    assert all(torch.equal(x, y) for x, y in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("stage", cases((3,), ALL_STAGES))
def test_master_weights_are_averaged_in_full_precision(stage):
    """The anchor is the mean of the masters, and after an average parameters are the anchor, rounded."""
    precision = fzero.Precision(param=torch.bfloat16)
    opt, mesh = optim.master_weights(optim.sgd(1e-3), precision), fzero.mesh(replica=2, dp=2)
    sharded = fzero.shard(train_step_of(opt, precision=precision), stage=stage, mesh=mesh)
    step = local_steps(sharded, every=2, outer=optim.sgd(1.0))
    first = start(torch.float32)
    params, state, _ = run(step, opt, batches_of(2, 4, torch.float32), first)
    anchor, inner = step.gather(state.anchor), step.step
    assert {x.dtype for x in anchor.values()} == {torch.float32}
    apart = local_steps(sharded, every=3)
    own, own_state, _ = run(apart, opt, batches_of(2, 4, torch.float32), first)
    masters = [inner.gather(optim.master_params(p, s)) for p, s in zip(own.trees, own_state.inner.trees, strict=True)]
    for name in NAMES:
        torch.testing.assert_close(anchor[name], sum([x[name] for x in masters]) / 2, rtol=1e-6, atol=1e-7)
    for p, s in zip(params.trees, state.inner.trees, strict=True):
        narrow = {name: x.to(torch.bfloat16) for name, x in anchor.items()}
        torch.testing.assert_close(inner.gather(p), narrow, rtol=0, atol=0)
        torch.testing.assert_close(inner.gather(optim.master_params(p, s)), anchor, rtol=0, atol=0)


def test_between_averages_nothing_is_sent_along_the_replicas():
    opt, mesh = optim.adam(0.1), fzero.mesh(replica=2, dp=2)
    step = local_steps(fzero.shard(train_step_of(opt), stage=3, mesh=mesh), every=3)
    params, state = step.init(start(), opt)
    byte_counts = []
    for x in batches_of(3, 4):
        with fzero.collectives.record() as log:
            params, state, _ = step(params, state, mesh.split(x))
        byte_counts.append(sum([e.bytes for e in log.events if "replica" in e.axis.split(",")]))
    assert byte_counts[:2] == [0, 0]
    assert byte_counts[2] == 2 * step.outer_step.step.state_bytes(state.anchor)  # an all_reduce counts twice


def test_tied_leaves_stay_tied_in_local_sgd():
    opt, mesh = optim.sgd(0.1), fzero.mesh(replica=2, dp=2)

    def tied_step(params: Any, opt_state: Any, x: torch.Tensor) -> Any:
        f = lambda p, x: ((x @ p["in"] @ p["out"].T - 1) ** 2).mean()  # noqa: E731
        value, grads = fzero.value_and_grad(f)(params, x)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, value

    for stage in ALL_STAGES:
        w = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        step = local_steps(fzero.shard(tied_step, stage=stage, mesh=mesh), every=2)
        params, state, _ = run(step, opt, batches_of(4, 4), {"in": w, "out": w})
        anchor = step.gather(state.anchor)
        assert anchor["in"] is anchor["out"] and not torch.equal(anchor["in"], w)
        assert step.step.gather(params.trees[1])["in"] is not None


def test_wrong_calls_of_local_sgd_are_refused_with_a_remedy():
    opt, mesh = optim.sgd(0.1), fzero.mesh(replica=2, dp=2)
    sharded = fzero.shard(train_step_of(opt), stage=2, mesh=mesh)
    with pytest.raises(TypeError, match=r"expected fzero\.shard"):
        local_steps(train_step_of(opt), every=2)
    with pytest.raises(ValueError, match="over='node': expected an axis of"):
        local_steps(sharded, over="node", every=2)
    with pytest.raises(ValueError, match=r"fzero\.mesh\(replica=2, dp=1\)"):
        local_steps(fzero.shard(train_step_of(opt), stage=2, mesh=fzero.mesh(replica=2)), every=2)
    with pytest.raises(ValueError, match=r"fzero\.mesh\(dp=2, shard=1\)"):
        local_steps(fzero.shard(train_step_of(opt), stage=2, mesh=fzero.mesh(dp=2)), over="dp", every=2)
    for options, message in (
        ({"every": 0}, "every=0"),
        ({"every": 2, "parts": 3}, "parts=3: expected at most every=2"),
        ({"every": 2, "delay": 2}, "delay=2"),
        ({"every": 2, "mix": 1.0}, r"mix=1\.0"),
    ):
        with pytest.raises(ValueError, match=message):
            local_steps(sharded, **options)
    step = local_steps(sharded, every=2)
    params, state = step.init(start(), opt)
    with pytest.raises(ValueError, match="did you mean over='replica'"):
        local_steps(fzero.shard(train_step_of(opt), stage=2, mesh=mesh, axis="dp"), over="dp", every=2)
    with pytest.raises(TypeError, match="outer='sgd': expected an optimizer"):
        local_steps(sharded, every=2, outer="sgd")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="state is of 1 parts, and this step has parts=2"):
        local_steps(sharded, every=2, parts=2)(*local_steps(sharded, every=2).init(start(), opt), None)
    with pytest.raises(TypeError, match=r"expected those of params, state = step\.init"):
        step(start(), state, mesh.split(batches_of(1, 4)[0]))
    with pytest.raises(ValueError, match="expected dimension 0 to be the 4 ranks along replica, dp"):
        step(params, state, mesh["dp"].split(batches_of(1, 4)[0]))
    with pytest.raises(TypeError, match=r"gather state\.anchor"):
        step.gather(params)
    with pytest.raises(TypeError, match="jit the step inside"):
        fzero.jit(step)
    with pytest.raises(TypeError, match="jit the step inside"):
        fzero.jit(lambda *args: step(*args), backend="fx")(params, state, mesh.split(batches_of(1, 4)[0]))
    for value in (params, state):
        with pytest.raises(TypeError, match=r"a checkpoint cannot hold: .*; save replicas by step\.save\(path"):
            fzero.save("/tmp/never-written", {"p": value})
    other = local_steps(fzero.shard(train_step_of(opt), stage=3, mesh=mesh), every=2)
    with pytest.raises(ValueError, match="step") as caught:
        other(params, state, mesh.split(batches_of(1, 4)[0]))
    assert "new.load(path" in "".join(caught.value.__notes__)
    for call in (step.save, step.load):
        with pytest.raises(TypeError, match=r"expected those of params"):
            call("/tmp/never-written", state, params)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"gather state\.anchor"):
        step.gather(state)
    with pytest.raises(TypeError, match="leaf"):
        fzero.save("/tmp/never-written", {"params": params}, mesh=mesh)
    assert isinstance(params, Replicas)


@pytest.mark.parametrize("every,parts,delay", cases([(4, 2, 1)], [(3, 1, 0), (4, 1, 3)]))
def test_local_sgd_resumed_at_any_step_continues_bit_for_bit(every, parts, delay, tmp_path):
    opt, batches = optim.adam(0.1), batches_of(7, 4)

    def make(stage: int = 2, **shape: int) -> LocalSteps:
        sharded = fzero.shard(train_step_of(opt), stage=stage, mesh=fzero.mesh(**shape))
        return local_steps(sharded, every=every, parts=parts, delay=delay, mix=0.25)

    step = make(replica=2, dp=2)
    params, state = step.init(start(), opt)
    for count, x in enumerate(batches):
        step.save(tmp_path / str(count), params, state)
        params, state, _ = step(params, state, step.mesh.split(x))
    expected = step.gather(state.anchor)
    other = make(stage=3, replica=2, dp=1)  # another stage and world within a replica
    for count in either((3,), range(len(batches))):  # before a send, and while it waits
        for again, tolerance in ((step, 0), (other, 1e-12)):
            loaded, loaded_state = again.load(tmp_path / str(count), *again.init(start(), opt))
            assert loaded_state.count == count
            for x in batches[count:]:
                loaded, loaded_state, _ = again(loaded, loaded_state, again.mesh.split(x))
            actual = again.gather(loaded_state.anchor)
            torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def test_another_number_of_replicas_goes_on_from_an_average_only(tmp_path):
    opt = optim.adam(0.1)

    def make(replicas: int, every: int = 2, parts: int = 1, mix: float = 0.0) -> LocalSteps:
        sharded = fzero.shard(train_step_of(opt), stage=2, mesh=fzero.mesh(replica=replicas, dp=2))
        return local_steps(sharded, every=every, parts=parts, mix=mix)

    step, batches = make(2), batches_of(3, 4)
    params, state = step.init(start(), opt)
    for count, x in enumerate(batches, 1):
        params, state, _ = step(params, state, step.mesh.split(x))
        step.save(tmp_path / str(count), params, state)
    third = make(3, every=5)
    joined, joined_state = third.load(tmp_path / "2", *third.init(start(), opt))
    saved = step.load(tmp_path / "2", *step.init(start(), opt))[1]
    assert len(joined.trees) == 3 and joined_state.count == 2
    for p in joined.trees:
        torch.testing.assert_close(third.step.gather(p), step.gather(saved.anchor), rtol=0, atol=0)
    mine, theirs = joined_state.inner.trees[2], saved.inner.trees[0]
    torch.testing.assert_close(third.step.gather(mine.mu), step.step.gather(theirs.mu), rtol=0, atol=0)
    for wrong, path in ((third, "3"), (make(2, parts=2), "2")):
        with pytest.raises(fzero.checkpoint.CheckpointError, match="right after an average"):
            wrong.load(tmp_path / path, *wrong.init(start(), opt))
    mixed = make(2, mix=0.5)
    mixed.save(tmp_path / "mixed", *run(mixed, opt, batches[:2])[:2])
    with pytest.raises(fzero.checkpoint.CheckpointError, match=r"mix=0\.5"):
        third.load(tmp_path / "mixed", *third.init(start(), opt))
    (tmp_path / "3" / "replica-1").rename(tmp_path / "gone")
    (tmp_path / "1" / "replica-1").rename(tmp_path / "3" / "replica-1")
    with pytest.raises(fzero.checkpoint.CheckpointError, match=r"after step 1, and .* after step 3"):
        step.load(tmp_path / "3", *step.init(start(), opt))


CODED = {"int8": fzero.codecs.int8(block=8), "int4": fzero.codecs.int4(block=4), "float8": fzero.codecs.float8(block=8)}


@pytest.mark.parametrize("codec", CODED.values(), ids=CODED)
def test_a_codec_rounds_each_pseudo_gradient_once_alike_on_any_mesh(codec):
    """The anchor moves by the mean of the replicas' rounded differences, whatever the stage and the mesh within."""
    opt, batches = optim.sgd(0.1), batches_of(1, 4)
    # two replicas whose data do not depend on the number of their ranks
    exact = local_steps(fzero.shard(train_step_of(opt), stage=0, mesh=fzero.mesh(replica=2, dp=1)), every=2)
    params, _, _ = run(exact, opt, batches)
    gradients = [{n: start()[n] - exact.step.gather(p)[n] for n in NAMES} for p in params.trees]
    means = {n: sum([codec.round(x[n].float()) for x in gradients]).double() / 2 for n in NAMES}
    x = torch.cat(by_replica(fzero.mesh(replica=2, dp=2), batches[0]))
    few = ((2, {"replica": 2, "dp": 2}), (3, {"replica": 2, "node": 2, "gpu": 1}))
    many: Any = (*few, (0, {"replica": 2, "dp": 2}), (3, {"replica": 2, "dp": 1}))
    for stage, shape in either(few, many):
        sharded = fzero.shard(train_step_of(opt), stage=stage, mesh=fzero.mesh(**shape))
        step = local_steps(sharded, every=1, outer=optim.sgd(1.0), codec=codec)
        anchor = step.gather(run(step, opt, [x])[1].anchor)
        for name in NAMES:
            torch.testing.assert_close(anchor[name], start()[name] - means[name], rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_a_codec_sends_fewer_bytes_between_replicas_and_is_saved_decoded(tmp_path):
    opt, mesh = optim.sgd(0.01), fzero.mesh(replica=2, dp=2)
    byte_counts, saved = {}, {}
    for name, codec in (("float32", None), ("int8", fzero.codecs.int8()), ("int4", fzero.codecs.int4())):
        step = local_steps(fzero.shard(train_step_of(opt), stage=3, mesh=mesh), every=4, delay=2, codec=codec)
        wide = {"first.w": (3, 4096), "first.b": (4096,), "second.w": (4096,)}
        g = torch.Generator().manual_seed(2)
        first = {**start(torch.float32), **{n: torch.randn(shape, generator=g) / 64 for n, shape in wide.items()}}
        params, state = step.init(first, opt)
        with fzero.collectives.record() as log:
            for x in batches_of(5, 4, torch.float32):
                params, state, _ = step(params, state, mesh.split(x))
        byte_counts[name] = sum([e.bytes for e in log.events if e.axis == "replica"])
        step.save(tmp_path / name, params, state)
        again = step.load(tmp_path / name, *step.init(first, opt))
        runs = []
        for p, s in ((params, state), again):
            x = batches_of(6, 4, torch.float32)[-1]
            runs.append(step.gather(step(p, s, mesh.split(x))[1].anchor))
        torch.testing.assert_close(*runs, rtol=0, atol=0)
        saved[name] = runs[0]
    # an all_reduce counts its buffer twice, and an all_gather that of both replicas
    assert byte_counts["int8"] / byte_counts["float32"] < 0.27 and byte_counts["int4"] / byte_counts["float32"] < 0.14
    assert not torch.equal(saved["int8"]["first.w"], saved["float32"]["first.w"])


@pytest.mark.slow
@pytest.mark.parametrize("stage", cases((3,), (0, 2)))
def test_replicas_with_split_matrices_learn_as_whole_ones(stage):
    """Replicas of 2 x 2 ranks, over two of which matrices are split, learn what replicas of 2 ranks learn."""
    opt = optim.chain(optim.clip_by_global_norm(1.0), optim.adam(0.1))
    g = torch.Generator().manual_seed(0)
    full = {name: torch.randn(4, 6, generator=g, dtype=torch.float64) for name in ("up", "down")}

    def split_loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(fzero.collectives.pvary(x, "tp") @ p["up"])
        return ((fzero.collectives.psum_invariant(hidden @ p["down"].T, "tp") - x) ** 2).mean()

    def train_step(params: Any, opt_state: Any, x: torch.Tensor) -> Any:
        value, grads = fzero.value_and_grad(split_loss)(params, x)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, value

    anchors = []
    for tp in (1, 2):
        mesh = fzero.mesh(replica=2, dp=2, tp=tp)
        rule = lambda path, leaf: {"tp": 1}  # noqa: E731
        sharded = fzero.shard(train_step, stage=stage, mesh=mesh, axis="dp", split=rule)
        step = local_steps(sharded, every=2, parts=2)
        params, state = step.init(full, opt)
        for seed in range(4):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            params, state, _ = step(params, state, mesh.split(x, ("replica", "dp")))
        anchors.append(step.gather(state.anchor))
    torch.testing.assert_close(*anchors, rtol=1e-10, atol=1e-12)


def test_a_local_step_changes_none_of_its_arguments():
    """A leaf that the step returns as it is gets new memory, since an average is written into results."""
    mesh, g = fzero.mesh(replica=2, dp=2), torch.Generator().manual_seed(0)

    def step_by_data(params: Any, opt_state: Any, x: torch.Tensor) -> Any:
        return ({"w": params["w"] + x.sum() if x.shape[1] == 1 else params["w"]}, opt_state, x.sum().new_zeros(()))

    step = local_steps(fzero.shard(step_by_data, stage=0, mesh=mesh, axis="dp", check=False), every=2)
    params, state = step.init({"w": torch.zeros(3)}, optim.sgd(0.1))
    one = fzero.PerRank(torch.tensor([[[1.0]], [[2.0]]]), ("replica",))
    params, state, _ = step(params, state, one)  # the replicas differ from here on
    before = [tree["w"].clone() for tree in params.trees]
    again, _, _ = step(params, state, fzero.PerRank(torch.randn(2, 1, 2, generator=g), ("replica",)))
    assert [tree["w"].tolist() for tree in params.trees] == [y.tolist() for y in before]
    assert again.trees[0]["w"].tolist() == again.trees[1]["w"].tolist() == [1.5] * 3


@pytest.mark.parametrize("options", [{"every": 4}, {"every": 4, "parts": 2, "delay": 3}], ids=["whole", "delayed"])
def test_average_now_averages_the_steps_since_the_last_average(options):
    opt, mesh = optim.sgd(0.1), fzero.mesh(replica=2, dp=2)
    step = local_steps(fzero.shard(train_step_of(opt), stage=3, mesh=mesh), **options)
    params, state, _ = run(step, opt, batches_of(3, 4))
    before = [step.step.gather(tree) for tree in params.trees]
    finished, done = step.average_now(params, state)
    anchor = step.gather(done.anchor)
    assert done.count == 3 and all(x is None for x in done.pending_sums)
    for tree, own in zip(params.trees, before, strict=True):  # the arguments stay as they are
        torch.testing.assert_close(step.step.gather(tree), own, rtol=0, atol=0)
    for tree in finished.trees:
        torch.testing.assert_close(step.step.gather(tree), anchor, rtol=0, atol=0)
    mean = {name: (before[0][name] + before[1][name]) / 2 for name in NAMES}
    torch.testing.assert_close(anchor, mean, rtol=1e-12, atol=1e-12)
    assert not torch.equal(anchor["first.w"], step.gather(state.anchor)["first.w"])
