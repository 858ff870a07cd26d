"""The picture of a schedule: a box for each action, at its time, and the numbers beside."""

import numpy as np
import pytest

from fzero.parallel.schedules import schedule

pytest.importorskip("matplotlib")


def boxes(axes):
    """Return the boxes of each rank, left to right, as (start, width)."""
    rows = {}
    for bars in axes.collections:
        for path in bars.get_paths():
            (left, top), (right, _) = path.vertices.min(0), path.vertices.max(0)
            rows.setdefault(round(float(top) + 0.45), []).append((float(left), float(right - left)))
    return {rank: sorted(row) for rank, row in rows.items()}


@pytest.mark.parametrize("name,stages", [("1f1b", 1), ("zbv", 2)])
def test_each_action_of_a_schedule_is_a_box_at_its_time(name, stages):
    schedule_ = schedule(name, 4, 6, stages)
    (axes,) = schedule_.plot().axes
    timing = schedule_.timing()
    for rank, row in enumerate(schedule_.rows):
        expected = sorted((timing.start[a], timing.end[a] - timing.start[a]) for a in row)
        assert np.array(boxes(axes)[rank]) == pytest.approx(np.array(expected))


def test_the_labels_of_a_schedules_picture_are_its_numbers(tmp_path):
    schedule_, more = schedule("1f1b", 4, 8), schedule("interleaved", 4, 8, 2)
    figure = schedule_.plot(tmp_path / "both.png", beside=[more])
    assert (tmp_path / "both.png").stat().st_size > 10_000
    first, second = figure.axes
    assert first.get_title("left") == "1f1b"
    assert first.get_title("right") == "efficiency 72.7%, makespan 33, 8 micro-batches, 48 messages"
    assert first.get_xlim() == second.get_xlim() == (0, 33)
    texts = [t.get_text() for t in second.texts]
    assert texts[-5:-1] == ["5.5", "4.5", "3.5", "2.5"]  # in flight, in micro-batches
    assert [t.get_text() for t in figure.legends[0].get_texts()] == [
        "forward",
        "backward",
        "darker: a rank's later stages",
    ]


def test_numbers_in_a_schedules_picture_appear_where_boxes_are_wide_enough():
    def numbers(schedule_):
        (axes,) = schedule_.plot().axes
        return len(axes.texts) - min(schedule_.ranks, 16) - 1

    assert numbers(schedule("1f1b", 2, 4)) == 2 * 2 * 4
    assert numbers(schedule("1f1b", 4, 200)) == 0


def test_a_notebook_shows_the_picture():
    assert '<img alt="the schedule' in schedule("1f1b", 2, 2)._repr_html_()
