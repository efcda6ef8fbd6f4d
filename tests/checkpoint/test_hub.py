"""Models of the Hugging Face Hub, fetched from a small server here that answers as the Hub does."""

import contextlib
import hashlib
import http.server
import io
import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.parse
from pathlib import Path

import pytest
from huggingface_hub import constants

import checkpoint
from checkpoint import hub
from checkpoint.download import Progress
from runtime import UserError

ROOT = Path(__file__).parents[2]
INDEX = {"metadata": {}, "weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
TINY = {
    "config.json": b'{"model_type": "llama"}',
    "generation_config.json": b"{}",
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": bytes(range(256)) * 4000,
    "README.md": b"# tiny",
    "pytorch_model.bin": b"pickled",
    "onnx/model.onnx": b"onnx",
    "original/consolidated.safetensors": b"the same in another format",
}
TINY_WANTED = set(TINY) - {"README.md", "pytorch_model.bin", "onnx/model.onnx", "original/consolidated.safetensors"}
SHARDED = {
    "config.json": b"{}",
    "tokenizer.model": b"sp",
    "model.safetensors.index.json": json.dumps(INDEX).encode(),
    "model-00001-of-00002.safetensors": b"one",
    "model-00002-of-00002.safetensors": b"two",
    "consolidated.safetensors": b"the same once more",
}
GGUFS = {"q4.gguf": b"four", "sub/q8-00001-of-00002.gguf": b"8", "sub/q8-00002-of-00002.gguf": b"88", "imatrix.dat": b""}


def tag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


class Hub(http.server.ThreadingHTTPServer):
    """Answers /api/models/... and /.../resolve/... for the repositories in `repos`: {name: {revision: {file: content}}}."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}
        self.denied: dict[str, tuple[int, str]] = {}  # name -> status and X-Error-Code
        self.asked: list[tuple[str, str]] = []  # method and file, of downloads
        self.breaks_after: int | None = None  # bytes, of GET answers
        self.ranges: list[str] = []
        self.sign_in_page = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @staticmethod
    def commit(revision: str) -> str:
        return hashlib.sha1(revision.encode()).hexdigest()

    def find(self, repo: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        for name, files in self.repos[repo].items():
            if revision in (name, self.commit(name)):
                return self.commit(name), files
        return None


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_):
        pass

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), str(value))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.server.breaks_after is not None and "/resolve/" in self.path and len(body) > self.server.breaks_after:
            self.wfile.write(body[: self.server.breaks_after])
            self.wfile.flush()
            self.close_connection = True
            return
        self.wfile.write(body)

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = urllib.parse.unquote(urllib.parse.urlparse(self.path).path)
        match = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?|/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if self.server.sign_in_page or match is None:
            return self.answer(200 if self.server.sign_in_page else 404, b"<html>sign in</html>")
        repo, kind, revision, file_repo, file_revision, file = match.groups()
        repo, revision = repo or file_repo, revision or file_revision or "main"
        if repo in self.server.denied:
            status, code = self.server.denied[repo]
            return self.answer(status, X_Error_Code=code)
        if repo not in self.server.repos:
            return self.answer(401, X_Error_Code="RepoNotFound")
        found = self.server.find(repo, revision)
        if found is None:
            return self.answer(404, X_Error_Code="RevisionNotFound")
        commit, files = found
        if kind == "tree":
            tree = [{"type": "file", "path": name, "size": len(data), "oid": tag(data)} for name, data in files.items()]
            return self.answer(200, json.dumps(tree).encode())
        if file is None:
            siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
            return self.answer(200, json.dumps({"id": repo, "sha": commit, "siblings": siblings}).encode())
        if file not in files:
            return self.answer(404, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
        self.server.asked.append((self.command, file))
        start, asked = 0, self.headers.get("Range")
        if asked and self.command == "GET":
            self.server.ranges.append(asked)
            start = int(re.match(r"bytes=(\d+)-", asked)[1])
        data = files[file]
        known = {"ETag": f'"{tag(data)}"', "X_Repo_Commit": commit, "Accept_Ranges": "bytes"}
        if start:
            known["Content_Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self.answer(206 if start else 200, data[start:], **known)


@pytest.fixture
def server():
    with Hub() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        running.repos = {"org/tiny": {"main": TINY}, "org/sharded": {"main": SHARDED}, "org/ggufs": {"main": GGUFS}}
        yield running
        running.shutdown()


def point_at(url, patch):
    patch.setattr(constants, "ENDPOINT", url)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


@pytest.fixture
def hf(server, tmp_path, monkeypatch):
    """huggingface_hub talks to the server and has a cache of its own. It reads these settings when it is imported."""
    point_at(server.url, monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return server


@pytest.fixture
def told():
    return io.StringIO()


@pytest.fixture
def get(hf, told):
    return lambda name: hub.fetch_from_hub(name, progress=Progress(told))


def held(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@contextlib.contextmanager
def offline(server, how, monkeypatch):
    """The ways in which the Hub can be out of reach."""
    with monkeypatch.context() as patch:
        if how == "HF_HUB_OFFLINE":
            patch.setattr(constants, "HF_HUB_OFFLINE", True)
        elif how == "no network":
            point_at("http://127.0.0.1:9", patch)
        elif how == "hub down":
            patch.setattr(server, "denied", dict.fromkeys(server.repos, (503, "")))
        else:
            patch.setattr(server, "sign_in_page", True)
        yield


OFFLINE = pytest.mark.parametrize("how", ["HF_HUB_OFFLINE", "no network", "hub down", "sign-in page"])


def test_a_model_is_its_config_tokenizer_and_safetensors_and_nothing_else(get, told):
    folder = get("hf:org/tiny")
    assert held(folder) == TINY_WANTED
    assert all((folder / name).read_bytes() == TINY[name] for name in TINY_WANTED)
    assert "Downloading hf:org/tiny: model.safetensors (1.0 MB) ...\n" in told.getvalue()
    assert told.getvalue().endswith("Downloading hf:org/tiny: model.safetensors: done\n")


def test_a_second_call_downloads_nothing_and_says_nothing(get, hf, told):
    folder = get("hf:org/tiny")
    hf.asked.clear()
    told.truncate(0)
    assert get("hf:org/tiny") == folder
    assert [each for each in hf.asked if each[0] == "GET"] == [] and told.getvalue().strip("\0") == ""


def test_a_sharded_model_is_what_its_index_names(get):
    assert held(get("hf:org/sharded")) == set(SHARDED) - {"consolidated.safetensors"}


def test_without_an_index_every_safetensors_file_is_taken(get, hf):
    files = {"config.json": b"{}", "b.safetensors": b"b", "a.safetensors": b"a"}
    hf.repos["org/odd"] = {"main": files}
    assert held(get("hf:org/odd")) == set(files)


def test_a_gguf_file_stands_for_itself(get):
    path = get("hf:org/ggufs/q4.gguf")
    assert path.name == "q4.gguf" and path.read_bytes() == b"four"
    assert held(path.parent) == {"q4.gguf"}


def test_all_files_of_a_split_gguf_model_come(get):
    path = get("hf:org/ggufs/sub/q8-00001-of-00002.gguf")
    assert path.name == "q8-00001-of-00002.gguf"
    assert held(path.parent) == {"q8-00001-of-00002.gguf", "q8-00002-of-00002.gguf"}


def test_a_revision_is_that_revision(get, hf):
    older = TINY | {"model.safetensors": b"older"}
    hf.repos["org/tiny"]["v1.0"] = older
    assert (get("hf:org/tiny@v1.0") / "model.safetensors").read_bytes() == b"older"
    commit = hf.commit("v1.0")
    assert get(f"hf:org/tiny@{commit}") == get("hf:org/tiny@v1.0") != get("hf:org/tiny")


def test_a_branch_that_moved_is_followed(get, hf, told):
    before = get("hf:org/tiny")
    hf.commit = lambda revision: hashlib.sha1(b"moved " + revision.encode()).hexdigest()
    hf.repos["org/tiny"]["main"] = TINY | {"model.safetensors": b"newer"}
    after = get("hf:org/tiny")
    assert (after / "model.safetensors").read_bytes() == b"newer" and after != before
    assert told.getvalue().count("model.safetensors: done") == 2


@OFFLINE
@pytest.mark.parametrize("name", ["hf:org/tiny", "hf:org/sharded", "hf:org/ggufs/q4.gguf", "hf:org/ggufs/sub/q8-00001-of-00002.gguf"])
def test_without_the_hub_a_whole_model_is_found_in_the_cache(get, hf, told, monkeypatch, name, how):
    found = get(name)
    told.truncate(0)
    with offline(hf, how, monkeypatch):
        assert get(name) == found
    said = "can't be reached" in told.getvalue()
    assert said == (how != "HF_HUB_OFFLINE")  # the latter was asked for


@OFFLINE
@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("hf:org/tiny", None),
        ("hf:org/tiny", "config.json"),
        ("hf:org/tiny", "model.safetensors"),
        ("hf:org/sharded", "model-00002-of-00002.safetensors"),
        ("hf:org/sharded", "config.json"),
        ("hf:org/ggufs/q4.gguf", None),
        ("hf:org/ggufs/sub/q8-00001-of-00002.gguf", "q8-00002-of-00002.gguf"),
    ],
)
def test_without_the_hub_half_a_model_is_none(get, hf, monkeypatch, name, lost, how):
    if lost is not None:
        found = get(name)
        ((found.parent if found.is_file() else found) / lost).unlink()
    with offline(hf, how, monkeypatch), pytest.raises(UserError, match=r"is not in the cache \(.*hub\).* can't be reached: connect"):
        get(name)


def test_a_commit_that_is_in_the_cache_needs_no_hub(get, hf):
    name = f"hf:org/tiny@{hf.commit('main')}"
    found = get(name)
    hf.denied["org/tiny"] = (500, "")
    hf.asked.clear()
    assert get(name) == found and hf.asked == []


def test_a_connection_that_breaks_is_taken_up_where_it_broke(get, hf, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    hf.breaks_after = 300_000
    for _ in range(3):  # some versions of the library go on by themselves, others when they are called again
        with contextlib.suppress(UserError):
            get("hf:org/tiny")
    assert (get("hf:org/tiny") / "model.safetensors").read_bytes() == TINY["model.safetensors"]
    assert hf.ranges == [f"bytes={start}-" for start in range(300_000, len(TINY["model.safetensors"]), 300_000)]


def test_files_that_came_whole_are_kept_when_a_download_fails(get, hf, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda _: None)
    hf.repos["org/tiny"]["main"] = TINY | {"model.safetensors": os.urandom(1 << 20)}
    hf.breaks_after = 300_000  # less than a chunk, so each attempt starts anew
    with pytest.raises(UserError, match=r"the download broke off \(.*\); check the network and try again: files that came whole are kept"):
        get("hf:org/tiny")
    hf.breaks_after = None
    hf.asked.clear()
    assert held(get("hf:org/tiny")) == TINY_WANTED
    assert [file for method, file in hf.asked if method == "GET"] == ["model.safetensors"]


@pytest.mark.parametrize(
    ("denied", "message"),
    [
        ((403, "GatedRepo"), r"hf:org/tiny is gated: ask for access on http://127.*/org/tiny, then set HF_TOKEN"),
        ((401, "GatedRepo"), r"is gated"),
        ((401, "RepoNotFound"), r"is not on the Hugging Face Hub, or is private: check its spelling"),
        ((404, "RepoNotFound"), r"is not on the Hugging Face Hub, or is private"),
        ((404, "RevisionNotFound"), r"org/tiny has no revision 'main'"),
        ((403, ""), r"refuses access \(status 403.*set HF_TOKEN"),
        ((429, ""), r"too many requests from here \(status 429\)"),
        ((418, ""), r"broke off \(HfHubHTTPError: .*418"),
    ],
)
def test_what_the_hub_refuses_is_one_line_with_a_remedy(get, hf, denied, message):
    hf.denied["org/tiny"] = denied
    with pytest.raises(UserError, match=message):
        get("hf:org/tiny")


def test_a_repository_or_revision_that_is_not_there_is_named(get):
    with pytest.raises(UserError, match="hf:org/tinny is not on the Hugging Face Hub"):
        get("hf:org/tinny")
    with pytest.raises(UserError, match=r"hf:org/tiny@v9: org/tiny has no revision 'v9'"):
        get("hf:org/tiny@v9")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (GGUFS, r"no \.safetensors weights; it has q4.gguf, .*: give one of them, such as hf:org/odd/q4\.gguf"),
        ({"config.json": b"", "pytorch_model.bin": b""}, r"it has pytorch_model\.bin: convert it to safetensors"),
        ({"a/consolidated.pth": b""}, r"it has a/consolidated\.pth: convert it"),
        ({"unet/x.safetensors": b""}, r"it has unet/x\.safetensors: download that folder"),
        ({"README.md": b""}, r"it has README\.md: use another repository"),
        ({}, r"it has no files"),
        ({f"{i}.gguf": b"" for i in range(9)}, r"0\.gguf, .* and 4 more"),
        ({"model.safetensors": b""}, r"has no config\.json"),
        (SHARDED | {"model.safetensors.index.json": b"{"}, r"index\.json is damaged \(JSONDecodeError"),
        (SHARDED | {"model.safetensors.index.json": b'{"weight_map": 3}'}, r"index\.json is damaged \(AttributeError"),
        (SHARDED | {"model.safetensors.index.json": b'{"weight_map": {"a": ["b"]}}'}, r"index\.json is damaged \(TypeError"),
        ({k: v for k, v in SHARDED.items() if "00002-of" not in k}, r"names 'model-00002-of-00002\.safetensors', which is not there"),
    ],
)
def test_a_repository_that_is_no_use_says_what_it_has(get, hf, files, message):
    hf.repos["org/odd"] = {"main": files}
    with pytest.raises(UserError, match=message):
        get("hf:org/odd")


def test_a_gguf_file_that_is_not_there_says_which_are(get):
    with pytest.raises(UserError, match=r"org/ggufs has no file 'q5\.gguf'; it has q4\.gguf, sub/q8"):
        get("hf:org/ggufs/q5.gguf")
    with pytest.raises(UserError, match=r"has no file 'sub/q8-00001-of-00003\.gguf'"):
        get("hf:org/ggufs/sub/q8-00003-of-00003.gguf")


def test_a_cache_that_can_not_be_written_is_one_line(get, tmp_path):
    (tmp_path / "hub").write_text("a file")
    with pytest.raises(UserError, match=r"the cache .*hub can't be used \(.*\); set HF_HOME"):
        get("hf:org/tiny")


@pytest.mark.parametrize(
    ("text", "repo", "file", "revision"),
    [
        ("hf:org/name", "org/name", None, None),
        ("hf:org/name@v1", "org/name", None, "v1"),
        ("hf:o.r-g_/n.a-m_e@refs/pr/3", "o.r-g_/n.a-m_e", None, "refs/pr/3"),
        ("hf:org/name/a.gguf", "org/name", "a.gguf", None),
        ("hf:org/name/a/b.GGUF@main", "org/name", "a/b.GGUF", "main"),
    ],
)
def test_a_name_has_a_repository_a_file_and_a_revision(text, repo, file, revision):
    assert hub.parse(text) == hub.HubName(text, repo, file, revision)


@pytest.mark.parametrize(
    "text", ["hf:", "hf:gpt2", "hf:/x", "hf:org/", "hf:a b/c", "hf:../..", "hf:org/a--b", "hf://o/n", "hf:@v1", "hf:ö/x"]
)
def test_what_is_no_repository_is_told_how_to_write_one(text):
    with pytest.raises(UserError, match=r"does not name a repository .*: write hf:org/name"):
        hub.parse(text)


@pytest.mark.parametrize("text", ["hf:o/n/x.bin", "hf:o/n/", "hf:o/n/../x.gguf", "hf:o/n//x.gguf", "hf:o/n/model.safetensors"])
def test_other_files_are_not_fetched_one_by_one(text):
    with pytest.raises(UserError, match=r"which is no \.gguf file: write hf:org/name"):
        hub.parse(text)


@pytest.mark.parametrize("text", ["hf:org/name@", "hf:org/name/x.gguf@", "hf:org/name@ v1"])
def test_an_empty_revision_is_refused(text):
    with pytest.raises(UserError, match="has an empty revision"):
        hub.parse(text)


def test_a_missing_package_is_one_line_with_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"package that downloads from there is missing .*-m pip install huggingface_hub"):
        hub.fetch_from_hub("hf:org/tiny")


def test_resolve_takes_the_name_and_hints_at_the_prefix(get, hf, monkeypatch):
    assert checkpoint.resolve("hf:org/tiny", progress=Progress(io.StringIO())) == get("hf:org/tiny")
    with pytest.raises(UserError, match=r"'org/tiny' does not exist: check the path, write hf:org/tiny for the Hugging Face Hub"):
        checkpoint.resolve("org/tiny")


def test_the_environment_alone_is_enough(server, tmp_path):
    """As a user runs it: HF_ENDPOINT and HF_HOME set, no terminal, so no bars."""
    program = "import sys, checkpoint; print(checkpoint.resolve(sys.argv[1]))"
    settings = {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_TELEMETRY": "1"}
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))} | settings

    def run(name, **more):
        return subprocess.run(
            [sys.executable, "-c", program, name], cwd=ROOT, env=environment | more, capture_output=True, text=True, timeout=120
        )

    done = run("hf:org/tiny")
    assert done.returncode == 0, done.stderr
    assert held(Path(done.stdout.strip())) == TINY_WANTED and Path(done.stdout.strip()).is_relative_to(tmp_path)
    assert [line for line in done.stderr.splitlines() if "Downloading hf:org/tiny" not in line] == []
    again = run("hf:org/tiny", HF_HUB_OFFLINE="1", HF_ENDPOINT="http://127.0.0.1:9")
    assert (again.stdout, again.stderr) == (done.stdout, "")
