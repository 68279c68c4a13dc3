"""Pictures of the page: each scene in three sizes and two themes.

`python -m tests.capabilities.page.support.pictures FOLDER [SCENE…]` starts what the scenes need.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx
from selenium.webdriver.common.keys import Keys

from tests.capabilities.page.support.browser import SEVEN, Page, chromium
from tests.capabilities.uploads.support.uploads import FIRST, SECOND
from tests.support.model_folders import write_model_folder
from tests.support.servers import ROOT, free_ports, gateway_before, triton_with

SIZES: Final = {"1440": (1440, 900), "820": (820, 1180), "390": (390, 844)}
MOBILE_WIDTH: Final = 600
IMAGES: Final = ROOT / "docs" / "images"
LOADED: Final = ("ensemble", "text_ensemble", "tokens", "add", "errors", "versions")
MANY_MODELS: Final = 41
MAX_HEIGHT: Final = 3_000
UNLOADED_CONFIG: Final = (
    'backend: "python"\ninput [ { name: "X" data_type: TYPE_FP32 dims: [ 2 ] } ]\n'
)


@dataclass(frozen=True)
class Servers:
    """The addresses of gateways: of a fleet, of one that lacks a replica, and of one without replicas."""

    fleet: str
    degraded: str
    empty: str


@dataclass(frozen=True)
class Scene:
    name: str
    show: Callable[[Page, Servers], object]


def show_first_visit(page: Page, servers: Servers) -> None:
    page.open(servers.fleet, first_visit=True)
    page.see("#response-body", "7")


def draw_seven(page: Page, servers: Servers) -> None:
    page.open(servers.fleet, "#try/ensemble")
    page.drag("canvas", *SEVEN)
    page.click("#infer")
    page.see("#response-body .scores", "%")


def infer_image(page: Page, servers: Servers) -> None:
    page.open(servers.fleet, "#try/ensemble")
    page.choose("file")
    page.select_files("input[type=file]:not([capture])", IMAGES / "three.jpg")
    page.click("#infer")
    page.see("#response-body .scores", "%")


def infer_batch(page: Page, servers: Servers) -> None:
    page.open(servers.fleet, "#try/ensemble")
    page.choose("file")
    page.select_files("input[type=file]:not([capture])", IMAGES / "seven.png", IMAGES / "three.jpg")
    page.click("#infer")
    page.see("#response-state", "2 files")


def infer_text(page: Page, servers: Servers) -> None:
    page.open(servers.fleet, "#try/text_ensemble")
    page.type("#try-form textarea", "The doctor examined the patient.")
    page.click("#infer")
    page.see("#response-body figcaption", "384 numbers")


def compare(page: Page, servers: Servers) -> None:
    """Two texts, and two requests of the session."""
    page.open(servers.fleet, "#try/text_ensemble")
    page.type("#try-form textarea", "The doctor examined the patient.")
    page.click(".compare")
    page.all("#try-form .field-text textarea")[1].send_keys("A physician looked at the sick man.")
    page.click("#infer")
    page.find(".similarity")
    page.run("location.hash = 'try/ensemble'")
    page.find("canvas")
    page.click(".sample-value")
    page.see("#response-body .scores", "%")
    page.until(lambda: len(page.all("#history-list li")) == 2, "two requests")
    page.click("#compare-button")
    for index in (0, 1):
        page.all("#history-list button")[index].click()
    page.run("document.querySelector('#history').scrollIntoView()")


def stream(page: Page, servers: Servers) -> None:
    page.open(servers.fleet, "#try/tokens")
    page.type('fieldset[data-input="stream"] select', "true")
    for count, text in enumerate(("The ship", "At noon"), 1):
        page.find("fieldset textarea").clear()
        page.type("fieldset textarea", text)
        page.click("#infer")
        page.until(lambda: len(page.all(".chat .asked")) == count, "the question")  # noqa: B023
        page.see("#response-state", "responses in")


def fail(page: Page, servers: Servers) -> None:
    page.open(servers.fleet, "#try/ensemble")
    page.choose("file")
    page.drop_files(".drop", **{"broken.png": b"no image"})
    page.click("#infer")
    page.see("#response-body", "Copy request id")


def show_degraded_fleet(page: Page, servers: Servers) -> None:
    page.open(servers.degraded, "#fleet")
    page.see("#problems", "is down")
    page.until(lambda: len(page.all(".replica .probes span")) > 6, "probes")
    page.find("#health.warn")
    bottom = page.run("return document.querySelector('#problems').getBoundingClientRect().bottom")
    assert bottom <= page.run("return innerHeight"), "what is wrong is below the fold"


def show_many_models(page: Page, servers: Servers) -> None:
    page.open(servers.fleet, "#fleet")
    page.until(lambda: len(page.all("#models tbody tr")) >= MANY_MODELS, "the models")
    page.find("#health")
    height = page.run("return document.documentElement.scrollHeight")
    assert height <= MAX_HEIGHT, f"{MANY_MODELS} models take {height} px"


def show_live(page: Page, servers: Servers) -> None:
    page.open(servers.fleet, "#live")
    with traffic(servers.fleet):
        page.until(lambda: len(page.all("#by-model tbody tr")) >= 2, "requests")
        page.until(lambda: page.run("return performance.now()") > 15_000, "some points")
    page.find("#rate-chart canvas")


def show_empty_fleet(page: Page, servers: Servers) -> None:
    page.open(servers.empty)
    page.see("#try-notice", "No Triton can be reached.")


def show_performance(page: Page, servers: Servers) -> None:
    page.open(servers.fleet, "#model/ensemble")
    page.find(".graph .slowest")


def show_api(page: Page, servers: Servers) -> None:
    page.open(servers.fleet, "#api/ensemble")
    page.choose("python")
    page.see("#api-code", "gateway.client")


def show_versions(page: Page, servers: Servers) -> None:
    split = {"versions": {"1": 90, "2": 10}}
    httpx.put(f"{servers.fleet}/v1/models/versions/labels/canary", json=split).raise_for_status()
    page.open(servers.fleet, "#versions/versions")
    page.find("#label-list tbody tr")


def show_files(page: Page, servers: Servers) -> None:
    page.open(servers.fleet, "#files/uploaded")
    page.find(".files tbody tr")


def choose_upload(page: Page, servers: Servers) -> None:
    page.open(servers.fleet, "#fleet")
    page.find("#upload-open")
    page.drop_files("#tiles", **{"uploaded.onnx": SECOND})
    page.see("#upload-existing-text", "exists")


def refuse_upload(page: Page, servers: Servers) -> None:
    page.open(servers.fleet, "#fleet")
    page.find("#upload-open")
    page.drop_files("#tiles", **{"words.onnx": b"no network"})
    page.type("#upload-name", Keys.ENTER)
    page.see("#upload-result", "is not a .onnx file")


# The first twelve are those of the page's acceptance.
SCENES: Final = (
    Scene("01-first-visit", show_first_visit),
    Scene("02-drawing", draw_seven),
    Scene("03-image", infer_image),
    Scene("04-batch", infer_batch),
    Scene("05-text", infer_text),
    Scene("06-comparison", compare),
    Scene("07-stream", stream),
    Scene("08-error", fail),
    Scene("09-replica-down", show_degraded_fleet),
    Scene("10-many-models", show_many_models),
    Scene("11-live", show_live),
    Scene("12-no-triton", show_empty_fleet),
    Scene("13-performance", show_performance),
    Scene("14-api", show_api),
    Scene("15-versions", show_versions),
    Scene("16-files", show_files),
    Scene("17-upload", choose_upload),
    Scene("18-refused-upload", refuse_upload),
)


@contextmanager
def traffic(url: str) -> Iterator[None]:
    """Requests of two models, one of which also fails, until the end of the block."""
    ended = threading.Event()
    image = (IMAGES / "seven.png").read_bytes()

    def send() -> None:
        with httpx.Client(base_url=f"{url}/v1/models") as client:
            while not ended.is_set():
                headers = {"Content-Type": "image/png"}
                client.post("/ensemble/infer", content=image, headers=headers)
                client.post("/text_ensemble/infer", json={"inputs": "a text"})
                client.post("/ensemble/infer", content=b"no image", headers=headers)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def start_servers(folder: Path) -> Iterator[Servers]:
    own = folder / "models"
    own.mkdir()
    known = len(list((ROOT / "triton_repo").iterdir()))
    known += len(list((ROOT / "triton_repo_examples").iterdir()))
    for number in range(MANY_MODELS - known):
        write_model_folder(own / f"another_model_{number:02}", UNLOADED_CONFIG, {"1/model.py": ""})
    repositories = (ROOT / "triton_repo", ROOT / "triton_repo_examples", own)
    with ExitStack() as stack:
        triton = stack.enter_context(triton_with(repositories, LOADED, ()))
        url = triton.options.url
        (nobody,) = free_ports(1)
        uploads = {"repository": f"file://{own}", "model_uploads": "artifacts"}
        fleet = stack.enter_context(gateway_before(url, **uploads))
        lost = f"http://127.0.0.1:{nobody}"
        degraded = stack.enter_context(gateway_before(url, lost))
        empty = stack.enter_context(gateway_before(lost, log_level="error"))
        fleet.put("/v1/models/uploaded?filename=model.onnx", content=FIRST).raise_for_status()
        yield Servers(*(str(each.base_url) for each in (fleet, degraded, empty)))


def take(page: Page, servers: Servers, scene: Scene, folder: Path) -> None:
    for size, (width, height) in SIZES.items():
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1}
        metrics["mobile"] = width < MOBILE_WIDTH
        page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        for theme in ("light", "dark"):
            page.dark(theme == "dark")
            scene.show(page, servers)
            page.driver.save_screenshot(str(folder / f"{scene.name}-{size}-{theme}.png"))
    page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def main(folder: Path, names: Sequence[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    scenes = [each for each in SCENES if not names or any(name in each.name for name in names)]
    with (
        tempfile.TemporaryDirectory() as temporary,
        start_servers(Path(temporary)) as servers,
        chromium(Path(temporary) / "profile") as driver,
    ):
        page = Page(driver)
        for scene in scenes:
            take(page, servers, scene, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
