"""Faults in fzero/elastic."""

from tests.mutants.changes import always, becomes, never, skipped
from tests.mutants.mutant import Fault, File

ELASTIC = ("tests/elastic/test_elastic.py",)

MUTANTS = [
    *File("elastic/_elastic_run.py", ELASTIC).faults(
        Fault(
            "a batch is skipped after a restart", "ElasticRun.restore", becomes("values['step']", "values['step'] + 1")
        ),
        Fault("a batch may be skipped", "ElasticRun.save", never("A != self.step + 1")),
        Fault("a process leaves before its step is kept", "ElasticRun.save", always("A % self._copy_every == 0")),
        Fault("a process that is to end does not leave", "ElasticRun.save", never("self._is_leaving")),
        Fault("the last step is not on disk", "ElasticRun.save", never("A == self.steps")),
        Fault(
            "memory is released though a run has not ended",
            "ElasticRun._release_if_complete",
            always("self.step == self.steps"),
        ),
        Fault(
            "what came from the disk is not remembered",
            "ElasticRun.restore",
            skipped("self.A.save_in_memory(self.B, C)"),
        ),
    ),
    *File("elastic/_shape.py", ELASTIC).faults(
        Fault("a mesh is chosen whose ranks cannot share the batch", "choose_shape", always("A % (B * C) == 0")),
        Fault("a mesh is chosen that is too small", "choose_shape", always("A * B >= C")),
        Fault("ranks stay idle that could train", "choose_shape", becomes("range(A, 0, -1)", "range(1, A + 1)")),
    ),
]
