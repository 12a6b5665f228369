"""What a newcomer to the parameter servers met, and will not meet again."""

import gc
import os
import signal

import pytest
import torch
from toys import countdown, regression, train, until

import distlab as dl


def kill(live: dl.LiveRun, who: str) -> None:
    os.kill(live.launched.pids[who], signal.SIGKILL)


@pytest.mark.parametrize("who", ["worker 0", "worker 1"])
@pytest.mark.parametrize("strategy", [dl.AsyncPS(), dl.SyncPS(num_backup_workers=1)], ids=repr)
def test_death_at_the_very_start_leaves_nobody_waiting(strategy, who):
    """Before all have met it ends the run and names who; a moment later the others may go on without it."""
    live = dl.start(regression(), strategy, dl.LocalCluster(3), num_updates=50)
    kill(live, who)
    said = "nothing"
    try:
        live.wait()
    except dl.ProcessLost as error:
        said = str(error)
    lost = said.startswith(f"{who} (pid {live.launched.pids[who]}) was lost before")
    assert lost or (live.version, said) == (50, "nothing")


@pytest.mark.parametrize("strategy", [dl.AsyncPS(locking="server"), dl.SyncPS(num_backup_workers=1)], ids=repr)
def test_last_words_of_a_killed_worker_are_not_missed(strategy):
    """It takes up to 50 ms of its own trace with it; its server knows what it read."""
    live = dl.start(regression(), strategy, dl.LocalCluster(3, compute_time_s=0.005), num_updates=120)
    until(lambda: live.version >= 30)
    kill(live, "worker 1")
    made = live.wait()
    assert made.ledger.balances
    assert made.ledger.counts["applied"] == 120 * strategy.gradients_per_update(3)
    assert made.replay().params.equal(made.params)


def by_position(params) -> torch.optim.Optimizer:
    """The first two tensors learn; the rest does not."""
    params = list(params)
    return torch.optim.SGD([{"params": params[:2], "lr": 0.5}, {"params": params[2:], "lr": 0.0}])


@pytest.mark.parametrize("placement", ["ranges", "round-robin", "greedy"])
@pytest.mark.filterwarnings("ignore:this optimizer may need whole tensors")
def test_groups_by_position_are_those_of_the_whole_model_on_every_server(placement):
    task = regression().but(optimizer=by_position)
    runs = [train(task, dl.SyncPS(num_servers=s, placement=placement), dl.SimulatedCluster(3), 10) for s in (1, 3)]
    assert runs[0].params.equal(runs[1].params)
    assert runs[1].replay().params.equal(runs[1].params)


@pytest.mark.parametrize("placement", ["round-robin", "greedy"])
def test_server_without_a_tensor_that_learns_does_no_harm(placement):
    def first_alone(params) -> torch.optim.Optimizer:
        return torch.optim.SGD([next(iter(params))], lr=0.5)

    task = regression().but(optimizer=first_alone)
    runs = [train(task, dl.SyncPS(num_servers=s, placement=placement), dl.SimulatedCluster(2), 5) for s in (1, 4)]
    assert runs[0].params.equal(runs[1].params)


@pytest.mark.parametrize("every", [2, 4])
def test_gradients_that_wait_are_corrected_for_what_they_were_read_at(every):
    strategy = dl.AsyncPS(compensation=lambda g, moved: g + 10 * moved, apply_every=every)
    made = train(regression(), strategy, dl.SimulatedCluster(4, seed=1), 30)
    assert made.replay().params.equal(made.params)


FINITE = r"lr_by_staleness\(0\) must be a finite factor of 0 or more, got "


@pytest.mark.parametrize(
    ("error", "text", "option", "rule"),
    [
        (TypeError, r"must return a tensor \(16,\) torch.float64, got None", "compensation", lambda g, m: None),
        (TypeError, r"got \(3,\) torch.float64", "compensation", lambda g, m: g[:3]),
        (ValueError, "compensation returned values that are not finite", "compensation", lambda g, m: g / 0),
        (ValueError, FINITE + "-1.0", "lr_by_staleness", lambda s: -1.0),
        (ValueError, FINITE + "nan", "lr_by_staleness", lambda s: float("nan")),
    ],
)
def test_rule_that_returns_nonsense_is_named(error, text, option, rule):
    with pytest.raises(error, match=text):
        train(countdown(), dl.AsyncPS(**{option: rule}), dl.SimulatedCluster(2), 5)


def test_failed_runs_give_back_their_descriptors_at_once(two):
    def fail() -> None:
        with pytest.raises(ZeroDivisionError):
            train(countdown(), dl.AsyncPS(compensation=lambda g, moved: 1 / 0), two, 5)

    fail()
    gc.collect()
    gc.disable()
    try:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            fail()
        assert len(os.listdir("/proc/self/fd")) <= before
    finally:
        gc.enable()
