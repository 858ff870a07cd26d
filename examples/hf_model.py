"""Shard any model of transformers by a ZeRO stage, and train it for a few steps on random inputs.

    python examples/hf_model.py                                    # a tiny gpt2 on 2 simulated ranks
    python examples/hf_model.py --model mixtral --stage 3 --simulate lockstep
    python examples/hf_model.py --model path/to/checkpoint         # a local folder, with its own sizes and weights
    torchrun --nproc-per-node 2 examples/hf_model.py --model vit   # the same script on 2 processes

The name of an architecture gives a tiny model with random weights; nothing is downloaded. The loss, the mean square of
the first output's distance from 1, suits every architecture: put your own in its place.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModel

import fzero
from fzero import optim

TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 64}
TINY |= {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts": 4, "image_size": 32, "patch_size": 8}


def build(model: str) -> Any:
    """A checkpoint from a folder, or a tiny model by the name of its architecture."""
    if Path(model).is_dir():
        return AutoModel.from_pretrained(model, local_files_only=True)
    usual = AutoConfig.for_model(model)
    own = {name: size for name, size in TINY.items() if hasattr(usual, name)}  # a config takes any name without a word
    return AutoModel.from_config(AutoConfig.for_model(model, **own))


def random_batch(model: Any, size: int, seed: int) -> dict[str, torch.Tensor]:
    """The global batch of a seed, as the model's main input asks for it: the same on every rank."""
    generator, config = torch.Generator().manual_seed(seed), model.config
    if model.main_input_name == "pixel_values":
        side = getattr(config, "image_size", 32)
        return {"pixel_values": torch.randn(size, config.num_channels, side, side, generator=generator)}
    tokens = torch.randint(config.vocab_size, (size, 16), generator=generator)
    return {"input_ids": tokens} | ({"decoder_input_ids": tokens} if config.is_encoder_decoder else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2", help="an architecture, such as llama or vit, or a local folder")
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO stage")
    parser.add_argument("--ranks", type=int, default=2, help="simulated ranks; under torchrun its processes are used")
    parser.add_argument("--simulate", choices=["vmap", "lockstep"], help="even under torchrun; lockstep runs any model")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()

    mesh = fzero.mesh(dp=-1, simulated_ranks=args.ranks, simulate=args.simulate)
    torch.manual_seed(0)  # the same parameters on every rank
    model = build(args.model).train()
    model.config.use_cache = False  # it is for sampling
    apply, params, buffers = fzero.nn.functional(model)
    opt = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3))

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Any:
        output, buffers = apply(params, buffers, **batch)
        return (output[0] - 1).square().mean(), buffers

    def train_step(params: Any, opt_state: Any, buffers: Any, batch: Any) -> Any:  # knows nothing of ranks
        (loss, buffers), grads = fzero.value_and_grad(loss_fn, has_aux=True)(params, buffers, batch)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, fzero.collectives.pmean(buffers), loss

    step = fzero.shard(train_step, stage=args.stage, mesh=mesh)
    params, opt_state = step.init(params, opt)
    torch.manual_seed(1 + mesh.rank)  # from here on ranks draw numbers of their own: dropout
    for i in range(args.steps):
        batch = mesh.split(random_batch(model, 4 * mesh.size, seed=i))
        params, opt_state, buffers, loss = step(params, opt_state, buffers, batch)
        if mesh.rank == 0:
            print(f"step {i + 1}: loss {loss:.4f}")
    if mesh.rank == 0:
        held, whole = step.state_bytes(params, opt_state), 3 * sum(p.nbytes for p in model.parameters())
        print(f"{args.model}, stage {args.stage}, {mesh!r}: a rank holds {held:,} of {whole:,} bytes")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
