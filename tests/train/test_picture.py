import json

import matplotlib.image
import pytest

from tplora.errors import ArtifactError
from tplora.train.picture import draw_loss


def _write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def _trained(num_steps, *, rate=lambda step: 1e-4):
    return [
        {"step": step, "loss": 2 / step, "grad_norm": None, "learning_rate": rate(step)}
        for step in range(1, num_steps + 1)
    ]


def _has_color(path, color):
    pixels = (matplotlib.image.imread(path) * 255).round()
    assert pixels.shape[:2] == (600, 1000)
    return bool((pixels[..., :3] == color).all(axis=-1).any())


BLUE, RED, GREY = (0x25, 0x63, 0xB0), (0xD1, 0x49, 0x5B), (0x9A, 0xA5, 0xB1)


@pytest.mark.parametrize("num_steps", [1, 2, 60, 500])
@pytest.mark.parametrize("num_evaluations", [0, 1, 30])
def test_a_picture_of_1000_by_600_shows_each_curve_there_is(tmp_path, num_steps, num_evaluations):
    evaluated = [{"step": k, "eval_loss": 1.5} for k in range(num_evaluations)]
    metrics = _write(tmp_path / "metrics.jsonl", [*_trained(num_steps), *evaluated])
    draw_loss(metrics, tmp_path / "loss.png", title="a run")
    assert _has_color(tmp_path / "loss.png", BLUE)
    assert _has_color(tmp_path / "loss.png", RED) == (num_evaluations > 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loss.png", "metrics.jsonl"]


def test_the_learning_rate_is_drawn_only_if_it_changes(tmp_path):
    pictures = {}
    for name, rate in {"constant": lambda step: 1e-4, "falling": lambda step: 1e-4 / step}.items():
        metrics = _write(tmp_path / f"{name}.jsonl", _trained(5, rate=rate))
        draw_loss(metrics, tmp_path / f"{name}.png", title="a run")
        pictures[name] = _has_color(tmp_path / f"{name}.png", GREY)
    assert pictures == {"constant": False, "falling": True}


def test_a_picture_is_replaced(tmp_path):
    (tmp_path / "loss.png").write_text("old")
    draw_loss(_write(tmp_path / "m.jsonl", _trained(3)), tmp_path / "loss.png", title="a run")
    assert _has_color(tmp_path / "loss.png", BLUE)


@pytest.mark.parametrize("records", [[], [{"step": 1, "loss": None}]])
def test_metrics_without_a_loss_are_refused_and_leave_no_file(tmp_path, records):
    with pytest.raises(ArtifactError, match="holds no loss to draw"):
        draw_loss(_write(tmp_path / "m.jsonl", records), tmp_path / "loss.png", title="a run")
    assert not (tmp_path / "loss.png").exists()


def test_a_folder_that_cannot_be_written_is_an_artifact_error(tmp_path):
    (tmp_path / "file").write_text("")
    metrics = _write(tmp_path / "m.jsonl", _trained(3))
    with pytest.raises(ArtifactError, match="cannot be written"):
        draw_loss(metrics, tmp_path / "file" / "loss.png", title="a run")
