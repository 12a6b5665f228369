"""All-reduce: the replicas exchange gradients only, and yet hold the same bits after every step."""

import os
import zlib

import numpy as np
import pytest
from toys import OPTIMIZERS, Scalar, regression, train

import distlab as dl


class Fingerprinted(dl.AllReduce):
    """Writes a checksum of its parameters into the trace, before every update and after the last."""

    def run(self, fabric, job):
        record = fabric.record

        def write(params, step):
            now, number = fabric.now(), zlib.crc32(params.numpy().tobytes())
            record("send", now, now, worker=fabric.me.index, step=step, version=number)

        def record_and_write(kind, *times, **facts):
            record(kind, *times, **facts)
            if kind == "compute":
                write(fabric.flat.params, facts["step"])

        fabric.record = record_and_write
        left = super().run(fabric, job)
        write(left.params, left.steps)
        fabric.record = record
        return left


def fingerprints(run: dl.Run, worker: int) -> list[int]:
    rows = run.trace.select("send", worker=worker)
    return rows["version"][np.argsort(rows["step"])].tolist()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_replicas_hold_the_same_bits_after_every_step(four, optimizer):
    run = train(regression(optimizer), Fingerprinted(), four, 15)
    first = fingerprints(run, 0)
    assert len(set(first)) == 16, "every update changes the parameters"
    assert [fingerprints(run, w) for w in (1, 2, 3)] == [first] * 3


def test_replicas_start_from_the_chief(three):
    """A factory that draws another model in every process does no harm."""
    task = regression(model=lambda: Scalar(float(os.getpid())), loss=lambda outputs, _: outputs.mean())
    run = train(task, Fingerprinted(), three, 3)
    assert fingerprints(run, 0) == fingerprints(run, 1) == fingerprints(run, 2)


def test_every_worker_applies_every_update(three):
    run = train(regression(), dl.AllReduce(), three, 12)
    assert run.who_applied == ["worker 0", "worker 1", "worker 2"]
    for worker in range(3):
        assert run.trace.select("apply", worker=worker)["version"].tolist() == list(range(1, 13))


def test_nobody_reads_old_parameters(three):
    run = train(regression(), dl.AllReduce(), three, 12)
    assert (run.history["staleness"] == 0).all()
    assert (run.history["num_gradients"] == 3).all()


def test_each_reduce_moves_the_same_bytes(three):
    reduces = train(regression(), dl.AllReduce(algorithm="ring"), three, 12).trace.select("reduce")
    assert len(reduces) == 36
    assert len(set(reduces["bytes"].tolist())) == 1
    assert reduces["bytes"][0] > 0
