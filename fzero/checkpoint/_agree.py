"""Agreement of the ranks of a save or a load: one small collective on the caller's thread, then reports in a store.

No collective follows `agree`, so a save may run in a thread beside a step that has collectives of its own. A rank that
fails reports its error, and all ranks raise. Keys contain a nonce, because torchrun's store outlives its processes.
"""

import json
import time
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.distributed import DistError

from fzero._torch import default_store
from fzero.checkpoint._error import CheckpointError, DamagedError
from fzero.checkpoint.layout import File
from fzero.ranks import Mesh, all_gather_numbers, all_gather_texts

__all__ = ["StoreChannel", "agree", "all_or_none", "check_same_on_ranks"]

_T = TypeVar("_T")
_POLL_SECONDS = 0.005


def _error_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, CheckpointError) else f"{type(error).__name__}: {text}"


def all_or_none(task: str, run: Callable[[], _T], mesh: Mesh | None) -> _T:
    """Run a function on all ranks, and raise on all ranks if it raises on one.

    Raises:
        TypeError: if `mesh` is not a mesh.
        CheckpointError: if the function raised on another rank; a `DamagedError` if it raised only those. A rank raises
            its own error instead, unless that is a `DamagedError` and another rank's error is not.
    """
    if mesh is not None and not isinstance(mesh, Mesh):
        raise TypeError(f"mesh={mesh!r}: expected a mesh, such as fzero.mesh(dp=4), or None")
    result, error = _result_or_error(run)
    if mesh is not None and mesh.distributed:
        kind = 0
        if error is not None:
            kind = 1 if isinstance(error, DamagedError) else 2
        kinds = [kind for (kind,) in all_gather_numbers(torch.tensor([kind], device="cpu"), mesh)]
        if any(kinds):
            _raise_together(task, error, kinds, mesh)
    if error is not None:
        raise error
    return result  # pyright: ignore[reportReturnType]


def _raise_together(task: str, error: BaseException | None, kinds: list[int], mesh: Mesh) -> None:
    """Raise the first error of the worst kind on ranks without an error of that kind. A `DamagedError` is milder."""
    texts = all_gather_texts("" if error is None else _error_line(error), mesh)
    failed_rank = kinds.index(max(kinds))
    if error is None or kinds[mesh.rank] < max(kinds):
        kind = DamagedError if max(kinds) == 1 else CheckpointError
        raise kind(f"{task}: rank {failed_rank} failed: {texts[failed_rank]}") from error


def check_same_on_ranks(task: str, text: bytes, mesh: Mesh | None) -> None:
    """Check that `text` is equal on all ranks.

    Raises:
        CheckpointError: on all ranks, if it differs. The message names the first rank that differs from rank 0.
    """
    if mesh is None or not mesh.distributed:
        return
    sums = [n for (n,) in all_gather_numbers(torch.tensor([zlib.crc32(text)], device="cpu"), mesh)]
    outliers = [r for r, n in enumerate(sums) if n != sums[0]]
    if outliers:
        raise CheckpointError(f"{task}: rank {outliers[0]} has another tree, or other names, than rank 0")


def _result_or_error(run: Callable[[], _T]) -> tuple[_T | None, BaseException | None]:
    try:
        return run(), None
    except Exception as error:
        return None, error


def agree(
    task: str, prepare: Callable[[], tuple[bytes, _T]], nonce: str, mesh: Mesh | None, timeout: float
) -> "tuple[StoreChannel, _T]":
    """Check that all ranks do the same work, and agree on rank 0's nonce.

    Args:
        task: the name of the work in messages.
        prepare: returns a text that must be equal on all ranks, and a result. If it raises, all ranks raise.
        nonce: 16 hexadecimal digits.
        mesh: the ranks.
        timeout: how long to wait for another rank's report, in seconds.

    Returns:
        A channel between the ranks, and the result of `prepare` on this rank.

    Raises:
        CheckpointError: if the texts differ, or `prepare` raised on another rank.
    """
    text, result = all_or_none(task, prepare, mesh)
    if mesh is None or not mesh.distributed:
        return StoreChannel(nonce, 0, 1, None, timeout), result
    halves = [int(nonce[:8], 16), int(nonce[8:], 16)]  # because the collective exchanges int64
    all_numbers = all_gather_numbers(torch.tensor([zlib.crc32(text), *halves], device="cpu"), mesh)
    nonce = "".join([f"{half:08x}" for half in all_numbers[0][1:]])
    channel = StoreChannel(nonce, mesh.rank, mesh.size, default_store(), timeout)
    outliers = [r for r, numbers in enumerate(all_numbers) if numbers[0] != all_numbers[0][0]]
    if outliers:
        channel.publish("tree", text.decode())
        reference, outlier_text = [channel.wait_for("tree", r) for r in (0, outliers[0])]
        difference = _named_difference(reference, outlier_text, outliers[0])
        raise CheckpointError(
            f"{task}: rank {outliers[0]} has another tree, or another folder, than rank 0: "
            f"{difference or _first_difference(reference, outlier_text)}"
        )
    return channel, result


def _named_difference(reference: str, outlier_text: str, rank: int) -> str:
    """Name the folder, leaf or value that differs, if each text is a folder and a layout; else return ""."""
    if not all("\n{" in x for x in (reference, outlier_text)):
        return ""
    (folder, reference), (folder_of_other, outlier_text) = [x.split("\n", 1) for x in (reference, outlier_text)]
    if folder != folder_of_other:
        return f"{folder!r} on rank 0 and {folder_of_other!r} on rank {rank}"
    layouts = [json.loads(x) for x in (reference, outlier_text)]
    for kind, word in (("leaves", "leaf"), ("values", "value")):
        a, b = [_texts_by_path(layout, kind) for layout in layouts]
        path = next((p for p in (*a, *b) if p not in a or p not in b or a[p] != b[p]), None)
        if path is not None:
            texts = [str(x[path]) if path in x else "missing" for x in (a, b)]
            return f"{word} {path!r} is {texts[0][:80]} on rank 0 and {texts[1][:80]} on rank {rank}"
    return ""


def _texts_by_path(layout: Any, kind: str) -> dict[str, str]:
    """Return a layout's leaves or values as text, by path."""
    if kind == "values":
        return {path: repr(x) for path, x in layout["values"].items()}
    return {path: f"{dtype} {shape}" for path, dtype, shape, *_ in layout["leaves"]}


def _first_difference(reference: str, outlier_text: str) -> str:
    """Show where two texts begin to differ."""
    index = next(
        (i for i, (a, b) in enumerate(zip(reference, outlier_text, strict=False)) if a != b),
        min(len(reference), len(outlier_text)),
    )
    start = max(index - 40, 0)
    return f"...{reference[start : index + 40]!r}... and ...{outlier_text[start : index + 40]!r}..."


class StoreChannel:
    """Messages between the ranks through the store, under keys of their own.

    Attributes:
        nonce: the nonce of the ranks' common work.
    """

    def __init__(self, nonce: str, rank: int, ranks: int, store: Any, timeout: float) -> None:
        self.nonce = nonce
        self._rank, self._ranks, self._timeout = rank, ranks, timeout
        # a connection of its own: a wait on a shared connection would block the process groups
        self._store = store.clone() if hasattr(store, "clone") else store

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0, which commits."""
        return self._rank == 0

    def publish(self, topic: str, text: str) -> None:
        """Publish a text for the other ranks."""
        if self._store is not None:
            self._store.set(self._key(topic, self._rank), text)

    def _key(self, topic: str, rank: int) -> str:
        return f"fzero/{self.nonce}/{topic}/{rank}"

    def wait_for(self, topic: str, rank: int, end: float | None = None) -> str:
        """Wait for the text that a rank publishes, and return it.

        Raises:
            CheckpointError: if the rank publishes nothing in time.
        """
        key = self._key(topic, rank)
        end = time.monotonic() + self._timeout if end is None else end
        try:
            while not self._store.check([key]):
                if time.monotonic() > end:
                    raise CheckpointError(f"rank {rank} did not report within {self._timeout:g} s")
                time.sleep(_POLL_SECONDS)
            return self._store.get(key).decode()
        except DistError as error:
            raise CheckpointError(f"the store is gone, because rank 0 ended ({_error_line(error)[:80]})") from error

    def save_as_leader(self, work: Callable[[], dict[int, File]], commit: Callable[[dict[int, File]], None]) -> str:
        """Do rank 0's work, wait for the others, commit if no rank failed, and publish and return the errors."""
        files, error = _result_or_error(work)
        errors = [] if error is None else [f"rank 0: {_error_line(error)}"]
        end = time.monotonic() + self._timeout
        for r in range(1, self._ranks):
            report, failure = _result_or_error(lambda r=r: json.loads(self.wait_for("done", r, end)))
            if failure is not None:
                errors.append(_error_line(failure))
            if report and report["error"]:
                errors.append(f"rank {r}: {report['error']}")
            if report and files is not None:
                files.update({int(k): File(*v) for k, v in report["files"].items()})
        if files is not None and not errors:
            _, error = _result_or_error(lambda: commit(files))
            errors = [] if error is None else [f"rank 0: {_error_line(error)}"]
        self.publish("committed", "; ".join(errors))
        self._wait_for_readers()
        return "; ".join(errors)

    def _wait_for_readers(self) -> None:
        """Wait until the other ranks have read the result, because this process may hold the store and end now."""
        keys = [self._key("acknowledged", r) for r in range(1, self._ranks)]
        end = time.monotonic() + min(self._timeout, 10)
        while keys and not self._store.check(keys) and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)

    def save_as_follower(self, work: Callable[[], dict[int, File]]) -> str:
        """Do another rank's work, report the result to rank 0, and return the errors of all ranks.

        Raises:
            CheckpointError: if rank 0 does not publish the errors in time.
        """
        files, error = _result_or_error(work)
        report = {
            "error": "" if error is None else _error_line(error),
            "files": {k: list(v) for k, v in (files or {}).items()},
        }
        self.publish("done", json.dumps(report))
        text = self.wait_for("committed", 0, time.monotonic() + self._timeout + 30)
        self.publish("acknowledged", "")
        return text
