"""A schedule of faults is a pure function of its seed, and leaves the run room to survive each fault."""

from signal import SIGKILL, SIGSTOP, SIGTERM

import pytest

from tests.chaos.chaos_settings import IN_CI, OF_KINDS, ON_DEMAND, TRAJECTORIES, ChaosSettings, RunKind
from tests.chaos.fault_schedule import SIGNALS, Fault, Moment, Target, fault_schedule, spread

TARGETS = IN_CI.targets or ()
SCHEDULES = [fault_schedule(seed, 6, 8, TRAJECTORIES, TARGETS) for seed in range(300)]


def test_the_schedule_of_ci_is_this_one():
    assert IN_CI.schedule == (
        Fault(Moment(1, 4), Target.WORKER, SIGKILL),
        Fault(Moment(2, 15), Target.ROLLOUT, SIGSTOP, 2.9),
        Fault(Moment(3, 13), Target.ROLLOUT, SIGKILL),
        Fault(Moment(4, 10), Target.MLFLOW, SIGTERM),
    )


def test_a_seed_gives_the_same_schedule_each_time_and_another_seed_another_one():
    assert [fault_schedule(seed, 6, 8, TRAJECTORIES, TARGETS) for seed in range(300)] == SCHEDULES
    assert len(set(SCHEDULES)) == 300


@pytest.mark.parametrize("kind", RunKind)
def test_the_seeds_on_demand_send_every_signal_to_every_target_of_their_kind(kind: RunKind):
    of_kind = [settings for settings in (*ON_DEMAND, *OF_KINDS) if settings.kind is kind]
    sent = {(fault.target, fault.signal) for settings in of_kind for fault in settings.schedule}

    assert len(of_kind) == (10 if kind is RunKind.PLAIN else 5)
    assert sent == {(target, signal) for target in kind.targets for signal in SIGNALS}


def test_together_the_kinds_signal_every_target():
    assert {target for kind in RunKind for target in kind.targets} == set(Target)


def test_faults_come_in_order_one_a_step_and_none_in_the_last_step():
    for schedule in SCHEDULES:
        steps = [fault.moment.step for fault in schedule]
        assert steps == sorted(set(steps))
        assert set(steps) <= set(range(7))
        assert all(0 <= fault.moment.trajectories < TRAJECTORIES for fault in schedule)
        assert len({(fault.target, fault.signal) for fault in schedule}) == 6


@pytest.mark.parametrize("settings", [*ON_DEMAND, *OF_KINDS], ids=lambda settings: settings.name)
def test_no_fault_follows_one_during_whose_recovery_the_run_may_end(settings: ChaosSettings):
    sent = [(fault.target, fault.signal) for fault in settings.schedule]

    assert (Target.CONTROLLER, SIGTERM) not in sent[:-1]


def test_a_stopped_process_goes_on_after_1_to_5_seconds():
    stops = [fault for schedule in SCHEDULES for fault in schedule if fault.signal is SIGSTOP]
    others = [fault for schedule in SCHEDULES for fault in schedule if fault.signal is not SIGSTOP]

    assert len(stops) > 300
    assert {1.0 <= fault.stop_s <= 5.0 for fault in stops} == {True}
    assert {fault.stop_s for fault in others} == {0.0}


def test_faults_whose_steps_went_by_are_spread_over_the_steps_that_are_left():
    faults = [Fault(Moment(step, 5), Target.TOOLS, SIGKILL) for step in (2, 3, 12)]

    assert spread(faults, 2, 16) == tuple(faults)
    assert [fault.moment for fault in spread(faults, 7, 16)] == [Moment(9, 5), Moment(11, 5), Moment(13, 5)]
    assert [fault.moment for fault in spread(faults, 3, 16)] == [Moment(6, 5), Moment(9, 5), Moment(12, 5)]
    assert [fault.moment.step for fault in spread(faults[:2], 14, 16)] == [14, 14]
    assert spread([], 3, 16) == ()


def test_more_faults_than_steps_or_pairs_are_refused():
    with pytest.raises(ValueError, match="expected at most 7 faults, got 8; give the run more steps or draw fewer"):
        fault_schedule(0, 8, 8, TRAJECTORIES, TARGETS)
    with pytest.raises(ValueError, match="expected at most 24 faults, got 25"):
        fault_schedule(0, 25, 100, TRAJECTORIES, TARGETS)
