"""Faults in replicas that train apart: fzero/local_sgd, and the meshes that are parts of a world."""

from tests.mutants.changes import bare, becomes, never, skipped
from tests.mutants.mutant import Fault, File, on_processes

LOCAL = ("tests/local_sgd/test_local_steps.py",)
WORLD = on_processes("local", ranks=4)

MUTANTS = [
    *File("graph/_jit.py", LOCAL).faults(
        Fault("local_steps is jitted until its first call", "jit", never("reason")),
    ),
    *File("checkpoint/layout/_local_tree.py", LOCAL).faults(
        Fault("replicas in a checkpoint are refused without the remedy", "local_tree", never("hint")),
    ),
    *File("local_sgd/_outer_step.py", LOCAL).faults(
        Fault("pseudo-gradients are summed, not averaged", "OuterStep.start_average", bare("A / self.groups.count")),
        Fault("the anchor moves away from the replicas", "OuterStep.start_average", becomes("a - B", "B - a")),
        Fault(
            "a replica goes on from its own parameters", "OuterStep.apply_average", skipped("self.groups.A(boxes, B)")
        ),
        Fault(
            "mix= is the anchor's share",
            "OuterStep.apply_average",
            becomes("torch.lerp(a, B, C)", "torch.lerp(B, a, C)"),
        ),
        Fault("masters are not averaged", "OuterStep._in_anchor_layout", becomes("A if masters is None else B", "A")),
        Fault("masters stay as they were", "_like_masters", becomes("x is not None", "x is None")),
        Fault(
            "an outer momentum is forgotten",
            "OuterStep.apply_average",
            becomes("own_memory(state)", "tree.map(torch.zeros_like, state)"),
        ),
    ),
    *File("local_sgd/_sync_schedule.py", LOCAL).faults(
        Fault(
            "a mean is used at once", "SyncSchedule.parts_to_apply", becomes("step_number - self.delay", "step_number")
        ),
        Fault("all parts are sent at once", "SyncSchedule._part_offset", becomes("(part + 1) * A // B", "A")),
        Fault(
            "a part under way is not saved",
            "SyncSchedule.parts_in_flight",
            becomes("step_number - A + 1", "step_number"),
        ),
        Fault("every step ends with an average", "SyncSchedule.is_boundary", never("step_number % A == 0")),
    ),
    *File("local_sgd/_replicas.py", LOCAL).faults(
        Fault(
            "each replica gets the first one's batch",
            "ReplicaGroups._replica_part",
            becomes("A.select(B, replica)", "A.select(B, 0)"),
        ),
        Fault(
            "rows of replicas lie first on any mesh", "ReplicaGroups._join_replicas", becomes("A.movedim(0, B)", "A")
        ),
        Fault(
            "tied leaves are two", "_distinct_tensors", becomes("tree.index_tensors(leaves)[0]", "range(len(leaves))")
        ),
    ),
    *File("local_sgd/_checkpoint.py", LOCAL).faults(
        Fault("replicas load the first one's state", "load_replicas", becomes("replica % replicas", "0")),
        Fault("a save of mixed replicas serves any number", "load_replicas", becomes("mix == 0 or A", "True")),
        Fault("a cut save is loaded", "load_replicas", never("values['count'] != count")),
        Fault("a save between averages serves any number of replicas", "load_replicas", never("not is_same and A")),
    ),
    *File("ranks/_mesh.py", WORLD).faults(
        Fault("a part of a world is the whole world", "Mesh.process_group", becomes("not self.within", "True")),
    ),
    *File("ranks/_agreement.py", WORLD).faults(
        Fault("replicas read each other's texts", "gather_texts", skipped("topic += A")),
    ),
    *File("local_sgd/_local_steps.py", LOCAL).faults(
        Fault(
            "the end of a run averages the first part alone", "LocalSteps.average_now", becomes("range(A)", "range(1)")
        ),
        Fault(
            "an average is written into the arguments", "LocalSteps._run_local_step", never("not isinstance(A, Jitted)")
        ),
    ),
    *File("local_sgd/_replica_sums.py", LOCAL).faults(
        Fault("a codec's codes are those of one replica", "wait_sum", becomes("A.sum(0)", "A[0]")),
    ),
    *File("sharding/maps/_coded.py", LOCAL).faults(
        Fault(
            "a shard's magnitudes are another rank's",
            "decode_shard",
            becomes("B.narrow(-1, 0, C)", "B.roll(1, -1).narrow(-1, 0, C)"),
        ),
    ),
    *File("local_sgd/_local_steps.py", WORLD).faults(
        Fault("replicas may start apart", "LocalSteps.init", skipped("check_equal('params', A, B)")),
    ),
]
