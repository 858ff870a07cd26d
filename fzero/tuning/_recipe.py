"""What to paste for a configuration, and what to mind about a table."""

from fzero.tuning._space import Configuration
from fzero.tuning._table import Table

__all__ = ["recipe", "warnings_of"]


def recipe(config: Configuration) -> str:
    """Write the lines of a train step in a configuration."""
    c = config
    keep = "" if c.remat is True else f", save={c.remat!r}"
    pair = "optim.master_weights(optim.adamw(3e-4), precision)"
    pair = f"optim.offload({pair}, {c.offload:g})" if c.offload else pair
    split = ', split=fzero.moe.split("experts")' if c.ep > 1 else ""
    mesh = f"fzero.mesh(dp=-1, ep={c.ep})" if c.ep > 1 else "fzero.mesh(dp=-1)"
    lines = [
        f"# {c}: {c.global_batch} samples a step on {c.ranks} ranks",
        f"precision = fzero.Precision(param=torch.{c.precision})",
        f"opt = optim.chain(optim.clip_by_global_norm(1.0), {pair})",
        *([f"block = fzero.remat(block{keep})"] if c.remat else []),
        "",
        "def train_step(params, opt_state, batch):",
        "    take = fzero.value_and_grad(loss_fn, precision=precision"
        + (f", micro_batches={c.accumulation}" if c.accumulation > 1 else "")
        + (", gather=False)" if c.remat else ")"),
        "    loss, grads = take(params, batch)",
        "    updates, opt_state = opt.update(grads, opt_state, params)",
        "    return optim.apply_updates(params, updates), opt_state, loss",
        "",
        f"step = fzero.jit(fzero.shard(train_step, stage={c.stage}, mesh={mesh}{split}))",
    ]
    return "\n".join(lines)


def warnings_of(table: Table) -> list[str]:
    """Say where the numbers of a table are estimates."""
    gpu = table.machine.kind == "cuda"
    found = [
        "no GPU was at hand: peaks are those of torch's operations with fused attention; a GPU's workspaces, context "
        "and fragmentation are the margin",
        "seconds are those of torch's operations one by one: Inductor's fused ones take less",
    ]
    if any(r.config.offload for r in table.rows):
        found.append(
            "offload's copies count where they stand in the step, and the host's update beside the work that follows it"
        )
    if any(r.config.precision == "float16" for r in table.rows):
        found.append("float16 needs a loss scale, which is not in the lines below: fzero.optim.dynamic_loss_scale")
    return found if gpu else found[1:]
