"""The bundle of a tenant, or of its trace: what is its own or proves it, and of the others digests alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from app.core.digest import digest_of_bytes
from app.core.ed25519 import key_id_of
from app.core.errors import TraceNotFound
from app.domain.log.bundle import ENTRIES, Filter
from app.domain.system.documents import PolicySet, ToolPin
from tests.export.changing import change_manifest, lines_of, write_lines
from tests.export.forging import key_of
from tests.export.world import World, copied, judge, judge_alone
from tests.traces import time_at, trace_id

ACME = {"principal": {"principal_id": "agent-9", "tenant": "acme"}, "server_id": "acme/crm"}
SECRETS = ("merger", "Wintermute", "because of a lawsuit", "alice", "tool-of-default", "ticket 3")


async def _two_tenants(world: World) -> Ed25519PrivateKey:
    """The default tenant has pins, a policy, a supervisor and an erasure; acme a supervisor, an erasure, and decisions
    that the gateway has signed. Returns the gateway's key."""
    gateway, carol = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    await world.announce()
    await world.system.append("default", lambda _: [_pin("default", "tool-of-default", "merger")])
    await world.system.append("default", lambda _: [key_of(gateway, principal_id=None)])
    await world.system.append("acme", lambda _: [_pin("acme", "tool-of-acme", "acme's own")])
    await world.system.append("acme", lambda _: [key_of(carol, principal_id="carol", tenant="acme")])
    text = 'forbid(principal == Principal::"Wintermute", action, resource);'
    policy = PolicySet(
        system_id="default",
        recorded_at=time_at(0),
        recorded_by="gateway",
        policy_digest=digest_of_bytes(text.encode()),
        text=text,
    )
    await world.system.append("default", lambda _: [policy])
    await world.fill(1, 6)
    by_gateway = World(world.database, world.sessions, world.store, world.keys, person=gateway)
    by_carol = World(world.database, world.sessions, world.store, world.keys, person=carol)
    await world.append(by_gateway.signed_trace(51, **ACME, by="dave"))
    await world.append(by_carol.signed_trace(54, **ACME, by="carol"))
    await world.append(by_gateway.signed_trace(57, **ACME, by="dave"))
    await world.sequence()
    await world.erase(3, rationale="because of a lawsuit")
    await world.erase(57, tenant="acme", rationale="acme's reason")
    await world.sequence()
    return gateway


def _pin(tenant: str, tool: str, description: str) -> ToolPin:
    definition = {"description": description}
    return ToolPin(
        system_id=tenant,
        recorded_at=time_at(0),
        recorded_by="gateway",
        server_id="crm",
        tool_name=tool,
        change="pinned",
        definition_digest=digest_of_bytes(json.dumps(definition).encode()),
        definition=definition,
    )


@pytest.mark.parametrize("wanted", [Filter(tenant="acme"), Filter(trace_id=trace_id(51))], ids=["tenant", "trace"])
async def test_a_tenant_s_bundle_holds_nothing_of_another_but_digests_and_gateways_keys(
    world: World, tmp_path: Path, wanted: Filter
) -> None:
    gateway = await _two_tenants(world)
    bundle = tmp_path / "bundle"
    await world.export(bundle, wanted)
    text = "".join(file.read_text() for file in bundle.rglob("*") if file.is_file() and "schemas" not in file.parts)
    assert [secret for secret in SECRETS if secret in text] == []
    assert "acme's reason" in text
    assert key_id_of(gateway.public_key().public_bytes_raw()) in text
    lines = lines_of(bundle, ENTRIES)
    shared = [
        (line["sequence_number"], line["artifact"] is None) for line in lines if line["stream"] == "system:default"
    ]
    # The log's key, alice's, a pin, the gateway's key. What follows the last key of a gateway proves nothing of acme's.
    assert shared == [(1, False), (2, True), (3, True), (4, False)]
    assert {line["stream"] for line in lines if line["stream"].startswith("system:")} == {
        "system:acme",
        "system:default",
    }
    verdict = judge(bundle, world.verifier_key)
    assert verdict.is_sound
    assert judge_alone(bundle, world.verifier_key).is_sound
    assert verdict.report is not None
    assert verdict.report.manifest is not None
    assert verdict.report.manifest.filter.tenant == "acme"
    assert verdict.report.streams.payloads_withheld == 2
    assert any("2 system entries of other tenants than acme" in sentence for sentence in verdict.report.unknown)


async def test_a_trace_is_exported_for_its_own_tenant_only(world: World, tmp_path: Path) -> None:
    await _two_tenants(world)
    for wanted in (Filter(tenant="acme", trace_id=trace_id(6)), Filter(tenant="acme", trace_id=trace_id(999))):
        with pytest.raises(TraceNotFound):
            await world.export(tmp_path / "bundle", wanted)


async def test_the_default_tenant_s_own_bundle_is_whole(world: World, tmp_path: Path) -> None:
    await _two_tenants(world)
    await world.export(tmp_path / "bundle", Filter(tenant="default"))
    verdict = judge(tmp_path / "bundle", world.verifier_key)
    assert verdict.is_sound
    assert verdict.report is not None
    assert verdict.report.streams.payloads_withheld == 0
    assert "acme" not in (tmp_path / "bundle" / ENTRIES).read_text()


async def test_what_is_withheld_vouches_for_nothing_and_one_s_own_is_never_withheld(
    world: World, tmp_path: Path
) -> None:
    await _two_tenants(world)
    whole = tmp_path / "whole"
    await world.export(whole, Filter(tenant="acme"))
    lines = lines_of(whole, ENTRIES)

    def places(stream: str, number: int) -> int:
        found = [(line["stream"], line["sequence_number"]) for line in lines]
        return found.index((stream, number))

    acme, erased = f"trace:{trace_id(51)}", f"trace:{trace_id(57)}"
    for name, place, found in (
        ("the_gateway_s_key", places("system:default", 4), [("SIGNATURE_INVALID", acme, 2)]),
        ("a_pin_of_its_own", places("system:acme", 1), [("STATE_CHECKSUM_MISMATCH", "system:acme", 1)]),
        ("its_erasure", places("system:acme", 3), [("STATE_CHECKSUM_MISMATCH", "system:acme", 3)]),
    ):
        folder = copied(whole, tmp_path / name)
        write_lines(
            folder, ENTRIES, [{**line, "artifact": None} if n == place else line for n, line in enumerate(lines)]
        )
        ours, theirs = judge(folder, world.verifier_key), judge_alone(folder, world.verifier_key)
        assert ours.findings[: len(found)] == found, name
        assert ours.findings == theirs.findings
        if name == "its_erasure":
            assert ours.findings[1:] == [("STATE_RECOVERY_FAILED", erased, 4)]


@pytest.mark.parametrize("tenant", ["default", "wintermute", None])
async def test_a_bundle_is_not_passed_off_as_another_tenant_s(world: World, tmp_path: Path, tenant: str | None) -> None:
    """Then the system stream that was whole would be another's, and could be withheld."""
    await _two_tenants(world)
    bundle = tmp_path / "bundle"
    await world.export(bundle, Filter(tenant="acme"))
    change_manifest(bundle, filter={"since": time_at(0), "until": None, "tenant": tenant, "trace_id": None})
    ours, theirs = judge(bundle, world.verifier_key), judge_alone(bundle, world.verifier_key)
    assert ours.findings == theirs.findings
    assert ("BUNDLE_INVALID" if tenant else "STATE_CHECKSUM_MISMATCH") in ours.codes
