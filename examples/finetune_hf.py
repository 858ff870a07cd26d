"""Finetune a Hugging Face causal language model, whole or by low-rank adapters, sharded by a ZeRO stage.

    python examples/finetune_hf.py                                     # a tiny random Llama, stage 3, 2 simulated ranks
    python examples/finetune_hf.py --model path/to/checkpoint --save tuned   # a local folder, into another
    python examples/finetune_hf.py --lora 8                            # the base frozen, and sharded as well
    python examples/finetune_hf.py --precision float16 --global-batch 64 --micro-batch 4
    python examples/finetune_hf.py --checkpoints runs/tuned            # stopped, the same command goes on
    torchrun --nproc-per-node 2 examples/finetune_hf.py                # the same script on 2 processes

Nothing is downloaded. The text is the Python standard library's own source code, cut into documents of unequal length:
put your own in the place of `load_documents`. Needs `pip install ".[finetune]"`.
"""

import argparse
import contextlib
import functools
import shutil
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import fzero
from fzero import optim, random

TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
TINY |= {"intermediate_size": 128, "vocab_size": 257, "eos_token_id": 256, "bos_token_id": None}
IGNORE = -100  # the label of padding, as transformers and cross_entropy have it


class LoRA(nn.Linear):
    """A linear layer with weight W + (B A) alpha / r, of which A and B are trained (arXiv:2106.09685).

    A and B are applied one after the other: their product would be as large as W, and so would its gradient.
    """

    def __init__(self, base: nn.Linear, rank: int, alpha: float, dropout: float) -> None:
        super().__init__(base.in_features, base.out_features, base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * base.in_features**-0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))  # so training starts from the base model
        self.scale, self.dropout = alpha / rank, dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = F.linear(F.dropout(x, self.dropout, self.training), self.a)
        return super().forward(x) + F.linear(low, self.b) * self.scale


@contextlib.contextmanager
def without_parameters() -> Iterator[None]:
    """Each parameter of a module that is made here goes to the meta device at once; buffers stay."""

    def to_meta(module: nn.Module, name: str, p: Any) -> Any:
        return None if p is None or p.is_meta else nn.Parameter(p.detach().to("meta"), p.requires_grad)

    hook = nn.modules.module.register_module_parameter_registration_hook(to_meta)
    try:
        yield
    finally:
        hook.remove()


def build(args: Any) -> tuple[Any, Any]:
    """The model, with adapters if asked for, and its tokenizer, if it has one. Weights of a folder are read later."""
    tokenizer = None
    if args.model is None:
        config = AutoConfig.for_model("llama", **TINY, attention_dropout=args.dropout)
        model: Any = AutoModelForCausalLM.from_config(config)
    else:
        config = AutoConfig.from_pretrained(args.model, local_files_only=True)
        with without_parameters():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        if (args.model / "tokenizer_config.json").exists():
            tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True)
    if args.lora:
        model.requires_grad_(False)  # fzero.nn.functional gives frozen parameters out with the buffers
        linear = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
        in_blocks = [x for x in linear if any(part.isdigit() for part in x[0].split("."))]  # not "lm_head"
        if not in_blocks:
            raise SystemExit(f"--lora: no block of {type(model).__name__} has a torch.nn.Linear")
        for name, layer in in_blocks:
            model.set_submodule(name, LoRA(layer, args.lora, args.lora_alpha, args.dropout))
    return model, tokenizer


def merge(model: Any, whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Add the adapters to the weights of the layers that have them: a state dict of the model without adapters."""
    merged = dict(whole)
    for name, layer in model.named_modules():
        if isinstance(layer, LoRA):
            a, b = merged.pop(f"{name}.a"), merged.pop(f"{name}.b")
            merged[f"{name}.weight"] = merged[f"{name}.weight"].float() + (b @ a) * layer.scale
    return {name: x.float().cpu() for name, x in merged.items()}  # a frozen base was rounded to --precision


def load_documents() -> tuple[list[str], list[str]]:
    """Documents to train on, and held-out ones."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    paragraphs = "\n\n".join([f.read_text(errors="replace") for f in files]).split("\n\n")
    documents = [p for p in paragraphs if len(p) > 16]
    return [d for i, d in enumerate(documents) if i % 10], documents[::10]


def encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    if tokenizer is None:
        return lambda text: [*text.encode(), 256]  # its bytes, and the end
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return lambda text: tokenizer(text)["input_ids"] + end


def collate(documents: list[str], encode: Any, context: int) -> dict[str, torch.Tensor]:
    """Tokens and the tokens that follow them, [documents, context], padded at the end.

    A causal model looks at nothing that comes later, so padding at the end needs no attention mask.
    """
    tokens = torch.zeros(len(documents), context, dtype=torch.long)
    labels = torch.full_like(tokens, IGNORE)
    for row, document in enumerate(documents):
        ids = torch.tensor(encode(document)[: context + 1])
        tokens[row, : len(ids) - 1], labels[row, : len(ids) - 1] = ids[:-1], ids[1:]
    return {"tokens": tokens, "labels": labels}


def token_loss(apply: Any, params: Any, frozen: Any, buffers: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the tokens' losses, and their number, which differs by rank and micro-batch."""
    if not apply.blocks:  # those that are rematerialised gather their own, one at a time
        params, frozen = fzero.gather((params, frozen))
    output, _ = apply(params, {**frozen, **buffers}, input_ids=batch["tokens"], use_cache=False)
    logits, labels = output.logits.flatten(0, 1).float(), batch["labels"].flatten()
    return F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum"), (labels != IGNORE).sum()


def recorder(folder: Path | None) -> Callable[[str, float, int], None]:
    if folder is None:
        return lambda name, value, step: None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise SystemExit("--tensorboard needs the package tensorboard: pip install '.[finetune]'") from error
    return SummaryWriter(str(folder), flush_secs=5).add_scalar


def sizes_of(args: Any, mesh: fzero.ranks.Mesh) -> fzero.data.BatchPlan:
    """Two of the sizes say the third; by default 4 documents, 2 times."""
    given = {"global_batch": args.global_batch, "micro_batch": args.micro_batch, "accumulation": args.accumulate}
    for name, usual in (("micro_batch", 4), ("accumulation", 2)):
        if given[name] is None and sum(size is not None for size in given.values()) < 2:
            given[name] = usual
    return fzero.data.batch_plan(**given, mesh=mesh)


def finetune(args: Any, mesh: fzero.ranks.Mesh, say: Callable[[str], None]) -> None:
    record = recorder(args.tensorboard if mesh.rank == 0 else None)
    torch.manual_seed(0)  # the same model on every rank
    model, tokenizer = build(args)
    apply, params, frozen = fzero.nn.functional(model.train(), remat=args.remat)
    apply_eval = fzero.nn.functional(model.eval(), remat=args.remat).apply  # without dropout
    buffers = mesh.device_put({name: frozen.pop(name) for name, _ in model.named_buffers()})  # what is left is the base
    del model  # `apply` has no memory of its own; a rank is to hold its shards alone

    sizes = sizes_of(args, mesh)
    policy = fzero.Precision(param=getattr(torch, args.precision))
    schedule = optim.warmup_cosine(args.lr, warmup_steps=args.steps // 10, total_steps=args.steps, end=args.lr / 10)
    opt = optim.master_weights(optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(schedule, b2=0.95)), policy)
    scaled = args.precision == "float16"
    if scaled:  # what is scaled is a sum: the usual 2^16 is for the mean of a micro-batch's tokens
        opt = optim.dynamic_loss_scale(opt, initial=max(2.0**16 / (sizes.micro_batch * args.context), 1.0))

    def train_step(params: Any, opt_state: Any, frozen: Any, buffers: Any, batch: Any, key: Any) -> Any:
        loss_fn = functools.partial(random.seeded(functools.partial(token_loss, apply)), key)
        scale = optim.loss_scale(opt_state).scale if scaled else 1.0
        options: Any = {"micro_batches": sizes.accumulation, "batch_argnums": 3, "precision": policy}
        options |= {"reduce": "weighted", "gather": not args.remat}  # the mean of all tokens, wherever they are
        loss, grads = fzero.scaled_value_and_grad(loss_fn, scale, **options)(params, frozen, buffers, batch)
        metrics = {"loss": loss, "norm": optim.global_norm(grads)}
        updates, opt_state = opt.update(grads, opt_state, params)
        if scaled:
            metrics |= {"scale": optim.loss_scale(opt_state).scale, "skipped": optim.loss_scale(opt_state).skipped}
        return optim.apply_updates(params, updates), opt_state, metrics

    def rank_totals(params: Any, frozen: Any, buffers: Any, batch: Any) -> Any:  # what a rank does in validation
        return fzero.collectives.psum(token_loss(apply_eval, params, frozen, buffers, batch))

    step: Any = fzero.shard(train_step, stage=args.stage, mesh=mesh)
    empty = args.model is not None and not args.lora
    params, opt_state = step.init(
        (lambda: {k: torch.zeros(x.shape) for k, x in params.items()}) if empty else params, opt
    )
    frozen = step.partition(policy.cast(frozen))  # in the same layout
    if args.model is not None:  # each rank reads its own bytes, straight into its shards
        unread = [params, optim.master_params(params, opt_state)] if empty else []
        for like in unread:  # which are filled where they lie
            fzero.checkpoint.hf.read(args.model, like, mesh, partial=True)
        frozen = fzero.checkpoint.hf.read(args.model, frozen, mesh, partial=True)
    totals = step.program(rank_totals)
    done, skipped = 0, 0
    runs = None if args.checkpoints is None else fzero.checkpoint.checkpoints(args.checkpoints, mesh)
    if runs is not None:  # the frozen ones are not in it: they are the folder's
        state = {"params": params, "opt_state": opt_state, "step": done, "skipped": skipped}
        params, opt_state, done, skipped = runs.restore(like=state).values()
    held = [step.state_bytes(x) for x in (params, opt_state, frozen)]
    say("a rank holds {:,} bytes of parameters, {:,} of optimizer state, {:,} of frozen ones".format(*held))

    train_documents, held_out = load_documents()
    encode = encoder(tokenizer)

    def train_batch(seed: int) -> Any:  # the same on every rank; with much text have each load its own: mesh.local
        picked = Random(seed).choices(train_documents, k=sizes.global_batch)
        return collate(picked, encode, args.context)

    def validate() -> float:
        """The mean loss of a held-out token; parameters stay sharded, and nothing is differentiated."""
        total, count, rows = 0.0, 0, sizes.micro_batch * mesh.size
        for i in range(args.eval_batches):
            batch = collate(held_out[i * rows : (i + 1) * rows], encode, args.context)
            of_batch = totals(params, frozen, buffers, mesh.split(batch))
            total, count = total + of_batch[0].item(), count + int(of_batch[1])
        return total / count

    key, memory = random.key(0), f"{sum(held) / 1e6:.1f} MB held"
    if args.jit:
        step, totals = fzero.jit(step, backend=args.backend), fzero.jit(totals, backend=args.backend)
        of_rank = step.plan if mesh.distributed else functools.partial(fzero.plan, step)  # not of the simulation
        plan = of_rank(params, opt_state, frozen, buffers, mesh.split(train_batch(0)), key)
        memory = f"{plan.peak_bytes / 1e6:.1f} MB at the peak"
    say(f"{mesh!r}, stage {args.stage}; {sizes}; validation loss before: {validate():.4f}")
    for i in range(done, args.steps):
        start, batch = time.perf_counter(), train_batch(i)
        rate = float(schedule(torch.tensor(i - skipped)))  # a skipped step counts for nothing
        params, opt_state, metrics = step(params, opt_state, frozen, buffers, mesh.split(batch), random.fold_in(key, i))
        shown = {name: x.item() for name, x in metrics.items()} | {"lr": rate}
        skipped = shown.pop("skipped", 0)
        shown["tokens/s"] = (batch["labels"] != IGNORE).sum().item() / (time.perf_counter() - start)
        if mesh.device.type != "cpu":
            memory = f"{torch.accelerator.max_memory_allocated() / 1e6:.1f} MB at the peak"
        numbers = ", ".join(f"{name} {x:.4g}" if name != "loss" else f"loss {x:.4f}" for name, x in shown.items())
        say(f"step {i + 1}: {numbers}, {memory}")
        if (i + 1) % args.eval_every == 0 or i + 1 == args.steps:
            shown["validation loss"] = validate()
            say(f"step {i + 1}: validation loss {shown['validation loss']:.4f}")
            if runs is not None:  # written while training goes on
                runs.save(i + 1, {"params": params, "opt_state": opt_state, "step": i + 1, "skipped": skipped})
        for name, x in shown.items():
            record(name, x, i + 1)
    if runs is not None:
        runs.wait()
    if args.save:  # each rank writes its own bytes; adapters are merged into whole weights
        shell: Any = apply.module  # the model without storage
        tuned = {**frozen, **optim.master_params(params, opt_state)}
        fzero.checkpoint.hf.write(
            args.save, merge(shell, step.gather(tuned)) if args.lora else tuned, mesh, dtype=torch.float32
        )
        if mesh.rank == 0:
            shell.config.save_pretrained(args.save)
            shell.generation_config.save_pretrained(args.save)
            if tokenizer is not None:
                tokenizer.save_pretrained(args.save)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a local folder; by default a tiny Llama with random weights")
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO stage")
    parser.add_argument("--ranks", type=int, default=2, help="simulated ranks; under torchrun its processes are used")
    parser.add_argument("--precision", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--context", type=int, default=128, help="tokens of a document; the rest is cut off")
    parser.add_argument("--micro-batch", type=int, help="documents that a rank differentiates at once")
    parser.add_argument("--accumulate", type=int, help="micro-batches of a rank in one step")
    parser.add_argument("--global-batch", type=int, help="documents of a step, over all ranks")
    parser.add_argument("--lr", type=float, default=3e-3, help="the highest learning rate; 2e-5 for a real model")
    parser.add_argument("--dropout", type=float, default=0.1, help="of the adapters' input, and in the tiny model")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train adapters of this rank only")
    parser.add_argument("--lora-alpha", type=float, default=16.0)
    parser.add_argument("--remat", action=argparse.BooleanOptionalAction, default=True, help="run blocks again")
    parser.add_argument("--jit", action=argparse.BooleanOptionalAction, default=True, help="compile the step")
    backends = {"default": "inductor" if shutil.which("c++") else "fx", "choices": ["inductor", "fx"]}
    parser.add_argument("--backend", **backends, help="fx needs no C++ compiler, and starts in seconds")
    parser.add_argument("--eval-every", type=int, default=25)
    parser.add_argument("--eval-batches", type=int, default=4)
    parser.add_argument("--tensorboard", type=Path, metavar="DIR", help="write the numbers of each step there")
    parser.add_argument("--save", type=Path, metavar="DIR", help="write the model there, adapters merged into it")
    parser.add_argument("--checkpoints", type=Path, metavar="DIR", help="go on from the newest one there, if any")
    args = parser.parse_args()

    mesh = fzero.mesh(dp=-1, simulated_ranks=args.ranks)
    finetune(args, mesh, functools.partial(print, flush=True) if mesh.rank == 0 else lambda line: None)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
