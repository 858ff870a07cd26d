"""The train steps that `make cuda` runs: of a perceptron, a GPT, experts, a pipeline, sequences, offload."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import fzero
from fzero import optim, tree
from fzero.parallel import context, experts
from fzero.parallel import tensor as tp
from fzero.tuning.models import init, model_shape
from fzero.tuning.models._forward_pass import ForwardOptions, compute_loss

WIDTH = 64


class Task(NamedTuple):
    """A train step before it is sharded.

    Attributes:
        mesh: the axes and sizes of its mesh.
        shard: what `fzero.shard` takes beside the stage and the mesh.
        train_step: the step.
        opt: its optimizer.
        params: makes the parameters on the default device, given the mesh.
        batch: makes a rank's batch on the default device.
        batch_axes: the axes over which batches differ; None for all.
    """

    mesh: dict[str, int]
    shard: dict[str, Any]
    train_step: Callable[..., Any]
    opt: optim.Optimizer
    params: Callable[[fzero.ranks.Mesh], Any]
    batch: Callable[[], Any]
    batch_axes: tuple[str, ...] | None = None


def train_step_of(loss_fn: Callable[..., Any], opt: optim.Optimizer, **how: Any) -> Callable[..., Any]:
    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = fzero.value_and_grad(loss_fn, **how)(params, batch)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, loss

    return train_step


def adamw(**options: Any) -> optim.Optimizer:
    return optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(3e-4, **options))


def bias(path: str, leaf: Tensor) -> bool:
    """Return whether a leaf's moments stay in float32."""
    return leaf.ndim < 2


def perceptron(ranks: int, opt: optim.Optimizer | None = None, **how: Any) -> Task:
    """Four layers, each a product, a gelu and a sum."""
    opt = opt or adamw()

    def loss_fn(params: Any, batch: Any) -> Tensor:
        x = batch["x"]
        for p in params["blocks"]:
            x = F.gelu(x @ p["w"] + p["b"]) + x
        return ((x - batch["y"]) ** 2).mean()

    def params(mesh: fzero.ranks.Mesh) -> Any:
        return {"blocks": [{"w": torch.randn(WIDTH, WIDTH), "b": torch.zeros(WIDTH)} for _ in range(4)]}

    def batch() -> Any:
        return {"x": torch.randn(32, WIDTH), "y": torch.randn(32, WIDTH)}

    return Task({"dp": ranks}, {}, train_step_of(loss_fn, opt, **how), opt, params, batch)


def hosts_first(ranks: int) -> Task:
    """The perceptron in micro-batches on two hosts, whose units are gathered over the hosts first."""
    task = perceptron(ranks, micro_batches=4)
    return task._replace(mesh={"host": 2, "dp": ranks // 2}, shard={"axis": ("dp", "host")})


class GPT(NamedTuple):
    """The sizes of a transformer without embeddings.

    Attributes:
        width: of the stream.
        hidden: of the feed-forward part.
        layers: of them.
        context: tokens of a sequence.
        sequences: of a rank's batch.
    """

    width: int
    hidden: int
    layers: int
    context: int
    sequences: int


SIZES = {
    "toy": GPT(256, 1024, 4, 64, 2),
    "gpt-1.5b": GPT(1600, 6400, 48, 1024, 4),
    "bert-large": GPT(1024, 4096, 24, 128, 64),
    "vit-g": GPT(1664, 8192, 48, 257, 16),
}


def transformer(ranks: int, size: GPT, dtype: torch.dtype = torch.float32, linear: Any = F.linear) -> Task:
    """Make a transformer with AdamW in float32, whose loss is computed in a dtype by this function of linear layers."""
    w, opt = size.width, adamw()

    def block() -> Any:
        return {
            **{"ln1": torch.empty(w), "qkv": torch.empty(w, 3 * w), "o": torch.empty(w, w)},
            **{"ln2": torch.empty(w), "up": torch.empty(w, size.hidden), "down": torch.empty(size.hidden, w)},
        }

    def heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (w // 64, 64)).transpose(1, 2)

    def loss_fn(params: Any, batch: Any) -> Tensor:
        x = batch["x"].to(dtype)
        for p in tree.map(lambda w: w.to(dtype), params["blocks"]):
            q, k, v = linear(F.layer_norm(x, (w,), p["ln1"]), p["qkv"].mT).chunk(3, -1)
            attended = F.scaled_dot_product_attention(heads(q), heads(k), heads(v), is_causal=True)
            x = x + linear(attended.transpose(1, 2).reshape(x.shape), p["o"].mT)
            x = x + linear(F.gelu(linear(F.layer_norm(x, (w,), p["ln2"]), p["up"].mT)), p["down"].mT)
        return (x.float() ** 2).mean()

    return Task(
        {"dp": ranks},
        {},
        train_step_of(loss_fn, opt),
        opt,
        lambda mesh: {"blocks": [block() for _ in range(size.layers)]},
        lambda: {"x": torch.empty(size.sequences, size.context, w)},
    )


LLAMA, MIXTRAL = "llama-3-8b", "mixtral-8x7b, 8 blocks"


def language_model(ranks: int, name: str, length: int, depth: int | None = None, ep: int = 1) -> Task:
    """Make a model of `fzero.tuning.model_step` in bfloat16, with float32 masters, and remat of each block.

    Args:
        ranks: of the world.
        name: a preset of `fzero.tuning`.
        length: tokens of a rank's only sequence.
        depth: how many blocks; by default all.
        ep: the size of the axis over which experts are split.
    """
    shape, policy = model_shape(name), fzero.Precision(param=torch.bfloat16)
    opt = optim.chain(optim.clip_by_global_norm(1.0), optim.master_weights(optim.adamw(3e-4), policy))
    loss_fn = partial(compute_loss, shape, ForwardOptions(), lambda block: [fzero.remat(block, save=None)])

    def params(mesh: fzero.ranks.Mesh) -> Any:
        return tree.map(lambda p: torch.empty(p.shape, dtype=torch.bfloat16), init(shape, depth or shape.depth))

    def batch() -> Any:
        return tuple([torch.zeros(1, length, dtype=torch.long) for _ in range(2)])

    split = {"split": experts.split_rule("experts", axis="ep")} if ep > 1 else {}
    axes = {"dp": ranks // ep} | ({"ep": ep} if ep > 1 else {})
    step = train_step_of(loss_fn, opt, precision=policy, gather=False)
    return Task(axes, split, step, opt, params, batch)


def mixture(ranks: int, capacity: float | None, dtype: torch.dtype = torch.float32) -> Task:
    """Two layers of four experts, two of them for each token; without a capacity no token is dropped."""
    count, hidden, opt = 4, 2 * WIDTH, adamw()

    def ffn(p: Any, rows: Tensor, linear: Any) -> Tensor:
        return linear(torch.tanh(linear(rows, p["up"])), p["down"])

    def loss_fn(params: Any, batch: Any) -> Tensor:
        x, balance = batch["x"].to(dtype), 0.0
        for p in tree.map(lambda w: w.to(dtype), params["layers"]):
            routes = experts.route(x @ p["router"], k=2, normalize=True)
            x = x + experts.layer(ffn, p["experts"], x, routes, axis="ep", capacity=capacity)
            balance = balance + experts.balance_loss(routes)
        return (x.float() @ params["out"] - batch["y"]).square().mean() + 0.1 * balance

    def layer() -> Any:
        up, down = torch.randn(count, WIDTH, hidden), torch.randn(count, hidden, WIDTH)
        return {"router": torch.randn(WIDTH, count), "experts": {"up": up, "down": down}}

    return Task(
        {"dp": ranks // 2, "ep": 2},
        {"split": experts.split_rule("experts", axis="ep")},
        train_step_of(loss_fn, opt),
        opt,
        lambda mesh: {"layers": [layer() for _ in range(2)], "out": torch.randn(WIDTH, 3)},
        lambda: {"x": torch.randn(8, 16, WIDTH), "y": torch.randn(8, 16, 3)},
    )


def sequences(
    ranks: int, method: Any, dtype: torch.dtype = torch.float32, masked: bool = False, softcap: float | None = None
) -> Task:
    """Two layers of a short convolution and attention to sequences that are split over two ranks.

    With a softcap attention has sinks too.
    """
    opt, heads = adamw(), 4

    def loss_fn(params: Any, batch: Any) -> Tensor:
        x = batch["x"].to(dtype)
        documents, window = (batch["documents"], 5) if masked else (None, None)
        for p in tree.map(lambda w: w.to(dtype), params["layers"]):
            x = x + context.causal_conv1d(x.mT, p["conv"], documents=documents).mT
            q, k, v = (x @ p["qkv"]).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
            how: Any = {"documents": documents, "window": window, "softcap": softcap, "sinks": p.get("sinks")}
            y = context.attention(q, k, v, causal=True, method=method, **how)
            x = x + y.transpose(1, 2).flatten(2) @ p["out"]
        positions = context.positions(x.shape[1], device=x.device)
        return (x.float() * positions[:, None] - batch["y"]).square().mean()

    def layer() -> Any:
        qkv, out = torch.randn(WIDTH, 3 * WIDTH), torch.randn(WIDTH, WIDTH)
        sinks = {} if softcap is None else {"sinks": torch.randn(heads)}
        return {"conv": torch.randn(WIDTH, 4), "qkv": qkv, "out": out} | sinks

    def batch() -> Any:
        rows = {name: torch.randn(2, 8, WIDTH) for name in ("x", "y")}
        return rows | {"documents": torch.randint(0, 3, (2, 8))}

    axes = {"dp": ranks // 2, "cp": 2}
    return Task(axes, {}, train_step_of(loss_fn, opt), opt, lambda mesh: {"layers": [layer(), layer()]}, batch)


def pipeline(ranks: int, cp: int = 1) -> Task:
    """Four blocks on two stages, four micro-batches by 1F1B. With `cp` blocks attend to split sequences."""
    opt, words = adamw(), 50

    def block(p: Any, x: Tensor) -> Tensor:
        if cp > 1:
            heads = x.unflatten(-1, (4, -1)).transpose(1, 2)
            x = x + context.attention(heads, heads, heads, causal=True).transpose(1, 2).flatten(2)
        return x + torch.tanh(x @ p["w"] + p["b"])

    def last(rest: Any, x: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        logits = (x @ rest["embedding"].T).flatten(0, 1)
        losses = F.cross_entropy(logits, batch["y"].flatten(), reduction="none")
        return losses.sum(), torch.ones_like(losses).sum()

    loss = fzero.pipeline(
        block=block,
        first=lambda rest, batch: rest["embedding"][batch["x"]],
        last=last,
        axis="pp",
        micro_batches=4,
        schedule="1f1b",
    )

    def params(mesh: fzero.ranks.Mesh) -> Any:
        blocks = [{"w": torch.randn(WIDTH, WIDTH), "b": torch.randn(WIDTH)} for _ in range(4)]
        return loss.stack({"embedding": torch.randn(words, WIDTH), "blocks": blocks}, mesh)

    data = {"dp": ranks // 2 // cp} | ({"cp": cp} if cp > 1 else {})
    return Task(
        data | {"pp": 2},
        {"axis": (*data, "pp"), "split": loss.split},
        train_step_of(loss, opt, reduce="weighted"),
        opt,
        params,
        lambda: {"x": torch.randint(0, words, (16, 8)), "y": torch.randint(0, words, (16, 8))},
        tuple(data),
    )


def split_layers(ranks: int, sequence: bool = False) -> Task:
    """Two blocks of transformers' Llama in bfloat16, whose layers and vocabulary are split over two ranks."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model("llama", **sizes, num_key_value_heads=2, vocab_size=64, use_cache=False)
    with torch.device("cpu"):
        model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    layers, opt = tp.layers(model, {"lm_head": "colwise"}, sequence=sequence), adamw()
    apply, params, buffers = fzero.nn.functional(model, tp=layers)
    on_device: dict[str, Tensor] = {}

    def loss_fn(params: Any, ids: Tensor) -> Tensor:
        logits = apply(params, on_device, ids)[0].logits
        return tp.cross_entropy(logits[:, :-1].float(), ids[:, 1:])

    def params_of(mesh: fzero.ranks.Mesh) -> Any:
        full, moved = mesh.device_put((params, buffers))
        on_device.update(moved)
        return full

    shard = {"axis": "dp", "split": layers.split}
    step = train_step_of(loss_fn, opt)
    return Task({"dp": ranks // 2, "tp": 2}, shard, step, opt, params_of, lambda: torch.randint(64, (4, 16)), ("dp",))


def make_offloaded(ranks: int, update: str) -> Task:
    """The perceptron with half of AdamW's state on the host, updated there or on the device."""
    half = optim.offload(optim.adamw(3e-4), 0.5, update_on=update)
    return perceptron(ranks, optim.chain(optim.clip_by_global_norm(1.0), half))


ROWWISE = partial(fzero.nn.float8_linear, scaling="rowwise")
CODES = fzero.Precision(torch.float32, gather=fzero.codecs.int8(), reduce=fzero.codecs.int4(rounding="stochastic"))
TASKS: dict[str, Callable[[int], Task]] = {
    "dense": perceptron,
    "dense, 4 micro-batches": lambda ranks: perceptron(ranks, micro_batches=4),
    "dense, hosts first": hosts_first,
    "dense, codes": lambda ranks: perceptron(ranks, precision=CODES),
    "dense, moments in int8": lambda ranks: perceptron(ranks, adamw(moments=optim.Moments("int8", full=bias))),
    "dense, moments in bfloat16": lambda ranks: perceptron(ranks, adamw(moments=optim.Moments("bfloat16", full=bias))),
    "dense, lamb": lambda ranks: perceptron(ranks, optim.lamb(3e-4)),
    "dense, muon": lambda ranks: perceptron(ranks, optim.muon(0.02, fallback=optim.adamw(3e-4))),
    "dense, adafactor": lambda ranks: perceptron(ranks, optim.adafactor(3e-4)),
    "experts, capacity": lambda ranks: mixture(ranks, 1.25),
    "experts, dropless": lambda ranks: mixture(ranks, None),
    "experts, dropless, bfloat16": lambda ranks: mixture(ranks, None, torch.bfloat16),
    "pipeline": pipeline,
    "pipeline, sequences": lambda ranks: pipeline(ranks, cp=2),
    "sequences, ring": lambda ranks: sequences(ranks, "ring", torch.bfloat16),
    "sequences, all_to_all": lambda ranks: sequences(ranks, "all_to_all", torch.bfloat16),
    "sequences, ring, masked": lambda ranks: sequences(ranks, "ring", masked=True),
    "sequences, ring, capped": lambda ranks: sequences(ranks, "ring", torch.bfloat16, softcap=30.0),
    "sequences, all_to_all, capped": lambda ranks: sequences(ranks, "all_to_all", torch.bfloat16, softcap=30.0),
    "tensor": split_layers,
    "tensor, parts of tokens": lambda ranks: split_layers(ranks, sequence=True),
    "offload, host update": lambda ranks: make_offloaded(ranks, "host"),
    "offload, device update": lambda ranks: make_offloaded(ranks, "device"),
    LLAMA: lambda ranks: language_model(ranks, "llama-3-8b", 8192),
    MIXTRAL: lambda ranks: language_model(ranks, "mixtral-8x7b", 4096, depth=8, ep=8),
    "toy, bfloat16": lambda ranks: transformer(ranks, SIZES["toy"], torch.bfloat16),
    "toy, float8": lambda ranks: transformer(ranks, SIZES["toy"], torch.bfloat16, fzero.nn.float8_linear),
    "toy, float8 rowwise": lambda ranks: transformer(ranks, SIZES["toy"], torch.bfloat16, ROWWISE),
    **{name: lambda ranks, size=size: transformer(ranks, size) for name, size in SIZES.items()},
}
