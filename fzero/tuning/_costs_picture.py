"""Draw the seconds of a step by ratio, with the ratios that do not fit in grey."""

from typing import TYPE_CHECKING, Any

from fzero.graph import size

if TYPE_CHECKING:
    from fzero.tuning._costs import OffloadCosts

__all__ = ["draw"]

LINES = (  # the lines of the picture: update, schedule, colour, style, name
    ("deepspeed", "after", "C7", "-", "DeepSpeed's update"),
    ("host", "after", "C0", "-", 'update="host"'),
    ("host", "during", "C0", "--", "  without a clip by the norm"),
    ("host", "across", "C0", ":", "  delay=1"),
    ("device", "after", "C1", "-", 'update="device"'),
    ("device", "during", "C1", "--", "  without a clip by the norm"),
)


def draw(costs: "OffloadCosts") -> Any:
    """Draw costs as a matplotlib figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots()
    ratios = [k / 200 for k in range(201)]
    for update, schedule, colour, style, name in LINES:
        seconds = [costs.seconds(r, update, schedule) for r in ratios]
        axes.plot(ratios, seconds, style, color=colour, label=name)
    top = 1.05 * costs.seconds(1, "deepspeed")
    first = 1.0 if costs.first_fit is None else costs.first_fit
    axes.axvspan(0, first, color="black", alpha=0.12, linewidth=0)
    if costs.first_fit is not None:
        axes.axvline(first, color="black", linewidth=0.8, linestyle="--")
    x, side = (first, "right") if first > 0.5 else (first, "left")
    room = size(costs.machine.device_bytes)
    label_text = f"no ratio fits {room}" if costs.first_fit is None else f"fits {room} from {first:g}"
    axes.text(x, 0.97 * top, f" {label_text} ", ha=side, va="top")
    axes.set(
        xlim=(0, 1), ylim=(0, top), xlabel="ratio of the state on the host", ylabel="seconds of a step, by the model"
    )
    axes.set(title=f"{costs.work.name} on {costs.machine.name}")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure
