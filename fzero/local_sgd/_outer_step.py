"""The outer step: average the replicas' pseudo-gradients, and update the anchor by the mean."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fzero import tree
from fzero._dtypes import at_least_float32
from fzero.codecs import Codec
from fzero.local_sgd._parts import merge, select
from fzero.local_sgd._replica_sums import start_sum, wait_sum
from fzero.local_sgd._replicas import ReplicaGroups, own_memory, rebuild
from fzero.optim import MasterState, Optimizer, apply_updates, round_master
from fzero.sharding import is_box
from fzero.transforms import partition, replicate
from fzero.zero import ShardedStep

__all__ = ["OuterStep"]


@dataclass(frozen=True)
class OuterStep:
    """The programs of all ranks that average the replicas. They run uncompiled, since they run seldom.

    Attributes:
        step: the sharded step with all ranks as its mesh, and with the axes of a replica.
        groups: the replicas.
        optimizer: the outer optimizer.
        mix: the share of a replica's own parameters in its parameters after an average.
        codec: the codec by which sums are sent; None to send them as they are.
    """

    step: ShardedStep
    groups: ReplicaGroups
    optimizer: Optimizer
    mix: float
    codec: Codec | None

    def anchor(self, params: Any, state: Any) -> Any:
        """Return the anchor for the parameters and optimizer state that all replicas start with."""
        program = self.step.program(
            lambda params, masters: tree.map(at_least_float32, self._in_anchor_layout(params, masters))
        )
        return own_memory(program(params, _find_masters(state)))

    def init(self, anchor: Any) -> Any:
        """Make the outer optimizer's state for a part of the anchor."""
        return own_memory(self.step.program(self.optimizer.init)(anchor))

    def start_average(self, part: frozenset[int], anchor: Any, params: Sequence[Any], states: Sequence[Any]) -> Any:
        """Start to average the pseudo-gradients of a part: sum (anchor - parameters) / number of replicas.

        Returns:
            A tree like the part's anchor, or with a codec a `_CodedSum`. On processes it may be under way:
            `apply_average` waits.
        """
        replicas = self._replica_pairs(params, states)

        def program(anchor: Any, tensors: list[torch.Tensor]) -> Any:
            part_params = select(self._in_anchor_layout(*rebuild(replicas[0], tensors)), part)
            pseudo_gradient = tree.map(lambda a, p: (a - p.to(a.dtype)) / self.groups.count, anchor, part_params)
            return start_sum(pseudo_gradient, self.groups.over, self.codec)

        with torch.no_grad():
            return self.step.program(program)(select(anchor, part), self.groups.join(replicas))

    def wait(self, part: frozenset[int], anchor: Any, pending_sum: Any) -> Any:
        """Wait for the result of `start_average`, and return it as a tree like the part's anchor; None stays None."""
        if pending_sum is None:
            return None
        program = self.step.program(
            lambda pending_sum, like: wait_sum(pending_sum, like, self.groups.count, self.codec)
        )
        return program(pending_sum, select(anchor, part))

    def apply_average(
        self,
        part: frozenset[int],
        anchor: Any,
        state: Any,
        pending_sum: Any,
        params: Sequence[Any],
        states: Sequence[Any],
    ) -> tuple[Any, Any]:
        """Update a part of the anchor, and write it into the replicas' parameters and master weights.

        Args:
            part: the part.
            anchor: the whole anchor.
            state: the outer optimizer's state for the part.
            pending_sum: the result of `start_average`.
            params: the parameters of each replica here, which no one else holds.
            states: the inner optimizer's state of each replica here, likewise.

        Returns:
            The new `(anchor, state)`.
        """
        replicas = self._replica_pairs(params, states)

        def program(anchor: Any, state: Any, pending_sum: Any, tensors: list[torch.Tensor]) -> Any:
            params, masters = rebuild(replicas[0], tensors)
            mean = wait_sum(pending_sum, anchor, self.groups.count, self.codec)
            updates, state = self.optimizer.update(mean, state, params=anchor)
            anchor = apply_updates(anchor, updates)
            start = anchor  # of the replicas
            if self.mix:
                part_params = select(self._in_anchor_layout(params, masters), part)
                start = tree.map(lambda a, p: torch.lerp(a, p.to(a.dtype), self.mix), anchor, part_params)
            new_values = (self._as_params(start, select(params, part)), _like_masters(start, select(masters, part)))
            return anchor, state, self.groups.box(new_values)

        with torch.no_grad():
            new_anchor, state, boxes = self.step.program(program)(
                select(anchor, part), state, pending_sum, self.groups.join(replicas)
            )
            self.groups.write(boxes, [(select(p, part), select(m, part)) for p, m in replicas])
            return merge(anchor, own_memory(new_anchor)), own_memory(state)

    @staticmethod
    def _replica_pairs(params: Sequence[Any], states: Sequence[Any]) -> list[tuple[Any, Any]]:
        return [(p, _find_masters(s)) for p, s in zip(params, states, strict=True)]

    def _in_anchor_layout(self, params: Any, masters: Any) -> Any:
        """Return a replica's parameters in the layout of the anchor: master weights where there are any."""
        params = self._partition(params)
        return params if masters is None else merge(params, masters)

    def _partition(self, params: Any) -> Any:
        layout = self.step.layout
        return partition(params, reduce_grads=layout.grads) if layout.shards_within_step else params

    def _as_params(self, new_anchor: Any, params: Any) -> Any:
        """Return new values in the dtypes and the layout of a replica's parameters."""
        old = self._partition(params)
        rounded = tree.map(lambda x, p: x if p.dtype == x.dtype else round_master(x, p.dtype), new_anchor, old)
        return replicate(rounded) if self.step.layout.shards_within_step else rounded


def _is_master_state(x: Any) -> bool:
    return isinstance(x, MasterState)


def _find_masters(state: Any) -> Any:
    """Return the tree of master weights in an optimizer's state, None if it has none."""
    masters = [x.master for x in tree.flatten(state, _is_master_state)[0] if _is_master_state(x)]
    return masters[0] if masters else None


def _like_masters(new_anchor: Any, masters: Any) -> Any:
    """Return new values where there are master weights, and None elsewhere."""
    if masters is None:
        return None
    entries = tree.flatten(masters, is_box)[0]
    return select(new_anchor, frozenset([i for i, x in enumerate(entries) if x is not None]))
