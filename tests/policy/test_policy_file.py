"""Whatever happens to the file, a policy that was valid is in force, and what happened is told once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from app.core.errors import PolicyInvalid, SettingInvalid
from app.core.limits import POLICY_BYTES_MAX
from app.domain.policy.cedar import CedarPolicy
from app.domain.tga.ports import Supervisor
from app.gateway import policy_file
from app.gateway.policy_file import PolicyFile, Reloaded, packaged_policy_text
from tests.policy.asking import PERMIT_ALL, principal_of, request_of, tool_of

DENY_ALL = '@id("none") forbid(principal, action, resource);\n'
BROKEN = "permit(principal, action, resource) when {"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "policy.cedar"
    file.write_text(PERMIT_ALL)
    return file


async def _answer(policy: Supervisor) -> str:
    return (await policy.judge(request_of(), tool_of())).answer


async def _taken(policy: PolicyFile) -> Reloaded | None:
    """What two looks tell, which is what a change takes; further looks must tell nothing."""
    told = [await policy.refresh() for _ in range(5)]
    assert told[2:] == [None] * 3
    return told[0] or told[1]


async def test_without_a_file_the_packaged_policy_is_in_force() -> None:
    policy = PolicyFile.open(None)
    assert policy.text == packaged_policy_text()
    assert await _answer(policy) == "allow"
    assert (await policy.judge(request_of(), tool_of("approval"))).answer == "ask"
    assert (await policy.judge_approval(request_of(), tool_of(), principal_of("ada"))).answer == "allow"
    assert await policy.refresh() is None


async def test_a_file_edited_in_place_is_taken(path: Path) -> None:
    policy = PolicyFile.open(path)
    assert await _answer(policy) == "allow"
    assert await policy.refresh() is None
    path.write_text(DENY_ALL)
    reloaded = await _taken(policy)
    assert reloaded is not None
    assert reloaded.error is None
    assert reloaded.digest == policy.digest
    assert policy.text == DENY_ALL
    assert await _answer(policy) == "deny"


async def test_an_edit_that_leaves_size_and_times_alone_is_taken(path: Path) -> None:
    policy = PolicyFile.open(path)
    before = path.stat()
    changed = PERMIT_ALL.replace('"all"', '"ALL"')
    with path.open("r+") as file:
        file.write(changed)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert await _taken(policy) is not None
    assert policy.text == changed


async def test_a_file_replaced_by_rename_is_taken(path: Path, tmp_path: Path) -> None:
    policy = PolicyFile.open(path)
    new = tmp_path / "new"
    new.write_text(DENY_ALL)
    new.replace(path)
    assert await _taken(policy) is not None
    assert await _answer(policy) == "deny"


async def test_a_link_that_is_pointed_elsewhere_is_followed(path: Path, tmp_path: Path) -> None:
    link, other = tmp_path / "link", tmp_path / "other"
    link.symlink_to(path)
    policy = PolicyFile.open(link)
    other.write_text(DENY_ALL)
    (tmp_path / "link.new").symlink_to(other)
    (tmp_path / "link.new").replace(link)
    assert await _taken(policy) is not None
    assert await _answer(policy) == "deny"


async def test_a_broken_file_leaves_the_old_policy_in_force_is_told_once_and_can_be_repaired(path: Path) -> None:
    policy = PolicyFile.open(path)
    first = policy.digest
    path.write_text(BROKEN)
    told = await _taken(policy)
    assert told is not None
    assert isinstance(told.error, PolicyInvalid)
    assert f"{path}, line 1" in str(told.error)
    assert told.digest == policy.digest == first
    assert policy.last_error is told.error
    assert await _answer(policy) == "allow"
    path.write_text(BROKEN + "{")
    assert await _taken(policy) is not None  # another mistake is news
    path.write_text(DENY_ALL)
    repaired = await _taken(policy)
    assert repaired is not None
    assert repaired.error is None
    assert policy.last_error is None
    assert await _answer(policy) == "deny"


async def test_a_broken_file_is_parsed_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = PolicyFile.open(path)
    parsed: list[bytes] = []

    def parse(raw: bytes, path: Path) -> CedarPolicy:
        parsed.append(raw)
        raise PolicyInvalid("broken")

    monkeypatch.setattr(policy_file, "_parsed", parse)
    path.write_text(BROKEN)
    assert await _taken(policy) is not None
    assert parsed == [BROKEN.encode()]


async def test_going_back_to_the_policy_in_force_ends_the_error(path: Path) -> None:
    policy = PolicyFile.open(path)
    path.write_text(BROKEN)
    await _taken(policy)
    path.write_text(PERMIT_ALL)
    told = await _taken(policy)
    assert told is not None
    assert told.error is None
    assert policy.last_error is None


async def test_a_deleted_file_leaves_the_old_policy_in_force_and_may_come_back(path: Path) -> None:
    policy = PolicyFile.open(path)
    path.unlink()
    told = await _taken(policy)
    assert told is not None
    assert isinstance(told.error, SettingInvalid)
    assert await _answer(policy) == "allow"
    path.write_text(DENY_ALL)
    assert await _taken(policy) is not None
    assert await _answer(policy) == "deny"


async def test_a_folder_or_a_pipe_in_its_place_leaves_the_old_policy_in_force(path: Path) -> None:
    policy = PolicyFile.open(path)
    path.unlink()
    path.mkdir()
    told = await _taken(policy)
    assert told is not None
    assert isinstance(told.error, SettingInvalid)
    assert await _answer(policy) == "allow"
    path.rmdir()
    os.mkfifo(path)  # nobody will ever write to it
    assert await _taken(policy) is not None or policy.last_error is not None
    assert await _answer(policy) == "allow"


async def test_a_file_made_unreadable_leaves_the_old_policy_in_force(path: Path) -> None:
    policy = PolicyFile.open(path)
    path.chmod(0)
    me = os.geteuid()
    if me == 0:  # whom permissions do not stop
        os.seteuid(65534)
    try:
        told = await _taken(policy)
    finally:
        os.seteuid(me)
    assert told is not None
    assert isinstance(told.error, SettingInvalid)
    assert await _answer(policy) == "allow"


async def test_a_file_cut_after_a_permit_while_it_is_written_is_never_in_force(path: Path) -> None:
    policy = PolicyFile.open(path)
    path.write_text(DENY_ALL)
    assert await _taken(policy) is not None
    whole = PERMIT_ALL + 'forbid(principal, action, resource) when { resource.class == "write" };\n'
    with path.open("w", buffering=1) as file:
        for line in whole.splitlines(keepends=True):
            file.write(line)
            file.flush()
            assert await policy.refresh() is None  # the first line alone is valid, and allows
            assert await _answer(policy) == "deny"
    assert await _taken(policy) is not None
    assert policy.text == whole
    assert await _answer(policy) == "deny"


async def test_a_file_that_is_emptied_leaves_the_old_policy_in_force(path: Path) -> None:
    policy = PolicyFile.open(path)
    path.write_text("")
    told = await _taken(policy)
    assert told is not None
    assert told.error is not None
    assert await _answer(policy) == "allow"


async def test_a_file_beyond_the_limit_or_not_text_leaves_the_old_policy_in_force(path: Path) -> None:
    policy = PolicyFile.open(path)
    too_large = "//" + "é" * POLICY_BYTES_MAX  # cut at the limit it would end within a character
    unrecordable = PERMIT_ALL + "\n" * (POLICY_BYTES_MAX - len(PERMIT_ALL))  # on the record twice as long
    for bad, why in (
        (too_large.encode(), "too large"),
        (PERMIT_ALL.encode() + b"\n\xff", "line 3: not UTF-8"),
        (unrecordable.encode(), "cannot be recorded: the document is too large"),
        (PERMIT_ALL.encode() + b"// \x00", "cannot be recorded: a string holds NUL"),
    ):
        path.write_bytes(bad)
        told = await _taken(policy)
        assert told is not None
        assert isinstance(told.error, PolicyInvalid)
        assert why in told.error.what
        assert await _answer(policy) == "allow"


async def test_warnings_of_a_new_policy_are_told(path: Path) -> None:
    policy = PolicyFile.open(path)
    path.write_text(PERMIT_ALL + "forbid(principal, action, resource) when { context.requester == principal };")
    told = await _taken(policy)
    assert told is not None
    assert len(told.warnings) == 1


def test_a_gateway_does_not_start_on_a_bad_file(path: Path, tmp_path: Path) -> None:
    path.write_text(BROKEN)
    with pytest.raises(PolicyInvalid, match=r"policy\.cedar, line 1: unexpected end of input"):
        PolicyFile.open(path)
    path.write_bytes(b"\n\n\xff")
    with pytest.raises(PolicyInvalid, match=r"policy\.cedar, line 3: not UTF-8"):
        PolicyFile.open(path)
    for unreadable in (tmp_path / "none.cedar", tmp_path):
        with pytest.raises(SettingInvalid):
            PolicyFile.open(unreadable)
