"""What does a reader see of each strategy? Pictures of a JupyterLab with its dashboard, under way and finished.

python benchmarks/screenshots.py [AsyncPS ...]

Writes screenshots/STRATEGY_CLUSTER_WIDTH_MOMENT.png: on three real workers and on three simulated ones, in browser
windows 1280 and 1920 pixels wide. To be looked at: no test can say whether a label is readable. Needs Chromium and
playwright.
"""

import sys
import tempfile
from pathlib import Path

import click

import distlab as dl

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import browser

NAMES = [n for n in dl.strategies.__all__ if n not in ("Strategy", "ParameterServerStrategy")]
OPTIONS = {"LocalSGD": "every=4", "SyncPS": "num_servers=2"}
MOST = {"real": 1500, "simulated": 300}  # updates: seconds of either
WIDTHS, HEIGHT = (1280, 1920), 1000
REAL, SIMULATED = "dl.LocalCluster({workers}, compute_time_s=0.01)", "dl.SimulatedCluster({workers})"
SETUP = "%matplotlib inline\nimport distlab as dl\ntask = dl.tasks.digits()\nmost = {most}"
START = """cluster = {cluster}
live = dl.start(task, dl.{name}({options}), cluster, num_updates=most, evaluate_every=most // 10{speed})
live.dashboard()"""


def see(lab: browser.Lab, name: str, kind: str) -> None:
    """A run of one strategy, seen twice in each width."""
    workers = 1 if name == "SingleWorker" else 3
    cluster = (REAL if kind == "real" else SIMULATED).format(workers=workers)
    words = {"cluster": cluster, "name": name, "options": OPTIONS.get(name, "")}
    start = START.format(**words, speed="" if kind == "real" else ", paused=True")
    path = lab.write(f"{name}_{kind}.ipynb", [SETUP.format(most=MOST[kind]), start, "run = await live"])
    page = lab.open(path)
    page.run(0)
    page.run(1)
    page.run(2, wait=False)
    if kind == "simulated":
        page.choose("1 s a second")
        page.click("Play")
    page.wait_for_value("live.version > most // 3", "True")
    page.click("Pause")
    page.wait_for_text("paused, version")
    look(page, f"{name}_{kind}", "midway")
    if kind == "simulated":
        page.choose("as fast as it can")
    page.click("Play")
    page.wait_for_cell(2)
    look(page, f"{name}_{kind}", "finished")
    for index, error in page.errors():
        print(f"{name}, {kind}: cell {index}: {error}")
    page.close()


def look(page: browser.Page, name: str, moment: str) -> None:
    """A picture in each width."""
    for width in WIDTHS:
        page.page.set_viewport_size({"width": width, "height": HEIGHT})
        page.picture(1)
        print(page.screenshot(f"{name}_{width}_{moment}"))


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(NAMES))
def main(names: tuple[str, ...]) -> None:
    """All strategies, unless some are named."""
    if why := browser.absent():
        raise click.ClickException(why)
    with tempfile.TemporaryDirectory() as folder, browser.start_lab(Path(folder)) as lab:
        for name in names or NAMES:
            for kind in ("real", "simulated"):
                see(lab, name, kind)


if __name__ == "__main__":
    main()
