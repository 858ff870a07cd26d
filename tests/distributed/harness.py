"""Runs cases on every rank of a torchrun world: those named on the command line, or all."""

import sys
from collections.abc import Callable

import torch

import fzero

Case = Callable[[fzero.ranks.Mesh], None]
Cases = dict[str, Case]


def into(*cases: Cases) -> Callable[[Case], Case]:
    def case(f: Case) -> Case:
        for table in cases:
            table[f.__name__] = f
        return f

    return case


def raise_on_rank_1(mesh: fzero.ranks.Mesh) -> None:
    if mesh.rank == 1:
        raise RuntimeError("planted")
    torch.distributed.barrier()


def run(cases: Cases) -> None:
    torch.set_num_threads(1)
    mesh = fzero.mesh(dp=-1)
    for name, f in ({name: {**cases, "broken": raise_on_rank_1}[name] for name in sys.argv[1:]} or cases).items():
        f(mesh)
        print(f"rank {mesh.rank}: {name}: ok", flush=True)
    torch.distributed.destroy_process_group()
