"""An answer's head and body leave in one write; a head that has no body yet is not kept back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from app.edge.protocol import _AnswerFirst

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"


class Transport(asyncio.Transport):
    """Notes what is written, each write by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.was_closed_after = -1

    def write(self, data: Any) -> None:
        self.writes.append(bytes(data))

    def is_closing(self) -> bool:
        return False


@pytest.fixture
async def noted() -> tuple[Transport, _AnswerFirst]:
    transport = Transport()

    def close() -> None:
        transport.was_closed_after = len(transport.writes)

    return transport, _AnswerFirst(transport, close, asyncio.get_running_loop())


async def test_head_and_body_are_one_write(noted: tuple[Transport, _AnswerFirst]) -> None:
    transport, answering = noted
    for _ in range(2):
        answering.write(HEAD)
        answering.write(b"{}")
    await asyncio.sleep(0)
    assert transport.writes == [HEAD + b"{}"] * 2


async def test_a_head_without_a_body_goes_out_when_the_loop_turns(noted: tuple[Transport, _AnswerFirst]) -> None:
    transport, answering = noted
    answering.write(HEAD)
    await asyncio.sleep(0)
    assert transport.writes == [HEAD]
    answering.write(b"data: 1\n\n")
    answering.write(b"data: 2\n\n")
    await asyncio.sleep(0)
    assert transport.writes == [HEAD, b"data: 1\n\n", b"data: 2\n\n"]


async def test_a_body_is_never_overtaken(noted: tuple[Transport, _AnswerFirst]) -> None:
    """Not even by one that looks like a head, nor by the end of the connection."""
    transport, answering = noted
    answering.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    answering.write(HEAD)
    answering.write(b"HTTP/")
    answering.write(b"!")
    assert b"".join(transport.writes) == b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"HTTP/!"
    answering.write(HEAD)
    answering.close()
    assert transport.writes[-1] == HEAD
    assert transport.was_closed_after == len(transport.writes)
