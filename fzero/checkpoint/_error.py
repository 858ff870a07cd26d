"""The errors of checkpoints."""

__all__ = ["CheckpointError", "DamagedError"]


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read. The message names the file or the leaf, and says what to do.

    It is raised on all ranks. Earlier checkpoints stay as they were.

    Example:
        >>> import fzero
        >>> try:
        ...     fzero.load("nowhere", like={})
        ... except fzero.errors.CheckpointError as error:
        ...     print(str(error).split("; ")[0][-28:])
        it has no file manifest.json
    """


CheckpointError.__module__ = "fzero.errors"  # where a pickle finds it


class DamagedError(CheckpointError):
    """Files of a checkpoint are missing or damaged. An older checkpoint may be intact."""
