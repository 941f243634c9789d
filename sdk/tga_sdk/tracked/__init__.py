"""Proxies of a run's state: they read and change its document, check what is put in, and record each change."""

from __future__ import annotations

from tga_sdk.changes import Document
from tga_sdk.shapes import Shape
from tga_sdk.tracked.lists import ListProxy
from tga_sdk.tracked.mappings import DictProxy
from tga_sdk.tracked.node import PROXIES, Node, node_of
from tga_sdk.tracked.records import proxy_of

PROXIES.list, PROXIES.mapping, PROXIES.record = ListProxy, DictProxy, proxy_of


def root_of(doc: Document, shape: Shape) -> Node:
    """What the program sees as the whole state."""
    return node_of(doc, doc.root, shape, None, "")
