"""Exported checkpoints answer as the learner that was saved."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from pydantic import JsonValue
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.services.trainer.learner_settings import learner_config, logprobs_of
from trackway.learner.learner import Learner
from trackway.run_config import resolve
from trackway.trainer.run_state.checkpoint import save_checkpoint
from trackway.trainer.run_state.export import export_checkpoint
from trackway.trainer.run_state.folder import RunFolder
from trackway.wire.errors import TrackwayError
from trackway.wire.trajectory import Trajectory

pytestmark = pytest.mark.slow

Rollout = Callable[..., Trajectory]
Run = tuple[RunFolder, Learner]
IDS = [5, 9, 2, 33, 7, 1, 60]
MODEL = "actor_rollout_ref.model"
LORA = {"lora_rank": 4, "lora_alpha": 8, "lr": 1e-2}


@pytest.fixture
def run_of(tiny_model: Path, tmp_path: Path, rollout: Rollout) -> Callable[..., Run]:
    """A run's folder with the checkpoints of steps 1 and 2, and its learner after step 2."""

    def make(**settings: JsonValue) -> Run:
        learner = Learner(learner_config(tiny_model, **{"lr": 1e-2} | settings))
        run = RunFolder(tmp_path / "outputs" / "my-run")
        run.path.mkdir(parents=True)
        keys = {f"{MODEL}.{name}": value for name, value in settings.items() if name.startswith("lora_")}
        config = resolve({f"{MODEL}.path": str(tiny_model), **keys})
        (run.path / "config.json").write_text(config.model_dump_json())
        for step in (1, 2):
            learner.update([rollout(0, row, float(row), response_ids=[row, 2, 3, 4, 5, 6]) for row in range(2)])
            save_checkpoint(run.checkpoints, step, learner.save, {})
        return run, learner

    return make


def logprobs(model: torch.nn.Module) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([IDS])).logits[0, :-1]
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(IDS[1:]).unsqueeze(-1)).squeeze(-1).tolist()


def loaded(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder)


def test_a_checkpoint_of_a_whole_model_is_a_folder_that_transformers_loads(
    run_of: Callable[..., Run], tiny_model: Path, tmp_path: Path
):
    run, learner = run_of()

    newest = export_checkpoint(run, tmp_path / "newest")
    first = export_checkpoint(run, tmp_path / "first", step=1)

    assert (newest.kind, Path(newest.checkpoint).name) == ("model", "global_step_2")
    assert (first.kind, Path(first.checkpoint).name) == ("model", "global_step_1")
    assert logprobs(loaded(tmp_path / "newest")) == pytest.approx(logprobs_of(learner, IDS), abs=1e-5)
    assert logprobs(loaded(tmp_path / "first")) != pytest.approx(logprobs_of(learner, IDS), abs=1e-3)
    assert (tmp_path / "newest/tokenizer_config.json").read_text() == (tiny_model / "tokenizer_config.json").read_text()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT reads it
def test_a_checkpoint_of_an_adapter_is_loaded_beside_its_base_model_by_peft_and_by_a_new_run(
    run_of: Callable[..., Run], tiny_model: Path, tmp_path: Path
):
    run, learner = run_of(**LORA)
    expected = logprobs_of(learner, IDS)

    adapter = export_checkpoint(run, tmp_path / "adapter")
    whole = export_checkpoint(run, tmp_path / "whole", merge=True)

    assert (adapter.kind, whole.kind) == ("adapter", "model")
    assert adapter.files == ["adapter_config.json", "adapter_model.safetensors"]
    assert logprobs(PeftModel.from_pretrained(loaded(tiny_model), tmp_path / "adapter")) == pytest.approx(
        expected, abs=1e-5
    )
    assert logprobs(loaded(tmp_path / "adapter")) == pytest.approx(expected, abs=1e-5)
    assert logprobs(loaded(tmp_path / "whole")) == pytest.approx(expected, abs=1e-5)
    started = Learner(learner_config(tiny_model, **LORA, lora_adapter_path=str(tmp_path / "adapter")))
    by_folder = Learner(learner_config(tiny_model, lora_adapter_path=str(tmp_path / "adapter")))
    assert logprobs_of(started, IDS) == logprobs_of(by_folder, IDS) == expected
    assert by_folder.config.lora is not None and by_folder.config.lora[:2] == (LORA["lora_rank"], LORA["lora_alpha"])
    assert started.policy.base_logprobs(IDS) == pytest.approx(logprobs(loaded(tiny_model)), abs=1e-5)


def test_a_checkpoint_is_exported_in_the_type_of_the_weights_that_were_published(
    run_of: Callable[..., Run], tmp_path: Path
):
    run, learner = run_of(dtype="bfloat16")

    export_checkpoint(run, tmp_path / "exported")

    learner.export(tmp_path / "published")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("exported", "published"))
    assert {tensor.dtype for tensor in ours.values()} == {torch.bfloat16}
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_a_checkpoint_with_the_whole_model_is_exported_without_the_model_that_the_run_started_from(
    run_of: Callable[..., Run], tmp_path: Path
):
    run, learner = run_of(**{"checkpoint.save_contents": ["model", "hf_model"]})
    without_base = resolve({f"{MODEL}.path": "/nowhere"})
    (run.path / "config.json").write_text(without_base.model_dump_json())

    export_checkpoint(run, tmp_path / "exported")

    assert logprobs(loaded(tmp_path / "exported")) == pytest.approx(logprobs_of(learner, IDS), abs=1e-5)


def test_what_cannot_be_exported_is_refused_and_nothing_is_written(run_of: Callable[..., Run], tmp_path: Path):
    run, _ = run_of()

    def refused(step: int | None = None) -> str:
        with pytest.raises(TrackwayError) as raised:
            export_checkpoint(run, tmp_path / "out", step)
        assert not (tmp_path / "out").exists()
        return raised.value.message

    assert refused(step=7).startswith("expected a checkpoint of step 7 of my-run, got 1, 2; set trainer.save_freq")
    weights = run.checkpoints / "global_step_2/actor/model.safetensors"
    save_file(load_file(weights) | {"model.norm.weight": torch.zeros(32)}, weights)
    assert "global_step_2 is damaged: actor/model.safetensors: expected sha256" in refused()
    with pytest.raises(TrackwayError, match=r"expected a target that does not exist, got .*/outputs; give another one"):
        export_checkpoint(run, tmp_path / "outputs")
    with pytest.raises(TrackwayError, match="expected a checkpoint of other, got none"):
        export_checkpoint(RunFolder(tmp_path / "other"), tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "keys", "error"),
    [
        ({}, {"lora_rank": 2}, "got r 4 instead of 2; set model.lora_rank"),
        ({"use_rslora": True}, {}, "got use_rslora True instead of False"),
        ({"bias": "all", "lora_alpha": 3}, {}, "got lora_alpha 3.0 instead of 8.0, bias all instead of none"),
        ({"r": "x"}, {}, r"expected PEFT's adapter_config\.json in .*, got 1 errors in it"),
        ({}, {"target_modules": ["q_proj"]}, r"got a difference at model\.layers\.0\.mlp\.down_proj, "),
    ],
)
def test_an_adapter_that_the_keys_do_not_describe_is_refused(
    run_of: Callable[..., Run],
    tiny_model: Path,
    tmp_path: Path,
    change: dict[str, object],
    keys: dict[str, object],
    error: str,
):
    run, _ = run_of(**LORA)
    export_checkpoint(run, tmp_path / "adapter")
    file = tmp_path / "adapter/adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))

    with pytest.raises(ValueError, match=error):
        Learner(learner_config(tiny_model, **LORA | keys, lora_adapter_path=str(tmp_path / "adapter")))
