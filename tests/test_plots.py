"""What is in the pictures: as many marks as there are events."""

import pytest
from toys import countdown

import distlab as dl
from distlab.plots import plot_timeline


def picture(strategy: dl.Strategy):
    """A run with a slow worker, and the picture of all of it."""
    cluster = dl.SimulatedCluster(3, compute=0.1).slow(worker=1, factor=2.5)
    run = dl.train(countdown(), strategy, cluster, num_updates=10, progress=False)
    return run, plot_timeline(run, to_s=run.seconds)


def legend(figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_timeline_crosses_out_what_was_dropped():
    run, figure = picture(dl.SyncPS(num_backup_workers=1))
    crosses = [line for line in figure.axes[0].lines if line.get_marker() == "x"]
    assert len(crosses[0].get_xdata()) == run.ledger.counts["dropped"] > 0
    assert set(crosses[0].get_ydata()) == {run.trace.who.index("worker 1")}
    assert "dropped" in legend(figure)


def test_timeline_shows_what_was_cancelled():
    run, figure = picture(dl.SyncPS(num_backup_workers=1, late="cancel"))
    bars = dict(zip(legend(figure), figure.axes[0].collections, strict=False))
    assert len(bars["cancel"].get_paths()) == run.ledger.counts["cancelled"] > 0


@pytest.mark.parametrize("strategy", [dl.AsyncPS(), dl.SyncPS()], ids=repr)
def test_timeline_of_a_run_without_drops_has_none_in_its_legend(strategy):
    assert "dropped" not in legend(picture(strategy)[1])
