"""`GET /metrics` before a fleet: three real tritonservers, a real Prometheus, and replicas that misbehave."""

from __future__ import annotations

import gzip
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from gateway.routes.metrics import parse_scrape_timeout
from gateway.services import MAX_METRICS_PAGES
from gateway.telemetry.exposition import CONTENT_TYPE
from tests.support.exposition_pages import CLASHES, NOT_THE_GATEWAYS, OWN, TWO_OF_A_NAME, merged
from tests.support.exposition_pages import line as write_line
from tests.support.exposition_pages import samples as count_samples
from tests.support.fleet import Fleet, fleet_of, repository
from tests.support.missing import find_program
from tests.support.servers import Triton, free_ports, gateway
from tests.support.tools import TRITON, check_with_promtool
from tests.support.wait import TIMEOUT_S, wait_until

if TYPE_CHECKING:
    from typing_extensions import Self

INFERENCES = {"echo": 30, "other": 12}
ODD = ["", "\\", '"', "a\nb", '"} 1 # {x="', "\u2028\x85", "\U0001f9ed"]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Three real Tritons after some traffic, with no requests during the tests."""
    with fleet_of(tmp_path_factory.mktemp("three"), 3) as fleet:
        for model, count in INFERENCES.items():
            for _ in range(count):
                assert fleet.infer(model).status_code == 200
        yield fleet


class Quiet(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """The gateway may hang up, and mostly does so on purpose."""


class Server:
    """A tiny HTTP server with an answer per path; to the gateway it is a replica without models."""

    def __init__(self, page: bytes = b"", content_type: str = CONTENT_TYPE) -> None:
        self.page = page
        self.content_type = content_type
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.answer(server.content_type, server.get())

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                self.answer("application/json", b"[]")

            def answer(self, content_type: str, body: bytes) -> None:
                self.send_response(200)
                self.send_header("content-type", content_type)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._http = Quiet(("127.0.0.1", 0), Handler)
        self.port = self._http.server_address[1]
        self.address = f"127.0.0.1:{self.port}"
        self.url = f"http://{self.address}?metrics={self.port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,))

    def get(self) -> bytes:
        return self.page

    def __enter__(self) -> Server:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Refuse connections from now on."""
        if self._thread.is_alive():
            self._http.shutdown()
            self._http.server_close()
            self._thread.join()


Key = tuple[str, frozenset[tuple[str, str]]]


def samples(page: str) -> dict[Key, float]:
    """Read the classic format like Prometheus' client, which renames counters."""
    found = {}
    for line in page.splitlines():
        if line and not line.startswith("#"):
            (family,) = text_string_to_metric_families(f"{line}\n")
            (sample,) = family.samples
            found[sample.name, frozenset(sample.labels.items())] = sample.value
    return found


def by_replica(page: str, metric: str) -> dict[str, float]:
    return {
        dict(labels)["replica"]: value
        for (name, labels), value in samples(page).items()
        if name == metric
    }


def up(page: str) -> dict[str, float]:
    return by_replica(page, "gateway_scrape_up")


def durations(page: str) -> dict[str, float]:
    return by_replica(page, "gateway_scrape_duration_seconds")


def state_of(client: httpx.Client, address: str) -> str:
    replicas = client.get("/v1/replicas").json()["replicas"]
    return next(str(replica["state"]) for replica in replicas if replica["address"] == address)


def page_of(triton: Triton) -> str:
    url = f"http://127.0.0.1:{triton.options.metrics_port}/metrics"
    return httpx.get(url, timeout=TIMEOUT_S).text


def counters(page: str) -> dict[Key, float]:
    """Return the samples that change only with inferences."""
    return {key: value for key, value in samples(page).items() if key[0].startswith("nv_inference")}


def of_all(tritons: list[Triton]) -> dict[Key, float]:
    return {
        (name, labels | {("replica", triton.address)}): value
        for triton in tritons
        for (name, labels), value in counters(page_of(triton)).items()
    }


# The page. Prometheus is started before, for its tests at the end.


@pytest.mark.usefixtures("starting_prometheus")
def test_page_has_the_samples_of_every_replica(three: Fleet) -> None:
    answer = three.client.get("/metrics", headers={"accept": "application/openmetrics-text"})
    assert answer.headers["content-type"] == CONTENT_TYPE
    page = answer.text
    assert counters(page) == of_all(three.tritons)
    assert up(page) == {triton.address: 1 for triton in three.tritons}
    assert durations(page).keys() == {triton.address for triton in three.tritons}
    assert min(durations(page).values()) > 0


def test_promtool_objects_only_to_names_of_triton(three: Fleet) -> None:
    complaints = check_with_promtool(three.client.get("/metrics").text)
    assert {complaint.split("_")[0] for complaint in complaints} == {"nv"}
    assert complaints == check_with_promtool(page_of(three.tritons[0]))


def test_page_is_compressed_if_the_client_accepts_gzip(three: Fleet) -> None:
    for accepted, is_compressed in (
        ("gzip", True),
        ("deflate, GZIP;q=0.5", True),
        ("*", True),
        ("gzip;q=0,*", False),
        ("br", False),
    ):
        headers = {"accept-encoding": accepted}
        with three.client.stream("GET", "/metrics", headers=headers) as answer:
            body = b"".join(answer.iter_raw())
        assert answer.headers.get("content-encoding") == ("gzip" if is_compressed else None)
        page = (gzip.decompress(body) if is_compressed else body).decode()
        assert counters(page) == of_all(three.tritons)


# Merged pages.


def test_promtool_reads_merged_pages_that_clash(subtests: pytest.Subtests) -> None:
    pages = {f"clash {number}": merged(one, two) for number, (one, two, _) in enumerate(CLASHES)}
    pages["a replica that uses names of the gateway"] = merged(NOT_THE_GATEWAYS, own=OWN)
    pages["two families of one name"] = merged(TWO_OF_A_NAME, TWO_OF_A_NAME)
    for name, page in pages.items():
        with subtests.test(name):
            check_with_promtool(page)


def test_promtool_reads_labels_with_any_characters() -> None:
    values = [chr(code) for code in range(1, 0x300)]
    values += ["\u2028", "\\", '"} 1 # {', "\U0001f9ed", ""]
    page = "# HELP a_bytes It.\n# TYPE a_bytes gauge\n" + "".join(
        write_line("a_bytes", {"x": value}, 1) for value in values
    )
    assert check_with_promtool(merged(page, page)) == []
    assert count_samples(merged(page)).total() == len(values)


def test_promtool_objects_only_to_names_in_a_merged_page() -> None:
    names = {each.split()[2] for each in TRITON.splitlines() if each.startswith("# TYPE")}
    complaints = check_with_promtool(merged(TRITON, TRITON, TRITON))
    assert complaints == check_with_promtool(TRITON)
    assert {complaint.split()[0] for complaint in complaints} <= names


# Replicas that misbehave.


BRIEF = {"X-Prometheus-Scrape-Timeout-Seconds": "0.6"}
GARBAGE = b"<html>\n<body>502 Bad Gateway</body>\n</html>\n"


@pytest.mark.long
@pytest.mark.fault("a Triton's metrics page hangs or is garbage")
def test_replica_that_does_not_answer_costs_only_its_samples(three: Fleet, tmp_path: Path) -> None:
    well = three.tritons[0]
    with (
        Triton(repository(tmp_path), "echo") as hanging,
        Server(GARBAGE) as garbage,
        Server(GARBAGE) as dead,
    ):
        hanging.wait()
        urls = [garbage.url, dead.url, well.options.url, hanging.options.url]
        with gateway(*urls) as (client, command):
            hanging.signal(signal.SIGSTOP)
            dead.stop()
            wait_until(lambda: state_of(client, dead.address) == "DOWN")
            expected = {well.address: 1, garbage.address: 0, hanging.address: 0, dead.address: 0}

            def page(headers: dict[str, str]) -> str:
                """Return a page for which the healthy replica was not too slow by chance."""
                while True:
                    answer = client.get("/metrics", headers=headers)
                    assert answer.status_code == 200
                    if up(answer.text) == expected:
                        return answer.text

            usual = page({})
            brief = page(BRIEF)
            while durations(brief)[hanging.address] >= parse_scrape_timeout(""):
                brief = page(BRIEF)  # the machine is slow
            for text, least_s in (
                (usual, parse_scrape_timeout("")),
                (brief, parse_scrape_timeout("0.6")),
            ):
                check_with_promtool(text)
                assert counters(text) == of_all([well])
                assert durations(text)[dead.address] == 0
                assert durations(text)[hanging.address] > least_s - 0.01
            command.wait_for("invalid metrics page: line 1")


def test_time_for_replicas_is_less_than_the_scrape_timeout() -> None:
    for header in ("", "10", "1e999", "nan", "-1", "0", "soon"):
        assert parse_scrape_timeout(header) == 1.75, header
    assert parse_scrape_timeout("1.5") == 1.25
    assert parse_scrape_timeout("0.2") == 0.1


NO_PAGES = {
    "cut off": b"nv_x 1\nnv_y",
    "not text": b"nv_x 1\n\xff\xfe 2\n",
    "endless": b"nv_x 1\n" * 2_500_000,
    "zeros": b"\x00" * 100,
    "a long line": b"nv_x{" + b"a" * 1_000_000 + b"\n",
}


def test_invalid_page_of_a_replica_is_omitted() -> None:
    with ExitStack() as stack:
        bad = [stack.enter_context(Server(page)) for page in NO_PAGES.values()]
        good = stack.enter_context(Server(b"nv_good 1\n"))
        urls = [server.url for server in (*bad, good)]
        client, _ = stack.enter_context(gateway(*urls))
        expected = {**{server.address: 0 for server in bad}, good.address: 1}
        wait_until(lambda: up(client.get("/metrics").text) == expected)
        found = client.get("/metrics").text
        assert f'nv_good{{replica="{good.address}"}} 1' in found
        assert "nv_x" not in found


def test_metric_that_replicas_define_differently_is_omitted() -> None:
    with (
        Server(b"# TYPE nv_x gauge\nnv_x 1\nnv_y 1\n") as one,
        Server(b"# TYPE nv_x counter\nnv_x 1\nnv_y 1\n") as other,
        gateway(one.url, other.url) as (client, command),
    ):
        page = client.get("/metrics").text
        first, second = sorted((one.address, other.address))
        assert f'nv_x{{replica="{first}"}}' in page
        assert f'nv_x{{replica="{second}"}}' not in page
        assert f'nv_y{{replica="{second}"}}' in page
        assert up(page) == {first: 1, second: 1}
        assert "nv_x" in command.wait_for(f"omitted metrics of replica {second}")


# Many scrapes.


class Counted(Server):
    """Counts how many scrapes it answers at the same time."""

    running = most = total = 0

    def get(self) -> bytes:
        with self.lock:
            self.running += 1
            self.total += 1
            self.most = max(self.most, self.running)
            self.lock.wait_for(lambda: self.most > MAX_METRICS_PAGES, timeout=0.1)
            self.running -= 1
        return b"nv_x 1\n"

    lock = threading.Condition()


def test_many_scrapes_are_served_a_few_at_a_time() -> None:
    """300 at the same time kept the event loop waiting for ten seconds."""
    count = 4 * MAX_METRICS_PAGES
    replica = Counted()
    with (
        replica,
        gateway(replica.url) as (client, _),
        ThreadPoolExecutor(count) as pool,
    ):
        answers = list(pool.map(lambda _: client.get("/metrics"), range(count)))
    assert all("nv_x{" in answer.text for answer in answers)
    assert replica.total == count
    assert replica.most <= MAX_METRICS_PAGES


class Prometheus:
    """A real Prometheus with the targets of some jobs. It scrapes for the first time after 5 s or so."""

    def __init__(self, folder: Path, targets: dict[str, str]) -> None:
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        config = folder / "prometheus.yaml"
        jobs = [
            {"job_name": job, "static_configs": [{"targets": [target]}]}
            for job, target in targets.items()
        ]
        times = {"scrape_interval": "3s", "evaluation_interval": "3s"}
        config.write_text(yaml.safe_dump({"global": times, "scrape_configs": jobs}))
        command = [find_program("prometheus"), f"--config.file={config}", "--log.format=json"]
        command += [f"--storage.tsdb.path={folder}", f"--web.listen-address=127.0.0.1:{port}"]
        self._log = folder / "prometheus.log"
        self._output = self._log.open("wb")
        self._process = subprocess.Popen(command, stdout=self._output, stderr=self._output)

    def ask(self, path: str, **parameters: str) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=TIMEOUT_S)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    def answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/-/ready", timeout=TIMEOUT_S).is_success
        except httpx.TransportError:
            return False

    def healthy(self) -> set[str]:
        """The jobs whose targets it has all scraped, and could read."""
        targets = self.ask("targets")["activeTargets"]
        return {each["labels"]["job"] for each in targets if each["health"] == "up"}

    def query(self, expression: str) -> list[dict[str, Any]]:
        return list(self.ask("query", query=expression)["result"])

    def complaints(self) -> list[str]:
        return re.findall(r'.*"level":"(?:warn|error)".*', self._log.read_text())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        self._output.close()


def odd_page() -> bytes:
    """Build a page with labels that are hard to parse, and some named like the gateway's own."""
    lines = ['# HELP odd_bytes It\'s "odd".', "# TYPE odd_bytes gauge"]
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n"}
    for number, text in enumerate(ODD):
        value = "".join(escapes.get(character, character) for character in text)
        lines.append(f'odd_bytes{{replica="{value}",x="{value}"}} {number}')
    return "\n".join([*lines, ""]).encode()


def newest(prometheus: Prometheus, job: str, names: str) -> dict[Key, float]:
    """The newest values of all series of a job."""
    found = {}
    for series in prometheus.query(f'{{job="{job}",__name__=~"{names}"}}'):
        labels = series["metric"]
        name = labels.pop("__name__")
        kept = {(key, value) for key, value in labels.items() if key not in ("job", "instance")}
        found[name, frozenset(kept)] = float(series["value"][1])
    return found


@pytest.fixture(scope="module")
def odd() -> Iterator[tuple[list[Server], str]]:
    """Two replicas with such pages, and where the gateway before them is."""
    with ExitStack() as stack:
        replicas = [stack.enter_context(Server(odd_page())) for _ in range(2)]
        client, _ = stack.enter_context(gateway(*(replica.url for replica in replicas)))
        yield replicas, f"{client.base_url.host}:{client.base_url.port}"


@pytest.fixture(scope="module")
def starting_prometheus(
    three: Fleet,
    odd: tuple[list[Server], str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Prometheus]:
    """It asks for OpenMetrics, and takes the text format."""
    address = f"{three.client.base_url.host}:{three.client.base_url.port}"
    targets = {"gateway": address, "odd": odd[1]}
    with Prometheus(tmp_path_factory.mktemp("prometheus"), targets) as running:
        yield running


@pytest.fixture(scope="module")
def prometheus(starting_prometheus: Prometheus) -> Prometheus:
    running = starting_prometheus
    wait_until(running.answers)
    wait_until(lambda: running.healthy() == {"gateway", "odd"})
    return running


def test_prometheus_reads_the_page(three: Fleet, prometheus: Prometheus) -> None:
    wait_until(lambda: newest(prometheus, "gateway", "nv_inference.*") == of_all(three.tritons))
    assert prometheus.complaints() == []
    wait_until(lambda: set(newest(prometheus, "gateway", "gateway_scrape_up").values()) == {1.0})
    infer = 'job="gateway",route="/v1/models/{model}/infer"'
    counts = prometheus.query(f"sum by (model) (gateway_request_duration_seconds_count{{{infer}}})")
    found = {series["metric"]["model"]: float(series["value"][1]) for series in counts}
    assert found == INFERENCES


def test_prometheus_reads_labels_with_any_characters(
    odd: tuple[list[Server], str], prometheus: Prometheus
) -> None:
    series = [dict(labels) for _, labels in newest(prometheus, "odd", "odd_bytes")]
    assert len(series) == 2 * len(ODD)
    assert {labels.get("x", "") for labels in series} == set(ODD)
    assert {labels.get("exported_replica", "") for labels in series} == set(ODD)
    assert {labels["replica"] for labels in series} == {replica.address for replica in odd[0]}
