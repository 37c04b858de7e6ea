"""A fault's moment follows from a run's progress, even while the agent is away or has been replaced."""

from tests.chaos.fault_schedule import Moment
from tests.chaos.run_progress import StepProgress, ended_trajectories

EXPOSITION = """# HELP trackway_trajectories_total Ended trajectories by kind and outcome
# TYPE trackway_trajectories_total counter
trackway_trajectories_total{kind="training",outcome="answered"} 13.0
trackway_trajectories_total{kind="training",outcome="max_turns"} 4.0
trackway_trajectories_total{kind="training",outcome="aborted"} 3.0
trackway_trajectories_total{kind="validation",outcome="answered"} 8.0
"""


def test_training_trajectories_that_were_delivered_are_counted():
    assert ended_trajectories(EXPOSITION) == 17
    assert ended_trajectories("") == 0


def test_each_step_counts_from_0():
    progress = StepProgress()

    assert [progress.trajectories(1, ended) for ended in (40, 43, 52)] == [0, 3, 12]
    assert [progress.trajectories(2, ended) for ended in (56, 57)] == [0, 1]


def test_a_new_replica_of_the_agent_counts_from_0():
    progress = StepProgress()

    assert [progress.trajectories(1, ended) for ended in (40, 43, 2, 5)] == [0, 3, 0, 3]


def test_a_moment_is_reached_by_its_trajectories_or_when_its_step_has_passed():
    progress, moment = StepProgress(), Moment(1, 5)

    looks = [(0, 20), (1, 20), (1, 24), (1, None), (1, 25)]
    assert [progress.has_reached(moment, *look) for look in looks] == [False, False, False, False, True]
    assert progress.has_reached(moment, 2, None)


def test_a_moment_without_trajectories_is_reached_with_its_step():
    assert StepProgress().has_reached(Moment(0, 0), 0, None)
