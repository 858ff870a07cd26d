"""ParamGroups: the parameter groups of a torch optimizer, as an fzero optimizer that takes the rates at each step."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fzero import optim

__all__ = ["ParamGroups", "hold_stand_ins", "param_groups"]

_Group = Mapping[str, Any]


@dataclass(frozen=True)
class ParamGroups:
    """The groups of a torch optimizer, with the hyperparameters that stay as they are.

    The learning rates are arguments of each step, because a scheduler of torch changes them between steps.

    Attributes:
        kind: the name of the torch optimizer's class, one of `_OPTIMIZERS`.
        names: the names of each group's parameters.
        hyperparams: the hyperparameters of each group, as torch names them.
    """

    kind: str
    names: tuple[tuple[str, ...], ...]
    hyperparams: tuple[_Group, ...]

    @staticmethod
    def without_updates(model: torch.nn.Module) -> "ParamGroups":
        """Return one group of all trainable parameters without state, for a loop that evaluates and does not train."""
        names = tuple([name for name, p in model.named_parameters() if p.requires_grad])
        sgd = {"momentum": 0.0, "nesterov": False, "dampening": 0.0, "weight_decay": 0.0}
        return ParamGroups("SGD", (names,), (sgd,))

    def optimizer(self, rates: Sequence[Any]) -> optim.Optimizer:
        """Make the optimizer of a dict of parameters by name, with a learning rate for each group.

        The moments are kept once; masks select what differs by group.
        """
        first_group = self.hyperparams[0]
        base, is_coupled = _make_base(self.kind, first_group)
        decays = [
            self._group_optimizer(i, optim.add_decayed_weights(group["weight_decay"]))
            for i, group in enumerate(self.hyperparams)
            if group["weight_decay"]
        ]
        links = [*decays, base] if is_coupled else [base, *decays]
        scales = [self._group_optimizer(i, optim.scale_by_learning_rate(rate)) for i, rate in enumerate(rates)]
        return optim.chain(*links, *scales)

    def rates(self, opt: torch.optim.Optimizer) -> list[Any]:
        """Return the learning rates that the groups of the torch optimizer have now.

        Raises:
            ValueError: if another hyperparameter has changed.
        """
        for i, (first, group) in enumerate(zip(self.hyperparams, opt.param_groups, strict=True)):
            for name, value in first.items():
                if group[name] != value:
                    raise ValueError(
                        f"{name} of the optimizer's group {i} was {value!r} and is {group[name]!r} now: a sharded step "
                        "reads only the learning rates anew. Leave it as it is; to OneCycleLR or CyclicLR pass "
                        "cycle_momentum=False"
                    )
        return [group["lr"] for group in opt.param_groups]

    def _group_optimizer(self, i: int, opt: optim.Optimizer) -> optim.Optimizer:
        members = frozenset(self.names[i])
        if len(self.names) == 1:
            return opt
        return optim.masked(opt, lambda params: {name: name in members for name in params})


def param_groups(opt: torch.optim.Optimizer, model: torch.nn.Module, source: str) -> ParamGroups:
    """Read the groups of a torch optimizer.

    Args:
        opt: a torch optimizer that has not stepped.
        model: the model whose trainable parameters it holds.
        source: the setting that the optimizer comes from, for messages.

    Raises:
        ValueError: if the optimizer's class or an option has no counterpart in `fzero.optim`, or if it has state. Also
            if it holds an unknown tensor or lacks a trainable parameter, or if there is none.
    """
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    _check_optimizer(opt, names, source)
    groups = [_group_names(opt, i, names, source) for i in range(len(opt.param_groups))]
    _check_complete(groups, names, source)
    return ParamGroups(type(opt).__name__, tuple(groups), _group_hyperparams(opt, source))


def _check_optimizer(opt: torch.optim.Optimizer, names: Mapping[int, str], source: str) -> None:
    kind = type(opt).__name__
    if not names:
        raise ValueError("the model has no trainable parameter: set requires_grad_(True) on those to train")
    if type(opt) not in [getattr(torch.optim, name) for name in _OPTIMIZERS]:
        raise ValueError(
            f"{source}: {type(opt).__module__}.{kind} owns its parameters, and has no counterpart in fzero.optim: "
            f"expected one of torch.optim's {', '.join(_OPTIMIZERS)}"
        )
    if any(state.get("step", 1) > 0 for state in opt.state.values()):  # Adagrad's sums begin with the optimizer
        raise ValueError(f"{source}: {kind} has state of earlier steps, which would be lost: pass a new optimizer")


def _group_names(opt: torch.optim.Optimizer, i: int, names: Mapping[int, str], source: str) -> tuple[str, ...]:
    """Return the names of the trainable parameters of a group."""
    group = opt.param_groups[i]
    unknown = [p for p in group["params"] if p.requires_grad and id(p) not in names]
    if unknown:
        raise ValueError(
            f"{source}: group {i} holds a tensor {list(unknown[0].shape)} that is not a parameter of the model: build "
            "the optimizer from the parameters of the model that the trainer has"
        )
    for option in ("amsgrad", "maximize", "differentiable"):
        if group.get(option):
            kind = type(opt).__name__
            raise ValueError(f"{source}: {kind}({option}=True) has no counterpart in fzero.optim: leave it out")
    return tuple([names[id(p)] for p in group["params"] if p.requires_grad])


def _check_complete(groups: Sequence[Sequence[str]], names: Mapping[int, str], source: str) -> None:
    missing = sorted(set(names.values()) - {name for group in groups for name in group})
    if missing:
        raise ValueError(
            f"{source}: no group holds {missing[0]!r}"
            + (f" and {len(missing) - 1} other trainable parameters" if missing[1:] else ", a trainable parameter")
            + ": add them to a group, or freeze them with requires_grad_(False)"
        )


def _group_hyperparams(opt: torch.optim.Optimizer, source: str) -> tuple[_Group, ...]:
    """Return the hyperparameters of each group but for the rates, which are alike but for the weight decay."""
    hyperparams = [{k: group[k] for k in opt.defaults if k != "lr"} for group in opt.param_groups]
    for i, group in enumerate(hyperparams):
        differing = [k for k, v in group.items() if k != "weight_decay" and v != hyperparams[0].get(k)]
        if differing:
            raise ValueError(
                f"{source}: groups 0 and {i} have different {differing[0]} ({hyperparams[0].get(differing[0])!r} and "
                f"{group[differing[0]]!r}): groups may differ in lr and weight_decay only"
            )
    _make_base(type(opt).__name__, hyperparams[0])  # so that an option without a counterpart is refused now
    return tuple(hyperparams)


def hold_stand_ins(opt: torch.optim.Optimizer, groups: ParamGroups, model: torch.nn.Module) -> None:
    """Let a torch optimizer hold a model's stand-ins, in place of the parameters of its groups, and no state.

    Without gradients it steps over nothing. Schedulers change its learning rates. A file of its state has the rates and
    no moments, so an optimizer of a loop that is not sharded refuses it, by its number of groups.
    """
    parameters = dict(model.named_parameters())
    for group, names in zip(opt.param_groups, groups.names, strict=True):
        group["params"] = [parameters[name] for name in names]
    opt.state.clear()
    opt.register_state_dict_post_hook(_add_mark)
    opt.register_load_state_dict_pre_hook(_remove_mark)


_MARK = "fzero"  # of a group without parameters


def _add_mark(opt: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    mark = {"params": [], _MARK: "the moments are in the shards of the checkpoint: load it with the sharded loop"}
    return {**state_dict, "param_groups": [*state_dict["param_groups"], mark]}


def _remove_mark(opt: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    return {**state_dict, "param_groups": [group for group in state_dict["param_groups"] if _MARK not in group]}


_Base = tuple[optim.Optimizer, bool]  # the direction of descent, and whether the weight decay is part of the gradient


_IGNORED = ("capturable", "decoupled_weight_decay", "foreach", "fused", "lr", "weight_decay")
_ADVICE = {"lr_decay": "use a learning rate scheduler in its place"}


def _make_base(kind: str, group: _Group) -> _Base:
    """Return fzero's optimizer for a group of a torch optimizer, by the names that both have.

    Raises:
        ValueError: if an option of the group has no counterpart.
    """
    make = optim.torch_equivalents()[kind]
    parameters = inspect.signature(make).parameters
    values = {name: value for name, value in group.items() if name not in _IGNORED}
    if "betas" in values:
        values["b1"], values["b2"] = values.pop("betas")
    for name, value in values.items():
        if value and name not in parameters:
            raise ValueError(
                f"{kind}({name}={value}) has no counterpart in fzero.optim: {_ADVICE.get(name, 'leave it out')}"
            )
    hyperparams = {name: value for name, value in values.items() if name in parameters}
    # the groups' decays are links of their own
    undecayed = {"weight_decay": 0.0} if "weight_decay" in parameters else {}
    is_coupled = not group.get("decoupled_weight_decay", kind == "AdamW")
    return optim.chain(make(1.0, **hyperparams, **undecayed), optim.scale(-1.0)), is_coupled


def _has_counterpart(kind: str) -> bool:
    """Return whether a torch optimizer with its own defaults has a counterpart."""
    parameters = inspect.signature(getattr(torch.optim, kind)).parameters.values()
    try:
        base, _ = _make_base(kind, {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty})
    except (TypeError, ValueError):
        return False
    return base.elementwise is not False  # groups are masks, and a leaf of another group is seen as zeros


_OPTIMIZERS = tuple([kind for kind in optim.torch_equivalents() if _has_counterpart(kind)])
"""The classes of torch.optim whose groups fzero trains with: each elementwise one whose options fzero.optim has."""
