"""Merging metrics pages, without a server: Prometheus' client judges what comes out."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.telemetry.exposition import (
    Families,
    InvalidExposition,
    PageCache,
    PageFormat,
    decode_page,
    encode_page,
    merge_families,
    parse_families,
    split_page_lines,
)
from tests.support.exposition_pages import (
    CLASHES,
    ESCAPED_HELP,
    HISTOGRAM,
    NOT_THE_GATEWAYS,
    OWN,
    TWO_OF_A_NAME,
    alone,
    left_out,
    line,
    merged,
    samples,
    whole,
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
    assert "".join(encode_page(families, PageFormat.PROMETHEUS_TEXT)).endswith(
        'a{replica="x\\"\\\\\\n"} 1\n'
    )


SAMPLES = (
    ("a 1", "a 1"),
    ("a  1  ", "a 1"),
    ("\ta\t1", "a 1"),
    ("a{} 1", "a 1"),
    ('a{x="1"}2', 'a{x="1"} 2'),
    ('a { x = "1" , y="2", } 3', 'a{x="1",y="2"} 3'),
    ('a{x="} 5",y="{"} 3', 'a{x="} 5",y="{"} 3'),
    ('a{x="\\"} 7 # {"} 3', 'a{x="\\"} 7 # {"} 3'),
    ('a{x="\\\\"} 3', 'a{x="\\\\"} 3'),
    ('a{x=" \u2028\x85\x0c\r "} 3', 'a{x=" \u2028\x85\x0c\r "} 3'),
    ("a:b_1 00012", "a:b_1 00012"),
    ("a 1.50000", "a 1.50000"),
    ("a -1e+09", "a -1e+09"),
    ("a .5 -12", "a .5 -12"),
    ("a Nan", "a Nan"),
    ("a +Inf", "a +Inf"),
    ("a -infinity 1700000000000", "a -infinity 1700000000000"),
    ('a_total 1 # {id="x"} 0.5', "a_total 1"),
    ('a_total 1 1700000000123 # {id="} # {"} 0.5 17.25', "a_total 1 1700000000123"),
)


def test_sample_keeps_its_value_and_time(subtests: pytest.Subtests) -> None:
    for sample, written in SAMPLES:
        with subtests.test(sample):
            page = alone(f"# a comment\n\n \n{sample}\n")
            assert page.splitlines()[-1] == written or page.endswith(f"\n{written}\n")


INVALID_PAGES = (
    "<html>\n",
    '{"error": "not found"}\n',
    "a\n",
    "a one\n",
    "a 1",
    "a 1 2 3\n",
    "a 1 1.5\n",
    "a 1\r\n",
    "1a 1\n",
    "a-b 1\n",
    "a{x=1} 1\n",
    'a{x="1" 1\n',
    'a{x="1"y="2"} 1\n',
    'a{x="1",,y="2"} 1\n',
    'a{x="1\n',
    'a{x="\\q"} 1\n',
    'a{x="1",x="2"} 1\n',
    'a{__name__="b"} 1\n',
    'a{x-y="1"} 1\n',
    'a{x="1"}} 1\n',
    '{"a.b",x="1"} 1\n',
    'a 1 # {x="1} 1\n',
    "a 1_000\n",
    "a 0x10\n",
    "a ١\n",
    "a -nan\n",
    "a 1e999\n",
    "a 1" + 400 * "0" + ".\n",
    "a \n",
    'a{x="1"}\n',
    'a{x="\0"} 1\n',
    "# TYPE a\na 1\n",
    "# TYPE a number\na 1\n",
    "# TYPE a-b gauge\n",
    "a 1\n# TYPE a gauge\n",
    "# TYPE a gauge\n# TYPE a counter\n",
    "a{" + 70_000 * "x" + "\n",
)


def test_page_that_prometheus_refuses_is_invalid(subtests: pytest.Subtests) -> None:
    for page in INVALID_PAGES:
        with subtests.test(page[:40]), pytest.raises(InvalidExposition):
            alone(page)
    with pytest.raises(InvalidExposition, match="UTF-8"):
        decode_page(b"a 1\n\xff\n")
    with pytest.raises(InvalidExposition, match="line 3: invalid value"):
        alone("# HELP a b\na 1\na x\n")


@pytest.mark.parametrize(
    "line_of",
    [
        lambda size: "a{" + "x" * size,
        lambda size: 'a{x="' + '\\"' * (size // 2),
        lambda size: "a{" + 'x="",' * (size // 5),
        lambda size: "{" * size,
    ],
    ids=["a name", "escapes", "labels", "braces"],
)
def test_cost_of_an_invalid_line_is_linear(line_of: Callable[[int], str]) -> None:
    """A line of 64,000 characters is read to its end, and a longer one is not."""

    def reading(size: int) -> Callable[[], None]:
        page = f"{line_of(size)}\n"

        def refuse() -> None:
            with pytest.raises(InvalidExposition):
                alone(page)

        return refuse

    assert_linear(reading, 8_000)
    reading(5_000_000)()


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


def is_read_in_both_forms(*pages: str, own: str = "") -> bool:
    return all(samples(merged(*pages, own=own, form=form), form) for form in PageFormat)


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
    assert is_read_in_both_forms(*pages, own=own)
    for replica, names in lost.items():
        for name in names:
            assert f'\n{name}{{replica="{replica}"' not in merged(*pages, own=own)
    if not lost:
        total = sum(samples(page).total() for page in pages)
        assert samples(merged(*pages)).total() == total


# OpenMetrics.


def test_openmetrics_counter_without_total_is_of_unknown_type() -> None:
    page = merged(TRITON, form=PageFormat.OPEN_METRICS)
    assert page.endswith("\n# EOF\n")
    assert "# TYPE nv_inference_request_success unknown\n" in page
    assert "# TYPE nv_cpu_utilization gauge\n" in page
    classic = samples(merged(TRITON))
    as_read = {(str(name).removesuffix("_total"), *rest) for name, *rest in classic}
    assert set(samples(page, PageFormat.OPEN_METRICS)) == as_read
    page = "# TYPE _total counter\n_total 1\n"
    assert alone(page, PageFormat.OPEN_METRICS) == "# TYPE _total unknown\n_total 1\n# EOF\n"


UNKNOWN_HISTOGRAM = (
    '# TYPE h_bucket unknown\nh_bucket{le="0.5"} 1\nh_bucket{le="+Inf"} 2\n'
    "# TYPE h_sum unknown\nh_sum 3\n# TYPE h_count unknown\nh_count 2\n"
)
OPENMETRICS_PAGES = {
    "counters with times of creation": (
        (
            "# HELP g_x_total What it is.\n# TYPE g_x_total counter\n"
            'g_x_total{a="1"} 1\ng_x_total{a="2"} 2\n'
            "# HELP g_x_created What it is.\n# TYPE g_x_created gauge\n"
            'g_x_created{a="1"} 5\ng_x_created{a="2"} 6\n'
        ),
        (
            "# TYPE g_x counter\n# HELP g_x What it is.\n"
            'g_x_total{a="1"} 1\ng_x_created{a="1"} 5\ng_x_total{a="2"} 2\ng_x_created{a="2"} 6\n'
        ),
    ),
    # The sums of several workers' metrics are in another order.
    "samples of a metric that are not together": (
        (
            '# TYPE h histogram\nh_sum{x="1"} 1\nh_sum{x="2"} 1\n'
            'h_bucket{x="1",le="1.0"} 1\nh_bucket{x="2",le="1.0"} 1\n'
            'h_bucket{x="1",le="+Inf"} 1\nh_bucket{x="2",le="+Inf"} 1\n'
            'h_count{x="1"} 1\nh_count{x="2"} 1\n'
        ),
        (
            "# TYPE h histogram\n"
            'h_sum{x="1"} 1\nh_bucket{x="1",le="1.0"} 1\nh_bucket{x="1",le="+Inf"} 1\nh_count{x="1"} 1\n'
            'h_sum{x="2"} 1\nh_bucket{x="2",le="1.0"} 1\nh_bucket{x="2",le="+Inf"} 1\nh_count{x="2"} 1\n'
        ),
    ),
    "a counter and a gauge of one name": (
        "# TYPE a_total counter\na_total 1\n# TYPE a gauge\na 1\n",
        "# TYPE a_total unknown\na_total 1\n# TYPE a gauge\na 1\n",
    ),
    "a histogram and its time of creation": (
        HISTOGRAM + '# TYPE h_created gauge\nh_created{x="1"} 1\n',
        UNKNOWN_HISTOGRAM + '# TYPE h_created gauge\nh_created{x="1"} 1\n',
    ),
    "a histogram and an untyped metric of one name": (
        HISTOGRAM + "h 1\n",
        UNKNOWN_HISTOGRAM + "# TYPE h unknown\nh 1\n",
    ),
    "a histogram without an infinite bucket": (
        HISTOGRAM.replace("+Inf", "7.0"),
        UNKNOWN_HISTOGRAM.replace("+Inf", "7.0"),
    ),
    "a summary": (
        "# TYPE s summary\ns_sum 1\ns_count 1\n",
        "# TYPE s summary\ns_sum 1\ns_count 1\n",
    ),
    # Times are seconds, and only counters have exemplars.
    "times and exemplars": (
        (
            '# TYPE a_total counter\na_total 1 1700000000123 # {id="} # {"} 0.5 17.25\n'
            '# TYPE b gauge\nb 1 -5 # {id="x"} 0.5\n'
        ),
        (
            '# TYPE a counter\na_total 1 1700000000.123 # {id="} # {"} 0.5 17.25\n'
            "# TYPE b gauge\nb 1 -0.005\n"
        ),
    ),
    "help to escape and a unit": (
        ESCAPED_HELP,
        (
            "# TYPE a_seconds gauge\n# UNIT a_seconds seconds\n"
            '# HELP a_seconds A \\"quote\\", a \\\\ and a \\n, and what is \\no \\\\\\"escape\\\\\n'
            "a_seconds 1\n# TYPE b unknown\nb 1\n"
        ),
    ),
}


def test_openmetrics_page_follows_its_own_rules(subtests: pytest.Subtests) -> None:
    for name, (page, written) in OPENMETRICS_PAGES.items():
        with subtests.test(name):
            out = alone(page, PageFormat.OPEN_METRICS)
            assert out == f"{written}# EOF\n"
            assert samples(out, PageFormat.OPEN_METRICS).total() == samples(page).total()


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
    unnamed = Counter({(str(name).removesuffix("_total"), *rest) for name, *rest in union})
    found = samples(merged(*pages, form=PageFormat.OPEN_METRICS), PageFormat.OPEN_METRICS)
    assert Counter({(str(name).removesuffix("_total"), *rest) for name, *rest in found}) == unnamed
    for page in pages:
        once = alone(page)
        assert alone(once) == once


# One server's pages, one after the other.

OTHER_VALUES = st.sampled_from(
    ["0", "17", "2.5", "-1.25e+09", "NaN", "+Inf", "1e400", "1 2000", "x", ""]
)
ENDS = re.compile(r" [^ \n]+$", re.MULTILINE)


@given(PAGES, st.lists(st.lists(OTHER_VALUES, min_size=1), min_size=1, max_size=4))
def test_next_page_of_a_server_is_parsed_like_the_first(page: str, values: list[list[str]]) -> None:
    layout = PageCache()
    assert layout.parse_page(page.encode(), "r0") == whole(page, "r0")
    for drawn in values:
        other = with_values(page, drawn)
        assert outcome(lambda: layout.parse_page(other.encode(), "r0")) == outcome(  # noqa: B023
            lambda: whole(other, "r0")  # noqa: B023
        )


def with_values(page: str, values: list[str]) -> str:
    """The page with these values in turn."""
    following = itertools.cycle(values)
    return ENDS.sub(lambda _: f" {next(following)}", page)


def outcome(reading: Callable[[], Families]) -> Families | str:
    try:
        return reading()
    except InvalidExposition as exc:
        return str(exc)


def test_next_page_of_the_same_layout_is_not_parsed_line_by_line() -> None:
    page = of_models(200)
    layout = PageCache()
    layout.parse_page(page, "r0")

    def never(lines: list[str]) -> list[str]:
        raise AssertionError("line by line")

    other = re.sub(rb" [0-9.]+\n", b" 12345.678\n", page)
    assert other != page
    assert layout.parse_page(other, "r0", never) == whole(other.decode(), "r0")
    with pytest.raises(AssertionError, match="line by line"):
        layout.parse_page(other + b"more 1\n", "r0", never)


@pytest.mark.parametrize(
    "page",
    [
        "# HELP a of 5\na 5\n", "# HELP a of 5\na NaN\n", "a 5\na 6 7\n", "a 1\nb 1\na 2\n",
        "a 5\n# 5\n", "# a 5\na 6\n", "a{x=\"b 5\"} 5\n", "a 5\n\n\nb 6\n", "a  5\n b 6\n", "",
    ],
)  # fmt: skip
def test_numbers_outside_values_may_change_in_the_next_page(page: str) -> None:
    layout = PageCache()
    for text in (page, page, page.replace("5", "8"), page.replace("6", "9"), page):
        assert layout.parse_page(text.encode(), "r0") == whole(text, "r0")


@pytest.mark.parametrize("form", list(PageFormat))
def test_cost_of_merging_is_linear(form: PageFormat) -> None:
    """Three replicas with up to 200 models."""

    def merging(models: int) -> Callable[[], int]:
        page = of_models(models)

        def merge_three() -> int:
            pages = {
                name: parse_families(split_page_lines(decode_page(page)), name)
                for name in ("r0", "r1", "r2")
            }
            families = merge_families({}, pages).families
            return sum(len(piece) for piece in encode_page(families, form))

        return merge_three

    assert of_models(200).count(b"\n") > 2500
    assert_linear(merging, 25)
