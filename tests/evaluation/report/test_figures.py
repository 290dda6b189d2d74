"""Places in figures."""

from itertools import pairwise

import pytest

from prefixkit.evaluation.report import Branch, Picture, Progress, pass_at_k_curve
from prefixkit.evaluation.report.axes import Scale, log_ticks, nice_range, nice_step, steps
from prefixkit.evaluation.report.figures import NARROW, WIDE, curve_figure, progress_figures
from prefixkit.evaluation.report.icicle import icicle, outline
from prefixkit.evaluation.report.numbers import bytes_of, count, duration, percent, plural, short
from prefixkit.evaluation.report.verdict_figures import segments


def test_scales():
    assert Scale(0, 10, 100, 200)(5) == 150
    assert Scale(1, 100, 0, 100, log=True)(10) == 50
    assert Scale(3, 3, 0, 100)(3) == 50


def test_steps_of_an_axis():
    assert nice_step(1.0, 5) == pytest.approx(0.2) and nice_step(7, 4) == 2
    low, high, step = nice_range(0.31, 0.87, 6)
    assert (low, high, step) == pytest.approx((0, 1, 0.2))
    low, high, step = nice_range(0.91, 0.97, 6)
    assert (low, high) == pytest.approx((0.91, 0.97))
    assert steps(low, high, step)[-1] == pytest.approx(high)
    assert nice_range(0, 0, 4)[1] > 0


def test_labels_of_a_narrow_axis_do_not_touch():
    ks = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
    labels = [tick.label for tick in log_ticks(ks, Scale(1, 1000, 0, 200, log=True))]
    assert labels[0] == "1" and labels[-1] == "1,000" and "" in labels


def test_bands_of_many_curves_are_left_out():
    curve = pass_at_k_curve([50] * 9, [3] * 9)
    assert [bool(curve_figure([curve] * number, WIDE).strokes[0].band) for number in (1, 4, 5)] == [True, True, False]


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_curves_lie_in_the_frame_with_labels_apart(width):
    curves = [pass_at_k_curve([50] * 9, [group] * 8 + [3], label=f"T={group}") for group in range(8)]
    figure = curve_figure(curves, width)
    for stroke in figure.strokes:
        for pair in (stroke.line + " " + stroke.band).split():
            x, y = map(float, pair.split(","))
            assert figure.left <= x <= figure.right and figure.top - 0.5 <= y <= figure.bottom + 0.5
    places = sorted(stroke.label_y for stroke in figure.strokes)
    assert all(b - a >= 13.9 for a, b in pairwise(places))
    assert figure.top <= places[0] and places[-1] <= figure.bottom


def test_stops_are_gaps():
    starts = [[Progress(s, s, 10 * s) for s in (0, 10, 20)], [Progress(60, 20, 200), Progress(100, 40, 1000)]]
    rates, samples = progress_figures(starts, WIDE)
    assert len(rates.strokes) == len(samples.strokes) == 2
    (stop,) = rates.shades
    assert stop.label == "stopped for 40.0 s" and stop.width == pytest.approx(0.4 * (WIDE - 68), abs=0.2)
    assert "stopped 1 time;" in rates.text and "20" in rates.text


@pytest.mark.parametrize("last", [10.5, 14.9, 14.999])
def test_samples_that_finish_at_once_make_no_spike_of_speed(last):
    """A line of progress comes with the first sample of many that finish together, and the end a moment later."""
    rates, _ = progress_figures([[Progress(0, 0, 0), Progress(last, 1, 100), Progress(15, 128, 12_800)]], WIDE)
    assert "the highest value is 853" in rates.text  # 12,800 tokens in 15 s
    waves = [Progress(second, second, 100 * second) for second in (0, 10, 20, 30)]
    rates, _ = progress_figures([[*waves, Progress(30.001, 128, 12_800)]], WIDE)
    assert "the highest value is 1.08k" in rates.text  # 10,800 tokens in the last 10 s


def test_many_moments_are_thinned():
    (rates, _) = progress_figures([[Progress(s, s, s) for s in range(100_000)]], WIDE)
    assert len(rates.strokes[0].line) < 10_000


def test_an_icicle_is_as_wide_as_tokens_and_as_high_as_sequences():
    tree = Branch(30, 4, "root", (Branch(10, 2, "a"), Branch(20, 1, "b")))
    picture = icicle(Picture("a tree", (tree,)), WIDE)
    root, first, second = picture.blocks
    assert root.width == pytest.approx((WIDE - 2) * 0.6, abs=0.2) and root.height == pytest.approx(
        2 * first.height, abs=0.2
    )
    assert first.x == second.x == pytest.approx(root.x + root.width, abs=0.2)
    assert second.y == pytest.approx(first.y + first.height, abs=0.2)
    assert picture.text == "3 nodes, 60 tokens stored once; unshared, 160"
    assert root.label.startswith("30 x 4") and root.title.startswith("30 tokens, shared by 4: root")


def test_nodes_that_cannot_be_seen_are_counted():
    tree = Branch(1000, 5000, children=tuple(Branch(1, 1) for _ in range(5000)))
    assert icicle(Picture("", (tree,)), NARROW).left_out == 5000
    rows, more = outline((tree,))
    assert more == 0 and len(rows[0].children) == 12 and rows[0].more == 4988


def test_bars_are_full_and_show_what_is_rare():
    parts = segments({"passed": 100_000, "crashed": 1}, 120)
    assert [part.outcome for part in parts] == ["passed", "crashed"]
    assert parts[1].width >= 1 and parts[-1].x + parts[-1].width == pytest.approx(120, abs=0.2)
    assert segments({}, 120) == ()


def test_numbers_as_text():
    assert [percent(x) for x in (0, 1, 0.5, 0.005, 0.00001, 0.99999)] == [
        "0%",
        "100%",
        "50.0%",
        "0.50%",
        "<0.01%",
        ">99.99%",
    ]
    assert (count(None), count(1234.4)) == ("-", "1,234")
    assert (short(1_234_567), short(950), short(0)) == ("1.23M", "950", "0")
    assert (bytes_of(100), bytes_of(3 << 30)) == ("100 bytes", "3 GiB")
    assert (duration(59), duration(90), duration(7200), duration(2e5)) == ("59.0 s", "1.5 min", "2.0 h", "2.3 d")
    assert (plural(1, "node"), plural(2000, "node")) == ("1 node", "2,000 nodes")
