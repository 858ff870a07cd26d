"""A model of transformers trains as a pipeline as it trains whole, on any mesh, by any schedule."""

from typing import Any

import pytest
import torch

import fzero
from fzero import optim
from fzero.nn import pipeline
from tests.nn.models import MODELS, batch_for, build


def losses(output: Any, batch: Any) -> Any:
    """Return the sum of the losses of tokens that count, and how many there are; of images likewise."""
    each = torch.nn.functional.cross_entropy(output.logits.movedim(-1, 1), batch["labels"], reduction="none")
    weight = batch["attention_mask"].to(each.dtype) if "attention_mask" in batch else torch.ones_like(each)
    return (each * weight).sum(), weight.sum()


def inputs(batch: Any) -> Any:
    return {name: x for name, x in batch.items() if name != "labels"}


def train(loss: Any, params: Any, batch: Any, micro_batches: int = 1, **sharded: Any) -> Any:
    """Train for two steps; return the parameters and the loss."""
    opt = optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(0.1, momentum=0.9))

    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        value, grads = fzero.value_and_grad(loss, reduce="weighted", micro_batches=micro_batches)(params, batch)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, value

    if not sharded:
        opt_state, value = opt.init(params), None
        for _ in range(2):
            params, opt_state, value = train_step(params, opt_state, batch)
        return params, value
    mesh = sharded["mesh"]
    step = fzero.shard(train_step, axis=("dp", "pp"), **sharded)
    params, opt_state = step.init(params, opt)
    value = None
    for _ in range(2):
        params, opt_state, value = step(params, opt_state, mesh.split(batch, "dp"))
    return step.gather(params), value


# a model, schedule, stages of a rank, blocks of each stage, ZeRO's stage, ranks, simulation, remat; those marked slow
# are more of the same
CASES = [
    ("llama", "interleaved", 2, None, 3, 2, "lockstep", True),
    pytest.param("gemma2", "gpipe", 1, 4, 3, 3, "vmap", False, marks=pytest.mark.slow),
    pytest.param("gpt2", "1f1b", 1, None, 1, 2, "lockstep", False, marks=pytest.mark.slow),
    pytest.param("mixtral", "zb", 1, None, 2, 2, "lockstep", False, marks=pytest.mark.slow),
    *[
        pytest.param(name, *case, marks=pytest.mark.slow)
        for name in MODELS
        for case in (
            ("1f1b", 1, 4, 3, 3, "lockstep", False),
            ("zbv", 2, None, 1, 2, "lockstep", "matmuls"),
            ("gpipe", 1, None, 2, 2, "vmap", True),
        )
        if case[-2] == "lockstep" or name not in ("mixtral", "bert")  # whose experts, or masks, depend on data
    ],
]


@pytest.mark.parametrize("name,schedule,stages,depth,zero,ranks,simulate,remat", CASES)
def test_a_pipelined_module_trains_as_the_whole_model(name, schedule, stages, depth, zero, ranks, simulate, remat):
    model, batch = build(name), {key: torch.cat([x, x.roll(1, -1), x.flip(0), x]) for key, x in batch_for(name).items()}
    if "attention_mask" in batch:
        batch["attention_mask"] = batch["attention_mask"].sort(-1, descending=True).values  # short sequences end early
    loss, params, join = pipeline(
        model,
        losses,
        inputs=inputs,
        micro_batches=2,
        schedule=schedule,
        stages_per_rank=stages,
        depth=depth,
        remat=remat,
    )
    mesh = fzero.mesh(dp=2, pp=ranks, simulate=simulate)
    stacked = loss.stack(params, mesh)
    got, value = train(loss, stacked, batch, stage=zero, mesh=mesh, split=loss.split)
    apply, whole, buffers = fzero.nn.functional(model)
    # in micro-batches too: gemma2 sums gradients of its norms in float32
    want, expected = train(lambda p, b: losses(apply(p, buffers, **inputs(b))[0], b), whole, batch, micro_batches=4)
    named = join(loss.unstack(got, mesh))
    assert named.keys() == want.keys()
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)
    for key, x in want.items():
        torch.testing.assert_close(named[key], x, rtol=1e-12, atol=1e-13, msg=lambda text, key=key: f"{key}: {text}")


def test_a_rank_holds_its_blocks_and_its_part_of_the_rest():
    model = build("llama")
    loss, params, _ = pipeline(model, losses, inputs=inputs, micro_batches=2)
    mesh = fzero.mesh(dp=2, pp=2)
    opt = optim.adamw(1e-3)
    step = fzero.shard(lambda p, o, b: (p, o), stage=3, mesh=mesh, axis=("dp", "pp"), split=loss.split)
    held = step.state_bytes(*step.init(loss.stack(params, mesh), opt))
    whole = 3 * sum(p.nbytes for p in model.parameters())
    assert whole / 4 <= held <= 1.05 * whole / 4


def test_a_folder_of_hugging_face_is_read_and_written_by_the_models_names(tmp_path):
    """Straight from the shards of a pipeline: each rank its own blocks."""
    model, other = build("llama"), build("llama")
    for p in other.parameters():
        torch.nn.init.normal_(p)
    other.save_pretrained(tmp_path / "start")
    piped = pipeline(model, losses, inputs=inputs, micro_batches=2, schedule="interleaved", stages_per_rank=2)
    loss, params, join = piped
    mesh = fzero.mesh(dp=2, pp=2)
    step = fzero.shard(lambda p, s, b: (p, s), 3, mesh, split=loss.split)
    meta = fzero.tree.map(lambda x: x.to("meta"), params)
    like = step.partition(loss.stack(meta, mesh))
    read = fzero.checkpoint.hf.read(tmp_path / "start", like, mesh, name=piped.name)
    result = join(loss.unstack(step.gather(read), mesh))
    for name, p in other.named_parameters():
        assert torch.equal(result[name], p), name
    fzero.checkpoint.hf.write(tmp_path / "tuned", read, mesh, name=piped.name)
    model.config.save_pretrained(tmp_path / "tuned")
    again = type(model).from_pretrained(tmp_path / "tuned")
    for name, p in other.named_parameters():
        assert torch.equal(dict(again.named_parameters())[name], p), name
    with pytest.raises(ValueError, match=r"leaf 'params.blocks.0..*' is not a parameter of the module"):
        fzero.checkpoint.hf.write(tmp_path / "tuned", {"params": read}, mesh, name=piped.name)


@pytest.mark.slow
def test_a_pipelined_module_evaluates_examples():
    model = build("gpt2").eval()
    batch = {name: x.repeat(2, *[1] * (x.ndim - 1)) for name, x in batch_for("gpt2").items()}

    def each(output: Any, batch: Any) -> Any:
        return torch.nn.functional.cross_entropy(output.logits.movedim(-1, 1), batch["labels"], reduction="none").mean(
            1
        )

    with torch.no_grad():
        expected = each(model(**inputs(batch)), batch)
    loss, params, _ = pipeline(model, each, inputs=inputs, micro_batches=2)
    mesh = fzero.mesh(dp=2, pp=2, simulate="lockstep")
    step = fzero.shard(lambda p, s, b: (p, s), 3, mesh, split=loss.split)
    program = fzero.predict(step, loss.outputs())
    actual = program(step.partition(loss.stack(params, mesh)), mesh.split(batch, step.data_axes))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_without_a_mesh_a_pipelined_loss_is_the_ordinary_loss():
    model, batch = build("bert"), batch_for("bert")
    loss, params, join = pipeline(model, losses, inputs=inputs, micro_batches=2)
    total, weight = loss(params, batch)
    expected, count = losses(model(**inputs(batch)), batch)
    torch.testing.assert_close((total, weight), (expected, count), rtol=1e-12, atol=0)
    assert join(params).keys() == dict(model.named_parameters()).keys()


@pytest.mark.parametrize("name", ["llama", "gemma2", "bert"])
def test_masks_and_tables_have_the_dtype_of_half_precision(name):
    model, batch = build(name), batch_for(name)
    loss, params, _ = pipeline(model, lambda output, batch: output.logits.float().sum(), inputs=inputs, micro_batches=1)
    half = fzero.tree.map(lambda x: x.bfloat16(), params)
    got, _ = loss(half, batch)
    assert got.equal(model.bfloat16()(**inputs(batch)).logits.float().sum())


@pytest.mark.slow
def test_dropout_by_key_is_the_same_on_any_mesh():
    model, batch = build("gpt2").train(), batch_for("gpt2")
    loss, params, _ = pipeline(model, losses, inputs=inputs, micro_batches=2)
    key = fzero.random.key(3)
    want, plain = loss(params, batch, key), loss(params, batch)
    assert not want[0].equal(plain[0])
    for simulate in ("lockstep", "vmap"):
        mesh = fzero.mesh(pp=2, simulate=simulate)

        def one(params: Any, opt_state: Any) -> Any:
            return params, opt_state, fzero.collectives.psum(torch.stack(loss(params, batch, key)), "pp")

        step = fzero.shard(one, stage=0, mesh=mesh, axis="pp", split=loss.split)
        *_, got = step(*step.init(loss.stack(params, mesh), optim.sgd(0.1)))
        torch.testing.assert_close(got, torch.stack(want), rtol=1e-12, atol=0)


@pytest.mark.parametrize("remat", [False, True])
def test_remat_has_each_block_run_again(remat):
    runs = []

    class Counted(torch.nn.Linear):
        def forward(self, x: Any) -> Any:
            runs.append(1)
            return super().forward(x)

    layers = torch.nn.Sequential(*[Counted(2, 2) for _ in range(3)])
    loss, params, _ = pipeline(layers, lambda out, batch: out.square().mean(), micro_batches=2, remat=remat)
    fzero.value_and_grad(loss, reduce="weighted")(params, torch.ones(4, 2))
    assert len(runs) == 3 * 2 * (1 + remat)


def test_wrong_arguments_of_nn_pipeline_are_refused():
    layers = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(4)])
    with pytest.raises(TypeError, match=r"fzero.nn.pipeline: loss is 3: expected a function"):
        pipeline(layers, 3, micro_batches=2)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"fzero.pipeline: micro_batches=0"):
        pipeline(layers, losses, micro_batches=0)
    with pytest.raises(ValueError, match="blocks='layers': Sequential has no such list"):
        pipeline(layers, losses, micro_batches=2, blocks="layers")
