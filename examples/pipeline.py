"""A document pipeline with large artifacts.

    TGA_HOME=.tga .venv/bin/python examples/pipeline.py

Each stage's result is stored under its SHA-256 before it is recorded, and fetched when it is needed: after a crash no
stage is computed again, whatever its size. The parts are worked on at the same time.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter

from pydantic import BaseModel

from tga_sdk import Context, procedure, serving

PARTS = 4


class Job(BaseModel):
    pages: int


class Report(BaseModel):
    pages: int
    bytes: int
    words: int
    most_common: str


def scan(pages: int) -> bytes:
    """A scanned document: 64 KiB a page. The journal holds its digest, the blob store its bytes."""
    page = "the quick brown fox jumps over the lazy dog\n" * 1_490
    return "".join(f"page {number}\n{page}" for number in range(pages)).encode()


def count(document: bytes, part: int) -> dict[str, int]:
    """The words of one part of the document."""
    lines = document.decode().splitlines()
    return dict(Counter(" ".join(lines[part::PARTS]).split()))


def merge(counts: list[dict[str, int]]) -> dict[str, int]:
    whole: Counter[str] = Counter()
    for one in counts:
        whole.update(one)
    return dict(whole)


@procedure(name="pipeline")
async def pipeline(ctx: Context[None], input: Job) -> Report:
    document = await ctx.step("scan", scan, input.pages)
    parts = [functools.partial(ctx.step, "count", functools.partial(count, document, part)) for part in range(PARTS)]
    counts = await ctx.gather(*parts)
    index = await ctx.step("merge", merge, counts, tier="artifact")
    ctx.log(f"{len(index)} different words")
    most_common = max(sorted(index), key=lambda word: index[word])
    return Report(pages=input.pages, bytes=len(document), words=sum(index.values()), most_common=most_common)


async def main() -> None:
    async with serving(pipeline) as client:
        run = await client.start(pipeline, Job(pages=32))
        print(await client.result(run.run_id, Report))


if __name__ == "__main__":
    asyncio.run(main())
