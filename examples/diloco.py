"""Train replicas that average every H steps (DiLoCo), and compare the shared model with each replica's own.

python diloco.py --every 20                            # 2 replicas of 2 simulated ranks
python diloco.py --every 20 --parts 2 --delay 5 --mix 0.5 --codec int4     # send less at a time, and hide it
torchrun --nproc-per-node 4 diloco.py --replicas 2     # the same on 4 processes
"""

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import fzero
from fzero import data, optim
from fzero.local_sgd import local_steps

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--text", help="a file to train on; by default Python's own library")
parser.add_argument("--replicas", type=int, default=2)
parser.add_argument("--ranks", type=int, default=4, help="simulated ranks; under torchrun its processes are used")
parser.add_argument("--stage", type=int, default=2, choices=range(4), help="ZeRO stage within a replica")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch", type=int, default=32, help="windows of a step, over all ranks")
parser.add_argument("--every", type=int, default=20, help="steps between two averages")
parser.add_argument("--parts", type=int, default=1, help="parts of the model, averaged one after the other")
parser.add_argument("--delay", type=int, default=0, help="steps from the send of a part to its use")
parser.add_argument("--mix", type=float, default=0.0, help="the share that a replica keeps of its own parameters")
parser.add_argument("--codec", choices=["int8", "int4", "float8"], help="the codec of the pseudo-gradients")
parser.add_argument("--backend", default="fx", help="inductor needs a compiler, and is faster")
args = parser.parse_args()

CONTEXT = 32
torch.manual_seed(0)  # the same parameters on every process
model = nn.Sequential(  # predicts a byte from the 32 before it
    nn.Embedding(256, 32), nn.Flatten(), nn.Linear(32 * CONTEXT, 256), nn.GELU(), nn.Linear(256, 256)
)
apply, weights, buffers = fzero.nn.functional(model)
opt = optim.adamw(optim.warmup_cosine(3e-3, args.steps // 10, args.steps))


def loss_fn(params: Any, windows: torch.Tensor) -> torch.Tensor:
    logits, _ = apply(params, buffers, windows[:, :-1])
    return F.cross_entropy(logits, windows[:, -1])


def train_step(params: Any, opt_state: Any, windows: torch.Tensor) -> Any:  # knows nothing of ranks or replicas
    loss, grads = fzero.value_and_grad(loss_fn)(params, windows)
    updates, opt_state = opt.update(grads, opt_state, params)
    return optim.apply_updates(params, updates), opt_state, loss


mesh = fzero.mesh(replica=args.replicas, dp=-1, simulated_ranks=args.ranks)
files = [Path(args.text)] if args.text else sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
text = torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)
windows = text.long().unfold(0, CONTEXT + 1, 7)
test, train = windows[:512], data.batches(windows[512:], mesh, global_batch=args.batch)

sharded = fzero.jit(fzero.shard(train_step, args.stage, mesh, axis="dp"), backend=args.backend)
codec = getattr(fzero.codecs, args.codec)() if args.codec else None
step = local_steps(sharded, every=args.every, parts=args.parts, delay=args.delay, mix=args.mix, codec=codec)
params, state = step.init(weights, opt)
for i, batch in train.steps(0, args.steps):
    params, state, loss = step(params, state, batch)
    if (i + 1) % 50 == 0 and mesh.rank == 0:
        print(f"step {i + 1}: loss of replicas here {[round(x, 3) for x in loss.value.flatten().tolist()]}")

params, state = step.average_now(params, state)  # the steps since the last average
shared = step.gather(state.anchor)  # all ranks take part
own = [sharded.gather(tree) for tree in params.trees] if mesh.simulated else []
if mesh.rank == 0:
    print(f"held-out loss of the shared model: {loss_fn(shared, test):.3f}")
    for number, tree in enumerate(own):
        print(f"held-out loss of replica {number}: {loss_fn(tree, test):.3f}")
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
