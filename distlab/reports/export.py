"""Traces for other tools: Chrome's trace format, which Perfetto opens, tables as CSV, and a folder for TensorBoard.

In Chrome's there is a row per process, a slice per event with its versions and bytes, and an arrow from each gradient
to where it was applied.

Source: Google, "Trace Event Format".
"""

import json
from pathlib import Path
from typing import Any

from distlab.reports.event_files import event_files
from distlab.run import Run
from distlab.trace import Event, Trace

LEAST_US = 0.001  # a slice without length could not be hit
SAID = ("worker", "step", "read", "version", "bytes", "samples", "loss", "batch", "peer")
USUAL = Event("", "", 0.0, 0.0)


def export(of: Trace | Run, path: str | Path) -> Path:
    """Write a trace for other tools, in the format that the name asks for; returns the path.

    Args:
        of: a run, or a trace; only a run knows the names of its metrics.
        path: ends in .json (for https://ui.perfetto.dev or chrome://tracing) or in .csv (a row per event), or is a
            folder: one that is there, or a name without an ending, a dot and letters (event files for TensorBoard,
            see `event_files`).

    Raises:
        ValueError: another ending, no name, or nothing in the trace.
        OSError: it cannot be written to.
        ModuleNotFoundError: for a folder: there is no tensorboard.
    """
    given, path = path, Path(path)
    ending = path.suffix.lower()
    trace = of.trace if isinstance(of, Run) else of
    if not len(trace):
        raise ValueError("this trace is empty: there is nothing to export")
    if path.is_dir() or not ending[1:].isalpha():
        event_files(of if isinstance(of, Run) else Run("", "", of, None, 0), given)
    elif ending == ".json":
        write(path, json.dumps(chrome(trace)))
    elif ending == ".csv":
        write(path, trace.table().to_csv(index=False))
    else:
        asked = "ends in .json (for Perfetto) or .csv, or is a folder's (for TensorBoard) and has no ending"
        raise ValueError(f"{path.name!r}: the name of a trace {asked}")
    return path


def write(path: Path, text: str) -> None:
    """Write a file; OSError in the words that a folder's has."""
    try:
        path.write_text(text)
    except OSError as error:
        raise OSError(f"path={str(path)!r} cannot be written to: {error}") from error


def chrome(trace: Trace) -> dict[str, Any]:
    """A trace as Chrome's format has it; times in microseconds.

    >>> import numpy as np
    >>> from distlab.trace import EVENT
    >>> rows = np.zeros(1, EVENT)
    >>> rows["end_s"] = 2.0
    >>> [event["ph"] for event in chrome(Trace(rows))["traceEvents"]]
    ['M', 'M', 'X']
    """
    who = trace.who
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "distlab"}}]
    events += [thread_name(number, name) for number, name in enumerate(who)]
    computed: dict[tuple[int, int], tuple[int, float]] = {}  # where and when each gradient was ready
    for number, event in enumerate(trace):
        row, start = who.index(event.who), event.start_s * 1e6
        length = max((event.end_s - event.start_s) * 1e6, LEAST_US)
        args = {name: getattr(event, name) for name in SAID if said(event, name)}
        place = {"pid": 1, "tid": row}
        events.append(
            {"ph": "X", "name": event.kind, "cat": event.kind, "ts": start, "dur": length, "args": args} | place
        )
        if event.kind == "compute":
            computed[event.worker, event.step] = row, start + 0.99 * length
        elif event.kind == "apply" and (event.worker, event.step) in computed:
            source, left = computed[event.worker, event.step]
            arrow = {"name": f"staleness {event.staleness}", "cat": "gradient", "id": number, "pid": 1}
            events.append(arrow | {"ph": "s", "ts": left, "tid": source})
            events.append(arrow | {"ph": "f", "bp": "e", "ts": max(start + length / 2, left), "tid": row})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def thread_name(number: int, name: str) -> dict[str, Any]:
    """The name of a row."""
    return {"ph": "M", "name": "thread_name", "pid": 1, "tid": number, "args": {"name": name}}


def said(event: Event, name: str) -> bool:
    """Does the event say anything of it? What is not a number is nothing that JSON knows."""
    value = getattr(event, name)
    return value == value and value != getattr(USUAL, name)
