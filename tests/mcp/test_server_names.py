"""Names of tools: what common clients take, and never two tools under one."""

from __future__ import annotations

import re

from hypothesis import example, given
from hypothesis import strategies as st

from app.mcp_server.names import by_name, name_of

# What a configuration admits in a server's and a tool's name.
NAMES = st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="/"), min_size=1, max_size=128)
CLOSE = st.text("ab_-.0", min_size=1, max_size=6)
PAIRS = st.tuples(NAMES | CLOSE, NAMES | CLOSE)


def test_a_tool_is_known_by_its_server_and_its_own_name() -> None:
    assert name_of("bank", "charge") == "bank__charge"
    assert name_of(None, "charge") == "charge"


def test_a_name_that_does_not_fit_gets_the_same_short_form_everywhere() -> None:
    assert name_of("bank", "charge.card") == "bank__charge_card_acaeb10723"
    assert name_of("bank", "x" * 80) == f"bank__{'x' * 47}_91aa0f699f"
    assert name_of("tga", "approve") != "tga__approve"


@given(PAIRS)
def test_every_name_fits_what_common_clients_take(pair: tuple[str, str]) -> None:
    assert re.fullmatch("[a-zA-Z0-9_-]{1,64}", name_of(*pair))
    assert re.fullmatch("[a-zA-Z0-9_-]{1,64}", name_of(None, pair[1]))


@given(st.lists(PAIRS, min_size=2, max_size=8, unique=True))
@example([("a", "b__c"), ("a__b", "c")])
@example([("a", "_b"), ("a_", "b")])
@example([("a", "b.c"), ("a", "b_c")])
@example([("a", "b.c"), ("a", name_of("a", "b.c").removeprefix("a__"))])
def test_two_tools_never_share_a_name(pairs: list[tuple[str, str]]) -> None:
    named = by_name(pairs)
    assert sorted(named.values()) == sorted(pairs)
    own = by_name([(None, tool) for _, tool in pairs])
    assert len(own) == len({tool for _, tool in pairs})
