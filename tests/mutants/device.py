"""Faults in where values lie: a mesh's device, what brings values there, and what names those that lie elsewhere."""

from tests.mutants.changes import bare, becomes, dropped, never
from tests.mutants.mutant import Fault, File

MESH = ("tests/ranks/test_mesh.py",)
DEVICE = ("tests/zero/test_device.py",)

MUTANTS = [
    *File("ranks/_launch.py", MESH).faults(
        Fault("any device", "find_device", never("A not in (None, 'cpu', 'meta', kind)")),
        Fault(
            "all ranks of a host take one accelerator",
            "find_device",
            becomes("A.local_rank % torch.accelerator.device_count()", "0"),
        ),
        Fault("an asked-for accelerator is left", "find_device", dropped("device is None")),
        Fault(
            "a group that cannot use it does", "_can_use", becomes("A.get(kind, 'gloo') != 'gloo'", "True", at="2 of 2")
        ),
        Fault(
            "a new world that cannot use it does",
            "_can_use",
            becomes("A.get(kind, 'gloo') != 'gloo'", "True", at="1 of 2"),
        ),
    ),
    *File("ranks/_mesh.py", DEVICE).faults(
        Fault("split does not move", "Mesh.split", bare("device_put(A, self.device)")),
        Fault("local does not move", "Mesh.local", bare("device_put(A, self.device)")),
        Fault("what is there is copied", "device_put", dropped("x.device == device")),
        Fault("a process without memory", "mesh", never("own.type == 'meta'")),
    ),
    *File("zero/_build.py", DEVICE).faults(
        Fault("init leaves what it does not shard", "build", bare("device_put(A, B[C])")),
        Fault("init shards where the leaf lies", "build", bare("A if B else mesh.device")),
        Fault("counts go to the device", "_device_like", bare("A if B.ndim else C")),
        Fault("a tree goes to the mesh, not to its like", "build", never("like is not None")),
    ),
    *File("zero/_checks.py", DEVICE).faults(
        Fault("what lies elsewhere passes", "_check_device", never("A.device != mesh.device")),
        Fault("numbers must lie on the device", "_check_device", dropped("value.ndim")),
        Fault("the batch's own leaf is not named", "_check_device", becomes("f'{path}.{inner}'", "path")),
    ),
    *File("nn/_functional.py", DEVICE).faults(
        Fault("a buffer may lie elsewhere", "check_one_device", never("A.device not in B")),
    ),
]
