"""Modules and arguments that fzero.nn.functional refuses, each by its name."""

from typing import Any

import pytest
import torch
from torch import nn

import fzero
from fzero.nn import functional
from tests.nn.modules import IDS, IMAGES, Norms, Tied, build


@pytest.fixture
def process_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_ddp_is_refused(process_group):
    module = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"DistributedDataParallel.*pass the plain module"):
        functional(module)


def test_ddp_inside_a_module_is_refused_by_name(process_group):
    module = nn.Sequential(nn.Linear(2, 2), nn.parallel.DistributedDataParallel(nn.Linear(2, 2)))
    with pytest.raises(TypeError, match="'1' is DistributedDataParallel"):
        functional(module)


def test_fsdp2_is_refused(process_group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module: Any = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(TypeError, match="FSDPModule"):
        functional(module)


@pytest.mark.filterwarnings("ignore:FSDP is switching:UserWarning")
def test_fsdp1_is_refused(process_group):
    from torch.distributed.fsdp import FullyShardedDataParallel

    module = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
    with pytest.raises(TypeError, match="FullyShardedDataParallel"):
        functional(module)


def test_dtensor_is_refused_by_name(process_group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_module

    module = distribute_module(nn.Linear(2, 2), init_device_mesh("cpu", (1,)))
    with pytest.raises(TypeError, match="'weight' is a DTensor"):
        functional(module)


def test_data_parallel_is_refused():
    with pytest.raises(TypeError, match="DataParallel"):
        functional(nn.Sequential(nn.DataParallel(nn.Linear(2, 2))))


def test_a_compiled_module_is_refused():
    with pytest.raises(TypeError, match="compiled; pass the plain module and compile the sharded step"):
        functional(torch.compile(nn.Linear(2, 2)))  # pyright: ignore[reportArgumentType]


def test_a_module_compiled_in_place_is_taken_as_it_was_before():
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].compile(backend=lambda *_: pytest.fail("compiled"))
    apply, params, buffers = functional(module)
    expected = torch.ones(4, 2) @ params["0.weight"].T + params["0.bias"]
    torch.testing.assert_close(apply(params, buffers, torch.ones(4, 2))[0], expected)


def test_a_lazy_module_is_refused_until_it_has_run():
    module = nn.Sequential(nn.Linear(2, 3), nn.LazyLinear(2), nn.LazyBatchNorm1d())
    with pytest.raises(ValueError, match=r"'1.weight' is not initialised.*once on a batch"):
        functional(module)
    module(torch.ones(4, 2))
    assert len(functional(module).params) == 6


def test_a_lazy_buffer_is_refused_by_name():
    with pytest.raises(ValueError, match="'running_mean' is not initialised"):
        functional(nn.LazyBatchNorm1d(affine=False))


def test_another_value_than_a_module_is_refused():
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        functional({"w": torch.ones(2)})  # pyright: ignore[reportArgumentType]


def test_boxes_are_refused_by_name():
    apply, params, buffers = functional(build(Tied))
    mesh = fzero.mesh(dp=2)
    with pytest.raises(TypeError, match=r"Tied was given Shard.*'embed.weight'.*fzero.gather"):
        mesh.spmd(lambda p, ids: apply(fzero.partition(p), buffers, ids)[0])(params, mesh.split(IDS[0]))


def test_a_parameter_that_is_missing_is_named():
    apply, params, buffers = functional(build(Tied))
    del params["blocks.1.0.bias"]
    with pytest.raises(ValueError, match=r"'blocks\.1\.0\.bias'"):
        apply(params, buffers, IDS[0])


def test_a_parameter_that_the_module_does_not_have_is_named():
    apply, params, buffers = functional(build(Tied))
    with pytest.raises(ValueError, match="'typo'"):
        apply({**params, "typo": torch.ones(2)}, buffers, IDS[0])


def test_a_buffer_that_is_missing_is_named():
    apply, params, buffers = functional(build(Norms))
    for name in ("norm2d.running_mean", "norm2d.num_batches_tracked"):
        rest = {k: x for k, x in buffers.items() if k != name}
        with pytest.raises(ValueError, match=f"'{name}'"):
            apply(params, rest, IMAGES[0])


def test_a_function_that_torch_func_cannot_differentiate_is_named():
    class Old(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # pyright: ignore[reportIncompatibleMethodOverride]
            return 2 * x

        @staticmethod
        def backward(ctx, g):  # pyright: ignore[reportIncompatibleMethodOverride]
            return 2 * g

    class Doubling(torch.nn.Linear):
        def forward(self, x):  # pyright: ignore[reportIncompatibleMethodOverride]
            return Old.apply(super().forward(x)) if self.training else 2 * super().forward(x)

    apply, params, buffers = fzero.nn.functional(Doubling(3, 2))
    with pytest.raises(RuntimeError, match=r"Doubling applies an autograd.Function.* without setup_context.*eval\(\)"):
        torch.func.grad(lambda p: apply(p, buffers, torch.ones(4, 3))[0].sum())(params)
    apply, params, buffers = fzero.nn.functional(Doubling(3, 2).eval())
    assert torch.func.grad(lambda p: apply(p, buffers, torch.ones(4, 3))[0].sum())(params)["bias"].tolist() == [8, 8]
