"""While a run is on, nothing of it can be reached from another machine; and nobody else can join."""

import os
from pathlib import Path

import pytest
from toys import countdown, until

import distlab as dl

LISTEN = "0A"
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


def listeners(pids: list[int]) -> list[str]:
    """The addresses, as the kernel writes them, on which these processes listen by TCP."""
    inodes = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN:
                inodes[f"socket:[{fields[9]}]"] = fields[1].split(":")[0]
    links = [fd for pid in pids for fd in Path(f"/proc/{pid}/fd").iterdir()]
    return [inodes[target] for target in map(target_of, links) if target in inodes]


def target_of(link: Path) -> str:
    try:
        return os.readlink(link)
    except FileNotFoundError:  # closed meanwhile
        return ""


@pytest.fixture(params=[dl.AsyncPS(), dl.AllReduce(), dl.InGraph()], ids=repr)
def strategy(request):
    return request.param


@pytest.fixture(params=["memory", "gloo"])
def links(request):
    return request.param


@pytest.fixture
def live(links, strategy):
    with dl.LocalCluster(num_workers=2, links=links) as cluster:
        live = dl.start(countdown(), strategy, cluster, num_updates=10**9)
        until(lambda: live.version > 0)
        yield live


def test_processes_of_a_run_listen_on_loopback_only(live, links):
    found = listeners(list(live.launched.pids.values()))
    if links == "memory":
        assert not found
    else:
        assert len(found) >= 2, "gloo listens somewhere, or this test looks at the wrong place"
        assert set(found) <= LOOPBACK


def test_the_caller_opens_no_listener(live):
    assert set(listeners([os.getpid()])) <= LOOPBACK


def test_processes_meet_in_a_folder_that_only_this_user_can_read(live):
    folder = Path(live.launched._home.folder)
    assert folder.stat().st_mode & 0o077 == 0
    assert folder.stat().st_uid == os.getuid()


def test_two_runs_have_different_tokens(two, monkeypatch):
    from distlab.clusters import home

    places, start = [], home.start
    monkeypatch.setattr(home, "start", lambda payload, place: (places.append(place), start(payload, place))[1])
    for _ in range(2):
        dl.train(countdown(), dl.SingleWorker(), two, num_updates=1, progress=False)
    assert len({place.token for place in places}) == 2
    assert all(place.token > 0 for place in places)
