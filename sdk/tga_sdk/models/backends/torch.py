"""Networks of PyTorch."""

from __future__ import annotations

import importlib
from typing import Any

from tga_sdk.errors import ModelRefused
from tga_sdk.models.loading import InThread, bytes_of, import_of, labelled, plain
from tga_sdk.models.specs import TorchModel


def load(spec: TorchModel) -> InThread:
    torch = import_of("torch", extra="torch")
    network = _network(torch, spec)
    dtype = getattr(torch, spec.dtype)

    def predict(given: Any) -> Any:
        with torch.no_grad():
            found = plain(network(torch.tensor(given, dtype=dtype, device=spec.device)))
        return labelled(found, spec.labels)

    return InThread(predict)


def _network(torch: Any, spec: TorchModel) -> Any:
    if spec.format == "state_dict":
        network = _class_of(spec.module or "")(**spec.arguments)
        data = bytes_of(spec.path, spec.sha256, needed_because=None)
        network.load_state_dict(torch.load(data, weights_only=True, map_location=spec.device))
        return network.eval()
    because = f"a {spec.format} file of torch is a program"
    data = bytes_of(spec.path, spec.sha256, needed_because=because)
    if spec.format == "export":
        return torch.export.load(data).module()
    return torch.jit.load(data, map_location=spec.device).eval()


def _class_of(said: str) -> Any:
    module, _, name = said.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ModelRefused(f"the class {said} is not among this worker's packages: {error}", retryable=True) from error
