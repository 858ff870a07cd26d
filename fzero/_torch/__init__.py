"""All uses of private torch APIs in fzero, one topic per file.

They exist in torch 2.11, 2.13 and 2.15. If torch changes one of them, the tests in `tests/_torch` show which.
"""

from torch.utils._python_dispatch import TorchDispatchMode

from fzero._torch.accelerator import (
    autocast_kinds,
    copy_to_device,
    empty_cache,
    fork_random_state,
    is_accelerator,
    local_accelerator,
    tensor_on,
    wait_for_device,
    without_autocast,
    without_autocast_cache,
)
from fzero._torch.attention import partial_attention, partial_attention_grad
from fzero._torch.bits import view_bits
from fzero._torch.compiler import have_equal_strides, inductor, inductor_for_lengths
from fzero._torch.compiler_process import (
    TensorMetadata,
    compile_threads,
    inductor_folder,
    pickle_graphs,
    start_cpu_probe,
    start_import,
    unpickle_graphs,
)
from fzero._torch.cpu_allocator import Allocations, allocations
from fzero._torch.dcp import load_metadata
from fzero._torch.decisions import FixedSizeError, decisions
from fzero._torch.device_graph import DeviceGraph, can_record, copy_together, has_recordable_collectives
from fzero._torch.flops import flop_formulas, with_query_heads
from fzero._torch.foreach import apply_to_groups, can_group
from fzero._torch.graphs import copy_nodes
from fzero._torch.memory import Buffer, buffer_view, count_holders, find_buffers, in_buffers, storage_id
from fzero._torch.on_import import allow_in_graph, assume_constant_result, register_flop_formula
from fzero._torch.process_groups import c10d, default_store, rank_group
from fzero._torch.pytrees import children_without_names, pytree, register_box
from fzero._torch.recorder import OneNode
from fzero._torch.running_transforms import (
    in_transform,
    is_fused,
    is_old_function_error,
    is_profiling,
    is_tracing,
    quiet_vmap_fallback,
    raise_priority,
    set_fused,
    without_function_modes,
)
from fzero._torch.scaled_mm import scaled_mm
from fzero._torch.tracing import (
    TRACING,
    DataDependentError,
    OpOverload,
    functionalize,
    in_chunk,
    is_backward,
    is_stand_in,
    memory_like,
    node_chunk,
    node_line,
    node_stack,
    recorded_nodes,
    set_stand_in_device,
    stand_in_at,
    stand_ins_like,
    trace,
    user_line,
)
from fzero._torch.workspace import matrix_workspace_bytes

__all__ = [
    "TRACING",
    "Allocations",
    "Buffer",
    "DataDependentError",
    "DeviceGraph",
    "FixedSizeError",
    "OneNode",
    "OpOverload",
    "TensorMetadata",
    "TorchDispatchMode",
    "allocations",
    "allow_in_graph",
    "apply_to_groups",
    "assume_constant_result",
    "autocast_kinds",
    "buffer_view",
    "c10d",
    "can_group",
    "can_record",
    "children_without_names",
    "compile_threads",
    "copy_nodes",
    "copy_to_device",
    "copy_together",
    "count_holders",
    "decisions",
    "default_store",
    "empty_cache",
    "find_buffers",
    "flop_formulas",
    "fork_random_state",
    "functionalize",
    "has_recordable_collectives",
    "have_equal_strides",
    "in_buffers",
    "in_chunk",
    "in_transform",
    "inductor",
    "inductor_folder",
    "inductor_for_lengths",
    "is_accelerator",
    "is_backward",
    "is_fused",
    "is_old_function_error",
    "is_profiling",
    "is_stand_in",
    "is_tracing",
    "load_metadata",
    "local_accelerator",
    "matrix_workspace_bytes",
    "memory_like",
    "node_chunk",
    "node_line",
    "node_stack",
    "partial_attention",
    "partial_attention_grad",
    "pickle_graphs",
    "pytree",
    "quiet_vmap_fallback",
    "raise_priority",
    "rank_group",
    "recorded_nodes",
    "register_box",
    "register_flop_formula",
    "scaled_mm",
    "set_fused",
    "set_stand_in_device",
    "stand_in_at",
    "stand_ins_like",
    "start_cpu_probe",
    "start_import",
    "storage_id",
    "tensor_on",
    "trace",
    "unpickle_graphs",
    "user_line",
    "view_bits",
    "wait_for_device",
    "with_query_heads",
    "without_function_modes",
]
