"""The page at / in a real Chromium: what its user sees. `make page` runs this file alone."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import httpx
import numpy as np
import pytest
from selenium.webdriver.common.keys import Keys

from gateway.embedded.supervisor import EmbeddedTriton
from gateway.repository.state.content import ALL, DesiredModel
from gateway.repository.state.places import open_state_store
from tests.capabilities.on_demand.support.on_demand import (
    list_held,
    model_names,
    on_demand_fleet,
    tritons_with,
)
from tests.capabilities.page.support import browser
from tests.capabilities.uploads.support.uploads import FIRST, SECOND, triton_of
from tests.capabilities.versions.support import versioned
from tests.support.keys import ADMIN, INFER, bearer, entry, written
from tests.support.model_zoo.zoo import (
    COUNTING,
    MODELS,
    TICKING,
    Model,
    Names,
    identity,
    write_repository,
)
from tests.support.nginx import PREFIX, serve_below_prefix
from tests.support.servers import ROOT, Command, Triton, free_ports, gateway_before, triton_with
from tests.support.wait import TIMEOUT_S, wait_until

pytestmark = browser.is_required
IMAGES = ROOT / "docs" / "images"
KEPT = ("pair", "optional", "nchw", "picture", "single_BYTES")
MAX_FIRST_REQUESTS = 16  # until the first model can be tried
SCREENS: Final = {"1440": (1440, 900), "820": (820, 1180), "390": (390, 844)}
# Each view, and what it shows when it is complete.
VIEWS: Final = {
    "": "#response-time",  # the example of the first visit
    "#try/text_ensemble": "#infer",
    "#try/ensembel": "#try-notice a",
    "#model/ensemble": ".graph .slowest",
    "#api/ensemble": "#api-code",
    "#versions/ensemble": "#version-list",
    "#fleet": "#models tbody tr button",
    "#jobs": "#jobs-empty pre",
    "#live": "#live-empty h3",
    "guide/use/page.md": ".contents a, .guide h2",
}
PREFIX_FRAGMENTS = {"docs": "docs?model=text_ensemble", "guide": "guide/use/page.md"}
# What a module of the page returns for a value: a request's numbers, and the texts of metrics and labels.
AS_JSON: Final = """({asJson}) => {
    try { return asJson(...given); } catch (error) { return error.message; }
}"""
BUCKETS: Final = "[[Infinity, 20], [0.1, 10], [0.2, 20]]"
RANGE: Final = (
    f"({{quantileRange, formatRange}}) => formatRange(quantileRange(given[0], {BUCKETS}))"
)
QUANTILE: Final = f"({{quantile}}) => quantile(given[0], {BUCKETS}).toFixed(3)"
SAMPLES: Final = "({parseSamples}) => parseSamples(given[0], ['a']).get('a')"
LEVELS: Final = (
    "({arrangeSteps}) => arrangeSteps(given[0])"
    ".map((level) => level.map(({model}) => model).join(' '))"
)
SECTION: Final = "{heading: 'Memory', title: 'On demand', text: 'It is freed.'}"
RATE: Final = f"({{rateSection}}) => rateSection({SECTION}, given)"
FOUND: Final = "({findModels}) => findModels(given[0], given[1]).map(({name}) => name).join(' ')"
STEPS: Final = [
    {"model_name": "join", "input_map": {"a": "l", "b": "r"}, "output_map": {"o": "OUT"}},
    {"model_name": "left", "input_map": {"a": "IN"}, "output_map": {"o": "l"}},
    {"model_name": "right", "input_map": {"a": "IN"}, "output_map": {"o": "r"}},
]
LISTED: Final = [
    {"name": "core", "title": "Sentence: encode"},
    {"name": "both", "title": "Sentence embeddings", "steps": ["core"]},
    {"name": "absent"},
    {"name": "secret", "title": "Sentence", "hidden": True},
]
RESULTS: Final[tuple[tuple[str, str, tuple[object, ...], object], ...]] = (
    # JavaScript cannot count to some numbers.
    ("request.js", AS_JSON, ("9223372036854775807", [1]), "9223372036854775807"),
    ("request.js", AS_JSON, ("[9007199254740993]", [1]), "[9007199254740993]"),
    ("request.js", AS_JSON, ("5", [-1]), "[5]"),
    ("request.js", AS_JSON, ("1 2,3;4", [-1]), "[1,2,3,4]"),
    ("request.js", AS_JSON, ("1 2 3 4 5 6", [2, 3]), "[[1,2,3],[4,5,6]]"),
    ("request.js", AS_JSON, ("1 2 3 4 5 6", [-1, 3]), "[[1,2,3],[4,5,6]]"),
    ("request.js", AS_JSON, ("1 2\n3 4", [-1, -1]), "[[1,2],[3,4]]"),
    ("request.js", AS_JSON, ("+.5 1e3 0x10", [3]), "[0.5,1e3,16]"),
    ("request.js", AS_JSON, ("true false", [2]), "[true,false]"),
    ("request.js", AS_JSON, ("1 2 3", [2]), "expected 2 numbers, got 3"),
    ("request.js", AS_JSON, ("1 2 3", [-1, 2]), "expected a multiple of 2 numbers, got 3"),
    ("request.js", AS_JSON, ("1 two", [2]), "“two” is neither JSON nor a number"),
    (
        "metrics.js",
        SAMPLES,
        ('a{m="x\\"} 1",n="y"} 2\nab{m="z"} 3\n# TYPE a counter\na 4.5e1 1700000000\n',),
        [{"labels": {"m": 'x"} 1', "n": "y"}, "value": 2}, {"labels": {}, "value": 45}],
    ),
    ("metrics.js", RANGE, (0.25,), "< 100"),
    ("metrics.js", RANGE, (0.75,), "100–200"),
    ("metrics.js", QUANTILE, (0.25,), "0.050"),
    ("metrics.js", QUANTILE, (0.5,), "0.100"),
    ("metrics.js", QUANTILE, (0.75,), "0.150"),
    ("model.js", LEVELS, (STEPS,), ["left right", "join"]),
    ("search.js", FOUND, (LISTED, ["sent"]), "both absent core"),  # steps of pipelines last
    ("search.js", FOUND, (LISTED, ["sent", "emb"]), "both"),
    ("search.js", RATE, ("memory",), 20),
    ("search.js", RATE, ("memory", "freed"), 10),
    ("search.js", RATE, ("memory", "unload"), 0),
)


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Page]:
    with browser.chromium(tmp_path_factory.mktemp("profile")) as driver:
        yield browser.Page(driver)


@pytest.fixture
def page(tab: browser.Page) -> Iterator[browser.Page]:
    """Assert after each test that the console has no warnings, and that no other server was called."""
    tab.refusals = set()
    tab.dark(False)
    yield tab
    tab.close()
    assert not tab.console()
    assert tab.origins() <= {tab.origin}


@contextmanager
def gateway_of(page: browser.Page, *urls: str, **settings: str) -> Iterator[httpx.Client]:
    """A gateway that the page does not ask any more when it ends."""
    with gateway_before(*urls, **settings) as client:
        yield client
        page.close()


@dataclass(frozen=True)
class RenamedModels:
    """Models with random names, behind a gateway with keys."""

    url: str
    names: Names

    def fragment(self, model: str) -> str:
        return f"#try/{httpx.URL(self.names.model(model)).raw_path.decode()}"

    def input(self, name: str) -> str:
        return f'fieldset[data-input="{self.names.tensor(name)}"]'

    def output(self, name: str) -> str:
        return f'[data-output="{self.names.tensor(name)}"]'


FLAG = replace(identity("flag", "BOOL", (1,), 8), hints={"examples.X": r"[\"true\"]"})
JSON = replace(identity("json", "BYTES", (1,), 8), hints={"content_type.Y": "application/json"})


def kept() -> list[Model]:
    return [TICKING, COUNTING, FLAG, JSON, *(model for model in MODELS if model.name in KEPT)]


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Names]]:
    """The models of the demonstration, and those with random names."""
    folder, names = tmp_path_factory.mktemp("renamed"), Names(seed=11)
    write_repository(folder, names, kept())
    load = ("ensemble", "text_ensemble", "tokens", *(names.model(model.name) for model in kept()))
    folders = (ROOT / "triton_repo", ROOT / "triton_repo_examples", folder)
    with triton_with(folders, load) as server:
        yield server.options.url, names


@pytest.fixture(scope="module")
def demo_url(triton: tuple[str, Names], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a gateway without keys."""
    jobs = f"sqlite://{tmp_path_factory.mktemp('jobs')}"
    with gateway_before(triton[0], jobs=jobs) as client:
        yield str(client.base_url)


@pytest.fixture(scope="module")
def renamed(
    triton: tuple[str, Names], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RenamedModels]:
    entries = [entry(INFER, "infer"), entry(ADMIN, "admin")]
    keys = written(tmp_path_factory.mktemp("keys") / "keys.yaml", entries)
    jobs = f"sqlite://{tmp_path_factory.mktemp('jobs')}"
    with gateway_before(triton[0], keys_file=str(keys), jobs=jobs) as client:
        yield RenamedModels(str(client.base_url), triton[1])


def best_label(page: browser.Page) -> str:
    """Wait for the scores of a response; return the first label."""
    page.see("#response-body .scores", " %")
    return page.all("#response-body .scores tbody th")[0].text


def command(page: browser.Page, words: str = "curl") -> str:
    """Return the curl command, as soon as it has these words, in one line."""
    return page.until(
        lambda: words in (line := page.text("#curl").replace(" \\\n  ", " ")) and line, words
    )


def visible_tags(page: browser.Page, css: str) -> list[str]:
    return [one.tag_name for one in page.all(css) if one.is_displayed()]


def infer_with(renamed: RenamedModels) -> None:
    path = f"{renamed.url}/v1/models/{renamed.fragment('single_BYTES').removeprefix('#try/')}/infer"
    headers = {"X-API-Key": INFER, "Content-Type": "text/plain"}
    httpx.post(path, content=b"a text", headers=headers, timeout=60).raise_for_status()


# Elements that are cut off, jump, or are too small for a mouse or a finger.

CUT_OFF = """
    return [...document.querySelectorAll("button, a, input, select, h2, pre, .card, .notice")]
        .filter((each) => each.checkVisibility() && !each.closest(".scroll, table, .view-tabs, .segmented"))
        .map((each) => [each.outerHTML.slice(0, 90), each.getBoundingClientRect()])
        .filter(([, box]) => box.width > 1 && (box.left < 0 || box.right > innerWidth + 0.5));
"""


SHIFT = """
    window.shift = 0;
    new PerformanceObserver((list) => {
        for (const entry of list.getEntries()) window.shift += entry.value;
    }).observe({type: "layout-shift"});
"""
SMALL_CONTROLS = """
    const css = "button, select, textarea, input:not([type=checkbox]), nav a, [role=option]";
    return [...document.querySelectorAll(css)]
        .filter((each) => each.checkVisibility({visibilityProperty: true}))
        .map((each) => [each.outerHTML.slice(0, 90), each.getBoundingClientRect()])
        .filter(([, box]) => box.width > 1 && Math.min(box.height, box.width) < arguments[0]);
"""


@pytest.mark.parametrize(
    "screen", ["390", *(pytest.param(size, marks=pytest.mark.long) for size in ("820", "1440"))]
)
def test_walk_through_all_views_finds_nothing_cut_off_small_or_inaccessible(
    page: browser.Page, demo_url: str, screen: str
) -> None:
    """In light and dark. PAGE_PICTURES=FOLDER keeps a picture of each view."""
    folder = os.environ.get("PAGE_PICTURES")
    page.refusals = {"ensembel"}
    with page.screen(*SCREENS[screen]):
        for view, complete in VIEWS.items():
            page.dark(False)
            page.open(demo_url, view, first_visit=not view)
            page.find(complete)
            assert not page.run(CUT_OFF), view
            assert page.run("return document.documentElement.scrollWidth - innerWidth") <= 0, view
            assert view.startswith("guide") or not page.run(
                SMALL_CONTROLS, 44 if screen == "390" else 32
            )
            assert not page.faults(), view
            if not view:  # the answer is on the first screen, and the next one can be drawn
                page.see(".drawing", "Draw your own")
                assert page.text("#response-state").startswith("Example · ")
                bar = page.find(".run-bar").rect
                assert page.run("return scrollY") == 0
                assert page.find(".winner").rect["y"] + 44 <= bar["y"]
            for theme in ("light", "dark"):
                page.dark(theme == "dark")
                assert not page.faults("color-contrast"), view
                if folder:
                    name = re.sub(r"\W+", "-", view).strip("-") or "first-visit"
                    page.driver.save_screenshot(f"{folder}/{name}-{screen}-{theme}.png")


@pytest.mark.parametrize(
    "view",
    [
        "fleet",
        *(
            pytest.param(view, marks=pytest.mark.long)
            for view in ("try", "model", "api", "versions", "jobs", "live")
        ),
    ],
)
def test_key_is_asked_for_in_every_view_and_nothing_is_asked_of_the_gateway_without_one(
    page: browser.Page, renamed: RenamedModels, view: str
) -> None:
    page.refusals = {401}
    page.open(renamed.url, f"#{view}")
    page.see("#key-dialog", "A key is required.")
    page.click("#key-cancel")
    page.see("main section:not([hidden]) .notice", "A key is required.")
    assert page.text("#key-button") == "Enter a key"
    assert not visible_tags(page, "main :is(table, form, .card, .view-tabs, .segmented), #sidebar")
    page.until(lambda: page.run("return performance.now()") > 5000, "two refreshes")
    asked = [url for url, _ in page.requests() if "/static/" not in url and url.startswith("http")]
    # The first request learns that a key is required.
    assert (
        len([url for url in asked if "/v1/" in url or "/v2/" in url or url.endswith("/metrics")])
        == 1
    )
    page.click("main section:not([hidden]) .notice button")
    page.type("#key", "wrong\n")
    page.see("#key-error", "This key is not accepted. Unknown key.")
    assert page.text("#key-button") == "Key: not accepted"
    page.type("#key", f"{ADMIN}\n")
    page.until(lambda: not page.all("body.locked"), "the view")
    page.until(lambda: page.text("#key-button") == "Key: set", "the key")
    assert page.run("return [localStorage.length, document.cookie]") == [0, ""]
    assert ADMIN not in page.driver.page_source


def test_key_without_rights_sees_models_alone(page: browser.Page, renamed: RenamedModels) -> None:
    page.refusals = {401, 403}
    page.open(renamed.url, "#fleet", key=INFER)
    page.see("#fleet-notice", "administrator's key")
    assert page.all("#models tbody tr")
    assert not page.all("#replicas .replica")
    page.click("nav a[href='#live']")
    page.see("#live-notice", "lacks the role")
    infer_with(renamed)
    page.run(
        "location.hash = arguments[0]", renamed.fragment("single_BYTES").replace("try", "model")
    )
    page.see("#model-time", "computing")
    page.see("[data-phase=gateway]", "requires a key with the role metrics")
    page.click("#key-button")
    page.click("#key-remove")
    page.see("#key-dialog", "A key is required.")


def test_drawn_digit_is_recognized(page: browser.Page, demo_url: str) -> None:
    page.open(demo_url, "#try/ensemble")
    form, response = (page.find(css).rect for css in ("#try-form", "#response"))
    assert (form["y"], form["height"]) == (response["y"], response["height"])
    page.drag("canvas", *browser.SEVEN)
    page.click("#infer")
    assert best_label(page) == "7"
    assert "ms" in page.text("#response-state")
    # The bar is the share of its track that the number beside it says.
    share = (
        "const width = (css) => document.querySelector(css).getBoundingClientRect().width;"
        "return 100 * width('.scores .bar') / width('.scores .track')"
    )
    number = float(page.all("#response-body .scores .number")[0].text.removesuffix(" %"))
    page.until(lambda: abs(page.run(share) - number) < 1, "the bar at its share")
    assert page.text("#response-body .winner") == f"7\n{number} %"
    assert command(page) == (
        "curl -s --data-binary @drawing.png -H 'Content-Type: image/png' "
        f"{page.origin}/v1/models/ensemble/infer"
    )
    shares = re.findall(r"(\w+) (?:< )?(\d+) %", page.see("#response-time", "core"))
    assert {name for name, _ in shares} >= {"preprocessing", "core", "postprocessing"}
    assert 95 <= sum(int(share) for _, share in shares) <= 105
    page.click("#json-button")
    assert '"label": "7"' in page.see("#response-body pre", "label")


@pytest.mark.long
def test_line_is_drawn_with_the_keyboard(page: browser.Page, demo_url: str) -> None:
    page.open(demo_url, "#try/ensemble")
    page.type("canvas", Keys.ARROW_UP * 8 + " " + Keys.ARROW_DOWN * 16 + " ")
    page.see(".drawing", "pen up")
    page.type("canvas", Keys.CONTROL + Keys.ENTER)
    assert best_label(page) == "1"


@pytest.mark.long
def test_image_is_chosen_dropped_or_pasted(page: browser.Page, demo_url: str) -> None:
    page.open(demo_url, "#try/ensemble")
    page.choose("file")
    assert page.all("input[type=file][accept='image/*'][capture]")  # shown where fingers point
    page.select_files("input[type=file]:not([capture])", IMAGES / "three.jpg")
    page.click("#infer")
    assert best_label(page) == "3"
    assert "@three.jpg -H 'Content-Type: image/jpeg'" in command(page)
    page.drop_files(".drop", **{"broken.png": b"no image"})
    page.see(".thumbnails .tile", "PNG\ncannot be shown")
    page.refusals = {422}
    page.click("#infer")
    page.see("#response-body", "Copy request id")
    page.until(lambda: page.text("#history-list .thumb") == "…", "a thumbnail of no image")
    page.drop_files(".drop", **{"it's a seven.png": (IMAGES / "seven.png").read_bytes()})
    page.see(".drop", "it's a seven.png")
    page.click("#infer")
    page.until(lambda: page.text("#response-body .scores tbody th") == "7", "a seven")
    assert r"--data-binary '@it'\''s a seven.png'" in page.text("#curl")
    page.clipboard(allowed=True)
    page.copy_image((IMAGES / "seven.png").read_bytes())
    page.type("body", Keys.CONTROL + "v")
    page.see(".drop", "image.png")
    page.click("#infer")
    command(page, "@image.png -H 'Content-Type: image/png'")
    assert best_label(page) == "7"


@pytest.mark.long
def test_similarity_of_two_texts_is_shown(page: browser.Page, demo_url: str) -> None:
    page.open(demo_url, "#try/text_ensemble")
    page.type("#try-form textarea", "The doctor examined the patient.")
    page.click("#infer")
    assert "384 numbers" in page.see("#response-body figcaption", "norm 1")
    assert not visible_tags(page, "#cosine")
    page.click(".compare")
    second = page.all("#try-form .field-text textarea")[1]
    second.send_keys("A physician looked at the sick man.")
    page.click("#infer")
    like = float(page.text("#cosine"))
    assert page.text(".similarity").split()[-1] in ("similar", "related")
    second.clear()
    second.send_keys("The ship left the harbour at dawn.")
    page.click("#infer")
    page.until(lambda: float(page.text("#cosine")) < like - 0.3, "another similarity")


def test_model_is_unloaded_and_loaded_with_a_report_of_each_replica(
    page: browser.Page, renamed: RenamedModels
) -> None:
    page.refusals = {403}
    page.open(renamed.url, "#fleet", key=INFER)
    model = renamed.names.model("picture")
    row = f'#models tr[data-key="{model}"]'
    page.find("#models tbody tr")
    page.see("#fleet-notice", "administrator's key")
    assert not visible_tags(page, f"{row} button, #upload-open")  # which this key may not use
    page.click("#fleet-notice button")
    page.type("#key", f"{ADMIN}\n")
    page.find(f"{row} button")
    page.all(f"{row} button")[1].click()
    page.see("#confirm-dialog", model)
    page.click("#confirm-button")
    page.click(f"{row} summary")
    assert "UNAVAILABLE" in page.see(f"{row} details", "1 replica")
    page.see("#toasts", f"{model} is unloaded on every replica.")
    page.see("#events", f"Unloaded {model} succeeded")
    page.see(f"{row} .state", "Not loaded")
    assert not visible_tags(page, f"{row} .bad, #toasts .bad, #problems")  # it was intended
    page.find(f"{row} button:nth-of-type(2):disabled")
    page.all(f"{row} button")[0].click()
    page.see("#toasts", f"{model} is loaded on every replica.")
    page.find(f"{row} button:nth-of-type(2):enabled")


@pytest.mark.long
def test_model_that_is_not_loaded_or_not_there_says_what_helps(
    page: browser.Page, renamed: RenamedModels
) -> None:
    page.refusals = {404, 422}
    page.open(renamed.url, "#try/text_ensembel", key=INFER)
    page.see("#try-notice", "There is no model text_ensembel. Did you mean")
    assert not visible_tags(page, ".view-tabs, #try-body")
    page.click("#try-notice a")
    page.see("#model-title", "Sentence embeddings")
    for view in ("try", "model"):
        page.run("location.hash = arguments[0]", f"#{view}/countdown")
        page.see("#model-title", "countdown")
        page.see(f"#{view}-unloaded", "Not loaded")
        page.see(f"#{view}-unloaded", "Ask an administrator")
        assert not visible_tags(page, "#try-body, #model-body")
    page.open(renamed.url, "#model/countdown", key=ADMIN)
    page.click("#model-unloaded button")
    page.see("#model-tensors", "input")
    page.run("location.hash = '#fleet'")
    page.see('#models tr[data-key="countdown"]', "Ready")


@pytest.mark.long
def test_replica_is_drained_and_returned(page: browser.Page, triton: tuple[str, Names]) -> None:
    page.refusals = {409}
    other = triton[0].replace("127.0.0.1", "localhost")  # the same Triton, by another name
    with gateway_of(page, triton[0], other) as client:
        page.open(str(client.base_url), "#fleet")
        first = ".replica[data-key^='127.0.0.1']"
        page.see(first, "Up")
        page.click(f"{first} [data-action=drain]")
        page.see("#toasts", "is drained")
        page.see(first, "cordoned")
        assert page.all(f"{first} .probes span")
        assert not page.faults()
        page.click(".replica:not([data-key^='127.0.0.1']) [data-action=cordon]")
        page.see("#toasts .bad", "localhost")  # the last one is not cordoned
        page.click(f"{first} [data-action=uncordon]")
        page.see("#toasts", "gets requests again")


@pytest.mark.long
def test_hung_replica_is_named_with_the_time_of_its_last_answer(
    page: browser.Page, triton: tuple[str, Names], tmp_path: Path
) -> None:
    with Triton(tmp_path) as other:
        other.wait()
        with gateway_of(page, triton[0], other.options.url) as client:
            page.open(str(client.base_url), "#fleet")
            page.until(lambda: page.text("#tiles").startswith("Replicas\n2 / 2"), "both replicas")
            assert not visible_tags(page, "#problems")
            other.signal(signal.SIGSTOP)
            text = page.see("#problems.warn", other.address)
            assert re.search(r"has not answered probes since \d\d:\d\d:\d\d\.", text)
            assert "Requests go to the other replica." in text
            page.see("#health.warn", "1 of 2")
            page.see("#tiles", "1 / 2")
            page.close()
            other.signal(signal.SIGCONT)


@pytest.fixture(scope="module")
def uploads(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a gateway with keys and an empty repository, and of its Triton."""
    repository = tmp_path_factory.mktemp("repository")
    entries = [entry(INFER, "infer"), entry(ADMIN, "admin")]
    keys = written(tmp_path_factory.mktemp("keys") / "keys.yaml", entries)
    settings = {
        "repository": f"file://{repository}",
        "model_uploads": "artifacts",
        "keys_file": str(keys),
    }
    with triton_of(repository) as triton:
        triton.wait()
        with gateway_before(triton.options.url, **settings) as client:
            yield str(client.base_url)


@pytest.mark.long
def test_dropped_model_is_refused_corrected_and_uploaded(
    page: browser.Page, uploads: str, tmp_path: Path
) -> None:
    page.refusals = {422}
    page.open(uploads, "#fleet", key=ADMIN)
    page.find("#upload-open")
    page.drop_files("#tiles", a=b"1", b=b"2")  # anywhere
    page.see("#upload-result", "Drop one file")
    page.drop_files("#upload-form", **{"my digits.onnx": b"no network"})
    page.see("#upload-selected", "my digits.onnx, 10 bytes")
    assert page.run("return document.querySelector('#upload-name').value") == "my_digits"
    page.type("#upload-name", Keys.ENTER)
    page.see("#upload-result", "'my digits.onnx' is not a .onnx file")
    assert page.find("#upload-result").get_attribute("role") == "status"
    assert not page.faults()
    (tmp_path / "my digits.onnx").write_bytes(FIRST)
    page.select_files("#upload-file", tmp_path / "my digits.onnx")
    page.find("#upload-name").clear()
    page.click("#upload-start")
    page.see("#upload-result", "Enter a name for the model.")
    page.type("#upload-name", "my_digits\n")
    page.see("#upload-result", "my_digits version 1 is loaded. Try it Its API")
    links = [link.get_attribute("href") for link in page.all("#upload-result a")]
    assert links == [f"{page.origin}/#try/my_digits", f"{page.origin}/#api/my_digits"]
    page.see('#models tr[data-key="my_digits"]', "Ready")
    page.drop_files("#upload-form", **{"my digits.onnx": SECOND})
    page.see("#upload-existing-text", "my_digits exists: this becomes its next version")
    page.click("#upload-store-only")
    page.click("#upload-start")
    page.see("#upload-result", "my_digits version 2 is stored.")
    path = f"{uploads}/v1/models/my_digits/infer"
    answer = httpx.post(path, json={"inputs": {"X": [1, 2]}}, headers=bearer(ADMIN))
    assert answer.json()["outputs"]["Y"] == [2, 3]


@pytest.mark.long
def test_folder_is_uploaded_and_its_files_are_listed_downloaded_and_deleted(
    page: browser.Page, uploads: str, tmp_path: Path
) -> None:
    folder = tmp_path / "in a folder"
    for version, network in {"1": FIRST, "2": SECOND}.items():
        (folder / version).mkdir(parents=True)
        (folder / version / "model.onnx").write_bytes(network)
    page.open(uploads, "#fleet", key=ADMIN)
    page.click("#upload-open")
    page.select_files("#upload-folder", folder)
    page.see("#upload-selected", "in a folder, 2 files, ")
    assert not page.faults()
    page.click("#upload-start")
    page.see("#upload-result", "in_a_folder version 2 is loaded.")
    download = {"behavior": "allow", "downloadPath": str(tmp_path)}
    page.driver.execute_cdp_cmd("Browser.setDownloadBehavior", download)
    page.open(uploads, "#files/in_a_folder", key=ADMIN)
    assert f"{len(FIRST)} bytes" in page.see("[data-version='1']", "1/model.onnx")
    assert not page.faults()
    page.click("[data-version='1'] tbody button")
    page.until((tmp_path / "model.onnx").exists, "the file")
    assert (tmp_path / "model.onnx").read_bytes() == FIRST
    page.click("[data-version='1'] .card-head button")
    page.see("#confirm-dialog", "Delete version 1 of in_a_folder?")
    page.click("#confirm-button")
    page.until(lambda: not page.all("[data-version='1']"), "one version")
    page.click("#version-upload")
    assert page.text("#upload-heading") == "Upload a version of in_a_folder"
    page.drop_files("#upload-dialog", **{"other.onnx": FIRST})
    page.click("#upload-start")
    page.see("#upload-result", "in_a_folder version 3 is loaded.")
    page.click("#upload-close")
    page.see("[data-version='3']", "3/model.onnx")
    page.click("#files-body > .card-head .danger")
    page.click("#confirm-button")
    page.see("#toasts", "in_a_folder is deleted.")
    page.until(lambda: not page.all('#models tr[data-key="in_a_folder"]'), "no model")


@pytest.mark.long
def test_large_upload_shows_its_progress_and_can_be_cancelled(
    page: browser.Page, uploads: str
) -> None:
    page.open(uploads, "#fleet", key=ADMIN)
    page.find("#upload-open")
    page.run(
        """
        const dropped = new DataTransfer();
        dropped.items.add(new File(Array(256).fill(new Uint8Array(1 << 20)), "large.plan"));
        const zone = document.querySelector("#tiles");
        zone.dispatchEvent(new DragEvent("drop", {dataTransfer: dropped, bubbles: true, cancelable: true}));
        """
    )
    page.see("#upload-selected", "large.plan, 256.0 MiB")
    page.run(
        """
        const bar = document.querySelector("#upload-progress");
        const cancel = document.querySelector("#upload-cancel");
        window.fractions = [];
        const watch = new MutationObserver(() => {
            window.fractions.push(bar.value);
            if (bar.value > 0) cancel.click();
        });
        watch.observe(bar, { attributes: true });
        document.querySelector("#upload-start").click();
        """
    )
    page.see("#upload-result", "The upload was cancelled.")
    assert any(0 < fraction < 1 for fraction in page.run("return window.fractions"))
    assert page.run("return document.querySelector('#upload-busy').hidden")
    assert not page.all('#models tr[data-key="large"]')


@pytest.mark.long
async def test_pending_load_of_a_missing_model_is_shown_and_can_be_cancelled(
    page: browser.Page, triton: tuple[str, Names], tmp_path: Path
) -> None:
    state = f"file://{tmp_path}/state.db"
    await open_state_store(state).set_desired_model("lost", DesiredModel(ALL))
    with gateway_of(page, triton[0], state=state) as client:
        page.open(str(client.base_url), "#fleet")
        row = '#models tr[data-key="lost"]'
        page.see(row, "load pending")
        page.click(f"{row} button:nth-of-type(2):enabled")
        page.see("#confirm-dialog", "lost")
        page.click("#confirm-button")
        page.see("#toasts", "is unloaded on every replica")
        page.until(lambda: not page.all(row), "the row of a model that nobody wants to go")


@pytest.mark.long
def test_unknown_model_gets_a_form_by_its_signature_and_code_without_the_key(
    page: browser.Page, renamed: RenamedModels
) -> None:
    page.open(renamed.url, renamed.fragment("pair"), key=INFER)
    for name, values in {"A": "1 2", "B": "[30, 40]"}.items():
        page.type(f"{renamed.input(name)} textarea", values)
    page.click("#infer")
    assert page.see(renamed.output("SUM"), "31").split()[-2:] == ["31", "42"]
    assert page.see(renamed.output("PRODUCT"), "30").split()[-2:] == ["30", "80"]
    assert '-H "Authorization: Bearer $KEY"' in page.text("#curl")
    for language in ("curl", "python", "javascript"):
        page.click(f"#tab-{language}")
        assert "KEY" in page.text("#curl")
        assert INFER not in page.driver.page_source


@pytest.mark.long
def test_each_kind_of_input_and_output_has_its_form(
    page: browser.Page, renamed: RenamedModels
) -> None:
    page.open(renamed.url, renamed.fragment("optional"), key=INFER)
    page.click("#infer")
    page.see(f"{renamed.input('X')} [role=alert]", "enter values")
    page.type(f"{renamed.input('X')} textarea", "1\n2\n3")
    page.type(f"{renamed.input('FACTOR')} input[type=number]", "10")
    page.click("#infer")
    assert page.see(renamed.output("Y"), "10").split()[-3:] == ["10", "20", "30"]
    page.open(renamed.url, renamed.fragment("nchw"), key=INFER)
    page.drag("canvas", (-30, -30), (30, 30))
    page.click("#infer")
    page.find(f"{renamed.output('Y')} canvas")
    assert "4 × 6" in page.text(f"{renamed.output('Y')} figcaption")
    page.open(renamed.url, renamed.fragment("picture"), key=INFER)
    page.type("fieldset input[type=number]", "9")
    page.click("#infer")
    shown = page.find(f"{renamed.output('PNG')} img")
    page.until(lambda: shown.get_property("naturalWidth") == 9, "a picture")
    page.open(renamed.url, renamed.fragment("flag"), key=INFER)
    page.click(".sample-value")
    assert page.find("fieldset input[type=checkbox]").is_selected()
    page.see(renamed.output("Y"), "true")
    page.open(renamed.url, renamed.fragment("json"), key=INFER)
    page.type("textarea", '{"a": ' * 10 + '"deepest"' + "}" * 10)
    page.click("#infer")
    page.click(f"{renamed.output('Y')} summary")
    page.see(f"{renamed.output('Y')} pre", "deepest")


def test_markup_in_a_response_is_shown_as_text(page: browser.Page, renamed: RenamedModels) -> None:
    page.open(renamed.url, renamed.fragment("single_BYTES"), key=INFER)
    page.type("textarea", "<img src=x onerror=alert(1)>")
    page.find("textarea").send_keys(Keys.CONTROL, Keys.ENTER)
    assert "<img src=x" in page.see(".text-output", "onerror")
    assert not page.all("#response-body img")


@pytest.mark.long
def test_streamed_responses_are_shown_as_they_arrive(
    page: browser.Page, renamed: RenamedModels
) -> None:
    page.open(renamed.url, renamed.fragment("ticking"), key=INFER)
    page.type(f"{renamed.input('COUNT')} input[type=number]", "50000")
    page.type(f"{renamed.input('SECONDS')} input[type=number]", "0.02")
    page.click("#infer")
    page.until(lambda: len(page.all("#pieces > li")) >= 3, "three answers")
    page.see("#response-state", "so far")
    assert page.text("#curl").startswith("curl -sN ")
    page.click("#stop")
    page.see("#response-state", "stopped")
    page.find(f"{renamed.input('COUNT')} input[type=number]").clear()
    page.type(f"{renamed.input('COUNT')} input[type=number]", "2")
    page.click("#infer")
    page.see("#response-state", "2 responses in")


@pytest.mark.long
def test_streamed_text_is_shown_as_a_conversation(page: browser.Page, demo_url: str) -> None:
    page.open(demo_url, "#try/tokens")
    page.type('fieldset[data-input="stream"] select', "true")
    for number, question in enumerate(("the ship", "at noon"), 1):
        page.find("fieldset textarea").clear()
        page.type("fieldset textarea", question)
        page.click("#infer")
        page.until(lambda: len(page.all(".chat .asked")) == number, "the question")  # noqa: B023
        page.see("#response-state", "responses in")
    assert [one.text for one in page.all(".chat .asked")] == ["the ship", "at noon"]
    answers = [one.text for one in page.all(".chat .answered")]
    assert len(answers) == 2
    assert all(len(answer.split()) > 3 for answer in answers)
    assert not page.faults()


@pytest.mark.long
def test_sequence_and_parameters_are_sent(page: browser.Page, renamed: RenamedModels) -> None:
    page.refusals = {400}
    page.open(renamed.url, renamed.fragment("counting"), key=INFER)
    page.type("fieldset input[type=number]", "5")
    page.click("#advanced-button")
    page.type("#sequence-id", "page-1")
    page.click("#sequence-start")
    page.click("#infer")
    page.see(renamed.output("COUNT"), "1")
    page.click("#sequence-start")
    page.click("#infer")
    page.see(renamed.output("COUNT"), "2")
    assert "X-Sequence-ID: page-1" in page.text("#curl")
    page.type("#parameters", "no JSON")
    page.click("#infer")
    page.see("#parameters-error", "JSON object")
    page.find("#parameters").clear()
    page.type("#parameters", '{"priority": 1}')
    page.click("#infer")
    page.see(renamed.output("COUNT"), "3")
    assert '"parameters": {"priority": 1}' in page.text("#curl")


@pytest.mark.long
def test_live_view_shows_rates_and_latencies(page: browser.Page, renamed: RenamedModels) -> None:
    page.open(renamed.url, "#live", key=ADMIN)

    def replicas() -> bool:
        infer_with(renamed)
        return bool(page.all("#by-replica tbody tr"))

    page.until(replicas, "the replicas")
    page.find("#rate-chart path")
    row = page.see("#by-model tbody", renamed.names.model("single_BYTES"))
    assert not visible_tags(page, "#errors-legend")
    assert len(page.all("#by-model tbody tr")) == 1  # models without requests are counted only
    # No digits that the buckets of the histogram do not have: 10–25, < 1.
    assert re.search(r" (< \d+(\.\d+)?|\d+(\.\d+)?–\d+(\.\d+)?)( |$)", row)
    page.see("#live-now", "requests/s")
    # The points stay while another view is shown.
    count = "return document.querySelectorAll('#by-model tbody tr').length"
    page.run("location.hash = 'fleet'")
    page.choose("off", "#state-filter")
    page.until(
        lambda: {row.text for row in page.all("#models .state")} == {"", "Not loaded"}, "off"
    )
    page.run("location.hash = 'live'")
    page.choose("3600")
    assert page.run(count) == 1


@pytest.mark.long
def test_live_view_shows_who_waits(
    page: browser.Page, triton: tuple[str, Names], tmp_path: Path
) -> None:
    url, names = triton
    keys = written(tmp_path / "keys.yaml", [entry(INFER, "infer"), entry(ADMIN, "admin")])
    path = f"/v1/models/{names.model('ticking')}/infer"
    body = {"inputs": {names.tensor("COUNT"): 30, names.tensor("SECONDS"): 0.1}}
    headers = {**bearer(INFER), "Accept": "application/x-ndjson"}
    settings = {"keys_file": str(keys), "max_model_inflight": "1"}
    with gateway_of(page, url, **settings) as client, ThreadPoolExecutor(3) as threads:
        page.open(str(client.base_url), "#live", key=ADMIN)
        calls = [
            threads.submit(client.post, path, json=body, headers=headers, timeout=TIMEOUT_S)
            for _ in range(3)
        ]
        page.see("#by-priority tbody", "normal")
        page.see("#waiting-callers", "Most of")
        for call in calls:
            assert call.result().status_code == 200


@pytest.mark.long
def test_versions_of_a_split_are_shown_with_their_shares(
    page: browser.Page, tmp_path: Path
) -> None:
    with Triton(versioned.write_versions(tmp_path), versioned.NAME) as triton:
        triton.wait()
        with gateway_of(page, triton.options.url) as client:
            wait_until(lambda: client.get(f"/v1/models/{versioned.NAME}").status_code == 200)
            split = {"versions": {"1": 90, "2": 10}, "shadow": {"version": "3"}}
            client.put(f"{versioned.LABELS}/canary", json=split).raise_for_status()
            client.put(f"{versioned.LABELS}/stable", json={"version": "1"}).raise_for_status()
            url = str(client.base_url)
            page.open(url, "#fleet")
            labels = "canary 1 (90 %), 2 (10 %), shadow 3; stable 1"
            page.see(f'#models tr[data-key="{versioned.NAME}"]', labels)
            set_label(page, url)
            page.open(url, "#live")

            def is_counted() -> bool:
                path = f"/v2/models/{versioned.NAME}/versions/canary/infer"
                for _ in range(10):
                    client.post(path, json=versioned.V2_BODY).raise_for_status()
                return len(page.all("#by-version tbody tr")) == 2

            page.until(is_counted, "both versions")
            table = page.see("#by-version tbody", "canary 10 %")
            assert re.search(r"split 1 canary 90 %, stable \d+\.\d \d+\.\d", table)
            assert re.search(r"split 2 canary 10 % \d+\.\d \d+\.\d", table)


def set_label(page: browser.Page, url: str) -> None:
    """Try a version, and set and delete a label, in the view of the versions."""
    page.open(url, f"#versions/{versioned.NAME}")
    found = page.until(lambda: page.all("#version-list tbody tr"), "rows")
    rows = [" ".join(row.text.split()) for row in found]
    assert rows == [
        "v3 Ready shadow of canary Try",
        "v2 Ready canary 10 % Try",
        "v1 Ready canary 90 % stable Try",
    ]
    assert not page.faults()
    page.click("#label-form .main")
    page.see("#label-form", "Enter a name for the label.")
    page.type("#label-name", "next")
    page.click("#label-form .main")
    row = "#label-list tr[data-label-name=next]"
    page.see(row, "3")
    page.click(f"{row} button")
    page.click("#confirm-button")
    page.until(lambda: not page.all(row), "no label")
    page.click("#version-list tbody tr:nth-child(2) a")
    page.see("#curl", "versions/2/infer")


def test_jobs_are_listed_and_deleted(
    page: browser.Page, demo_triton: EmbeddedTriton, tmp_path: Path
) -> None:
    with gateway_of(page, demo_triton.options.url, jobs=f"sqlite://{tmp_path}") as client:
        headers = {"Prefer": "respond-async", "Content-Type": "text/plain"}
        path = "/v1/models/text_ensemble/infer"
        (job, _) = (
            client.post(path, content=text, headers=headers).json()["id"] for text in ("a", "b")
        )
        page.open(str(client.base_url))
        page.click("#jobs-link")
        row = f"#jobs-table [data-key='{job}']"
        page.see(row, "Done")
        assert page.find(f"[aria-label='Result {job}']").is_displayed()
        page.click(f"[aria-label='Delete {job}']")
        page.until(lambda: not page.all(row), "the job is gone")
        assert len(page.all("#jobs-table tbody tr")) == 1


# The code of each language.


def run_programs(page: browser.Page, folder: Path, key: str = "") -> Iterator[str]:
    """Run the code of each tab beside the files that it names, and yield its output."""
    languages = {"curl": ["bash"], "python": [sys.executable], "javascript": ["node"]}
    for language, program in languages.items():
        if shutil.which(program[0]) is None:
            continue
        page.click(f"#tab-{language}")
        file = folder / {"javascript": "request.mjs"}.get(language, language)
        file.write_text(page.text("#curl"))
        ended = subprocess.run(
            [*program, str(file)],
            cwd=folder,
            env={**os.environ, "KEY": key},
            capture_output=True,
            text=True,
        )
        assert ended.returncode == 0, ended.stderr
        yield ended.stdout


def numbers_in(printed: str, name: str) -> list[float]:
    """The numbers of an output, as JSON, Python or Node print them."""
    _, _, rest = printed.partition(name)
    values = re.search(r"\[[^\]]*\]", rest)
    assert values, printed
    return [float(number) for number in re.findall(r"-?[0-9.]+", values[0])]


def labels_in(printed: str) -> list[str]:
    """The labels of an answer, best first, as JSON and Python print them."""
    return re.findall(r"""["']label["']: ?["'](\w+)["']""", printed)


@pytest.mark.long
def test_several_images_are_one_request_whose_code_runs(
    page: browser.Page, demo_url: str, tmp_path: Path
) -> None:
    labels = {"seven.png": "7", "three.jpg": "3"}
    for name in labels:
        shutil.copy(IMAGES / name, tmp_path)
    page.open(demo_url, "#try/ensemble")
    page.choose("file")
    page.select_files("input[type=file]:not([capture])", *(tmp_path / name for name in labels))
    assert "-F image=@seven.png -F image=@three.jpg" in command(page, "three.jpg")
    for printed in run_programs(page, tmp_path):
        answers = printed.split("doubtful")[: len(labels)]
        assert [labels_in(answer)[0] for answer in answers] == [*labels.values()]
    page.click("#infer")
    page.see("#response-state", "2 files")
    shown = page.all("#response-body .batch > li")
    for answer, (name, label) in zip(shown, labels.items(), strict=True):
        assert answer.find_element("css selector", ".name").text == name
        assert answer.find_element("css selector", ".scores tbody th").text == label
    assert len(page.all("#response-body .batch img")) == 2
    assert not page.faults()


@pytest.mark.long
def test_code_for_arrays_runs(page: browser.Page, renamed: RenamedModels, tmp_path: Path) -> None:
    """A JSON list; a NumPy file; and a NumPy file beside a number, which is a form."""
    np.save(tmp_path / "array.npy", np.array([1.5, -2], np.float32))
    output = renamed.names.tensor("Y")
    page.open(renamed.url, renamed.fragment("optional"), key=INFER)
    page.type(f"{renamed.input('X')} textarea", "1.5, -2")
    page.see("#curl", "[1.5,-2]")
    for printed in run_programs(page, tmp_path, INFER):
        assert numbers_in(printed, output) == [1.5, -2]
    page.choose("file", renamed.input("X"))
    page.see("#curl", "array.npy")  # stands for a file until one is chosen
    page.select_files(f"{renamed.input('X')} input[type=file]", tmp_path / "array.npy")
    page.see("#curl", "application/x-npy")
    for printed in run_programs(page, tmp_path, INFER):
        assert numbers_in(printed, output) == [1.5, -2]
    page.click("#infer")
    page.see(renamed.output("Y"), "1.5")
    page.type(f"{renamed.input('FACTOR')} input[type=number]", "2")
    page.see("#curl", "application/json")
    for printed in run_programs(page, tmp_path, INFER):
        assert numbers_in(printed, output) == [3, -4]


@pytest.mark.long
def test_code_of_each_language_sends_the_same_request_and_is_copied(
    page: browser.Page, demo_url: str, tmp_path: Path
) -> None:
    page.open(demo_url, "#try/text_ensemble")
    assert "some text" not in page.see("#curl", "The ship left")  # the sample stands in
    page.see("#code-note", "placeholders")
    page.type("textarea", 'it\'s a "text" \\ of {words} $HOME')
    page.see("#curl", "{words}")
    page.clipboard(allowed=False)
    page.click("#curl-copy")
    page.see("#curl-copied", "selected")
    line = page.text("#curl")
    assert page.run("return getSelection().toString()") == line
    page.clipboard(allowed=True)
    page.click("#curl-copy")
    page.until(lambda: page.text("#curl-copied") == "copied", "copied")
    assert page.copied() == line
    for answer in run_programs(page, tmp_path):
        assert "EMBEDDING" in answer


@pytest.mark.long
def test_earlier_request_of_the_session_is_shown_again(page: browser.Page, demo_url: str) -> None:
    page.open(demo_url, "#try/ensemble")
    page.click(".sample-value")
    page.see("#response-body .scores", "7")
    page.click("[data-value=text_ensemble]")
    page.see("#curl", "text_ensemble")
    page.click(".sample-value")
    page.see("#response-body figcaption", "384 numbers")
    entries = [entry.text for entry in page.all("#history-list .summary")]
    assert entries[0] == "384 numbers"
    assert entries[1].startswith("7 · ")
    page.all("#history-list button")[1].click()
    page.see("#response-body .scores", "7")
    page.see("#response-state", "earlier")
    page.see(".drop", "sample.png")
    assert page.run("return location.hash") == "#try/ensemble"
    page.click("#compare-button")
    page.see("#compare-hint", "Choose two requests.")
    for index in (0, 1):
        page.all("#history-list button")[index].click()
    similar, digits = page.all("#comparison .card")
    assert "384 numbers" in similar.text
    assert digits.find_element("css selector", ".winner").text.startswith("7")
    assert not page.faults()
    page.click("#compare-button")
    assert not visible_tags(page, "#comparison")


@pytest.mark.long
def test_response_is_downloaded(page: browser.Page, demo_url: str, tmp_path: Path) -> None:
    download = {"behavior": "allow", "downloadPath": str(tmp_path)}
    page.driver.execute_cdp_cmd("Browser.setDownloadBehavior", download)
    page.open(demo_url, "#try/ensemble")
    page.click(".sample-value")
    page.click("#answer-download")
    page.until((tmp_path / "response.json").exists, "the file")
    answer = json.loads((tmp_path / "response.json").read_text())
    assert answer["outputs"]["result"]["predictions"][0]["label"] == "7"


@pytest.mark.long
def test_models_are_found_by_name_in_the_list_and_with_the_guide_in_the_search(
    page: browser.Page, demo_url: str
) -> None:
    page.open(demo_url, "#try/ensemble")
    page.find("canvas")
    assert page.text("#steps-toggle") == "6 steps of pipelines"
    assert not visible_tags(page, "[data-value=text_core]")
    page.type("body", "/")
    page.type("#model-search", "TEXT_")
    options = [option.get_attribute("data-value") for option in page.all("#model-list .option")]
    assert options[0] == "text_ensemble"  # the pipeline, then its steps
    assert {mark.text for mark in page.all("#model-list mark")} == {"text_"}
    assert not page.faults()
    page.type("#model-search", Keys.ENTER)
    page.see("#model-name", "text_ensemble")
    page.type("#model-search", "ocx")
    page.see("#model-none", "Nothing matches “ocx”.")
    page.type("#model-search", Keys.ESCAPE)
    page.type("body", Keys.CONTROL + "k")
    page.type("#search-dialog input", "generated")
    assert page.see("#search-results a", "tokens") == "Generated text\ntokens"
    page.find("#search-dialog input").clear()
    page.type("#search-dialog input", "run while draw")
    page.see("#search-results", "Web page › Try a model")
    assert not page.faults()
    page.type("#search-dialog input", Keys.ENTER)
    page.see(".guide h1", "Web page")
    assert page.run("return location.hash") == "#try-a-model"
    page.type("body", Keys.CONTROL + "k")
    page.type("#search-dialog input", "sentence emb")
    page.see("#search-results", "Sentence embeddings")
    page.type("#search-dialog input", Keys.ENTER)
    page.see("#model-name", "text_ensemble")


@pytest.mark.long
def test_graph_of_an_ensemble_shows_which_step_is_slow(page: browser.Page, demo_url: str) -> None:
    body = (IMAGES / "seven.png").read_bytes()
    for _ in range(3):
        answer = httpx.post(
            f"{demo_url}/v1/models/ensemble/infer",
            content=body,
            headers={"Content-Type": "image/png"},
        )
        answer.raise_for_status()
    page.open(demo_url, "#model/ensemble")
    page.see(".graph .slowest", "the slowest")
    # At once, because the graph is drawn again every two seconds.
    steps = page.run(
        "return [...document.querySelectorAll('.graph [data-step]')]"
        ".map((step) => [step.dataset.step, step.textContent])"
    )
    assert [name for name, _ in steps] == ["preprocessing", "core", "postprocessing"]
    shares = [
        int(found[1]) for _, text in steps if (found := re.search(r"(\d+) % of the time", text))
    ]
    assert len(shares) == 3
    assert 98 <= sum(shares) <= 102
    assert re.fullmatch(r"\d+(\.\d)? (ms|µs)", page.text("[data-phase=gateway]"))
    page.click(".graph a")
    page.see("#model-name", "preprocessing")
    assert re.fullmatch(r"\d+(\.\d)? (ms|µs)", page.text("[data-phase=queue]"))
    assert re.fullmatch(r"\d+(\.\d)? (ms|µs)", page.text("[data-phase=compute]"))
    assert not page.all(".graph")
    assert not page.faults()


@pytest.mark.long
def test_another_model_is_chosen_in_the_view_of_a_model(page: browser.Page, demo_url: str) -> None:
    page.open(demo_url, "#model")
    page.see("#model-name", "ensemble")  # one with a graph comes first
    page.click("#steps-toggle")
    page.click("[data-value=text_core]")
    page.see("#model-name", "text_core")
    assert page.run("return location.hash") == "#model/text_core"
    page.click("#model-head [data-view=api]")
    assert "text_core/infer" in page.see("#api-code", "curl")
    page.click("[data-value=ensemble]")
    page.see("#api-code", "Content-Type: image/png")
    page.choose("application/json")
    page.see("#api-code", '{"b64": ')


@pytest.mark.long
def test_theme_and_density_are_switched(page: browser.Page, demo_url: str) -> None:
    back = "return getComputedStyle(document.body).backgroundColor"
    height = "return document.querySelector('#models tbody tr').getBoundingClientRect().height"
    page.open(demo_url, "#fleet")
    page.find("#models tbody tr")
    light, normal = page.run(back), page.run(height)
    for theme in ("light", "dark"):
        page.click("#theme-button")
        assert page.find("#theme-button").get_attribute("aria-label") == f"Theme: {theme}"
        assert (page.run(back) == light) is (theme == "light")
    page.driver.refresh()
    page.find("#models tbody tr")
    assert page.run(back) != light
    page.click("#theme-button")
    page.click("#density-button")
    assert page.run(height) < 0.85 * normal
    page.click("#density-button")
    assert (page.run(height), page.run(back)) == (normal, light)
    assert page.run("return localStorage.length") == 0


@pytest.mark.long
def test_empty_repository_shows_how_to_upload_a_model(page: browser.Page, tmp_path: Path) -> None:
    with triton_of(tmp_path) as triton:
        triton.wait()
        settings = {"repository": f"file://{tmp_path}", "model_uploads": "artifacts"}
        with gateway_of(page, triton.options.url, **settings) as client:
            page.open(str(client.base_url), "#fleet")
            page.see("#fleet-notice", "Drop a model file here")
            page.open(str(client.base_url), "#try")
            page.see("#try-notice", "No model is ready yet")
            page.click("#try-notice a")
            page.find("#upload-open")


@pytest.mark.long
def test_unreachable_triton_is_shown_in_each_view(page: browser.Page) -> None:
    page.refusals = {503}
    with gateway_of(page, f"http://127.0.0.1:{free_ports(1)[0]}", log_level="error") as client:
        for view in ("try", "model"):
            page.open(str(client.base_url), f"#{view}")
            page.see("main .notice:not([hidden])", "No Triton can be reached.")
            assert not visible_tags(page, "main :is(select, table, form)")  # nothing that is empty
        page.open(str(client.base_url), "#live")
        page.see("#live-empty", "No requests since")
        assert not visible_tags(page, "#live-charts, #by-model")
        page.open(str(client.base_url), "#model")
        page.click("#model-view-notice a")  # Open Fleet
        page.see("#fleet-notice", "No Triton can be reached.")
        page.see("#replicas", "Down")


@pytest.mark.long
def test_gateway_that_does_not_answer_is_shown_above_every_view(
    page: browser.Page, triton: tuple[str, Names]
) -> None:
    """And a model that one replica lacks is not shown as ready everywhere."""
    page.refusals = {503, "net::ERR_CONNECTION_REFUSED"}
    port, nobody = free_ports(2)
    arguments = ("serve", "--port", str(port))
    urls = f"{triton[0]},http://127.0.0.1:{nobody}"
    with Command(*arguments, environment={"GATEWAY_TRITON_URLS": urls}) as command:
        command.wait_for("serving")
        page.open(f"http://127.0.0.1:{port}", "#fleet")
        page.see('#models tr[data-key="ensemble"] .warn', "Ready on 1 of 2")
        page.see("#problems", f"127.0.0.1:{nobody} is down: ")
        assert "Requests go to the other replica." in page.text("#problems")
        page.see("#health.warn", "1 of 2")
        assert page.run("return document.title").startswith("(!) ")
    for view in ("fleet", "try", "live"):
        page.run("location.hash = arguments[0]", view)
        page.see("#connection", "The gateway does not answer.")
    assert "What is shown is as of" in page.see("#connection", "as of")
    assert page.all("main.stale")
    page.run("location.hash = 'fleet'")
    page.see("#replicas", "Up")  # what was known, but not as if it were of now
    with Command(*arguments, environment={"GATEWAY_TRITON_URLS": triton[0]}):
        page.until(lambda: not page.all("#connection:not([hidden])"), "an answer")
        assert not page.all("main.stale")
        page.see('#models tr[data-key="ensemble"]', "Ready")
        page.close()


@pytest.mark.long
def test_on_demand_model_is_listed_and_loaded_by_its_first_request(
    page: browser.Page, tmp_path: Path
) -> None:
    first, second = model_names(2)
    state = f'#models tr[data-key="{first}"]'
    with (
        tritons_with(tmp_path, 1, (first, second)) as tritons,
        on_demand_fleet(tritons, max_loaded_models="1") as fleet,
    ):
        page.open(str(fleet.client.base_url), "#fleet")
        page.see(state, "On demand")
        assert not visible_tags(page, "#models .bad")
        page.open(str(fleet.client.base_url))
        page.see("#try-notice", "Choose one: it loads on demand")
        assert not list_held(tritons[0])  # nothing is loaded only because the page is open
        page.see("#model-list", "On demand (2)")
        page.click(f'[data-value="{first}"]')
        page.type("fieldset textarea", "1 2")
        assert fleet.infer(second).status_code == 200  # for which the first one is unloaded
        page.run("location.hash = 'fleet'")
        page.see(state, "On demand")
        page.run("location.hash = 'try'")
        page.see("#model-facts", "The next request loads it")
        page.click("#infer")
        page.see('#response-body [data-output="Y"]', "1 2")
        assert "loads" not in page.text("#model-facts")
        page.run("location.hash = 'fleet'")
        page.see(state, "Ready")
        page.close()


@pytest.mark.long
def test_page_is_light_and_does_not_jump(page: browser.Page, demo_url: str) -> None:
    page.open(demo_url, "#try/ensemble")
    page.find("#infer")
    loaded = page.run(
        "const [usable] = performance.getEntriesByName('usable');"
        "return performance.getEntriesByType('resource')"
        ".filter(({startTime}) => startTime < usable.startTime).map(({name}) => name)"
    )
    assert len(loaded) <= MAX_FIRST_REQUESTS, loaded
    page.run(SHIFT)
    page.choose("file")
    page.choose("draw")
    assert len(page.all(".sample-value img")) == 6
    page.click(".sample-value")
    assert best_label(page) == "7"
    page.all(".sample-value")[1].click()
    page.until(lambda: page.text("#response-body .scores tbody th") == "3", "another answer")
    assert page.run("return window.shift") <= 0.02
    page.run("location.hash = 'try/text_ensemble'")  # which is not the first model of the tab
    page.see("#response-body", "The answer appears here")


@pytest.mark.long
def test_functions_of_the_page_return_these_results(page: browser.Page, demo_url: str) -> None:
    page.open(demo_url)
    for module, function, given, result in RESULTS:
        assert page.module(module, function, *given) == result, given


# The API description, the guide, and a prefix.


@pytest.mark.long
def test_api_description_is_tried_with_the_key_of_the_page(
    page: browser.Page, renamed: RenamedModels
) -> None:
    page.open(renamed.url, "docs", key=INFER)
    page.see("#api", "/v1/models/{model}/infer")
    back = "return getComputedStyle(document.body).backgroundColor"
    light = page.run(back)
    page.dark(True)
    page.until(lambda: page.run(back) != light, "the dark theme")
    page.open(renamed.url, "docs?model=text_ensemble", key=INFER)
    page.see("#api", "text_ensemble")
    page.click(".try-out__btn")
    page.click(".execute")
    page.see(".live-responses-table .response .response-col_status", "200")
    page.see(".live-responses-table", "EMBEDDING")


@pytest.mark.parametrize("view", ["try", "fleet", "docs", "guide"])
def test_page_works_below_the_prefix_of_a_proxy(
    page: browser.Page, demo_url: str, view: str
) -> None:
    """The fixture asserts that the console has no errors, such as of a file outside the prefix."""
    page.refusals = {403}  # without a key, nobody administers through a proxy
    with serve_below_prefix(demo_url.rstrip("/")) as url:
        page.open(url, PREFIX_FRAGMENTS.get(view, f"#{view}"), first_visit=view == "try")
        page.origin = url.removesuffix(PREFIX)
        if view == "docs":
            page.see("#api", "/v1/models/text_ensemble/infer")
            page.click("#api .try-out__btn")
            page.click("#api .execute")
            page.see("#api .request-url", f"{url}/v1/models/text_ensemble/infer")
            page.see("#api .live-responses-table tbody", "200")
            page.click("#model")
            page.see("#model-title", "Sentence")
        elif view == "guide":
            assert page.run("return document.querySelector('.guide img').naturalWidth") > 0
            page.click("#search-button")
            page.type("#search-dialog input", "settings")
            page.click("#search-results a[href$='guide/reference/settings.md']")
            page.see(".guide h1", "Settings")
            page.click(".home a")
            page.see("#model-title", "Handwritten digits")
        elif view == "try":
            assert best_label(page)
            assert f"{url}/v1/models/ensemble/infer" in command(page)
            page.click("#tab-python")
            assert f'Client("{url}"' in command(page, "Client(")
        else:
            page.find("#models tbody tr")
        page.close()
