import pyarrow.parquet as pq

from trackway.trainer.dump import read_trajectories, write_trajectories
from trackway.wire.agent import GroupRequest


def test_trajectories_read_back_as_they_were_written(sample, scripted, tmp_path):
    request = GroupRequest(run="r", experiment_name="e", step=3, sample=sample(7), n=2, trace=True)
    written = [scripted(request, 0), scripted(request, 1)]
    path = tmp_path / "trajectories" / "step_3.parquet"

    write_trajectories(path, written)

    assert read_trajectories(path) == written
    assert pq.read_table(path, columns=["step", "sample_index", "rollout_n", "score"]).to_pylist() == [
        {"step": 3, "sample_index": 7, "rollout_n": 0, "score": 0.0},
        {"step": 3, "sample_index": 7, "rollout_n": 1, "score": 1.0},
    ]


def test_a_failed_trajectory_has_no_score_and_keeps_its_error(sample, scripted, tmp_path):
    request = GroupRequest(run="r", experiment_name="e", step=3, sample=sample(7))
    failed = scripted(request, 0).model_copy(update={"reward": None})
    path = tmp_path / "step_3.parquet"

    write_trajectories(path, [failed])

    assert read_trajectories(path) == [failed]
    assert pq.read_table(path)["score"].to_pylist() == [None]
