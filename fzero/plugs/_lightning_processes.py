"""Processes: the processes of a Trainer of Lightning, which Lightning launches or finds as for DDP."""

from datetime import timedelta

from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy

__all__ = ["Processes"]


class Processes(ParallelStrategy):
    """The base of a strategy whose ranks are processes, with one device each. One process needs no process group."""

    num_nodes = DDPStrategy.num_nodes
    num_processes = DDPStrategy.num_processes
    root_device = DDPStrategy.root_device
    distributed_sampler_kwargs = DDPStrategy.distributed_sampler_kwargs
    set_world_ranks = DDPStrategy.set_world_ranks
    setup_distributed = DDPStrategy.setup_distributed
    determine_ddp_device_ids = DDPStrategy.determine_ddp_device_ids
    barrier = DDPStrategy.barrier
    broadcast = DDPStrategy.broadcast
    reduce = DDPStrategy.reduce
    _get_process_group_backend = DDPStrategy._get_process_group_backend

    def __init__(self, process_group_backend: str | None, timeout: timedelta) -> None:
        super().__init__()
        self._num_nodes = 1
        self._process_group_backend = process_group_backend
        self._timeout = timeout

    @property
    def is_distributed(self) -> bool:
        """Whether each process has its own part of the data."""
        return self.world_size > 1

    def _configure_launcher(self) -> None:
        if self.num_nodes * self.num_processes > 1:
            self._start_method = "popen"
            DDPStrategy._configure_launcher(self)  # pyright: ignore[reportArgumentType]

    def setup_environment(self) -> None:
        """Join the process group, if there are several processes."""
        super().setup_environment()
        if self.num_nodes * self.num_processes > 1:
            self.setup_distributed()

    def model_to_device(self) -> None:
        """Leave the module where it is: its shards are on the device."""
