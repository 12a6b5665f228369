"""Builds the lessons: each source/NN_name.py is executed and becomes NN_name.ipynb, pictures included.

People edit, review and lint the sources; the notebooks are what readers open. A notebook that is built twice
should differ only where its results do, or every build would grow the repository by all its pictures: hence
cell ids by position, no widget state, no times of day, no process ids or folders of the machine it ran on, few
colours, and nothing is executed while the source is the one that the notebook was built from.

What is simulated comes out the same to the byte; cells whose outputs depend on real processes or real time are tagged
"real". --check executes lessons anew, writes nothing, and names every other cell whose outputs have changed.

    python lessons/build.py [--force | --check] [03 ...]
"""

import asyncio
import base64
import hashlib
import io
import os
import re
from pathlib import Path

import click
import jupytext
import nbformat
from jupyter_core.utils import run_sync
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from PIL import Image

LESSONS = Path(__file__).resolve().parent
LIMIT_BYTES = 300_000
LOOK_S = 2.0
WIDGET = "application/vnd.jupyter.widget-view+json"  # a saved one shows "model not found"


def source_hash(source: Path) -> str:
    """What a notebook remembers of the source it was built from."""
    return hashlib.sha256(source.read_bytes()).hexdigest()


def is_current(source: Path, notebook: Path) -> bool:
    """True if `notebook` was built from `source` as it is now."""
    if not notebook.exists():
        return False
    built = nbformat.read(notebook, as_version=4).metadata.get("distlab", {})
    return built.get("source_sha256") == source_hash(source)


class Client(NotebookClient):
    """Executes a notebook, and looks again now and then.

    Whoever sends on a ZeroMQ socket may swallow the news that something has come in meanwhile. It happens to ipykernel
    7 (https://github.com/ipython/ipykernel/issues/1554), and here, where a widget's output is sent while a reply is
    awaited: both then sit idle for ever. On a busy machine that was every second time.
    """

    async def async_execute(self, *args, **kwargs):
        """Execute all cells."""
        looking = asyncio.ensure_future(self._look_again())
        try:
            return await super().async_execute(*args, **kwargs)
        finally:
            looking.cancel()

    execute = run_sync(async_execute)

    async def _look_again(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            if self.kc is not None:
                self.kc.kernel_info()  # whatever the answer: the kernel reads what else is there
                await self.kc.shell_channel.socket.poll(1)


def execute(source: Path, parameters: str = "") -> nbformat.NotebookNode:
    """The notebook of `source` with its outputs; CellExecutionError if a cell fails that should not.

    `parameters` are lines to run instead of the cell tagged "parameters": smaller ones, for a test.
    """
    notebook = jupytext.read(source, fmt="py:percent")
    for index, cell in enumerate(notebook.cells):
        cell.id = f"cell-{index:02d}"
        cell.metadata = nbformat.from_dict({"tags": tags} if (tags := cell.metadata.get("tags")) else {})
        if parameters and "parameters" in cell.metadata.get("tags", ()):
            cell.source = parameters
    client = Client(notebook, timeout=600, kernel_name="python3", coalesce_streams=True)
    client.resources = {"metadata": {"path": str(LESSONS)}}
    client.record_timing = False  # widget state is kept until here, or nothing could be shown in a slider's output
    client.execute(env=os.environ | {"DISTLAB_HEADLESS": "1"})  # an Explorer is then a plain picture
    for widget in client.widget_state.values():
        for output in widget.get("outputs", ()):  # interact shows an exception there and goes on
            if output["output_type"] == "error":
                raise CellExecutionError("\n".join(output["traceback"]), output["ename"], output["evalue"])
    for cell in (cell for cell in notebook.cells if cell.cell_type == "code"):
        cell.outputs = [output for output in cell.outputs if WIDGET not in output.get("data", {})]
        for picture in (output.data for output in cell.outputs if "image/png" in output.get("data", {})):
            picture["image/png"] = in_64_colours(picture["image/png"])
    notebook.metadata = nbformat.from_dict(
        {
            "distlab": {"source_sha256": source_hash(source)},
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"file_extension": ".py", "name": "python", "pygments_lexer": "ipython3"},
        }
    )
    nbformat.validate(notebook)
    return notebook


def in_64_colours(png: str) -> str:
    """A picture (base64) with a palette: a third of the bytes, and drawings look the same."""
    picture, smaller = Image.open(io.BytesIO(base64.b64decode(png))), io.BytesIO()
    picture.convert("RGB").quantize(64, dither=Image.Dither.NONE).save(smaller, "PNG", optimize=True)
    return base64.b64encode(smaller.getvalue()).decode()


def written(source: Path) -> str:
    """The notebook's text as it is kept."""
    try:
        text = nbformat.writes(execute(source)) + "\n"
    except CellExecutionError as error:
        raise click.ClickException(f"{source.name}: a cell failed\n{error}") from error
    text = text.replace(f"{LESSONS.parent}/", "").replace(f"{Path.home()}/", "~/")
    text = re.sub(r"\(pid \d+\)", "(pid ...)", text)
    return re.sub(r"[\w/.-]*/ipykernel_\d+/\d+\.py", "<cell>", text)  # where warnings say a cell's code lies


def build(source: Path, folder: Path = LESSONS) -> Path:
    """Execute `source` and write its notebook into `folder`, or leave what is there and say what is wrong."""
    text = written(source)
    if (size := len(text.encode())) > LIMIT_BYTES:
        raise click.ClickException(f"{source.name} became {size:,} bytes, over {LIMIT_BYTES:,}: show less")
    target = folder / f"{source.stem}.ipynb"
    target.write_text(text, encoding="utf-8")
    return target


def changed(source: Path, notebook: Path) -> list[str]:
    """The code of cells that are not tagged "real", and yet have other outputs than in `notebook` when run anew."""
    before, after = nbformat.read(notebook, as_version=4).cells, nbformat.reads(written(source), as_version=4).cells
    return [
        new.source
        for old, new in zip(before, after, strict=True)
        if old.get("outputs") != new.get("outputs") and "real" not in new.metadata.get("tags", ())
    ]


@click.command()
@click.argument("names", nargs=-1)
@click.option("--force", is_flag=True, help="Execute also what has not changed.")
@click.option("--check", is_flag=True, help="Write nothing: does what is simulated come out as it was?")
def main(names: tuple[str, ...], force: bool, check: bool) -> None:
    """Build the lessons whose source changed: all of them, or those that begin with one of NAMES."""
    differ = False
    for source in sorted((LESSONS / "source").glob("[0-9][0-9]_*.py")):
        if not source.name.startswith(names or ("",)):
            continue
        notebook = LESSONS / f"{source.stem}.ipynb"
        if check:
            cells = changed(source, notebook)
            differ |= bool(cells)
            click.echo("\n".join([f"{source.stem}: {len(cells)} simulated cells differ", *cells]))
        else:
            unchanged = not force and is_current(source, notebook)
            click.echo(f"{source.stem}: unchanged" if unchanged else f"built {build(source).name}")
    if differ:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
