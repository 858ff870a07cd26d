"""Train a vision transformer: flips and label smoothing, an average of the weights (EMA), and top-1 accuracy.

    python vit.py                                       # a tiny ViT on images made here, on 2 simulated ranks
    torchrun --nproc-per-node 8 vit.py --model google/vit-base-patch16-224 --data imagenet --batch 1024 --lr 1e-3

`--data` is a folder with `train/CLASS/IMAGE` and `val/CLASS/IMAGE`, which torchvision reads; `--model` a folder or a
hub's name, whose configuration is used, and with `--pretrained` its weights. The same command goes on after a stop.
"""

import argparse
import functools
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForImageClassification, ViTConfig

import fzero
from fzero import data, observe, optim, random

TINY: Any = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="a folder, or a hub's name; by default a tiny ViT")
parser.add_argument("--pretrained", action="store_true", help="begin with the weights of --model")
parser.add_argument("--data", help="a folder of images by class")
parser.add_argument("--workers", type=int, default=0, help="processes of a rank that load images ahead")
parser.add_argument("--stage", type=int, default=2, choices=range(4), help="ZeRO stage")
parser.add_argument("--ranks", type=int, default=2, help="simulated ranks; under torchrun its processes are used")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--batch", type=int, default=64, help="images of a step, over all ranks")
parser.add_argument("--lr", type=float, default=3e-3, help="the highest learning rate")
parser.add_argument("--every", type=int, default=50, help="steps between two evaluations, with a checkpoint each")
parser.add_argument("--backend", default="fx", help="inductor needs a compiler, and is faster")
parser.add_argument("--out", default="runs/vit", help="the folder of checkpoints, log and trained model")
args = parser.parse_args()


def folders(size: int) -> tuple[Any, Any, int]:
    """Return the images of `--data` to train on and to evaluate on, and the number of classes."""
    from torchvision import datasets, transforms  # pyright: ignore[reportMissingImports]

    steps = [transforms.Resize(size), transforms.CenterCrop(size), transforms.ToTensor()]
    prepare = transforms.Compose([*steps, transforms.Normalize([0.5] * 3, [0.5] * 3)])
    train, test = (datasets.ImageFolder(f"{args.data}/{part}", prepare) for part in ("train", "val"))
    return train, test, len(train.classes)


def checkerboards(size: int) -> tuple[Any, Any, int]:
    """Make images of noisy waves in four lengths, which are the classes."""
    labels, where = torch.arange(2048) % 4, torch.arange(size) / size
    x, y = ((labels[:, None] + 1) * where * 6 + 6 * torch.rand(2048, 1) for _ in range(2))
    images = x.sin()[:, None, :, None] * y.sin()[:, None, None, :] + torch.randn(2048, 3, size, size) / 2
    examples = list(zip(images, labels, strict=True))
    return examples[256:], examples[:256], 4


mesh = fzero.mesh(dp=-1, simulated_ranks=args.ranks)
torch.manual_seed(0)  # the same weights, and the same images, on every process
config: Any = AutoConfig.from_pretrained(args.model) if args.model else ViTConfig(image_size=32, patch_size=8, **TINY)
images, test, config.num_labels = folders(config.image_size) if args.data else checkerboards(config.image_size)
train = data.batches(images, mesh, global_batch=args.batch, num_workers=args.workers)
kind = AutoModelForImageClassification
same: Any = {"config": config, "ignore_mismatched_sizes": True}  # the head is new
model: Any = kind.from_pretrained(args.model, **same) if args.pretrained else kind.from_config(config)
apply, params, buffers = fzero.nn.functional(model.float())
buffers = mesh.device_put(buffers)
half = fzero.Precision(param=torch.bfloat16)
rate = optim.warmup_cosine(args.lr, warmup_steps=args.steps // 10, total_steps=args.steps)
adamw = optim.adamw(rate, weight_decay=0.05, mask=lambda params: fzero.tree.map(lambda p: p.ndim >= 2, params))
opt = optim.chain(optim.clip_by_global_norm(1.0), adamw, optim.params_ema(0.99, debias=True))
opt = optim.master_weights(opt, half)


def logits_of(params: Any, buffers: Any, images: torch.Tensor) -> torch.Tensor:
    dtype = next(iter(params.values())).dtype
    return apply(params, buffers, pixel_values=images.to(dtype))[0].logits.float()


def loss_fn(params: Any, buffers: Any, batch: Any) -> torch.Tensor:
    images, labels = batch
    flipped = torch.rand(len(images), 1, 1, 1, device=images.device) < 0.5
    images = torch.where(flipped, images.flip(-1), images)
    return F.cross_entropy(logits_of(params, buffers, images), labels, label_smoothing=0.1)


def train_step(params: Any, opt_state: Any, buffers: Any, batch: Any, key: Any) -> Any:
    drawn = functools.partial(random.seeded(loss_fn), key)  # each rank and micro-batch draws its own numbers
    grad_of = fzero.value_and_grad(drawn, micro_batches=2, batch_argnums=2, precision=half)
    loss, grads = grad_of(params, buffers, batch)
    updates, opt_state = opt.update(grads, opt_state, params)
    return optim.apply_updates(params, updates), opt_state, {"loss": loss, "norm": optim.global_norm(grads)}


def score(params: Any, buffers: Any, batch: Any) -> dict[str, torch.Tensor]:
    logits = logits_of(params, buffers, batch[0])
    return {"loss": F.cross_entropy(logits, batch[1], reduction="none"), "accuracy": logits.argmax(1) == batch[1]}


step = fzero.shard(train_step, stage=args.stage, mesh=mesh)
evaluate = fzero.jit(fzero.evaluate(step, score), backend=args.backend)
runs = fzero.checkpoint.checkpoints(f"{args.out}/checkpoints", mesh)
params, opt_state, done = runs.restore(like=(*step.init(params, opt), 0))
step, key = fzero.jit(step, backend=args.backend), random.key(0)
with runs, observe.log(observe.progress(args.steps), observe.jsonl(f"{args.out}/log.jsonl"), mesh=mesh) as log:
    for i, batch in train.steps(done, args.steps):
        params, opt_state, metrics = step(params, opt_state, buffers, batch, random.fold_in(key, i))
        log(i + 1, metrics)
        if (i + 1) % (args.every or args.steps) == 0 or i + 1 == args.steps:
            runs.save(i + 1, (params, opt_state, i + 1))  # beside the training
            held_out = data.epoch(test, mesh, global_batch=args.batch, num_workers=args.workers)
            means = data.mean(evaluate(opt_state.inner[-1].ema, buffers, *some) for some in held_out)
            log(i + 1, {f"held-out {name}": x for name, x in means.items()})
fzero.checkpoint.hf.write(f"{args.out}/model", opt_state.inner[-1].ema, mesh)
if mesh.rank == 0:
    config.save_pretrained(f"{args.out}/model")
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
