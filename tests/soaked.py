"""Rows of parametrized tests that `make soak-tests` has, and `make test` has not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest


def soaked(*values: Any) -> Any:
    """Returns the values of such a row."""
    return pytest.param(*values, marks=pytest.mark.soak)


# Of these, `make test` has every second case and `make soak-tests` the others: a case of each kind is in both halves,
# and the same rule is tried by simulated workers as well.
HALVED = frozenset(
    """
    cli/test_messages.py::test_one_line_says_what_to_do
    core/test_issue_order.py::test_every_step_runs_without_tags
    core/test_issue_order.py::test_plans_and_heals_run_without_tags
    core/test_offload.py::test_a_death_and_a_hand_over_after_any_action
    core/test_offload.py::test_a_link_that_carries_them_halves_the_stash_of_the_first_worker_at_two_percent
    core/test_plan_repair.py::test_a_repair_does_the_work_of_the_planner_in_no_more_time
    core/test_planner.py::test_every_single_kill
    core/test_schedule_formulas.py::test_waiting_and_memory_are_what_the_literature_says
    core/test_schedule_kills.py::test_every_single_kill
    e2e/test_same_bits.py::test_every_cut_equals_the_plain_loop
    e2e/test_schedule_kills.py::test_nothing_comes_of_a_kill_under_any_schedule
    e2e/test_state_kills.py::test_nothing_comes_of_a_kill
    e2e/test_streams.py::test_a_death_changes_no_bit
    e2e/test_variable_lengths.py::test_lengths_and_deaths_change_no_bit
    runtime/test_device.py::test_a_job_with_a_death_and_a_heal_has_the_bits_of_the_host
    runtime/test_executor.py::test_a_death_changes_no_bit
    runtime/test_executor.py::test_a_death_changes_no_bit_of_what_is_streamed
    runtime/test_executor.py::test_every_replica_has_the_bits_of_a_run_without_any
    runtime/test_grpc_import.py::test_a_fork_beside_a_call_is_not_aborted
    runtime/test_hand_over.py::test_a_hand_over_inside_a_step_changes_no_bit
    runtime/test_hand_over.py::test_no_forward_is_run_again_if_residuals_are_sent
    runtime/test_optimizer_runs.py::test_killed_resumed_and_plain_are_one_trajectory
    runtime/test_ordered_transport.py::test_every_schedule_with_a_kill_and_a_heal
    runtime/test_pure_check.py::test_no_built_in_model_is_refused
    runtime/test_pure_check.py::test_what_is_pure_is_not_refused
    runtime/test_read_values.py::test_a_run_has_the_bits_of_a_plain_loop_over_batches_with_and_without_padding
    runtime/test_resumed_job.py::test_every_step_can_be_resumed_with_another_cut
    runtime/test_stage.py::test_what_is_redone_has_the_same_bits_and_leaves_no_trace
    runtime/test_weights.py::test_an_export_begins_a_run_with_its_bits
    runtime/test_worker_bytes.py::test_the_model_predicts_the_tensors_of_each_worker
    security/test_events_bounded.py::test_a_run_takes_the_bytes_that_it_may_and_says_what_it_left_out
    security/test_foreign_files.py::test_a_function_of_python_in_a_foreign_file_is_not_called
    security/test_foreign_files.py::test_code_of_a_foreign_file_waits_for_the_user
    security/test_hostile_checkpoints.py::test_a_hostile_checkpoint_is_answered_in_words
    security/test_hostile_runs.py::test_an_endless_line_is_refused_in_words
    security/test_links_between_hosts.py::test_strangers_hold_up_no_link
    simulation/test_links.py::test_one_end_of_a_dark_edge_is_given_up_and_no_other_worker
    simulation/test_shards.py::test_a_shard_survives_every_death
    simulation/test_simulation.py::test_a_coordinator_that_dies_at_any_moment_is_replaced
    simulation/test_simulation.py::test_a_death_before_the_first_step_starts_the_job_again
    simulation/test_simulation.py::test_a_worker_leaves_and_another_dies
    simulation/test_simulation.py::test_pairs_of_kills
    simulation/test_simulation.py::test_some_single_kills_of_other_shapes
    simulation/test_slices.py::test_a_death_at_a_moment_of_the_first_step
    """.split()
)


def halve(items: Sequence[pytest.Item]) -> None:
    """Marks every second case of the `HALVED` tests, of those that are not in the soak anyway."""
    seen: Counter[str] = Counter()
    for item in items:
        name = item.nodeid.removeprefix("tests/").partition("[")[0]
        if name in HALVED and item.get_closest_marker("soak") is None:
            seen[name] += 1
            if seen[name] % 2 == 0:
                item.add_marker(pytest.mark.soak)
