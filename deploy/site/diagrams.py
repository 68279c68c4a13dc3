"""Draw the diagrams of docs/ as SVG, which the guide shows: python -m deploy.site.diagrams MERMAID.

MERMAID is mermaid.min.js; Chromium runs it. A picture is named after its page and its place in it, and the
hash of its source is in a comment, so that a test notices a diagram that was changed without it.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

DOCS: Final = Path(__file__).parents[2] / "docs"
PICTURES: Final = DOCS / "diagrams"
DIAGRAM: Final = re.compile(r"^```mermaid\n(.*?)^```$", re.DOTALL | re.MULTILINE)
DRAW: Final = """
    const [source, done] = arguments;
    const labels = {htmlLabels: false};
    mermaid.initialize({startOnLoad: false, theme: "neutral", ...labels, flowchart: labels});
    mermaid.render("diagram", source).then(({svg}) => done(svg), (error) => done(String(error)));
"""


def list_diagrams() -> Iterator[tuple[Path, str]]:
    """Yield each diagram of the documents as its picture's path and its source."""
    for page in sorted(DOCS.rglob("*.md")):
        name = "-".join(page.relative_to(DOCS).with_suffix("").parts)
        for number, source in enumerate(DIAGRAM.findall(page.read_text("utf-8")), 1):
            yield PICTURES / f"{name}-{number}.svg", source


def describe_source(source: str) -> str:
    return f"<!-- {hashlib.sha256(source.encode()).hexdigest()} -->\n"


def main(mermaid: Path) -> None:
    shutil.rmtree(PICTURES, ignore_errors=True)
    PICTURES.mkdir()
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.binary_location = shutil.which("chromium") or ""
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver") or ""))
    try:
        # A script of the page, because its top-level variables are those of the function otherwise.
        driver.execute_cdp_cmd("Runtime.evaluate", {"expression": mermaid.read_text("utf-8")})
        for path, source in list_diagrams():
            svg = str(driver.execute_async_script(DRAW, source))
            if not svg.startswith("<svg"):
                raise SystemExit(f"{path.name}: {svg}")
            path.write_text(describe_source(source) + svg + "\n", "utf-8")
    finally:
        driver.quit()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
