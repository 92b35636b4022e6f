import hashlib
import http.server
import socket
import threading

import pytest

from adam_mpi.base.errors import UserError
from adam_mpi.data import fetch_and_pack as fetching
from adam_mpi.data.fetch_and_pack import fetch_data_set

CONTENT = {"images.gz": bytes(range(256)) * 1000, "labels.gz": b"label" * 999}


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves the server's `content`, honors Range, records the requests, and can end a transfer early."""

    def do_GET(self):
        self.server.asked.append((self.path.strip("/"), self.headers["Range"]))
        content = self.server.content.get(self.path.strip("/"))
        if content is None:
            return self.send_error(404)
        start = 0
        if self.headers["Range"] and self.server.ranges:
            start = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-"))
            if start >= len(content):
                return self.send_error(416)
        self.send_response(206 if start else 200)
        if self.server.announces:
            self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        self.wfile.write(content[start : self.server.cut])

    def log_message(self, *args):
        pass


@pytest.fixture
def serve():
    """Start servers on the loopback interface; all end with the test."""
    servers = []

    def start(content=CONTENT, ranges=True, cut=None, announces=True):
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.content, server.ranges, server.cut, server.asked = dict(content), ranges, cut, []
        server.announces = announces
        server.address = f"http://127.0.0.1:{server.server_port}/"
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def small_set(monkeypatch):
    for variable in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(variable, raising=False)
        monkeypatch.delenv(variable.upper(), raising=False)
    monkeypatch.setattr(fetching, "MD5", {"mnist": {f: hashlib.md5(c).hexdigest() for f, c in CONTENT.items()}})


def mirrors(monkeypatch, *addresses):
    monkeypatch.setattr(fetching, "MIRRORS", {"mnist": addresses})


def closed_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{sock.getsockname()[1]}/"


def held(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_fetch_from_a_mirror_and_not_twice(serve, tmp_path, monkeypatch):
    server = serve()
    mirrors(monkeypatch, server.address)
    fetch_data_set("mnist", None, tmp_path / "new" / "mnist")
    assert held(tmp_path / "new" / "mnist") == CONTENT
    fetch_data_set("mnist", None, tmp_path / "new" / "mnist")
    assert server.asked == [("images.gz", None), ("labels.gz", None)]


def test_a_damaged_file_is_fetched_again(serve, tmp_path):
    (tmp_path / "labels.gz").write_bytes(b"damaged")
    fetch_data_set("mnist", serve().address, tmp_path)
    assert held(tmp_path) == CONTENT


def test_resume_asks_only_for_the_rest(serve, tmp_path):
    server = serve()
    (tmp_path / "images.gz.part").write_bytes(CONTENT["images.gz"][:100_000])
    fetch_data_set("mnist", server.address, tmp_path)
    assert server.asked[0] == ("images.gz", "bytes=100000-")
    assert held(tmp_path) == CONTENT


def test_a_whole_part_is_only_renamed(serve, tmp_path):
    (tmp_path / "images.gz.part").write_bytes(CONTENT["images.gz"])
    fetch_data_set("mnist", serve().address, tmp_path)
    assert held(tmp_path) == CONTENT


def test_a_server_without_ranges_starts_again(serve, tmp_path):
    (tmp_path / "images.gz.part").write_bytes(CONTENT["images.gz"][:100_000])
    fetch_data_set("mnist", serve(ranges=False).address, tmp_path)
    assert held(tmp_path) == CONTENT


def test_a_broken_transfer_keeps_its_part_and_resumes(serve, tmp_path):
    with pytest.raises(UserError, match="ended after 70000 of 256000 bytes"):
        fetch_data_set("mnist", serve(cut=70_000).address, tmp_path)
    assert held(tmp_path) == {"images.gz.part": CONTENT["images.gz"][:70_000]}
    server = serve()
    fetch_data_set("mnist", server.address, tmp_path)
    assert server.asked[0] == ("images.gz", "bytes=70000-")
    assert held(tmp_path) == CONTENT


def test_bad_md5_removes_the_part_and_names_the_file(serve, tmp_path):
    server = serve(CONTENT | {"labels.gz": b"other"})
    with pytest.raises(UserError, match="labels.gz.*md5"):
        fetch_data_set("mnist", server.address, tmp_path)
    assert held(tmp_path) == {"images.gz": CONTENT["images.gz"]}


@pytest.mark.parametrize(("announces", "said"), [(True, "it announces"), (False, "it sends more than")])
def test_a_mirror_that_sends_too_much_is_left(serve, tmp_path, monkeypatch, announces, said):
    most = max(map(len, CONTENT.values()))
    monkeypatch.setattr(fetching, "MOST_BYTES", most)
    endless = serve({"images.gz": bytes(most + fetching.BLOCK), "labels.gz": b""}, announces=announces)
    with pytest.raises(UserError, match=f"images.gz.*{said}.*{most}"):
        fetch_data_set("mnist", endless.address, tmp_path)
    assert held(tmp_path) == {}
    mirrors(monkeypatch, endless.address, serve().address)
    fetch_data_set("mnist", None, tmp_path)
    assert held(tmp_path) == CONTENT


def test_the_next_mirror_is_tried(serve, tmp_path, monkeypatch):
    bad, empty, good = serve({"images.gz": b"bad", "labels.gz": b"bad"}), serve({}), serve()
    mirrors(monkeypatch, closed_port(), bad.address, empty.address, good.address)
    fetch_data_set("mnist", None, tmp_path)
    assert held(tmp_path) == CONTENT


def test_offline_is_one_line_that_says_what_to_do(tmp_path, monkeypatch):
    mirrors(monkeypatch, closed_port(), closed_port())
    with pytest.raises(UserError, match="images.gz.*refused.*fetch mnist --from DIR") as caught:
        fetch_data_set("mnist", None, tmp_path)
    assert "\n" not in str(caught.value)
    assert held(tmp_path) == {}


def test_from_a_folder(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    for file, content in CONTENT.items():
        (source / file).write_bytes(content)
    fetch_data_set("mnist", str(source), target)
    assert held(target) == CONTENT


@pytest.mark.parametrize("wrong, message", [(b"damaged", "md5"), (None, "not there")])
def test_from_a_folder_with_a_bad_file(tmp_path, wrong, message):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    if wrong:
        (source / "images.gz").write_bytes(wrong)
    with pytest.raises(UserError, match=f"images.gz.*{message}"):
        fetch_data_set("mnist", str(source), target)
    assert held(target) == {}


def test_bad_arguments(tmp_path):
    with pytest.raises(UserError, match="allowed are mnist"):
        fetch_data_set("glyphs", None, tmp_path)
    with pytest.raises(UserError, match="neither a folder nor"):
        fetch_data_set("mnist", "nowhere", tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        fetch_data_set("mnist", str(tmp_path), tmp_path / "file" / "mnist")
