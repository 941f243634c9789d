"""What a build computes: the SDK of exactly the gateway's version is one of the dependencies.

The version stands in app/__init__.py alone; both distributions read it there. In an sdist it is in PKG-INFO already.
"""

from __future__ import annotations

from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class Dependencies(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        metadata["dependencies"] = [*self.config["dependencies"], f"tga-sdk=={metadata['version']}"]
