"""A private JupyterLab and a headless Chromium, for tests of what a reader sees.

    def test_slider(lab):                       # the fixture of tests/conftest.py
        path = lab.write("it.ipynb", ["import distlab as dl", "dl.Explorer(draw, workers=(1, 16))"])
        page = lab.open(path)
        page.run_all()
        before = page.picture(1)
        page.press("workers", "ArrowRight")
        page.wait_for_new_picture(1, before)
        assert page.value("explorer.values") == "{'workers': 2}"

Nothing sleeps: every helper waits for what it is about, and fails after `TIMEOUT_S`. Settings, kernels and runtime
files lie in folders of the test; the server listens on 127.0.0.1 alone and wants a random token.
"""

import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import nbformat

ROOT = Path(__file__).parents[1]
SCREENSHOTS = ROOT / "screenshots"
TIMEOUT_S = 60.0
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
NO_NEWS = '{"fetchNews": "false", "checkForUpdates": false}'
PR_SET_PDEATHSIG = 1  # of linux/prctl.h
NOTEBOOK = "window.jupyterapp.shell.currentWidget"
STATUS = f"{NOTEBOOK}?.sessionContext?.session?.kernel?.status"


def absent() -> str:
    """Why no browser can be had here; empty if one can."""
    if CHROMIUM is None:
        return "no chromium: apt-get install chromium"
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "no playwright: pip install playwright"
    return ""


@contextlib.contextmanager
def jupyter(folder: Path) -> Iterator[str]:
    """Serve `folder/notebooks` in a JupyterLab of its own; the address of the lab, with its token put in for "?"."""
    port, token = free_port(), secrets.token_hex(16)
    names = ("config", "runtime", "data", "settings", "workspaces", "ipython", "notebooks")
    places = {name: folder / name for name in names}
    news = places["settings"] / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    for place in (*places.values(), news.parent):
        place.mkdir(parents=True, exist_ok=True)
    news.write_text(NO_NEWS)
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("JUPYTER", "DISTLAB_HEADLESS"))},
        "JUPYTER_CONFIG_DIR": str(places["config"]),
        "JUPYTER_RUNTIME_DIR": str(places["runtime"]),
        "JUPYTER_DATA_DIR": str(places["data"]),
        "JUPYTERLAB_SETTINGS_DIR": str(places["settings"]),
        "JUPYTERLAB_WORKSPACES_DIR": str(places["workspaces"]),
        "IPYTHONDIR": str(places["ipython"]),
        "JUPYTER_TOKEN": token,  # not on the command line, which every user of the machine can read
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
    }
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}",
        "--ServerApp.port_retries=0", f"--ServerApp.root_dir={places['notebooks']}",
        "--LabApp.expose_app_in_browser=True",
    ]  # fmt: skip
    address = f"http://127.0.0.1:{port}"
    log = folder / "jupyterlab.log"
    with log.open("wb") as out:
        how: dict[str, Any] = {"env": environment, "start_new_session": True, "preexec_fn": end_with_parent()}
        server = subprocess.Popen(command, stdout=out, stderr=out, **how)
    try:
        wait_for_server(f"{address}/api/status?token={token}", server, log)
        yield f"{address}?token={token}"
    finally:
        server.send_signal(signal.SIGTERM)  # it shuts its kernels down
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def end_with_parent() -> Callable[[], None] | None:
    """To be called in a new process: it gets SIGTERM when this one ends, however it does. On Linux alone."""
    if sys.platform != "linux":
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def tie() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it has ended already
            os._exit(1)

    return tie


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def wait_for_server(url: str, server: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).read()
            return
        except (urllib.error.URLError, OSError) as error:
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"JupyterLab did not start: {log.read_text()[-2000:]}") from error
            time.sleep(0.1)


@contextlib.contextmanager
def start_lab(folder: Path, *, width: int = 1200, height: int = 1000) -> Iterator["Lab"]:
    """A JupyterLab that works in `folder`, and a browser of `width` × `height` pixels to look at it."""
    from playwright.sync_api import sync_playwright

    with jupyter(folder) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        try:
            yield Lab(folder / "notebooks", address, browser.new_context(viewport={"width": width, "height": height}))
        finally:
            browser.close()


class Lab:
    """A running JupyterLab whose notebooks lie in `folder`, and a browser beside it."""

    def __init__(self, folder: Path, address: str, context: Any) -> None:
        self.folder, self.address, self.context = folder, address, context

    def write(self, name: str, cells: Sequence[str]) -> Path:
        """Make a notebook of code cells in the lab's folder; its path."""
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
        nbformat.write(notebook, self.folder / name)
        return self.folder / name

    def copy(self, notebook: Path) -> Path:
        """Copy a notebook into the lab's folder; the copy's path."""
        return Path(shutil.copy(notebook, self.folder))

    def open(self, notebook: Path) -> "Page":
        """Open a notebook of the lab's folder in a tab of its own, and wait until its kernel is idle."""
        page = self.context.new_page()
        page.set_default_timeout(1000 * TIMEOUT_S)
        address, _, token = self.address.partition("?")
        page.goto(f"{address}/lab/tree/{notebook.name}?reset&{token}")
        page.wait_for_selector(".jp-Notebook .jp-Cell")
        opened = Page(page, notebook)
        opened.wait_for_status("idle")
        return opened


class Page:
    """A notebook in the browser. Cells are counted from 0, text cells too; `page.page` is Playwright's own."""

    def __init__(self, page: Any, notebook: Path) -> None:
        self.page, self.notebook = page, notebook

    def cells(self) -> list[dict]:
        """The cells as the notebook would be saved now, outputs included."""
        return self.page.evaluate(f"() => {NOTEBOOK}.content.widgets.map(cell => cell.model.sharedModel.toJSON())")

    def code_cells(self) -> list[int]:
        """The numbers of the code cells."""
        return [i for i, cell in enumerate(self.cells()) if cell["cell_type"] == "code"]

    def run(self, index: int, *, wait: bool = True) -> None:
        """Run one cell; unless told not to `wait`, until it has ended, well or not."""
        self.page.evaluate(
            f"""async ([index, wait]) => {{
                const content = {NOTEBOOK}.content;
                content.activeCellIndex = index; content.deselectAll();
                const ended = window.jupyterapp.commands.execute("notebook:run-cell");
                if (wait) await ended;
            }}""",
            [index, wait],
        )

    def wait_for_cell(self, index: int, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until a cell that was run without waiting has ended, well or not."""
        ended = f"index => typeof {NOTEBOOK}.content.widgets[index].model.sharedModel.execution_count === 'number'"
        self.page.wait_for_function(ended, arg=index, timeout=1000 * timeout_s)

    def is_running(self, index: int) -> bool:
        """Is a cell under way, "[*]"?"""
        return (
            self.page.evaluate(f"i => {NOTEBOOK}.content.widgets[i].model.sharedModel.executionState", index)
            == "running"
        )

    def clear(self) -> None:
        """Forget all outputs."""
        self.page.evaluate("() => window.jupyterapp.commands.execute('notebook:clear-all-cell-outputs')")

    def save(self) -> Any:
        """Save the notebook, and read its file."""
        self.page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
        return nbformat.read(self.notebook, as_version=4)

    def run_all(self) -> None:
        """Run all code cells, one after the other, those after a failed one too."""
        for index in self.code_cells():
            self.run(index)

    def outputs(self, index: int) -> list[dict]:
        """The outputs of a cell, in nbformat's form."""
        return self.cells()[index].get("outputs", [])

    def text(self, index: int) -> str:
        """What a cell printed and returned, as text; tracebacks too."""
        parts = []
        for output in self.outputs(index):
            said = output.get("text") or output.get("data", {}).get("text/plain") or output.get("traceback", "")
            parts.append(said if isinstance(said, str) else "\n".join(said))
        return "".join(parts)

    def errors(self) -> list[tuple[int, str]]:
        """(number of the cell, "Name: message") of all error outputs."""
        found = [(i, output) for i, cell in enumerate(self.cells()) for output in cell.get("outputs", [])]
        return [(i, f"{o['ename']}: {o['evalue']}") for i, o in found if o["output_type"] == "error"]

    def status(self) -> str:
        """The kernel's: "idle", "busy", "starting", "dead" ..."""
        return self.page.evaluate(f"() => {STATUS}")

    def wait_for_status(self, status: str, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until the kernel's is `status`."""
        self.page.wait_for_function(f"wanted => {STATUS} === wanted", arg=status, timeout=1000 * timeout_s)

    def value(self, expression: str) -> str:
        """The repr of an expression in the kernel, asked in silence: no cell is made, none is changed.

        A subshell of the kernel answers, so also one whose cell awaits something. JupyterLab then takes the whole
        kernel for idle: ask `is_running` about the cell."""
        return self.page.evaluate(
            f"""async expression => {{
                const kernel = {NOTEBOOK}.sessionContext.session.kernel;
                window.subshells ??= {{}};
                window.subshells[kernel.id] ??= (await kernel.requestCreateSubshell({{}}).done).content.subshell_id;
                kernel.subshellId = window.subshells[kernel.id];
                const asked = kernel.requestExecute({{
                    code: "", silent: true, store_history: false, user_expressions: {{ it: expression }} }});
                kernel.subshellId = null;
                const it = (await asked.done).content.user_expressions.it;
                return it.status === "ok" ? it.data["text/plain"] : `${{it.ename}}: ${{it.evalue}}`;
            }}""",
            expression,
        )

    def wait_for_value(self, expression: str, wanted: str, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until `value` is as `wanted`."""
        deadline = time.monotonic() + timeout_s
        while (value := self.value(expression)) != wanted:
            assert time.monotonic() < deadline, f"{expression} is {value} for {timeout_s:g} s, not {wanted}"
            self.page.wait_for_timeout(50)

    def cell(self, index: int) -> Any:
        """Playwright's locator of a cell, scrolled to."""
        self.page.evaluate(f"index => {NOTEBOOK}.content.scrollToItem(index)", index)
        found = self.page.locator(f'.jp-Notebook [data-windowed-list-index="{index}"]')
        found.wait_for()
        return found

    def picture(self, index: int) -> str:
        """The address of the first picture of a cell, once it is there: another picture has another one."""
        image = self.cell(index).locator(".jp-OutputArea img").first
        image.wait_for()
        return image.get_attribute("src")

    def wait_for_new_picture(self, index: int, before: str, timeout_s: float = TIMEOUT_S) -> str:
        """Wait until the first picture of a cell is not `before`, and loaded; its address."""
        image = self.cell(index).locator(".jp-OutputArea img").first.element_handle()
        changed = "([image, before]) => image.src !== before && image.complete && image.naturalWidth > 0"
        self.page.wait_for_function(changed, arg=[image, before], timeout=1000 * timeout_s)
        return image.get_attribute("src")

    def control(self, description: str) -> Any:
        """Playwright's locator of the ipywidget whose description is exactly this (sliders, menus, boxes, texts)."""
        label = self.page.get_by_text(description, exact=True)
        return self.page.locator(".jupyter-widgets").filter(has=label).last

    def press(self, description: str, key: str, times: int = 1) -> None:
        """Focus the slider with this description and press a key: "ArrowRight", "PageUp", "Home", "End" ..."""
        handle = self.control(description).locator(".noUi-handle")
        handle.focus()
        for _ in range(times):
            handle.press(key)

    def click(self, button: str) -> None:
        """Click the button with exactly this text."""
        self.page.get_by_role("button", name=button, exact=True).click()

    def choose(self, option: str) -> None:
        """Choose in the menu that has an option with exactly this text."""
        offered = self.page.get_by_role("option", name=option, exact=True)
        self.page.locator(".jupyter-widgets select").filter(has=offered).select_option(label=option)

    def wait_for_text(self, pattern: str, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until what is on the page matches a JavaScript regular expression."""
        seen = "pattern => new RegExp(pattern).test(document.body.innerText)"
        self.page.wait_for_function(seen, arg=pattern, timeout=1000 * timeout_s)

    def screenshot(self, name: str) -> Path:
        """Keep what the browser shows as screenshots/NAME.png, which git ignores."""
        SCREENSHOTS.mkdir(exist_ok=True)
        self.page.screenshot(path=SCREENSHOTS / f"{name}.png")
        return SCREENSHOTS / f"{name}.png"

    def close(self) -> None:
        """End the kernel and close the tab."""
        self.page.evaluate(f"async () => {{ await {NOTEBOOK}.sessionContext.shutdown(); }}")
        self.page.close()
