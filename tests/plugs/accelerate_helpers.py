"""What tests of the accelerate plug share: a loop of Accelerate, and the same loop with a sharded step."""

import dataclasses
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

from fzero.plugs import accelerate as plug
from tests.plugs.helpers import assert_shards_are_masters


class Network(torch.nn.Module):
    """A residual network with dropout, of two blocks."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(4, 8)
        blocks = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Dropout(dropout)) for _ in "ab"]
        self.blocks = torch.nn.ModuleList(blocks)
        self.head = torch.nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


def dataset(count: int) -> TensorDataset:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


@dataclasses.dataclass
class Run:
    """The records of a loop: the losses of its steps, norms and rates; all processes' predictions; and the weights."""

    losses: list[float]
    norms: list[float]
    rates: list[list[float]]
    predictions: torch.Tensor
    weights: dict[str, torch.Tensor]


def make(dropout: float, rows: int = 40, batch: int = 4, shuffle: bool = True, **options: Any) -> tuple[Any, ...]:
    """Make an accelerator, and what it prepares, with groups of two rates and a schedule."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3, **options)
    set_seed(0)
    model = Network(dropout)
    rest = [*model.blocks.parameters(), *model.head.parameters()]
    optimizer = torch.optim.AdamW([{"params": model.embed.parameters()}, {"params": rest, "lr": 0.02}], lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
    loader = DataLoader(dataset(rows), batch, shuffle=shuffle, generator=torch.Generator().manual_seed(2))
    return accelerator, model, optimizer, loader, schedule


def mean(accelerator: Accelerator, values: list[float]) -> float:
    return float(accelerator.gather(torch.tensor(values)).mean())


def with_accelerate(epochs: int, dropout: float, **options: Any) -> Run:
    """Train with accelerate alone: the loop of its documentation."""
    accelerator, *prepared = make(dropout, **options)
    model, optimizer, loader, schedule = accelerator.prepare(*prepared)
    run, losses = Run([], [], [], torch.empty(0), {}), []
    for _ in range(epochs):
        model.train()
        for data in loader:
            with accelerator.accumulate(model):
                loss = loss_of(model, data)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    run.norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            if accelerator.sync_gradients:
                run.losses.append(mean(accelerator, losses))
                run.rates.append([group["lr"] for group in optimizer.param_groups])
                losses.clear()
    model.eval()
    with torch.no_grad():
        results = [
            accelerator.gather_for_metrics(model(data[0])) for data in accelerator.prepare(DataLoader(dataset(14), 4))
        ]
    run.predictions = torch.cat(results)
    run.weights = {name: x.clone() for name, x in accelerator.unwrap_model(model).state_dict().items()}
    return run


def with_fzero(
    epochs: int,
    dropout: float,
    stage: int,
    backend: Any = None,
    load: Any = None,
    save: Any = None,
    **options: Any,
) -> Run:
    """Train with the sharded step in the same loop. `load` and `save` are folders, of states before and after it."""
    accelerator, model, optimizer, loader, schedule = make(dropout, **options)
    step = plug.shard_loop(accelerator, model, optimizer, loss_of, stage=stage, max_norm=0.5, backend=backend)
    loader, schedule = accelerator.prepare(loader, schedule)
    if load is not None:
        accelerator.load_state(load)
    run = Run([], [], [], torch.empty(0), {})
    step.evaluate(loss_of, dataset(4)[:4])  # and training goes on with dropout
    for _ in range(epochs):
        for data in loader:
            with accelerator.accumulate():
                loss = step(data)
                schedule.step()
            if loss is not None:
                run.losses.append(float(loss))
                run.norms.append(float(step.norm))
                run.rates.append([group["lr"] for group in step.optimizer.param_groups])
    if save is not None:
        accelerator.save_state(save)
    results = [
        accelerator.gather_for_metrics(step.evaluate(lambda model, data: model(data[0]), data))
        for data in accelerator.prepare(DataLoader(dataset(14), 4))
    ]
    run.predictions = torch.cat(results)
    run.weights = step.state_dict()
    if stage == 3 and options.get("mixed_precision") == "bf16":
        assert_shards_are_masters(step._engine)
    assert torch.equal(plug.full_model(step).head.bias, run.weights.get("head.bias", plug.full_model(step).head.bias))
    return run


def assert_alike(actual: Run, expected: Run) -> None:
    assert actual.rates == expected.rates
    actual, expected = [dataclasses.replace(x, rates=[]) for x in (actual, expected)]
    if not actual.weights:  # another process has them
        expected.weights = {}
    torch.testing.assert_close(vars(actual), vars(expected), rtol=1e-5, atol=1e-5)
