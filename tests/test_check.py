"""`check_strategy` finds planted faults, and prints a case that a reader can run again."""

import threading

import pytest
from toys import regression

import distlab as dl
from distlab import check
from distlab.fabric.network import IDEAL
from distlab.fabric.simulated import SimulatedLink
from distlab.roles.server import Server
from distlab.roles.updater import Updater
from distlab.strategies.base import ParameterServerStrategy
from distlab.strategies.hogwild import Memory


def caught(strategy, num_cases=40):
    with pytest.raises(dl.PromiseBroken) as error:
        dl.check_strategy(strategy, num_cases=num_cases)
    return str(error.value)


def test_kept_promises_are_one_sentence():
    said = dl.check_strategy(dl.SyncPS(), num_cases=3, seed=5)
    assert said == "SyncPS() kept its promises in 3 simulated clusters (seeds 5 to 7)"


def test_pull_without_a_copy_is_caught(monkeypatch):
    post = SimulatedLink.post

    def without_copy(self, kind, tensors=(), **header):
        self.node.world.hollow, hollow = True, self.node.world.hollow  # a hollow world does not copy
        try:
            return post(self, kind, tensors, **header)
        finally:
            self.node.world.hollow = hollow

    monkeypatch.setattr(SimulatedLink, "post", without_copy)
    assert "a replay of the trace ends elsewhere" in caught(dl.AsyncPS())


def test_dropped_gradient_counted_as_applied_is_caught(monkeypatch):
    step = Updater.step

    def forgetful(self, *gradients, lane=-1, mean=None):
        if self.version % 3 != 2:
            return step(self, *gradients, lane=lane, mean=mean)
        return self._fabric.timed("apply", lambda: None)

    monkeypatch.setattr(Updater, "step", forgetful)
    assert "a replay of the trace ends elsewhere" in caught(dl.AsyncPS())


def test_old_copy_written_over_shared_memory_is_caught(monkeypatch):
    step = Memory._step

    def overwriting(self, gradient):
        self.shared.values.copy_(self.flat.params)
        return step(self, gradient)

    monkeypatch.setattr(Memory, "_step", overwriting)
    assert "a replay of the trace ends elsewhere" in caught(dl.Hogwild())


def test_gradient_applied_twice_is_caught():
    class Twice(dl.AsyncPS):
        def serve(self, server, worker):
            for gradient in worker.pushes():
                server.apply(gradient)
                if gradient.step == 2:
                    server.apply(gradient)
                worker.reply()

    assert "gradient of step 2 was applied, then" in caught(Twice())


def test_stale_gradient_accepted_is_caught():
    class Impatient(dl.SyncPS):
        """Answers the first worker of each round before the round is over."""

        def serve(self, server, worker):
            for gradient in worker.pushes():
                with server.fabric.lock():
                    server.waiting[gradient.worker] = gradient
                    full = len(server.waiting) == server.fabric.counts["worker"]
                    if full:
                        server.apply(*(server.waiting.pop(w) for w in sorted(server.waiting)))
                worker.reply()

    assert "holds a gradient read at" in caught(Impatient())


def test_two_gradients_of_one_worker_in_a_version_are_caught():
    class Greedy(ParameterServerStrategy):
        """Applies every second gradient together with the one before, whoever sent them."""

        def serve(self, server, worker):
            for gradient in worker.pushes():
                with server.fabric.lock():
                    kept = list(server.__dict__.setdefault("kept", []))
                    server.kept.append(gradient)
                    if kept:
                        server.kept.clear()
                        server.apply(*kept, gradient)
                worker.reply()

        def work(self, worker, server):
            dl.AsyncPS().work(worker, server)

    assert "several gradients of one worker" in caught(Greedy())


def test_replicas_that_drift_apart_are_caught():
    class Drifting(dl.AllReduce):
        def run(self, fabric, job):
            record = fabric.record

            def record_and_spoil(kind, *times, **facts):
                record(kind, *times, **facts)
                if kind == "reduce" and fabric.me.index == 1:
                    fabric.flat.grads.mul_(1.001)

            fabric.record = record_and_spoil
            return super().run(fabric, job)

    assert "the replicas differ" in caught(Drifting())


def test_waiting_for_ever_is_caught_and_says_who_waits():
    class Stuck(dl.SyncPS):
        def serve(self, server, worker):
            for gradient in worker.pushes():
                server.wait_for(gradient.read + 1)

    assert "it ended by Deadlock" in caught(Stuck())


def test_threading_primitive_held_across_a_blocking_call_is_refused(monkeypatch):
    monkeypatch.setattr(check, "STALL_S", 0.5)
    monkeypatch.setattr(
        check, "guard", guard := threading.Lock(), raising=False
    )  # a lock does not travel: a module does

    class Held(dl.AsyncPS):
        def work(self, worker, server):
            with check.guard:
                super().work(worker, server)

    with pytest.raises(dl.PromiseBroken, match="threading primitive held across a blocking call"):
        dl.check_strategy(Held())
    guard.release()  # lets the simulation that stands still run out


def test_counter_example_is_small_and_fails_again():
    class Skips(dl.AsyncPS):
        def make_server(self, fabric, job):
            server = super().make_server(fabric, job)
            server.apply = lambda *gradients: Server.apply(server, *gradients) if server.version != 1 else skip(server)
            return server

    def skip(server):
        with server.fabric.lock("version"):
            server.updater.version += 1

    case = check.smallest(check.random_case(Skips(), 3), lambda c: bool(check.violations(c)))
    assert check.violations(case)
    assert (case.num_workers, case.changes, case.network) == (1, (), IDEAL)
    assert "broke a promise" in check.report(case)


def test_strategy_written_in_a_cell_runs_on_both_worlds(two):
    class Averaging(ParameterServerStrategy):
        def serve(self, server, worker):
            for gradient in worker.pushes():
                server.apply(gradient)
                worker.reply()

        def work(self, worker, server):
            params = server.pull()
            for batch in worker.batches():
                params = server.push(worker.gradient(params, batch))

    for cluster in (two, dl.SimulatedCluster(2)):
        assert dl.train(regression(), Averaging(), cluster, num_updates=20, progress=False).version == 20
    assert "kept its promises" in dl.check_strategy(Averaging(), num_cases=5)


def test_not_a_strategy_is_refused():
    with pytest.raises(TypeError, match="strategy must be a Strategy"):
        dl.check_strategy("async")
