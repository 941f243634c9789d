"""What a model is, as data: a specification that a program, a Lua procedure or a JSON document can state.

Every kind of model has one class; `specification({...})` reads a plain dict. Two of the kinds have a second name:
`bert` is `transformers`, `pytorch` is `torch`.

**Trust.** Some formats are programs: who loads such a file executes what is in it. They are loaded only when the
specification states the file's SHA-256, so that a file that was exchanged on disk is refused; the author of the
specification vouches for the bytes, and nothing else does. `runs_code` says whether a specification is of this sort: a
host that runs programs of strangers refuses those.

| file | loading it | needs |
|---|---|---|
| sklearn `.skops` | builds objects of known types only | `trusted` names each further type |
| sklearn `.joblib`, `.pkl` | executes code in the file | `sha256` |
| torch `state_dict` | reads tensors only (`weights_only`) | `module`: the class, from the worker's own packages |
| torch `torchscript`, `export` | may execute code in the file | `sha256` |
| transformers, sentence_transformers | reads safetensors and JSON; never code of the repository | |
| onnx | reads a graph | |
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError, model_validator

from tga_sdk.errors import ValueInvalid

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
OTHER_NAMES = {"bert": "transformers", "pytorch": "torch"}


class Specification(BaseModel):
    """What all kinds have. `timeout`: seconds that one prediction may take; loading the model does not count.

    `labels` turns an index into a word: the model's answer is then the label of its largest score, or of its class.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    labels: tuple[str, ...] | None = None
    timeout: Seconds | None = None

    @property
    def runs_code(self) -> bool:
        """Whether loading this model may execute code that stands in the file, or imports a module that it names."""
        return False


class HttpModel(Specification):
    """A service that answers a POST of the input, as JSON, with the prediction, as JSON.

    `headers_env` takes a header's value from an environment variable of the worker, so that no secret stands in a
    program. Redirects are not followed.
    """

    type: Literal["http"] = "http"
    endpoint: Annotated[str, StringConstraints(pattern=r"^https?://[^\s]+$")]
    headers: dict[str, str] = {}
    headers_env: dict[str, str] = {}
    timeout: Seconds | None = 30.0
    answer_bytes_max: Annotated[int, Field(gt=0)] = 16 * 1024 * 1024


class SklearnModel(Specification):
    """An estimator of scikit-learn, or a pipeline, from a file of skops or joblib.

    A string, or a flat list, is one sample and has one result; a list of strings or of lists is several.
    """

    type: Literal["sklearn"] = "sklearn"
    path: str
    sha256: Sha256 | None = None
    trusted: tuple[str, ...] = ()
    method: Literal["predict", "predict_proba", "decision_function", "transform"] = "predict"

    @property
    def runs_code(self) -> bool:
        """A skops file whose types are all known runs none; joblib and pickle files may run any."""
        return not self.path.endswith(".skops") or bool(self.trusted)


class OnnxModel(Specification):
    """A graph for ONNX runtime, on the CPU unless `providers` says otherwise.

    Input: a dict of the graph's inputs, or what its only input takes. Result: its only output, or a dict of them.
    """

    type: Literal["onnx"] = "onnx"
    path: str
    sha256: Sha256 | None = None
    outputs: tuple[str, ...] | None = None
    providers: tuple[str, ...] = ("CPUExecutionProvider",)


class SentenceTransformersModel(Specification):
    """Embeddings: a text has one list of numbers, a list of texts has a list of them."""

    type: Literal["sentence_transformers"] = "sentence_transformers"
    model_name: str | None = None
    path: str | None = None
    revision: str | None = None
    device: str = "cpu"
    normalize: bool = False

    @model_validator(mode="after")
    def _is_somewhere(self) -> SentenceTransformersModel:
        return _one_of(self)


class TransformersModel(Specification):
    """A pipeline of transformers. Of a text classification the result is the label; `scores=True`: all with scores."""

    type: Literal["transformers"] = "transformers"
    task: str = "text-classification"
    model_name: str | None = None
    path: str | None = None
    revision: str | None = None
    device: str = "cpu"
    scores: bool = False
    options: dict[str, Any] = {}

    @model_validator(mode="after")
    def _is_somewhere(self) -> TransformersModel:
        return _one_of(self)


class TorchModel(Specification):
    """A network of PyTorch: a TorchScript file, a file of `torch.export`, or weights for a class of the worker's own.

    `module` is `package.module:Class` and `arguments` what the class is made with, for `state_dict` alone. Input: a
    nested list of numbers that becomes one tensor. Result: the tensor as a nested list.
    """

    type: Literal["torch"] = "torch"
    path: str
    sha256: Sha256 | None = None
    format: Literal["torchscript", "export", "state_dict"] = "torchscript"
    module: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")] | None = None
    arguments: dict[str, Any] = {}
    dtype: Literal["float32", "float64", "int64"] = "float32"
    device: str = "cpu"

    @model_validator(mode="after")
    def _has_a_class(self) -> TorchModel:
        if (self.format == "state_dict") != (self.module is not None):
            raise ValueError("module names the class of a state_dict: give it there, and only there")
        return self

    @property
    def runs_code(self) -> bool:
        """It imports the module that it names."""
        return True


class SagemakerModel(Specification):
    """An endpoint of SageMaker. Credentials are those that boto3 finds on the worker."""

    type: Literal["sagemaker"] = "sagemaker"
    endpoint_name: str
    region: str | None = None
    endpoint_url: str | None = None
    content_type: str = "application/json"
    accept: str = "application/json"
    target_model: str | None = None
    timeout: Seconds | None = 60.0


ModelSpecification = (
    HttpModel | SklearnModel | OnnxModel | SentenceTransformersModel | TransformersModel | TorchModel | SagemakerModel
)
_Named = TypeVar("_Named", SentenceTransformersModel, TransformersModel)
_ANY: TypeAdapter[ModelSpecification] = TypeAdapter(Annotated[ModelSpecification, Field(discriminator="type")])


def specification(said: ModelSpecification | dict[str, Any], *, name: str = "model") -> ModelSpecification:
    """The specification that a dict states; ValueInvalid names the field that is wrong."""
    if isinstance(said, Specification):
        return said
    if not isinstance(said, dict):
        raise ValueInvalid(f"model {name} is specified by a dict with a type, found {type(said).__name__}", where=name)
    kind = said.get("type")
    try:
        return _ANY.validate_python({**said, "type": OTHER_NAMES.get(str(kind), kind)})
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in first["loc"][1:]) or "type"
        raise ValueInvalid(f"model {name}: {path}: {first['msg']}", where=f"{name}.{path}") from error


def _one_of(said: _Named) -> _Named:
    if (said.path is None) == (said.model_name is None):
        raise ValueError("give either path (a folder of this worker) or model_name (a name of the Hugging Face hub)")
    return said
