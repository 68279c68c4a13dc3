"""The documents: their commands are run, and their tables compared with the code."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from gateway.capabilities.installed import SETTINGS
from gateway.config.settings import (
    REMOVED_SETTINGS,
    Settings,
    describe_unknown_settings,
    find_secrets,
    list_setting_names,
)
from tests.interface import names, package
from tests.support.documents import (
    COOKBOOK,
    DOCS,
    DOCUMENTS,
    INTERPRETERS,
    LANGUAGE_MODELS,
    ON_DEMAND,
    OWN_SERVER,
    READMES,
    TOKENS,
    assert_prints,
    assert_prints_its_comment,
    examples,
    programs,
    python_programs,
)
from tests.support.missing import find_program
from tests.support.servers import ROOT
from tests.support.source import setting_descriptions

OF_THEIR_OWN_MODELS = (OWN_SERVER, ON_DEMAND, LANGUAGE_MODELS, COOKBOOK, TOKENS)
# Metrics of tokens, of keys and of samples, which this gateway has not.
ELSEWHERE = r"gateway_(oidc_keys_age_seconds|key_expires_seconds|sample_\w+)"
README = ROOT / "README.md"
OF_THE_DEMO = [path for path in DOCUMENTS if path not in OF_THEIR_OWN_MODELS]


@pytest.mark.parametrize(
    "documents",
    [
        pytest.param([README], id="README"),
        pytest.param(OF_THE_DEMO, id="all", marks=pytest.mark.long),
    ],
)
def test_examples_print_what_the_documents_say(
    demo: httpx.Client, subtests: pytest.Subtests, documents: list[Path]
) -> None:
    assert len(list(examples([README]))) >= 5
    for document, command, answer in examples(documents):
        with subtests.test(document, command=command):
            assert_prints(demo, command, answer)


@pytest.mark.long
def test_programs_in_tabs_print_their_comments(
    demo: httpx.Client, subtests: pytest.Subtests
) -> None:
    found = list(programs(OF_THE_DEMO))
    assert len(found) >= 8
    for document, language, program in found:
        with subtests.test(document, language=language):
            interpreter = INTERPRETERS[language][0]
            find_program(interpreter, "nodejs" if interpreter == "node" else "")
            assert_prints_its_comment(demo, language, program)


@pytest.mark.long
def test_programs_of_the_python_client_print_their_comments(
    demo: httpx.Client, subtests: pytest.Subtests
) -> None:
    found = [
        program
        for path in (DOCS / "use/python.md", DOCS / "start/migrate.md", README)
        for program in python_programs(path)
    ]
    assert len(found) >= 8
    for number, program in enumerate(found):
        with subtests.test(number=number):
            assert_prints_its_comment(demo, "Python", program)


def test_documented_errors_are_those_of_the_gateway() -> None:
    package.import_all()
    assert {*names.list_codes()} == {*package.list_codes()}


SETTINGS_PAGES = ("settings", "settings-advanced")
MAX_SETTINGS = 68  # a new one replaces another, or goes into the models file or a model's config


def test_documented_settings_are_those_of_the_gateway() -> None:
    rows = re.findall(
        r"^\| `GATEWAY_(\w+)` \| `?([^|]*?)`? \| (.*) \|$",
        "".join((DOCS / f"reference/{page}.md").read_text() for page in SETTINGS_PAGES),
        re.MULTILINE,
    )
    documented = {name.lower(): text for name, _, text in rows}
    described = setting_descriptions()
    assert described.keys() == set(list_setting_names(*SETTINGS))
    assert len(described) <= MAX_SETTINGS
    removed = {name.removeprefix("GATEWAY_").lower() for name in REMOVED_SETTINGS}
    assert not removed & described.keys()
    assert documented == {name: " ".join(text.split()) for name, text in described.items()}


def test_each_secret_can_be_in_a_file() -> None:
    names = list_setting_names(*SETTINGS)
    secrets = find_secrets(Settings, *SETTINGS)
    assert {"state_password", "triton_restricted_api"} < secrets
    variables = [f"GATEWAY_{name}_FILE".upper() for name in secrets if f"{name}_file" not in names]
    assert len(variables) == len(secrets)
    assert describe_unknown_settings(variables, *SETTINGS) == []
    documented = (DOCS / "reference/settings.md").read_text()
    assert not [name for name in variables if f"`{name}`" not in documented]


def heading_anchors(path: Path) -> set[str]:
    """Return the anchors of a Markdown file's headings, as GitHub derives them."""
    prose = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    words = (re.sub(r"[^\w\- ]", "", title.strip().lower()) for title in titles)
    return {text.replace(" ", "-") for text in words}


def test_links_between_documents_lead_to_files_and_headings() -> None:
    for path in [*DOCUMENTS, *READMES, *ROOT.glob("*.md")]:
        for target, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", path.read_text()):
            found = path.parent / target if target else path
            assert found.exists(), f"{path}: {target}"
            assert not anchor or anchor in heading_anchors(found), f"{path}: {target}#{anchor}"


def test_documented_metrics_are_those_of_the_gateway(demo: httpx.Client) -> None:
    rows = re.findall(
        r"^\| `(gateway_\w+)` \| (\w+) \| [^|]* \| (.*) \|$",
        (ROOT / "docs/operate/metrics.md").read_text(),
        re.MULTILINE,
    )
    documented = {
        name: (kind, text) for name, kind, text in rows if not re.fullmatch(ELSEWHERE, name)
    }
    page = demo.get("/metrics").text
    kinds = dict(re.findall(r"^# TYPE (gateway_\w+) (\w+)$", page, re.MULTILINE))
    texts = dict(re.findall(r"^# HELP (gateway_\w+) (.*)$", page, re.MULTILINE))
    assert documented == {name: (kind, texts[name]) for name, kind in kinds.items()}


def test_files_that_the_architecture_names_exist() -> None:
    files = ["/" + path.relative_to(ROOT).as_posix() for path in ROOT.glob("gateway/**/*")]
    files += ["/" + path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/**/*.py")]
    text = (ROOT / "docs/contribute/architecture.md").read_text()
    named = set(re.findall(r"(?:[a-z_0-9]+/)*[a-z_0-9]+\.py\b|(?<=`)(?:[a-z_0-9]+/)+(?=`)", text))
    assert len(named) > 50
    missing = [
        name for name in named if not any(f"{f}/".endswith(f"/{name.rstrip('/')}/") for f in files)
    ]
    assert not missing
