"""A rank of an elastic run under torchrun: it dies once where the test says, and says where each start goes on."""

import argparse
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

import fzero
from fzero.checkpoint import _shared_memory
from tests.elastic.helpers import GLOBAL_BATCH, train


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--dies", default="", help="RANK:MOMENT:STEP, once")
    parser.add_argument("--slow", type=float, default=0.0, help="seconds of a step, until there is a file `hurry`")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--micro", type=int, default=1)
    parser.add_argument("--host", default="host", help="the name of this machine; % for the rank's number")
    args = parser.parse_args()
    torch.set_num_threads(1)
    host = args.host.replace("%", os.environ["LOCAL_RANK"])
    _shared_memory._host_name = lambda: host

    def say(**what: Any) -> None:
        with open(args.root / "log", "a") as f:
            f.write(json.dumps({"time": time.time(), "rank": int(os.environ["RANK"]), **what}) + "\n")

    def at(moment: str, step: int) -> None:
        if moment == "updated":
            say(step=step)
        if args.dies == f"{os.environ['RANK']}:{moment}:{step}" and not (args.root / "died").exists():
            (args.root / "died").touch()
            say(died=step)
            os.kill(os.getpid(), signal.SIGKILL)
        if moment == "kept" and not (args.root / "hurry").exists():
            time.sleep(args.slow)

    def program(run: fzero.elastic.ElasticRun) -> Any:
        say(size=run.mesh.size, accumulation=run.batch_plan.accumulation)
        return train(run, jitted=not args.dies, at=at, steps=args.steps)  # a jitted step donates what was kept

    (args.root / "memory").mkdir(exist_ok=True)
    say(start=os.environ["WORLD_SIZE"], pid=os.getpid())
    end = fzero.elastic.run(
        program,
        args.root / "disk",
        steps=args.steps,
        global_batch=GLOBAL_BATCH,
        micro_batch=args.micro,
        copy_every=2,
        save_every=1000,
        memory=str(args.root / "memory"),
        timeout=30.0,
        dp=-1,
    )
    if end is None:
        say(spare=True)
    elif os.environ["RANK"] == "0":
        torch.save(end, args.root / "end.pt")


if __name__ == "__main__":
    main()
