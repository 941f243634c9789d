"""Graphs for ONNX runtime."""

from __future__ import annotations

from typing import Any

from tga_sdk.errors import ModelRefused
from tga_sdk.models.loading import InThread, bytes_of, import_of, labelled, plain
from tga_sdk.models.specs import OnnxModel

DTYPES = {
    "tensor(float)": "float32",
    "tensor(double)": "float64",
    "tensor(float16)": "float16",
    "tensor(int64)": "int64",
    "tensor(int32)": "int32",
    "tensor(int8)": "int8",
    "tensor(uint8)": "uint8",
    "tensor(bool)": "bool",
    "tensor(string)": "object",
}


def load(spec: OnnxModel) -> InThread:
    runtime = import_of("onnxruntime", extra="onnx")
    numpy = import_of("numpy", extra="onnx")
    data = bytes_of(spec.path, spec.sha256, needed_because=None)
    session = runtime.InferenceSession(data.getvalue(), providers=list(spec.providers))
    inputs = {one.name: DTYPES.get(one.type) for one in session.get_inputs()}
    outputs = [one.name for one in session.get_outputs()]
    wanted = list(spec.outputs or outputs)
    if unknown := sorted(set(wanted) - set(outputs)):
        raise ModelRefused(f"{spec.path} has no output {', '.join(unknown)}; it has {', '.join(outputs)}")

    def predict(given: Any) -> Any:
        named = given if isinstance(given, dict) else {next(iter(inputs)): given}
        if set(named) != set(inputs):
            raise ModelRefused(f"{spec.path} takes the inputs {', '.join(inputs)}; found {', '.join(named)}")
        arrays = {name: numpy.asarray(value, dtype=inputs[name]) for name, value in named.items()}
        found = [plain(one) for one in session.run(wanted, arrays)]
        if spec.labels is not None:
            return labelled(found[0], spec.labels)
        return found[0] if len(found) == 1 else dict(zip(wanted, found, strict=True))

    return InThread(predict)
