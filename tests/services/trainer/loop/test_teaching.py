"""The teachers of a run: the row's choice, models that are published, and what is refused before the first step."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.serving import served
from trackway.clients.weights import WeightStore
from trackway.deploy.bundled import TINY_MODEL
from trackway.rollout.app import create_app
from trackway.rollout.settings import RolloutSettings
from trackway.run_config.distillation import DistillationConfig
from trackway.trainer.loop.teaching import _PROBE, Teaching, _published, _require_same_tokens
from trackway.wire.agent import Sample, Teacher
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.weights import policy_url

Student = tuple[str, PreTrainedTokenizerBase]
KEY = "distillation.teacher_models.teacher_model.model_path"


def row(data_source: str = "a", **extra_info: object) -> Sample:
    return Sample.model_validate(
        {
            "data_source": data_source,
            "prompt": [{"role": "user", "content": "?"}],
            "reward_model": {"ground_truth": ""},
            "extra_info": {"index": 3, **extra_info},
        }
    )


def teaching(key: str = "data_source", mode: str = "k3", names: str = "ab") -> Teaching:
    config = DistillationConfig.model_validate(
        {
            "enabled": True,
            "teacher_key": key,
            "teacher_models": {f"to-{name}": {"key": name, "model_path": name} for name in names},
            "distillation_loss": {"loss_mode": mode, "topk": 5},
        }
    )
    return Teaching(config, {f"to-{name}": f"model-{name}" for name in names})


def test_the_key_of_a_row_chooses_among_several_teachers():
    assert teaching().of(row("b")) == Teacher(name="to-b", model="model-b", top_k=0)
    assert teaching("level", "forward_kl_topk").of(row(level="a")) == Teacher(name="to-a", model="model-a", top_k=5)
    assert teaching(names="a").of(row("anything")).name == "to-a"


def test_a_row_without_a_teacher_is_refused():
    with pytest.raises(TrackwayError, match=r"expected a data_source that a teacher has \(a, b\), got 'c' in row 3"):
        teaching().of(row("c"))


@pytest.fixture
def student() -> Student:
    return str(TINY_MODEL), AutoTokenizer.from_pretrained(TINY_MODEL)


def test_a_model_is_published_once_as_a_policy_named_by_its_weights(student: Student, tmp_path: Path):
    folder = shutil.copytree(TINY_MODEL, tmp_path / "teacher")
    store = f"{tmp_path}/store"
    names = {_published(KEY, str(given), *student, store) for given in (folder, TINY_MODEL)}

    (name,) = names
    latest = WeightStore(policy_url(store, name)).latest()
    assert name.startswith("teacher-") and latest is not None and latest.version == 1


def with_other_vocabulary(folder: Path) -> Path:
    """The tiny model in `folder`, with the ids of two pieces exchanged."""
    shutil.copytree(TINY_MODEL, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = [piece for piece in vocabulary if len(piece) == 1 and piece in _PROBE][:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def test_another_vocabulary_is_refused_with_both_names(student: Student, tmp_path: Path):
    folder = with_other_vocabulary(tmp_path / "other")

    with pytest.raises(TrackwayError, match=f"the vocabulary of {TINY_MODEL}, got {folder} with another"):
        _published(KEY, str(folder), *student, f"{tmp_path}/store")


def test_another_architecture_is_refused_with_the_way_to_serve_it(student: Student, tmp_path: Path):
    folder = shutil.copytree(TINY_MODEL, tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"num_hidden_layers": 1, "layer_types": ["full_attention"]})
    )

    said = r"got num_hidden_layers 1 instead of 2 in .*name that in the agent service's teach"
    with pytest.raises(TrackwayError, match=said):
        _published(KEY, str(folder), *student, f"{tmp_path}/store")


def test_what_is_no_model_is_refused(student: Student, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(TrackwayError, match="expected a model, a policy or a URL, got ") as refused:
        _published(KEY, str(tmp_path / "empty"), *student, f"{tmp_path}/store")
    assert refused.value.code is ErrorCode.INVALID_REQUEST


@pytest.mark.anyio
async def test_a_service_of_its_own_needs_the_students_vocabulary(student: Student, tmp_path: Path):
    other = AutoTokenizer.from_pretrained(with_other_vocabulary(tmp_path / "other"))
    async with served(create_app(RolloutSettings(model_path=TINY_MODEL, weights_url=None, device="cpu"))) as url:
        await _require_same_tokens("math", f"{url}/", *student)
        with pytest.raises(TrackwayError, match=f"the vocabulary of {TINY_MODEL}, got {url} with another"):
            await _require_same_tokens("math", url, student[0], other)
    with pytest.raises(TrackwayError, match=f"expected a rollout service at {url}, got ConnectError") as gone:
        await _require_same_tokens("math", url, *student)
    assert gone.value.code is ErrorCode.UNAVAILABLE
