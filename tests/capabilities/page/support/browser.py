"""A real Chromium, headless, driven by Selenium; it downloads nothing, and tells what it asked for."""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeVar, cast

import pytest
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException, WebDriverException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

from tests.support.missing import APT, format_reason
from tests.support.servers import ROOT

CHROMIUM, DRIVER = (shutil.which(name) or "" for name in ("chromium", "chromedriver"))
is_required = pytest.mark.skipif(
    not (CHROMIUM and DRIVER),
    reason=format_reason(
        "chromium" if not CHROMIUM else "chromedriver", f"{APT}chromium chromium-driver"
    ),
)
# Drawn as a person would, from the middle of the sheet.
SEVEN = ((-70, -80), (0, -82), (60, -80), (30, -10), (0, 50), (-20, 90))
AXE = ROOT / "tests" / "data" / "axe-core" / "axe.min.js"
FIND_FAULTS = """
    const [rules, done] = arguments;
    const options = {resultTypes: ["violations"], ...(rules.length ? {runOnly: rules} : {})};
    axe.run(options).then(({violations}) => done(violations));
"""
PATIENCE_S = 60  # guards against a hang alone
T = TypeVar("T")
ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",  # which a container's root has not
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--no-first-run",
    "--no-proxy-server",
    "--disable-background-networking",
    "--disable-component-update",
    "--force-device-scale-factor=1",
    "--hide-scrollbars",
    # Each navigation would start a process for the next one, or keep the last page alive.
    "--disable-features=SpareRendererForSitePerProcess,BackForwardCache",
    "--disable-extensions",
    "--window-size=1200,1000",
)


class Page:
    """A tab, by what its user sees."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver
        # Statuses and failures of the network that a test provokes, which the console reports.
        self.refusals: set[int | str] = set()
        self.origin = ""

    def open(
        self, origin: str, fragment: str = "", key: str = "", *, first_visit: bool = False
    ) -> None:
        """Anew, with nothing of the last test left. The first visit of a tab runs an example."""
        self.origin = origin.rstrip("/")
        self.close()
        kept = f"sessionStorage.setItem('triton-gateway-key', {json.dumps(key)})" if key else ""
        visited = "" if first_visit else "sessionStorage.setItem('triton-gateway-visited', '1')"
        before = {"source": f"sessionStorage.clear(); {visited}; {kept}"}
        script = self.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", before)
        self.driver.get(f"{self.origin}/{fragment}")
        self.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", script)

    def close(self) -> None:
        """Nothing is asked for from here on."""
        self.driver.get("about:blank")

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def module(self, name: str, function: str, *given: Any) -> Any:
        """Return the result of a function of one of the page's modules, which gets `given`."""
        return self.driver.execute_async_script(
            f"const given = [...arguments], done = given.pop();"
            f"import('/static/{name}').then({function}).then(done, (error) => done(String(error)));",
            *given,
        )

    def find(self, css: str) -> WebElement:
        """Return the element as soon as it is shown."""
        return self.until(
            lambda: next((one for one in self.all(css) if one.is_displayed()), None), css
        )

    def all(self, css: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, css)

    def text(self, css: str) -> str:
        return self.find(css).text

    def see(self, css: str, words: str) -> str:
        """Wait for these words, and give the whole text."""
        return self.until(lambda: words in (text := self.text(css)) and text, f"{css}: {words}")

    def until(self, condition: Callable[[], T | Literal[False] | None], what: str) -> T:
        """Wait until the condition is true, and give what it is."""
        ignored = (StaleElementReferenceException,)
        wait = WebDriverWait(self.driver, PATIENCE_S, 0.1, ignored_exceptions=ignored)
        try:
            return cast(T, wait.until(lambda _: condition()))
        except WebDriverException as exc:
            shown = self.driver.find_element(By.TAG_NAME, "body").text
            raise AssertionError(f"it did not appear: {what}\n{shown}\n{self.console()}") from exc

    def click(self, css: str) -> None:
        self.find(css).click()

    def type(self, css: str, text: str) -> None:
        self.find(css).send_keys(text)

    def choose(self, value: str, within: str = "") -> None:
        """Choose a segment, whose radio button is invisible."""
        self.click(f"{within} label:has(> input[value='{value}'])")

    def select_files(self, css: str, *paths: Path) -> None:
        """Choose files for an input, which may be invisible."""
        self.until(lambda: self.all(css), css)[0].send_keys("\n".join(map(str, paths)))

    def drop_files(self, css: str, **files: bytes) -> None:
        """Drop files on an element, as a person would."""
        self.run(
            """
            const dropped = new DataTransfer();
            for (const [name, text] of Object.entries(arguments[1])) {
                const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
                const type = name.endsWith(".png") ? "image/png" : "";
                dropped.items.add(new File([bytes], name, {type}));
            }
            const how = {dataTransfer: dropped, bubbles: true, cancelable: true};
            document.querySelector(arguments[0]).dispatchEvent(new DragEvent("drop", how));
            """,
            css,
            {name: base64.b64encode(content).decode() for name, content in files.items()},
        )

    def drag(self, css: str, *points: tuple[int, int]) -> None:
        """Drag the mouse through points relative to the middle of the element."""
        element = self.find(css)
        chain = ActionChains(self.driver, duration=30)
        chain.move_to_element_with_offset(element, *points[0]).click_and_hold()
        for point in points[1:]:
            chain.move_to_element_with_offset(element, *point)
        chain.release().perform()

    def console(self) -> list[str]:
        """Return the warnings and errors of the console, without the refusals that a test provoked."""
        expected = tuple(
            one if isinstance(one, str) else f"status of {one}" for one in self.refusals
        )
        entries = self.driver.get_log("browser")  # type: ignore[no-untyped-call]
        lines = [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]
        return [line for line in lines if not any(words in line for words in expected)]

    def requests(self) -> list[tuple[str, bool]]:
        """The URL of each request since the last call, and whether it had a key."""
        entries = self.driver.get_log("performance")  # type: ignore[no-untyped-call]
        messages = [json.loads(entry["message"])["message"] for entry in entries]
        sent = [
            each["params"]["request"]
            for each in messages
            if each["method"] == "Network.requestWillBeSent"
        ]
        return [(each["url"], "Authorization" in each["headers"]) for each in sent]

    def origins(self) -> set[str]:
        """The origins of all requests since the last call."""
        urls = [url for url, _ in self.requests() if url.startswith(("http", "ws"))]
        return {"/".join(url.split("/")[:3]) for url in urls}

    def clipboard(self, *, allowed: bool) -> None:
        """Set whether this page may read and write the clipboard; its user always may copy and paste."""
        for name in ("clipboard-read", "clipboard-write"):
            setting = "granted" if allowed else "denied"
            how = {"permission": {"name": name}, "setting": setting, "origin": self.origin}
            self.driver.execute_cdp_cmd("Browser.setPermission", how)

    def copied(self) -> str:
        return str(self.run("return navigator.clipboard.readText()"))

    def copy_image(self, png: bytes) -> None:
        self.driver.execute_async_script(
            """
            const [text, done] = arguments;
            const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
            const image = new ClipboardItem({"image/png": new Blob([bytes], {type: "image/png"})});
            navigator.clipboard.write([image]).then(done, (error) => done(String(error)));
            """,
            base64.b64encode(png).decode(),
        )

    def dark(self, on: bool) -> None:
        """Set the theme, without motion: a colour on its way to another one has too little contrast."""
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if on else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    @contextmanager
    def screen(self, width: int, height: int) -> Iterator[None]:
        """A screen of this size; a narrow one is that of a phone, with a finger."""
        is_phone = width < 600
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": is_phone}
        touch = "Emulation.setTouchEmulationEnabled"
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.driver.execute_cdp_cmd(touch, {"enabled": is_phone})
        try:
            yield
        finally:
            self.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
            self.driver.execute_cdp_cmd(touch, {"enabled": False})

    def faults(self, *rules: str) -> list[str]:
        """Return the serious and critical findings of axe-core, by all its rules or these."""
        self.run(f"if (!window.axe) {{ {AXE.read_text()} }}")
        found = self.driver.execute_async_script(FIND_FAULTS, rules)
        return [
            f"{one['id']}: {node['html']} {node['failureSummary']}"
            for one in found
            if one["impact"] in ("serious", "critical")
            for node in one["nodes"]
        ]


@contextmanager
def chromium(profile: Path) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (*ARGUMENTS, f"--user-data-dir={profile}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    # Chromium makes a Unix socket in it, whose path has at most 107 bytes.
    with TemporaryDirectory(dir="/tmp") as folder:
        service = Service(DRIVER, env={**os.environ, "TMPDIR": folder})
        driver = webdriver.Chrome(options=options, service=service)
        driver.set_script_timeout(PATIENCE_S)
        try:
            yield driver
        finally:
            driver.quit()
