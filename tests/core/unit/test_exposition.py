"""Merging metrics pages, without a server: Prometheus' client judges what comes out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.telemetry.exposition import (
    InvalidExposition,
    encode_page,
    merge_families,
    parse_families,
    split_page,
)
from tests.support.exposition_pages import (
    CLASHES,
    NOT_THE_GATEWAYS,
    OWN,
    TWO_OF_A_NAME,
    alone,
    left_out,
    line,
    merged,
    samples,
)
from tests.support.linearity import assert_linear
from tests.support.tools import TRITON, of_models

# One page.


def test_each_sample_of_a_replica_gets_the_label_replica() -> None:
    expected = []
    for written in TRITON.splitlines():
        if written.startswith("#"):
            expected.append(written)
        elif "{" in written:
            expected.append(written.replace("{", '{replica="r0",', 1))
        else:
            expected.append(written.replace(" ", '{replica="r0"} ', 1))
    assert merged(TRITON).splitlines() == expected
    assert alone(TRITON) == TRITON
    # An existing label is renamed, and the value escaped.
    assert 'a{replica="r0",exported_replica="x"} 1\n' in merged('a{replica="x"} 1\n')
    both = 'a{exported_replica="y",replica="x"} 1\n'
    assert 'a{replica="r0",exported_replica="y",exported_exported_replica="x"} 1\n' in merged(both)
    families = parse_families(["a 1"], 'x"\\\n')
    assert "".join(encode_page(families)).endswith('a{replica="x\\"\\\\\\n"} 1\n')


SAMPLES = (
    "a:b_1 00012",
    "a 1.50000",
    "a -1e+09",
    "a 5 -12",
    "a Nan",
    "a NaN",
    "a +Inf",
    "a -Inf 1700000000000",
    'a{x="1",y="2"} 3',
    'a{x="} 5",y="{"} 3',
    'a{x="\\"} 7 # {"} 3',
    'a{x="\\\\"} 3',
    'a{x=" \u2028\x85\x0c\r "} 3',
)


def test_sample_keeps_its_value_and_time(subtests: pytest.Subtests) -> None:
    for sample in SAMPLES:
        with subtests.test(sample):
            assert alone(f"# a comment\n\n{sample}\n").endswith(f"\n{sample}\n")


INVALID_PAGES = (
    "<html>\n",
    '{"error": "not found"}\n',
    "a\n",
    "a one\n",
    "a 1",
    "a 1 2 3\n",
    "a 1 1.5\n",
    "a 1\r\n",
    "a 1 # {} 1\n",
    "1a 1\n",
    "a-b 1\n",
    "a{x=1} 1\n",
    'a{x="1" 1\n',
    'a{x="1"y="2"} 1\n',
    'a{x="1",,y="2"} 1\n',
    'a{x="1\n',
    'a{x="\\q"} 1\n',
    'a{x-y="1"} 1\n',
    'a{x="1"}} 1\n',
    '{"a.b",x="1"} 1\n',
    "a 1_000\n",
    "a 0x10\n",
    "a ١\n",
    "a -nan\n",
    "a \n",
    'a{x="1"}\n',
    'a{x="\0"} 1\n',
    "# TYPE a\na 1\n",
    "# TYPE a number\na 1\n",
    "a 1\n# TYPE a gauge\n",
    "# TYPE a gauge\n# TYPE a counter\n",
    "a{" + 70_000 * "x" + "\n",
)


def test_page_that_prometheus_refuses_is_invalid(subtests: pytest.Subtests) -> None:
    for page in INVALID_PAGES:
        with subtests.test(page[:40]), pytest.raises(InvalidExposition):
            alone(page)
    with pytest.raises(InvalidExposition, match="UTF-8"):
        split_page(b"a 1\n\xff\n")
    with pytest.raises(InvalidExposition, match="line 3: not a valid sample"):
        alone("# HELP a b\na 1\na x\n")


# Several pages.


def test_merged_families_are_complete_and_described_once() -> None:
    page = merged(TRITON, TRITON, TRITON, own="# TYPE gateway_x gauge\ngateway_x 1\n")
    described = [line.split()[1:3] for line in page.splitlines() if line.startswith("#")]
    assert len({tuple(words) for words in described}) == len(described)
    families: list[str] = []
    for each in page.splitlines():
        name = each.split()[2] if each.startswith("#") else each.split("{")[0].split(" ")[0]
        if families[-1:] != [name]:
            families.append(name)
    assert len(families) == len(set(families))
    assert families[0] == "gateway_x"
    # The first description counts, and a family may be in one page only.
    page = merged(
        "# TYPE a gauge\na 1\n", "# HELP a It.\n# TYPE a gauge\n# TYPE b gauge\nb 2\na 3\n"
    )
    assert page == (
        '# TYPE a gauge\na{replica="r0"} 1\na{replica="r1"} 3\n# TYPE b gauge\nb{replica="r1"} 2\n'
    )


@pytest.mark.parametrize(
    ("own", "pages", "lost"),
    [
        *(("", (first, second), {"r1": lost} if lost else {}) for first, second, lost in CLASHES),
        (OWN, (NOT_THE_GATEWAYS,), {"r0": ["gateway_scrape_up"]}),
        ("", (TWO_OF_A_NAME, TWO_OF_A_NAME), {}),
    ],
)
def test_family_that_contradicts_an_earlier_page_is_left_out(
    own: str, pages: tuple[str, ...], lost: dict[str, list[str]]
) -> None:
    assert left_out(own, *pages) == lost
    assert samples(merged(*pages, own=own))
    for replica, names in lost.items():
        for name in names:
            assert f'\n{name}{{replica="{replica}"' not in merged(*pages, own=own)
    if not lost:
        total = sum(samples(page).total() for page in pages)
        assert samples(merged(*pages)).total() == total


# Any page.

WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
NUMBERS = st.integers(0, 1 << 40) | st.floats(0, 1e12).map(lambda value: round(value, 3))
# A page that has both a `replica` and an `exported_replica` of some series' own has them in all, or else
# two series could become one, as they do in Prometheus.
LABELS = st.dictionaries(st.sampled_from(["x", "model", "replica"]), WORDS) | st.fixed_dictionaries(
    {"replica": WORDS, "exported_replica": WORDS}
)


def described(name: str, kind: str, lines: Sequence[str]) -> str:
    return "".join([f"# HELP {name} It.\n# TYPE {name} {kind}\n", *lines])


@st.composite
def simple_families(draw: st.DrawFn, name: str) -> str:
    kind = {"c": "counter", "t": "counter", "g": "gauge"}[name[0]]
    unique = st.lists(LABELS, max_size=4, unique_by=lambda labels: frozenset(labels.items()))
    return described(name, kind, [line(name, labels, draw(NUMBERS)) for labels in draw(unique)])


@st.composite
def histograms(draw: st.DrawFn, name: str) -> str:
    unique = st.lists(LABELS, max_size=3, unique_by=lambda labels: frozenset(labels.items()))
    lines = []
    for labels in draw(unique):
        low, more = draw(st.integers(0, 1000)), draw(st.integers(0, 1000))
        for le, count in (("0.5", low), ("+Inf", low + more)):
            lines.append(line(f"{name}_bucket", {**labels, "le": le}, count))
        lines.append(line(f"{name}_sum", labels, draw(NUMBERS)))
        lines.append(line(f"{name}_count", labels, low + more))
    return described(name, "histogram", lines)


FAMILIES = {
    **{name: simple_families(name) for name in ("c1", "c2", "t1_total", "t2_total", "g1", "g2")},
    **{name: histograms(name) for name in ("h1", "h2")},
}
PAGES = st.lists(st.sampled_from(sorted(FAMILIES)), unique=True, max_size=5).flatmap(
    lambda names: st.tuples(*(FAMILIES[name] for name in names)).map("".join)
)


def expected(page: str, replica: str) -> Iterator[tuple[object, ...]]:
    """Yield the page's own samples with the label, as the client reads them."""
    for name, labels, value in samples(page).elements():
        changed = dict(labels)  # type: ignore[call-overload]
        if "replica" in changed:
            moved = "exported_replica"
            while moved in changed:
                moved = f"exported_{moved}"
            changed[moved] = changed.pop("replica")
        yield name, frozenset({**changed, "replica": replica}.items()), value


@given(st.lists(PAGES, min_size=1, max_size=3))
@example([line("g1", {"x": '} 1 # {x="'}, 1)])
@example([line("g1", {"x": "\u2028\x85\r\x1c\\n\n\\"}, 1)])
def test_merged_page_has_the_samples_of_all_pages(pages: list[str]) -> None:
    union = Counter(
        sample for number, page in enumerate(pages) for sample in expected(page, f"r{number}")
    )
    assert samples(merged(*pages)) == union
    assert merged(*pages) == merged(*pages)
    for page in pages:
        once = alone(page)
        assert alone(once) == once


def test_cost_of_merging_is_linear() -> None:
    """Three replicas with up to 200 models."""

    def merging(models: int) -> Callable[[], int]:
        page = of_models(models)

        def merge_three() -> int:
            pages = {name: parse_families(split_page(page), name) for name in ("r0", "r1", "r2")}
            families = merge_families({}, pages).families
            return sum(len(piece) for piece in encode_page(families))

        return merge_three

    assert of_models(200).count(b"\n") > 2500
    assert_linear(merging, 25)
