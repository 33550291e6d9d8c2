"""The loss of a run as a picture, from its metrics.jsonl."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from tplora.errors import ArtifactError
from tplora.files import file_written_aside
from tplora.train.metrics import read_metrics

__all__ = ["draw_loss"]

_TRAIN, _EVAL, _RATE, _TEXT = "#2563b0", "#d1495b", "#9aa5b1", "#333a44"
_NUM_LABELLED = 8  # evaluations with their value beside them
_NUM_UNSMOOTHED = 100  # logged steps; from twice as many on, a running mean is drawn as well
_DRAWN = ("loss", "eval_loss", "learning_rate", "rewards/margins", "eval_rewards/margins")
_Points = list[tuple[float, float]]


def draw_loss(metrics_path: Path, picture_path: Path, *, title: str) -> None:
    """Draw the training and evaluation loss over the steps, 1000 by 600 pixels.

    The learning rate is drawn behind them if it changes. Where answers are preferred, the margin of
    the better ones' rewards is drawn below, 300 pixels more. The file appears whole or not at all.

    Raises:
        ArtifactError: If the metrics hold no loss, or a file cannot be read or written.
    """
    records = read_metrics(metrics_path)
    train, evaluated, rate, margins, eval_margins = (
        [(r["step"], r[name]) for r in records if r.get(name) is not None] for name in _DRAWN
    )
    has_margins = bool(margins or eval_margins)
    if not train and not evaluated:
        raise ArtifactError(f"{metrics_path}: holds no loss to draw")
    figure = Figure(
        figsize=(10, 9 if has_margins else 6),
        dpi=100,
        facecolor="white",
        layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12),
    )
    rows = figure.add_gridspec(2 if has_margins else 1, height_ratios=[2, 1][: 1 + has_margins])
    axes = figure.add_subplot(rows[0])
    _draw_train(axes, train, "training loss")
    _draw_eval(axes, evaluated, "evaluation loss")
    _style(axes, "loss per pair or answer" if has_margins else "loss per supervised token (nats)")
    axes.set_title(title, loc="left", fontsize=13, fontweight="bold", color=_TEXT, pad=12)
    twins = [_draw_rate(axes, rate)] if len({value for _, value in rate}) > 1 else []
    _legend(axes, [axes, *twins])
    if has_margins:
        below = figure.add_subplot(rows[1], sharex=axes)
        _draw_train(below, margins, "training margin")
        _draw_eval(below, eval_margins, "evaluation margin")
        _style(below, "reward of the better answer, less the other's")
        _legend(below, [below])
    with file_written_aside(picture_path, overwrite=True) as aside:
        figure.savefig(aside, format="png")


def _draw_train(axes: Axes, points: _Points, label: str) -> None:
    if not points:
        return
    steps, losses = zip(*points, strict=True)
    window = len(points) // _NUM_UNSMOOTHED
    if window < 2:
        marker = "o" if len(points) == 1 else ""
        axes.plot(steps, losses, color=_TRAIN, linewidth=1.8, marker=marker, label=label)
        return
    axes.plot(steps, losses, color=_TRAIN, linewidth=0.8, alpha=0.3, label=label)
    means = [sum(losses[i : i + window]) / window for i in range(len(losses) - window + 1)]
    axes.plot(
        steps[window // 2 :][: len(means)], means, color=_TRAIN, linewidth=1.8,
        label=f"mean of {window} logged steps",
    )  # fmt: skip


def _draw_eval(axes: Axes, points: _Points, label: str) -> None:
    if not points:
        return
    steps, losses = zip(*points, strict=True)
    axes.plot(
        steps, losses, color=_EVAL, linewidth=1.2, linestyle="--", marker="o", markersize=6,
        label=label, zorder=4,
    )  # fmt: skip
    for step, loss in _evenly(points, _NUM_LABELLED):
        axes.annotate(
            f"{loss:#.3g}", (step, loss), xytext=(0, 9), textcoords="offset points", ha="center",
            color=_EVAL, fontsize=10, fontweight="bold", zorder=5,
            bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "alpha": 0.8, "linewidth": 0},
        )  # fmt: skip


def _evenly(points: _Points, most: int) -> _Points:
    """Return at most `most` of the points, first and last included."""
    last = len(points) - 1
    num_gaps = min(last, most - 1)
    return [points[round(i * last / max(1, num_gaps))] for i in range(num_gaps + 1)]


def _draw_rate(axes: Axes, points: _Points) -> Axes:
    twin = axes.twinx()
    steps, rates = zip(*points, strict=True)
    twin.plot(steps, rates, color=_RATE, linewidth=1, linestyle=":", label="learning rate")
    twin.set_ylabel("learning rate", color=_RATE)
    twin.set_ylim(bottom=0, top=max(rates) * 1.1)
    twin.tick_params(axis="y", colors=_RATE, length=0, labelsize=9)
    twin.yaxis.set_major_locator(MaxNLocator(4))
    twin.yaxis.set_major_formatter(lambda rate, _: f"{rate:.1e}" if rate else "0")
    twin.spines[:].set_visible(False)
    axes.set_zorder(twin.get_zorder() + 1)  # the losses lie on top
    axes.patch.set_visible(False)
    return twin


def _style(axes: Axes, of_what: str) -> None:
    axes.set_xlabel("step", color=_TEXT)
    axes.set_ylabel(of_what, color=_TEXT)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    axes.margins(x=0.03, y=0.12)
    axes.grid(visible=True, color="#e4e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_TEXT, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#b8c0c8")


def _legend(axes: Axes, drawn: list[Axes]) -> None:
    lines = [line for each in drawn for line in each.get_lines()]
    axes.legend(lines, [str(line.get_label()) for line in lines], frameon=False, loc="upper right")
