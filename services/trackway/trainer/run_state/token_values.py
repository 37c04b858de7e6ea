"""Values that an update computed of each token, beside the trajectories of its step (`trackway.save_token_values`).

    <run>/token_values/step_<n>.parquet     a row per row of tokens of each trajectory of the step

A trajectory that was not trained on has its `status` and no lists. The lists are as long as the row's response. NaN
and false stand for what was not computed (TokenValues).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trackway.learner.filtering import FilteredBatch, TrainStatus
from trackway.system import replacing, writing

if TYPE_CHECKING:
    from torch import Tensor

    from trackway.learner.batch import TokenValues

WHAT = "values of tokens"


def write_token_values(path: Path, step: int, batch: FilteredBatch, values: "TokenValues") -> int:
    """Replace the file with the values of the batch's used trajectories, in their order. Returns its bytes.

    Raises StorageError when it cannot be written.
    """
    rows = [
        (trajectory, status, number)
        for trajectory, status in zip(batch.trajectories, batch.statuses, strict=True)
        for number in range(len(trajectory.rows))
    ]
    lengths = iter(values.lengths)
    # Null, and no place in the flat values, for a trajectory that was not trained on.
    ends = [next(lengths) if status is TrainStatus.USED else None for _, status, _ in rows]
    offsets = list(_offsets(ends))
    is_null = pa.array([length is None for length in ends], pa.bool_())

    def lists(flat: "Tensor") -> pa.Array:
        kept = pa.array(np.asarray(flat))
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), kept, mask=is_null)

    table = pa.table(
        {
            "step": pa.array([step] * len(rows), pa.int64()),
            "sample_index": [str(trajectory.tags.sample_index) for trajectory, _, _ in rows],
            "rollout_n": pa.array([trajectory.tags.rollout_n for trajectory, _, _ in rows], pa.int64()),
            "row": pa.array([number for *_, number in rows], pa.int64()),
            "status": [status.value for _, status, _ in rows],
            "logprobs": lists(values.logprobs),
            "entropies": lists(values.entropies),
            "advantages": lists(values.advantages),
            "clipped": lists(values.clipped),
            "kept": lists(values.kept),
        }
    )
    with writing(path, WHAT):
        path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, WHAT) as draft:
        pq.write_table(table, draft, compression="zstd")
    return path.stat().st_size


def _offsets(lengths: list[int | None]) -> Iterator[int]:
    end = 0
    yield end
    for length in lengths:
        end += length or 0
        yield end
