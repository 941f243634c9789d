"""The console's fifteen points of acceptance, and the tests that show each: in a real browser, but for 13, which counts
what the database reads.

1. The strict policy with trusted types is violated on no page.
2. Without JavaScript every page reads; deciding, resolving, filtering and moving in a run work.
3. axe finds nothing serious, light and dark, wide and narrow; nothing scrolls sideways at 320.
4. Approving by keyboard alone; the call is seen COMPLETED without a reload.
5. A request that is decided elsewhere turns to "overtaken"; a second decision gets its code.
6. A request for a changed tool offers no Approve.
7. Hostile content is text, numbered and cut, in pages below 200 KB.
8. Of a held call nothing is preselected, nothing is sent without a reason, redispatch warns.
9. One byte changed in the database is red at its entry and on every page.
10. "Verify in this browser" recomputes, and fails at the entry that was altered on the way.
11. Slider, arrows and address show the recorded state; a fork leaves its source as it was.
12. A killed gateway is told, and the page catches up without a gap.
13. A page of many costs what a page of few does.
14. Without a role there is no button, and the POST answers 403.
15. The session's cookie is HttpOnly and SameSite=Strict, a foreign form is refused, the key is nowhere.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.console.browsing import Desk

TESTS = Path(__file__).parents[1]
SHOWN_BY = {
    1: [
        "console/test_signing_in.py::test_every_answer_has_the_strict_policy",
        "console/test_signing_in.py::test_the_policy_stops_inline_scripts_and_untrusted_markup",
        "console/test_attacks.py::test_every_page_refuses_frames_foreign_code_and_caches",
    ],
    2: [
        "console/test_approvals.py::test_without_a_script_a_request_is_read_and_denied",
        "console/test_calls.py::test_filters_are_chips_and_stand_in_the_address_without_a_script",
        "console/test_calls.py::test_a_hold_is_ended_without_a_script_and_what_was_typed_is_kept",
        "console/test_runs.py::test_a_question_is_answered_in_place_without_a_script_and_the_program_goes_on",
        "console/test_trust.py::test_the_whole_log_is_verified_from_the_page_and_says_what_was_not_compared",
    ],
    3: [
        "console/test_approvals.py::test_the_pages_are_fit_for_everyone",
        "console/test_calls.py::test_the_pages_are_fit_for_everyone",
        "console/test_runs.py::test_both_pages_are_readable_narrow_and_wide",
        "console/test_trust.py::test_the_pages_are_readable_narrow_and_wide",
        "console/test_signing_in.py::test_the_door_is_fit_for_everyone",
        "console/test_what_people_did.py::test_the_page_is_fit_for_everyone",
        "console/test_calls.py::test_the_longest_key_stays_inside_of_a_narrow_page",
    ],
    4: ["console/test_approvals.py::test_approving_by_keyboard_alone_runs_it_once_and_it_is_seen_without_reload"],
    5: [
        "console/test_approvals.py::test_a_request_that_is_decided_elsewhere_turns_to_overtaken_by_itself",
        "console/test_approvals.py::test_a_second_decision_gets_its_code_and_who_was_first",
    ],
    6: ["console/test_approvals.py::test_a_request_for_a_changed_tool_offers_no_approve"],
    7: [
        "console/test_approvals.py::test_hostile_content_is_text_that_is_numbered_and_cut",
        "console/test_attacks.py::test_hostile_text_is_text_wherever_it_can_be_written",
        "console/test_hostile_content.py::test_a_tool_server_speaks_as_it_likes_and_is_read_as_text",
        "console/test_hostile_content.py::test_what_an_agent_sends_is_refused_or_shown_as_text",
        "console/test_hostile_content.py::test_a_definition_that_changed_into_something_hostile_is_compared_as_text",
        "console/test_what_people_did.py::test_a_page_of_hostile_reasons_is_text_and_stays_small",
        "console/test_hostile_content.py::test_a_run_of_two_hundred_hostile_operations_that_asks",
    ],
    8: [
        "console/test_calls.py::test_no_choice_is_made_for_the_operator_and_without_a_reason_nothing_is_recorded",
    ],
    9: ["console/test_tampering.py::test_a_changed_byte_is_red_at_its_entry_and_on_every_page_and_hides_nothing_else"],
    10: [
        "console/test_trust.py::test_a_call_is_recomputed_in_the_browser_from_what_it_fetches",
        "console/test_trust.py::test_one_byte_changed_on_the_way_fails_at_its_place",
    ],
    11: [
        "console/test_runs.py::test_slider_arrows_and_address_show_the_state_of_the_record",
        "console/test_runs.py::test_a_fork_from_an_entry_leaves_the_source_as_it_was",
    ],
    12: ["console/test_approvals.py::test_a_killed_gateway_is_told_and_the_page_catches_up_without_a_gap"],
    13: [
        "postgres/test_listing.py::test_ten_times_as_many_traces_cost_a_page_no_more_than_twice",
        "postgres/test_page_costs.py::test_find_keys_heads_and_policy_sets_cost_the_same_however_many_there_are",
        "postgres/test_page_costs.py::test_a_page_of_a_long_run_reads_no_more_rows_than_one_of_a_short_run",
    ],
    14: [
        "console/test_approvals.py::test_without_the_role_there_is_no_button_but_its_place_and_the_form_is_refused",
        "console/test_calls.py::test_ending_a_hold_is_an_operators",
        "console/test_runs.py::test_who_lacks_the_role_sees_no_button_and_gets_no_effect",
        "console/test_attacks.py::test_a_role_without_the_right_posts_in_vain",
        "console/test_what_people_did.py::test_who_sees_only_its_own_sees_no_acts_and_is_told_which_role_does",
    ],
    15: [
        "console/test_signing_in.py::test_a_key_becomes_a_session_that_no_script_reads_and_the_key_is_nowhere",
        "console/test_signing_in.py::test_a_form_from_elsewhere_or_without_the_sessions_token_is_refused",
        "console/test_attacks.py::test_no_form_is_taken_without_its_sessions_token_or_from_another_site",
    ],
}


def test_every_point_is_listed_here() -> None:
    assert [int(number) for number in re.findall(r"^(\d+)\. ", __doc__ or "", re.MULTILINE)] == sorted(SHOWN_BY)
    assert sorted(SHOWN_BY) == list(range(1, 16))


@pytest.mark.parametrize("number", sorted(SHOWN_BY))
def test_the_tests_of_each_point_are_there_and_use_a_browser(number: int) -> None:
    for place in SHOWN_BY[number]:
        file, _, name = place.partition("::")
        tree = ast.parse((TESTS / file).read_text("utf-8"))
        (test,) = [
            one for one in tree.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and one.name == name
        ]
        if file.startswith("console/"):
            given = {argument.arg for argument in test.args.args}
            assert "desk" in given, f"{place} has no {Desk.__name__}: a gateway and a browser"
