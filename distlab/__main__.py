"""The command line, with the words of the Python interface: ``python -m distlab train --help``."""

import inspect
import os
import re
import sys
from pathlib import Path
from typing import Any

import click
from matplotlib.figure import Figure

import distlab as dl
from distlab import plots
from distlab.options import nearest
from distlab.reports.tables import said
from distlab.tasks import READY

STRATEGIES: dict[str, Any] = {
    "single-worker": dl.SingleWorker,
    "in-graph": dl.InGraph,
    "async-ps": dl.AsyncPS,
    "sync-ps": dl.SyncPS,
    "all-reduce": dl.AllReduce,
    "local-sgd": dl.LocalSGD,
    "hogwild": dl.Hogwild,
    "worker-applies": dl.WorkerApplies,
    "broadcast-gradients": dl.BroadcastGradients,
}
SAVED = ("run.json", "trace.npz", "model.safetensors")  # the files of `Run.save`
FAMILY = ("single-worker", "in-graph", "async-ps", "sync-ps", "all-reduce")


class Choice(click.ParamType):
    """One of some words; a near miss names its neighbour."""

    name = "name"

    def __init__(self, known: Any) -> None:
        self.known = known

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if value not in self.known:
            self.fail(f"{value!r}: {nearest(value, self.known)}", param, ctx)
        return value


def common(function: Any) -> Any:
    """The options that every training command has."""
    for option in reversed((
        click.option("--task", default="digits", type=Choice(READY), help="What to train: digits."),
        click.option("--num-workers", default=4, show_default=True, help="Worker processes."),
        click.option("--batch-size", default=32, show_default=True, help="Samples per worker and step."),
        click.option("--lr", default=0.2, show_default=True, help="Learning rate."),
        click.option("--seed", default=0, show_default=True, help="Of model, data order and random numbers."),
        click.option("--compute-time-s", default=0.0, help="A gradient takes at least so long (slept)."),
    )):  # fmt: skip
        function = option(function)
    return function


class Commands(click.Group):
    """Commands whose users' mistakes are one line, not a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (ValueError, TypeError, OSError, ImportError, dl.DistlabError) as error:
            raise click.ClickException(str(error)) from error


def drawable(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    """`path`, if a picture can be written there: known before the training, not after it."""
    known = Figure().canvas.get_supported_filetypes()
    if path is not None and path.suffix.removeprefix(".") not in known:
        raise click.BadParameter(f"{path}: a figure's name ends in one of {', '.join(known)}")
    return writable(ctx, param, path)


def writable(ctx: click.Context, param: click.Parameter, path: Any) -> Any:
    """`path`, if its folder is there and can be written to."""
    if path is not None and not os.access(folder := Path(path).resolve().parent, os.W_OK):
        raise click.BadParameter(f"{folder} is not there, or cannot be written to")
    return path


def folder_of(ctx: click.Context, param: click.Parameter, path: Path) -> Path:
    """The folder of a saved run, where `path` is one of the files in it."""
    return path.parent if path.name in SAVED and path.is_file() else path


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(dl.__version__, prog_name="distlab")
def main() -> None:
    """See how distributed training works, on real processes of this machine.

    \b
    python -m distlab train --strategy async-ps --num-workers 4 --num-updates 400
    python -m distlab compare --strategies async-ps,sync-ps,all-reduce
    """


@main.command()
@common
@click.option("--strategy", default="async-ps", show_default=True, type=Choice(STRATEGIES), help="How to train.")
@click.option("--torchrun", is_flag=True, help="The workers are torchrun's ranks: torchrun ... -m distlab train ...")
@click.option("--num-updates", default=400, show_default=True, help="Versions to make.")
@click.option("--evaluate-every", type=int, help="Evaluate on the way, once each so many versions.")
@click.option("--log-dir", type=click.Path(path_type=Path), help="Folder to write TensorBoard files to.")
@click.option("--checkpoint-dir", type=click.Path(path_type=Path), help="Folder for checkpoints.")
@click.option("--checkpoint-every", type=int, help="Make one each so many versions, and at the end.")
@click.option("--resume", type=click.Path(path_type=Path), help="Go on from a checkpoint, or the newest in a folder.")
@click.option("--save", type=click.Path(path_type=Path), callback=writable, help="Folder to write the run to.")
def train(
    task: str,
    num_workers: int,
    strategy: str,
    num_updates: int,
    save: Path | None,
    compute_time_s: float,
    torchrun: bool,
    **rest: Any,
) -> None:
    """Train one task under one strategy, and say who applied the updates."""
    padded: dict[str, Any] = {"compute_time_s": compute_time_s}
    cluster: Any = dl.TorchrunCluster(**padded) if torchrun else dl.LocalCluster(num_workers, **padded)
    asked = ("evaluate_every", "log_dir", "checkpoint_dir", "checkpoint_every", "resume")
    looks: dict[str, Any] = {name: rest.pop(name) for name in asked} | {"progress": watched()}
    run = dl.train(READY[task](**rest), STRATEGIES[strategy](), cluster, num_updates=num_updates, **looks)
    if not cluster.is_chief:  # it says everything
        return
    click.echo(f"{run.strategy} on {run.cluster}")
    for event in list(run.trace.where("apply"))[-3:]:
        click.echo(f"  {event}")
    click.echo(f"The updates were applied by {said(run.who_applied)}.")
    if looks["evaluate_every"] is not None:
        click.echo(run.evaluations.to_string(index=False))
    click.echo(plots.table([row(run)]))
    if save is not None:
        click.echo(f"written to {run.save(save)}")


@main.command()
@common
@click.option("--strategies", default=",".join(FAMILY), help="Which, separated by commas.", show_default=True)
@click.option("--num-samples", default=38_400, show_default=True, help="Samples that each strategy trains on.")
@click.option(
    "--figure", type=click.Path(path_type=Path), callback=drawable, help="File to draw loss and timelines to."
)
def compare(
    task: str,
    num_workers: int,
    strategies: str,
    num_samples: int,
    figure: Path | None,
    compute_time_s: float,
    **rest: Any,
) -> None:
    """Train the same samples under several strategies: one table, one figure."""
    names = [Choice(STRATEGIES).convert(name.strip(), None, None) for name in strategies.split(",")]
    with dl.LocalCluster(num_workers, compute_time_s=compute_time_s) as cluster:
        made = READY[task](**rest)
        runs = [dl.train(made, STRATEGIES[n](), cluster, num_samples=num_samples, progress=watched()) for n in names]
    click.echo(plots.table([row(run) for run in runs]))
    if figure is not None:
        plots.plot_comparison(runs).savefig(figure, dpi=120)
        click.echo(f"drawn to {figure}")


@main.command()
@click.option("--figure", default="demo.png", type=click.Path(path_type=Path), show_default=True, help="Where to draw.")
@click.pass_context
def demo(context: click.Context, figure: Path) -> None:
    """Digits under every strategy on real processes, each gradient padded to 5 ms."""
    context.invoke(compare, task="digits", num_workers=4, strategies=",".join(STRATEGIES), num_samples=38_400,
                   figure=figure, compute_time_s=0.005, batch_size=32, lr=0.2, seed=0)  # fmt: skip


@main.command()
@click.argument("run", type=click.Path(exists=True, path_type=Path), callback=folder_of)
@click.option(
    "--out",
    type=click.Path(),  # a string, as a Path would make of "" the folder here
    callback=writable,
    help="What to write: a .json file (Perfetto), a .csv file, or a folder (TensorBoard).",
)
def trace(run: Path, out: str | None) -> None:
    """Write the trace of a saved run (train --save RUN) for Perfetto or TensorBoard, and say what is in it.

    RUN is the folder, or one of the files of a run in it; what was exported cannot be read again.
    """
    loaded = dl.load_run(run)
    click.echo(f"{loaded.strategy} on {loaded.cluster}: {loaded.trace}")
    written = loaded.export(run / "trace.json" if out is None else out)
    opens = ": open it at https://ui.perfetto.dev" if written.suffix.lower() == ".json" else ""
    opens = f": look at it with tensorboard --logdir {written}" if written.is_dir() else opens
    click.echo(f"written to {written}{opens}")


@main.command()
def strategies() -> None:
    """Print, for each strategy: who applies, what is dropped, what each death does (STRATEGIES.md)."""
    click.echo("# Strategies: who applies, what is dropped, what a death does\n")
    click.echo("Made from the docstrings by `python -m distlab strategies`.")
    for kind in STRATEGIES.values():
        said = inspect.cleandoc(kind.__doc__ or "").partition("\nArgs:")[0].partition("\nSource:")[0].strip()
        first, *parts = re.split(r"^((?:Who|What|Assumes|If)[^:\n]*):", said, flags=re.MULTILINE)
        lines = [f"- **{head}**: {' '.join(text.split())}" for head, text in zip(parts[::2], parts[1::2], strict=True)]
        click.echo(f"\n## {kind.__name__}\n\n{first.strip()}\n\n" + "\n".join(lines))


def row(run: dl.Run) -> dict[str, Any]:
    """One line of the table."""
    judged = run.evaluate()
    return {
        "strategy": run.strategy,
        "updates": run.num_updates,
        "updates/s": f"{run.updates_per_s:.0f}",
        "samples/s": f"{run.applies['samples'].sum() / run.seconds:.0f}",
        "mean staleness": f"{run.mean_staleness:.2f}",
        "MB sent": f"{run.bytes_sent / 1e6:.1f}",
        "accuracy": f"{judged['accuracy']:.1%}",
        "who applied": said(run.who_applied),
    }


def watched() -> bool:
    """Is there somebody to show a progress bar to?"""
    return sys.stderr.isatty()


if __name__ == "__main__":
    main()
