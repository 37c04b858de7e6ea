import pyarrow.parquet as pq

from trackway.trainer.run_state.trajectories import read_trajectories, write_trajectories
from trackway.wire.agent import GroupRequest
from trackway.wire.errors import ErrorCode
from trackway.wire.trajectory import Incident, StopReason, ToolCallRecord, Turn


def test_trajectories_read_back_as_they_were_written(sample, scripted, tmp_path):
    request = GroupRequest(run="r", experiment_name="e", step=3, sample=sample(7), n=2, trace=True)
    trace = {"span_id": "b" * 16, "trace_bytes": 1234, "incidents": [Incident.RETRIED, Incident.TOOL_TIMEOUT]}
    trace["incident_services"] = {Incident.RETRIED: ["rollout", "tools"]}
    written = [scripted(request, 0), scripted(request, 1).model_copy(update=trace)]
    path = tmp_path / "trajectories" / "step_3.parquet"

    write_trajectories(path, written)

    read = read_trajectories(path)
    assert read == written
    assert (read[1].span_id, read[1].trace_bytes, read[1].incidents) == (
        "b" * 16,
        1234,
        [Incident.RETRIED, Incident.TOOL_TIMEOUT],
    )
    assert pq.read_table(path, columns=["step", "sample_index", "rollout_n", "score"]).to_pylist() == [
        {"step": 3, "sample_index": 7, "rollout_n": 0, "score": 0.0},
        {"step": 3, "sample_index": 7, "rollout_n": 1, "score": 1.0},
    ]


def test_rows_whose_index_is_text_read_back_and_are_filtered_by_it(sample, scripted, tmp_path):
    rows = [sample(7), sample(8)]
    rows[1] = rows[1].model_copy(update={"extra_info": {**rows[1].extra_info, "index": "django__django-11099"}})
    requests = [GroupRequest(run="r", experiment_name="e", step=3, sample=row) for row in rows]
    written = [scripted(request, 0) for request in requests]
    path = tmp_path / "step_3.parquet"

    write_trajectories(path, written)

    assert read_trajectories(path) == written
    assert [trajectory.tags.sample_index for trajectory in read_trajectories(path)] == [7, "django__django-11099"]
    assert pq.read_table(path)["sample_index"].to_pylist() == ["7", "django__django-11099"]


def test_numbers_stay_a_column_of_numbers(sample, scripted, tmp_path):
    path = tmp_path / "step_3.parquet"
    write_trajectories(path, [scripted(GroupRequest(run="r", experiment_name="e", step=3, sample=sample(7)), 0)])

    assert str(pq.read_schema(path).field("sample_index").type) == "int64"


def test_a_failed_trajectory_has_no_score_and_keeps_its_error(sample, scripted, tmp_path):
    request = GroupRequest(run="r", experiment_name="e", step=3, sample=sample(7))
    failed = scripted(request, 0).model_copy(update={"reward": None})
    path = tmp_path / "step_3.parquet"

    write_trajectories(path, [failed])

    assert read_trajectories(path) == [failed]
    assert pq.read_table(path)["score"].to_pylist() == [None]


def test_a_file_from_before_traces_were_weighed_reads_back(sample, scripted, tmp_path):
    written = scripted(GroupRequest(run="r", experiment_name="e", step=3, sample=sample(7), trace=True), 0)
    path = tmp_path / "step_3.parquet"
    write_trajectories(path, [written.model_copy(update={"span_id": "b" * 16, "trace_bytes": 1})])
    pq.write_table(pq.read_table(path).drop_columns(["span_id", "trace_bytes", "incidents", "incident_services"]), path)

    assert read_trajectories(path) == [written]


def test_the_records_of_tool_calls_read_back(sample, scripted, tmp_path):
    calls = [
        ToolCallRecord(tool="python", tool_call_id="call_0_0", seconds=0.25, reward=-0.5, metrics={"lines": 3.0}),
        ToolCallRecord(tool="python", tool_call_id="call_0_1", error=ErrorCode.TOOL_FAILED, truncated=True),
    ]
    turn = Turn(index=0, messages=[], response_start=0, response_end=1, finish_reason="stop", calls=calls)
    ending = {"turns": [turn], "stop_reason": StopReason.BAD_CALL}
    written = scripted(GroupRequest(run="r", experiment_name="e", step=3, sample=sample(7)), 0).model_copy(
        update=ending
    )
    path = tmp_path / "step_3.parquet"

    write_trajectories(path, [written])

    [read] = read_trajectories(path)
    assert read == written
    assert (read.turns[0].calls, read.stop_reason) == (calls, StopReason.BAD_CALL)


def test_a_turn_from_before_calls_had_records_reads_back():
    old = {"index": 0, "messages": [], "response_start": 0, "response_end": 1, "finish_reason": "stop"}

    turn = Turn.model_validate(old | {"calls_executed": 2})

    assert (turn.calls_executed, turn.calls) == (2, [])
