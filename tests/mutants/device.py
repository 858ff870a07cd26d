"""Faults in where values lie: a mesh's device, what brings values there, and what names those that lie elsewhere."""

from tests.mutants.changes import always, bare, becomes, dropped, never
from tests.mutants.mutant import Fault, File

MESH = ("tests/ranks/test_mesh.py",)
DEVICE = ("tests/zero/test_device.py",)

MUTANTS = [
    *File("ranks/_launch.py", MESH).faults(
        Fault("a device of an unknown kind is accepted", "find_device", never("A not in (None, 'cpu', 'meta', kind)")),
        Fault(
            "all ranks of a host take one accelerator",
            "find_device",
            becomes("A.local_rank % torch.accelerator.device_count()", "0"),
        ),
        Fault("a device that the user asked for is replaced by the CPU", "find_device", dropped("device is None")),
        Fault(
            "a process group whose backend does not support the accelerator uses it",
            "_can_use",
            becomes("A.get(kind, 'gloo') != 'gloo'", "True", at="2 of 2"),
        ),
        Fault(
            "a new world whose backend does not support the accelerator uses it",
            "_can_use",
            becomes("A.get(kind, 'gloo') != 'gloo'", "True", at="1 of 2"),
        ),
    ),
    *File("ranks/_mesh.py", DEVICE).faults(
        Fault(
            "a batch cannot be split over no axis",
            "Mesh.split",
            never("isinstance(axis, A) and not axis"),
            ("tests/ranks/test_mesh.py",),
        ),
        Fault("mesh.split does not move the batch to the device", "Mesh.split", bare("device_put(A, self.device)")),
        Fault("mesh.local does not move the batch to the device", "Mesh.local", bare("device_put(A, self.device)")),
        Fault("a tensor on the right device is copied", "device_put", dropped("x.device == device")),
        Fault("a real process may have the meta device", "mesh", never("mesh_device.type == 'meta'")),
    ),
    *File("zero/_fill.py", DEVICE).faults(
        Fault(
            "init does not move replicated leaves to the device", "_PlainCopies.put", bare("device_put(A, self.B[C])")
        ),
        Fault(
            "init shards a leaf on the leaf's device, not the mesh's", "fill_template", bare("A if B else mesh.device")
        ),
        Fault("partition(like=) moves 0-d counts to the device", "_device_like", bare("A if B.ndim else C")),
        Fault(
            "partition(like=) puts leaves on the mesh's device, not on like's",
            "fill_template",
            always("like is None"),
        ),
    ),
    *File("zero/_call_checks.py", DEVICE).faults(
        Fault("an argument on another device is accepted", "_check_device", never("A.device != mesh.device")),
        Fault("a 0-d tensor on another device is refused", "_check_device", dropped("value.ndim")),
        Fault(
            "the error about a device does not name the leaf within a batch",
            "_check_device",
            becomes("f'{path}.{inner}'", "path"),
        ),
    ),
    *File("nn/_module_checks.py", DEVICE).faults(
        Fault("a module's buffer on another device is accepted", "check_one_device", never("A.device not in B")),
    ),
]
