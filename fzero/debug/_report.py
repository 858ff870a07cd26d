"""The report on what is not finite in a step's results."""

from dataclasses import dataclass

from fzero.debug._trail import Birth

__all__ = ["Nonfinite", "Origin"]


@dataclass(frozen=True)
class Origin:
    """Where a non-finite value was made.

    Attributes:
        ranks: the ranks that made it there.
        leaf: the argument and the path that it stood in; "" of what an operation made.
        operation: the operation of torch, such as "log"; "" of what stood in an argument.
        value: "nan", "inf", "-inf", or several of them.
        given: what the operation was given: dtypes, shapes, ranges of finite values, and what is not finite.
        line: the user's line, as "file:line"; "" where there is none. Of a backward pass, the forward operation's.
        code: the text of that line.
        backward: the node of a backward pass, such as "SqrtBackward0"; "" of a forward pass.
    """

    ranks: tuple[int, ...]
    leaf: str
    operation: str
    value: str
    given: str
    line: str
    code: str
    backward: str

    @staticmethod
    def of(birth: Birth | None) -> "Origin | None":
        """Return what the report keeps of a birth."""
        if birth is None:
            return None
        b = birth
        return Origin(b.ranks, b.leaf, b.operation, b.value, b.given, b.line, b.code, b.backward)

    def lines(self, size: int) -> list[str]:
        """Return it as lines of text, for a mesh of `size` ranks."""
        what = f"{self.value} " if self.value else ""
        place = f" on {_ranks(self.ranks, size)}" if self.ranks and size > 1 else ""
        if self.leaf:
            by = f"in {self.leaf}" + (f", first read by {self.operation}" if self.operation else "")
        else:
            by = f"made by {self.operation}"
        found = [f"{what}{by}{place}"]
        if self.given:
            found.append(f"  given {self.given}")
        if self.backward:
            found.append(f"  in the backward pass ({self.backward}) of")
        if self.line:
            found.append(f"  {self.line}" + (f": {self.code}" if self.code else ""))
        return found


def _ranks(ranks: tuple[int, ...], size: int) -> str:
    if len(ranks) == size:
        return f"all {size} ranks"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} of {size}"


@dataclass(frozen=True)
class Nonfinite:
    """What `fzero.debug.nonfinite` found. Print it; as a condition it is true if a result is not finite.

    Attributes:
        name: of the step.
        size: the number of ranks.
        results: the results that are not finite, by their places.
        origin: where the first non-finite value was made that reaches one of them; None if all are finite.
        became: where an infinity of `origin` became nan, if it did.
    """

    name: str
    size: int
    results: tuple[str, ...]
    origin: Origin | None
    became: Origin | None

    @property
    def rank(self) -> int | None:
        """The first rank that made it; None if there is none."""
        return self.origin.ranks[0] if self.origin is not None and self.origin.ranks else None

    @property
    def finite(self) -> bool:
        """Whether all results are finite."""
        return not self.results

    def __bool__(self) -> bool:
        return not self.finite

    def __str__(self) -> str:
        if self.finite:
            return f"{self.name}: all results are finite"
        more = f", and {len(self.results) - 3} more" if len(self.results) > 3 else ""
        lines = [f"{self.name}: not finite: {'; '.join(self.results[:3])}{more}"]
        if self.origin is not None:
            lines += self.origin.lines(self.size)
        if self.became is not None:
            lines += ["and then " + self.became.lines(self.size)[0], *self.became.lines(self.size)[1:]]
        return "\n".join(lines)

    __repr__ = __str__
